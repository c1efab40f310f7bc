# SPDX-License-Identifier: Apache-2.0
"""When two static values of one process are the same: type and value, recursively through containers, else `is`.

This is not what a key says. A description may be equal for values that compute differently, and two processes have
only descriptions in common; within one process nothing but the values themselves decides who shares a trace.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import struct
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, cast

import jax
import numpy as np

Held = Callable[[], Any]

_BY_VALUE = frozenset({bool, int, str, bytes, np.str_, np.bytes_, type(None), type(...)})
_JAX_VALUES = (jax.sharding.PartitionSpec, jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.AbstractMesh)
_MUTABLE: dict[type, Callable[[Any], Any]] = {
    list: tuple,
    bytearray: lambda value: (bytes(value),),
    dict: lambda value: tuple(value.items()),
}
_PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    tuple: tuple,
    slice: lambda value: (value.start, value.stop, value.step),
    range: lambda value: (value.start, value.stop, value.step),
    functools.partial: lambda value: (value.func, value.args, tuple(value.keywords.items()), *vars(value).items()),
    types.MappingProxyType: lambda value: tuple(value.items()),
    types.BuiltinMethodType: lambda value: (value.__self__, value.__name__),
}
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement made it, or an extension module did


class Weak(weakref.ref[Any]):
    """A reference that is equal to another of the same object, whatever the object says of equality."""

    __slots__ = ("_address",)

    def __init__(self, value: Any) -> None:
        super().__init__(value)  # type: ignore[call-arg] # the stubs give it __new__ alone
        self._address = id(value)

    def __hash__(self) -> int:
        return self._address

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Weak):
            return self is other
        mine = self()
        return mine is not None and mine is other()


class Strong:
    """The same for an object that cannot be referred to weakly."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        """Return the object."""
        return self._value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strong) and other._value is self._value


def held_weakly(value: Any) -> Held:
    """Return a function that gives `value` as long as somebody else holds it, or for ever where that cannot be."""
    if isinstance(value, types.MethodType):  # made anew each time it is asked for
        return weakref.WeakMethod(value)
    return by_is(value)


def by_is(value: Any) -> Weak | Strong:
    """Return what is equal for one and the same object alone."""
    try:
        return Weak(value)
    except TypeError:
        return Strong(value)


def identity(value: Any) -> Hashable:
    """Return a hashable stand-in for a static value, which is equal to another's only if the two compute the same.

    Numbers are told apart by type and bits: `1`, `1.0` and `True`, `0.0` and `-0.0`. Containers, partial functions,
    bound methods, frozen dataclasses and other hashable values are what they hold. What may change, such as a list in
    a partial function, and all other objects are themselves.
    """
    return _identity(value, ())


def _identity(value: Any, path: tuple[int, ...]) -> Hashable:
    kind = type(value)
    if kind in _BY_VALUE:
        return (kind, value)
    if kind is float:
        return (kind, struct.pack("<d", value))
    if kind is complex:
        return (kind, struct.pack("<dd", value.real, value.imag))
    if isinstance(value, type | np.dtype | enum.Enum | types.FunctionType):
        return (kind, value) if isinstance(value, np.dtype) else by_is(value)
    if isinstance(value, _JAX_VALUES):
        return (kind, value)
    if id(value) in path:  # it holds itself
        return by_is(value)
    return _of_parts(value, kind, (*path, id(value)))


def _of_parts(value: Any, kind: type, path: tuple[int, ...]) -> Hashable:
    if kind in _MUTABLE:
        return (kind, by_is(value), *[_identity(part, path) for part in _MUTABLE[kind](value)])
    if kind in _PARTS:
        return (kind, *[_identity(part, path) for part in _PARTS[kind](value)])
    if kind is types.MethodType:
        return (kind, by_is(value.__func__), by_is(value.__self__))
    if kind in {set, frozenset}:
        parts = frozenset(_identity(part, path) for part in value)
        return (kind, parts) if kind is frozenset else (kind, by_is(value), parts)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return (kind, *[_identity(part, path) for part in value])
    if _is_mutable_dataclass(value):
        fields = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        return (kind, by_is(value), *[_identity(part, path) for part in fields])
    state = state_of(value) if _is_value_type(kind) else ()
    return (kind, *[(name, _identity(part, path)) for name, part in state]) if state else by_is(value)


def identity_of_node(value: Any, aux: Any) -> Hashable:
    """Return the same for what JAX knows of a pytree's node beside its children, which JAX compares by `==`.

    Such data is made anew whenever the node is taken apart, so objects in it are what they hold.
    """
    if aux is value and state_of(value):  # `jax.tree_util.register_static`
        return (type(value), *[(name, identity(part)) for name, part in state_of(value)])
    found = identity(aux)
    if not isinstance(found, Weak | Strong) or isinstance(aux, type | enum.Enum | types.FunctionType):
        return found
    state = state_of(aux)
    if state:
        return (type(aux), *[(name, identity(part)) for name, part in state])
    try:
        hash(aux)
    except TypeError:
        return found
    return (type(aux), cast(Hashable, aux))


def _is_mutable_dataclass(value: Any) -> bool:
    parameters = getattr(value, "__dataclass_params__", None)
    return parameters is not None and not parameters.frozen


def _is_value_type(kind: type) -> bool:
    """Return whether instances compare and hash by content, all of which Python can see."""
    compares: Any = kind.__eq__
    hashes: Any = kind.__hash__
    by_value = compares is not object.__eq__ and hashes is not None and hashes is not object.__hash__
    return by_value and all(cls.__flags__ & _HEAP_TYPE for cls in kind.__mro__[:-1])


def state_of(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an instance, without those that are only remembered results."""
    kind = type(value)
    state = dict(getattr(value, "__dict__", {}))
    for cls in kind.__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = (
                f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            )
            if mangled not in {"__dict__", "__weakref__"} and hasattr(value, mangled):
                state[mangled] = getattr(value, mangled)
    return [
        (name, part) for name, part in state.items() if not isinstance(vars(kind).get(name), functools.cached_property)
    ]
