# SPDX-License-Identifier: Apache-2.0
"""The weight gradient's kernel: for each group, `lhs[rows].T @ rhs[rows]`.

A tile belongs to one group's result, and its steps go through the group's rows. Copies start at multiples of eight
rows. A group's first step may therefore contain rows of the previous group, and its last step rows of the next one. The
consumers set those rows to zero in shared memory, in both operands: NaN and infinity in other groups have no effect.

Producer and consumers visit the same tiles and steps in the same order, for any group sizes, so they cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.backend import Backend, backend_for
from ejkernel.kernels._hopper.launch import PROGRAM, WARPGROUP, dispatch_warpgroup, plgpu, tiled
from ejkernel.kernels._hopper.pipeline import producer_tail
from ejkernel.kernels._hopper.tile_shapes import REGISTERS, STEP, TILE, WARPGROUPS

from .plan import WgradPlan
from .tiles import GroupedMemory, accumulate, pipeline_types, run_kernel, tile_position


class WgradTile(NamedTuple):
    """A tile of the result.

    Attributes:
        group: The group.
        start: The first row that is copied, a multiple of eight.
        first: The group's first row, counted from `start`.
        end: One past the group's last row, counted from `start`.
        steps: How many steps the rows take.
        row: The tile's first row in the group's result.
        column: Its first column.
    """

    group: Any
    start: Any
    first: Any
    end: Any
    steps: Any
    row: Any
    column: Any


def sum_products(plan: WgradPlan, lhs: Any, rhs: Any, table: Any, *, interpret: Any = None) -> jax.Array:
    """Run the kernel on padded operands; `table` is int32 `[groups, 3]`: number, first row and rows of each group."""
    kernel, shape = WgradKernel(plan, backend_for(interpret)), (plan.groups, plan.inner, plan.columns)
    return run_kernel(kernel, (lhs, rhs, table), shape, name="grouped_matmul_wgrad")[0]


class WgradKernel:
    """The program of one block of threads."""

    def __init__(self, plan: WgradPlan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend

    def memory_types(self) -> GroupedMemory:
        """Return the types of shared memory and barriers."""
        plan = self.plan
        pieces = (WARPGROUPS, plan.out_slots, plan.part_rows, plan.piece_columns)
        return GroupedMemory(
            self._operand((plan.stages, WARPGROUPS), plan.part_rows),
            self._operand((plan.stages,), plan.tile_columns),
            tiled(pieces, plan.out_dtype),
            pipeline_types(plan),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        )

    def _operand(self, leading: tuple[int, ...], columns: int) -> Any:
        """Return the type of an operand's stages: a tiled matrix, aliased with an array of its tiles."""
        tiles = (*leading, STEP // TILE[0], columns // TILE[1], *TILE)
        in_order = plgpu.SMEM(tiles, jnp.dtype(self.plan.dtype))
        return self.backend.aliased(tiled((*leading, STEP, columns), self.plan.dtype), in_order)

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: GroupedMemory) -> None:
        """Run this warpgroup as producer or consumer."""
        (self.lhs, self.rhs, self.table), [self.out] = arrays, results
        self.memory, self.pipeline = memory, memory.pipeline
        self.lhs_stages, self.lhs_tiles = self.backend.views(memory.lhs, 2)
        self.rhs_stages, self.rhs_tiles = self.backend.views(memory.rhs, 2)
        warpgroup = lax.axis_index(WARPGROUP)
        dispatch_warpgroup(warpgroup, WARPGROUPS, REGISTERS, producer=self._produce, consumer=self._consume)

    # Tile scheduler.

    def _each_tile(self, body: Callable[[WgradTile, Any], Any], start: Any = 0) -> Any:
        """Call `body(tile, carry)`, which returns the next carry, for each tile of this block of threads.

        The carry begins with `start`: that of a producer, and of consumers here, is the number of the next step.
        """
        plan, program = self.plan, lax.axis_index(PROGRAM)
        whole, rest = divmod(plan.tiles, plan.programs)
        backwards = plan.programs - 1 - program

        def one(i: Any, carry: Any) -> Any:
            dealt = jnp.where(lax.rem(i, 2) == 0, program, backwards) if plan.snake else program
            return body(self._tile(i * plan.programs + dealt), carry)

        last = backwards if plan.snake and whole % 2 else program
        return lax.fori_loop(0, whole + (last < rest).astype(jnp.int32), one, start)

    def _tile(self, number: Any) -> WgradTile:
        plan = self.plan
        of_group = plan.row_tiles * plan.column_tiles
        entry = lax.div(number, of_group)
        row_tile, column_tile = tile_position(number - entry * of_group, plan.row_tiles, plan)
        position = (row_tile * plan.tile_rows, column_tile * plan.tile_columns)
        return WgradTile(self.table[entry, 0], *self._span(entry), *position)

    def _span(self, entry: Any) -> tuple[Any, Any, Any, Any]:
        """Return the rows of a group, an entry of the table: see `WgradTile` from `start` to `steps`."""
        first_row, rows = self.table[entry, 1], self.table[entry, 2]
        start = lax.div(first_row, 8) * 8
        end = first_row - start + rows
        return start, first_row - start, end, jnp.where(rows > 0, lax.div(end + (STEP - 1), STEP), 0)

    # Producer.

    def _produce(self) -> None:
        producer_tail(self._each_tile(self._copy_tile), self.pipeline)

    def _copy_tile(self, tile: WgradTile, step: Any) -> Any:
        return lax.fori_loop(0, tile.steps, lambda i, step: self._copy_step(tile, i, step), step)

    def _copy_step(self, tile: WgradTile, index: Any, step: Any) -> Any:
        plan = self.plan
        rows = pl.ds(pl.multiple_of(tile.start + index * STEP, 8), STEP)
        stage = self.pipeline.producer_acquire(step)
        full = self.pipeline.full.at[stage]
        for w in range(WARPGROUPS):
            columns = pl.ds(tile.row + plan.part_rows * w, plan.part_rows)
            plgpu.copy_gmem_to_smem(self.lhs.at[rows, columns], self.lhs_stages.at[stage, w], full)
        columns = pl.ds(tile.column, plan.tile_columns)
        plgpu.copy_gmem_to_smem(self.rhs.at[rows, columns], self.rhs_stages.at[stage], full)
        return step + 1

    # Consumers.

    def _consume(self, warpgroup: Any) -> None:
        self._each_tile(lambda tile, step: self._compute_tile(tile, step, warpgroup))
        plgpu.wait_smem_to_gmem(0)

    def _compute_tile(self, tile: WgradTile, step: Any, warpgroup: Any) -> Any:
        def products(accumulator: Any) -> None:
            # An empty group has no steps; its result is stored as zeros.
            pl.when(tile.steps > 0)(lambda: self._mainloop(accumulator, tile, step, warpgroup))

        [total] = accumulate(self.plan, products)
        self._store([total], tile, warpgroup)
        return step + tile.steps

    def _mainloop(self, accumulator: Any, tile: WgradTile, step: Any, warpgroup: Any) -> None:
        plan, pipeline = self.plan, self.pipeline

        @pl.loop(0, tile.steps)
        def _step(i: Any) -> None:
            stage = pipeline.stage(step + i)
            pipeline.consumer_wait(stage)
            self._clear(stage, tile.first - i * STEP, tile.end - i * STEP, warpgroup)
            left = self.lhs_stages.at[stage, warpgroup].transpose((1, 0))
            plgpu.wgmma(accumulator, left, self.rhs_stages.at[stage])
            # The previous step's product is done once one is in flight: its stage can be released.
            plgpu.wgmma_wait(1)

            @pl.when(i > 0)
            def _previous() -> None:
                pipeline.consumer_release(pipeline.stage(step + i + (plan.stages - 1)))

        plgpu.wgmma_wait(0)
        pipeline.consumer_release(pipeline.stage(step + tile.steps - 1))

    def _clear(self, stage: Any, first: Any, end: Any, warpgroup: Any) -> None:
        """Zero the rows of a stage outside `[first, end)`; the consumers share the work."""
        height = TILE[0]

        @pl.when((first > 0) | (end < STEP))
        def _some() -> None:
            # `first` is less than the height of a tile, because copies start at multiples of it.
            pl.when(first > 0)(lambda: self._keep(stage, 0, first, end, warpgroup))

            @pl.loop(jnp.minimum(lax.div(end, height), STEP // height), STEP // height)
            def _behind(index: Any) -> None:
                self._keep(stage, index, first - index * height, end - index * height, warpgroup)

            plgpu.commit_smem()
            # Both consumers multiply with the whole right operand, and each has cleared a part of it.
            plgpu.barrier_arrive(self.memory.cleared)
            plgpu.barrier_wait(self.memory.cleared)

    def _keep(self, stage: Any, index: Any, first: Any, end: Any, warpgroup: Any) -> None:
        """Zero the rows outside `[first, end)` in row `index` of tiles, in this warpgroup's part of both operands."""
        for column in range(self.plan.part_rows // TILE[1]):
            _keep_rows(self.backend.tile(self.lhs_tiles.at[stage, warpgroup], (index, column), TILE), first, end)
        columns = self.plan.tile_columns // TILE[1]
        share = -(-columns // WARPGROUPS)
        for i in range(share):
            column = warpgroup * share + i

            @pl.when(column < columns)
            def _own_column(column: Any = column) -> None:
                _keep_rows(self.backend.tile(self.rhs_tiles.at[stage], (index, column), TILE), first, end)

    # Epilogue.

    def _store(self, totals: Sequence[Any], tile: WgradTile, warpgroup: Any) -> None:
        """Store the sums of a tile, which come in pieces of columns."""
        plan, width = self.plan, self.plan.piece_columns
        rows = pl.ds(tile.row + plan.part_rows * warpgroup, plan.part_rows)
        for i in range(plan.tile_columns // width):
            piece = self.memory.out.at[warpgroup, i % plan.out_slots]
            values = self.piece(totals, i)
            plgpu.wait_smem_to_gmem(plan.out_slots - 1, wait_read_only=True)
            piece[...] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(piece, self.out.at[tile.group, rows, pl.ds(tile.column + i * width, width)])

    def piece(self, totals: Sequence[Any], index: int) -> Any:
        """Return a piece of a tile's result, rounded."""
        width = self.plan.piece_columns
        part, at = divmod(index * width, totals[0].shape[1])
        return totals[part][:, at : at + width].astype(self.plan.out_dtype)


def _keep_rows(tile: Any, first: Any, end: Any) -> None:
    """Zero all rows of a tile outside `[first, end)`; the swizzle permutes elements only within a row."""
    layout = plgpu.Layout.WG_STRIDED(TILE, vec_size=TILE[0] * TILE[1] // 128)
    row = plgpu.broadcasted_iota(jnp.int32, TILE, 0, layout=layout)
    values = plgpu.load(tile, layout=layout)
    tile[...] = jnp.where((row >= first) & (row < end), values, jnp.zeros_like(values))
