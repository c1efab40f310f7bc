# SPDX-License-Identifier: Apache-2.0
"""Gradients in a dtype of small range, such as float16: float32 values become operands without overflow or underflow.

A product of float32 factors may be representable where one factor is not, e.g. a cotangent of 1e6 times a row factor of
1e-3. Values are therefore multiplied with a power of two, which changes no digits, before they are rounded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._numbers import accumulator


def normalized(x: jax.Array, axes: tuple[int, ...] = (1,)) -> tuple[jax.Array, jax.Array]:
    """Return values whose largest magnitude along `axes` is between 0.5 and 1, and the factors that restore them.

    The factors have length 1 along `axes`.
    """
    exponent = _exponents(x, axes)
    return x * _power_of_two(-exponent), _power_of_two(exponent)


def balanced(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two arrays with the same outer products row by row, their rows scaled to similar magnitudes.

    Neither overflows in the operands' dtype unless the outer product of their rows does, too.
    """
    left, right = (x.astype(accumulator(x.dtype)) for x in (left, right))
    shift = (_exponents(right, (1,)) - _exponents(left, (1,))) // 2
    return left * _power_of_two(shift), right * _power_of_two(-shift)


def _exponents(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the exponent of the largest magnitude along `axes`, of length 1 there; zero if that is 0 or not finite."""
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)), axis=axes, keepdims=True, initial=0)
    exponent: jax.Array = jnp.frexp(jnp.where((largest > 0) & (largest < jnp.inf), largest, 0))[1]
    return exponent


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return `2 ** exponent` in float32; made of bits, because `exp2` is not exact on every device."""
    bits = (jnp.clip(exponent, -126, 127).astype(jnp.int32) + 127) << 23
    power: jax.Array = lax.bitcast_convert_type(bits, jnp.float32)
    return power
