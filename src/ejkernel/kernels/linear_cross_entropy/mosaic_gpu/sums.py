# SPDX-License-Identifier: Apache-2.0
"""The kernel of the weight's gradient. It adds a product to a sum in place: `total += left.T @ right`.

XLA's choice for a product and a sum depends on its autotuner's measurements. Some of its kernels need a second array
for the sum. This one adds in the L2 cache, with stores that overlap with the next tile's products. It also stores a
product without a sum, for a weight with fewer columns than an operand has: XLA's result would have to be cropped.

Producer and consumers visit the same tiles and steps in the same order, so they cannot deadlock.
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
from ejkernel.kernels._hopper.epilogue import store_piece
from ejkernel.kernels._hopper.launch import (
    PROGRAM,
    WARPGROUP,
    dispatch_warpgroup,
    launch,
    plgpu,
    unsliced,
)
from ejkernel.kernels._hopper.pipeline import Pipeline, producer_tail
from ejkernel.kernels._hopper.products import accumulate, multiply_stages, tile_position
from ejkernel.kernels._hopper.tile_shapes import REGISTERS, ROWS, STEP, WARPGROUPS

from .plan import TILE_ROWS, SumPlan

STAGES, PANEL = 3, 16  # as in `MosaicGpuParams`


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
        left: An operand of as many columns as `total` has rows; more of them are left out.
        right: An operand of as many columns as `total`. Rows of all arrays are multiples of 8 elements.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU.
    """
    kernel = _kernel(left, total, interpret, adds=True)
    *operands, before = unsliced((left, right, total))

    def add(target: Any) -> None:
        _run(kernel, [*operands, target], [])

    return unsliced(pl.run_state(add)(before))


def product(left: jax.Array, right: jax.Array, rows: int, dtype: Any, *, interpret: Any = None) -> jax.Array:
    """Return the first rows of `left.T @ right` in `dtype`; see `add_product`."""
    out = jax.ShapeDtypeStruct((rows, right.shape[1]), jnp.dtype(dtype))
    return _run(_kernel(left, out, interpret, adds=False), [left, right], [out])[0]


def _kernel(left: jax.Array, result: Any, interpret: Any, *, adds: bool) -> SumKernel:
    plan = SumPlan(
        adds=adds,
        inner=left.shape[0],
        rows=result.shape[0],
        columns=result.shape[1],
        dtype=left.dtype.name,
        sum_dtype=result.dtype.name,
    )
    return SumKernel(plan, backend_for(interpret))


def _run(kernel: SumKernel, arrays: list[Any], out_type: list[Any]) -> list[jax.Array]:
    return launch(
        kernel.run,
        arrays,
        out_type,
        name="linear_cross_entropy_sum",
        programs=kernel.plan.programs,
        memory=kernel.memory_types(),
        consumers=WARPGROUPS,
        lane_semantics=True,
        interpret=kernel.backend.interpret,
    )


class SumKernel:
    """The program of one block of threads."""

    def __init__(self, plan: SumPlan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend
        self.lhs = Blocks(backend, (STAGES, WARPGROUPS), STEP, ROWS)
        self.rhs = Blocks(backend, (STAGES,), STEP, plan.block_n, whole=plan.whole)

    def memory_types(self) -> SumMemory:
        """Return the types of shared memory and barriers."""
        plan, shape = self.plan, (WARPGROUPS, self.plan.out_slots, ROWS, self.plan.piece)
        copies = WARPGROUPS * self.lhs.pieces + self.rhs.pieces
        return SumMemory(
            self.lhs.type(plan.dtype),
            self.rhs.type(plan.dtype),
            tiles_and_rows(self.backend, shape, plan.sum_dtype),
            Pipeline.types(STAGES, consumers=WARPGROUPS, copies=copies),
        )

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: SumMemory) -> None:
        """Run this warpgroup as producer or consumer, on references."""
        self.left, self.right, *sums = arrays
        [self.total] = sums or results
        self.memory, self.pipeline = memory, memory.pipeline
        self.out_tiles, self.out_rows = self.backend.views(memory.out, 2)
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
                self._copy_step(row, column, i * STEP, index * steps + i)

        producer_tail(self.tiles * steps, self.pipeline)

    def _copy_step(self, row: Any, column: Any, along: Any, step: Any) -> None:
        stage = self.pipeline.producer_acquire(step)
        full = self.pipeline.full.at[stage]
        for w in range(WARPGROUPS):
            self.lhs.copy(self.left, (along, row + ROWS * w), self.memory.lhs, (stage, w), full)
        self.rhs.copy(self.right, (along, column), self.memory.rhs, (stage,), full)

    def _consume(self, warpgroup: Any) -> None:
        @pl.loop(0, self.tiles)
        def _tile(index: Any) -> None:
            row, column = self._position(index)
            [product] = accumulate(
                (ROWS, self.plan.block_n),
                1,
                lambda accumulator: self._multiply(accumulator, index * self.plan.steps, warpgroup),
            )
            self._store(product, row + warpgroup * ROWS, column, warpgroup)

        plgpu.wait_smem_to_gmem(0)

    def _multiply(self, accumulator: Any, step: Any, warpgroup: Any) -> None:
        def one(stage: Any) -> None:
            [left] = self.lhs.matrices(self.memory.lhs, stage, warpgroup)
            multiply(accumulator, left.transpose((1, 0)), self.rhs.matrices(self.memory.rhs, stage))

        step = self.backend.uniform(step) if self.rhs.pieces > 1 else step  # as in `HeadKernel`
        multiply_stages(self.pipeline, step, self.plan.steps, one, products=self.rhs.pieces)

    def _store(self, product: Any, row: Any, column: Any, warpgroup: Any) -> None:
        plan, width = self.plan, self.plan.piece

        def copy(buffer: Any, index: int) -> None:
            target = self.total.at[pl.ds(row, ROWS), pl.ds(column + index * width, width)]
            (self.backend.add_to_memory if plan.adds else plgpu.copy_smem_to_gmem)(buffer, target)

        for i in range(plan.block_n // width):
            values = product[:, i * width : (i + 1) * width].astype(plan.sum_dtype)
            start = functools.partial(copy, index=i)
            store_piece(values, self.out_tiles, (warpgroup, i), start, copied=self.out_rows)
