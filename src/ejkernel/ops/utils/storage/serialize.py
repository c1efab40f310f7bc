# SPDX-License-Identifier: Apache-2.0
"""Configurations, keys and calls as JSON: strict both ways, and the same text for the same content in every process."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar, overload

import jax.numpy as jnp
import numpy as np
from jax import dtypes as jax_dtypes  # also registers names such as "bfloat16" with NumPy

from ejkernel.ops.errors import SerializationError
from ejkernel.ops.utils.printable import printable_json

_T = TypeVar("_T")
_MAX_DEPTH = 64  # deeper is a cycle or an attack; Python's own limit must not be what ends it
_DTYPE_NAME = re.compile(r"(bool|bfloat|complex|float|u?int)[0-9a-z_]*")
_SHOWN = 60  # characters of a value or a key that a message shows
_FLOAT0 = "float0"  # JAX's dtype of gradients of integers: a structured dtype that NumPy has no name for


def to_data(obj: Any) -> Any:
    """Return `obj` as plain JSON data: `None`, bool, int, float, str, list and dict, and nothing else.

    Dataclasses and named tuples become dicts of their fields, enum members their value, dtypes their name, sets a
    list sorted by its items' JSON, NumPy scalars Python numbers.

    Raises:
        SerializationError: Something inside has no JSON form: NaN, an infinity, a key that is not a string, an array,
            a callable, any other object. The message starts with its path.
    """
    return _encode(obj, "$", 0)


@overload
def from_data(data: object, cls: type[_T]) -> _T: ...
@overload
def from_data(data: object, cls: Any) -> Any: ...
def from_data(data: object, cls: Any) -> Any:
    """Return plain JSON data as a `cls`: a dataclass, a named tuple, or any annotation such as `dict[str, int]`.

    Nothing is converted but an int to the float of the same value. Bare `dict`, `list` and `tuple`, `Any` and missing
    annotations keep the data as it is.

    Raises:
        SerializationError: A field is unknown or missing, a value has another type, or `cls` refused the values; the
            message starts with the path.
    """
    return from_plain(plain(data), cls)


def to_json(obj: Any) -> str:
    """Return `obj` as JSON for people: indented, keys sorted, all printable. See `to_data` for what is accepted."""
    return printable_json(_dumps(to_data(obj), indent=2, ensure_ascii=False))


@overload
def from_json(text: str, cls: type[_T]) -> _T: ...
@overload
def from_json(text: str, cls: Any) -> Any: ...
def from_json(text: str, cls: Any) -> Any:
    """Return the `cls` that `text` describes, as `from_data` does; repeated keys of an object are refused too."""
    return from_plain(parse_json(text), cls)


def parse_json(text: str) -> Any:
    """Return the plain data that `text` describes.

    Raises:
        SerializationError: it is not one JSON value, an object has a key twice, or a value is one that `to_data` would
            refuse, such as NaN or a lone surrogate.
    """
    if not isinstance(text, str):
        raise SerializationError(f"text must be a str of JSON, got {describe(text)}.")
    try:
        data = _STRICT.decode(text)
    except (ValueError, RecursionError):
        data = _lenient(text)
    # to look through all that was parsed takes longer than to parse it
    return data if _HALF not in text and text.count("[") + text.count("{") <= _MAX_DEPTH else plain(data)


def _lenient(text: str) -> Any:
    """Return plain data that the strict parser refused, for the error that says where the fault is."""
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SerializationError(f"$: not valid JSON ({error}); text is {describe(text)}.") from error
    return plain(data)


@overload
def from_plain(data: Any, cls: type[_T]) -> _T: ...
@overload
def from_plain(data: Any, cls: Any) -> Any: ...
def from_plain(data: Any, cls: Any) -> Any:
    """Return data that `parse_json` returned as a `cls`, as `from_data` does."""
    from ejkernel.ops.utils.storage import decode  # on first use: cattrs takes longer to import than `ejkernel.ops` may

    return decode.decode(data, cls)


def stable_json(obj: Any) -> str:
    """Return the canonical JSON of `obj`: sorted keys, no spaces, ASCII; equal content gives equal text anywhere."""
    return _dumps(to_data(obj), separators=(",", ":"), ensure_ascii=True)


def plain(data: object) -> Any:
    """Return a copy of `data`, which must be JSON data already (tuples count as lists); see `to_data` for errors."""
    return _encode(data, "$", 0, objects=False)


def child(path: str, key: str | int) -> str:
    """Return the path of an item below `path`: `$.name`, `$["odd name"]` or `$[0]`."""
    if isinstance(key, str):
        key = key if len(key) <= _SHOWN else key[: _SHOWN - 3] + "..."
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
    """Return the dtype of that canonical name, or `None`: aliases such as `f4` or `float` are not names."""
    if name == _FLOAT0:
        return np.dtype(jax_dtypes.float0)
    if not _DTYPE_NAME.fullmatch(name):  # keeps NumPy's mini-language, and its deprecation warnings, away
        return None
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    return dtype if dtype.name == name else None


def _encode(value: Any, path: str, depth: int, *, objects: bool = True) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return value
    if kind is float:
        return _finite(value, path)
    if kind is str:
        return _text(value, path)
    if depth >= _MAX_DEPTH:
        raise SerializationError(f"{path}: nested deeper than {_MAX_DEPTH} levels, or a container that holds itself.")
    if kind is dict:
        return _object(value, path, depth, objects)
    if kind is list or kind is tuple:
        return _array(value, path, depth, objects)
    if not objects:
        raise SerializationError(f"{path}: {_type_name(value)} is not JSON data; encode it with to_data() first.")
    return _encode_object(value, path, depth)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_object(value: Any, path: str, depth: int) -> Any:
    name = dtype_name(value)
    if name is not None:
        return name
    if isinstance(value, enum.Enum):
        return _encode(value.value, path, depth + 1)
    if isinstance(value, np.generic):
        return _encode(_number(value, path), path, depth + 1)
    fields = _fields(value)
    if fields is not None:
        return _object(fields, path, depth, True)
    if isinstance(value, (set, frozenset)):
        # set order differs between processes, and the text must not
        return sorted(_array(value, path, depth, True), key=lambda item: _dumps(item, separators=(",", ":")))
    if isinstance(value, (list, tuple)):
        return _array(value, path, depth, True)
    for base in (str, int, float):  # subclasses of them that are no enum
        if isinstance(value, base):
            return _encode(base(value), path, depth + 1)
    what = "a callable" if callable(value) else "a value"
    raise SerializationError(f"{path}: {what} of type {_type_name(value)} has no JSON form.")


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Return what an object's JSON object is made of; `None` if it has none."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return value if isinstance(value, Mapping) else None


def _object(value: Mapping[Any, Any], path: str, depth: int, objects: bool) -> dict[str, Any]:
    out = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise SerializationError(f"{path}: keys must be str, got {describe(key)}.")
        text = _text(str.__str__(key), path)
        out[text] = _encode(item, child(path, text), depth + 1, objects=objects)
    return out


def _array(value: Iterable[Any], path: str, depth: int, objects: bool) -> list[Any]:
    return [_encode(item, child(path, index), depth + 1, objects=objects) for index, item in enumerate(value)]


def _finite(value: float, path: str) -> float:
    if not math.isfinite(value):
        raise SerializationError(f"{path}: float must be finite, got {value!r}.")
    return value


def _text(value: str, path: str) -> str:
    if not value.isascii() and not _is_unicode(value):  # two lone surrogates would be read back as another character
        raise SerializationError(f"{path}: str must be valid Unicode, got {describe(value)}.")
    return value


def _number(value: np.generic, path: str) -> bool | int | float | str:
    """Return a NumPy scalar as the Python value that it holds; `ml_dtypes` scalars included."""
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
        return value.name if parse_dtype(value.name) == value else None  # not so: other byte orders, records
    if isinstance(value, type):
        inner = getattr(value, "dtype", None)
        name = inner.name if isinstance(inner, np.dtype) else value.__name__
        scalar = isinstance(inner, np.dtype) or issubclass(value, np.generic)
        return name if scalar and parse_dtype(name) is not None else None
    kind = getattr(type(value), "type", None)
    if isinstance(kind, type) and issubclass(kind, jax_dtypes.extended):
        return str(value)  # such as key<fry>: a name to compare by, which no NumPy dtype has
    return None


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        (repeated, _), *_ = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {describe(repeated)} twice")
    return out


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


_STRICT: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite_float, parse_constant=_finite_float)
_HALF: Final = "\\u"  # how half a character is written, and whole ones that are rare


def _dumps(data: Any, **options: Any) -> str:
    try:
        return json.dumps(data, sort_keys=True, allow_nan=False, **options)
    except ValueError as error:  # an integer beyond sys.set_int_max_str_digits
        raise SerializationError(f"$: cannot be written as JSON ({error}).") from error
