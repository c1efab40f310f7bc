# SPDX-License-Identifier: Apache-2.0
"""Batch axes, and examples of `vmap`: folded into the single batch axis of the implementations, and unfolded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ejkernel.kernels._merging import Merging
from ejkernel.kernels._numbers import is_number
from ejkernel.kernels._options import within_32_bits
from ejkernel.kernels._varying import all_varying
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.values.signature import is_array

from ._arguments import segments_within_32_bits


def batch_of(query: Any, key: Any, value: Any, dropout_rate: Any) -> Merging:
    """Return how the batch axes become one.

    Raises:
        ArgumentError: The batch axes of query, key and value differ, or the examples that dropout counts would depend
            on their sharding.
    """
    count = len(query.shape) - 3
    if count < 0:
        raise ArgumentError(f"query must have axes [..., queries, heads, head_dim]; got shape {tuple(query.shape)}.")
    batch = tuple(query.shape[:count])
    for name, x in (("key", key), ("value", value)):
        if not is_array(x) or len(x.shape) != count + 3 or tuple(x.shape[:count]) != batch:
            got = tuple(x.shape) if is_array(x) else type(x).__name__
            raise ArgumentError(f"{name} must have query's batch axes, {batch}, and three more; got {got}.")
    found = Merging.of(query, count)
    if not found.keeps_order:
        _check_no_dropout(dropout_rate)
    return found


def _check_no_dropout(rate: Any) -> None:
    if not is_number(rate) or rate:
        raise ArgumentError(
            "dropout_rate must be 0 where batch axes after the first are sharded over explicit mesh axes, got "
            f"{rate!r}; use jax.sharding.reshard to shard only the first."
        )


def fold(name: str, x: Any, batch: Merging) -> Any:
    """Return an array with its batch axes folded into one; `None` and other values are returned unchanged."""
    if not is_array(x):
        return x
    if tuple(x.shape[: len(batch.sizes)]) != batch.sizes:
        raise ArgumentError(f"{name} must begin with query's batch axes, {batch.sizes}; got shape {tuple(x.shape)}.")
    return batch.merge(name, within_32_bits(x))


def fold_broadcast(name: str, x: Any, batch: Merging) -> Any:
    """Return an array that broadcasts to `[*batch, heads, queries, keys]`, folded to four axes."""
    if not is_array(x):
        return x
    sizes = batch.sizes
    shape = (1,) * (len(sizes) + 3 - len(x.shape)) + tuple(x.shape)
    own, rest = shape[: len(sizes)], shape[len(sizes) :]
    if len(rest) != 3 or any(n not in (1, m) for n, m in zip(own, sizes, strict=True)):
        raise ArgumentError(
            f"{name} must be broadcastable to [*batch, heads, queries, keys], where the batch is {sizes}; got shape "
            f"{tuple(x.shape)}."
        )
    x = jnp.reshape(x, shape)
    if own == (1,) * len(sizes):
        return jnp.reshape(x, (1, *rest))
    return batch.merge(name, jnp.broadcast_to(x, (*sizes, *rest)))


def fold_mask(mask: Any, batch: Merging) -> Any:
    """Return an attention mask, `[*batch, keys]` or broadcastable, folded to two or four axes."""
    if is_array(mask) and len(mask.shape) == len(batch.sizes) + 1:
        return fold("attention_mask", mask, batch)
    return fold_broadcast("attention_mask", mask, batch)


def fold_segments(segments: Any, batch: Merging) -> Any:
    """Return segment ids, one array or a pair, with their batch axes folded into one."""
    segments = segments_within_32_bits(segments)
    if isinstance(segments, tuple):
        return tuple(fold("segment_ids", x, batch) for x in segments)
    return fold("segment_ids", segments, batch)


def fold_examples(
    function: Callable[..., tuple[jax.Array, ...]], bias_of: Callable[[Any], Any] | None = None, *, shared: bool = False
) -> Callable[..., tuple[jax.Array, ...]]:
    """Return `function` with a `vmap` rule that folds examples into the batch axis.

    Args:
        function: Its arguments are trees of arrays; the batch is the first axis of all arguments and results. The first
            array has it in full, others in full or with length 1.
        bias_of: Returns the bias in a tuple of arguments; its gradient is then the fourth result, if there are as many.
            The gradient of a bias that the batch shares is the sum over the examples.
        shared: Whether a bias that all examples and the batch share stays as it is, rather than one copy for each.
    """
    folded: Any = custom_vmap(function)

    def rule(size: int, batched: Any, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        mapped = jax.tree.leaves(batched)
        batch = leaves[0].shape[mapped[0]]
        bias: Any = bias_of(args) if bias_of else None

        def fold(x: Any, is_mapped: bool) -> Any:
            if shared and x is bias and not is_mapped and x.shape[0] == 1:
                return x
            x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
            return x.reshape(size * batch, *x.shape[2:])

        arrays = [fold(x, is_mapped) for x, is_mapped in zip(leaves, mapped, strict=True)]
        found = [x.reshape(size, -1, *x.shape[1:]) for x in folded(*jax.tree.unflatten(structure, arrays))]
        if bias_of and bias is not None and len(found) > 3 and bias.shape[int(bias_of(batched))] < batch:
            found[3] = found[3].sum(axis=1, keepdims=True)
        return tuple(found), (True,) * len(found)

    folded.def_vmap(rule)
    return all_varying(folded)
