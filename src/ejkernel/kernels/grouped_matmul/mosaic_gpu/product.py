# SPDX-License-Identifier: Apache-2.0
"""The grouped product's kernel, with an optional epilogue (activation, gate, row factors).

Tiles of rows start at the first row of their group. If the plan has short tiles, and at most half a tile of rows
remains, they are one, which one consumer computes in about two thirds of the time. The last tile of a group is shifted
up so that it ends with the group: some rows are computed twice, with the same bits. Only groups smaller than a tile are
stored in pieces, with powers of two as heights. The tile scheduler runs in the producer: it walks over the group sizes
as it takes tiles, so nothing has to run before the kernel, and consumers read its tiles from a ring.

Producer and consumers visit the same tiles and steps in the same order, for any group sizes, so they cannot deadlock.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat
from ejkernel.kernels._hopper.backend import Backend, backend_for
from ejkernel.kernels._hopper.blocks import tiles_and_rows
from ejkernel.kernels._hopper.launch import CLUSTER, PROGRAM, WARPGROUP, dispatch_warpgroup, plgpu, swizzled, tiled
from ejkernel.kernels._hopper.pipeline import producer_tail
from ejkernel.kernels._hopper.products import multiply_stages
from ejkernel.kernels._hopper.tile_ring import TileRing
from ejkernel.kernels._hopper.tile_shapes import REGISTERS, STEP, WARPGROUPS

from .plan import ProductPlan
from .tiles import GroupedMemory, accumulate, lhs_shape, pipeline_types, run_kernel, tile_position

_END = -1  # the group of the tile after the last


class _GroupCursor(NamedTuple):
    """The tile scheduler's position in the list of groups.

    Group number `groups` is the rows after the last group; the number after it is the rows before the first.

    Attributes:
        group: The group's number.
        tile: The number of its first tile, among the whole tiles of all groups.
        short: The number of its first short tile, among the short ones; `None` without these.
        row: Its first row.
        rows: How many rows it has.
    """

    group: Any
    tile: Any
    short: Any
    row: Any
    rows: Any


class ProductTile(NamedTuple):
    """A tile of the result: its group, its first row, how many of its rows are the group's, its first column."""

    group: Any
    row: Any
    rows: Any
    column: Any


def multiply(plan: ProductPlan, *arrays: Any, interpret: Any = None) -> list[jax.Array]:
    """Run the kernel; return its result, then the products if the plan keeps them.

    Args:
        plan: The launch.
        *arrays: Padded operands: rows; matrices; the gate's matrices, if any; int32 group sizes, followed by the first
            group if the plan has only some; float32 row factors, if any, with room for one more tile.
        interpret: `InterpretGPUParams` to simulate it on a CPU.
    """
    kernel, shape = ProductKernel(plan, backend_for(interpret)), (plan.rows, plan.columns)
    return run_kernel(kernel, arrays, shape, name="grouped_matmul", results=plan.results)


