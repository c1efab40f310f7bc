# SPDX-License-Identifier: Apache-2.0
"""Arrays, shared memory and barriers of the kernels, and the store of a tile."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat
from ejkernel.kernels._hopper.backend import Backend
from ejkernel.kernels._hopper.blocks import columns_from, tiles_and_rows
from ejkernel.kernels._hopper.device import quotient, remainder
from ejkernel.kernels._hopper.launch import plgpu, swizzled, tiled
from ejkernel.kernels._hopper.pipeline import Pipeline
from ejkernel.kernels._numbers import LOG2_E
from ejkernel.kernels.paged_attention.schedule import BLOCK, Share, Tile

from .plan import PIECE, LaunchPlan

_TINY = 1e-30  # times the largest product it is nothing, and times a scale no denormal number
LAYOUT = plgpu.Layout.WGMMA
BY_ROW = LAYOUT.reduce(0)  # one number per column of the products, which are the rows of a tile


class Inputs(NamedTuple):
    """Arrays in global memory; those that a call does not have are `None`.

    Attributes:
        tiles, programs: As in `Schedule`.
        q: `[tokens, heads, head_dim]`.
        cache: `[pages * page_size, kv_heads, 2 * head_dim]`; without whole units `[pages * page_size, 2 * kv_heads,
            head_dim]`; in latent attention `[pages * page_size, head_dim]`.
        table: `[sequences, pages]`.
        sinks: `[kv_heads, rows]`, or `[parts, ROWS]` in latent attention, times `LOG2_E`.
        k_scale, v_scale: `[kv_heads]`.
    """

    tiles: Any
    programs: Any
    q: Any
    cache: Any
    table: Any
    sinks: Any = None
    k_scale: Any = None
    v_scale: Any = None


class Outputs(NamedTuple):
    """Results in global memory: `[tokens, heads, out_dim]`, and `[items, rows]` or `None`."""

    out: Any
    lse: Any


class Item(NamedTuple):
    """A tile with one KV head."""

    number: Any
    head: Any
    sequence: Any
    token: Any
    count: Any
    position: Any
    first: Any
    end: Any

    @property
    def stop(self) -> Any:
        """The position behind the last key that a row sees."""
        return self.position + self.count

    @property
    def blocks(self) -> Any:
        """Blocks of keys in the schedule."""
        return jnp.maximum(self.end - self.first, 1)


class Work(NamedTuple):
    """The items and blocks of one program; see `Share`."""

    first_item: Any
    first_block: Any
    last_item: Any
    end_block: Any
    share: Any

    @classmethod
    def of(cls, programs: Any, program: Any, shares: int) -> Work:
        """Return the work of a program that takes so many consecutive shares; the last ones may have no item."""
        rows = [jnp.minimum(program * shares + i, programs.shape[0] - 1) for i in range(shares)]
        last_items = [number(programs, row, Share.LAST_ITEM) for row in rows]
        end = number(programs, rows[0], Share.END_BLOCK)
        for row, item in zip(rows[1:], last_items[1:], strict=True):
            end = jnp.where(item >= 0, number(programs, row, Share.END_BLOCK), end)
        first_item, first_block, blocks = (
            number(programs, rows[0], column) for column in (Share.FIRST_ITEM, Share.FIRST_BLOCK, Share.BLOCKS)
        )
        return cls(first_item, first_block, functools.reduce(jnp.maximum, last_items), end, blocks * shares)

    def span(self, item: Item) -> tuple[Any, Any]:
        """Return the first block of this program's part of an item, and the block after its last."""
        low = item.first + jnp.where(item.number == self.first_item, self.first_block, 0)
        high = jnp.where(item.number == self.last_item, item.first + self.end_block, item.end)
        return low, jnp.minimum(high, item.end)

    def begins(self, item: Item) -> Any:
        """Return whether this program has the item's first block."""
        return (item.number > self.first_item) | (self.first_block == 0)

    def ends(self, item: Item) -> Any:
        """Return whether this program has the item's last block."""
        return (item.number < self.last_item) | (self.end_block >= item.blocks)


def number(table: Any, row: Any, column: Any) -> Any:
    """Return a number from a table in global memory.

    The maximum gives it the type of values computed here, on any mesh axis that the table varies over.
    """
    return jnp.maximum(table[row, column], -(2**31))


def item_of(plan: LaunchPlan, tiles: Any, index: Any) -> Item:
    """Return an item."""
    tile = quotient(index, plan.kv_heads)
    sequence, token, count, position, first, end = (number(tiles, tile, column) for column in Tile)
    return Item(index, remainder(index, plan.kv_heads), sequence, token, count, position, first, end)


def scale_of_keys(scales: Any, head: Any) -> Any:
    """Return the factor on the keys of a KV head; a tiny one instead of 0, which times minus infinity would be NaN."""
    return jnp.where(scales[head] == 0.0, _TINY, scales[head])


def normalisation(top: Any, total: Any, sinks: Any) -> tuple[Any, Any]:
    """Return the factor on each row's sum of weighted values, and the log-sum-exp.

    Args:
        top: The maximum to which a row's weights are relative, to the base 2.
        total: The sum of the weights; 0 for a row without keys.
        sinks: The logit of each row's sink, to the base 2, or `None`.
    """
    empty = total == 0.0
    if sinks is None:
        lse = jnp.where(empty, -jnp.inf, top + jnp.log2(total))
        return jnp.where(empty, 0.0, 1 / total), lse * (1 / LOG2_E)
    # Relative to the sink where it is higher: its weight would be infinite far above the keys.
    highest = jnp.maximum(top, sinks)
    decay = jnp.exp2(top - highest)
    total = total * decay + jnp.exp2(sinks - highest)
    lse = jnp.where(empty, sinks, highest + jnp.log2(total))
    return jnp.where(empty, 0.0, decay / total), lse * (1 / LOG2_E)


