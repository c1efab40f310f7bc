# SPDX-License-Identifier: Apache-2.0
"""The weight gradient's kernel for 8-bit columns in groups: for each group, `lhs @ rhs.T` over the group's blocks.

Both operands lie along the rows of the groups, as Hopper's tensor cores read 8-bit numbers. A step is a block, which
belongs to one group and is filled with zeros: no rows of other groups are read. Scales arrive with their operands.

A tile begins with the last block of its group. Instructions for 32 rows are skipped where the block has no rows of the
group. The tile before is stored while these products run. Tiles of an empty group therefore have a step, too; its
products do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.backend import backend_for
from ejkernel.kernels._hopper.blocks import tiles_and_rows
from ejkernel.kernels._hopper.device import wrapped
from ejkernel.kernels._hopper.launch import plgpu, tiled
from ejkernel.kernels._hopper.tile_shapes import WARPGROUPS
from ejkernel.kernels.grouped_matmul.mosaic_gpu.tiles import lhs_shape, pipeline_types, run_kernel
from ejkernel.kernels.grouped_matmul.mosaic_gpu.wgrad import WgradKernel, WgradTile

from .blocks import PIECE, ScaledSums
from .kernel import QuantizedMemory
from .plan import CHUNK, SQUARES, STEP, QuantizedWgradPlan


def sum_products(plan: QuantizedWgradPlan, *arrays: Any, interpret: Any = None) -> jax.Array:
    """Run the kernel.

    Args:
        plan: The launch.
        *arrays: `lhs [k, m]` and `rhs [n, m]`; int32 `[groups, 3]`: number, first row and rows of each group; and
            the scales `[blocks, k]` and `[blocks, n]`, or `[blocks, n / 128]`, with sizes that four divides.
        interpret: `InterpretGPUParams` to simulate it on a CPU.
    """
    kernel, shape = QuantizedWgradKernel(plan, backend_for(interpret)), (plan.groups, plan.inner, plan.columns)
    return run_kernel(kernel, arrays, shape, name="quantized_grouped_wgrad")[0]


class QuantizedWgradKernel(ScaledSums, WgradKernel):
    """The program of one block of threads."""

    plan: QuantizedWgradPlan
    first_square: Any = None  # of the tile, in a copy of scales

    def memory_types(self) -> Any:
        """See `WgradKernel`; copies use the swizzled views, since an operand may have any number of columns."""
        plan, backend = self.plan, self.backend
        rhs = (plan.stages, plan.tile_columns, STEP)
        return QuantizedMemory(
            tiles_and_rows(backend, lhs_shape(plan), plan.dtype),
            tiles_and_rows(backend, rhs, plan.rhs_dtype),
            tiled((WARPGROUPS, plan.out_slots, plan.part_rows, plan.piece_columns), plan.out_dtype),
            pipeline_types(plan),
            *(plgpu.SMEM(shape, jnp.float32) for shape in (plan.row_scales, plan.column_scales)),
        )

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: Any) -> None:
        """See `WgradKernel`."""
        *others, self.lhs_scales, self.rhs_scales = arrays
        super().run(others, results, memory)

    def _span(self, entry: Any) -> tuple[Any, Any, Any, Any]:
        start = jnp.minimum(self.table[entry, 1], self.plan.rows - STEP)
        rows = self.table[entry, 2]
        return start, jnp.int32(0), rows, jnp.maximum(lax.div(rows + (STEP - 1), STEP), 1)

    def _copy_step(self, tile: WgradTile, index: Any, step: Any) -> Any:
        plan, memory = self.plan, self.memory
        index = jnp.where(index == 0, tile.steps, index) - 1  # the last block comes first
        rows = pl.ds(tile.start + index * STEP, STEP)
        stage = self.pipeline.producer_acquire(step)
        full = self.pipeline.full.at[stage]
        for w in range(WARPGROUPS):
            columns = pl.ds(tile.row + plan.part_rows * w, plan.part_rows)
            plgpu.copy_gmem_to_smem(self.lhs.at[columns, rows], self.lhs_tiles.at[stage, w], full)
        own = pl.ds(tile.row, plan.tile_rows), pl.ds(tile.column, plan.tile_columns)
        plgpu.copy_gmem_to_smem(self.rhs.at[own[1], rows], self.rhs_tiles.at[stage], full)
        block, scales = lax.div(tile.start, STEP) + index, (self.lhs_scales, self.rhs_scales)
        if not plan.thin:  # a copy begins at 16 bytes
            first = lax.div(tile.column, CHUNK * STEP) * CHUNK
            own = own[0], pl.ds(first, SQUARES * CHUNK)
        for source, target, columns in zip(scales, (memory.x_scale, memory.w_scale), own, strict=True):
            plgpu.copy_gmem_to_smem(source.at[block, columns], target.at[stage], full)
        return step + 1

    def _consume(self, warpgroup: Any) -> None:
        plan = self.plan
        shape, count = (plan.part_rows, PIECE), plan.tile_columns // PIECE

        def zeros() -> list[Any]:
            return [plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)] * count

        def store(sums: Sequence[Any], tile: WgradTile) -> None:
            pl.when(tile.steps > 0)(lambda: self._store(sums, tile, warpgroup))

        def compute(tile: WgradTile, carry: Any) -> Any:
            step, *before = carry
            self.first_square = lax.rem(lax.div(tile.column, STEP), CHUNK)
            first = {"meanwhile": lambda: store(*before), "used": tile.end - (tile.steps - 1) * STEP}
            sums = self.scaled_sums(tile.steps, step, warpgroup, tile.column, **first)
            sums = lax.cond(tile.end > 0, lambda: sums, zeros)
            return step + tile.steps, sums, tile

        # Without steps, so that nothing is stored; numbers of the table have the type of a carry inside `shard_map`.
        nothing = self._tile(0)._replace(steps=jnp.int32(0))
        _, *last = self._each_tile(compute, (jnp.int32(0), zeros(), nothing))
        store(*last)
        plgpu.wait_smem_to_gmem(0)

    def _of_square(self, step: Any, index: Any, square: Any) -> Any:
        return self.memory.w_scale[wrapped(step + index, self.pipeline.stages), self.first_square + square]

    def _terms(self, found: Any, factors: Sequence[Any], stage: Any, start: int) -> list[tuple[Any, Any]]:
        # The scales are multiplied first: 1 to 2 % less time on one H200, but `BlocksKernel` would spill registers.
        places = range(0, found.shape[1], PIECE)
        own = [self._of_columns(factor, stage, start + at) for at, factor in zip(places, factors, strict=False)]
        return [(found[:, at : at + PIECE], factor) for at, factor in zip(places, own, strict=True)]

    def _store(self, totals: Sequence[Any], tile: WgradTile, warpgroup: Any) -> None:
        """See `WgradKernel`; where each piece has a slot, all are copied at once."""
        plan, out = self.plan, self.memory.out
        if plan.out_slots < plan.pieces:
            super()._store(totals, tile, warpgroup)
            return
        rows = pl.ds(tile.row + plan.part_rows * warpgroup, plan.part_rows)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in range(plan.pieces):
            out.at[warpgroup, i][...] = self.piece(totals, i)
        plgpu.commit_smem()
        for i in range(plan.pieces):
            columns = pl.ds(tile.column + i * plan.piece_columns, plan.piece_columns)
            plgpu.copy_smem_to_gmem(out.at[warpgroup, i], self.out.at[tile.group, rows, columns])

    def _start_product(self, stage: Any, warpgroup: Any, span: tuple[int, int], used: Any = None) -> Any:
        return self.backend.start_product(self.lhs_stages, self.rhs_stages, (stage, warpgroup), span, used)
