# SPDX-License-Identifier: Apache-2.0
"""Static numbers, the dtype of accumulators, and the range of small dtypes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

_limits: Any = jnp.finfo  # it has no annotations
LOWEST = float(np.finfo(np.float32).min)  # in place of minus infinity, where a difference would be NaN
_BEYOND_FLOATS = 1 << 1023
LOG2_E = math.log2(math.e)  # the hardware computes exponentials in base 2


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Return the accumulator dtype: float32, or float64 for float64."""
    return jnp.dtype("float64" if jnp.dtype(dtype) == np.float64 else "float32")


def has_small_range(dtype: DTypeLike) -> bool:
    """Return whether a dtype overflows long before float32 does, e.g. float16 (65,504) but not bfloat16."""
    return float(_limits(dtype).max) < float(_limits("bfloat16").max)


def is_integer(value: Any) -> bool:
    """Return whether a value is a Python or NumPy integer; booleans are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a Python or NumPy integer or float; booleans, and integers beyond floats, are not."""
    if is_integer(value):
        return bool(-_BEYOND_FLOATS < value < _BEYOND_FLOATS)
    return isinstance(value, float | np.floating)


def at_most_zero(x: jax.Array) -> jax.Array:
    """Return `min(x, 0)` with a derivative of 1: only rounding makes `x` positive."""
    return x - lax.stop_gradient(jnp.maximum(x, 0))


# Gradients in a dtype of small range, such as float16: float32 values become operands without overflow or underflow. A
# product of float32 factors may be representable where one factor is not, e.g. a cotangent of 1e6 times a row factor of
# 1e-3. Values are therefore multiplied with a power of two, which changes no digits, before they are rounded.


def normalized(x: jax.Array, axes: tuple[int, ...] = (1,)) -> tuple[jax.Array, jax.Array]:
    """Return values whose largest magnitude along `axes` is between 0.5 and 1, and the factors that restore them.

    The factors have length 1 along `axes`.
    """
    exponent = exponents(x, axes)
    return x * power_of_two(-exponent), power_of_two(exponent)


def balanced(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two arrays with the same outer products row by row, their rows scaled to similar magnitudes.

    Neither overflows in the operands' dtype unless the outer product of their rows does, too.
    """
    left, right = (x.astype(accumulator(x.dtype)) for x in (left, right))
    shift = (exponents(right, (1,)) - exponents(left, (1,))) // 2
    return left * power_of_two(shift), right * power_of_two(-shift)


def exponents(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the exponent of the largest finite magnitude along `axes`, of length 1 there; zero if that is 0."""
    sizes = jnp.abs(lax.stop_gradient(x))
    largest = jnp.max(jnp.where(sizes < jnp.inf, sizes, 0), axis=axes, keepdims=True, initial=0)
    exponent: jax.Array = jnp.frexp(largest)[1]
    return exponent


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Return `2 ** exponent` in float32; made of bits, because `exp2` is not exact on every device."""
    bits = (jnp.clip(exponent, -126, 127).astype(jnp.int32) + 127) << 23
    power: jax.Array = lax.bitcast_convert_type(bits, jnp.float32)
    return power