class ProductKernel:
    """The program of one block of threads."""

    def __init__(self, plan: ProductPlan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend

    def memory_types(self) -> GroupedMemory:
        """Return the types of shared memory and barriers."""
        plan = self.plan
        pieces = (WARPGROUPS, plan.out_slots, plan.part_rows, plan.piece_columns)
        # Copies of rows use the swizzled views: only these may start at any row.
        lhs = tiles_and_rows(self.backend, lhs_shape(plan), plan.dtype)
        plain = plgpu.SMEM(pieces, jnp.dtype(plan.out_dtype))
        out = self.backend.aliased(tiled(pieces, plan.out_dtype), swizzled(pieces, plan.out_dtype), plain)
        tiles = TileRing.types(len(ProductTile._fields), consumers=WARPGROUPS)
        return GroupedMemory(lhs, self._matrices_type(), out, pipeline_types(plan), tiles=tiles)

    def _matrices_type(self) -> Any:
        """Return the type of the pipeline stages of the matrices."""
        plan = self.plan
        matrix = (plan.tile_columns, STEP) if plan.transpose_rhs else (STEP, plan.tile_columns)
        return tiled((plan.products * plan.stages, *matrix), plan.dtype)

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: GroupedMemory) -> None:
        """Run this warpgroup as producer or consumer."""
        self.lhs, *others = arrays
        self.matrices, (self.sizes, *scales) = others[: self.plan.products], others[self.plan.products :]
        self.row_scale = scales[0] if scales else None
        self.out, *self.kept = results
        self.memory, self.pipeline = memory, memory.pipeline
        self.lhs_tiles, self.lhs_rows = self.backend.views(memory.lhs, 2)
        self.out_views = self.backend.views(memory.out, 3)
        self.rank = lax.axis_index(CLUSTER) if self.plan.cluster > 1 else 0
        warpgroup = lax.axis_index(WARPGROUP)
        dispatch_warpgroup(warpgroup, WARPGROUPS, REGISTERS, producer=self._produce, consumer=self._consume)

    # Tile scheduler.

    def _each_tile(self, body: Callable[[ProductTile, Any, Any], Any]) -> tuple[Any, Any]:
        """Call `body(tile, index, step)`, which returns the next step, for each tile of this block of threads.

        Return the numbers of tiles and steps.

        Whole and short tiles are dealt apart: every block gets as many of each, so that blocks that share a matrix
        stay in step. Out of step they read it again from memory: 430 instead of 551 TFLOP/s with 256 uneven groups.
        """
        plan, zero, first = self.plan, jnp.int32(0), lax.axis_index(PROGRAM)

        def count(tile: Any, short: Any) -> Any:
            # The first numbers add up to less than `programs`. One more register for a count would be spilled.
            return lax.div(tile if short is None else tile + short, plan.programs)

        def one(carry: Any) -> Any:
            cursor, tile, short, step = carry
            found = self._tile(tile, cursor) if short is None else self._tile_or_short(tile, short, cursor)
            step = body(found, count(tile, short), step)
            is_whole = short is None or tile < self._end(cursor)
            tile = tile + jnp.where(is_whole, plan.programs, 0)
            short = None if short is None else short + jnp.where(is_whole, 0, plan.programs)
            return self._advance(tile, short, cursor), tile, short, step

        # Short tiles begin with the blocks that the last round of whole tiles leaves without one.
        short, first_short = (plan.programs - 1 - first, zero) if plan.has_short_tiles else (None, None)
        start = _GroupCursor(zero, zero, first_short, self.first_row, self._rows_of(zero, self.first_row))
        carry = (self._advance(first, short, start), first, short, zero)
        _, *numbers, steps = lax.while_loop(lambda carry: carry[0].group <= plan.last, one, carry)
        return count(*numbers), steps

    def _rows_of(self, group: Any, first_row: Any) -> Any:
        """Return how many rows a group has within the array."""
        plan = self.plan
        left = (jnp.where(group > plan.groups, self.first_row, plan.rows) if plan.is_part else plan.rows) - first_row
        # As in `row_ends`: invalid sizes must not cause a read, or a wait, past the end.
        size = jnp.clip(self.sizes[self.first_group + jnp.minimum(group, plan.groups - 1)], 0, left)
        return jnp.where(group < plan.groups, size, left)

    def _first(self) -> tuple[Any, Any]:
        """Return the number of the first group, and its first row."""
        plan, zero = self.plan, jnp.int32(0)
        if not plan.is_part:
            return zero, zero
        first = self.sizes[plan.all_groups]
        return first, lax.fori_loop(0, first, lambda i, row: jnp.minimum(row + self.sizes[i], plan.rows), zero)

    def _row_tiles(self, rows: Any) -> Any:
        """Return how many whole tiles a group's rows are; a short one is added if not all rows are in them.

        A cluster counts as one tile.
        """
        size = self.plan.tile_rows * self.plan.cluster
        last = self.plan.part_rows if self.plan.has_short_tiles else size
        return lax.div(rows + (last - 1), size)

    def _end(self, at: _GroupCursor) -> Any:
        """Return the number after the group's last whole tile."""
        return at.tile + self._row_tiles(at.rows) * self.plan.column_tiles

    def _short_end(self, at: _GroupCursor) -> Any:
        """Return the number after the group's last short tile; `None` without short tiles."""
        has_short = at.rows > self._row_tiles(at.rows) * self.plan.tile_rows
        return None if at.short is None else at.short + jnp.where(has_short, self.plan.column_tiles, 0)

    def _advance(self, tile: Any, short: Any, cursor: _GroupCursor) -> _GroupCursor:
        """Return the cursor at the group of the next whole or short tile, or past the last group."""
        plan = self.plan

        def behind(at: _GroupCursor) -> Any:
            is_behind = (tile >= self._end(at)) & (at.group <= plan.last)
            return is_behind if short is None else is_behind & (short >= self._short_end(at))

        def following(at: _GroupCursor) -> _GroupCursor:
            group, row = at.group + 1, at.row + at.rows
            if plan.is_part:
                row = jnp.where(group > plan.groups, 0, row)
            return _GroupCursor(group, self._end(at), self._short_end(at), row, self._rows_of(group, row))

        found: _GroupCursor = lax.while_loop(behind, following, cursor)
        return found

    def _tile(self, number: Any, cursor: _GroupCursor) -> ProductTile:
        """Return a whole tile."""
        plan = self.plan
        row_tile, column_tile = tile_position(number - cursor.tile, self._row_tiles(cursor.rows), plan)
        row_tile = row_tile + self.rank
        # The last tile ends with its group: rows that two tiles share get the same bits from both.
        offset = jnp.minimum(row_tile * plan.tile_rows, jnp.maximum(cursor.rows - plan.tile_rows, 0))
        rows = jnp.minimum(cursor.rows - offset, plan.tile_rows)
        return ProductTile(cursor.group, cursor.row + offset, rows, column_tile * plan.tile_columns)

    def _tile_or_short(self, number: Any, short: Any, cursor: _GroupCursor) -> ProductTile:
        """Return a whole tile, or a short one of a group without more whole tiles."""
        plan, whole = self.plan, self._tile(number, cursor)
        offset = jnp.maximum(cursor.rows - plan.part_rows, 0)
        column = (short - cursor.short) * plan.tile_columns
        last = ProductTile(cursor.group, cursor.row + offset, cursor.rows - offset, column)
        is_whole = number < self._end(cursor)
        return ProductTile(*(jnp.where(is_whole, x, y) for x, y in zip(whole, last, strict=True)))

    # Producer.

    def _produce(self) -> None:
        def copy(tile: ProductTile, index: Any, step: Any) -> Any:
            self.memory.tiles.publish(index, tile)
            return self._copy_tile(tile, step)

        self.first_group, self.first_row = self._first()
        count, steps = self._each_tile(copy)
        self.memory.tiles.publish(count, ProductTile(*[jnp.int32(_END)] * len(ProductTile._fields)))
        producer_tail(steps, self.pipeline)
        self.memory.tiles.tail(count + 1)

    def _copy_tile(self, tile: ProductTile, step: Any) -> Any:
        # Rows outside all groups have no products: zeros are stored.
        steps = jnp.where(tile.group < self.plan.groups, self.plan.steps, 0)
        return lax.fori_loop(0, steps, lambda i, step: self._copy_step(tile, i, step), step)

    def _copy_step(self, tile: ProductTile, index: Any, step: Any) -> Any:
        plan = self.plan
        along = pl.ds(self._number(index) * plan.step_size, plan.step_size)
        stage = self.pipeline.producer_acquire(step)
        full = self.pipeline.full.at[stage]
        for w in range(WARPGROUPS):
            rows = self.lhs.at[pl.ds(tile.row + plan.part_rows * w, plan.part_rows), along]
            self.backend.copy_if(tile.rows > plan.part_rows * w, rows, self.lhs_rows.at[stage, w], full)
        self._copy_matrices(tile, along, stage)
        return step + 1

    def _number(self, index: Any) -> Any:
        """Return the number, along all of `k`, of step `index` of the tile that is copied."""
        return index

    def _copy_matrices(self, tile: ProductTile, along: Any, stage: Any) -> None:
        columns = pl.ds(tile.column, self.plan.tile_columns)
        at = (tile.group, columns, along) if self.plan.transpose_rhs else (tile.group, along, columns)
        for matrices, buffer in zip(self.matrices, self._buffers(stage), strict=True):
            plgpu.copy_gmem_to_smem(matrices.at[at], buffer, self.pipeline.full.at[stage])

    def _buffers(self, stage: Any) -> list[Any]:
        """Return the buffer of each product's matrix in a stage."""
        return [self.memory.rhs.at[stage + i * self.plan.stages if i else stage] for i in range(self.plan.products)]

    # Consumers.

    def _consume(self, warpgroup: Any) -> None:
        def read(step: Any) -> ProductTile:
            numbers = self.memory.tiles.read(lax.div(step, self.plan.steps))
            return ProductTile(*map(self.backend.uniform, numbers))

        def compute(carry: Any) -> Any:
            tile, step = carry
            step = self._compute_tile(tile, step, warpgroup)
            return read(step), step

        zero = jnp.int32(0)
        lax.while_loop(lambda carry: carry[0].group != _END, compute, (read(zero), zero))
        plgpu.wait_smem_to_gmem(0)

    def _compute_tile(self, tile: ProductTile, step: Any, warpgroup: Any) -> Any:
        plan = self.plan
        count = jnp.clip(tile.rows - plan.part_rows * warpgroup, 0, plan.part_rows)
        in_group = tile.group < plan.groups

        pl.when(in_group & (count <= 0))(lambda: self._idle(step))
        row_scale = self._load_row_scale(tile.row + plan.part_rows * warpgroup, in_group)  # long before it is needed

        def products(*accumulators: Any) -> None:
            pl.when(in_group & (count > 0))(lambda: self._mainloop(accumulators, step, warpgroup))

        accumulators = accumulate(plan, products)
        row = tile.row + plan.part_rows * warpgroup
        pieces = functools.partial(self._pieces, accumulators, row_scale, tile)
        if plan.is_plain:
            self._store(pieces, row, warpgroup, count)
        else:  # computed before the branches: two copies of the epilogue would spill registers
            for piece in pieces():
                self._store(functools.partial(list, [piece]), row, warpgroup, count)

        # Tiles outside all groups come last and run no steps, but counting steps for them does no harm, and a constant
        # increment keeps the stage in uniform registers.
        return step + plan.steps

    def _idle(self, step: Any) -> None:
        """Release the stages of a tile without rows for this warpgroup: the producer waits for both."""

        @pl.loop(0, self.plan.steps)
        def _pass(i: Any) -> None:
            stage = self.pipeline.stage(step + i)
            self.pipeline.consumer_wait(stage)
            self.pipeline.consumer_release(stage)

    def _mainloop(self, accumulators: Sequence[Any], step: Any, warpgroup: Any) -> None:
        plan = self.plan

        def multiply(stage: Any) -> None:
            for accumulator, buffer in zip(accumulators, self._buffers(stage), strict=True):
                matrix = buffer.transpose((1, 0)) if plan.transpose_rhs else buffer
                plgpu.wgmma(accumulator, self.lhs_tiles.at[stage, warpgroup], matrix)

        # Without it, stage numbers of gated products are moved to uniform registers between products.
        step = self.backend.uniform(step)
        multiply_stages(self.pipeline, step, plan.steps, multiply, products=plan.products)

    # Epilogue.

    def _load_row_scale(self, row: Any, in_group: Any) -> Any:
        """Return the factors of a warpgroup's rows, zero after the last group; `None` if the call has none."""
        if self.row_scale is None:
            return None
        rows = self.row_scale.at[pl.ds(row, self.plan.part_rows)]
        factors = plgpu.load(rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return jnp.where(in_group, factors, jnp.zeros_like(factors))

    def _pieces(
        self, accumulators: Sequence[Any], row_scale: Any, tile: ProductTile
    ) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield slot, values, result and columns of each piece of the tile."""
        plan, width = self.plan, self.plan.piece_columns
        for i in range(plan.pieces):
            products = [accumulator[:, i * width : (i + 1) * width] for accumulator in accumulators]
            values = [epilogue(products, row_scale, plan.activation), *products[: len(self.kept)]]
            for j, (result, value) in enumerate(zip((self.out, *self.kept), values, strict=True)):
                slot = (i * plan.results + j) % plan.out_slots
                yield slot, value.astype(plan.out_dtype), result, pl.ds(tile.column + i * width, width)

    def _store(self, pieces: Callable[[], Iterable[Any]], row: Any, warpgroup: Any, count: Any) -> None:
        part_rows = self.plan.part_rows

        @pl.when(count == part_rows)
        def _whole() -> None:
            self._store_whole(pieces(), row, warpgroup)

        @pl.when((count < part_rows) & (count > 0))
        def _partly() -> None:
            self._store_rows(pieces(), row, warpgroup, count)

    def _store_whole(self, pieces: Iterable[Any], row: Any, warpgroup: Any) -> None:
        plan = self.plan
        tiles, rows, _ = self.out_views
        for slot, values, result, columns in pieces:
            # The copy that last read this slot is the oldest of `out_slots` copies.
            plgpu.wait_smem_to_gmem(plan.out_slots - 1, wait_read_only=True)
            tiles.at[warpgroup, slot][...] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(rows.at[warpgroup, slot], result.at[pl.ds(row, plan.part_rows), columns])

    def _store_rows(self, pieces: Iterable[Any], row: Any, warpgroup: Any, count: Any) -> None:
        """Store the first `count` rows in powers of two: the height of a copy is fixed at compile time."""
        plain = self.out_views[2]
        for slot, values, result, columns in pieces:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            compat.kernels.store_as_it_is(plain.at[warpgroup, slot], values)
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

        # A copy of one row has one axis: TMA does not clip it at the last column, it continues in the next row.
        @pl.when(wanted & (columns.start < self.plan.columns))
        def _copy() -> None:
            source = piece.at[pl.ds(done, height)]
            plgpu.copy_smem_to_gmem(source, result.at[pl.ds(row + done, height), columns], commit_group=False)


# The epilogue in registers.


def epilogue(products: Sequence[jax.Array], row_scale: jax.Array | None, activation: str | None) -> jax.Array:
    """Return the result for a piece of each product, as `common.finished` does, in fast instructions.

    Factors of rows are those of each row, or of each element.
    """
    first, *others = products
    out = first if activation is None else _ACTIVATIONS[activation](first)
    for other in others:
        out = out * other
    if row_scale is None:
        return out
    return out * (row_scale if row_scale.ndim == out.ndim else lax.broadcast_in_dim(row_scale, out.shape, [0]))


def _times_sigmoid(x: jax.Array, at: jax.Array) -> jax.Array:
    """Return `x * sigmoid(at)`; a reciprocal square root is one instruction, a division is many."""
    # The tanh instruction is too coarse for small results.
    root = lax.rsqrt(1.0 + jnp.exp(-at))
    return x * root * root


def _silu(x: jax.Array) -> jax.Array:
    return _times_sigmoid(x, x)


def _gelu(x: jax.Array) -> jax.Array:
    # (1 + tanh(y)) / 2 is the sigmoid of 2 y, which does not cancel when tanh is near -1.
    return _times_sigmoid(x, x * (2 * math.sqrt(2 / math.pi)) * (1.0 + 0.044715 * (x * x)))


def _relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, jnp.zeros_like(x))


def _relu2(x: jax.Array) -> jax.Array:
    return _relu(x) * _relu(x)


_ACTIVATIONS: Final[Mapping[str, Callable[[jax.Array], jax.Array]]] = {
    "silu": _silu,
    "gelu": _gelu,
    "relu": _relu,
    "relu2": _relu2,
}
