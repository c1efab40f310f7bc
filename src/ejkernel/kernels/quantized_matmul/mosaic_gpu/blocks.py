# SPDX-License-Identifier: Apache-2.0
"""The kernel with scales of 1x128 blocks of `x`, and of 128x128 or 1x128 blocks of `w`.

A step is a block long. Its scales arrive in shared memory with its operands: reading them from global memory a step
ahead was much slower in a prototype. The products of a step are scaled as they are added to the float32 sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.backend import Backend
from ejkernel.kernels._hopper.device import wrapped
from ejkernel.kernels._hopper.launch import plgpu
from ejkernel.kernels._hopper.pipeline import Pipeline
from ejkernel.kernels.grouped_matmul.mosaic_gpu.product import ProductTile

from .kernel import QuantizedKernel
from .plan import CHUNK, SQUARES, STEP, QuantizedPlan

PIECE = 64  # columns of a sum, all in one block: tiles begin at multiples of it
_CHUNK_BITS = np.int32(CHUNK.bit_length() - 1)
_FIRST = 128  # columns of the first of two products
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)
_Products = Sequence[Callable[[], Any]]  # each waits for a product, and returns it
_Scaled = tuple[list[Any], list[Any]]  # sums, and the factors of the step that follows


class ScaledSums:
    """The mainloop of a tile with scales for each step; a base of kernels.

    The scales of a step are read while the products of the step before are added to the sums.
    """

    plan: Any
    backend: Backend
    memory: Any  # `QuantizedMemory`
    pipeline: Pipeline

    @property
    def _spans(self) -> list[tuple[int, int]]:
        """Start and width of the columns of each product: the others run while one is added to the sums."""
        return [(0, self.plan.tile_columns)]

    def _with_products(self, stage: Any, warpgroup: Any, body: Callable[[_Products], Any], used: Any = None) -> Any:
        """Start the products of a stage, and return the result of `body` on them.

        Args:
            stage: The stage.
            warpgroup: This consumer.
            body: Adds the products to sums.
            used: See `Backend.start_product`.
        """
        products = [self._start_product(stage, warpgroup, span, used) for span in self._spans]

        def finished(number: int) -> Any:
            self.backend.finish_products(pending=len(products) - 1 - number)
            return products[number]

        return body([functools.partial(finished, number) for number in range(len(products))])

    def _start_product(self, stage: Any, warpgroup: Any, span: tuple[int, int], used: Any = None) -> Any:
        """Start a product of a stage; see `Backend.start_product`."""
        raise NotImplementedError

    def scaled_sums(
        self,
        steps: Any,
        step: Any,
        warpgroup: Any,
        column: Any,
        *,
        meanwhile: Callable[[], None] | None = None,
        used: Any = None,
    ) -> list[Any]:
        """Return the sums of a tile, in pieces of columns.

        Args:
            steps: How many steps the tile has.
            step: The number of its first one.
            warpgroup: This consumer.
            column: The tile's first column.
            meanwhile: Is called while the products of the first step run; the tile has a step then.
            used: See `Backend.start_product`; for the first step, with `meanwhile`.
        """
        shape, count = (self.plan.part_rows, PIECE), self.plan.tile_columns // PIECE

        def stage_of(index: Any) -> Any:
            return wrapped(step + index, self.pipeline.stages)  # products wait for it in every step

        def factors(index: Any) -> list[Any]:
            within = index < steps
            pl.when(within)(lambda: self.pipeline.consumer_wait(stage_of(index)))
            return self.backend.read_if(within, lambda: self._factors(step, index, warpgroup, column))

        def one(i: Any, carry: _Scaled, meanwhile: Callable[[], None] = lambda: None, used: Any = None) -> _Scaled:
            (sums, own), stage = carry, stage_of(i)
            wide = [lax.broadcast_in_dim(each, shape, [0]) for each in own]
            # The factors of rows are those of all pieces if each column has its own.
            factors_of = wide * (count // len(wide))

            def add(products: _Products) -> _Scaled:
                meanwhile()
                following: list[Any] = []
                totals: list[Any] = []
                for number, product in enumerate(products, 1):
                    found, at = product(), len(totals)
                    terms = self._terms(found, factors_of[at:], stage, at * PIECE)
                    if number == len(products):
                        self.backend.order_reads()  # of scales, before the arrival
                        self.pipeline.consumer_release(stage)
                        following = factors(i + 1)
                    totals += [total + piece * factor for total, (piece, factor) in zip(sums[at:], terms, strict=False)]
                return totals, following

            scaled: _Scaled = self._with_products(stage, warpgroup, add, used)
            return scaled

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        start = [zeros] * count, factors(jnp.int32(0))
        if meanwhile is None:
            return list(lax.fori_loop(0, steps, one, start)[0])
        return list(lax.fori_loop(1, steps, one, one(jnp.int32(0), start, meanwhile, used))[0])

    def _terms(self, found: Any, factors: Sequence[Any], stage: Any, start: int) -> list[tuple[Any, Any]]:
        """Return pieces of products, times scales of columns, each with its factor; `start` is the first column."""
        places = range(0, found.shape[1], PIECE)
        pieces = [self._of_columns(found[:, at : at + PIECE], stage, start + at) for at in places]
        return list(zip(pieces, factors, strict=False))

    def _of_columns(self, array: Any, stage: Any, start: int) -> Any:
        """Return a piece times the scales of its columns, if columns have scales; `start` is its first column."""
        if not self.plan.thin:
            return array
        own = plgpu.load(self.memory.w_scale.at[stage, pl.ds(start, PIECE)], layout=_COLUMNS)
        return array * lax.broadcast_in_dim(own, array.shape, [1])

    def _factors(self, step: Any, index: Any, warpgroup: Any, column: Any) -> list[Any]:
        """Return factors of rows in step `index` of the tile that begins with `step`, for each piece or for all."""
        of_rows = self._of_rows(step, index, warpgroup)
        return [of_rows] if self.plan.thin else [of_rows * each for each in self._of_squares(step, index, column)]

    def _of_rows(self, step: Any, index: Any, warpgroup: Any) -> Any:
        """Return the scales of this consumer's rows."""
        rows = pl.ds(warpgroup * self.plan.part_rows, self.plan.part_rows)
        stage = wrapped(step + index, self.pipeline.stages)
        return plgpu.load(self.memory.x_scale.at[stage, rows], layout=plgpu.Layout.WGMMA.reduce(1))

    def _of_squares(self, step: Any, index: Any, column: Any) -> list[Any]:
        """Return the scale of each piece: that of its block of 128x128 numbers."""
        first = lax.rem(column, STEP)
        squares = [lax.div(first + start, STEP) for start in range(0, self.plan.tile_columns, PIECE)]
        return [self._of_square(step, index, square) for square in squares]

    def _of_square(self, step: Any, index: Any, square: Any) -> Any:
        """Return the scale of one of the tile's blocks of 128 columns."""
        raise NotImplementedError


