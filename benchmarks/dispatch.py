# SPDX-License-Identifier: Apache-2.0
"""Eager calls: the overhead of a call through the library over the same function under `jax.jit`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sample import Applies, Layer, LayerConfig, applied, executor_that_knows, layer
from benchmarks.timing import Timing, interleave, per_call

BASE = "jax.jit(function)(a, b, scale=2.0)"
MAIN = "executor(kernel, a, b, scale=2.0)"


def eager_calls(rounds: int) -> dict[str, Timing]:
    """Compare the ways to call the sample operation on 16 x 16 arrays."""
    a = b = jnp.ones((16, 16), jnp.float32)
    kernel, plain, config = Layer(), jax.jit(layer, static_argnames="scale"), LayerConfig(block=64)
    executor = executor_that_knows(kernel, a, b, scale=2.0)
    compiled = executor.compile(kernel, a, b, scale=2.0)
    calls = {
        BASE: lambda: plain(a, b, scale=2.0),
        MAIN: lambda: executor(kernel, a, b, scale=2.0),
        "kernel(a, b, scale=2.0)": lambda: kernel(a, b, scale=2.0),
        "executor(kernel, a, b, scale=2.0, cfg=config)": lambda: executor(kernel, a, b, scale=2.0, cfg=config),
        "executor.compile(kernel, a, b, scale=2.0)(a, b)": lambda: compiled(a, b),
    }
    return interleave({name: per_call(call) for name, call in calls.items()}, rounds)


@dataclasses.dataclass(frozen=True)
class Options:
    """A static argument that people write."""

    causal: bool = True
    scale: float = 0.5


def call_forms(rounds: int) -> dict[str, dict[str, Timing]]:
    """Compare calls of every form with the plain function under `jax.jit`, static where the kernel's are."""
    a, host = jnp.ones((16, 16), jnp.float32), np.ones((16, 16), np.float32)
    kernel, config = Layer(), LayerConfig(block=64)
    executor = executor_that_knows(kernel, a, a, scale=2.0)
    plain, applies = jax.jit(layer, static_argnames="scale"), Applies()
    traced, static = jax.jit(applied), jax.jit(applied, static_argnums=1)
    tree, options, pair = {"w": a, "b": a}, Options(), (1, 2)
    forms: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "arrays": (lambda: plain(a, a), lambda: executor(kernel, a, a)),
        "arrays, kernel(a, b)": (lambda: plain(a, a), lambda: kernel(a, a)),
        "a static float": (lambda: plain(a, a, scale=2.0), lambda: executor(kernel, a, a, scale=2.0)),
        "the static float 0.0": (lambda: plain(a, a, scale=0.0), lambda: executor(kernel, a, a, scale=0.0)),
        "an array by keyword": (lambda: plain(a, b=a), lambda: executor(kernel, a, b=a)),
        "arrays of NumPy": (lambda: plain(host, host), lambda: executor(kernel, host, host)),
        "cfg=": (lambda: plain(a, a), lambda: executor(kernel, a, a, cfg=config)),
        "a dictionary of arrays": (lambda: traced(a, tree), lambda: applies(a, tree)),
        "a static tuple": (lambda: static(a, pair), lambda: applies(a, pair)),
        "a static dataclass": (lambda: static(a, options), lambda: applies(a, options)),
        "a static function": (lambda: static(a, jnp.sin), lambda: applies(a, jnp.sin)),
    }
    return {
        form: interleave({"jax.jit": per_call(base), "ejkernel": per_call(ours)}, rounds)
        for form, (base, ours) in forms.items()
    }


def module_calls(rounds: int) -> dict[str, dict[str, Timing]]:
    """Compare eager calls of modules with the same modules under `jax.jit`."""
    from ejkernel.modules import flash_attention, rms_norm

    x, weight, q = (jnp.ones(shape, jnp.float32) for shape in ((16, 16), (16,), (1, 16, 2, 16)))
    norm: Any = jax.jit(rms_norm)
    attention: Any = jax.jit(functools.partial(flash_attention, causal=True))
    modules = {
        "rms_norm": {
            "jax.jit(rms_norm)(x, weight)": lambda: norm(x, weight),
            "rms_norm(x, weight)": lambda: rms_norm(x, weight),
        },
        "flash_attention": {
            "jax.jit(flash_attention)(q, k, v)": lambda: attention(q, q, q),
            "flash_attention(q, k, v, causal=True)": lambda: flash_attention(q, q, q, causal=True),
        },
    }
    return {
        module: interleave({name: per_call(call) for name, call in calls.items()}, rounds)
        for module, calls in modules.items()
    }
