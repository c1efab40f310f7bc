# SPDX-License-Identifier: Apache-2.0
"""The kernels with an activation as their result, or a gated activation: wide, or in 8 bits by blocks of 128 columns.

A tile's columns are whole blocks of the result. With a gate, the product and the gate's product take turns with one
accumulator. For a result in 8 bits, the epilogue finds a row's largest magnitude in four neighbouring threads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat
from ejkernel.kernels._hopper.backend import backend_for
from ejkernel.kernels._hopper.device import wrapped
from ejkernel.kernels._hopper.launch import launch, plgpu
from ejkernel.kernels._hopper.products import accumulate, multiply_stages
from ejkernel.kernels._hopper.tile_shapes import WARPGROUPS
from ejkernel.kernels.grouped_matmul.mosaic_gpu.product import ProductTile, epilogue
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK
from ejkernel.kernels.quantized_matmul.quantizing.kernel import SMALLEST, scale_of

from .blocks import BlocksKernel
from .kernel import QuantizedKernel
from .plan import CHUNK, ActivatedPlan


def activated(plan: ActivatedPlan, arrays: Sequence[Any], *, interpret: Any = None) -> list[jax.Array]:
    """Return the result, `[plan.rows, plan.columns]`; if it has 8 bits, also a scale for each row's 128 columns.

    Args:
        plan: The launch.
        arrays: Padded operands in this order: rows, matrices, the gate's matrices if it has any, group sizes, scales of
            rows, scales of the matrices' columns, those of the gate's; then factors of rows, if the plan has them.
        interpret: `InterpretGPUParams` to simulate it on a CPU.
    """
    kernel = (ActivatedBlocksKernel if plan.blocks else ActivatedKernel)(plan, backend_for(interpret))
    scales = [((plan.rows, -(-plan.columns // BLOCK)), "float32")] if plan.in_8_bits else []
    shapes = [((plan.rows, plan.columns), plan.out_dtype), *scales]
    return launch(
        kernel.run,
        tuple(arrays),
        [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes],
        name="quantized_activation",
        programs=plan.programs,
        memory=kernel.memory_types(),
        consumers=WARPGROUPS,
        lane_semantics=True,
        interpret=interpret,
    )


class ActivatedKernel(QuantizedKernel):
    """The program of one block of threads, for scales of rows and columns."""

    plan: ActivatedPlan

    def memory_types(self) -> Any:
        """See `ProductKernel`."""
        scale = (WARPGROUPS, self.plan.part_rows) if self.plan.in_8_bits else (0,)
        return super().memory_types()._replace(out_scale=plgpu.SMEM(scale, jnp.float32))

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: Any) -> None:
        """See `ProductKernel`."""
        out, *self.out_scales = results
        self.of_result = arrays[-1] if self.plan.factored else None
        super().run(arrays[: len(arrays) - self.plan.factored], [out], memory)

    def _copy_matrices(self, tile: ProductTile, along: Any, stage: Any) -> None:
        plan, full = self.plan, self.pipeline.full.at[stage]
        for part in range(plan.parts):
            start = 0 if plan.gated else part * plan.part_columns
            source = self.matrices[part if plan.gated else 0]
            columns = pl.ds(tile.column + start, plan.part_columns)
            plgpu.copy_gmem_to_smem(source.at[tile.group, columns, along], self.memory.rhs.at[stage, part], full)

    def _summed(self, step: Any, warpgroup: Any) -> list[Any]:
        """Return the products, summed in the tensor core."""
        plan = self.plan
        if not plan.gated:
            return super()._summed(step, warpgroup)

        def mainloop(*accumulators: Any) -> None:
            def multiply(stage: Any) -> None:
                for part, accumulator in enumerate(accumulators):
                    self._multiply(accumulator, stage, warpgroup, part)

            multiply_stages(self.pipeline, step, plan.steps, multiply, products=plan.parts)

        sums = jnp.int32 if plan.is_integer else jnp.float32
        found = accumulate((plan.part_rows, plan.part_columns), plan.parts, mainloop, dtype=sums)
        return [each.astype(jnp.float32) for each in found]

    def _finish(self, sums: Sequence[Any], row_scale: Any, tile: ProductTile, step: Any, warpgroup: Any) -> None:
        plan, width = self.plan, self.plan.piece_columns
        factors = self._result_factors(tile.row + plan.part_rows * warpgroup)
        for i in range(plan.pieces):
            products = [self._product(sums, row_scale, step, number, i * width) for number in range(plan.products)]
            wide = epilogue(products, factors, plan.activation)
            if plan.in_8_bits:
                scale = scale_of(wide, plan.out_dtype)
                values = (wide * lax.broadcast_in_dim(1.0 / scale, wide.shape, [0])).astype(plan.out_dtype)
                self._store_block(values, scale, tile, warpgroup, i)
            else:
                self._store_piece(wide.astype(plan.out_dtype), tile, warpgroup, i)

    def _result_factors(self, row: Any) -> Any:
        """Return the factors of a consumer's rows of the result; `None` if the plan has none."""
        if self.of_result is None:
            return None
        of_rows = self.of_result.at[pl.ds(row, self.plan.part_rows)]
        return plgpu.load(of_rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def _product(self, sums: Sequence[Any], row_scale: Any, step: Any, number: int, start: int) -> Any:
        """Return a piece of one of the products of a tile that begins with `step`: its columns from `start` on."""
        width = self.plan.piece_columns
        part, at = (number, start) if self.plan.gated else divmod(start, sums[0].shape[1])
        values = sums[part][:, at : at + width]
        if row_scale is None:
            return values
        return self._scaled(values, row_scale, self._column_factors(step, number), start)

    def _store_piece(self, values: Any, tile: ProductTile, warpgroup: Any, number: int) -> None:
        """Store a consumer's rows of one piece of a tile's columns."""
        plan, width = self.plan, self.plan.piece_columns
        count = jnp.clip(tile.rows - plan.part_rows * warpgroup, 0, plan.part_rows)
        piece = (number % plan.out_slots, values, self.out, pl.ds(tile.column + number * width, width))
        self._store(functools.partial(list, [piece]), tile.row + plan.part_rows * warpgroup, warpgroup, count)

    def _store_block(self, values: Any, scale: Any, tile: ProductTile, warpgroup: Any, block: int) -> None:
        plan = self.plan
        row = tile.row + plan.part_rows * warpgroup
        count = jnp.clip(tile.rows - plan.part_rows * warpgroup, 0, plan.part_rows)
        self._store_piece(values, tile, warpgroup, block)
        [scales], column = self.out_scales, tile.column + block * BLOCK
        number, inside = lax.div(column, BLOCK), column < plan.columns

        @pl.when(inside & (count == plan.part_rows))
        def _whole() -> None:
            compat.kernels.store_as_it_is(scales.at[pl.ds(row, plan.part_rows), number], scale)

        @pl.when(inside & (count < plan.part_rows))
        def _partly() -> None:
            own = self.memory.out_scale.at[warpgroup]
            compat.kernels.store_as_it_is(own, scale)
            plgpu.commit_smem()

            @pl.loop(0, count)
            def _row(i: Any) -> None:
                scales[row + i, number] = own[i]

            plgpu.commit_smem()  # orders these reads before the next scales

    def _clear(self, tile: ProductTile, row: Any, warpgroup: Any, count: Any) -> None:
        """Store zeros, in 8 bits with the smallest scale, in rows outside all groups."""
        plan = self.plan
        if not plan.in_8_bits:
            super()._clear(tile, row, warpgroup, count)
            return
        for block in range(plan.pieces):
            zeros = jnp.zeros((plan.part_rows, BLOCK), jnp.float32)
            values = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA).astype(plan.out_dtype)
            scale = jnp.full((plan.part_rows,), SMALLEST, jnp.float32)
            scale = plgpu.layout_cast(scale, plgpu.Layout.WGMMA.reduce(1))
            self._store_block(values, scale, tile, warpgroup, block)


