# SPDX-License-Identifier: Apache-2.0
"""The kernel of the weights' gradient.

A tile is of one group's result, and its steps go through the group's rows. Copies begin at multiples of eight rows, so
that a group's first step may hold rows of the one before, and its last step rows of the next: they are cleared in
shared memory, in both operands, so that nothing of theirs is summed, NaN and infinity included.

All warpgroups of a block meet the same tiles and the same steps in one order, whatever the sizes are: that is why none
can wait for what does not come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .plan import STEP, TILE, WARPGROUPS, WgradPlan
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
        program = _Program(plan, (lhs, rhs, table, out), simulated=interpret is not None)
        pl.run_scoped(program.run, program.scratch(), collective_axes="warpgroup")

    shape = (plan.groups, plan.inner, plan.columns)
    name = "grouped_matmul_wgrad"
    return launch(plan, grouped_matmul_wgrad, (lhs, rhs, table), shape, name=name, interpret=interpret)[0]


class _Program:
    """What one block of threads does."""

    def __init__(self, plan: WgradPlan, refs: tuple[Any, ...], *, simulated: bool) -> None:
        self.plan, self.simulated = plan, simulated
        self.lhs, self.rhs, self.table, self.out = refs

    def scratch(self) -> Scratch:
        """Return the types of shared memory and barriers."""
        plan = self.plan
        pieces = (WARPGROUPS, plan.out_slots, plan.part_rows, plan.piece_columns)
        return Scratch(
            self._operand((plan.stages, WARPGROUPS), plan.part_rows),
            self._operand((plan.stages,), plan.tile_columns),
            tiled(pieces, plan.out_dtype),
            *ring(plan),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        )

    def _operand(self, leading: tuple[int, ...], columns: int) -> Any:
        """Return the type of an operand's stages: in tiles, and as these lie in memory, one after the other."""
        in_tiles = tiled((*leading, STEP, columns), self.plan.dtype)
        if self.simulated:  # the interpreter knows no transforms, and takes views of the same bytes for others
            return in_tiles
        one_by_one = (*leading, STEP // TILE[0], columns // TILE[1], *TILE)
        return plgpu.RefUnion(in_tiles, plgpu.SMEM(one_by_one, jnp.dtype(self.plan.dtype)))

    def run(self, scratch: Scratch) -> None:
        """Be the warpgroup that this is."""
        (lhs, self.lhs_tiles), (rhs, self.rhs_tiles) = (
            (operand, operand) if self.simulated else operand for operand in (scratch.lhs, scratch.rhs)
        )
        self.shared = scratch = scratch._replace(lhs=lhs, rhs=rhs)
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
        height = TILE[0]

        @pl.when((first > 0) | (end < STEP))
        def _some() -> None:
            # The first is less than one tile's height, since copies begin at multiples of that.
            pl.when(first > 0)(lambda: self._keep(stage, 0, first, end, warpgroup))

            @pl.loop(jnp.minimum(lax.div(end, height), STEP // height), STEP // height)
            def _behind(index: Any) -> None:
                self._keep(stage, index, first - index * height, end - index * height, warpgroup)

            plgpu.commit_smem()
            # Both warpgroups multiply with all of the right operand, of which each has cleared its own part.
            plgpu.barrier_arrive(self.shared.cleared)
            plgpu.barrier_wait(self.shared.cleared)

    def _keep(self, stage: Any, index: Any, first: Any, end: Any, warpgroup: Any) -> None:
        """Clear, of the tiles in a row of such, the rows that are not from `first` until `end`."""
        for column in range(self.plan.part_rows // TILE[1]):
            _keep(self._tile_of(self.lhs_tiles.at[stage, warpgroup], index, column), first, end)
        columns = self.plan.tile_columns // TILE[1]
        share = -(-columns // WARPGROUPS)
        for i in range(share):
            column = warpgroup * share + i

            @pl.when(column < columns)
            def _mine(column: Any = column) -> None:
                _keep(self._tile_of(self.rhs_tiles.at[stage], index, column), first, end)

    def _tile_of(self, operand: Any, row: Any, column: Any) -> Any:
        if not self.simulated:
            return operand.at[row, column]
        return operand.at[pl.ds(row * TILE[0], TILE[0]), pl.ds(column * TILE[1], TILE[1])]

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


def _keep(tile: Any, first: Any, end: Any) -> None:
    """Set all rows of a tile to zero but those from `first` until `end`; the swizzle leaves a row's numbers in it."""
    layout = plgpu.Layout.WG_STRIDED(TILE, vec_size=TILE[0] * TILE[1] // 128)
    row = plgpu.broadcasted_iota(jnp.int32, TILE, 0, layout=layout)
    values = plgpu.load(tile, layout=layout)
    tile[...] = jnp.where((row >= first) & (row < end), values, jnp.zeros_like(values))
