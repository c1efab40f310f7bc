# SPDX-License-Identifier: Apache-2.0
"""A consumer warpgroup of the prefill kernel: the mainloop of `flash_attention`'s forward, with its own rows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.device import quotient, remainder
from ejkernel.kernels._hopper.launch import plgpu
from ejkernel.kernels.flash_attention.mosaic_gpu.forward_mainloop import ForwardConsumer, along_rows
from ejkernel.kernels.flash_attention.mosaic_gpu.forward_memory import ForwardMemory, Piece
from ejkernel.kernels.flash_attention.mosaic_gpu.masks import within_window
from ejkernel.kernels.flash_attention.mosaic_gpu.plan import ROWS
from ejkernel.kernels.flash_attention.mosaic_gpu.visibility import BlockRange
from ejkernel.kernels.paged_attention.schedule import PrefillTile

from .memory import normalisation, number, scale_of_keys
from .plan import PIECE, PrefillPlan

_LAYOUT = plgpu.Layout.WGMMA
_BY_ROW = _LAYOUT.reduce(1)


class Item(NamedTuple):
    """A tile with some heads.

    Attributes:
        number: Its number.
        bundle: The number of its heads.
        head: The first of them.
        kv_head: Their KV head.
        sequence, token, count, position, length: As in `PrefillTile`.
    """

    number: Any
    bundle: Any
    head: Any
    kv_head: Any
    sequence: Any
    token: Any
    count: Any
    position: Any
    length: Any

    @classmethod
    def of(cls, plan: PrefillPlan, tiles: Any, index: Any) -> Item:
        """Return an item of the table of tiles."""
        tile, bundle = quotient(index, plan.bundles), remainder(index, plan.bundles)
        head = bundle * plan.tile_heads
        kv_head = quotient(head, plan.heads // plan.groups)
        return cls(index, bundle, head, kv_head, *(number(tiles, tile, column) for column in PrefillTile))


class KeyRange(NamedTuple):
    """The keys of an item.

    Attributes:
        item: The item.
        origin: The key at which block 0 begins.
        blocks: The blocks of keys that it visits.
    """

    item: Item
    origin: Any
    blocks: BlockRange

    @classmethod
    def of(cls, plan: PrefillPlan, item: Item) -> KeyRange:
        """Return the keys of an item."""
        left, size, origin = plan.rules.left, plan.params.kv_block, jnp.int32(0)
        if left is not None:  # a copy begins there: a page is needed if one of its keys is
            first = jnp.maximum(item.position - left, 0)
            origin = first - remainder(first, plan.copied_keys)
        low, stop = item.position - origin, jnp.maximum(item.position + item.count - origin, 0)
        unmasked = jnp.int32(0) if left is None else quotient(jnp.maximum(stop - 1 - left, 0) + (size - 1), size)
        blocks = BlockRange(
            first=jnp.int32(0),
            unmasked_from=unmasked,
            unmasked_until=quotient(jnp.maximum(low + 1, 0), size),
            end=jnp.maximum(quotient(stop + (size - 1), size), 1),
        )
        return cls(item, origin, blocks)


class PrefillMemory(ForwardMemory):
    """Everything that the warpgroups of one block of threads share."""

    __slots__ = ()

    def query(self, slot: Any) -> list[Piece]:
        """Return the pieces of a buffer of queries."""
        return self._rows(self.buffers.query, slot)

    def out(self, warpgroup: Any, slot: Any) -> list[Piece]:
        """Return the pieces of the buffer that stages a warpgroup's output."""
        shared = self.plan.params.share_buffer
        return self._rows(self.buffers.query if shared else self.buffers.out, slot if shared else warpgroup)

    def key(self, stage: Any) -> list[Piece]:
        """Return the pieces of a stage of keys: as wide as those of queries."""
        (piece, *others) = self.copied_keys(stage)
        if others:
            return [piece, *others]
        columns = cast(Any, self.plan).row_columns
        return [Piece(part, part, own) for own in columns for part in [piece.tiles.at[:, pl.ds(*own)]]]

    def copied_keys(self, stage: Any) -> list[Piece]:
        """Return the pieces of a stage of keys, each filled by separate copies."""
        return super().key(stage)

    def _rows(self, buffer: Any, at: Any) -> list[Piece]:
        rows, tiles = self.backend.views(buffer, 2)
        columns = cast(Any, self.plan).row_columns
        return [Piece(tiles[i].at[at], rows[i].at[at], piece) for i, piece in enumerate(columns)]


