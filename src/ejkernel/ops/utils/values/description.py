# SPDX-License-Identifier: Apache-2.0
"""Strict decoding of `signature.describe`: from plain data to the described value.

Names in a description are looked up only in the tables of `nameable`. A kernel will call such a function or construct
such a class, so a description must not name arbitrary functions and classes.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax

from ejkernel import compat
from ejkernel.ops.errors import DescriptionError
from ejkernel.ops.utils.storage.serialize import describe as shown
from ejkernel.ops.utils.storage.serialize import parse_dtype
from ejkernel.ops.utils.values.nameable import Names, quoted

MAX_VALUES: Final = 10_000  # maximum values in a description; real calls have tens
MAX_RANK: Final = 32
_MAX_DEPTH: Final = 32
_MAX_KEYS: Final = 1_000  # of a mapping or set; building one takes quadratic time if all hashes are equal
_MAX_BYTES: Final = 1 << 40  # of an array; no device has more memory
_PLAIN_TYPES: Final = {f"builtins.{kind.__name__}": kind for kind in (bool, int, float, complex)}
_CONTAINERS: Final = {f"collections.{c.__name__}": c for c in (collections.OrderedDict, collections.defaultdict)}
_KEY_IMPLEMENTATIONS: Final = ("threefry2x32", "rbg", "unsafe_rbg")


def undescribe(data: object, names: Names) -> Any:
    """Return the value that `data` describes; arrays become `jax.ShapeDtypeStruct`. The inverse of `describe`.

    Several values can share a description. Then the result is a `frozenset` for any set, a `numpy.dtype` for any
    spelling of a dtype, and the function itself for its wrappers.

    This runs only code of classes that may be named: the constructors of dataclasses, named tuples and pytree types,
    and the hash functions of keys.

    Args:
        data: Plain untrusted data, as parsed from JSON.
        names: The objects that the data may name.

    Raises:
        DescriptionError: The data describes no value, is too large, or uses a name that is not in `names`.
    """
    return _Reader(names).value(data, 0)


def check_size(shape: Sequence[int], dtype: Any) -> None:
    """Check that an array of this shape could fit on a device; sizes of zero count as one.

    Raises:
        DescriptionError: The array is too large.
    """
    if math.prod(max(1, dim) for dim in shape) * max(1, dtype.itemsize) > _MAX_BYTES:
        raise DescriptionError(f"an array of shape {shown(list(shape))} is larger than any device holds")


class _Reader:
    """Reads one description and counts its values."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._values = 0

    def value(self, data: object, depth: int) -> Any:
        self._values += 1
        if self._values > MAX_VALUES or depth > _MAX_DEPTH:
            raise DescriptionError(f"it has more than {MAX_VALUES} values or {_MAX_DEPTH} levels")
        if data is None or type(data) in (bool, int, str):
            return data
        if type(data) is list:
            return tuple(self.value(item, depth + 1) for item in data)
        # Selected by the exact set of keys, so a missing or extra key is an error.
        form = _FORMS.get(frozenset(data)) if type(data) is dict else None
        if form is None:
            raise DescriptionError(f"{shown(data)} describes no value")
        return form(self, data, depth + 1)

    def items(self, data: object, depth: int, count: int | None = None) -> list[Any]:
        if type(data) is not list or (count is not None and len(data) != count):
            raise DescriptionError(f"expected a list{'' if count is None else f' of {count}'}, got {shown(data)}")
        return [self.value(item, depth) for item in data]

    def array(self, data: Any, depth: int) -> Any:
        del depth
        parts = data["array"]
        if type(parts) is not list or len(parts) != 2 or data.get("weak", True) is not True:
            raise DescriptionError(f"an array needs a dtype and a shape, got {shown(parts)}")
        dtype, shape = _dtype(parts[0]), parts[1]
        if type(shape) is not list or len(shape) > MAX_RANK or any(type(dim) is not int or dim < 0 for dim in shape):
            raise DescriptionError(f"a shape must be a list of at most {MAX_RANK} known sizes, got {shown(shape)}")
        check_size(shape, dtype)
        return jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type="weak" in data)

    def namedtuple(self, data: Any, depth: int) -> Any:
        cls = self._class(data["namedtuple"], lambda c: issubclass(c, tuple) and hasattr(c, "_fields"), "named tuple")
        return _made(cls, lambda: cls(*self.items(data["items"], depth)))

    def enumeration(self, data: Any, depth: int) -> Any:
        del depth
        cls = self._class(data["enum"], lambda c: issubclass(c, enum.Enum), "enumeration")
        if "value" in data:
            return _flags(cls, data["value"])
        name = _text(data["name"])
        if name not in cls.__members__:
            raise DescriptionError(f"{cls.__qualname__} has no member {shown(name)}")
        return cls.__members__[name]

    def mapping(self, data: Any, depth: int) -> Any:
        if type(data["map"]) is not list or len(data["map"]) > _MAX_KEYS:
            raise DescriptionError(f"expected a list of at most {_MAX_KEYS} pairs, got {shown(data['map'])}")
        pairs = [self.items(pair, depth, 2) for pair in data["map"]]
        return _hashed(lambda: dict(pairs), pairs)

    def set(self, data: Any, depth: int) -> Any:
        found = self.items(data["set"], depth)
        if len(found) > _MAX_KEYS:
            raise DescriptionError(f"a set has at most {_MAX_KEYS} items, got {len(found)}")
        return _hashed(lambda: frozenset(found), found)

    def range(self, data: Any, depth: int) -> Any:
        bounds = self.items(data["range"], depth, 3)
        if any(type(bound) is not int for bound in bounds) or not bounds[2]:
            raise DescriptionError(f"a range needs three integers, got {shown(bounds)}")
        return range(*bounds)

    def partial(self, data: Any, depth: int) -> Any:
        function, keywords = self.value(data["partial"], depth), self.value(data["kwargs"], depth)
        if not callable(function) or type(keywords) is not dict or not all(type(name) is str for name in keywords):
            raise DescriptionError(f"a partial needs a function and keywords, got {shown(data)}")
        return functools.partial(function, *self.items(data["args"], depth), **keywords)

    def node(self, data: Any, depth: int) -> Any:
        name = _text(data["node"])
        cls = _CONTAINERS.get(name) or self._class(name, lambda c: True, "pytree type")
        children, aux = self.items(data["children"], depth), self.value(data["aux"], depth)
        return _made(cls, lambda: compat.tracing.pytree_node(cls, aux, children))

    def record(self, data: Any, depth: int) -> Any:
        cls = self._class(data["dataclass"], dataclasses.is_dataclass, "dataclass")
        given, fields = data["fields"], dataclasses.fields(cls)
        if type(given) is not dict or set(given) != {field.name for field in fields}:
            raise DescriptionError(f"the fields of {cls.__qualname__} differ from {shown(given)}")
        values = {field.name: self.value(given[field.name], depth) for field in fields if field.init}
        return _made(cls, lambda: cls(**values))

    def named(self, data: Any, depth: int) -> Any:
        del depth
        name = _text(data["name"])
        return _PLAIN_TYPES.get(name) or self._find(name)

    def _class(self, name: Any, fits: Callable[[Any], bool], what: str) -> Any:
        cls = self._find(_text(name))
        if not isinstance(cls, type) or not fits(cls):
            raise DescriptionError(f"{quoted(name)} is no {what}")
        return cls

    def _find(self, name: str) -> Any:
        found = self._names.find(name)
        if found is None:
            raise DescriptionError(
                f"{quoted(name)} may not be named here: import its module, and use it as an annotation or default in "
                "the kernel's run, or mark it with @ejkernel.ops.nameable"
            )
        return found


