# SPDX-License-Identifier: Apache-2.0
"""Strict decoding of plain JSON data into typed values.

A file is untrusted, so decoding converts nothing (except an int to the float of the same value), ignores nothing, and
creates only types that the annotations name. Every error carries the path of the value.
"""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from ejkernel.ops.errors import EjkernelError, SerializationError
from ejkernel.ops.utils.storage.encode import child, describe, parse_dtype, stable_json

_T = typing.TypeVar("_T")
_SHOWN: Final = 8  # reasons in a message; a file may have any number of wrong fields
_SCALARS: Final = frozenset({bool, int, float, str})
_LISTS: Final = (list, abc.MutableSequence)
_TUPLES: Final = (tuple, abc.Sequence)  # an abstract sequence becomes the hashable one
_SETS: Final = (set, frozenset, abc.Set, abc.MutableSet)
_DICTS: Final = (dict, abc.Mapping, abc.MutableMapping)


@dataclasses.dataclass(frozen=True, slots=True)
class _Reason:
    """One reason why data does not fit a type.

    Attributes:
        message: The reason.
        path: The keys and indices that lead to the value.
        cause: The exception of the class's own code, if it rejected the values.
        inside: Whether the data has the form of the type (an object for a dataclass), but a value inside is wrong.
    """

    message: str
    path: tuple[str | int, ...] = ()
    cause: Exception | None = None
    inside: bool = False

    def below(self, *path: str | int) -> _Reason:
        """Return the same reason as seen from the container of the value."""
        return dataclasses.replace(self, path=(*path, *self.path), inside=True)

    def __str__(self) -> str:
        return f"{functools.reduce(child, self.path, '$')}: {self.message}"


class _InvalidError(Exception):
    """Data does not fit a type; it never leaves this module."""

    def __init__(self, reasons: Sequence[_Reason]) -> None:
        super().__init__(reasons)
        self.reasons = tuple(reasons)


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    """The fields of a dataclass or named tuple: the type of each, and the names of those without a default."""

    types: Mapping[str, Any]
    required: frozenset[str]


_records: WeakKeyDictionary[type, _Record] = WeakKeyDictionary()


@typing.overload
def from_plain(data: object, cls: type[_T]) -> _T: ...
@typing.overload
def from_plain(data: object, cls: object) -> Any: ...
def from_plain(data: object, cls: Any) -> Any:
    """Return plain JSON data as a `cls`: a dataclass, a named tuple, or any annotation such as `dict[str, int]`.

    Nothing is converted but an int to the float of the same value. Bare `dict`, `list` and `tuple`, `Any` and missing
    annotations keep the data as it is.

    Args:
        data: Data from `parse_json` or `to_data`.
        cls: The type.

    Raises:
        SerializationError: A field is unknown or missing, a value has another type, or `cls` rejected the values. The
            message has up to eight reasons, each with its path.
    """
    try:
        return _read(data, cls)
    except _InvalidError as error:
        reasons = [str(reason) for reason in error.reasons[:_SHOWN]]
        more = ["and more"] * (len(error.reasons) > _SHOWN)
        cause = next((reason.cause for reason in error.reasons if reason.cause is not None), None)
        raise SerializationError("; ".join([*reasons, *more])) from cause


def _read(value: Any, cls: Any) -> Any:
    if cls is Any or cls is object:
        return value
    if cls in _SCALARS and type(cls) is type:  # check the type, too: NumPy and JAX scalar types may equal Python's
        return _scalar(value, cls)
    origin = typing.get_origin(cls) or cls
    reader = _READERS.get(origin)
    if reader is not None:
        return reader(value, cls)
    if isinstance(origin, type):
        if issubclass(origin, enum.Flag):
            return _flags(value, origin)
        if issubclass(origin, enum.Enum):
            return _one_of(value, origin, tuple(origin))
        if dataclasses.is_dataclass(origin) or _is_named_tuple(origin):
            return _record(value, cls)
    if isinstance(cls, typing.TypeVar):
        raise _invalid(f"the generic argument {cls.__name__} is open; name it, as in Box[int]")
    target = alias_target(cls)
    if target is not None:
        return _read(value, target)
    raise _invalid(
        f"{_name(cls)} is not a type that can be read from JSON; use dataclasses, named tuples and built-in types"
    )


def _invalid(message: str, cause: Exception | None = None) -> _InvalidError:
    return _InvalidError([_Reason(message, cause=cause)])


# --- leaves of the data ---


def _scalar(value: object, cls: Any) -> Any:
    if cls is float and type(value) is int:
        return _exact_float(value)
    if type(value) is not cls:  # exact: neither True nor 64.0 is an int
        raise _invalid(f"expected {cls.__name__}, got {describe(value)}")
    return value


