# SPDX-License-Identifier: Apache-2.0
"""The schedule of a batch: the order of its sequences, their tiles of queries, and the pages that they read."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE_ROWS = 128  # rows of a tile: queries times the query heads that share a KV head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedPlan:
    """The schedule of one batch, which all layers of a model share; see `ejkernel.modules.paged_plan`.

    A sequence with one new token, in decode, is one tile. One with several, in prefill, has tiles of `tile_queries`
    tokens.

    Attributes:
        order: int32 `[sequences]`: the sequences with one new token, then those with several, then those without. The
            first two kinds begin with the sequences that read the most pages, so that neighbours take equally long.
        decodes: int32 `[1]`: the number of sequences with one new token.
        tiles: int32 `[sequences + 1]`: in that order, the number of prefill tiles before each sequence.
        first_pages, end_pages: int32 `[sequences]`: the columns of the page table that a sequence reads begin at the
            first and end before the second.
        tile_queries: Tokens of a prefill tile.
        window: The `sliding_window` of the layers; `None`: the plan is for every window.
    """

    order: jax.Array
    decodes: jax.Array
    tiles: jax.Array
    first_pages: jax.Array
    end_pages: jax.Array
    tile_queries: int = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})


class PlanArrays(NamedTuple):
    """The arrays of a `PagedPlan`."""

    order: jax.Array
    decodes: jax.Array
    tiles: jax.Array
    first_pages: jax.Array
    end_pages: jax.Array


def tile_queries(heads: int, kv_heads: int) -> int:
    """Return the tokens of a prefill tile."""
    return max(1, TILE_ROWS * kv_heads // heads)


def plan_arrays(
    query_offsets: jax.Array, kv_lengths: jax.Array, *, queries: int, page_size: int, window: int | None
) -> PlanArrays:
    """Return the schedule; see `PagedPlan`.

    Args:
        query_offsets: `[sequences + 1]`; ascending.
        kv_lengths: `[sequences]`; not negative.
        queries: Tokens of a prefill tile.
        page_size: Tokens of a page.
        window: The keys that a query sees before its own; `None`: all.
    """
    count = jnp.diff(query_offsets)
    zero = jnp.zeros_like(kv_lengths)
    first = zero if window is None else jnp.maximum(kv_lengths - count - window, 0) // page_size
    end = jnp.where(count > 0, -(-kv_lengths // page_size), first)
    kind = jnp.where(count == 1, 0, jnp.where(count > 1, 1, 2))
    order = jnp.lexsort((first - end, kind)).astype(jnp.int32)
    tiles = jnp.where(count > 1, -(-count // queries), 0)[order]
    decodes = jnp.sum(count == 1, dtype=jnp.int32)[None]
    ends = jnp.concatenate([zero[:1], jnp.cumsum(tiles, dtype=jnp.int32)])
    return PlanArrays(order, decodes, ends, first.astype(jnp.int32), end.astype(jnp.int32))