_Form = Callable[[_Reader, Any, int], Any]
_FORMS: Final[dict[frozenset[str], _Form]] = {
    frozenset(keys.split()): form
    for keys, form in {
        "array": _Reader.array,
        "array weak": _Reader.array,
        "float": lambda reader, data, depth: _from_hex(data["float"]),
        "complex": lambda reader, data, depth: complex(*map(_from_hex, reader.items(data["complex"], depth, 2))),
        "bytes": lambda reader, data, depth: _bytes(data["bytes"]),
        "enum name": _Reader.enumeration,
        "enum value": _Reader.enumeration,
        "namedtuple items": _Reader.namedtuple,
        "list": lambda reader, data, depth: reader.items(data["list"], depth),
        "map": _Reader.mapping,
        "set": _Reader.set,
        "slice": lambda reader, data, depth: slice(*reader.items(data["slice"], depth, 3)),
        "range": _Reader.range,
        "spec": lambda reader, data, depth: _spec(reader.items(data["spec"], depth)),
        "dtype": lambda reader, data, depth: _dtype(data["dtype"]),
        "partial args kwargs": _Reader.partial,
        "node children aux": _Reader.node,
        "dataclass fields": _Reader.record,
        "name": _Reader.named,
    }.items()
}


def _made(cls: Any, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except DescriptionError:
        raise
    except Exception as error:  # the class's own code may raise any exception
        text = f"{cls.__module__}.{cls.__qualname__} rejected the values: {type(error).__name__}: {error}"
        raise DescriptionError(text) from error


def _flags(cls: Any, value: object) -> Any:
    if not issubclass(cls, enum.Flag) or type(value) is not int:
        raise DescriptionError(f"{cls.__qualname__} has no member of value {shown(value)}")
    return _made(cls, lambda: cls(value))


def _hashed(make: Callable[[], Any], of: object) -> Any:
    try:
        return make()
    except TypeError as error:
        raise DescriptionError(f"{shown(of)} cannot be hashed") from error


def _dtype(name: Any) -> Any:
    dtype = parse_dtype(_text(name)) or _key_dtypes().get(name)
    if dtype is None:
        raise DescriptionError(f"{name!r} is not a dtype")
    return dtype


@functools.cache
def _key_dtypes() -> dict[str, Any]:
    """Return the dtypes of random keys by name; NumPy has no names for them."""
    found = [jax.eval_shape(functools.partial(jax.random.key, 0, impl=impl)).dtype for impl in _KEY_IMPLEMENTATIONS]
    return {str(dtype): dtype for dtype in found}


def _from_hex(text: object) -> float:
    try:
        return float.fromhex(_text(text.get("float") if type(text) is dict else text))
    except ValueError as error:
        raise DescriptionError(f"{text!r} is not a float") from error


def _bytes(text: object) -> bytes:
    try:
        return bytes.fromhex(_text(text))
    except ValueError as error:
        raise DescriptionError("bytes must be hexadecimal digits") from error


def _spec(items: Sequence[object]) -> Any:
    names = [part for item in items for part in (item if type(item) is tuple else (item,))]
    if not all(name is None or type(name) is str for name in names):
        raise DescriptionError(f"a partition must consist of axis names, got {shown(items)}")
    return jax.sharding.PartitionSpec(*items)


def _text(value: object) -> str:
    if type(value) is not str:
        raise DescriptionError(f"expected a string, got {shown(value)}")
    return value
