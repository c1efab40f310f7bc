# SPDX-License-Identifier: Apache-2.0
"""The kernel: the grouped product's, on 8-bit operands with scales of rows and columns.

Only 16-bit operands can be transposed on their way to the tensor core, so both lie along `k`. A step is as many bytes
as the 16-bit kernel's, and twice the elements.

Hopper's tensor core keeps few bits of a float8 sum. If the plan promotes, what `promoted` steps gave is added to
float32 sums in registers; parts of the columns take turns with one accumulator.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.launch import CLUSTER, plgpu, tiled
from ejkernel.kernels._hopper.pipeline import Pipeline
from ejkernel.kernels._hopper.products import multiply_stages
from ejkernel.kernels.grouped_matmul.mosaic_gpu.product import ProductKernel, ProductTile

from .plan import STEP, QuantizedPlan


class QuantizedMemory(NamedTuple):
    """Shared memory and barriers of one block of threads, as in `GroupedMemory`, and memory for scales in float32.

    Attributes:
        lhs, rhs, out, pipeline: See `GroupedMemory`.
        x_scale: Scales of the left operand's rows, with `QuantizedPlan.row_scales` as shape, if each row has several
            blocks along `k`; else `None`.
        w_scale: Scales of the right operand's columns, or of blocks of columns; `QuantizedPlan.column_scales` as shape.
        out_scale: Scales of the result's rows, per consumer warpgroup, for tiles that end a group; `None` or
            empty if the result has no scales.
        tiles: See `GroupedMemory`.
    """

    lhs: Any
    rhs: Any
    out: Any
    pipeline: Pipeline
    x_scale: Any
    w_scale: Any
    out_scale: Any = None
    tiles: Any = None


class QuantizedKernel(ProductKernel):
    """The program of one block of threads."""

    plan: QuantizedPlan
    memory: Any  # `QuantizedMemory`
    column_scales: Sequence[Any] = ()  # of each product
    first_step: Any = None  # of the split that is copied

    def memory_types(self) -> Any:
        """See `ProductKernel`."""
        base, plan = super().memory_types(), self.plan
        x_scale = plgpu.SMEM(plan.row_scales, jnp.float32) if plan.blocks else None
        w_scale = plgpu.SMEM(plan.column_scales, jnp.float32)
        return QuantizedMemory(base.lhs, base.rhs, base.out, base.pipeline, x_scale, w_scale, tiles=base.tiles)

    def _matrices_type(self) -> Any:
        plan = self.plan
        return tiled((plan.stages, plan.parts, plan.part_columns, STEP), plan.w_dtype)

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: Any) -> None:
        """See `ProductKernel`."""
        count = self.plan.products
        self.column_scales = arrays[-count:]
        super().run(arrays[:-count], results, memory)

    def _operand_row(self, row: Any, tile: ProductTile) -> Any:
        """Return the row of the left operand for a row of a tile: the tile scheduler sees splits as groups of rows."""
        plan = self.plan
        return row if plan.splits == 1 else row - tile.group * plan.own_rows + plan.first_row

    def _copy_tile(self, tile: ProductTile, step: Any) -> Any:
        if self.plan.splits > 1:
            self.first_step = tile.group * self.plan.steps
            tile = tile._replace(group=jnp.int32(0), row=self._operand_row(tile.row, tile))
        return super()._copy_tile(tile, step)

    def _number(self, index: Any) -> Any:
        return index if self.plan.splits == 1 else self.first_step + index

    def _copy_step(self, tile: ProductTile, index: Any, step: Any) -> Any:
        following = super()._copy_step(tile, index, step)
        self._copy_scales(tile, index, step)
        return following

    def _copy_scales(self, tile: ProductTile, index: Any, step: Any) -> None:
        """Copy the scales that arrive with step `index` of a tile, which has the number `step`."""
        plan, full = self.plan, self.pipeline.full.at[self.pipeline.stage(step)]
        first = tile.column if plan.matrices == 1 else tile.group * plan.factors + tile.column
        for number, scales in enumerate(self.column_scales):
            columns, slot = scales.at[pl.ds(first, plan.tile_columns)], self._column_factors(step - index, number)
            self.backend.copy_if(index == plan.factor_step, columns, slot, full)

    def _column_factors(self, step: Any, product: int) -> Any:
        """Return the slot for a product's factors of the columns of the tile that begins with `step`."""
        plan, slots = self.plan, self.plan.factor_slots
        slot = lax.rem(lax.div(step, plan.steps), slots) if slots > 1 else 0
        return self.memory.w_scale.at[slot + product * slots]

    def _copy_matrices(self, tile: ProductTile, along: Any, stage: Any) -> None:
        plan, full = self.plan, self.pipeline.full.at[stage]
        shared = {"collective_axes": CLUSTER} if plan.cluster > 1 else {}
        for part in range(plan.parts):
            columns = pl.ds(tile.column + part * plan.part_columns, plan.part_columns)
            source = self.matrices[0].at[tile.group, columns, along]
            plgpu.copy_gmem_to_smem(source, self.memory.rhs.at[stage, part], full, **shared)

    def _compute_tile(self, tile: ProductTile, step: Any, warpgroup: Any) -> Any:
        plan = self.plan
        row = tile.row + plan.part_rows * warpgroup
        count = jnp.clip(tile.rows - plan.part_rows * warpgroup, 0, plan.part_rows)
        in_group = tile.group < plan.groups
        pl.when(in_group & (count <= 0))(lambda: self._idle(step))

        @pl.when(in_group & (count > 0))
        def _some_rows() -> None:
            row_scale = self._load_row_scale(self._operand_row(row, tile), in_group)  # long before it is needed
            sums = self._promoted(tile, step, warpgroup) if plan.promoted else self._summed(step, warpgroup)
            self._finish(sums, row_scale, tile, step, warpgroup)

        if plan.clears:
            pl.when(jnp.logical_not(in_group) & (count > 0))(lambda: self._clear(tile, row, warpgroup, count))
        return step + plan.steps

    def _finish(self, sums: Sequence[Any], row_scale: Any, tile: ProductTile, step: Any, warpgroup: Any) -> None:
        """Store the result of the sums of a tile that begins with `step`."""
        row = tile.row + self.plan.part_rows * warpgroup
        count = jnp.clip(tile.rows - self.plan.part_rows * warpgroup, 0, self.plan.part_rows)
        # Computed before the branches of the store, as in `ProductKernel`.
        for piece in self._scaled_pieces(sums, row_scale, tile, step):
            self._store(functools.partial(list, [piece]), row, warpgroup, count)

    def _clear(self, tile: ProductTile, row: Any, warpgroup: Any, count: Any) -> None:
        """Store zeros in rows outside all groups."""
        plan, width = self.plan, self.plan.piece_columns
        zeros = jnp.zeros((plan.part_rows, width), plan.out_dtype)

        @pl.loop(0, plan.pieces)
        def _piece(i: Any) -> None:
            values = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            # One slot serves all pieces: taking turns would spill registers.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            piece = (0, values, self.out, pl.ds(tile.column + i * width, width))
            self._store(functools.partial(list, [piece]), row, warpgroup, count)

    def _multiply(self, accumulator: Any, stage: Any, warpgroup: Any, part: int) -> None:
        plgpu.wgmma(accumulator, self.lhs_tiles.at[stage, warpgroup], self.memory.rhs.at[stage, part].transpose((1, 0)))

    def _summed(self, step: Any, warpgroup: Any) -> list[Any]:
        """Return the products, summed in the tensor core."""
        plan = self.plan

        def products(accumulator: Any) -> Any:
            multiply_stages(
                self.pipeline, step, plan.steps, lambda stage: self._multiply(accumulator, stage, warpgroup, 0)
            )
            return accumulator[...]

        sums = jnp.int32 if plan.is_integer else jnp.float32
        found = pl.run_scoped(products, plgpu.ACC((plan.part_rows, plan.part_columns), sums))
        return [found.astype(jnp.float32)]

    def _promoted(self, tile: ProductTile, step: Any, warpgroup: Any) -> list[Any]:
        """Return the products of each part, summed in float32."""
        del tile
        plan, pipeline = self.plan, self.pipeline

        def chunk(first: Any, length: int, sums: Sequence[Any]) -> list[Any]:
            stages = [pipeline.stage(first + i) for i in range(length)]
            for stage in stages:
                pipeline.consumer_wait(stage)
            return [total + self._part(part, stages, warpgroup) for part, total in enumerate(sums)]

        zeros = plgpu.layout_cast(jnp.zeros((plan.part_rows, plan.part_columns), jnp.float32), plgpu.Layout.WGMMA)
        chunks, rest = divmod(plan.steps, plan.promoted)
        # The short chunk comes first: after the loop it would spill registers.
        sums = chunk(step, rest, [zeros] * plan.parts) if rest else [zeros] * plan.parts
        first = step + rest
        body = lambda i, sums: chunk(first + i * plan.promoted, plan.promoted, sums)  # noqa: E731
        return list(lax.fori_loop(0, chunks, body, sums))

    def _part(self, part: int, stages: Sequence[Any], warpgroup: Any) -> Any:
        """Return the products of one part over some stages; the last part releases each once it has been read."""
        is_last = part == self.plan.parts - 1
        found = self._products(part, stages, warpgroup, releases=is_last)
        if is_last:
            self.pipeline.consumer_release(stages[-1])
        return found

    def _products(self, part: int, stages: Sequence[Any], warpgroup: Any, *, releases: bool = False) -> Any:
        """Return the products of one part over some stages; `releases` all but the last."""
        plan = self.plan

        def products(accumulator: Any) -> Any:
            for stage in stages:
                self._multiply(accumulator, stage, warpgroup, part)
            for i, stage in enumerate(stages[:-1] if releases else ()):
                plgpu.wgmma_wait(len(stages) - 1 - i)
                self.pipeline.consumer_release(stage)
            return accumulator[...]

        return pl.run_scoped(products, plgpu.ACC((plan.part_rows, plan.part_columns), jnp.float32))

    def _scaled_pieces(
        self, sums: Sequence[Any], row_scale: Any, tile: ProductTile, step: Any
    ) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield slot, values, result and columns of each piece of the tile."""
        plan, width = self.plan, self.plan.piece_columns
        for i in range(plan.pieces):
            part, at = divmod(i * width, sums[0].shape[1])
            values = sums[part][:, at : at + width]
            columns = pl.ds(tile.column + i * width, width)
            if row_scale is not None:
                values = self._scaled(values, row_scale, self._column_factors(step, 0), i * width)
            yield i % plan.out_slots, values.astype(plan.out_dtype), self.out, columns

    def _scaled(self, values: Any, row_scale: Any, factors: Any, start: int) -> Any:
        """Return sums times the factors of rows and columns; `start` is their first column within the tile."""
        columns = plgpu.load(factors.at[pl.ds(start, values.shape[1])], layout=plgpu.Layout.WGMMA.reduce(0))
        values = values * lax.broadcast_in_dim(columns, values.shape, [1])
        return values * lax.broadcast_in_dim(row_scale, values.shape, [0])
