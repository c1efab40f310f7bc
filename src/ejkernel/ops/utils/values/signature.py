# SPDX-License-Identifier: Apache-2.0
"""Describe a call's arguments as plain data that is the same in every process.

Arrays become dtype and shape; all other values become their value or name. Values with neither, e.g. a lambda or an
object with only an address, raise `UnstableKeyError`, because a name that differs between processes would cause wrong
cache hits.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib
import json
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.errors import UnstableKeyError
from ejkernel.ops.utils.error_text import value_text
from ejkernel.ops.utils.values.identity import state_of

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.Ref, jax.ShapeDtypeStruct, jax.core.ShapedArray)
_NO_ARRAYS = (np.flexible, np.object_, np.datetime64, np.timedelta64)  # NumPy scalars without a JAX dtype
_JAX_DTYPES = type(jnp.float32)
# Wrappers that do not change the result of a function.
_TRANSPARENT: tuple[Any, ...] = (type(jax.jit(lambda: None)), type(functools.cache(lambda: None)))
# Parts of a description outside the key: `op` is stored beside it; the others tell how a call came about.
_NOT_IN_KEY: Final = ("op", "wiring", "defaults")
_MAX_BITS: Final = 4096  # Python writes no integers of more than 4,300 digits
# Public modules with JAX's array functions.
JAX_MODULES: Final = ("jax.numpy", "jax.nn", "jax.lax", "jax.scipy.special", "jax.numpy.linalg")


class HasType(Protocol):
    """An array or its representative: a tracer, a `jax.ShapeDtypeStruct`, or the type that JAX gives it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type of the elements."""


def is_array(value: object) -> bool:
    """Return whether a call treats `value` as an array: concrete, traced or abstract."""
    return isinstance(value, _ARRAYS) and not isinstance(value, _NO_ARRAYS)


def is_inexact(value: HasType) -> bool:
    """Return whether `value` has floating-point or complex numbers, and so a gradient."""
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def array_fault(value: object) -> str:
    """Return what is wrong with a NumPy array that JAX does not support, and what to do; empty for any other value."""
    if not isinstance(value, np.ndarray):
        return ""
    if isinstance(value, np.ma.MaskedArray):
        return "a masked array of NumPy, which JAX does not support; pass its filled() and, if needed, the mask."
    try:
        jax.typeof(value)
    except TypeError:
        kind = value.dtype
    else:
        return ""
    numeric = kind.kind in "biufc" and not kind.isnative
    fix = "x.astype(x.dtype.newbyteorder())" if numeric else "e.g. np.asarray(x, np.float32)"
    return f"a NumPy array of dtype {kind}, which JAX does not support; pass {fix}."


def wraps_array(value: object) -> bool:
    """Return whether `value` wraps an array (it has `__jax_array__`), e.g. a parameter of a model."""
    return hasattr(type(value), "__jax_array__") and not isinstance(value, _ARRAYS)


def as_array(value: Any) -> Any:
    """Return `value` as an array, unwrapping `__jax_array__`."""
    return value.__jax_array__() if wraps_array(value) else value


def abstract(value: object) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and weak type that JAX gives `value`, without its data."""
    aval: Any = value if isinstance(value, jax.ShapeDtypeStruct | jax.core.AbstractValue) else jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def type_text(value: HasType) -> str:
    """Return the dtype and shape of `value`, e.g. `float32[4,8]`."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def is_known(*sizes: object) -> bool:
    """Return whether all sizes are numbers; a program exported for many shapes may have symbolic sizes."""
    return all(isinstance(size, int | np.integer) for size in sizes)


def abstract_tree(tree: object) -> Any:
    """Return `tree` with every array replaced by its `ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: abstract(leaf) if is_array(leaf) else leaf, tree)


def describe(value: object) -> Any:
    """Return `value`, an argument or a container of arguments, as JSON data that depends only on its content.

    Arrays are described by their types, since their values do not belong to the call's identity. Arrays inside static
    values, e.g. a partial function, are rejected: their values matter, and a description does not contain them.

    Raises:
        UnstableKeyError: `value` contains a value without a stable name; the message says what to pass instead.
    """
    if is_array(value):
        aval = abstract(value)
        shape = [dim if isinstance(dim, int) else str(dim) for dim in aval.shape]  # a symbolic dimension has a name
        return {"array": [str(aval.dtype), shape]} | ({"weak": True} if aval.weak_type else {})
    return _describe(value, describe)


def key_of(description: dict[str, Any]) -> str:
    """Return the key of a described call, in which arguments marked as defaults do not count."""
    content = {name: value for name, value in description.items() if name not in _NOT_IN_KEY}
    args, kwargs, spelled_out = (description.get(name) for name in ("args", "kwargs", "defaults"))
    # A file may hold anything.
    if isinstance(args, list) and isinstance(kwargs, dict) and isinstance(spelled_out, dict):
        count, names = spelled_out.get("args"), spelled_out.get("kwargs")
        if type(count) is int and 0 <= count <= len(args) and isinstance(names, list):
            content["args"] = args[: len(args) - count]
            content["kwargs"] = {name: value for name, value in kwargs.items() if name not in names}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return digest_of(text, 16)


def digest_of(content: str | bytes, digits: int | None = None) -> str:
    """Return the SHA-256 of a content in hex digits, or only the first `digits` of them."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:digits]


def describe_static(value: Any) -> Any:
    """Return the description of a static value, which must not contain arrays.

    Raises:
        UnstableKeyError: See `describe`; also if the value contains an array.
    """
    if is_array(value):
        raise _array_inside(value)
    return _describe(value, describe_static)


def _describe(value: Any, inner: Callable[[Any], Any]) -> Any:
    """Return the description of a value that is no array, whose items `inner` describes."""
    if isinstance(value, enum.Enum):  # before the plain types: a member of a `StrEnum` is also a str
        is_member = value.name in type(value).__members__  # a union of flags, or none of them, has no name of its own
        return {"enum": _type_name(type(value))} | ({"name": value.name} if is_member else {"value": value.value})
    kind: Any = type(value)
    if kind in _EXACT:
        return _EXACT[kind](value)
    items = _describe_container(value, inner)
    return _describe_object(value, inner) if items is None else items


def _describe_container(value: Any, inner: Callable[[Any], Any]) -> Any:
    """Return a standard container with its items described by `inner`; `None` for anything else."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"namedtuple": _type_name(type(value)), "items": [inner(item) for item in value]}
    if isinstance(value, jax.sharding.PartitionSpec):
        return {"spec": [inner(item) for item in value]}
    kind: Any = type(value)
    if kind is tuple:
        return [inner(item) for item in value]
    if kind is list:
        return {"list": [inner(item) for item in value]}
    if kind is dict:
        return {"map": _sorted([[describe_static(key), inner(item)] for key, item in value.items()])}
    if kind in {set, frozenset}:
        return {"set": _sorted([describe_static(item) for item in value])}
    return None


def _describe_object(value: Any, inner: Callable[[Any], Any]) -> Any:
    if _is_dtype(value):
        return {"dtype": str(np.dtype(value))}
    if type(value) is slice:
        return {"slice": [describe_static(part) for part in (value.start, value.stop, value.step)]}
    if type(value) is functools.partial and not vars(value):
        return {
            "partial": describe_static(value.func),
            "args": describe_static(value.args),
            "kwargs": describe_static(value.keywords),
        }
    if not isinstance(value, type) and not jax.tree_util.treedef_is_leaf(jax.tree.structure(value)):
        return _describe_node(value, inner)
    if wraps_array(value):
        raise _array_inside(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: describe_static(getattr(value, field.name)) for field in dataclasses.fields(value)}
        # An extra attribute may affect the result, but a key would not contain it.
        if not fields.keys() >= dict(state_of(value)).keys():
            raise _unstable(value)
        return {"dataclass": _type_name(type(value)), "fields": fields}
    if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
        return {"name": value.__name__}
    if callable(value):
        return {"name": name_of(value)}
    raise _unstable(value)


def _describe_node(value: object, inner: Callable[[Any], Any]) -> dict[str, Any]:
    flat = jax.tree_util.default_registry.flatten_one_level(value)
    # A node serving as its own static data (`register_static`) would recurse forever.
    if flat is None or flat[1] is value:
        raise _unstable(value)
    children, aux = flat
    described = [inner(child) for child in children]
    return {"node": _type_name(type(value)), "children": described, "aux": describe_static(aux)}


def _is_dtype(value: object) -> bool:
    """Return whether `value` represents a dtype: an `np.dtype`, or e.g. `np.int8` or `jnp.bfloat16`."""
    if isinstance(value, type) and issubclass(value, np.generic):
        return True
    return isinstance(value, np.dtype | _JAX_DTYPES)


def name_of(function: object) -> str:
    """Return the `module.qualname` under which every process finds `function`.

    Raises:
        UnstableKeyError: The name does not exist, or refers to another object.
    """
    if str(getattr(function, "__module__", "")).partition(".")[0] in ("jax", "jaxlib", "numpy"):
        public = _public_jax_names().get(id(function))
        if public is not None:
            return public
    target: Any = function
    while isinstance(target, _TRANSPARENT):
        target = target.__wrapped__
    module, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if module and qualname and "<" not in qualname and any(_look_up(module, qualname) is f for f in (function, target)):
        return f"{importable(module)}.{qualname}"
    raise _unstable(function)


@functools.cache
def _public_jax_names() -> dict[int, str]:
    """Return the public names of JAX's functions by id; `__module__` is a private, unstable path."""
    names: dict[int, str] = {}
    for path in (*JAX_MODULES, "jax"):
        for name, value in sorted(vars(importlib.import_module(path)).items()):
            if callable(value) and not name.startswith("_"):
                names.setdefault(id(value), f"{path}.{name}")
    return names


def _look_up(module: str, qualname: str) -> Any:
    # No import: the module of an existing function is loaded.
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def importable(module: str) -> str:
    """Return the name of a module when imported, which differs for `__main__`."""
    main = sys.modules.get("__main__")
    if module != "__main__" or main is None:
        return module
    if main.__spec__ is not None:
        return main.__spec__.name.removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else module


def _type_name(cls: type) -> str:
    if "<" in cls.__qualname__ or _look_up(cls.__module__, cls.__qualname__) is not cls:
        raise _unstable(cls)
    return f"{importable(cls.__module__)}.{cls.__qualname__}"


def _sorted(items: Sequence[object]) -> list[Any]:
    # The order of sets and mappings differs between processes.
    return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))


def _unstable(value: object) -> UnstableKeyError:
    return UnstableKeyError(
        f"{value_text(value)} has no name that is the same in every process; pass a number, a string, an enum, a "
        "dataclass, or a function defined at the top level of a module."
    )


def _array_inside(value: object) -> UnstableKeyError:
    return UnstableKeyError(
        f"{value_text(value)} is an array inside a static argument, but keys do not contain array values; pass the "
        "array as an argument."
    )


def _text(value: str) -> str:
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        raise UnstableKeyError(f"{value_text(value)} is not valid Unicode; pass another name.") from None
    return str(value)


def _int(value: int) -> int:
    if value.bit_length() > _MAX_BITS:
        raise UnstableKeyError(f"an integer of {value.bit_length()} bits is too long for a key; pass it as an array.")
    return value


# By exact type: an instance of a subclass may behave differently.
_EXACT: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: _text,
    np.str_: _text,
    int: _int,
    float: lambda value: {"float": value.hex()},
    complex: lambda value: {"complex": [value.real.hex(), value.imag.hex()]},
    bytes: lambda value: {"bytes": value.hex()},
    np.bytes_: lambda value: {"bytes": bytes(value).hex()},
    range: lambda value: {"range": [value.start, value.stop, value.step]},
}
