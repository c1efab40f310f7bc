# SPDX-License-Identifier: Apache-2.0
"""Calls with any number of batch axes: folded into the single one of the implementations, and unfolded again."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.values.signature import is_array


def batch_of(query: Any, key: Any, value: Any) -> tuple[int, ...]:
    """Return the sizes of the batch axes.

    Raises:
        ArgumentError: The batch axes of query, key and value differ.
    """
    count = len(query.shape) - 3
    if count < 0:
        raise ArgumentError(f"query must have axes [..., queries, heads, head_dim]; got shape {tuple(query.shape)}.")
    batch = tuple(query.shape[:count])
    for name, x in (("key", key), ("value", value)):
        if not is_array(x) or len(x.shape) != count + 3 or tuple(x.shape[:count]) != batch:
            got = tuple(x.shape) if is_array(x) else type(x).__name__
            raise ArgumentError(f"{name} must have query's batch axes, {batch}, and three more; got {got}.")
    return batch


def fold(name: str, x: Any, batch: tuple[int, ...]) -> Any:
    """Return an array with its batch axes folded into one; `None` and other values are returned unchanged."""
    if not is_array(x):
        return x
    if tuple(x.shape[: len(batch)]) != batch:
        raise ArgumentError(f"{name} must begin with query's batch axes, {batch}; got shape {tuple(x.shape)}.")
    return jnp.reshape(x, (math.prod(batch), *x.shape[len(batch) :]))


def fold_broadcast(name: str, x: Any, batch: tuple[int, ...]) -> Any:
    """Return an array that broadcasts to `[*batch, heads, queries, keys]`, folded to four axes."""
    if not is_array(x):
        return x
    shape = (1,) * (len(batch) + 3 - len(x.shape)) + tuple(x.shape)
    own, rest = shape[: len(batch)], shape[len(batch) :]
    if len(rest) != 3 or any(n not in (1, m) for n, m in zip(own, batch, strict=True)):
        raise ArgumentError(
            f"{name} must be broadcastable to [*batch, heads, queries, keys], where the batch is {batch}; got shape "
            f"{tuple(x.shape)}."
        )
    x = jnp.reshape(x, shape)
    if own == (1,) * len(batch):
        return jnp.reshape(x, (1, *rest))
    return jnp.reshape(jnp.broadcast_to(x, (*batch, *rest)), (math.prod(batch), *rest))


def fold_mask(mask: Any, batch: tuple[int, ...]) -> Any:
    """Return an attention mask, `[*batch, keys]` or broadcastable, folded to two or four axes."""
    if is_array(mask) and len(mask.shape) == len(batch) + 1:
        return fold("attention_mask", mask, batch)
    return fold_broadcast("attention_mask", mask, batch)


def fold_segments(segments: Any, batch: tuple[int, ...]) -> Any:
    """Return segment ids, one array or a pair, with their batch axes folded into one."""
    if isinstance(segments, tuple | list):
        return tuple(fold("segment_ids", x, batch) for x in segments)
    return fold("segment_ids", segments, batch)


def unfold(x: Any, batch: tuple[int, ...]) -> Any:
    """Return a result with the original batch axes."""
    return jnp.reshape(x, (*batch, *x.shape[1:]))
