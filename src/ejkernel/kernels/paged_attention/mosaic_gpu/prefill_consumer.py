# SPDX-License-Identifier: Apache-2.0
"""A consumer warpgroup of the prefill kernel: the mainloop of `flash_attention`'s forward, with its own rows."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.columns import Columns
from ejkernel.kernels._hopper.device import quotient
from ejkernel.kernels._hopper.launch import plgpu
from ejkernel.kernels.flash_attention.mosaic_gpu.forward_mainloop import ForwardConsumer, along_rows
from ejkernel.kernels.flash_attention.mosaic_gpu.forward_memory import ForwardMemory, Piece
from ejkernel.kernels.flash_attention.mosaic_gpu.masks import within_window
from ejkernel.kernels.flash_attention.mosaic_gpu.plan import ROWS

from .memory import normalisation
from .plan import PIECE, PrefillPlan

_LAYOUT = plgpu.Layout.WGMMA
_BY_ROW = _LAYOUT.reduce(1)


class Tile(NamedTuple):
    """A tile with some heads.

    Attributes:
        item: Its number.
        bundle: The number of its heads.
        head: The first of them.
        kv_head: Their KV head.
        sequence, token, count: As in `PrefillTile`.
        position: As in `PrefillTile`, after the origin.
        length: As in `PrefillTile`, after the origin.
        origin: The key at which block 0 begins.
        blocks: The blocks of keys that it visits.
    """

    item: Any
    bundle: Any
    head: Any
    kv_head: Any
    sequence: Any
    token: Any
    count: Any
    position: Any
    length: Any
    origin: Any
    blocks: Any


class PrefillMemory(ForwardMemory):
    """Everything that the warpgroups of one block of threads share."""

    __slots__ = ()

    @property
    def query_rows(self) -> Any:
        """The queries as copies take them."""
        return self.backend.views(self.buffers.query, 2)[0]

    def query(self, slot: Any) -> list[Piece]:
        """Return the pieces of a buffer of queries."""
        return self._pieces_of(self.buffers.query, slot)

    def out(self, warpgroup: Any, slot: Any) -> list[Piece]:
        """Return the pieces of the buffer that stages a warpgroup's output."""
        del slot
        return self._pieces_of(self.buffers.out, warpgroup)

    def key(self, stage: Any) -> list[Piece]:
        """Return the pieces of a stage of keys: as wide as those of queries."""
        found = []
        for start, width in _columns(cast(Any, self.plan)):
            part = self.buffers.key.at[stage, :, pl.ds(start, width)]
            found.append(Piece(part, part, Columns(start, width)))
        return found

    def _pieces_of(self, buffer: Any, at: Any) -> list[Piece]:
        rows, tiles = self.backend.views(buffer, 2)
        columns = _columns(cast(Any, self.plan))
        return [Piece(tiles.at[at, i], rows.at[at, i], piece) for i, piece in enumerate(columns)]


def _columns(plan: PrefillPlan) -> list[Columns]:
    return [Columns(piece * PIECE, PIECE) for piece in range(plan.pieces)]


class PrefillConsumer(ForwardConsumer):
    """One consumer warpgroup in one tile."""

    def __init__(self, memory: Any, part: Any) -> None:
        super().__init__(memory, part)
        self.inputs: Any = memory.inputs
        self.tile: Any = part.tile
        if self.inputs.k_scale is not None:
            self.scale = self.scale * self.inputs.k_scale[self.tile.kv_head]

    def _visible(self, block: Any) -> list[Any]:
        """Return the conditions under which rows see the keys of a block."""
        key = plgpu.broadcasted_iota(jnp.int32, self.square, 1, layout=_LAYOUT)
        row = plgpu.broadcasted_iota(jnp.int32, self.square, 0, layout=_LAYOUT)
        token = quotient(row, cast(Any, self.plan).tile_heads) + (
            self.part.row + self.tile.position - block * self.params.kv_block
        )
        return within_window(self.plan.rules, token, key)

    def _prepare_last_values(self, stage: Any) -> None:
        """Zero values past the end of the sequence: a weight of zero does not cancel a NaN."""
        barriers: Any = self.barriers
        first = (self.tile.blocks.end - 1) * self.params.kv_block

        @pl.when(first + self.params.kv_block > self.tile.length)
        def _clear() -> None:
            for part in range(self.params.kv_block // ROWS):
                pl.when(self.warpgroup == part % self.params.warpgroups)(
                    lambda part=part: self._clear(stage, first, part)
                )
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.cleared)
            plgpu.barrier_wait(barriers.cleared)

    def _clear(self, stage: Any, first: Any, part: int) -> None:
        key = plgpu.broadcasted_iota(jnp.int32, (ROWS, PIECE), 0, layout=_LAYOUT) + (first + part * ROWS)
        for start, width in _columns(cast(Any, self.plan)):
            tile = self.buffers.value.at[stage, pl.ds(part * ROWS, ROWS), pl.ds(start, width)]
            values = plgpu.load(tile, layout=_LAYOUT, optimized=False)
            tile[...] = jnp.where(key < self.tile.length, values, jnp.zeros_like(values))

    def _epilogue(self, state: Any) -> None:
        """Store output and log-sum-exp."""
        inputs, memory, tile = self.inputs, self.memory, self.tile
        sinks = inputs.sinks
        if sinks is not None:
            sinks = plgpu.load(sinks.at[tile.bundle], layout=_BY_ROW, optimized=False)
        factor, lse = normalisation(state.row_max, state.row_sum, sinks)
        if inputs.v_scale is not None:
            factor = factor * inputs.v_scale[tile.kv_head]
        out = (state.acc * along_rows(factor, state.acc.shape)).astype(self.plan.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # copies of the previous tile may still read the buffer
        pieces = memory.out(self.warpgroup, self.part.slot)
        for piece in pieces:
            start, width = piece.columns
            self.backend.assign(piece.tiles, out[:, start : start + width] if len(pieces) > 1 else out)
        plgpu.commit_smem()
        self._copy_out(pieces)
        if memory.outputs.lse is not None:
            memory.outputs.lse.at[tile.item * self.params.warpgroups + self.warpgroup][...] = lse

    def _copy_out(self, pieces: list[Piece]) -> None:
        """Start copying the output; rows past the last token of the tile belong to another one."""
        plan, tile = cast(PrefillPlan, self.plan), self.tile
        left, token = tile.count - self.part.row, tile.token + self.part.row

        def copy(first: Any, source: Any, count: int) -> None:
            for piece in pieces:
                start, width = piece.columns
                tokens, heads = pl.ds(token + first, count), pl.ds(tile.head, plan.tile_heads)
                target = self.memory.outputs.out.at[tokens, heads, pl.ds(start, width)]
                self.backend.store_to_memory(piece.rows.at[source], target)

        @pl.when(left >= plan.warpgroup_tokens)
        def _whole() -> None:
            copy(0, slice(None), plan.warpgroup_tokens)

        @pl.when(left < plan.warpgroup_tokens)
        def _part() -> None:
            @pl.loop(0, jnp.maximum(left, 0))
            def _token(i: Any) -> None:
                copy(i, pl.ds(i, 1), 1)
