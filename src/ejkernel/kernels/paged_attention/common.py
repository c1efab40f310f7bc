# SPDX-License-Identifier: Apache-2.0
"""The description of a call, and its operands with valid indices."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops.implementation import OperationCall

from .plan import PlanArrays, plan_arrays, tile_queries


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
        sinks, scales, planned: Whether the call has sinks, scales of keys or values, and a plan.
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
    planned: bool = False

    @property
    def group(self) -> int:
        """The number of query heads that share a KV head."""
        return self.q[1] // self.pages[2]

    @property
    def out_dim(self) -> int:
        """The size of an output vector."""
        return self.pages[4] if self.value_dim is None else self.value_dim

    @property
    def tile_queries(self) -> int:
        """Tokens of a prefill tile."""
        return tile_queries(self.q[1], self.pages[2])


class Operands(NamedTuple):
    """The arrays of a call. In this form, from `valid`, no index or length leads out of an array."""

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
    """Return the operands: offsets ascend within the tokens, lengths and page indices are within table and cache.

    A sequence that needs a page outside of the cache has length 0, so that its tokens see no other sequence's page.
    """
    given = Operands(*args)
    offsets = lax.cummax(jnp.clip(given.query_offsets, 0, call.q[0]))
    lengths = jnp.clip(given.kv_lengths, 0, call.table[1] * call.pages[1])
    first = jnp.zeros_like(lengths) if call.window is None else lengths - jnp.diff(offsets) - call.window
    begin = jnp.arange(call.table[1], dtype=jnp.int32) * call.pages[1]
    needed = (begin < lengths[:, None]) & (begin + call.pages[1] > first[:, None])
    is_outside = (given.page_table < 0) | (given.page_table >= call.pages[0])
    return given._replace(
        page_table=jnp.clip(given.page_table, 0, max(call.pages[0] - 1, 0)),
        query_offsets=offsets,
        kv_lengths=jnp.where(jnp.any(needed & is_outside, axis=1), 0, lengths),
        plan=None if given.plan is None else PlanArrays(*given.plan),
    )


def plan_of(call: PagedCall, operands: Operands) -> PlanArrays:
    """Return the call's plan, computed if it has none; entries of a plan for another batch stay within the arrays."""
    if operands.plan is None:
        offsets, lengths = operands.query_offsets, operands.kv_lengths
        return plan_arrays(offsets, lengths, queries=call.tile_queries, page_size=call.pages[1], window=call.window)
    sequences, pages = call.table
    order, decodes, tiles, first, end = operands.plan
    return PlanArrays(
        jnp.clip(order, 0, max(sequences - 1, 0)),
        jnp.clip(decodes, 0, sequences),
        jnp.clip(tiles, 0, call.q[0]),
        jnp.clip(first, 0, pages),
        jnp.clip(end, 0, pages),
    )


def as_bits(kv_pages: jax.Array) -> jax.Array:
    """Return a cache of 8-bit floats as integers.

    XLA for CPUs has no such floats, and would convert the whole cache to float16; so it only copies it.
    """
    small = jnp.issubdtype(kv_pages.dtype, jnp.floating) and kv_pages.dtype.itemsize == 1
    return lax.bitcast_convert_type(kv_pages, jnp.uint8) if small else kv_pages


def from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """Return pages from `as_bits` in the cache's dtype."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
