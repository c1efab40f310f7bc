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
from .plan import STEP, QuantizedPlan

_PIECE = 64  # columns of a sum, all in one block: tiles begin at multiples of it
_ALIGNED = 4  # a copy to shared memory begins at a multiple of 16 bytes


class BlocksMemory(NamedTuple):
    """`GroupedMemory`, with stages of scales.

    Attributes:
        lhs, rhs, out, pipeline: As there.
        x_scale: A scale for each row of a tile, and up to three rows before it.
        w_scale: A scale for each block of a tile's columns, or for each column.
    """

    lhs: Any
    rhs: Any
    out: Any
    pipeline: Pipeline
    x_scale: Any
    w_scale: Any


class ScaledSums:
    """The mainloop of a tile whose steps have scales of their own; a base of kernels."""

    plan: Any
    backend: Backend
    memory: Any  # `BlocksMemory`
    pipeline: Pipeline

    def _products(self, part: int, stages: Sequence[Any], warpgroup: Any) -> Any:
        """Return the products of one part over some stages."""
        raise NotImplementedError

    def scale_types(self) -> list[Any]:
        """Return the types of the stages of scales."""
        plan = self.plan
        return [plgpu.SMEM((plan.stages, size), jnp.float32) for size in (plan.scale_rows, plan.column_scales)]

    def scaled_sums(self, steps: Any, step: Any, warpgroup: Any, row: Any, column: Any) -> list[Any]:
        """Return the sums of a tile, in pieces of columns.

        Args:
            steps: How many steps the tile has.
            step: The number of its first one.
            warpgroup: This consumer.
            row: The position of the tile's first row in a stage of scales.
            column: The tile's first column.
        """
        plan, memory, shape = self.plan, self.memory, (self.plan.part_rows, _PIECE)
        rows = pl.ds(row + warpgroup * plan.part_rows, plan.part_rows)
        first = lax.rem(column, STEP)
        starts = range(0, plan.tile_columns, _PIECE)

        def one(i: Any, sums: Sequence[Any]) -> list[Any]:
            stage = self.pipeline.stage(step + i)
            self.pipeline.consumer_wait(stage)
            of_rows = plgpu.load(memory.x_scale.at[stage, rows], layout=plgpu.Layout.WGMMA.reduce(1))
            found, scaled = self._products(0, [stage], warpgroup), []
            for total, start in zip(sums, starts, strict=True):
                piece, of_piece = found[:, start : start + _PIECE], self._of_columns(stage, start, first)
                if plan.thin:
                    piece, factor = piece * lax.broadcast_in_dim(of_piece, shape, [1]), of_rows
                else:
                    factor = of_rows * of_piece
                scaled.append(total + piece * lax.broadcast_in_dim(factor, shape, [0]))
            self.backend.order_reads()  # of the stage's scales, before the arrival
            self.pipeline.consumer_release(stage)
            return scaled

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        return list(lax.fori_loop(0, steps, one, [zeros] * len(starts)))

    def _of_columns(self, stage: Any, start: int, first: Any) -> Any:
        """Return the scales of a piece of columns, which begins at `start`: one number, or one for each."""
        scales = self.memory.w_scale
        if not self.plan.thin:
            return scales[stage, lax.div(first + start, STEP)]
        return plgpu.load(scales.at[stage, pl.ds(start, _PIECE)], layout=plgpu.Layout.WGMMA.reduce(0))


class BlocksKernel(ScaledSums, QuantizedKernel):
    """The program of one block of threads."""

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

    def _copy_step(self, tile: ProductTile, index: Any, step: Any) -> Any:
        plan, memory = self.plan, self.memory
        following = super()._copy_step(tile, index, step)
        stage = self.pipeline.stage(step)
        whole = {"oob_mode": plgpu.OOBFillMode.PROMISE_IN_BOUNDS}  # a bulk copy, not TMA
        rows = pl.ds(tile.row - lax.rem(tile.row, _ALIGNED), plan.scale_rows)
        full = self.pipeline.full.at[stage]
        plgpu.copy_gmem_to_smem(self.x_scales.at[index, rows], memory.x_scale.at[stage], full, **whole)
        number = index if plan.groups == 1 else tile.group * plan.steps + index
        column = pl.ds(tile.column, plan.tile_columns) if plan.thin else lax.div(tile.column, plan.tile_columns)
        plgpu.copy_gmem_to_smem(self.w_scales.at[number, column], memory.w_scale.at[stage], full, **whole)
        return following

    def _promoted(self, tile: ProductTile, step: Any, warpgroup: Any) -> list[Any]:
        return self.scaled_sums(self.plan.steps, step, warpgroup, lax.rem(tile.row, _ALIGNED), tile.column)
