# SPDX-License-Identifier: Apache-2.0
"""Describe a call's arguments as plain data that is the same in every process.

Arrays become dtype and shape; everything else becomes its value or its name. What has neither - a lambda, an object
that only has an address - raises `UnstableKeyError`, because a name that differs between processes is a wrong hit
waiting to happen.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejkernel.ops.errors import UnstableKeyError

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, jax.core.ShapedArray)
# Where JAX's own functions are known by; their __module__ is a private path that moves between releases.
_PUBLIC_JAX = ("jax.numpy", "jax.nn", "jax.lax", "jax.scipy.special", "jax")


def is_array(value: object) -> bool:
    """Return whether `value` is an array to a call: concrete, traced or abstract."""
    return isinstance(value, _ARRAYS)


def abstract(value: Any) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and weak type that JAX gives `value`, without its data."""
    aval = value if isinstance(value, jax.ShapeDtypeStruct | jax.core.ShapedArray) else jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def abstract_tree(tree: Any) -> Any:
    """Return `tree` with every array replaced by its `ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: abstract(leaf) if is_array(leaf) else leaf, tree)


def describe(value: Any) -> Any:
    """Return `value` as JSON data that depends on nothing but its content.

    Raises:
        UnstableKeyError: `value` holds something without a stable name; the message says what to pass instead.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, enum.Enum):  # before int: an IntEnum is both
        return {"enum": _type_name(type(value)), "name": value.name}
    if is_array(value):
        return _describe_array(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    return _describe_container(value)


def _describe_array(value: Any) -> dict[str, Any]:
    aval = abstract(value)
    shape = [dim if isinstance(dim, int) else str(dim) for dim in aval.shape]  # a symbolic dimension has a name
    described: dict[str, Any] = {"array": [str(aval.dtype), shape]}
    return described | {"weak": True} if aval.weak_type else described


def _describe_container(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"namedtuple": _type_name(type(value)), "items": [describe(item) for item in value]}
    if type(value) is tuple:
        return [describe(item) for item in value]
    if type(value) is list:
        return {"list": [describe(item) for item in value]}
    if isinstance(value, Mapping) and type(value) is dict:
        return {"map": _sorted([[describe(key), describe(item)] for key, item in value.items()])}
    if isinstance(value, set | frozenset):
        return {"set": _sorted([describe(item) for item in value])}
    if isinstance(value, slice):
        return {"slice": [describe(value.start), describe(value.stop), describe(value.step)]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, jax.sharding.PartitionSpec):
        return {"spec": [describe(item) for item in value]}
    return _describe_object(value)


def _describe_object(value: Any) -> Any:
    dtype = _dtype_of(value)
    if dtype is not None:
        return {"dtype": dtype}
    if isinstance(value, functools.partial) and not isinstance(value, jax.tree_util.Partial):
        return {"partial": describe(value.func), "args": describe(value.args), "kwargs": describe(value.keywords)}
    if not isinstance(value, type) and not jax.tree_util.treedef_is_leaf(jax.tree.structure(value)):
        return _describe_node(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"dataclass": _type_name(type(value)), "fields": fields}
    if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
        return {"name": value.__name__}
    if callable(value):
        return {"name": name_of(value)}
    raise _unstable(value)


def _describe_node(value: Any) -> dict[str, Any]:
    flat = jax.tree_util.default_registry.flatten_one_level(value)
    if flat is None:
        raise _unstable(value)
    children, aux = flat
    return {"node": _type_name(type(value)), "children": [describe(child) for child in children], "aux": describe(aux)}


def _dtype_of(value: Any) -> str | None:
    """Return the dtype that `value` stands for (`np.dtype`, `np.int8`, `jnp.bfloat16`), or `None`."""
    if isinstance(value, type) and issubclass(value, np.generic):
        return str(np.dtype(value))
    if callable(value) and isinstance(getattr(value, "dtype", None), np.dtype):
        return str(value.dtype)
    return str(value) if isinstance(value, np.dtype) else None


def name_of(function: Any) -> str:
    """Return the `module.qualname` under which every process finds `function`.

    Raises:
        UnstableKeyError: nothing of that name is found there, or it is something else.
    """
    if getattr(function, "__module__", "").partition(".")[0] in ("jax", "jaxlib", "numpy"):
        public = _public_jax_names().get(id(function))
        if public is not None:
            return public
    target = function
    while True:
        module, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
        if module and qualname and "<" not in qualname and _look_up(module, qualname) in (function, target):
            return f"{importable(module)}.{qualname}"
        target = getattr(target, "__wrapped__", None)
        if target is None:
            raise _unstable(function)


@functools.cache
def _public_jax_names() -> dict[int, str]:
    names: dict[int, str] = {}
    for path in _PUBLIC_JAX:
        for name, value in sorted(vars(importlib.import_module(path)).items()):
            if callable(value) and not name.startswith("_"):
                names.setdefault(id(value), f"{path}.{name}")
    return names


def _look_up(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def main_is(module: str) -> bool:
    """Return whether `module` is what others call the script that this process runs."""
    return module != "__main__" and module == importable("__main__")


def importable(module: str) -> str:
    """Give a script's functions the name that they have when the script is imported."""
    main = sys.modules.get("__main__")
    if module != "__main__" or main is None:
        return module
    if main.__spec__ is not None:
        return main.__spec__.name.removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else module


def _type_name(cls: type) -> str:
    if "<" in cls.__qualname__ and "<locals>" not in cls.__qualname__:
        raise _unstable(cls)
    return f"{importable(cls.__module__)}.{cls.__qualname__}"


def _sorted(items: list[Any]) -> list[Any]:
    return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))


def _unstable(value: Any) -> UnstableKeyError:
    return UnstableKeyError(
        f"{value!r} has no name that is the same in every process; pass a number, a string, an enum, a dataclass, "
        "or a function defined at the top level of a module."
    )


def typed_token(value: Any) -> Any:
    """Return a hashable stand-in for a static value that tells `1`, `1.0` and `True` apart, and `0.0` and `-0.0`.

    Raises:
        UnstableKeyError: `value` is neither hashable nor nameable.
    """
    if isinstance(value, float):
        return (type(value), value.hex())
    if value is None or isinstance(value, bool | int | str | bytes | types.FunctionType | np.dtype | type):
        return (type(value), value)
    try:
        return (type(value), json.dumps(describe(value), sort_keys=True))
    except UnstableKeyError:
        try:
            hash(value)
        except TypeError:
            raise _unstable(value) from None
        return (type(value), value)
