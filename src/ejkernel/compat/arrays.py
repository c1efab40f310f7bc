# SPDX-License-Identifier: Apache-2.0
"""JAX values: dtypes, random keys, weak types and pytrees."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import array, tree_util

dtypes: Any = jax.dtypes
ArrayImpl: Any = array.ArrayImpl
finfo: Any = jnp.finfo


def key_implementation(dtype: Any) -> str:
    """Return the name of the random generator of a key dtype."""
    return str(dtype._impl.name)


def weakly_typed(value: Any) -> Any:
    """Return `value` as a weakly typed array, which is promoted like a Python number."""
    # The public function cannot create weak types.
    from jax._src.lax.lax import _convert_element_type

    return _convert_element_type(value, jnp.dtype(value.dtype), weak_type=True)


def pytree_node(cls: type, aux: Any, children: Sequence[Any]) -> Any:
    """Return an instance of a registered pytree type with these children.

    jaxlib does not check the number of children of a dataclass and would read past the last one, so this function
    checks it first. Other types are built in Python by their registered function.

    Raises:
        ValueError: `cls` is not a pytree type, or the number of children differs.
    """
    entry = getattr(tree_util, "_registry", {}).get(cls)  # without dataclasses from JAX 0.11 on
    if entry is not None:
        return entry.from_iter(aux, tuple(children))
    if not dataclasses.is_dataclass(cls):
        raise ValueError("it is not a pytree type that can be built from its children")
    like = object.__new__(cls)
    for field in dataclasses.fields(cls):
        object.__setattr__(like, field.name, None)
    flat = jax.tree_util.default_registry.flatten_one_level(like)
    if flat is None or type(aux) is not tuple or (len(list(flat[0])), len(flat[1])) != (len(children), len(aux)):
        raise ValueError("it has another number of children, or of static fields")
    leaves, trees = [], []
    for child in children:
        more, tree = jax.tree.flatten(child)
        leaves += more
        trees.append(tree)
    tree_type: Any = jax.tree_util.PyTreeDef
    tree = tree_type.from_node_data_and_children(jax.tree_util.default_registry, (cls, aux), trees)
    return jax.tree.unflatten(tree, leaves)
