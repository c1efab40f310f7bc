# SPDX-License-Identifier: Apache-2.0
"""The epilogue in registers: the functions of `kernels/grouped_matmul/epilogue.py`, in fast instructions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax


def finished(products: Sequence[jax.Array], row_scale: jax.Array | None, activation: str | None) -> jax.Array:
    """Return the result for a piece of each product, with one factor per row."""
    first, *others = products
    out = first if activation is None else _ACTIVATIONS[activation](first)
    for other in others:
        out = out * other
    return out if row_scale is None else out * lax.broadcast_in_dim(row_scale, out.shape, [0])


def _times_sigmoid(x: jax.Array, at: jax.Array) -> jax.Array:
    """Return `x * sigmoid(at)`; a reciprocal square root is one instruction, a division is many."""
    # The tanh instruction is too coarse for small results.
    root = lax.rsqrt(1.0 + jnp.exp(-at))
    return x * root * root


def _silu(x: jax.Array) -> jax.Array:
    return _times_sigmoid(x, x)


def _gelu(x: jax.Array) -> jax.Array:
    # (1 + tanh(y)) / 2 is the sigmoid of 2 y, which does not cancel when tanh is near -1.
    return _times_sigmoid(x, x * (2 * math.sqrt(2 / math.pi)) * (1.0 + 0.044715 * (x * x)))


def _relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, jnp.zeros_like(x))


def _relu2(x: jax.Array) -> jax.Array:
    return _relu(x) * _relu(x)


_ACTIVATIONS: Final[Mapping[str, Callable[[jax.Array], jax.Array]]] = {
    "silu": _silu,
    "gelu": _gelu,
    "relu": _relu,
    "relu2": _relu2,
}
