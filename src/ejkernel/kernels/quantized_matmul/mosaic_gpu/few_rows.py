# SPDX-License-Identifier: Apache-2.0
"""The kernel for at most 64 rows, as in decoding, or few rows for each group: its time is that of reading matrices.

A block of threads has a tile of columns. Its width suits the number of columns, so that all multiprocessors read about
as much. Consumers share a tile's columns, and with a gate its two products. Rows of 16 bits take wide tiles, because
each tile reads all rows; with few tiles, several blocks split a tile's steps, and XLA sums their results and applies
the epilogue.

Rows of groups come in tiles of a single group; a table has the group of each tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
from ejkernel.kernels.grouped_matmul.mosaic_gpu.product import epilogue

from .few_rows_plan import HALF, FewRowsPlan
from .plan import PROMOTED, STEP
from .splits import added

# By the number of consumers. Their sum must fit in the launch's allocation, 96 for each thread of five warpgroups:
# otherwise a consumer waits for ever.
_REGISTERS = {2: REGISTERS, 3: Registers(40, 152), 4: Registers(40, 104)}


class _Memory(NamedTuple):
    """Pipeline stages of the operands, their barriers, and the buffers of the epilogue.

    Attributes:
        x: All rows.
        w: The columns of each consumer.
        out: The result, per consumer that stores one.
        pipeline: The barriers of the stages.
        gate: The products with the gate, per part of the columns; `None` without these.
        gates: The barriers of `gate`.
    """

    x: Any
    w: Any
    out: Any
    pipeline: Pipeline
    gate: Any = None
    gates: Any = None


class _Tile(NamedTuple):
    """A tile of a block of threads.

    Attributes:
        group: The group of its rows; `None` if there is one matrix.
        row: Its first row.
        column: Its first column.
        split: The split with the block's steps.
        first: The number of its first step in this block.
        steps: How many steps the block computes.
    """

    group: Any
    row: Any
    column: Any
    split: Any
    first: Any
    steps: Any


def multiply(plan: FewRowsPlan, *arrays: jax.Array, interpret: Any = None) -> list[jax.Array]:
    """Return `[result]`, or if blocks split the steps, each product in float32, for the epilogue.

    Args:
        plan: The launch.
        *arrays: `x [m, k]`; `w [n, k]` or `[groups, n, k]`; the gate's matrices, if any; factors of rows, of the
            matrices' columns, and of the gate's; then factors of the result's rows, if the plan has them, and the
            number of rows, if it clears, or how many tiles the groups have, and the group of each. Rows of 16 bits
            have, in each step, the first two of four columns before the last two.
        interpret: `InterpretGPUParams` to simulate it on a CPU.
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
    if not plan.turned:
        return [out if plan.splits == 1 else added(out)]
    products = out.reshape(plan.turned_shape)[:, :, :, : plan.columns].sum(1).mT
    return list(products.reshape(len(products), -1, plan.columns)[:, : plan.rows])


