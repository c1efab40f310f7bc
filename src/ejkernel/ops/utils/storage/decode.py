# SPDX-License-Identifier: Apache-2.0
"""Plain JSON data to typed values, with cattrs. Imported on first use only."""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import enum
import functools
import itertools
import pathlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from cattrs import Converter
from cattrs.cols import namedtuple_dict_structure_factory
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    CattrsError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn, override

from ejkernel.ops.errors import EjkernelError, SerializationError
from ejkernel.ops.utils.storage.encode import child, describe, parse_dtype, stable_json

_Hook = Callable[[Any, Any], Any]
_TOLD = 8  # reasons that a message has; a file may have any number of wrong fields
_SCALARS = (bool, int, float, str)
_LISTS = (list, abc.MutableSequence)
_TUPLES = (tuple, abc.Sequence)  # an abstract sequence becomes the hashable one
_SETS = (set, frozenset, abc.Set, abc.MutableSet)
_DICTS = (dict, abc.Mapping, abc.MutableMapping)


class _RefusedError(Exception):
    """A value does not fit its type; the path is put before it where the error leaves this module."""


# what reading a value may raise: what a class's own code raises comes inside a BaseValidationError; TypeError: a list
# as an item of a set
_FAILURES = (_RefusedError, CattrsError, SerializationError, TypeError)


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    """One reason for a failure: where, what, and the exception of the user's own code if there was one."""

    path: str
    message: str
    cause: Exception | None


def decode(data: Any, cls: Any) -> Any:
    """Return plain data (see `encode.plain`) as a `cls`, or raise `SerializationError` with the first reasons."""
    try:
        return _converter().structure(data, cls)
    except _FAILURES as error:
        leaves = list(itertools.islice(_leaves(error, "$", cls), _TOLD + 1))
        cause = next((leaf.cause for leaf in leaves if leaf.cause is not None), None)
        reasons = [f"{leaf.path}: {leaf.message}" for leaf in leaves[:_TOLD]]
        raise SerializationError("; ".join([*reasons, *["and more"] * (len(leaves) > _TOLD)])) from cause


@functools.cache
def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    for scalar in (*_SCALARS, bytes, pathlib.Path):
        converter.register_structure_hook(scalar, _scalar)
    hooks: list[tuple[Callable[[Any], bool], _Hook]] = [
        (lambda _: True, _unsupported),  # first, so below all others: the lenient defaults of cattrs are never reached
        (lambda t: t is None or t is types.NoneType, _none),
        (lambda t: t is Any or t is object, lambda value, _: value),
        (lambda t: typing.get_origin(t) is typing.Literal, _literal),
        (lambda t: isinstance(t, type) and issubclass(t, enum.Enum), _enum),
        (lambda t: (typing.get_origin(t) or t) is np.dtype, _dtype),
        (lambda t: typing.get_origin(t) in (typing.Union, types.UnionType), _union),
        (lambda t: typing.get_origin(t) in (typing.Annotated, typing.Final), _first_argument),
        (lambda t: _alias_target(t) is not None, lambda value, t: _structure(value, _alias_target(t))),
        (lambda t: (typing.get_origin(t) or t) in (*_LISTS, *_TUPLES, *_SETS), _sequence),
        (lambda t: (typing.get_origin(t) or t) in _DICTS, _mapping),
    ]
    for predicate, hook in hooks:
        converter.register_structure_hook_func(predicate, hook)
    converter.register_structure_hook_factory(_is_record, _record_hook)
    return converter


def _structure(value: Any, cls: Any) -> Any:
    return _converter().structure(value, cls)


# --- leaves of the data ---


def _scalar(value: object, cls: Any) -> Any:
    if issubclass(cls, enum.Enum):  # class Mode(str, Enum): found by its base
        return _enum(value, cls)
    if cls not in _SCALARS:
        return _unsupported(value, cls)
    if cls is float and type(value) is int:
        return _exact_float(value)
    if type(value) is not cls:  # so bool is no int, and 64.0 neither
        raise _RefusedError(f"expected {cls.__name__}, got {describe(value)}")
    return value


def _exact_float(value: int) -> float:
    try:
        if float(value) == value:
            return float(value)
    except OverflowError:
        pass
    raise _RefusedError(f"expected float, got {describe(value)}, which no float holds exactly")


def _none(value: object, _: object) -> None:
    if value is not None:
        raise _RefusedError(f"expected None, got {describe(value)}")


def _literal(value: object, cls: object) -> Any:
    return _one_of(value, cls, typing.get_args(cls))


def _enum(value: Any, cls: Any) -> Any:
    return _one_of(value, cls, tuple(cls))