class BlocksKernel(ScaledSums, QuantizedKernel):
    """The program of one block of threads.

    Scales of rows and of 128x128 blocks are read as they are stored, along `k`: a copy brings those of four steps, the
    least that a copy takes. They have their own ring.
    """

    plan: QuantizedPlan

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: Any) -> None:
        """See `ProductKernel`."""
        before = -1 - self.plan.products
        self.x_scales = arrays[before]
        super().run([*arrays[:before], *arrays[before + 1 :]], results, memory)

    @property
    def _spans(self) -> list[tuple[int, int]]:
        rest = self.plan.tile_columns - _FIRST
        return super()._spans if self.plan.thin or self.plan.parts > 1 or rest <= 0 else [(0, _FIRST), (_FIRST, rest)]

    def _with_products(self, stage: Any, warpgroup: Any, body: Callable[[_Products], Any], used: Any = None) -> Any:
        if self.plan.matrices > 1:
            return super()._with_products(stage, warpgroup, body, used)

        # JAX's products: without groups our own took up to 11 % more time on one H200, with groups up to 3 % less.
        def started(*accumulators: Any) -> Any:
            for accumulator, (start, width) in zip(accumulators, self._spans, strict=True):
                matrix = self.memory.rhs.at[stage, 0, pl.ds(start, width)]
                plgpu.wgmma(accumulator, self.lhs_tiles.at[stage, warpgroup], matrix.transpose((1, 0)))
            pending = reversed(range(len(accumulators)))
            reads = zip(accumulators, pending, strict=True)
            return body([functools.partial(self.backend.read, each, pending=number) for each, number in reads])

        sums = [plgpu.ACC((self.plan.part_rows, width), jnp.float32) for _, width in self._spans]
        return pl.run_scoped(started, *sums)

    def _start_product(self, stage: Any, warpgroup: Any, span: tuple[int, int], used: Any = None) -> Any:
        return self.backend.start_product(self.lhs_tiles, self.memory.rhs, (stage, warpgroup), span, used)

    def _slot(self, step: Any, index: Any) -> Any:
        """Return the slot of the ring with the scales of step `index` of the tile that begins with `step`."""
        plan = self.plan
        number = lax.div(step, plan.steps) * plan.chunks + lax.shift_right_logical(index, _CHUNK_BITS)
        return wrapped(number, plan.scale_slots)

    def _copy_scales(self, tile: ProductTile, index: Any, step: Any) -> None:
        plan, memory = self.plan, self.memory
        stage = self.pipeline.stage(step)
        full, slot = self.pipeline.full.at[stage], self._slot(step - index, index)
        begins, along = lax.rem(index, CHUNK) == 0, pl.ds(self._number(lax.div(index, CHUNK) * CHUNK), CHUNK)
        rows = self.x_scales.at[pl.ds(tile.row, plan.tile_rows), along]
        self.backend.copy_if(begins, rows, memory.x_scale.at[slot], full)
        for number, scales in enumerate(self.column_scales):
            if plan.thin:
                at = self._number(index) if plan.matrices == 1 else tile.group * plan.steps + index
                columns = scales.at[at, pl.ds(tile.column, plan.tile_columns)]
                whole = {"oob_mode": plgpu.OOBFillMode.PROMISE_IN_BOUNDS}  # a bulk copy, not TMA
                plgpu.copy_gmem_to_smem(columns, memory.w_scale.at[stage], full, **whole)
            else:
                squares = scales.at[tile.group, pl.ds(lax.div(tile.column, STEP), SQUARES), along]
                self.backend.copy_if(begins, squares, memory.w_scale.at[slot + number * plan.scale_slots], full)

    def _promoted(self, tile: ProductTile, step: Any, warpgroup: Any) -> list[Any]:
        return self.scaled_sums(self.plan.steps, step, warpgroup, tile.column)

    def _of_rows(self, step: Any, index: Any, warpgroup: Any) -> Any:
        rows = pl.ds(warpgroup * self.plan.part_rows, self.plan.part_rows)
        scales = self.memory.x_scale.at[self._slot(step, index), rows, wrapped(index, CHUNK)]
        return plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def _of_square(self, step: Any, index: Any, square: Any) -> Any:
        return self.memory.w_scale[self._slot(step, index), square, wrapped(index, CHUNK)]
