# SPDX-License-Identifier: Apache-2.0
"""Calls inside a traced program: they cost nothing when it runs, and little while it is traced and compiled."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.sample import Layer, executor_that_knows, layer
from benchmarks.timing import Timing, compare

CALLS = 24
PLAIN, STAMPS = "plain JAX", ("none", "hash", "json")
_STAMP = "EJKERNEL_OPS_STAMP"


@contextlib.contextmanager
def stamping(mode: str) -> Iterator[None]:
    """Set how calls are labelled inside the `with` block."""
    before = os.environ.get(_STAMP)
    os.environ[_STAMP] = mode
    try:
        yield
    finally:
        if before is None:
            del os.environ[_STAMP]
        else:
            os.environ[_STAMP] = before


def program(way: str, *, scales: Sequence[float], gradient: bool) -> Callable[..., Any]:
    """Return a fresh function of `CALLS` layers, plain or of a kernel that nothing has seen yet."""
    x = jnp.ones((16, 16), jnp.float32)
    kernel = Layer()
    executor = executor_that_knows(kernel, x, x, scale=scales[0])

    def forward(x: Any, weights: Any) -> Any:
        for weight, scale in zip(weights, scales, strict=True):
            x = layer(x, weight, scale=scale) if way == PLAIN else executor(kernel, x, weight, scale=scale)
        return x.sum()

    return jax.grad(forward, argnums=(0, 1)) if gradient else forward


def scales_of(*, equal: bool) -> list[float]:
    """Return a static argument for each layer: one for all, or its own for each."""
    return [1.5 if equal else 1.5 + index / 64 for index in range(CALLS)]


def arguments() -> tuple[Any, Any]:
    """Return the input and the layers' weights."""
    return jnp.ones((16, 16), jnp.float32), [jnp.ones((16, 16), jnp.float32)] * CALLS


def build_times(way: str, **options: Any) -> tuple[float, float]:
    """Return the seconds for tracing and lowering one fresh program, and for compiling it."""
    function, given = jax.jit(program(way, **options)), arguments()
    with stamping(way) if way != PLAIN else contextlib.nullcontext():
        start = time.perf_counter()
        lowered = function.lower(*given)
        middle = time.perf_counter()
        lowered.compile()
        return middle - start, time.perf_counter() - middle


def build_costs(rounds: int, *, equal: bool, gradient: bool) -> dict[str, dict[str, Timing]]:
    """Compare trace-and-lower and compile times of plain JAX and of every way to stamp."""
    ways = (PLAIN, *STAMPS)
    traced: dict[str, list[float]] = {way: [] for way in ways}
    compiled: dict[str, list[float]] = {way: [] for way in ways}
    for index in range(-1, rounds):  # the first round warms JAX's own caches
        for way in (*ways[index % 4 :], *ways[: index % 4]):
            trace, build = build_times(way, scales=scales_of(equal=equal), gradient=gradient)
            if index >= 0:
                traced[way].append(trace)
                compiled[way].append(build)
    return {"trace and lower": compare(traced), "compile": compare(compiled)}


def optimised(way: str, *, equal: bool, gradient: bool) -> str:
    """Return the optimised program without attributes, metadata and names."""
    function = jax.jit(program(way, scales=scales_of(equal=equal), gradient=gradient))
    with stamping(way) if way != PLAIN else contextlib.nullcontext():
        text = function.lower(*arguments()).compile().as_text()
    assert text is not None  # XLA prints programs for these devices
    return strip(text)


def strip(text: str) -> str:
    """Return HLO text with neither tables of source positions nor attributes nor the names that XLA counts up.

    >>> strip('%add.7 = f32[] add(%x.1, %x.1), metadata={op_name="a"}')
    '%0 = f32[] add(%1, %1)'
    """
    text = re.sub(r"(?m)^HloModule .*$", "", text)
    text = re.sub(r"(?ms)^(FileNames|FunctionNames|FileLocations|StackFrames)\n.*?(?=^\s*$)", "", text)
    text = _without(", frontend_attributes={", _without(", metadata={", text))
    names: dict[str, str] = {}
    text = re.sub(r"%[\w.\-]+", lambda match: names.setdefault(match[0], f"%{len(names)}"), text)
    return text.strip()


def _without(opening: str, text: str) -> str:
    """Return `text` without the parts from `opening` to the brace that closes it; they contain unquoted JSON."""
    kept, *rest = text.split(opening)
    for part in rest:
        depth, end = 1, 0
        while depth:
            depth += {"{": 1, "}": -1}.get(part[end], 0)
            end += 1
        kept += part[end:]
    return kept


def differing_programs() -> list[str]:
    """Return the programs that differ from plain JAX's after optimisation: none are expected."""
    differing = []
    for equal in (True, False):
        for gradient in (False, True):
            plain = optimised(PLAIN, equal=equal, gradient=gradient)
            differing += [
                f"{stamp}, {'equal' if equal else 'different'} layers, {'gradient' if gradient else 'forward'}"
                for stamp in STAMPS
                if optimised(stamp, equal=equal, gradient=gradient) != plain
            ]
    return differing
