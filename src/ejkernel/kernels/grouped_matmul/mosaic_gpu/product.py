# SPDX-License-Identifier: Apache-2.0
"""The product's kernel, for matrices as they are and transposed, and for what is made of one product or of two.

Tiles of rows begin where their group begins. The last one of a group is moved up, so that it ends with the group: some
rows are computed twice, to the same bits, and only groups smaller than a tile are stored in pieces of powers of two
rows. Every thread walks over the sizes by itself while it takes its tiles, so that nothing runs before the kernel.

All warpgroups of a block meet the same tiles and the same steps in one order, whatever the sizes are: that is why none
can wait for what does not come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat

from .epilogue import finished
from .plan import STEP, WARPGROUPS, ProductPlan
from .tiles import (
    Scratch,
    accumulate,
    launch,
    operand_shape,
    place,
    plgpu,
    ring,
    share_out,
    swizzled,
    tiled,
    when_free,
)


class _Walk(NamedTuple):
    """Where the walk over groups is; group number `groups` are the rows past the last one, then those before all."""

    group: Any
    first_tile: Any
    first_row: Any
    rows: Any
    row_tiles: Any


class _Tile(NamedTuple):
    """A tile of the result: its group, its first row, how many rows of it are the group's, its first column."""

    group: Any
    row: Any
    rows: Any
    column: Any


def multiply(plan: ProductPlan, *arrays: Any, interpret: Any = None) -> list[jax.Array]:
    """Run the kernel, and return its result and the products that are kept.

    Args:
        plan: The launch.
        *arrays: Operands of padded sizes: rows, matrices, the gate's if there is one, sizes and what stands behind
            them in int32, and factors of rows in float32 if there are any, as many as there are rows and a tile's.
        interpret: How to simulate it.
    """

    def grouped_matmul(*refs: Any) -> None:
        program = _Program(plan, refs, simulated=interpret is not None)
        pl.run_scoped(program.run, program.scratch(), collective_axes="warpgroup")

    shape, name = (plan.rows, plan.columns), "grouped_matmul"
    return launch(plan, grouped_matmul, arrays, shape, name=name, interpret=interpret, results=plan.results)


