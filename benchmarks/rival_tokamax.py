# SPDX-License-Identifier: Apache-2.0
"""Probe of Tokamax's layer normalisation; run by `benchmarks.rivals` in that library's environment."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import tokamax

from benchmarks.report import environment
from benchmarks.timing import interleave, per_call


def layer_norm(x: Any, scale: Any, offset: Any) -> Any:
    """The plain function."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale + offset


def main() -> None:
    """Print the result as JSON."""
    x, scale, offset = jnp.ones((16, 16), jnp.float32), jnp.ones(16), jnp.zeros(16)
    plain = jax.jit(layer_norm)
    around: Any = jax.jit(tokamax.layer_norm)
    calls = {
        "jax.jit(function)(x, scale, offset)": lambda: plain(x, scale, offset),
        "layer_norm(x, scale, offset)": lambda: tokamax.layer_norm(x, scale, offset),
        "jax.jit(layer_norm)(x, scale, offset)": lambda: around(x, scale, offset),
    }
    timed = interleave({name: per_call(call) for name, call in calls.items()}, int(sys.argv[1]))
    print(json.dumps({"environment": environment(), "calls": {name: t.data() for name, t in timed.items()}}))


if __name__ == "__main__":
    main()
