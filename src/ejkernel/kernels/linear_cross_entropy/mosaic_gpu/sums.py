# SPDX-License-Identifier: Apache-2.0
"""The kernel that adds a product to a sum in place: `total += left.T @ right`.

XLA's choice for a product and a sum depends on its autotuner's measurements. Some of its kernels need a second array
for the sum. This one adds in the L2 cache, with stores that overlap with the next tile's products.

Producer and consumers visit the same tiles and steps in the same order, so they cannot deadlock.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.backend import Backend, backend_for
from ejkernel.kernels._hopper.epilogue import store_piece
from ejkernel.kernels._hopper.launch import PROGRAM, WARPGROUP, dispatch_warpgroup, launch, plgpu, tiled, unsliced
from ejkernel.kernels._hopper.pipeline import Pipeline, producer_tail
from ejkernel.kernels._hopper.products import accumulate, multiply_stages, tile_position
from ejkernel.kernels._hopper.tile_shapes import REGISTERS, ROWS, STEP, WARPGROUPS

from .plan import TILE_ROWS, SumPlan

STAGES, OUT_SLOTS, PANEL = 3, 4, 16  # as in `MosaicGpuParams`


class SumMemory(NamedTuple):
    """Shared memory and barriers of one block of threads: types before `run_scoped`, references inside it.

    Attributes:
        lhs: Pipeline stages of the left operand, one part per consumer warpgroup.
        rhs: Pipeline stages of the right operand.
        out: Staging buffers of the epilogue, per consumer warpgroup.
        pipeline: The barriers of the stages.
    """

    lhs: Any
    rhs: Any
    out: Any
    pipeline: Pipeline


def add_product(total: jax.Array, left: jax.Array, right: jax.Array, *, interpret: Any = None) -> jax.Array:
    """Return `total + left.T @ right` in the memory of `total`.

    Args:
        total: The sum, in bfloat16 or float32.
        left: An operand of as many columns as `total` has rows.
        right: An operand of as many columns as `total`; the operands' rows are a multiple of 64.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU.
    """
    rows, columns = total.shape
    plan = SumPlan(
        steps=left.shape[0] // STEP, rows=rows, columns=columns, dtype=left.dtype.name, sum_dtype=total.dtype.name
    )
    kernel = SumKernel(plan, backend_for(interpret))
    *operands, before = unsliced((left, right, total))

    def add(target: Any) -> None:
        launch(
            kernel.run,
            [*operands, target],
            [],
            name="linear_cross_entropy_sum",
            programs=plan.programs,
            memory=kernel.memory_types(),
            consumers=WARPGROUPS,
            lane_semantics=True,
            interpret=interpret,
        )

    return unsliced(pl.run_state(add)(before))


class SumKernel:
    """The program of one block of threads."""

    def __init__(self, plan: SumPlan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend

    def memory_types(self) -> SumMemory:
        """Return the types of shared memory and barriers."""
        plan = self.plan
        return SumMemory(
            tiled((STAGES, WARPGROUPS, STEP, ROWS), plan.dtype),
            tiled((STAGES, STEP, plan.block_n), plan.dtype),
            tiled((WARPGROUPS, OUT_SLOTS, ROWS, plan.piece), plan.sum_dtype),
            Pipeline.types(STAGES, consumers=WARPGROUPS, copies=WARPGROUPS + 1),
        )

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: SumMemory) -> None:
        """Run this warpgroup as producer or consumer, on references."""
        del results
        self.left, self.right, self.total = arrays
        self.memory, self.pipeline = memory, memory.pipeline
        plan = self.plan
        tiles = plan.row_tiles * plan.column_tiles
        self.tiles = lax.div(tiles - lax.axis_index(PROGRAM) + (plan.programs - 1), plan.programs)
        warpgroup = lax.axis_index(WARPGROUP)
        dispatch_warpgroup(warpgroup, WARPGROUPS, REGISTERS, producer=self._produce, consumer=self._consume)

    def _position(self, index: Any) -> tuple[Any, Any]:
        """Return first row and column of this block's tile `index`."""
        plan = self.plan
        number = lax.axis_index(PROGRAM) + index * plan.programs
        row, column = tile_position(number, plan.row_tiles, plan.column_tiles, PANEL)
        return row * TILE_ROWS, column * plan.block_n

    def _produce(self) -> None:
        steps = self.plan.steps

        @pl.loop(0, self.tiles)
        def _tile(index: Any) -> None:
            row, column = self._position(index)

            @pl.loop(0, steps)
            def _step(i: Any) -> None:
                self._copy_step(row, column, pl.ds(i * STEP, STEP), index * steps + i)

        producer_tail(self.tiles * steps, self.pipeline)

    def _copy_step(self, row: Any, column: Any, along: Any, step: Any) -> None:
        stage = self.pipeline.producer_acquire(step)
        full = self.pipeline.full.at[stage]
        for w in range(WARPGROUPS):
            own = pl.ds(row + ROWS * w, ROWS)
            plgpu.copy_gmem_to_smem(self.left.at[along, own], self.memory.lhs.at[stage, w], full)
        columns = pl.ds(column, self.plan.block_n)
        plgpu.copy_gmem_to_smem(self.right.at[along, columns], self.memory.rhs.at[stage], full)

    def _consume(self, warpgroup: Any) -> None:
        @pl.loop(0, self.tiles)
        def _tile(index: Any) -> None:
            row, column = self._position(index)
            [product] = accumulate(
                (ROWS, self.plan.block_n),
                1,
                lambda accumulator: self._multiply(accumulator, index * self.plan.steps, warpgroup),
            )
            self._add(product, row + warpgroup * ROWS, column, warpgroup)

        plgpu.wait_smem_to_gmem(0)

    def _multiply(self, accumulator: Any, step: Any, warpgroup: Any) -> None:
        def one(stage: Any) -> None:
            left = self.memory.lhs.at[stage, warpgroup].transpose((1, 0))
            plgpu.wgmma(accumulator, left, self.memory.rhs.at[stage])

        multiply_stages(self.pipeline, step, self.plan.steps, one)

    def _add(self, product: Any, row: Any, column: Any, warpgroup: Any) -> None:
        plan, width = self.plan, self.plan.piece

        def copy(buffer: Any, index: int) -> None:
            target = self.total.at[pl.ds(row, ROWS), pl.ds(column + index * width, width)]
            self.backend.add_to_memory(buffer, target)

        for i in range(plan.block_n // width):
            values = product[:, i * width : (i + 1) * width].astype(plan.sum_dtype)
            store_piece(values, self.memory.out, (warpgroup, i), functools.partial(copy, index=i))
