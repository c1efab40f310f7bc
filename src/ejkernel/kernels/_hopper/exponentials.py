# SPDX-License-Identifier: Apache-2.0
"""Powers of two on the FMA units, which relieve the slower unit for transcendental functions."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

_TO_INTEGER = 1.5 * 2.0**23
_LEAST = -125.0  # the exponent of the smallest power that is a normal number
_POWER_OF_TWO = (0.05517167, 0.24261113, 0.69326099, 0.99992807)  # on [-0.5, 0.5], cubic coefficient first


def exp2_by_fma(x: Any) -> Any:
    """Return 2 to the power of finite numbers of at most 100 without the unit for transcendental functions.

    The largest relative error is 1e-4; a power below 2^-125 becomes about as small.
    """
    x = jnp.maximum(x, _LEAST)
    shifted = x + _TO_INTEGER  # rounds to an integer, in the low bits
    rest = x - (shifted - _TO_INTEGER)
    power = functools.reduce(lambda sum, coefficient: sum * rest + coefficient, _POWER_OF_TWO[1:], _POWER_OF_TWO[0])
    exponent = lax.shift_left(lax.bitcast_convert_type(shifted, jnp.int32), np.int32(23))
    return lax.bitcast_convert_type(lax.bitcast_convert_type(power, jnp.int32) + exponent, jnp.float32)
