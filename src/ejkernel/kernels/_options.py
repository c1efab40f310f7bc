# SPDX-License-Identifier: Apache-2.0
"""Options of several operations in canonical form."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax
import numpy as np

from ejkernel.ops.errors import ArgumentError, ConfigError
from ejkernel.ops.utils.messages.names import did_you_mean
from ejkernel.ops.utils.values.scalars import given_text

POSITIVE: Final = range(1, 1 << 62)


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


def check_parameters(params: Any, **allowed: range | tuple[int, ...] | tuple[str, ...]) -> None:
    """Check launch parameters: the given fields, and all flags.

    Args:
        params: A dataclass. A field with the default `None` may be `None`; one with a boolean default is a flag.
        **allowed: The allowed values of fields, all of one type.

    Raises:
        ConfigError: A field has another value.
    """
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if isinstance(field.default, bool):
            is_allowed, wanted = type(value) is bool, "True or False"
        elif field.name in allowed and not (value is None and field.default is None):
            values = allowed[field.name]
            is_allowed = type(value) is type(values[0]) and value in values
            wanted = _in_words(values, optional=field.default is None)
        else:
            continue
        if not is_allowed:
            raise ConfigError(f"{field.name} must be {wanted}, got {value!r}.")


def _in_words(values: range | tuple[int, ...] | tuple[str, ...], *, optional: bool) -> str:
    if isinstance(values, range):
        multiple = "" if values.step == 1 else f"a multiple of {values.step} "
        found = "a positive integer" if values == POSITIVE else f"{multiple}from {values[0]} to {values[-1]}"
        return f"{found} or None" if optional else found
    *most, last = [*map(repr, values), *(["None"] if optional else [])]
    return f"{', '.join(most)} or {last}" if most else last
