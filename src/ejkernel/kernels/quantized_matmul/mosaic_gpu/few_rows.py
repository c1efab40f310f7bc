# SPDX-License-Identifier: Apache-2.0
"""The kernel for at most 64 rows, as in decoding: its time is that of reading the matrix.

A block of threads has a tile of columns. Its width suits the number of columns, so that all multiprocessors read about
as much. Consumers share a tile's columns. Rows of 16 bits take wide tiles, because each tile reads all rows; with few
tiles, several blocks split a tile's steps, and XLA sums their results.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat
from ejkernel.kernels._hopper.backend import Backend, backend_for
from ejkernel.kernels._hopper.device import Registers
from ejkernel.kernels._hopper.launch import PROGRAM, WARPGROUP, dispatch_warpgroup, launch, plgpu, tiled
from ejkernel.kernels._hopper.pipeline import Pipeline, producer_tail
from ejkernel.kernels._hopper.tile_shapes import REGISTERS, ROWS

from .plan import HALF, PROMOTED, STEP, FewRowsPlan

# By the number of consumers. Their sum must fit in the launch's allocation, 96 for each thread of five warpgroups:
# otherwise a consumer waits for ever.
_REGISTERS = {2: REGISTERS, 3: Registers(40, 152), 4: Registers(40, 104)}


class _Memory(NamedTuple):
    """Pipeline stages of the operands, their barriers, and the buffers of the epilogue.

    Attributes:
        x: All rows.
        w: The columns of each consumer.
        out: The result, per consumer.
        pipeline: The barriers of the stages.
    """

    x: Any
    w: Any
    out: Any
    pipeline: Pipeline


class _Tile(NamedTuple):
    """A tile of a block of threads.

    Attributes:
        column: Its first column.
        split: The split with the block's steps.
        first: The number of its first step in this block.
        steps: How many steps the block computes.
    """

    column: Any
    split: Any
    first: Any
    steps: Any


def multiply(plan: FewRowsPlan, *arrays: jax.Array, interpret: Any = None) -> jax.Array:
    """Run the kernel on `x [m, k]`, `w [n, k]`, factors of rows, and factors of columns.

    Rows of 16 bits have, in each step, the first two of four columns before the last two.
    """
    kernel = (WideRowsKernel if plan.wide else FewRowsKernel)(plan, backend_for(interpret))
    [out] = launch(
        kernel.run,
        arrays,
        [jax.ShapeDtypeStruct(plan.result_shape, jnp.dtype(plan.result_dtype))],
        name="quantized_matmul_few_rows",
        programs=plan.programs,
        memory=kernel.memory_types(),
        consumers=plan.consumers,
        lane_semantics=True,
        interpret=interpret,
    )
    if plan.splits == 1:
        return out
    products = out.reshape(plan.splits, -1, plan.tile_rows)[:, : plan.columns, : plan.rows]
    return products.sum(0).T.astype(plan.out_dtype)


class FewRowsKernel:
    """The program of one block of threads."""

    def __init__(self, plan: FewRowsPlan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend

    def memory_types(self) -> _Memory:
        """Return the types of shared memory and barriers."""
        plan = self.plan
        return _Memory(
            x=tiled((plan.stages, plan.tile_rows, STEP), plan.dtype),
            w=tiled((plan.stages, plan.consumers, plan.part_columns, STEP), plan.w_dtype),
            out=plgpu.SMEM((plan.consumers, *plan.buffer_shape), jnp.dtype(plan.result_dtype)),
            pipeline=Pipeline.types(plan.stages, consumers=plan.consumers, copies=plan.consumers + 1),
        )

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: _Memory) -> None:
        """Run this warpgroup as producer or consumer."""
        self.x, self.w, self.row_scale, self.column_scale = arrays
        [self.out], self.memory, self.pipeline = results, memory, memory.pipeline
        # Zero, but unknown to the compiler, which would refuse a tile of more rows than there are. TMA clips it.
        self.row = lax.min(lax.axis_index(PROGRAM), 0)
        warpgroup = lax.axis_index(WARPGROUP)
        consumers, registers = self.plan.consumers, _REGISTERS.get(self.plan.consumers)
        dispatch_warpgroup(warpgroup, consumers, registers, producer=self._produce, consumer=self._consume)

    def _each_tile(self, body: Any) -> Any:
        """Call `body(tile)` for each tile of this block of threads; return the number of steps."""
        plan, program = self.plan, lax.axis_index(PROGRAM)
        if plan.splits > 1:  # there are as many blocks as tiles and splits
            split = lax.div(program, plan.column_tiles)
            steps = lax.min(plan.steps, plan.all_steps - split * plan.steps)
            body(_Tile((program - split * plan.column_tiles) * plan.tile_columns, split, 0, steps))
            return steps
        count = lax.div(plan.column_tiles - program + (plan.programs - 1), plan.programs)

        @pl.loop(0, count)
        def _tile(i: Any) -> None:
            body(_Tile((program + i * plan.programs) * plan.tile_columns, 0, i * plan.steps, plan.steps))

        return count * plan.steps

    def _part(self, stage: Any, part: Any) -> Any:
        """Return the buffer of a consumer's columns."""
        return self.memory.w.at[stage, part]

    def _produce(self) -> None:
        plan, memory = self.plan, self.memory

        def copy(tile: _Tile) -> None:
            @pl.loop(0, tile.steps)
            def _step(i: Any) -> None:
                stage = self.pipeline.producer_acquire(tile.first + i)
                full, along = self.pipeline.full.at[stage], pl.ds((tile.split * plan.steps + i) * STEP, STEP)
                for part in range(plan.consumers):
                    columns = pl.ds(tile.column + part * plan.part_columns, plan.part_columns)
                    plgpu.copy_gmem_to_smem(self.w.at[columns, along], self._part(stage, part), full)
                plgpu.copy_gmem_to_smem(self.x.at[pl.ds(self.row, plan.tile_rows), along], memory.x.at[stage], full)

        producer_tail(self._each_tile(copy), self.pipeline)

    def _consume(self, warpgroup: Any) -> None:
        plan = self.plan

        def compute(tile: _Tile) -> None:
            column = tile.column + warpgroup * plan.part_columns
            columns = pl.ds(column, plan.part_columns)
            values = self._computed(tile, columns, warpgroup).astype(plan.result_dtype)
            buffer = self.memory.out.at[warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            compat.store_as_it_is(buffer.transpose((1, 0)) if plan.wide and plan.splits == 1 else buffer, values)
            plgpu.commit_smem()
            if plan.splits == 1:
                target = self.out.at[pl.ds(self.row, plan.tile_rows), columns]
            else:
                target = self.out.at[pl.ds(tile.split * plan.factors + column, plan.part_columns)]
            plgpu.copy_smem_to_gmem(buffer, target)

        self._each_tile(compute)
        plgpu.wait_smem_to_gmem(0)

    def _factors(self, columns: Any, shape: tuple[int, int], *, axis: int) -> Any:
        """Return the products of both factors; rows of `x` lie along `axis`."""
        found = []
        for ref, own in (
            (self.row_scale.at[pl.ds(self.row, self.plan.tile_rows)], axis),
            (self.column_scale.at[columns], 1 - axis),
        ):
            layout = plgpu.Layout.WGMMA.reduce(1 - own)
            found.append(lax.broadcast_in_dim(plgpu.load(ref, layout=layout, optimized=False), shape, [own]))
        return found[0] * found[1]

    def _computed(self, tile: _Tile, columns: Any, warpgroup: Any) -> Any:
        """Return this warpgroup's part of a tile of the result."""
        products = (self._promoted if self.plan.promoted else self._summed)(tile.first, warpgroup)
        return products * self._factors(columns, (ROWS, self.plan.part_columns), axis=0)

    def _multiply(self, accumulator: Any, stage: Any, warpgroup: Any) -> None:
        plgpu.wgmma(accumulator, self.memory.x.at[stage], self.memory.w.at[stage, warpgroup].transpose((1, 0)))

    def _multiply_stages(self, accumulator: Any, start: Any, length: int, warpgroup: Any) -> None:
        """Add the products of some steps, and release all their stages: the copies wait for these."""
        stages = [self.pipeline.stage(start + i) for i in range(length)]
        for stage in stages:
            self.pipeline.consumer_wait(stage)
            self._multiply(accumulator, stage, warpgroup)
        plgpu.wgmma_wait(0)
        for stage in stages:
            self.pipeline.consumer_release(stage)

    def _summed(self, first: Any, warpgroup: Any) -> Any:
        """Return the products, summed in the tensor core."""
        plan = self.plan
        chunks, rest = divmod(plan.steps, PROMOTED)

        def products(accumulator: Any) -> Any:
            if rest:
                self._multiply_stages(accumulator, first, rest, warpgroup)

            @pl.loop(0, chunks)
            def _chunk(i: Any) -> None:
                self._multiply_stages(accumulator, first + rest + i * PROMOTED, PROMOTED, warpgroup)

            return accumulator[...]

        sums = jnp.int32 if plan.is_integer else jnp.float32
        return pl.run_scoped(products, plgpu.ACC((ROWS, plan.part_columns), sums)).astype(jnp.float32)

    def _promoted(self, first: Any, warpgroup: Any) -> Any:
        """Return the products, summed in float32."""
        plan, shape = self.plan, (ROWS, self.plan.part_columns)

        def chunk(start: Any, length: int, total: Any) -> Any:
            def products(accumulator: Any) -> Any:
                self._multiply_stages(accumulator, start, length, warpgroup)
                return accumulator[...]

            return total + pl.run_scoped(products, plgpu.ACC(shape, jnp.float32))

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        chunks, rest = divmod(plan.steps, plan.promoted)
        sums = chunk(first, rest, zeros) if rest else zeros
        body = functools.partial(self._following, chunk, first + rest)
        return lax.fori_loop(0, chunks, body, sums)

    def _following(self, chunk: Any, first: Any, i: Any, sums: Any) -> Any:
        return chunk(first + i * self.plan.promoted, self.plan.promoted, sums)


class WideRowsKernel(FewRowsKernel):
    """`FewRowsKernel` for rows of 16 bits: consumers widen the matrix in registers and compute the transpose.

    The matrix is read in pairs of numbers, which are widened where products read them, without an exchange between
    threads. So the numbers of a step's even pairs are multiplied apart from those of the odd ones, and rows are given
    in that order.
    """

    def memory_types(self) -> _Memory:
        """See `FewRowsKernel`."""
        plan, shape = self.plan, (self.plan.stages * self.plan.consumers, self.plan.part_columns)
        numbers, pairs = tiled((*shape, STEP), plan.w_dtype), tiled((*shape, HALF), jnp.int16)
        return super().memory_types()._replace(w=self.backend.aliased(numbers, pairs))

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: _Memory) -> None:
        """See `FewRowsKernel`."""
        self.pairs = memory.w
        super().run(arrays, results, memory._replace(w=self.backend.views(memory.w, 2)[0]))

    def _part(self, stage: Any, part: Any) -> Any:
        return self.memory.w.at[self._number(stage, part)]

    def _number(self, stage: Any, part: Any) -> Any:
        return stage * self.plan.consumers + part

    def _computed(self, tile: _Tile, columns: Any, warpgroup: Any) -> Any:
        plan, shape = self.plan, (ROWS, self.plan.tile_rows)

        def one(i: Any, sums: Any) -> Any:
            stage = self.pipeline.stage(tile.first + i)
            self.pipeline.consumer_wait(stage)
            pairs = self.backend.load_pairs(self.pairs, self._number(stage, warpgroup), pl.ds(0, HALF))
            halves = self.backend.widened_in_order(pairs, plan.w_dtype, plan.dtype)
            [found] = self.backend.accumulate(functools.partial(self._multiply_halves, stage, halves), sums)
            self.pipeline.consumer_release(stage)
            return found

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        found = lax.fori_loop(0, tile.steps, one, zeros)
        return found * self._factors(columns, shape, axis=1)

    def _multiply_halves(self, stage: Any, halves: Sequence[Any], sums: Any) -> None:
        for number, half in enumerate(halves):
            rows = self.memory.x.at[stage, :, pl.ds(number * HALF, HALF)].transpose((1, 0))
            self.backend.multiply(sums[0], half, rows)