class ActivatedBlocksKernel(ActivatedKernel, BlocksKernel):
    """`ActivatedKernel` for scales of 1x128 blocks of rows and 128x128 blocks of matrices."""

    plan: ActivatedPlan

    def _promoted(self, tile: ProductTile, step: Any, warpgroup: Any) -> list[Any]:
        plan, shape = self.plan, (self.plan.part_rows, self.plan.part_columns)
        # A loop that runs once separates the parts: ptxas would start products before the sums of the part before them
        # are complete, which takes a second accumulator, and some sums would spill in every step.
        once = jnp.minimum(tile.rows, 1)
        # On one H100 the factors of the next step, read during the last sums, gained 2 % with a result in 8 bits and
        # lost 7 % with a wide one.
        ahead = plan.in_8_bits

        def factors(index: Any) -> list[Any]:
            within = index < plan.steps
            pl.when(within)(lambda: self.pipeline.consumer_wait(wrapped(step + index, plan.stages)))
            return self.backend.read_if(within, lambda: self._factors(step, index, warpgroup, tile.column))

        def one(i: Any, carry: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            (sums, following), stage = carry, wrapped(step + i, plan.stages)
            own = following if ahead else factors(i)

            def add(part: int, turn: Any, carry: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
                del turn
                total, following = carry
                found = self._products(part, [stage], warpgroup)
                if part == plan.parts - 1:
                    self.backend.order_reads()  # of scales, before the arrival
                    self.pipeline.consumer_release(stage)
                    following = factors(i + 1) if ahead else following
                return total + found * lax.broadcast_in_dim(own[part], shape, [0]), following

            scaled = []
            for part, total in enumerate(sums):
                total, following = lax.fori_loop(0, once, functools.partial(add, part), (total, following))
                scaled.append(total)
            return scaled, following

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        start = [zeros] * plan.parts, factors(jnp.int32(0)) if ahead else []
        return list(lax.fori_loop(0, plan.steps, one, start)[0])

    def _factors(self, step: Any, index: Any, warpgroup: Any, column: Any) -> list[Any]:
        """See `ScaledSums`; for each part."""
        del column
        of_rows = self._of_rows(step, index, warpgroup)
        return [of_rows * self._of_part(step, index, part) for part in range(self.plan.parts)]

    def _of_part(self, step: Any, index: Any, part: int) -> Any:
        """Return the scale of one part's 128 columns: a block of either matrix, or of the only one."""
        slot, square = self._slot(step, index), part
        if self.plan.gated:
            slot, square = slot + part * self.plan.scale_slots, 0
        return self.memory.w_scale[slot, square, lax.rem(index, CHUNK)]