def cache_row(pages: int, page_size: int, size: int, table: Any, sequence: Any, key: Any) -> Any:
    """Return the row of the cache that has a key of a sequence.

    Args:
        pages: The pages of the cache.
        page_size: Tokens of a page.
        size: A divisor of `page_size` and `key`.
        table: The page table.
        sequence: The sequence.
        key: The position of the key.
    """
    column = jnp.minimum(quotient(key, page_size), table.shape[1] - 1)
    # An index outside of the cache reads some page: the schedule gives such a sequence no keys.
    row = jnp.clip(table[sequence, column], 0, pages - 1) * page_size
    return row + remainder(key, page_size) if page_size > size else row


def across(by_row: Any, shape: tuple[int, ...]) -> Any:
    """Return one number per row of a tile, broadcast along the products' first axis."""
    return lax.broadcast_in_dim(by_row, shape, [1])


class TileStore:
    """Stores tiles of the output: the end of both kernels.

    Args:
        plan: The launch.
        backend: Where it runs.
        factors: The arrays `sinks` and `v_scale`.
        outputs: The results.
        buffer: A `tiles_and_rows` buffer `[pieces, rows, PIECE]`.
    """

    def __init__(
        self, plan: LaunchPlan, backend: Backend, factors: tuple[Any, Any], outputs: Outputs, buffer: Any
    ) -> None:
        self.plan, self.backend, self.factors, self.outputs = plan, backend, factors, outputs
        self.tiles, self.rows = backend.views(buffer, 2)

    def store(self, item: Item, acc: Sequence[Any], top: Any, total: Any) -> None:
        """Store `acc / total`, with sinks and scales, and the log-sum-exp.

        Args:
            item: The item.
            acc: The sum of weighted values, a `[PIECE, rows]` array for each piece.
            top: `[rows]`: the maximum to which weights are relative, to the base 2.
            total: `[rows]`: the sum of the weights; 0 for a row without keys.
        """
        lse = self.store_pieces(item, acc, top, total, [piece * PIECE for piece in range(self.plan.pieces)])
        if self.outputs.lse is not None:
            compat.kernels.store_as_it_is(self.outputs.lse.at[item.number], lse)

    def store_pieces(self, item: Item, acc: Sequence[Any], top: Any, total: Any, starts: Sequence[Any]) -> Any:
        """Store the pieces of the output that start at these columns, and return the log-sum-exp."""
        sinks, scale = self.factors
        if sinks is not None:
            sinks = plgpu.load(sinks.at[item.head], layout=BY_ROW, optimized=False)
        factor, lse = normalisation(top, total, sinks)
        if scale is not None:
            factor = factor * scale[item.head]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for piece, part in enumerate(acc):
            out = (part * across(factor, part.shape)).astype(self.plan.dtype)
            self.tiles.at[piece].transpose((1, 0))[...] = out
        plgpu.commit_smem()
        for token in range(self.plan.tile_tokens):
            pl.when(token < item.count)(functools.partial(self._copy_token, item, token, starts))
        return lse

    def _copy_token(self, item: Item, token: int, starts: Sequence[Any]) -> None:
        group, out = self.plan.group, self.outputs.out
        for piece, start in enumerate(starts):
            source = self.rows.at[piece, pl.ds(token * self.plan.group_rows, group)]
            heads, columns = pl.ds(item.head * group, group), columns_from(out, start, PIECE)
            plgpu.copy_smem_to_gmem(source, out.at[item.token + token, heads, columns])


def _cache_types(plan: LaunchPlan, backend: Backend) -> Any:
    """Return shared memory for blocks of the cache: a view for copies, and one of 16-bit numbers for products.

    With 8 bits, the second view has pairs of numbers. Without whole units, both have units.
    """
    pairs = jnp.int16 if plan.is_narrow else plan.cache_dtype
    if plan.is_whole:
        whole = plan.stages, BLOCK
        numbers = tiled((*whole, 2 * plan.width), plan.cache_dtype)
        return backend.aliased(numbers, tiled((*whole, 2 * plan.units * PIECE), pairs))
    units = plan.stages, 2 * plan.units, BLOCK
    return backend.aliased(swizzled((*units, plan.unit), plan.cache_dtype), tiled((*units, PIECE), pairs))


class Buffers(NamedTuple):
    """Shared memory of the first kernel."""

    q: Any  # [query buffers, pieces, rows, PIECE]
    cache: Any  # [stages, BLOCK, 2 * head_dim], or [stages, 2 * units, BLOCK, unit], with a view for products
    weights: Any  # [rows, BLOCK]
    out: Any  # [pieces, rows, PIECE]

    @classmethod
    def types(cls, plan: LaunchPlan, backend: Backend) -> Buffers:
        """Return the types of the buffers."""
        return cls(
            q=tiles_and_rows(backend, (plan.query_buffers, plan.pieces, plan.rows, PIECE), plan.product_dtype),
            cache=_cache_types(plan, backend),
            weights=tiled((plan.rows, BLOCK), plan.product_dtype),
            out=tiles_and_rows(backend, (plan.pieces, plan.rows, PIECE), plan.dtype),
        )


class Barriers(NamedTuple):
    """Pipelines of queries, and of keys with values."""

    q: Pipeline
    cache: Pipeline

    @classmethod
    def types(cls, plan: LaunchPlan) -> Barriers:
        """Return the types of the barriers."""
        copies = plan.pieces * plan.tile_tokens
        return cls(
            q=Pipeline.types(plan.query_buffers, consumers=1, copies=copies),
            cache=Pipeline.types(plan.stages, consumers=1, copies=plan.copies),
        )
