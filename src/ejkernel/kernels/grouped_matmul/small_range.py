# SPDX-License-Identifier: Apache-2.0
"""Gradients in a dtype of small range, such as float16: float32 values become operands without overflow or underflow.

A product of float32 factors may be representable where one factor is not, e.g. a cotangent of 1e6 times a row factor of
1e-3. Every row is therefore multiplied with a power of two, which changes no digits, before it is rounded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._numbers import accumulator


def normalized(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return rows whose largest magnitude is between 0.5 and 1, and the factors `[rows, 1]` that were divided out."""
    exponent = _exponents(rows)
    return rows * _power_of_two(-exponent), _power_of_two(exponent)


def balanced(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two arrays with the same outer products row by row, their rows scaled to similar magnitudes.

    Neither overflows in the operands' dtype unless the outer product of their rows does, too.
    """
    left, right = (x.astype(accumulator(x.dtype)) for x in (left, right))
    shift = (_exponents(right) - _exponents(left)) // 2
    return left * _power_of_two(shift), right * _power_of_two(-shift)


def _exponents(rows: jax.Array) -> jax.Array:
    """Return the exponent of the largest magnitude of each row, `[rows, 1]`; zero without a finite one but 0."""
    largest = lax.stop_gradient(jnp.max(jnp.abs(rows), axis=1, keepdims=True, initial=0))
    exponent: jax.Array = jnp.frexp(jnp.where((largest > 0) & (largest < jnp.inf), largest, 0))[1]
    return exponent


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return `2 ** exponent` in float32; made of bits, because `exp2` is not exact on every device."""
    bits = (jnp.clip(exponent, -126, 127).astype(jnp.int32) + 127) << 23
    power: jax.Array = lax.bitcast_convert_type(bits, jnp.float32)
    return power
