# SPDX-License-Identifier: Apache-2.0
"""Identity of static values within a process: type and value, recursively through containers; otherwise `is`.

Numbers are compared by their bits. Partial functions, frozen dataclasses and the static data of pytree nodes count as
containers. Mutable values, e.g. a list in a partial function, are compared by `is` *and* by content.

This differs from a key. A key uses descriptions, which are all that two processes can compare, but values that compute
differently may have equal descriptions. Within a process, the values themselves decide which calls share a trace.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import hashlib
import struct
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import jax
import numpy as np

from ejkernel.ops.utils.weak_caches import Bounded

Held = Callable[[], Any]
T = TypeVar("T")

_BY_VALUE = frozenset({bool, int, str, bytes, np.str_, np.bytes_, type(None), type(...)})
_JAX_VALUES = (jax.sharding.PartitionSpec, jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.AbstractMesh)
_MUTABLE: dict[type, Callable[[Any], Any]] = {  # including subclasses
    list: list.__iter__,
    set: lambda value: (frozenset(set.__iter__(value)),),
    dict: dict.items,
    bytearray: lambda value: (bytes(value),),
    collections.deque: lambda value: (value.maxlen, *collections.deque.__iter__(value)),
    np.ndarray: lambda value: (value.dtype, value.shape, hashlib.sha256(value.tobytes()).digest()),
}
_PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    tuple: tuple,
    slice: lambda value: (value.start, value.stop, value.step),
    range: lambda value: (value.start, value.stop, value.step),
    functools.partial: lambda value: (value.func, value.args, tuple(value.keywords.items()), *vars(value).items()),
    types.BuiltinMethodType: lambda value: (value.__self__, value.__name__),
}
_MAY_CHANGE = "may change"  # marks the identity of a value whose content may change
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the type was created by a class statement or an extension module


class Weak(weakref.ref[Any]):
    """A weak reference, equal to another reference of the same object regardless of the object's `__eq__`."""

    __slots__ = ("_address",)

    def __init__(self, value: object) -> None:
        super().__init__(value)  # type: ignore[call-arg] # the stubs give it __new__ alone
        self._address = id(value)

    def __hash__(self) -> int:
        return self._address

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Weak):
            return self is other
        mine = self()
        return mine is not None and mine is other()

    def __ne__(self, other: object) -> bool:  # overrides weakref's `__ne__`, which compares the objects
        return not self == other


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Strong:
    """A strong reference with the same equality, for objects that do not support weak references."""

    value: Any

    def __call__(self) -> Any:
        """Return the object."""
        return self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strong) and other.value is self.value


def by_is(value: object) -> Held:
    """Return a weak reference, or a strong one without weak reference support; equal only for the same object."""
    if isinstance(value, types.MethodType):  # each attribute access creates a new method object
        return weakref.WeakMethod(value)
    try:
        return Weak(value)
    except TypeError:
        return Strong(value)


def identity(value: Any, path: tuple[int, ...] = ()) -> Hashable:
    """Return a hashable identity of a static value. Equal identities mean that the values compute the same.

    Numbers are compared by type and bits: `1`, `1.0` and `True` differ, and so do `0.0` and `-0.0`. Containers,
    partial functions, bound methods, frozen dataclasses and other hashable values are compared by content. Mutable
    values, e.g. a list in a partial function, and all other objects are compared by `is`.

    Args:
        value: The value.
        path: Addresses of the containers around it, to find a value that contains itself.
    """
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
    if id(value) in path:
        return by_is(value)
    return _of_parts(value, kind, (*path, id(value)))


class Token:
    """The identity of an immutable object, with its hash computed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: Hashable) -> None:
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Token) and self._parts == other._parts)


class _Few(Bounded[T]):
    most = 64


_tokens: dict[int, tuple[Any, Token]] = {}  # by address; the weak reference's callback removes the entry
_kept = _Few[tuple[Any, Token]]()  # by address, for objects without weak reference support, held alive


def token_of(value: object) -> Hashable:
    """Return `identity(value)`, cached for immutable objects."""
    address = id(value)
    known = _tokens.get(address) or _kept.get(address)
    if known is not None:
        return known[1]
    found = identity(value)
    if _has(found, lambda part: part is _MAY_CHANGE):
        return found
    token = Token(found)
    tokens = _tokens  # at interpreter shutdown the global name is deleted before the callbacks run
    try:
        tokens[address] = weakref.ref(value, lambda _: tokens.pop(address, None)), token
    except TypeError:
        refers = _has(found, lambda part: isinstance(part, Weak | Strong))
        if dataclasses.is_dataclass(value) and not refers:  # e.g. a configuration with slots
            _kept.replace(address, (value, token))  # holding the value keeps its address from being reused
    return token


def _has(parts: object, test: Callable[[object], bool]) -> bool:
    """Return whether a part of an identity passes a test."""
    return any(_has(part, test) for part in parts) if isinstance(parts, tuple | frozenset) else test(parts)


def _of_parts(value: Any, kind: Any, path: tuple[int, ...]) -> Hashable:
    mutable = next((base for base in _MUTABLE if isinstance(value, base)), None)
    if mutable is not None:
        return (kind, _MAY_CHANGE, by_is(value), *[identity(part, path) for part in _MUTABLE[mutable](value)])
    if kind is types.MappingProxyType:  # each access to a class's `__dict__` creates a new proxy
        return (kind, _MAY_CHANGE, *[identity(part, path) for part in value.items()])
    if kind in _PARTS:
        return (kind, *[identity(part, path) for part in _PARTS[kind](value)])
    if kind is types.MethodType:
        return (kind, by_is(value.__func__), by_is(value.__self__))
    if kind is frozenset:
        return (kind, frozenset(identity(part, path) for part in value))
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return (kind, *[identity(part, path) for part in value])
    parameters = getattr(kind, "__dataclass_params__", None)
    is_mutable = parameters is not None and not parameters.frozen
    by_value = kind.__eq__ is not object.__eq__ and kind.__hash__ is not object.__hash__
    by_value = by_value and all(cls.__flags__ & _HEAP_TYPE for cls in kind.__mro__[:-1])  # visible to Python
    is_visible = is_mutable or kind is types.SimpleNamespace or by_value
    state = [(name, identity(part, path)) for name, part in state_of(value)] if is_visible else []
    if not state:
        return by_is(value)
    if kind.__hash__ is None or is_mutable:
        return (kind, _MAY_CHANGE, by_is(value), *state)
    return (kind, *state) if dataclasses.is_dataclass(value) else (kind, _MAY_CHANGE, *state)


def identity_of_node(value: object, aux: Any) -> Hashable:
    """Return the identity of a pytree node's static data (`aux`), which JAX compares by `==`.

    Flattening a node may create this data anew each time, so objects in it are compared by content.
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


def state_of(value: object) -> list[tuple[str, Any]]:
    """Return the attributes of an instance, without cached properties."""
    kind = type(value)
    found: Any = object.__getstate__(value)  # of the `__dict__`; with slots, a pair
    in_dict, in_slots = found if isinstance(found, tuple) else (found, None)
    state, own = {**(in_dict or {}), **(in_slots or {})}, vars(kind)
    return [(name, part) for name, part in state.items() if not isinstance(own.get(name), functools.cached_property)]
