# SPDX-License-Identifier: Apache-2.0
"""The kernel of the weights' gradient.

A tile is of one group's result, and its steps go through the group's rows. Copies begin at multiples of eight rows, so
that a group's first step may hold rows of the one before, and its last step rows of the next: they are cleared in
shared memory, in both operands, so that nothing of theirs is summed, NaN and infinity included.

All warpgroups of a block meet the same tiles and the same steps in one order, whatever the sizes are: that is why none
can wait for what does not come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .plan import ALIGNED, STEP, WARPGROUPS, WgradPlan
from .tiles import Scratch, accumulate, launch, place, plgpu, ring, share_out, tiled, when_free


class _Tile(NamedTuple):
    """A tile of the result.

    Attributes:
        group: Whose it is.
        start: The first row that is copied.
        first: The group's first row, counted from there.
        end: Behind its last, likewise.
        steps: How many steps of rows it takes.
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
    """Run the kernel on operands of padded sizes; the table, int32, has number, first row and rows of each group."""

    def grouped_matmul_wgrad(lhs: Any, rhs: Any, table: Any, out: Any) -> None:
        program = _Program(plan, (lhs, rhs, table, out))
        pl.run_scoped(program.run, program.scratch(), collective_axes="warpgroup")

    shape = (plan.groups, plan.inner, plan.columns)
    name = "grouped_matmul_wgrad"
    return launch(plan, grouped_matmul_wgrad, (lhs, rhs, table), shape, name=name, interpret=interpret)[0]


