# SPDX-License-Identifier: Apache-2.0
"""Configuration values that can be decoded from JSON without a type."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.values.scalars import Takes, given_text, python_numbers

_SCALARS = (bool, int, float, str)


def plain(value: Any, what: str) -> Any:
    """Return `value` as JSON would return it, with tuples for lists.

    Raises:
        ConfigError: The value is not plain data.
    """
    value = python_numbers(value, Takes.NUMBERS)
    if isinstance(value, np.str_ | np.bytes_):
        value = value.item()
    if isinstance(value, list | tuple):
        return tuple(plain(item, what) for item in value)
    if value is None or (type(value) in _SCALARS and (type(value) is not float or math.isfinite(value))):
        return value
    if isinstance(value, jax.core.Tracer):
        raise ConfigError(
            f"{what} must be a number, a text, a boolean, None or a tuple of those, got {given_text(value)}."
        )
    raise ConfigError(
        f"{what} must be a number, a text, a boolean, None or a tuple of those, got {value!r}; for a dtype or an enum "
        "pass its name. It is static under jit."
    )
