# SPDX-License-Identifier: Apache-2.0
"""Distinct calls: the cost of each when a program with many of them is traced and lowered."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.sample import Block, Layer, block, layer
from benchmarks.timing import Timing, compare
from ejkernel.ops import ConfigSelectorChain, Executor

CALLS = 200
MANY = (1000, 5000)  # numbers of calls, to see that the cost grows in proportion
PLAIN, OURS = "plain JAX", "ejkernel"


def program(plain: Callable[..., Any] | None, kernel: Any, count: int, *, gradient: bool) -> Callable[..., Any]:
    """Return a fresh function of `count` calls, each with a different static argument."""
    executor: Executor[Any, Any] = Executor(ConfigSelectorChain())

    def forward(x: Any, w: Any) -> Any:
        for index in range(count):
            scale = 1.5 + index / 64
            x = executor(kernel, x, w, scale=scale) if plain is None else plain(x, w, scale=scale)
        return x.sum()

    return jax.grad(forward, argnums=(0, 1)) if gradient else forward


def seconds(plain: Callable[..., Any] | None, kernel: Any, count: int, *, gradient: bool) -> float:
    """Return the processor time of tracing and lowering such a program; it runs in one thread."""
    x = jnp.ones((16, 16), jnp.float32)
    function = jax.jit(program(plain, kernel, count, gradient=gradient))
    start = time.process_time()
    function.lower(x, x)
    return time.process_time() - start


def distinct_calls(rounds: int) -> dict[str, dict[str, Timing]]:
    """Compare programs of distinct calls with plain JAX's, forward and gradient, of a usual kernel and a tiny one."""
    found = {}
    for name, plain, kind in (("a usual kernel", block, Block), ("three operations", layer, Layer)):
        for gradient in (False, True):
            taken: dict[str, list[float]] = {PLAIN: [], OURS: []}
            for _ in range(rounds):
                taken[PLAIN].append(seconds(plain, None, CALLS, gradient=gradient))
                taken[OURS].append(seconds(None, kind(), CALLS, gradient=gradient))
            found[f"{name}, {'gradient' if gradient else 'forward'}"] = compare(taken)
    return found


def growth() -> dict[str, float]:
    """Return the milliseconds a call of programs of many distinct calls, and when the larger is traced again."""
    kernel, found = Layer(), {}
    x = jnp.ones((16, 16), jnp.float32)
    for count in MANY:
        function = program(None, kernel, count, gradient=False)
        for step in ("first", "again"):
            start = time.process_time()
            jax.jit(lambda *arrays, f=function: f(*arrays)).lower(x, x)
            found[f"{count} calls, {step}"] = round((time.process_time() - start) / count * 1e3, 4)
    return found
