# SPDX-License-Identifier: Apache-2.0
"""Types of loop carries under `shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap, sequential_vmap

from ejkernel import compat

Tree = TypeVar("Tree")


def unify_varying(tree: Tree) -> Tree:
    """Return `tree` with every array varying over the union of their mesh axes.

    Under `shard_map` an array's type includes the axes over which it varies, and a loop's carry must keep its type.
    """
    leaves, structure = jax.tree.flatten(tree)
    varying = [compat.tracing.varying_axes(x) for x in leaves]
    every = frozenset[str]().union(*varying)
    if every:
        missing = [tuple(sorted(every - own)) for own in varying]
        leaves = [jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(leaves, missing, strict=True)]
    unified: Tree = jax.tree.unflatten(structure, leaves)
    return unified


def all_varying(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with arguments and results that vary over the union of the arguments' mesh axes.

    The results of a Mosaic GPU kernel do not say that they vary, and gradients would be summed over devices wrongly.
    """

    def run(*args: Any) -> Any:
        args = unify_varying(args)
        return unify_varying((function(*args), args))[0]

    return run


def one_by_one(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`; under `vmap` it runs on one example after another."""
    sequential: Any = sequential_vmap  # it has no annotations
    return all_varying(sequential(function))(*args)


def of_any_example(condition: jax.Array) -> jax.Array:
    """Return a condition for skipping work; under `vmap` whether it is true for any example, for all of them at once.

    Under `vmap`, a condition for each example makes `jax.lax.cond` compute both branches. Inside `shard_map` it then
    fails: its operands vary as the condition does, but its branches were traced for others.
    """
    found: jax.Array = _any_example(condition)
    return found


def _same(condition: jax.Array) -> jax.Array:
    return condition


def _any_of_batch(size: int, batched: Any, condition: jax.Array) -> tuple[jax.Array, bool]:
    return _any_example(jnp.any(condition, axis=0)), False


_any_example: Any = custom_vmap(_same)
_any_example.def_vmap(_any_of_batch)