def _exact_float(value: int) -> float:
    try:
        if float(value) == value:
            return float(value)
    except OverflowError:
        pass
    raise _invalid(f"expected float, got {describe(value)}, which has no exact float value")


def _none(value: object, _: object) -> None:
    if value is not None:
        raise _invalid(f"expected None, got {describe(value)}")


def _one_of(value: object, cls: object, allowed: tuple[object, ...]) -> Any:
    text = stable_json(value)  # compared as text, because 1, 1.0 and True are equal as Python values
    for candidate in allowed:
        if stable_json(candidate) == text:
            return candidate
    names = ", ".join(stable_json(candidate) for candidate in allowed)
    raise _invalid(f"expected one of {names} ({_name(cls)}), got {describe(value)}")


def _flags(value: object, cls: type[enum.Flag]) -> enum.Flag:
    """Return the combination of flags with this number."""
    try:
        found = cls(value) if type(value) is int else None
    except ValueError:  # it has bits without a flag
        found = None
    if not isinstance(found, cls) or found.value != value:  # depends on the class's `boundary`
        raise _invalid(
            f"expected a combination of {', '.join(map(str, cls.__members__.values()))}, got {describe(value)}"
        )
    return found


def _dtype(value: object, _: object) -> np.dtype[Any]:
    dtype = parse_dtype(value) if isinstance(value, str) else None
    if dtype is None:
        raise _invalid(f"expected the name of a dtype such as 'float32', got {describe(value)}")
    return dtype


# --- containers ---


def _sequence(value: object, cls: object) -> Any:
    origin, arguments = typing.get_origin(cls) or cls, typing.get_args(cls)
    if not isinstance(value, list):
        raise _invalid(f"expected a list ({_name(cls)}), got {describe(value)}")
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise _invalid(f"expected {len(arguments)} items ({_name(cls)}), got {len(value)}")
        return tuple(_each(zip(range(len(value)), value, arguments, strict=True)))
    if not arguments and origin not in _LISTS:  # of a hashable value all parts are hashable
        value = list(map(with_tuples, value))
    item = arguments[0] if arguments else Any
    items = _each(((index, inner, item) for index, inner in enumerate(value)))
    if origin in _SETS:
        return _set(items, set if origin in (set, abc.MutableSet) else frozenset)
    return items if origin in _LISTS else tuple(items)


def with_tuples(data: Any) -> Any:
    """Return plain JSON data with tuples in place of lists."""
    if isinstance(data, dict):
        return {key: with_tuples(value) for key, value in data.items()}
    return tuple(map(with_tuples, data)) if isinstance(data, list) else data


def _set(items: list[Any], cls: type) -> Any:
    try:
        unique = cls(items)
    except TypeError as error:  # e.g. an item is a list
        raise _invalid(f"expected a set, got an item that cannot be hashed: {error}", error) from None
    if len(unique) != len(items):
        raise _invalid("expected a set, got the same item twice")
    return unique


