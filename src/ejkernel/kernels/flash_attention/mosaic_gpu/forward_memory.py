# SPDX-License-Identifier: Apache-2.0
"""Arrays, shared memory and barriers of the forward, and the tiles of its warpgroups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ejkernel.kernels._hopper.backend import Backend
from ejkernel.kernels._hopper.blocks import columns_from
from ejkernel.kernels._hopper.columns import Columns
from ejkernel.kernels._hopper.device import remainder
from ejkernel.kernels._hopper.launch import plgpu
from ejkernel.kernels._hopper.pipeline import Pipeline

from .plan import ROWS, ForwardPlan
from .visibility import BlockRange


class ForwardInputs(NamedTuple):
    """Arrays in global memory; those that a call does not have are `None`.

    Attributes:
        query, key, value: As in `Operands`.
        table: `[batch or 1, heads or 1, tiles, 4]`, int32; see `visibility`.
        query_segments, key_segments: `[batch, 1, padded to whole tiles or blocks]`, int32.
        key_lengths: `[batch]`, int32, at most the number of keys.
        key_bias: `[batch or 1, heads or 1, padded to whole blocks]`, float32, or in the dtype of `bias`.
        bias: `[batch or 1, heads or 1, queries, keys]`.
        mask: `[batch or 1, heads or 1, keys / 32, queries]`, padded; one bit per key, set where it is visible.
        sinks: `[heads]`, float32.
        dropout: `[batch, heads, padded to whole tiles]`, the random word of each row.
        schedule: See `schedule.schedule`.
        order: See `schedule.order_by_length`.
    """

    query: Any
    key: Any
    value: Any
    table: Any = None
    query_segments: Any = None
    key_segments: Any = None
    key_lengths: Any = None
    key_bias: Any = None
    bias: Any = None
    mask: Any = None
    sinks: Any = None
    dropout: Any = None
    schedule: Any = None
    order: Any = None


class ForwardOutputs(NamedTuple):
    """Arrays in global memory: `[batch, queries, heads, value_dim]`, and `[batch, heads, padded to whole tiles]`."""

    out: Any
    lse: Any


class ForwardBuffers(NamedTuple):
    """Shared memory: buffers per warpgroup for queries and output, pipeline stages for all else."""

    query: Any
    key: Any
    value: Any
    out: Any
    bias: Any
    mask: Any
    key_bias: Any
    key_segments: Any


class ForwardBarriers(NamedTuple):
    """Barriers.

    Attributes:
        query, key, value: Pipelines.
        extra: The pipeline of bias, mask and segment ids of a block of keys; `None` if the call has none of them.
        turn: Ping-pong: one barrier per consumer, for its turn at the tensor core.
    """

    query: Pipeline
    key: Pipeline
    value: Pipeline
    extra: Pipeline | None
    turn: Any


class QueryTile(NamedTuple):
    """A tile of the output: its position, and the blocks of keys that it visits, counted from the key `origin`."""

    batch: Any
    head: Any
    row: Any
    blocks: BlockRange
    origin: Any


class WarpgroupTile(NamedTuple):
    """One consumer warpgroup's part of a tile.

    Attributes:
        tile: The tile.
        number: How many tiles this block of threads computed before.
        warpgroup: The warpgroup.
        slot: The buffer of its queries.
        row: Its first row.
        head: Its head.
    """

    tile: QueryTile
    number: Any
    warpgroup: Any
    slot: Any
    row: Any
    head: Any


class Piece(NamedTuple):
    """Some columns of a tile in shared memory.

    Attributes:
        tiles: As products and assignments take it.
        rows: As copies take it.
        columns: The columns.
    """

    tiles: Any
    rows: Any
    columns: Columns


class ForwardMemory(NamedTuple):
    """Everything that the warpgroups of one block of threads share."""

    plan: ForwardPlan
    inputs: ForwardInputs
    outputs: ForwardOutputs
    buffers: ForwardBuffers
    barriers: ForwardBarriers
    backend: Backend

    def query_slot(self, warpgroup: Any, number: Any) -> Any:
        """Return the number of the buffer, and of the barrier, of a warpgroup's queries in tile `number`."""
        params = self.plan.params
        return remainder(number, params.query_buffers) * params.warpgroups + warpgroup

    def query(self, slot: Any) -> list[Piece]:
        """Return the pieces of a buffer of queries."""
        if self.plan.pieced:
            return self._pieces(self.buffers.query, slot, self.plan.head_columns)
        query = self.buffers.query[0] if self.plan.params.share_buffer else self.buffers.query
        return [Piece(query.at[slot], query.at[slot], self.plan.head_columns[0])]

    def key(self, stage: Any) -> list[Piece]:
        """Return the pieces of a stage of keys."""
        return self._pieces(self.buffers.key, stage, self.plan.head_columns)

    def value(self, stage: Any) -> list[Piece]:
        """Return the pieces of a stage of values."""
        return self._pieces(self.buffers.value, stage, self.plan.value_columns)

    def out(self, warpgroup: Any, slot: Any) -> list[Piece]:
        """Return the pieces of the buffer that stages a warpgroup's output."""
        columns, shared = self.plan.out_columns, self.plan.params.share_buffer
        if self.plan.pieced or not shared:
            return self._pieces(
                self.buffers.query if shared else self.buffers.out, slot if shared else warpgroup, columns
            )
        tile = self.buffers.query[1].at[slot, 0:ROWS]
        return [Piece(tile, tile, columns[0])]

    def bias(self, stage: Any, warpgroup: Any) -> list[Piece]:
        """Return the pieces of a warpgroup's rows of a stage of the bias."""
        tiles, rows = self.backend.views(self.buffers.bias, 2)
        at = (stage, warpgroup)
        return [Piece(tiles[i].at[at], rows[i].at[at], piece) for i, piece in enumerate(self.plan.bias_columns)]

    def _pieces(self, buffer: Any, at: Any, columns: Sequence[Columns]) -> list[Piece]:
        if not self.plan.pieced:
            return [Piece(buffer.at[at], buffer.at[at], columns[0])]
        tiles, rows = self.backend.views(buffer, 2)
        return [Piece(tiles[i].at[at], rows[i].at[at], piece) for i, piece in enumerate(columns)]

    def copy_in(self, source: Any, at: tuple[Any, ...], pieces: Sequence[Piece], barrier: Any) -> None:
        """Start copying rows of an array, `source.at[at]`, to shared memory."""
        for piece in pieces:
            plgpu.copy_gmem_to_smem(self._part(source, at, piece), piece.rows, barrier)

    def copy_out(self, pieces: Sequence[Piece], target: Any, at: tuple[Any, ...]) -> None:
        """Start copying rows to an array, `target.at[at]`, from shared memory."""
        for piece in pieces:
            plgpu.copy_smem_to_gmem(piece.rows, self._part(target, at, piece))

    def _part(self, array: Any, at: tuple[Any, ...], piece: Piece) -> Any:
        if not self.plan.pieced:
            return array.at[at]
        return array.at[(*at, columns_from(array, *piece.columns))]

    def by_key(self) -> list[tuple[Any, Any]]:
        """Return the arrays with one element per key that are copied beside the keys, with their buffers."""
        inputs, buffers = self.inputs, self.buffers
        pairs = ((inputs.key_bias, buffers.key_bias), (inputs.key_segments, buffers.key_segments))
        return [pair for pair in pairs if pair[0] is not None]
