# SPDX-License-Identifier: Apache-2.0
"""Plain JSON data to the types that most configurations have, without cattrs: to import that takes 30 ms.

That was most of the first lookup of a process. What is read here is what `decode` would read, to which a test holds it;
whatever is doubtful, wrong or rare is left to it, and so is what to say.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

_SCALARS: Final = frozenset({bool, int, float, str, type(None)})
_fields: WeakKeyDictionary[type, dict[str, Any]] = WeakKeyDictionary()


class _LeftError(Exception):
    """A value that is left to `decode`."""


def quick(data: object, cls: object) -> Any:
    """Return plain data as a `cls`, as `decode.decode` does.

    Raises:
        LookupError: it is for `decode` to say.
    """
    try:
        return _read(data, cls)
    except (_LeftError, RecursionError) as error:
        raise LookupError from error


def _read(data: Any, cls: Any) -> Any:
    if cls is Any:
        return data
    if type(cls) is type and cls in _SCALARS:  # what NumPy and JAX have for a type may be equal to one
        return _scalar(data, cls)
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        return _dataclass(data, cls)
    read = _READ.get(typing.get_origin(cls))
    if read is None:
        raise _LeftError
    return read(data, typing.get_args(cls))


def _scalar(data: Any, cls: Any) -> Any:
    if type(data) is not cls:
        raise _LeftError
    return data


def _dict(data: Any, arguments: tuple[Any, ...]) -> Any:
    if type(data) is not dict or arguments[0] is not str:
        raise _LeftError
    return {name: _read(value, arguments[1]) for name, value in data.items()}


def _tuple(data: Any, arguments: tuple[Any, ...]) -> Any:
    if type(data) is not list or len(arguments) != 2 or arguments[1] is not Ellipsis:
        raise _LeftError
    return tuple(_read(value, arguments[0]) for value in data)


def _literal(data: Any, arguments: tuple[Any, ...]) -> Any:
    for allowed in arguments:
        if type(allowed) is type(data) and type(data) in _SCALARS and allowed == data:
            return data
    raise _LeftError


def _optional(data: Any, arguments: tuple[Any, ...]) -> Any:
    """Read a union of one type and `None`, and no other."""
    if len(arguments) != 2 or arguments[1] is not type(None):
        raise _LeftError
    return None if data is None else _read(data, arguments[0])


def _dataclass(data: Any, cls: Any) -> Any:
    if type(data) is not dict:
        raise _LeftError
    try:
        fields = _fields.get(cls) or _fields_of(cls)
        if hasattr(cls, "field_types"):
            fields = fields | cls.field_types(data)
        # a name that is no field's is a KeyError
        return cls(**{name: _read(value, fields[name]) for name, value in data.items()})
    except _LeftError:
        raise
    except Exception as error:  # what is missing, what the class refuses: `decode` finds it too, and says it
        raise _LeftError from error


def _fields_of(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    found = _fields[cls] = {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}
    return found


_READ: Final[dict[Any, Callable[[Any, tuple[Any, ...]], Any]]] = {
    dict: _dict,
    tuple: _tuple,
    typing.Literal: _literal,
    typing.Union: _optional,
    types.UnionType: _optional,
}
