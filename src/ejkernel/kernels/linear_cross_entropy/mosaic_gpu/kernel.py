# SPDX-License-Identifier: Apache-2.0
"""The kernel: a product with an epilogue that turns a tile of logits into statistics, exponentials, or a gradient.

Producer and consumers visit the same tiles and steps in the same order, so they cannot deadlock. Blocks of a cluster
have neighbouring tiles of one column; each copies its share of the weight to all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.backend import Backend, backend_for
from ejkernel.kernels._hopper.blocks import Blocks, multiply, tiles_and_rows
from ejkernel.kernels._hopper.epilogue import across, load_rows, numbered, piece_of, store_piece
from ejkernel.kernels._hopper.launch import (
    CLUSTER,
    PROGRAM,
    WARPGROUP,
    dispatch_warpgroup,
    launch,
    plgpu,
    unsliced,
)
from ejkernel.kernels._hopper.pipeline import Pipeline, producer_tail
from ejkernel.kernels._hopper.products import Lag, accumulate, multiply_stages, tile_position
from ejkernel.kernels._hopper.tile_shapes import PIECE, REGISTERS, ROWS, STEP, WARPGROUPS

from .plan import EXPONENTIALS, GRADIENT, MAXIMA, PRODUCT, STATISTICS, TILE_ROWS, HeadPlan

LOG2E = 1.4426950408889634
DTYPE = jnp.bfloat16


class HeadMemory(NamedTuple):
    """Shared memory and barriers of one block of threads: types before `run_scoped`, references inside it.

    Attributes:
        lhs: Pipeline stages of the rows, one part per consumer warpgroup.
        rhs: Pipeline stages of the weight.
        out: Staging buffers of the epilogue, per consumer warpgroup; `None` without a matrix to store.
        pipeline: The barriers of the stages.
        lag: The barrier of `Lag`; `None` without a lag.
    """

    lhs: Any
    rhs: Any
    out: Any
    pipeline: Pipeline
    lag: Any


class _Tile(NamedTuple):
    """This warpgroup's part of a tile: first row, tile column, first column in this launch and in the weight."""

    row: Any
    column_tile: Any
    column: Any
    first: Any
    warpgroup: Any


def run_head(
    plan: HeadPlan, arrays: Sequence[jax.Array], into: Sequence[jax.Array] = (), *, interpret: Any = None
) -> list[jax.Array]:
    """Run the kernel; return one array `[column tiles, rows]` for each of `plan.per_tile`, then the matrix, if any.

    Args:
        plan: The launch.
        arrays: Rows and weight; rows of both are multiples of 8 elements, and either may end anywhere else. The bias in
            float32, padded with -inf to whole tiles, if any; int32 labels. For a conditional launch int32 `[1]`: zero
            if it shall do nothing. Then for all but a gradient an int32 table of 64 rows by tile columns that says
            where labels are, and for exponentials the numbers per row, in base 2. For a gradient the first column,
            int32 `[1]`; per row, in float32, the log-sum-exp in base 2 and the coefficients. For a product rows, matrix
            and factors alone. Numbers per row are those of whole tiles.
        into: Arrays that the results overwrite; a conditional launch needs them.
        interpret: `InterpretGPUParams` to simulate it on a CPU.
    """
    part = jax.ShapeDtypeStruct((plan.column_tiles, plan.rows), jnp.float32)
    out_type = [part] * len(plan.per_tile)
    if plan.has_matrix:
        out_type.append(jax.ShapeDtypeStruct((arrays[0].shape[0], plan.columns), DTYPE))
    kernel = HeadKernel(plan, backend_for(interpret))

    def run(arrays: Sequence[Any], targets: Sequence[Any] = ()) -> list[jax.Array]:
        return launch(
            lambda refs, results, memory: kernel.run(refs[0], refs[1] or results, memory),
            (list(arrays), list(targets)),
            [] if targets else out_type,
            name=f"linear_cross_entropy_{plan.mode}",
            programs=plan.programs,
            memory=kernel.memory_types(),
            consumers=WARPGROUPS,
            cluster=plan.cluster,
            lane_semantics=True,
            interpret=interpret,
        )

    if not into:
        return run(arrays)
    operands, before = unsliced((list(arrays), tuple(into)))

    def overwrite(targets: Any) -> None:
        run(operands, targets)

    return list(unsliced(pl.run_state(overwrite)(before)))


