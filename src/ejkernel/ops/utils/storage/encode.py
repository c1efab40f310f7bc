# SPDX-License-Identifier: Apache-2.0
"""Encoding of Python objects as plain JSON data, and as canonical JSON text that is the same in all processes."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import dtypes as jax_dtypes  # also registers names such as "bfloat16" with NumPy

from ejkernel.ops.errors import SerializationError
from ejkernel.ops.utils.error_text import shortened

MAX_DEPTH = 64  # deeper data is a cycle or an attack; this stops well before Python's recursion limit
_DTYPE_NAME = re.compile(r"(bool|bfloat|complex|float|u?int)[0-9a-z_]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SHOWN = 60  # maximum characters of a value or key in a message
_FLOAT0 = "float0"  # JAX's dtype for gradients of integers: a structured dtype without a NumPy name


def to_data(obj: object) -> Any:
    """Return `obj` as plain JSON data: only `None`, bool, int, float, str, list and dict.

    Dataclasses and named tuples become dicts of their fields, enum members their value, dtypes their name, sets a
    list sorted by its items' JSON, NumPy scalars Python numbers.

    Raises:
        SerializationError: Something inside has no JSON form: NaN, an infinity, a key that is not a string, an array,
            a callable, or any other object. The message starts with its path.
    """
    return _encode(obj, "$", 0)


def stable_json(obj: object) -> str:
    """Return the canonical JSON of `obj`: sorted keys, no spaces, ASCII. Equal content gives equal text everywhere."""
    return dumps(to_data(obj), separators=(",", ":"), ensure_ascii=True)


def child(path: str, key: str | int) -> str:
    """Return the path of an item below `path`: `$.name`, `$["odd name"]` or `$[0]`."""
    if isinstance(key, str):
        key = shortened(key, _SHOWN)
        if key.isidentifier():
            return f"{path}.{key}"
    return f"{path}[{json.dumps(key)}]"


def describe(value: object) -> str:
    """Return a short `type value` for messages."""
    if value is None:
        return "None"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= _SHOWN else text[: _SHOWN - 3] + '...'}"


def parse_dtype(name: str) -> np.dtype[Any] | None:
    """Return the dtype with this canonical name, or `None`. Aliases such as `f4` or `float` are rejected."""
    if name == _FLOAT0:
        return np.dtype(jax_dtypes.float0)
    if not _DTYPE_NAME.fullmatch(name):  # reject NumPy's dtype strings, and avoid their deprecation warnings
        return None
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    return dtype if dtype.name == name else None


def _encode(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return value
    if kind is float:
        return _finite(value, path)
    if kind is str:
        return _text(value, path)
    if depth >= MAX_DEPTH:
        raise SerializationError(f"{path}: nested deeper than {MAX_DEPTH} levels, or a container that contains itself.")
    if kind is dict:
        return _object(value, path, depth)
    if kind is list or kind is tuple:
        return _array(value, path, depth)
    return _encode_object(value, path, depth)


def _encode_object(value: object, path: str, depth: int) -> Any:
    name = dtype_name(value)
    if name is not None:
        return name
    if isinstance(value, enum.Enum):
        return _encode(value.value, path, depth + 1)
    if isinstance(value, np.generic):
        return _encode(_number(value, path), path, depth + 1)
    fields = _fields(value)
    if fields is not None:
        return _object(fields, path, depth)
    if isinstance(value, (set, frozenset)):
        # sort: the order of a set differs between processes
        return sorted(_array(value, path, depth), key=lambda item: dumps(item, separators=(",", ":")))
    if isinstance(value, (list, tuple)):
        return _array(value, path, depth)
    for base in (str, int, float):  # subclasses other than enums
        if isinstance(value, base):
            return _encode(base(value), path, depth + 1)
    what = "a callable" if callable(value) else "a value"
    hint = "" if callable(value) or not hasattr(value, "__dict__") else "; make its class a frozen dataclass"
    if isinstance(value, jnp.ndarray | np.ndarray):
        hint = "; convert it to numbers with .tolist()"
    raise SerializationError(f"{path}: {what} of type {_type_name(value)} has no JSON form{hint}.")


def _fields(value: object) -> Mapping[object, object] | None:
    """Return the items of an object with a JSON object as its encoding; `None` for other objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return value if isinstance(value, Mapping) else None


def _object(value: Mapping[object, object], path: str, depth: int) -> dict[str, object]:
    out = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise SerializationError(f"{path}: keys must be str, got {describe(key)}.")
        text = _text(str.__str__(key), path)
        out[text] = _encode(item, child(path, text), depth + 1)
    return out


def _array(value: Iterable[object], path: str, depth: int) -> list[object]:
    return [_encode(item, child(path, index), depth + 1) for index, item in enumerate(value)]


def _finite(value: float, path: str) -> float:
    if not math.isfinite(value):
        raise SerializationError(f"{path}: float must be finite, got {value!r}.")
    return value


def _text(value: str, path: str) -> str:
    if not value.isascii() and _SURROGATE.search(value):  # two of them would decode to a different character
        raise SerializationError(f"{path}: str must be valid Unicode, got {describe(value)}.")
    return value


def _number(value: np.generic, path: str) -> bool | int | float | str:
    """Return a NumPy or `ml_dtypes` scalar as a Python value."""
    dtype = value.dtype
    if jnp.issubdtype(dtype, np.bool_):
        return bool(value)
    if jnp.issubdtype(dtype, np.integer):
        return int(value)
    if jnp.issubdtype(dtype, np.floating):
        return float(value)
    if isinstance(value, np.str_):
        return str(value)
    raise SerializationError(f"{path}: a value of type {_type_name(value)} has no JSON form.")


def dtype_name(value: object) -> str | None:
    """Return the name of a dtype or of a scalar type such as `jnp.float32`; `None` for everything else."""
    if isinstance(value, np.dtype):
        if value == jax_dtypes.float0:
            return _FLOAT0
        return value.name if parse_dtype(value.name) == value else None  # None: other byte orders, records
    if isinstance(value, type):
        inner = getattr(value, "dtype", None)
        name = inner.name if isinstance(inner, np.dtype) else value.__name__
        scalar = isinstance(inner, np.dtype) or issubclass(value, np.generic)
        return name if scalar and parse_dtype(name) is not None else None
    kind = getattr(type(value), "type", None)
    if isinstance(kind, type) and issubclass(kind, jax_dtypes.extended):
        return str(value)  # e.g. key<fry>, for comparison only; no NumPy dtype has such a name
    return None


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def dumps(data: object, **options: Any) -> str:
    """Return plain data as JSON with sorted keys; `options` are passed to `json.dumps`."""
    try:
        return json.dumps(data, sort_keys=True, allow_nan=False, **options)
    except ValueError as error:  # an integer beyond sys.set_int_max_str_digits
        raise SerializationError(f"$: cannot be written as JSON ({error}).") from error