class _Program:
    """What one block of threads does."""

    def __init__(self, plan: WgradPlan, refs: tuple[Any, ...]) -> None:
        self.plan = plan
        self.lhs, self.rhs, self.table, self.out = refs

    def scratch(self) -> Scratch:
        """Return the types of shared memory and barriers."""
        plan = self.plan
        lhs = (plan.stages, WARPGROUPS, STEP, plan.part_rows)
        pieces = (WARPGROUPS, plan.out_slots, plan.part_rows, plan.piece_columns)
        return Scratch(
            tiled(lhs, plan.dtype),
            tiled((plan.stages, STEP, plan.tile_columns), plan.dtype),
            tiled(pieces, plan.out_dtype),
            *ring(plan),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        )

    def run(self, scratch: Scratch) -> None:
        """Be the warpgroup that this is."""
        self.shared = scratch
        share_out(self.plan, scratch, self._each_tile, copy=self._copy_tile, compute=self._compute_tile)

    # Which tiles.

    def _each_tile(self, body: Callable[[_Tile, Any], Any]) -> Any:
        """Call `body(tile, step)`, which returns the next step, for each of this program's tiles."""
        plan, program = self.plan, lax.axis_index("program")
        whole, rest = divmod(plan.tiles, plan.programs)
        backwards = plan.programs - 1 - program

        def one(i: Any, step: Any) -> Any:
            dealt = jnp.where(lax.rem(i, 2) == 0, program, backwards) if plan.snake else program
            return body(self._tile(i * plan.programs + dealt), step)

        last = backwards if plan.snake and whole % 2 else program
        return lax.fori_loop(0, whole + (last < rest).astype(jnp.int32), one, jnp.int32(0))

    def _tile(self, number: Any) -> _Tile:
        plan = self.plan
        of_group = plan.row_tiles * plan.column_tiles
        entry = lax.div(number, of_group)
        row_tile, column_tile = place(number - entry * of_group, plan.row_tiles, plan)
        first_row, rows = self.table[entry, 1], self.table[entry, 2]
        start = lax.div(first_row, 8) * 8
        end = first_row - start + rows
        steps = jnp.where(rows > 0, lax.div(end + (STEP - 1), STEP), 0)
        place_of = (row_tile * plan.tile_rows, column_tile * plan.tile_columns)
        return _Tile(self.table[entry, 0], start, first_row - start, end, steps, *place_of)

    # What copies.

    def _copy_tile(self, tile: _Tile, step: Any) -> Any:
        return lax.fori_loop(0, tile.steps, lambda i, step: self._copy_step(tile, i, step), step)

    def _copy_step(self, tile: _Tile, index: Any, step: Any) -> Any:
        plan = self.plan
        rows = pl.ds(pl.multiple_of(tile.start + index * STEP, 8), STEP)
        stage = when_free(self.shared, step, plan)
        full = self.shared.full.at[stage]
        for w in range(WARPGROUPS):
            columns = pl.ds(tile.row + plan.part_rows * w, plan.part_rows)
            plgpu.copy_gmem_to_smem(self.lhs.at[rows, columns], self.shared.lhs.at[stage, w], full)
        columns = pl.ds(tile.column, plan.tile_columns)
        plgpu.copy_gmem_to_smem(self.rhs.at[rows, columns], self.shared.rhs.at[stage], full)
        return step + 1

    # What computes.

    def _compute_tile(self, tile: _Tile, step: Any, warpgroup: Any) -> Any:
        plan = self.plan

        def products(sums: Any) -> None:
            # An empty group has no steps, and its result is stored all the same: zeros.
            pl.when(tile.steps > 0)(lambda: self._products(sums, tile, step, warpgroup))

        [sums] = accumulate(plan, products)
        self._store(sums, tile, warpgroup)
        return step + tile.steps

    def _products(self, sums: Any, tile: _Tile, step: Any, warpgroup: Any) -> None:
        plan, shared = self.plan, self.shared

        @pl.loop(0, tile.steps)
        def _step(i: Any) -> None:
            stage = lax.rem(step + i, plan.stages)
            plgpu.barrier_wait(shared.full.at[stage])
            self._clear(stage, tile.first - i * STEP, tile.end - i * STEP, warpgroup)
            plgpu.wgmma(sums, shared.lhs.at[stage, warpgroup].transpose((1, 0)), shared.rhs.at[stage])
            # The step before is done, and its stage is free, while this one's products are under way.
            plgpu.wgmma_wait(1)

            @pl.when(i > 0)
            def _before() -> None:
                plgpu.barrier_arrive(shared.free.at[lax.rem(step + i + (plan.stages - 1), plan.stages)])

        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.free.at[lax.rem(step + tile.steps - 1, plan.stages)])

    def _clear(self, stage: Any, first: Any, end: Any, warpgroup: Any) -> None:
        """Clear the rows of a stage that are not from `first` until `end`; the warpgroups share the work."""
        plan, shared = self.plan, self.shared
        half = plan.tile_columns // WARPGROUPS
        width = half if half % ALIGNED == 0 else ALIGNED

        # Only where there are some: with 64 uneven groups, clearing takes about a fifth of the time as it is.
        @pl.when((first > 0) | (end < STEP))
        def _some() -> None:
            _keep(shared.lhs.at[stage, warpgroup], (STEP, plan.part_rows), first, end)
            for begin in range(0, plan.tile_columns, WARPGROUPS * width):
                column = begin + warpgroup * width
                part = shared.rhs.at[stage, :, pl.ds(column, width)]
                if begin + WARPGROUPS * width <= plan.tile_columns:
                    _keep(part, (STEP, width), first, end)
                else:
                    pl.when(column < plan.tile_columns)(functools.partial(_keep, part, (STEP, width), first, end))
            plgpu.commit_smem()
            # Both warpgroups multiply with all of the right operand, of which each has cleared its own part.
            plgpu.barrier_arrive(shared.cleared)
            plgpu.barrier_wait(shared.cleared)

    def _store(self, sums: Any, tile: _Tile, warpgroup: Any) -> None:
        plan, width = self.plan, self.plan.piece_columns
        rows = pl.ds(tile.row + plan.part_rows * warpgroup, plan.part_rows)
        for i in range(plan.tile_columns // width):
            piece = self.shared.out.at[warpgroup, i % plan.out_slots]
            values = sums[:, i * width : (i + 1) * width].astype(plan.out_dtype)
            plgpu.wait_smem_to_gmem(plan.out_slots - 1, wait_read_only=True)
            piece[...] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(piece, self.out.at[tile.group, rows, pl.ds(tile.column + i * width, width)])


def _keep(buffer: Any, shape: tuple[int, int], first: Any, end: Any) -> None:
    """Set all rows of a buffer to zero but those from `first` until `end`."""
    layout = plgpu.Layout.WGMMA
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    values = plgpu.load(buffer, layout=layout)
    buffer[...] = jnp.where((row >= first) & (row < end), values, jnp.zeros_like(values))