class HeadKernel:
    """The program of one block of threads."""

    def __init__(self, plan: HeadPlan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend
        stages, block = plan.stages, (plan.block_n, STEP) if plan.transpose_weight else (STEP, plan.block_n)
        self.lhs = Blocks(backend, (stages, WARPGROUPS), ROWS, STEP)
        self.rhs = Blocks(backend, (stages,), *block, whole=plan.whole)

    def memory_types(self) -> HeadMemory:
        """Return the types of shared memory and barriers."""
        plan, shape = self.plan, (WARPGROUPS, self.plan.out_slots, ROWS, PIECE)
        out = tiles_and_rows(self.backend, shape, DTYPE) if plan.has_matrix else None
        copies = WARPGROUPS * self.lhs.pieces + self.rhs.pieces
        pipeline = Pipeline.types(plan.stages, consumers=WARPGROUPS, copies=copies, cluster=plan.cluster)
        lag = Lag.barrier_type() if plan.lag else None
        return HeadMemory(self.lhs.type(DTYPE), self.rhs.type(DTYPE), out, pipeline, lag)

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: HeadMemory) -> None:
        """Run this warpgroup as producer or consumer, on references."""
        plan = self.plan
        self._name(arrays, results)
        self.memory, self.pipeline = memory, memory.pipeline
        self.out_tiles, self.out_rows = self.backend.views(memory.out, 2) if plan.has_matrix else (None, None)
        program = lax.axis_index(PROGRAM)
        self.rank = lax.axis_index(CLUSTER) if plan.cluster > 1 else 0
        tiles = plan.row_tiles // plan.cluster * plan.column_tiles
        self.tiles = lax.div(tiles - program + (plan.programs - 1), plan.programs)
        if plan.conditional:
            self.tiles = jnp.where(self.condition[0] != 0, self.tiles, 0)
        self.first_column = self.start[0] if plan.mode == GRADIENT else jnp.int32(0)
        warpgroup = lax.axis_index(WARPGROUP)
        dispatch_warpgroup(warpgroup, WARPGROUPS, REGISTERS, producer=self._produce, consumer=self._consume)

    def _name(self, arrays: Sequence[Any], results: Sequence[Any]) -> None:
        plan = self.plan
        self.x, self.weight, *others = arrays
        self.parts = dict(zip(plan.per_tile, results, strict=False))
        self.out: Any = results[-1] if plan.has_matrix else None
        if plan.mode == PRODUCT:
            self.coefficients = others
            return
        self.bias = others.pop(0) if plan.bias else None
        self.labels = others.pop(0)
        self.condition: Any = others.pop(0) if plan.conditional else None
        if plan.mode == GRADIENT:
            self.start, *self.coefficients = others
        else:
            self.has_labels = others.pop(0)
            self.relative_to = others.pop(0) if plan.mode == EXPONENTIALS else None

    def _position(self, index: Any) -> tuple[Any, Any]:
        """Return row and column, in tiles, of this block's tile `index`."""
        plan = self.plan
        number = lax.axis_index(PROGRAM) + index * plan.programs
        panel = max(1, plan.panel // plan.cluster)
        rows, column = tile_position(number, plan.row_tiles // plan.cluster, plan.column_tiles, panel)
        return rows * plan.cluster + self.rank, column

    # Producer.

    def _produce(self) -> None:
        plan = self.plan

        @pl.loop(0, self.tiles)
        def _tile(index: Any) -> None:
            row, column = self._position(index)

            @pl.loop(0, plan.steps)
            def _step(i: Any) -> None:
                self._copy_step(row, column, i, index * plan.steps + i)

        producer_tail(self.tiles * plan.steps, self.pipeline)

    def _copy_step(self, row: Any, column: Any, index: Any, step: Any) -> None:
        plan, along = self.plan, index * STEP
        stage = self.pipeline.producer_acquire(step)
        full = self.pipeline.full.at[stage]
        for w in range(WARPGROUPS):
            self.lhs.copy(self.x, (row * TILE_ROWS + ROWS * w, along), self.memory.lhs, (stage, w), full)
        first = self.first_column + column * plan.block_n
        at = (first, along) if plan.transpose_weight else (along, first)
        shared = {"collective_axes": CLUSTER} if plan.cluster > 1 else {}
        self.rhs.copy(self.weight, at, self.memory.rhs, (stage,), full, **shared)

    # Consumers.

    def _consume(self, warpgroup: Any) -> None:
        plan = self.plan

        @pl.loop(0, self.tiles)
        def _tile(index: Any) -> None:
            row, column_tile = self._position(index)
            column = column_tile * plan.block_n
            row = row * TILE_ROWS + warpgroup * ROWS
            tile = _Tile(row, column_tile, column, self.first_column + column, warpgroup)
            self._compute_tile(tile, index * plan.steps)

        if plan.has_matrix:
            plgpu.wait_smem_to_gmem(0)

    def _compute_tile(self, tile: _Tile, step: Any) -> None:
        plan = self.plan
        known = self._known(tile)  # loaded long before it is needed
        lag = Lag(self.memory.lag, tile.warpgroup, plan.lag) if plan.lag else None

        def mainloop(accumulator: Any) -> None:
            def one(stage: Any) -> None:
                [left], right = self.lhs.matrices(self.memory.lhs, stage, tile.warpgroup), self._weight(stage)
                multiply(accumulator, left, right)

            # Without it, stage numbers take registers, which spill, and are moved between the products of a stage.
            at = self.backend.uniform(step) if self.rhs.pieces > 1 else step
            multiply_stages(self.pipeline, at, plan.steps, one, products=self.rhs.pieces, lag=lag)

        [product] = accumulate((ROWS, plan.block_n), 1, mainloop)
        epilogues: dict[str, Any] = {
            STATISTICS: self._statistics,
            MAXIMA: self._maxima,
            EXPONENTIALS: self._exponentials,
            GRADIENT: self._gradient,
            PRODUCT: self._product,
        }
        epilogues[plan.mode](product, tile, *known)

    def _weight(self, stage: Any) -> list[Any]:
        """Return the pieces of the weight's block in a stage, as products take them."""
        pieces = self.rhs.matrices(self.memory.rhs, stage)
        return [piece.transpose((1, 0)) for piece in pieces] if self.plan.transpose_weight else pieces

    def _known(self, tile: _Tile) -> list[Any]:
        if self.plan.mode == PRODUCT:
            return [load_rows(ref, tile.row) for ref in self.coefficients]
        if self.plan.mode == GRADIENT:
            return [load_rows(ref, tile.row) for ref in (self.labels, *self.coefficients)]
        found = [self.has_labels[lax.div(tile.row, ROWS), tile.column_tile]]
        return found if self.relative_to is None else [*found, load_rows(self.relative_to, tile.row)]

    # Logits.

    @property
    def _unit(self) -> float:
        """The logits are this number times the values of `_logits`."""
        return self.plan.scale if self.plan.soft_cap is None else self.plan.soft_cap

    def _raw(self, product: Any, tile: _Tile, index: int) -> Any:
        """Return a piece of the product, with its bias."""
        raw = piece_of(product, index)
        if self.bias is None:
            return raw
        at = self.bias.at[pl.ds(tile.first + index * PIECE, PIECE)]
        bias = plgpu.load(at, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return raw + lax.broadcast_in_dim(bias, raw.shape, [1])

    def _squashed(self, raw: Any) -> Any:
        """Return `tanh` of capped logits divided by the cap, or the same values without a cap."""
        return raw if self.plan.soft_cap is None else jnp.tanh(raw * (self.plan.scale / self.plan.soft_cap))

    def _logits(self, product: Any, tile: _Tile, index: int) -> tuple[Any, Any]:
        """Return a piece of the logits, -inf in removed columns, and finite values for the slope of the cap."""
        plan, raw = self.plan, self._raw(product, tile, index)
        squashed = self._squashed(raw)
        if plan.bias and plan.soft_cap is not None:
            return jnp.where(raw == -jnp.inf, -jnp.inf, squashed), squashed
        if plan.may_exceed and not (plan.exceeds_by_pieces and plan.mode == EXPONENTIALS):
            inside = numbered(1) < plan.last - tile.first - index * PIECE
            return jnp.where(inside, squashed, -jnp.inf), squashed
        return squashed, squashed

    def _without_last(self, values: Any, removed: float, tile: _Tile, index: int) -> Any:
        """Return numbers per row of a piece, or `removed` if the piece begins beyond the last column."""
        plan = self.plan
        if not (plan.may_exceed and plan.exceeds_by_pieces):
            return values
        return jnp.where(tile.first + index * PIECE < plan.last, values, jnp.full_like(values, removed))

    @property
    def _may_be_removed(self) -> bool:
        return self.plan.bias or self.plan.may_exceed

    def _slope(self, squashed: Any) -> Any:
        return 1.0 - squashed * squashed

    def _store_label(self, product: Any, tile: _Tile, has_label: Any) -> None:
        """Store the logits at those labels that are columns of this tile."""

        @pl.when(has_label != 0)
        def _here() -> None:
            place = load_rows(self.labels, tile.row) - tile.first
            found: Any = None
            for i in range(self.plan.pieces):
                hit = numbered(1) == across(place - i * PIECE)
                raw = self._raw(product, tile, i)
                here = jnp.where(hit, raw, jnp.zeros_like(raw))
                found = here if found is None else found + here
            # The same arithmetic as for the other logits: the label's logit can be compared with the maximum.
            raw = found.sum(axis=1)
            value = self._squashed(raw)
            if self.plan.bias and self.plan.soft_cap is not None:
                value = jnp.where(raw == -jnp.inf, -jnp.inf, value)
            self._store_part("label", tile, value * self._unit)

    def _store_part(self, name: str, tile: _Tile, values: Any) -> None:
        self.parts[name].at[tile.column_tile, pl.ds(tile.row, ROWS)][...] = values

    # Epilogues.

    def _maxima(self, product: Any, tile: _Tile, has_label: Any) -> None:
        del has_label
        self._store_part("max", tile, self._top([self._logits(product, tile, i)[0] for i in range(self.plan.pieces)]))

    def _top(self, pieces: Sequence[Any]) -> Any:
        """Return the largest logits of pieces."""
        return functools.reduce(jnp.maximum, pieces).max(axis=1) * self._unit

    def _statistics(self, product: Any, tile: _Tile, has_label: Any) -> None:
        self._store_label(product, tile, has_label)
        unit, plan = self._unit, self.plan
        pieces = [self._logits(product, tile, i)[0] for i in range(plan.pieces)]
        top = self._top(pieces)
        finite_top = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top) if self._may_be_removed else top
        sums: dict[str, Any] = {}
        for piece in pieces:
            e = jnp.exp2(piece * (unit * LOG2E) - across(finite_top * LOG2E))
            values = {"total": e}
            if "sum" in self.parts or "expected" in self.parts:
                finite = jnp.where(piece == -jnp.inf, 0.0, piece) if self._may_be_removed else piece
                values |= {"sum": finite} if "sum" in self.parts else {}
                values |= {"expected": finite * e} if "expected" in self.parts else {}
            sums = {name: value + sums[name] if sums else value for name, value in values.items()}
        self._store_part("max", tile, top)
        for name, value in sums.items():
            total = value.sum(axis=1)
            self._store_part(name, tile, total if name == "total" else total * unit)

    def _exponentials(self, product: Any, tile: _Tile, has_label: Any, relative_to: Any) -> None:
        self._store_label(product, tile, has_label)
        plan, unit = self.plan, self._unit
        # With a bias or maxima, sums of a whole piece would spill registers: sum each piece over its columns.
        is_crowded = plan.bias or "max" in self.parts
        total: Any = None
        highest: Any = None
        for i in range(plan.pieces):
            piece, squashed = self._logits(product, tile, i)
            e = jnp.exp2(piece * (unit * LOG2E) - across(self._without_last(relative_to, jnp.inf, tile, i)))
            if "max" in self.parts:
                top = self._without_last(piece.max(axis=1), -jnp.inf, tile, i)
                highest = top if highest is None else jnp.maximum(highest, top)
            self._store_piece(e if plan.soft_cap is None else e * self._slope(squashed), tile, i)
            part = e.sum(axis=1) if is_crowded else e
            total = part if total is None else total + part
        self._store_part("total", tile, total if is_crowded else total.sum(axis=1))
        if "max" in self.parts:
            self._store_part("max", tile, highest * unit)

    def _gradient(self, product: Any, tile: _Tile, labels: Any, lse: Any, softmax: Any, label: Any, *more: Any) -> None:
        plan, unit = self.plan, self._unit
        constant = more[0] if plan.has_constant else None
        expected = more[-1] if plan.has_expected else None
        for i in range(plan.pieces):
            piece, squashed = self._logits(product, tile, i)
            p = jnp.exp2(piece * (unit * LOG2E) - across(lse))
            if expected is None:
                d = p * across(softmax)
            else:
                finite = jnp.where(piece == -jnp.inf, 0.0, piece) if self._may_be_removed else piece
                d = p * (across(softmax) + across(expected * unit) * finite)
            hit = numbered(1) == across(labels - tile.first - i * PIECE)
            d = d + jnp.where(hit, across(label), 0.0)
            if constant is not None:
                d = d + across(constant)
            if plan.soft_cap is not None:
                d = d * self._slope(squashed)
            if self._may_be_removed:
                d = jnp.where(piece == -jnp.inf, 0.0, d)
            self._store_piece(d, tile, i)

    def _product(self, product: Any, tile: _Tile, factor: Any) -> None:
        for i in range(self.plan.pieces):
            self._store_piece(piece_of(product, i) * across(factor), tile, i)

    def _store_piece(self, values: Any, tile: _Tile, index: int) -> None:
        def copy(buffer: Any) -> None:
            at = pl.ds(tile.row, ROWS), pl.ds(tile.column + index * PIECE, PIECE)
            plgpu.copy_smem_to_gmem(buffer, self.out.at[at])

        store_piece(values.astype(DTYPE), self.out_tiles, (tile.warpgroup, index), copy, copied=self.out_rows)