class _Program:
    """What one block of threads does."""

    def __init__(self, plan: ProductPlan, refs: Sequence[Any], *, simulated: bool) -> None:
        self.plan, self.simulated = plan, simulated
        self.lhs, *refs = refs
        self.matrices, (self.sizes, *refs) = refs[: plan.products], refs[plan.products :]
        self.row_scale = refs.pop(0) if plan.scaled else None
        self.out, *self.kept = refs

    def scratch(self) -> Scratch:
        """Return the types of shared memory and barriers."""
        plan, full_free = self.plan, ring(self.plan)
        matrix = (plan.tile_columns, STEP) if plan.transpose_rhs else (STEP, plan.tile_columns)
        pieces = (WARPGROUPS, plan.out_slots, plan.part_rows, plan.piece_columns)
        lhs, out = tiled(operand_shape(plan), plan.dtype), tiled(pieces, plan.out_dtype)
        if not self.simulated:  # the interpreter knows no transforms, and takes views of the same bytes for others
            lhs = plgpu.RefUnion(lhs, swizzled(operand_shape(plan), plan.dtype))
            plain = plgpu.SMEM(pieces, jnp.dtype(plan.out_dtype))
            out = plgpu.RefUnion(out, swizzled(pieces, plan.out_dtype), plain)
        return Scratch(lhs, tiled((plan.products * plan.stages, *matrix), plan.dtype), out, *full_free)

    def run(self, scratch: Scratch) -> None:
        """Be the warpgroup that this is."""
        self.shared = scratch
        self.lhs_tiles, self.lhs_rows = (scratch.lhs,) * 2 if self.simulated else scratch.lhs
        self.out_views = (scratch.out,) * 3 if self.simulated else scratch.out
        self.first_group, self.first_row = self._first()
        share_out(self.plan, scratch, self._each_tile, copy=self._copy_tile, compute=self._compute_tile)

    # Which tiles.

    def _each_tile(self, body: Callable[[_Tile, Any], Any]) -> Any:
        """Call `body(tile, step)`, which returns the next step, for each of this program's tiles."""
        plan, zero = self.plan, jnp.int32(0)
        rows = self._rows_of(zero, self.first_row)
        first = lax.axis_index("program")

        def one(carry: Any) -> Any:
            number, walk, step = carry
            step = body(self._tile(number, walk), step)
            number = number + plan.programs
            return number, self._advance(number, walk), step

        walk = self._advance(first, _Walk(zero, zero, self.first_row, rows, self._tiles_of(rows)))
        return lax.while_loop(lambda carry: carry[1].group <= plan.last, one, (first, walk, zero))[2]

    def _rows_of(self, group: Any, first_row: Any) -> Any:
        """Return how many rows a group has, of those that there are."""
        plan = self.plan
        left = (jnp.where(group > plan.groups, self.first_row, plan.rows) if plan.is_part else plan.rows) - first_row
        # As in `row_ends`: no sizes may make anybody read, or wait for, what is not there.
        size = jnp.clip(self.sizes[self.first_group + jnp.minimum(group, plan.groups - 1)], 0, left)
        return jnp.where(group < plan.groups, size, left)

    def _first(self) -> tuple[Any, Any]:
        """Return the number of the first group, and its first row."""
        plan, zero = self.plan, jnp.int32(0)
        if not plan.is_part:
            return zero, zero
        first = self.sizes[plan.all_groups]
        return first, lax.fori_loop(0, first, lambda i, row: jnp.minimum(row + self.sizes[i], plan.rows), zero)

    def _tiles_of(self, rows: Any) -> Any:
        return lax.div(rows + (self.plan.tile_rows - 1), self.plan.tile_rows)

    def _advance(self, number: Any, walk: _Walk) -> _Walk:
        """Walk to the group that the tile of that number is of, or past the last."""
        plan, column_tiles = self.plan, self.plan.column_tiles

        def behind(walk: _Walk) -> Any:
            return (number >= walk.first_tile + walk.row_tiles * column_tiles) & (walk.group <= plan.last)

        def following(walk: _Walk) -> _Walk:
            group, first_row = walk.group + 1, walk.first_row + walk.rows
            if plan.is_part:
                first_row = jnp.where(group > plan.groups, 0, first_row)
            rows = self._rows_of(group, first_row)
            return _Walk(group, walk.first_tile + walk.row_tiles * column_tiles, first_row, rows, self._tiles_of(rows))

        found: _Walk = lax.while_loop(behind, following, walk)
        return found

    def _tile(self, number: Any, walk: _Walk) -> _Tile:
        row_tile, column_tile = place(number - walk.first_tile, walk.row_tiles, self.plan)
        offset = row_tile * self.plan.tile_rows
        # The last tile of a group ends with it: rows that it shares with the one before get the same bits from both.
        offset = jnp.minimum(offset, jnp.maximum(walk.rows - self.plan.tile_rows, 0))
        rows = jnp.minimum(walk.rows - offset, self.plan.tile_rows)
        return _Tile(walk.group, walk.first_row + offset, rows, column_tile * self.plan.tile_columns)

    # What copies.

    def _copy_tile(self, tile: _Tile, step: Any) -> Any:
        # Rows of no group are only stored, as zeros.
        steps = jnp.where(tile.group < self.plan.groups, self.plan.steps, 0)
        return lax.fori_loop(0, steps, lambda i, step: self._copy_step(tile, i, step), step)

    def _copy_step(self, tile: _Tile, index: Any, step: Any) -> Any:
        plan, along = self.plan, pl.ds(index * STEP, STEP)
        stage = when_free(self.shared, step, plan)
        full = self.shared.full.at[stage]
        for w in range(WARPGROUPS):
            rows = self.lhs.at[pl.ds(tile.row + plan.part_rows * w, plan.part_rows), along]
            plgpu.copy_gmem_to_smem(rows, self.lhs_rows.at[stage, w], full)
        columns = pl.ds(tile.column, plan.tile_columns)
        at = (tile.group, columns, along) if plan.transpose_rhs else (tile.group, along, columns)
        for matrices, buffer in zip(self.matrices, self._buffers(stage), strict=True):
            plgpu.copy_gmem_to_smem(matrices.at[at], buffer, full)
        return step + 1

    def _buffers(self, stage: Any) -> list[Any]:
        """Return where a stage has the matrices of each product."""
        return [self.shared.rhs.at[stage + i * self.plan.stages if i else stage] for i in range(self.plan.products)]

    # What computes.

    def _compute_tile(self, tile: _Tile, step: Any, warpgroup: Any) -> Any:
        plan = self.plan
        mine = jnp.clip(tile.rows - plan.part_rows * warpgroup, 0, plan.part_rows)
        real = tile.group < plan.groups

        # Without rows there is nothing to multiply, but a stage is free only when both warpgroups have said so.
        @pl.when(real & (mine <= 0))
        def _idle() -> None:
            @pl.loop(0, plan.steps)
            def _pass(i: Any) -> None:
                stage = lax.rem(step + i, plan.stages)
                plgpu.barrier_wait(self.shared.full.at[stage])
                plgpu.barrier_arrive(self.shared.free.at[stage])

        row_scale = self._factors(tile.row + plan.part_rows * warpgroup, real)  # long before they are needed

        def products(*sums: Any) -> None:
            pl.when(real & (mine > 0))(lambda: self._products(sums, step, warpgroup))

        sums = accumulate(plan, products)
        row = tile.row + plan.part_rows * warpgroup
        pieces = functools.partial(self._pieces, sums, row_scale, tile.column)
        if plan.is_plain:
            self._store(pieces, row, warpgroup, mine)
        else:  # computed in front of the branches: there are no registers for two that compute the same
            for piece in pieces():
                self._store(functools.partial(list, [piece]), row, warpgroup, mine)

        # Tiles outside of all groups come last, so that the steps that they do not have are missed by nobody; a
        # constant keeps the stage in registers that products read without waiting.
        return step + plan.steps

    def _products(self, sums: Sequence[Any], step: Any, warpgroup: Any) -> None:
        plan, shared = self.plan, self.shared

        def multiply(stage: Any) -> None:
            plgpu.barrier_wait(shared.full.at[stage])
            for of_product, buffer in zip(sums, self._buffers(stage), strict=True):
                matrix = buffer.transpose((1, 0)) if plan.transpose_rhs else buffer
                plgpu.wgmma(of_product, self.lhs_tiles.at[stage, warpgroup], matrix)

        # A stage is given back a step late, so that the tensor core always has the next products in line.
        multiply(lax.rem(step, plan.stages))

        @pl.loop(1, plan.steps)
        def _step(i: Any) -> None:
            multiply(lax.rem(step + i, plan.stages))
            plgpu.wgmma_wait(plan.products)
            plgpu.barrier_arrive(shared.free.at[lax.rem(step + i - 1, plan.stages)])

        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.free.at[lax.rem(step + plan.steps - 1, plan.stages)])

    # A result's way to memory.

    def _factors(self, row: Any, real: Any) -> Any:
        """Return the factors of a warpgroup's rows, zero past the last group; `None`: there are none."""
        if self.row_scale is None:
            return None
        rows = self.row_scale.at[pl.ds(row, self.plan.part_rows)]
        factors = plgpu.load(rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return jnp.where(real, factors, jnp.zeros_like(factors))

    def _pieces(self, sums: Sequence[Any], row_scale: Any, column: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield slot, values, result and columns of each piece."""
        plan, width = self.plan, self.plan.piece_columns
        for i in range(plan.pieces):
            products = [of_product[:, i * width : (i + 1) * width] for of_product in sums]
            values = [finished(products, row_scale, plan.activation), *products[: len(self.kept)]]
            for j, (result, value) in enumerate(zip((self.out, *self.kept), values, strict=True)):
                slot = (i * plan.results + j) % plan.out_slots
                yield slot, value.astype(plan.out_dtype), result, pl.ds(column + i * width, width)

    def _store(self, pieces: Callable[[], Iterable[Any]], row: Any, warpgroup: Any, mine: Any) -> None:
        part_rows = self.plan.part_rows

        @pl.when(mine == part_rows)
        def _whole() -> None:
            self._store_whole(pieces(), row, warpgroup)

        @pl.when((mine < part_rows) & (mine > 0))
        def _partly() -> None:
            self._store_rows(pieces(), row, warpgroup, mine)

    def _store_whole(self, pieces: Iterable[Any], row: Any, warpgroup: Any) -> None:
        plan = self.plan
        tiles, rows, _ = self.out_views
        for slot, values, result, columns in pieces:
            # The copy that last read this slot is the oldest of as many as there are slots.
            plgpu.wait_smem_to_gmem(plan.out_slots - 1, wait_read_only=True)
            tiles.at[warpgroup, slot][...] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(rows.at[warpgroup, slot], result.at[pl.ds(row, plan.part_rows), columns])

    def _store_rows(self, pieces: Iterable[Any], row: Any, warpgroup: Any, count: Any) -> None:
        """Store the first `count` rows, by powers of two: how many rows a copy has is known when it is compiled."""
        plain = self.out_views[2]
        for slot, values, result, columns in pieces:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            compat.store_as_it_is(plain.at[warpgroup, slot], values)
            plgpu.commit_smem()
            done: Any = 0
            height = self.plan.part_rows // 2
            while height:
                rows, wanted = (row, done, height), (count & height) != 0
                self._store_some(plain.at[warpgroup, slot], rows, result, columns, wanted)
                done, height = done + (count & height), height // 2
            plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _store_some(self, piece: Any, rows: tuple[Any, Any, int], result: Any, columns: Any, wanted: Any) -> None:
        row, done, height = rows

        # A copy of one row is of one axis, which is not cut off at the end of the columns, but goes on in the next row.
        @pl.when(wanted & (columns.start < self.plan.columns))
        def _copy() -> None:
            source = piece.at[pl.ds(done, height)]
            plgpu.copy_smem_to_gmem(source, result.at[pl.ds(row + done, height), columns], commit_group=False)
