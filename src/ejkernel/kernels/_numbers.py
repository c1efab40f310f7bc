# SPDX-License-Identifier: Apache-2.0
"""Static numbers, and the dtype of accumulators."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

_limits: Any = jnp.finfo  # it has no annotations
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
    """Return whether a value is a Python or NumPy integer or float; booleans are not."""
    return is_integer(value) or isinstance(value, float | np.floating)