def _mapping(value: object, cls: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _invalid(f"expected an object ({_name(cls)}), got {describe(value)}")
    key_type, item_type = typing.get_args(cls) or (Any, Any)
    keys = _each((key, key, key_type) for key in value)
    return dict(zip(keys, _each(((key, item, item_type) for key, item in value.items())), strict=True))


def _each(items: Iterable[tuple[int | str, Any, Any]]) -> list[Any]:
    """Read `(key, value, type)` triples; stop at the first that does not fit."""
    out = []
    for key, value, item_type in items:
        try:
            out.append(_read(value, item_type))
        except _InvalidError as error:
            raise _InvalidError([reason.below(key) for reason in error.reasons]) from None
    return out


def _union(value: object, cls: object) -> Any:
    fits, failures = [], []
    for member in typing.get_args(cls):
        try:
            fits.append(_read(value, member))
        except _InvalidError as error:
            failures.append((member, error))
    if fits:
        return fits[0] if len(fits) == 1 else _best(fits, value, cls)
    # If the data has the form of a single member, report that member's reasons, e.g. of Config for `Config | None`.
    inside = [error for _, error in failures if any(reason.inside for reason in error.reasons)]
    if len(inside) == 1:
        raise inside[0]
    reasons = [f"{_name(member)}: {reason.message}" for member, e in failures for reason in e.reasons] if inside else []
    detail = "".join(f" [{reason}]" for reason in reasons)
    raise _invalid(f"expected {_name(cls)}, got {describe(value)}{detail}")


def _best(fits: Sequence[object], value: object, cls: object) -> Any:
    """Return the reading that encodes to the same data again; raise if several readings do."""
    text = stable_json(value)
    exact = [fit for fit in fits if stable_json(fit) == text] or fits
    for fit in exact:
        if type(fit) is type(value) and not isinstance(fit, dict):
            return fit
    if any(type(fit) is not type(exact[0]) or fit != exact[0] for fit in exact):
        kinds = " and ".join(_name(type(fit)) for fit in exact)
        raise _invalid(f"fits both {kinds} of {_name(cls)}; give them different fields")
    return exact[0]


def _first_argument(value: object, cls: object) -> Any:
    return _read(value, typing.get_args(cls)[0])


def alias_target(cls: object) -> Any:
    """Return the type behind a `NewType` or a `type X = ...` statement."""
    if isinstance(cls, typing.NewType):
        return cls.__supertype__
    return getattr(cls, "__value__", None) if type(cls).__name__ == "TypeAliasType" else None


# --- dataclasses and named tuples ---


def _record(value: Any, cls: Any) -> Any:
    """Read a dataclass or a named tuple; collect the reasons of all its fields."""
    origin = typing.get_origin(cls) or cls
    record = _record_of(origin)
    if not isinstance(value, dict):
        raise _invalid(f"expected an object ({_name(cls)}), got {describe(value)}")
    hints = _field_types(origin, record, value)
    arguments = {} if origin is cls else dict(zip(origin.__parameters__, typing.get_args(cls), strict=True))
    fields: dict[str, Any] = {}
    reasons: list[_Reason] = []
    for name, hint in hints.items():
        if name in value:
            try:
                fields[name] = _read(value[name], _resolved(hint, arguments) if arguments else hint)
            except _InvalidError as error:
                reasons += [reason.below(name) for reason in error.reasons]
        elif name in record.required:
            reasons.append(_Reason(f"missing; {_name(cls)} needs it").below(name))
    if len(value) > len(fields):
        unknown = f"{_name(cls)} has no such field; it has {', '.join(hints) or 'no fields'}"
        reasons += [_Reason(unknown).below(name) for name in sorted(value.keys() - hints.keys())]
    if reasons:
        raise _InvalidError(reasons)
    try:
        return origin(**fields)
    except Exception as error:
        message = f"{_name(cls)} rejected the values: {type(error).__name__}: {error}"
        raise _InvalidError([_Reason(message, cause=error, inside=True)]) from error


def _record_of(cls: Any) -> _Record:
    found = _records.get(cls)
    if found is None:
        hints = _hints(cls)
        if _is_named_tuple(cls):  # named tuples of `collections` have no annotations
            typed = {name: hints.get(name, Any) for name in cls._fields}
            found = _Record(typed, frozenset(cls._fields) - cls._field_defaults.keys())
        else:
            own = [field for field in dataclasses.fields(cls) if field.init]
            needed = (f.name for f in own if f.default is f.default_factory is dataclasses.MISSING)
            found = _Record({field.name: hints[field.name] for field in own}, frozenset(needed))
        _records[cls] = found
    return found


def _field_types(cls: Any, record: _Record, value: dict[str, Any]) -> Mapping[str, Any]:
    """Return the type of each field; a tagged union has a method `field_types` that chooses some by the data."""
    if not hasattr(cls, "field_types"):
        return record.types
    try:
        return {**record.types, **cls.field_types(value)}
    except EjkernelError as error:
        raise _invalid(str(error), error) from error


def _resolved(hint: Any, arguments: Mapping[Any, Any]) -> Any:
    """Return an annotation with the type arguments of a generic class in place of its type variables."""
    if isinstance(hint, typing.TypeVar):
        return arguments.get(hint, hint)
    parameters = getattr(hint, "__parameters__", ())
    if not parameters or not arguments or isinstance(hint, type):
        return hint
    return hint[tuple(arguments.get(parameter, parameter) for parameter in parameters)]


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        message = f"the annotations of {_name(cls)} cannot be resolved ({error}); define their types at module level"
        raise _invalid(message) from error


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _name(cls: object) -> str:
    return cls.__qualname__ if isinstance(cls, type) and not typing.get_args(cls) else str(cls)


_Reader = Callable[[Any, Any], Any]
_READERS: Final[dict[Any, _Reader]] = {
    None: _none,
    types.NoneType: _none,
    typing.Literal: lambda value, cls: _one_of(value, cls, typing.get_args(cls)),
    np.dtype: _dtype,
    typing.Union: _union,
    types.UnionType: _union,
    typing.Annotated: _first_argument,
    typing.Final: _first_argument,
    **dict.fromkeys((*_LISTS, *_TUPLES, *_SETS), _sequence),
    **dict.fromkeys(_DICTS, _mapping),
}
