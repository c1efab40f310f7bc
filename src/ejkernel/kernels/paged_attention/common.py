# SPDX-License-Identifier: Apache-2.0
"""The description of a call, and its operands with valid indices."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops.implementation import OperationCall

from .plan import BatchShape, PlanArrays, plan_arrays, valid_batch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagedCall(OperationCall):
    """A call without its arrays.

    Attributes:
        q: Shape of the queries, `[tokens, heads, head_dim]`.
        pages: Shape of the cache, `[pages, page_size, kv_heads, 2, head_dim]`.
        table: Shape of the page table, `[sequences, pages]`.
        dtype: Dtype of the queries and the output.
        cache_dtype: Dtype of the cache.
        scale: Factor on the logits.
        soft_cap: Limit of the logits.
        window: The keys that a query sees before its own; `None`: all.
        value_dim: If the values are part of the keys: their first `value_dim` elements.
        return_lse: Whether the log-sum-exp is returned.
        sinks, scales: Whether the call has sinks, and scales of keys or values.
        planned_for: KV heads (on all devices, if they are sharded) and window of the call's plan; `None` without plan.
    """

    q: tuple[int, ...]
    pages: tuple[int, ...]
    table: tuple[int, ...]
    dtype: str
    cache_dtype: str
    scale: float
    soft_cap: float | None = None
    window: int | None = None
    value_dim: int | None = None
    return_lse: bool = False
    sinks: bool = False
    scales: bool = False
    planned_for: tuple[int, int | None] | None = None

    @property
    def group(self) -> int:
        """The number of query heads that share a KV head."""
        return self.q[1] // self.pages[2]

    @property
    def out_dim(self) -> int:
        """The size of an output vector."""
        return self.pages[4] if self.value_dim is None else self.value_dim

    @property
    def batch_shape(self) -> BatchShape:
        """The sizes that a plan depends on."""
        return BatchShape.of(self.q, self.pages, self.table, self.window)

    @property
    def planned_shape(self) -> BatchShape:
        """The sizes that the call's plan depends on."""
        if self.planned_for is None:
            return self.batch_shape
        kv_heads, window = self.planned_for
        return dataclasses.replace(self.batch_shape, kv_heads=kv_heads, heads=kv_heads * self.group, window=window)


class Operands(NamedTuple):
    """The arrays of a call. In this form, from `valid`, no offset or length leads out of an array."""

    q: jax.Array  # [tokens, heads, head_dim]
    kv_pages: jax.Array  # [pages, page_size, kv_heads, 2, head_dim]; 1 in place of 2 if values are part of the keys
    page_table: jax.Array  # int32 [sequences, pages]
    query_offsets: jax.Array  # int32 [sequences + 1]
    kv_lengths: jax.Array  # int32 [sequences]
    sinks: jax.Array | None  # [heads]
    k_scale: jax.Array | None  # float32 [kv_heads]
    v_scale: jax.Array | None  # float32 [kv_heads]
    plan: PlanArrays | None


def valid(call: PagedCall, args: tuple[Any, ...]) -> Operands:
    """Return the operands with valid offsets and lengths, those of the plan if there is one; see `valid_batch`."""
    given = Operands(*args)
    if given.plan is not None:
        return planned(call, args)[0]
    offsets, lengths = valid_batch(call.batch_shape, given.page_table, given.query_offsets, given.kv_lengths)
    return given._replace(query_offsets=offsets, kv_lengths=lengths)


def planned(call: PagedCall, args: tuple[Any, ...]) -> tuple[Operands, PlanArrays]:
    """Return the operands with the offsets and lengths of a plan, and the plan, computed if the call has none."""
    given = Operands(*args)
    if given.plan is None:
        plan = plan_arrays(call.batch_shape, given.page_table, given.query_offsets, given.kv_lengths)
    else:
        plan = PlanArrays(*given.plan)
    return given._replace(query_offsets=plan.offsets, kv_lengths=plan.lengths, plan=plan), plan


def within_cache(call: PagedCall, pages: jax.Array) -> jax.Array:
    """Return indices of pages that do not lead out of the cache; those outside are not needed."""
    return jnp.clip(pages, 0, max(call.pages[0] - 1, 0))


def sorted_before(ascending: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return how many elements of an ascending vector are at most each of these numbers, int32.

    A binary search would be a loop of small kernels on a GPU.
    """
    return jnp.searchsorted(ascending, numbers, side="right", method="compare_all").astype(jnp.int32)


def as_bits(kv_pages: jax.Array) -> jax.Array:
    """Return a cache of 8-bit floats as integers.

    XLA for CPUs has no such floats, and would convert the whole cache to float16; so it only copies it.
    """
    small = jnp.issubdtype(kv_pages.dtype, jnp.floating) and kv_pages.dtype.itemsize == 1
    return lax.bitcast_convert_type(kv_pages, jnp.uint8) if small else kv_pages


def from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """Return pages from `as_bits` in the cache's dtype."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