class FewRowsKernel:
    """The program of one block of threads."""

    of_result: Any  # factors of the result's rows
    groups: Any  # the number of rows, or the table of tiles

    def __init__(self, plan: FewRowsPlan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend

    def memory_types(self) -> _Memory:
        """Return the types of shared memory and barriers."""
        plan = self.plan
        return _Memory(
            x=tiled((plan.stages, plan.tile_rows, STEP), plan.dtype),
            w=tiled((plan.stages, plan.consumers, plan.part_columns, STEP), plan.w_dtype),
            out=plgpu.SMEM((plan.results * plan.parts, *plan.buffer_shape), jnp.dtype(plan.result_dtype)),
            pipeline=Pipeline.types(plan.stages, consumers=plan.consumers, copies=plan.consumers + 1),
        )

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: _Memory) -> None:
        """Run this warpgroup as producer or consumer."""
        given = iter(arrays)
        self.x = next(given)
        self.matrices = [next(given) for _ in range(self.plan.products)]
        self.row_scale = next(given)
        self.column_scales = [next(given) for _ in range(self.plan.products)]
        self.of_result = next(given) if self.plan.factored else None
        self.groups = next(given, None)
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
            # Chunks of steps in 8 bits have fixed lengths: past the end, copies find zeros.
            steps = lax.min(plan.steps, plan.all_steps - split * plan.steps) if plan.wide else plan.steps
            body(_Tile(None, self.row, (program - split * plan.column_tiles) * plan.tile_columns, split, 0, steps))
            return steps
        used = self.backend.uniform(self.groups[0]) if plan.group_tiles else 1
        count = lax.div(plan.column_tiles * used - program + (plan.programs - 1), plan.programs)

        @pl.loop(0, count)
        def _tile(i: Any) -> None:
            number, group, row = program + i * plan.programs, None, self.row
            if plan.group_tiles:  # the tiles of a group follow each other: they share its columns in the L2 cache
                number, of_rows = lax.div(number, used), lax.rem(number, used)
                group, row = self.backend.uniform(self.groups[1 + of_rows]), of_rows * plan.tile_rows
            body(_Tile(group, row, number * plan.tile_columns, 0, i * plan.steps, plan.steps))

        return count * plan.steps

    def _columns(self, stage: Any, warpgroup: Any) -> Any:
        """Return the buffer of a consumer's columns."""
        return self.memory.w.at[stage, warpgroup]

    def _produce(self) -> None:
        plan, memory = self.plan, self.memory

        def copy(tile: _Tile) -> None:
            @pl.loop(0, tile.steps)
            def _step(i: Any) -> None:
                stage = self.pipeline.producer_acquire(tile.first + i)
                full, along = self.pipeline.full.at[stage], pl.ds((tile.split * plan.steps + i) * STEP, STEP)
                for warpgroup in range(plan.consumers):
                    product, part = divmod(warpgroup, plan.parts)
                    columns = pl.ds(tile.column + part * plan.part_columns, plan.part_columns)
                    matrix = self.matrices[product]
                    matrix = matrix if tile.group is None else matrix.at[tile.group]
                    plgpu.copy_gmem_to_smem(matrix.at[columns, along], self._columns(stage, warpgroup), full)
                plgpu.copy_gmem_to_smem(self.x.at[pl.ds(tile.row, plan.tile_rows), along], memory.x.at[stage], full)

        producer_tail(self._each_tile(copy), self.pipeline)

    def _consume(self, warpgroup: Any) -> None:
        plan = self.plan

        def compute(tile: _Tile) -> None:
            product, part = self._place(warpgroup)
            column = tile.column + part * plan.part_columns
            values = self._computed(tile, column, warpgroup)
            if plan.turned:
                first = product * plan.splits + tile.split
                if plan.group_tiles:
                    first = lax.div(tile.row, plan.tile_rows)
                target = self.out.at[pl.ds(first * plan.factors + column, plan.part_columns)]
            else:
                own = self.out if plan.splits == 1 else self.out.at[tile.split]
                target = own.at[pl.ds(tile.row, plan.tile_rows), pl.ds(column, plan.part_columns)]
            self._finish(tile, values, warpgroup, lambda values: self._store(values, target, warpgroup))

        self._each_tile(compute)
        plgpu.wait_smem_to_gmem(0)

    def _place(self, warpgroup: Any) -> tuple[Any, Any]:
        """Return the product that a consumer computes, and the part of the columns."""
        parts = self.plan.parts
        return (lax.div(warpgroup, parts), lax.rem(warpgroup, parts)) if self.plan.gated else (0, warpgroup)

    def _store(self, values: Any, target: Any, warpgroup: Any) -> None:
        """Store this warpgroup's part of a tile."""
        plan, buffer = self.plan, self.memory.out.at[warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        as_computed = buffer.transpose((1, 0)) if plan.wide and not plan.turned else buffer
        compat.kernels.store_as_it_is(as_computed, values.astype(plan.result_dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, target)

    def _finish(self, tile: _Tile, values: Any, warpgroup: Any, store: Callable[[Any], None]) -> None:
        """Apply the epilogue to this warpgroup's part of a tile, and store it."""
        del tile, warpgroup
        store(values)

    def _factors(self, tile: _Tile, column: Any, warpgroup: Any, shape: tuple[int, int], *, axis: int) -> Any:
        """Return the products of both factors; rows of `x` lie along `axis`."""
        first = column if tile.group is None else tile.group * self.plan.factors + column
        rows = self.row_scale.at[pl.ds(tile.row, self.plan.tile_rows)]
        each = [scale.at[pl.ds(first, self.plan.part_columns)] for scale in self.column_scales]
        columns, *of_gate = (self._spread(scale, shape, 1 - axis) for scale in each)
        for other in of_gate:
            columns = jnp.where(self._place(warpgroup)[0] == 0, columns, other)
        return self._spread(rows, shape, axis) * columns

    def _spread(self, ref: Any, shape: tuple[int, int], axis: int) -> Any:
        """Return numbers that lie along an axis, for each element of a tile."""
        layout = plgpu.Layout.WGMMA.reduce(1 - axis)
        return lax.broadcast_in_dim(plgpu.load(ref, layout=layout, optimized=False), shape, [axis])

    def _computed(self, tile: _Tile, column: Any, warpgroup: Any) -> Any:
        """Return this warpgroup's part of a tile of a product."""
        products = (self._promoted if self.plan.promoted else self._summed)(tile.first, warpgroup)
        return products * self._factors(tile, column, warpgroup, (ROWS, self.plan.part_columns), axis=0)

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
        found = super().memory_types()._replace(w=self.backend.aliased(numbers, pairs))
        if plan.gate_shape is None:
            return found
        gates = Pipeline.types(plan.parts, consumers=1)
        return found._replace(gate=plgpu.SMEM(plan.gate_shape, jnp.float32), gates=gates)

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: _Memory) -> None:
        """See `FewRowsKernel`."""
        self.pairs = memory.w
        super().run(arrays, results, memory._replace(w=self.backend.views(memory.w, 2)[0]))

    def _columns(self, stage: Any, warpgroup: Any) -> Any:
        return self.memory.w.at[self._number(stage, warpgroup)]

    def _number(self, stage: Any, warpgroup: Any) -> Any:
        return stage * self.plan.consumers + warpgroup

    def _computed(self, tile: _Tile, column: Any, warpgroup: Any) -> Any:
        plan, shape = self.plan, (ROWS, self.plan.tile_rows)

        def one(i: Any, sums: Any) -> Any:
            stage = self.pipeline.stage(tile.first + i)
            self.pipeline.consumer_wait(stage)
            pairs = self.backend.load_pairs(self.pairs, (self._number(stage, warpgroup),), pl.ds(0, HALF))
            halves = self.backend.widened_in_order(pairs, plan.w_dtype, plan.dtype)
            [found] = self.backend.accumulate(functools.partial(self._multiply_halves, stage, halves), sums)
            self.pipeline.consumer_release(stage)
            return found

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        found = lax.fori_loop(0, tile.steps, one, zeros)
        return found * self._factors(tile, column, warpgroup, shape, axis=1)

    def _finish(self, tile: _Tile, values: Any, warpgroup: Any, store: Callable[[Any], None]) -> None:
        """See `FewRowsKernel`; the warpgroup with the gate's product passes it to the other one."""
        plan, memory = self.plan, self.memory
        if plan.splits > 1 or not plan.gated:
            store(values if plan.splits > 1 else self._result(tile, [values]))
            return
        product, part = self._place(warpgroup)
        passed, full, empty = memory.gate.at[part], memory.gates.full.at[part], memory.gates.empty.at[part]

        @pl.when(product == 1)
        def _pass() -> None:
            compat.kernels.store_as_it_is(passed, values)
            plgpu.commit_smem()
            plgpu.barrier_arrive(full)
            plgpu.barrier_wait(empty)

        @pl.when(product == 0)
        def _take() -> None:
            plgpu.barrier_wait(full)
            gate = plgpu.load(passed, layout=plgpu.Layout.WGMMA, optimized=False)
            self.backend.order_reads()
            plgpu.barrier_arrive(empty)
            store(self._result(tile, [values, gate]))

    def _result(self, tile: _Tile, products: Sequence[Any]) -> Any:
        """Return the result of the epilogue."""
        plan, shape, factors = self.plan, (ROWS, self.plan.tile_rows), None
        if plan.factored:
            factors = self._spread(self.of_result.at[pl.ds(tile.row, plan.tile_rows)], shape, 1)
        values = epilogue(products, factors, plan.activation)
        if plan.clears:  # for any content of the other rows
            row = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            values = jnp.where(row < self.groups[0], values, jnp.zeros_like(values))
        return values

    def _multiply_halves(self, stage: Any, halves: Sequence[Any], sums: Any) -> None:
        for number, half in enumerate(halves):
            rows = self.memory.x.at[stage, :, pl.ds(number * HALF, HALF)].transpose((1, 0))
            self.backend.multiply(sums[0], half, rows)