def _one_of(value: object, cls: object, allowed: tuple[object, ...]) -> Any:
    text = stable_json(value)  # compared as text, because 1, 1.0 and True are equal as Python values
    for candidate in allowed:
        if stable_json(candidate) == text:
            return candidate
    names = ", ".join(stable_json(candidate) for candidate in allowed)
    raise _RefusedError(f"expected one of {names} ({_name(cls)}), got {describe(value)}")


def _dtype(value: object, _: object) -> np.dtype[Any]:
    dtype = parse_dtype(value) if isinstance(value, str) else None
    if dtype is None:
        raise _RefusedError(f"expected the name of a dtype such as 'float32', got {describe(value)}")
    return dtype


def _unsupported(_: object, cls: object) -> Any:
    raise _RefusedError(
        f"{_name(cls)} is not a type that can be read from JSON; use dataclasses, named tuples and built-ins"
    )


# --- containers ---


def _sequence(value: object, cls: object) -> Any:
    origin, arguments = typing.get_origin(cls) or cls, typing.get_args(cls)
    if not isinstance(value, list):
        raise _RefusedError(f"expected a list ({_name(cls)}), got {describe(value)}")
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise _RefusedError(f"expected {len(arguments)} items ({_name(cls)}), got {len(value)}")
        return tuple(_items(zip(range(len(value)), value, arguments, strict=True), cls))
    item = arguments[0] if arguments else Any
    items = _items(((index, value, item) for index, value in enumerate(value)), cls)
    if origin in _SETS:
        unique = (set if origin in (set, abc.MutableSet) else frozenset)(items)
        if len(unique) != len(items):
            raise _RefusedError("expected a set, got the same item twice")
        return unique
    return items if origin in _LISTS else tuple(items)