class PrefillConsumer(ForwardConsumer):
    """One consumer warpgroup in one item."""

    holds_queries = False

    def __init__(self, memory: Any, part: Any) -> None:
        super().__init__(memory, part)
        self.inputs: Any = memory.inputs
        self.first = part.row + part.tile.item.position - part.tile.origin  # the position of the first row
        self.number = part.tile.item.number
        if self.inputs.k_scale is not None:
            self.scale = self.scale * scale_of_keys(self.inputs.k_scale, part.tile.item.kv_head)

    def _item(self) -> Item:
        """Return the item, read again: its numbers would take registers during the mainloop."""
        return Item.of(cast(Any, self.plan), self.inputs.tiles, self.number)

    def _visible(self, block: Any) -> list[Any]:
        """Return the conditions under which rows see the keys of a block."""
        key = plgpu.broadcasted_iota(jnp.int32, self.square, 1, layout=_LAYOUT)
        row = plgpu.broadcasted_iota(jnp.int32, self.square, 0, layout=_LAYOUT)
        token = quotient(row, cast(Any, self.plan).tile_heads) + (self.first - block * self.params.kv_block)
        return within_window(self.plan.rules, token, key)

    def _prepare_last_values(self, stage: Any) -> None:
        """Zero values past the end of the sequence: a weight of zero does not cancel a NaN."""
        keys = KeyRange.of(cast(Any, self.plan), self._item())
        count = keys.item.length - keys.origin - (keys.blocks.end - 1) * self.params.kv_block
        barriers: Any = self.barriers

        @pl.when(count < self.params.kv_block)
        def _clear() -> None:
            for part in range(self.params.kv_block // ROWS):
                mine = self.warpgroup == part % self.params.warpgroups
                pl.when(mine)(functools.partial(self._clear, stage, count - part * ROWS, part))
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.cleared)
            plgpu.barrier_wait(barriers.cleared)

    def _clear(self, stage: Any, count: Any, part: int) -> None:
        """Keep the first `count` of 64 values."""
        rows = pl.ds(part * ROWS, ROWS)
        for piece in self.memory.value(stage):
            for start in range(0, piece.columns.width, PIECE):
                tile = piece.tiles.at[rows, pl.ds(start, min(PIECE, piece.columns.width - start))]
                values = plgpu.load(tile, layout=_LAYOUT, optimized=False)
                key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=_LAYOUT)
                tile[...] = jnp.where(key < count, values, jnp.zeros_like(values))

    def _epilogue(self, state: Any) -> None:
        """Store output and log-sum-exp."""
        inputs, memory, item = self.inputs, self.memory, self._item()
        sinks = inputs.sinks
        if sinks is not None:
            sinks = plgpu.load(sinks.at[item.bundle], layout=_BY_ROW, optimized=False)
        factor, lse = normalisation(state.row_max, state.row_sum, sinks)
        if inputs.v_scale is not None:
            factor = factor * inputs.v_scale[item.kv_head]
        out = (state.acc * along_rows(factor, state.acc.shape)).astype(self.plan.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # copies of the previous tile may still read the buffer
        pieces = memory.out(self.warpgroup, self.part.slot)
        for piece in pieces:
            start, width = piece.columns
            self.backend.assign(piece.tiles, out[:, start : start + width] if len(pieces) > 1 else out)
        plgpu.commit_smem()
        self._copy_out(item, pieces)
        if self.params.share_buffer:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._release_queries(self.part.number)
        if memory.outputs.lse is not None:
            memory.outputs.lse.at[item.number * self.params.warpgroups + self.warpgroup][...] = lse

    def _copy_out(self, item: Item, pieces: list[Piece]) -> None:
        """Start copying the output; rows past the last token of the tile belong to another one."""
        plan: Any = self.plan
        left, token = item.count - self.part.row, item.token + self.part.row

        def copy(first: Any, source: Any, count: int) -> None:
            for piece in pieces:
                start, width = piece.columns
                tokens, heads = pl.ds(token + first, count), pl.ds(item.head, plan.tile_heads)
                target = self.memory.outputs.out.at[tokens, heads, pl.ds(start, width)]
                plgpu.copy_smem_to_gmem(piece.rows.at[source], target)

        @pl.when(left >= plan.warpgroup_tokens)
        def _whole() -> None:
            copy(0, slice(None), plan.warpgroup_tokens)

        @pl.when(left < plan.warpgroup_tokens)
        def _part() -> None:
            @pl.loop(0, jnp.maximum(left, 0))
            def _token(i: Any) -> None:
                copy(i, pl.ds(i, 1), 1)
