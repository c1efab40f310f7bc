# SPDX-License-Identifier: Apache-2.0
"""Options of several operations in canonical form."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from ejkernel.ops.errors import ArgumentError, ConfigError
from ejkernel.ops.utils.messages.names import did_you_mean
from ejkernel.ops.utils.values.scalars import given_text


def canonical_flag(name: str, value: Any) -> bool:
    """Return a Python or NumPy boolean as a bool."""
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{name} must be True or False, got {given_text(value)}.")
    return bool(value)


def canonical_precision(value: Any) -> str | None:
    """Return the name of a matmul precision in lower case; `None` for JAX's default."""
    if value is None:
        return None
    name = value.name if isinstance(value, jax.lax.Precision) else value
    if not isinstance(name, str) or name.upper() not in jax.lax.Precision.__members__:
        raise ArgumentError(
            f"precision must be one of default, high, highest, a jax.lax.Precision, or None; got {value!r}"
            f"{did_you_mean(value, ('default', 'high', 'highest'))}"
        )
    return name.lower()


def check_integer(name: str, value: object, allowed: Collection[int], wanted: str = "") -> None:
    """Check a launch parameter.

    Raises:
        ConfigError: It is not an integer, or not allowed.
    """
    if type(value) is not int or value not in allowed:
        raise ConfigError(f"{name} must be {wanted or ' or '.join(map(str, allowed))}, got {value!r}.")
