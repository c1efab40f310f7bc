# SPDX-License-Identifier: Apache-2.0
"""Scalars of NumPy and JAX as Python numbers, and the parameters of a function that take Python numbers."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import math
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.error_text import value_text
from ejkernel.ops.utils.values.signature import type_text


class Takes(enum.Enum):
    """The kind of values that a parameter takes, according to its signature."""

    ARRAYS = "arrays"  # NumPy and JAX scalars stay arrays
    STATIC = "static values"  # a NumPy scalar becomes a Python number; arrays without axes stay arrays
    NUMBERS = "numbers"  # arrays without axes become Python numbers, too


_NUMBERS: Final = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS: Final = (tuple, list, collections.abc.Sequence)
_UNRESOLVED: Final = (NameError, TypeError, SyntaxError, AttributeError)


def python_numbers(value: Any, takes: Takes) -> Any:
    """Return `value` with Python numbers for concrete scalars, also inside tuples and lists.

    `np.float32(0.1)` becomes `float(np.float32(0.1))`, which is not `0.1`. Tracers and all other values are unchanged.
    A container without concrete scalars is returned as the same object.

    Args:
        value: An argument of a call.
        takes: The kind of values that the parameter takes.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        items = [python_numbers(item, takes) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else kind(items)
    if takes is Takes.ARRAYS or not (isinstance(value, np.generic) or (takes is Takes.NUMBERS and _is_scalar(value))):
        return value
    return _number(value)


def _is_scalar(value: Any) -> bool:
    """Return whether a value is a concrete array without axes whose data this process can read."""
    if isinstance(value, np.ndarray):
        return value.ndim == 0
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer) or value.ndim:
        return False
    return (value.is_fully_addressable or value.is_fully_replicated) and not value.is_deleted()


def _number(value: Any) -> Any:
    for kind, python in ((np.bool_, bool), (jnp.integer, int), (jnp.floating, float), (jnp.complexfloating, complex)):
        if jnp.issubdtype(value.dtype, kind):
            return python(value)
    return value  # a date, a text, a random key


HOW_TO_KNOW: Final = "compute it with NumPy or math instead of jax.numpy, or name it in static_argnames of jax.jit"


def given_text(value: Any) -> str:
    """Return the text for error messages about the value of an argument that must be static."""
    found = next((leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, jax.core.Tracer)), None)
    if found is None:
        return value_text(value)
    shown = type_text(found)
    if found.shape:
        return f"an array, {shown}; pass a Python or NumPy number"
    return f"a traced value, {shown}, whose value is unknown at compile time; {HOW_TO_KNOW}"


def resolved_annotations(thing: object) -> dict[str, Any]:
    """Return the annotations of a function or class that can be resolved."""
    if not callable(thing):
        return {}
    try:
        return typing.get_type_hints(thing)
    except _UNRESOLVED:
        pass  # an annotation may be only for type checkers: resolve them one at a time
    found: dict[str, Any] = {}
    for owner in reversed(thing.__mro__) if isinstance(thing, type) else (thing,):
        scope = getattr(owner, "__globals__", None) or vars(sys.modules.get(getattr(owner, "__module__", ""), object))
        for name, annotation in inspect.get_annotations(owner).items():
            alone = types.SimpleNamespace(__annotations__={name: annotation})
            try:
                found |= typing.get_type_hints(alone, globalns=dict(scope))
            except _UNRESOLVED:
                continue
    return found


def takes_of(parameter: inspect.Parameter, annotations: Mapping[str, Any], *, by_position: bool = False) -> Takes:
    """Return the kind of values that a parameter takes.

    A parameter takes numbers if its annotation names only Python scalars, e.g. `float | None` or `tuple[int, int]`.
    A parameter without an annotation takes numbers by keyword if its default is a Python number, and by position if
    its default is a boolean: `kernel(x, np.float32(2))` is a call with two operands. A keyword-only parameter without
    an annotation or such a default takes static values. All other parameters take arrays.

    Args:
        parameter: The parameter.
        annotations: The annotations of its function, from `resolved_annotations`.
        by_position: Whether a positional parameter is passed by position.
    """
    annotation = annotations.get(parameter.name, Any)
    if annotation is not Any and annotation is not object:
        return Takes.NUMBERS if _names_numbers(annotation) else Takes.ARRAYS
    keyword_only = parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD)
    numbers = bool if by_position and not keyword_only else bool | int | float | complex
    if isinstance(parameter.default, numbers):
        return Takes.NUMBERS
    return Takes.STATIC if keyword_only else Takes.ARRAYS


def _names_numbers(annotation: Any) -> bool:
    """Return whether an annotation names only Python scalars and containers of them."""
    if annotation is None or annotation is Ellipsis:
        return True
    if isinstance(annotation, type):
        return annotation in _NUMBERS or issubclass(annotation, np.generic)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal or (isinstance(origin, type) and issubclass(origin, np.generic)):
        return True
    if origin is typing.Annotated:
        return _names_numbers(args[0])
    if origin in (typing.Union, types.UnionType) or origin in _CONTAINERS:
        return all(map(_names_numbers, args))
    return False


_PLAIN = (bool, int, float, str)


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
    if value is None or (type(value) in _PLAIN and (type(value) is not float or math.isfinite(value))):
        return value
    wanted = f"{what} must be a number, a text, a boolean, None or a tuple of those"
    if isinstance(value, jax.core.Tracer):
        raise ConfigError(f"{wanted}, got {given_text(value)}.")
    raise ConfigError(f"{wanted}, got {value!r}; for a dtype or an enum pass its name. It is static under jit.")