def _mapping(value: object, cls: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _RefusedError(f"expected an object ({_name(cls)}), got {describe(value)}")
    key_type, item_type = typing.get_args(cls) or (Any, Any)
    keys = _items(((key, key, key_type) for key in value), cls)
    return dict(zip(keys, _items(((key, item, item_type) for key, item in value.items()), cls), strict=True))


def _items(triples: Iterable[tuple[int | str, object, object]], cls: Any) -> list[Any]:
    out = []
    for index, value, item_type in triples:
        try:
            out.append(_structure(value, item_type))
        except _FAILURES as error:  # cattrs' own form for "at this index", which _leaves turns into a path
            error.add_note(IterableValidationNote(f"at {index!r}", index, item_type))
            raise IterableValidationError("item", [error], cls) from None
    return out


def _union(value: object, cls: object) -> Any:
    members = typing.get_args(cls)
    fits, failures = [], []
    for member in members:
        try:
            fits.append(_structure(value, member))
        except _FAILURES as error:
            failures.append((member, error))
    if len(fits) == 1:
        return fits[0]
    if fits:
        return _best(fits, value, cls)
    # the reason that matters is that of the only member of the right form: Optional[Config] is about Config
    inside = [error for member, error in failures if isinstance(error, BaseValidationError)]
    if len(inside) == 1:
        raise inside[0]
    reasons = [f"{_name(m)}: {leaf.message}" for m, e in failures for leaf in _leaves(e, "$", m)] if inside else []
    raise _RefusedError(f"expected {_name(cls)}, got {describe(value)}" + "".join(f" [{reason}]" for reason in reasons))


def _best(fits: Sequence[object], value: object, cls: object) -> Any:
    """Return the one of several readings that says what the data says, or refuse to guess."""
    text = stable_json(value)
    exact = [fit for fit in fits if stable_json(fit) == text] or fits
    for fit in exact:
        if type(fit) is type(value) and not isinstance(fit, dict):
            return fit
    if any(type(fit) is not type(exact[0]) or fit != exact[0] for fit in exact):
        kinds = " and ".join(_name(type(fit)) for fit in exact)
        raise _RefusedError(f"fits {kinds} of {_name(cls)} alike; give them different fields")
    return exact[0]


def _first_argument(value: object, cls: object) -> Any:
    return _structure(value, typing.get_args(cls)[0])


def _alias_target(cls: object) -> Any:
    """Return what a `NewType` or a `type X = ...` statement stands for."""
    if isinstance(cls, typing.NewType):
        return cls.__supertype__
    return getattr(cls, "__value__", None) if type(cls).__name__ == "TypeAliasType" else None


# --- dataclasses and named tuples ---


def _is_record(cls: object) -> bool:
    origin = typing.get_origin(cls) or cls
    return isinstance(origin, type) and (dataclasses.is_dataclass(origin) or _is_namedtuple(origin))


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _record_hook(cls: Any) -> _Hook:
    origin = typing.get_origin(cls) or cls
    hints = _hints(origin)
    inner: Callable[[Any, Any], Any]
    if hasattr(origin, "field_types"):
        return _tagged_hook(origin)
    if _is_namedtuple(origin):
        if set(hints) != set(origin._fields):  # collections.namedtuple has no annotations
            return functools.partial(_untyped_namedtuple, origin)
        inner = namedtuple_dict_structure_factory(cls, _converter(), True, True)
    else:
        # cattrs leaves a name inside an annotation, such as list["Tile"], alone
        nested = {f.name: hints[f.name] for f in dataclasses.fields(origin) if _has_forward_reference(f.type)}
        overrides: dict[str, Any] = {name: override(struct_hook=_typed(hint)) for name, hint in nested.items()}
        inner = make_dict_structure_fn(
            cls, _converter(), _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True, **overrides
        )

    def hook(value: object, _: object) -> Any:
        return inner(_object(value, cls), cls)

    return hook


def _object(value: object, cls: object) -> dict[Any, Any]:
    if not isinstance(value, dict):  # cattrs would take an empty list as "all defaults"
        raise _RefusedError(f"expected an object ({_name(cls)}), got {describe(value)}")
    return value


def _tagged_hook(cls: Any) -> _Hook:
    """Return the hook of a tagged union: of a class that says itself which types the fields of the data have."""

    @functools.cache
    def reader(types: tuple[tuple[str, object], ...]) -> Callable[[Any, Any], Any]:
        overrides: dict[str, Any] = {name: override(struct_hook=_typed(hint)) for name, hint in types}
        return make_dict_structure_fn(
            cls, _converter(), _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True, **overrides
        )

    def hook(value: Any, _: object) -> Any:
        try:
            types = cls.field_types(_object(value, cls))
        except EjkernelError as error:
            raise _RefusedError(str(error)) from error
        return reader(tuple(types.items()))(value, cls)

    return hook


def _typed(hint: object) -> _Hook:
    return lambda value, _: _structure(value, hint)


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        reason = f"the annotations of {_name(cls)} cannot be resolved ({error}); define what they name at module level"
        raise _RefusedError(reason) from error


def _has_forward_reference(annotation: object) -> bool:
    inner = typing.get_args(annotation)
    return any(isinstance(item, (str, typing.ForwardRef)) or _has_forward_reference(item) for item in inner) and (
        typing.get_origin(annotation) is not typing.Literal
    )


def _untyped_namedtuple(cls: Any, value: Any, _: object) -> Any:
    if not isinstance(value, dict):
        raise _RefusedError(f"expected an object ({_name(cls)}), got {describe(value)}")
    required = [name for name in cls._fields if name not in cls._field_defaults]
    if wrong := sorted((set(value) - set(cls._fields)) | (set(required) - set(value))):
        raise _RefusedError(f"unknown or missing fields {', '.join(wrong)}; {_name(cls)} has {', '.join(cls._fields)}")
    return cls(**value)


# --- errors ---


def _leaves(error: Exception, path: str, cls: object) -> Iterator[_Leaf]:
    """Yield the reasons inside an error of cattrs, each with its path."""
    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            note = _note(inner)
            if isinstance(inner, KeyError) and isinstance(note, AttributeValidationNote):
                yield _Leaf(child(path, note.name), f"missing; {_name(error.cl)} needs it", None)
            elif isinstance(note, AttributeValidationNote):
                yield from _leaves(inner, child(path, note.name), note.type)
            elif isinstance(note, IterableValidationNote):
                yield from _leaves(inner, child(path, note.index), note.type)
            else:
                yield from _leaves(inner, path, error.cl)
    elif isinstance(error, ForbiddenExtraKeysError):
        for name in sorted(error.extra_fields):
            yield _Leaf(child(path, name), f"{_name(cls)} has no such field; it has {_fields(cls)}", None)
    elif isinstance(error, _RefusedError):
        yield _Leaf(path, str(error), None)
    else:
        yield _Leaf(path, f"{_name(cls)} refused the values: {type(error).__name__}: {error}", error)


def _note(error: Exception) -> AttributeValidationNote | IterableValidationNote | None:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, (AttributeValidationNote, IterableValidationNote)):
            return note
    return None


def _fields(cls: Any) -> str:
    origin = typing.get_origin(cls) or cls
    names = origin._fields if _is_namedtuple(origin) else [f.name for f in dataclasses.fields(origin) if f.init]
    return ", ".join(names) or "no fields"


def _name(cls: object) -> str:
    return cls.__qualname__ if isinstance(cls, type) and not typing.get_args(cls) else str(cls)
