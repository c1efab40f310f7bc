# SPDX-License-Identifier: Apache-2.0
"""Eager calls: what a call through the library takes beside the same function under `jax.jit`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.sample import Layer, LayerConfig, executor_that_knows, layer
from benchmarks.timing import Timing, interleave, per_call

BAR = 1.6  # of `executor(kernel, ...)` to `jax.jit`, a call of 16 x 16
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


def module_calls(rounds: int) -> dict[str, Timing]:
    """Compare an eager call of a module with the same module under `jax.jit`."""
    from ejkernel.modules import flash_attention

    q = jnp.ones((1, 16, 2, 16), jnp.float32)
    jitted: Any = jax.jit(functools.partial(flash_attention, causal=True))
    calls = {
        "jax.jit(flash_attention)(q, k, v)": lambda: jitted(q, q, q),
        "flash_attention(q, k, v, causal=True)": lambda: flash_attention(q, q, q, causal=True),
    }
    return interleave({name: per_call(call) for name, call in calls.items()}, rounds)
