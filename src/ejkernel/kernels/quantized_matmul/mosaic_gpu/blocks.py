# SPDX-License-Identifier: Apache-2.0
"""The kernel with scales of 1x128 blocks of `x`, and of 128x128 or 1x128 blocks of `w`.

A step is a block long. Its scales arrive in shared memory with its operands: reading them from global memory a step
ahead was much slower in a prototype. The products of a step are scaled as they are added to the float32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.backend import Backend
from ejkernel.kernels._hopper.launch import plgpu
from ejkernel.kernels._hopper.pipeline import Pipeline
from ejkernel.kernels.grouped_matmul.mosaic_gpu.product import ProductKernel, ProductTile

from .kernel import QuantizedKernel
from .plan import CHUNK, SQUARES, STEP, QuantizedPlan

_PIECE = 64  # columns of a sum, all in one block: tiles begin at multiples of it


class BlocksMemory(NamedTuple):
    """`GroupedMemory`, with scales.

    Attributes:
        lhs, rhs, out, pipeline: As there.
        x_scale: A scale for each row of a tile.
        w_scale: A scale for each block of a tile's columns, or for each column.
    """

    lhs: Any
    rhs: Any
    out: Any
    pipeline: Pipeline
    x_scale: Any
    w_scale: Any


class ScaledSums:
    """The mainloop of a tile with scales for each step; a base of kernels."""

    plan: Any
    backend: Backend
    memory: Any  # `BlocksMemory`
    pipeline: Pipeline

    def _products(self, part: int, stages: Sequence[Any], warpgroup: Any) -> Any:
        """Return the products of one part over some stages."""
        raise NotImplementedError

    def scale_types(self) -> list[Any]:
        """Return the types of the shared memory of scales."""
        return [plgpu.SMEM(shape, jnp.float32) for shape in (self.plan.row_scales, self.plan.column_scales)]

    def scaled_sums(self, steps: Any, step: Any, warpgroup: Any, column: Any) -> list[Any]:
        """Return the sums of a tile, in pieces of columns.

        Args:
            steps: How many steps the tile has.
            step: The number of its first one.
            warpgroup: This consumer.
            column: The tile's first column.
        """
        plan, shape = self.plan, (self.plan.part_rows, _PIECE)
        first = lax.rem(column, STEP)
        starts = range(0, plan.tile_columns, _PIECE)

        def one(i: Any, sums: Sequence[Any]) -> list[Any]:
            stage = self.pipeline.stage(step + i)
            self.pipeline.consumer_wait(stage)
            of_rows = self._of_rows(step, i, warpgroup)
            found, scaled = self._products(0, [stage], warpgroup), []
            for total, start in zip(sums, starts, strict=True):
                piece = found[:, start : start + _PIECE]
                if plan.thin:
                    piece, factor = piece * lax.broadcast_in_dim(self._of_columns(stage, start), shape, [1]), of_rows
                else:
                    factor = of_rows * self._of_square(step, i, lax.div(first + start, STEP))
                scaled.append(total + piece * lax.broadcast_in_dim(factor, shape, [0]))
            self.backend.order_reads()  # of scales, before the arrival
            self.pipeline.consumer_release(stage)
            return scaled

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        return list(lax.fori_loop(0, steps, one, [zeros] * len(starts)))

    def _of_rows(self, step: Any, index: Any, warpgroup: Any) -> Any:
        """Return the scales of this consumer's rows in step `index` of the tile that begins with `step`."""
        rows = pl.ds(warpgroup * self.plan.part_rows, self.plan.part_rows)
        stage = self.pipeline.stage(step + index)
        return plgpu.load(self.memory.x_scale.at[stage, rows], layout=plgpu.Layout.WGMMA.reduce(1))

    def _of_columns(self, stage: Any, start: int) -> Any:
        """Return the scales of a piece of columns, which begins at `start`."""
        columns = self.memory.w_scale.at[stage, pl.ds(start, _PIECE)]
        return plgpu.load(columns, layout=plgpu.Layout.WGMMA.reduce(0))

    def _of_square(self, step: Any, index: Any, square: Any) -> Any:
        """Return the scale of one of the tile's blocks of 128 columns."""
        raise NotImplementedError


class BlocksKernel(ScaledSums, QuantizedKernel):
    """The program of one block of threads.

    Scales of rows and of 128x128 blocks are read as they are stored, along `k`: a copy brings those of four steps, the
    least that a copy takes. They have a ring of their own.
    """

    plan: QuantizedPlan

    def memory_types(self) -> Any:
        """See `ProductKernel`."""
        base = super().memory_types()
        return BlocksMemory(base.lhs, base.rhs, base.out, base.pipeline, *self.scale_types())

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: Any) -> None:
        """See `ProductKernel`."""
        *others, self.x_scales, self.w_scales = arrays
        ProductKernel.run(self, others, results, memory)

    def _products(self, part: int, stages: Sequence[Any], warpgroup: Any) -> Any:
        return QuantizedKernel._products(self, part, stages, warpgroup)

    def _slot(self, step: Any, index: Any) -> Any:
        """Return the slot of the ring with the scales of step `index` of the tile that begins with `step`."""
        plan = self.plan
        number = lax.div(step, plan.steps) * plan.chunks + lax.div(index, CHUNK)
        return lax.rem(number, plan.scale_slots)

    def _copy_step(self, tile: ProductTile, index: Any, step: Any) -> Any:
        plan, memory = self.plan, self.memory
        following = super()._copy_step(tile, index, step)
        stage = self.pipeline.stage(step)
        full, slot = self.pipeline.full.at[stage], self._slot(step - index, index)
        begins, along = lax.rem(index, CHUNK) == 0, pl.ds(lax.div(index, CHUNK) * CHUNK, CHUNK)
        rows = self.x_scales.at[pl.ds(tile.row, plan.tile_rows), along]
        self.backend.copy_if(begins, rows, memory.x_scale.at[slot], full)
        if plan.thin:
            number = index if plan.groups == 1 else tile.group * plan.steps + index
            columns = self.w_scales.at[number, pl.ds(tile.column, plan.tile_columns)]
            whole = {"oob_mode": plgpu.OOBFillMode.PROMISE_IN_BOUNDS}  # a bulk copy, not TMA
            plgpu.copy_gmem_to_smem(columns, memory.w_scale.at[stage], full, **whole)
        else:
            squares = self.w_scales.at[tile.group, pl.ds(lax.div(tile.column, STEP), SQUARES), along]
            self.backend.copy_if(begins, squares, memory.w_scale.at[slot], full)
        return following

    def _promoted(self, tile: ProductTile, step: Any, warpgroup: Any) -> list[Any]:
        return self.scaled_sums(self.plan.steps, step, warpgroup, tile.column)

    def _of_rows(self, step: Any, index: Any, warpgroup: Any) -> Any:
        rows = pl.ds(warpgroup * self.plan.part_rows, self.plan.part_rows)
        scales = self.memory.x_scale.at[self._slot(step, index), rows, lax.rem(index, CHUNK)]
        return plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def _of_square(self, step: Any, index: Any, square: Any) -> Any:
        return self.memory.w_scale[self._slot(step, index), square, lax.rem(index, CHUNK)]
