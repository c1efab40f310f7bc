# SPDX-License-Identifier: Apache-2.0
"""The kernel: a product whose epilogue turns a tile of logits into statistics, exponentials, or a gradient.

The epilogue works in pieces of 64 columns. Its stores overlap with the arithmetic of the next piece, and few values are
live at once: with whole tiles, a soft cap spilled registers.

Producer and consumers visit the same tiles and steps in the same order, so they cannot deadlock.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.launch import CLUSTER, PROGRAM, WARPGROUP, dispatch_warpgroup, launch, plgpu, tiled
from ejkernel.kernels._hopper.pipeline import Pipeline, producer_tail
from ejkernel.kernels._hopper.products import accumulate, multiply_stages, tile_position
from ejkernel.kernels._hopper.device import Registers
from ejkernel.kernels._hopper.tile_shapes import ROWS, STEP, WARPGROUPS

from .epilogues import DTYPE, Epilogue, Packed, Tile
from .plan import GRADIENT, TILE_ROWS, HeadPlan

_REGISTERS = Registers(producer=32, consumer=240)  # a tile, its packed predecessor, and 48 more


class HeadMemory(NamedTuple):
    """Shared memory and barriers of one block of threads: types before `run_scoped`, references inside it.

    Attributes:
        lhs: Pipeline stages of the rows, one part per consumer warpgroup.
        rhs: Pipeline stages of the weight.
        out: Staging buffers of the epilogue, per consumer warpgroup; `None` without a matrix to store.
        pipeline: The barriers of the stages.
    """

    lhs: Any
    rhs: Any
    out: Any
    pipeline: Pipeline


def run_head(plan: HeadPlan, arrays: Sequence[jax.Array], *, interpret: Any = None) -> list[jax.Array]:
    """Run the kernel; return one array `[column tiles, rows]` for each of `plan.per_tile`, then the matrix, if any.

    Args:
        plan: The launch.
        arrays: Padded rows and weight; the bias in float32, padded with -inf to whole tiles, if any; int32 labels. Then
            for statistics and exponentials an int32 table of 64 rows by tile columns that says where labels are, and
            for exponentials the numbers per row, in base 2. For a gradient the first column, int32 `[1]`; per row, in
            float32, the log-sum-exp in base 2 and the coefficients.
        interpret: `InterpretGPUParams` to simulate it on a CPU.
    """

    part = jax.ShapeDtypeStruct((plan.column_tiles, plan.rows), jnp.float32)
    out_type = [part] * len(plan.per_tile)
    if plan.has_matrix:
        out_type.append(jax.ShapeDtypeStruct((plan.rows, plan.columns), DTYPE))
    kernel = HeadKernel(plan)
    return launch(
        kernel.run,
        list(arrays),
        out_type,
        name=f"linear_cross_entropy_{plan.mode}",
        programs=plan.programs,
        memory=kernel.memory_types(),
        consumers=WARPGROUPS,
        cluster=plan.cluster,
        lane_semantics=True,
        interpret=interpret,
    )


class HeadKernel:
    """The program of one block of threads."""

    def __init__(self, plan: HeadPlan) -> None:
        self.plan = plan

    def memory_types(self) -> HeadMemory:
        """Return the types of shared memory and barriers."""
        plan = self.plan
        matrix = (plan.block_n, STEP) if plan.transpose_weight else (STEP, plan.block_n)
        out = tiled((WARPGROUPS, plan.out_slots, ROWS, plan.piece), DTYPE, swizzle=2 * plan.piece) if plan.has_matrix else None
        pipeline = Pipeline.types(plan.stages, consumers=WARPGROUPS, copies=WARPGROUPS + 1, cluster=plan.cluster)
        return HeadMemory(
            tiled((plan.stages, WARPGROUPS, ROWS, STEP), DTYPE), tiled((plan.stages, *matrix), DTYPE), out, pipeline
        )

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: HeadMemory) -> None:
        """Run this warpgroup as producer or consumer, on references."""
        plan = self.plan
        self._name(arrays, results)
        self.memory, self.pipeline = memory, memory.pipeline
        program = lax.axis_index(PROGRAM)
        self.rank = lax.axis_index(CLUSTER) if plan.cluster > 1 else 0
        tiles = plan.row_tiles // plan.cluster * plan.column_tiles
        self.tiles = lax.div(tiles - program + (plan.programs - 1), plan.programs)
        warpgroup = lax.axis_index(WARPGROUP)
        dispatch_warpgroup(warpgroup, WARPGROUPS, _REGISTERS, producer=self._produce, consumer=self._consume)

    def _name(self, arrays: Sequence[Any], results: Sequence[Any]) -> None:
        plan = self.plan
        self.x, self.weight, *others = arrays
        bias = others.pop(0) if plan.bias else None
        labels, special, *per_row = others
        is_gradient = plan.mode == GRADIENT
        self.first_column = special[0] if is_gradient else 0
        self.operands = {
            "bias": bias,
            "labels": labels,
            "has_labels": None if is_gradient else special,
            "first_column": self.first_column,
            "per_row": per_row,
            "parts": dict(zip(plan.per_tile, results, strict=False)),
            "out": results[-1] if plan.has_matrix else None,
        }

    def _position(self, index: Any) -> tuple[Any, Any]:
        """Return row and column, in tiles, of this block's tile `index`."""
        plan = self.plan
        number = lax.axis_index(PROGRAM) + index * plan.programs
        rows, column = tile_position(number, plan.row_tiles // plan.cluster, plan.column_tiles, plan.panel)
        return rows * plan.cluster + self.rank, column

    # Producer.

    def _produce(self) -> None:
        plan = self.plan

        @pl.loop(0, self.tiles)
        def _tile(index: Any) -> None:
            row, column = self._position(index)

            @pl.loop(0, plan.steps)
            def _step(i: Any) -> None:
                self._copy_step(row, column, i, index * plan.steps + i)

        producer_tail(self.tiles * plan.steps, self.pipeline)

    def _copy_step(self, row: Any, column: Any, index: Any, step: Any) -> None:
        plan, along = self.plan, pl.ds(index * STEP, STEP)
        stage = self.pipeline.producer_acquire(step)
        full = self.pipeline.full.at[stage]
        for w in range(WARPGROUPS):
            rows = pl.ds(row * TILE_ROWS + ROWS * w, ROWS)
            plgpu.copy_gmem_to_smem(self.x.at[rows, along], self.memory.lhs.at[stage, w], full)
        shared = {"collective_axes": CLUSTER} if plan.cluster > 1 else {}
        columns = pl.ds(self.first_column + column * plan.block_n, plan.block_n)
        at = (columns, along) if plan.transpose_weight else (along, columns)
        plgpu.copy_gmem_to_smem(self.weight.at[at], self.memory.rhs.at[stage], full, **shared)

    # Consumers.

    def _consume(self, warpgroup: Any) -> None:
        plan = self.plan
        slots = self.memory.out.at[warpgroup] if plan.has_matrix else None
        self.epilogue = Epilogue(plan, **self.operands, slots=slots)

        if plan.overlap:
            self._consume_overlapped(warpgroup)
        else:

            @pl.loop(0, self.tiles)
            def _tile(index: Any) -> None:
                self.epilogue.finish(self._multiply(index, warpgroup, None), range(plan.pieces))

        if plan.has_matrix:
            plgpu.wait_smem_to_gmem(0)

    def _consume_overlapped(self, warpgroup: Any) -> None:
        @pl.when(self.tiles > 0)
        def _any() -> None:
            first = self._multiply(0, warpgroup, None)

            def following(index: Any, packed: Packed) -> Packed:
                return self._multiply(index, warpgroup, packed)

            last: Packed = lax.fori_loop(1, self.tiles, following, first)
            self.epilogue.finish(last, range(self.plan.pieces))

    def _tile(self, index: Any, warpgroup: Any) -> Tile:
        row, column_tile = self._position(index)
        return Tile(row * TILE_ROWS + warpgroup * ROWS, column_tile)

    def _multiply(self, index: Any, warpgroup: Any, previous: Packed | None) -> Packed:
        """Compute a tile, and finish the previous one during the first steps; return the tile, packed."""
        plan, epilogue = self.plan, self.epilogue
        tile = self._tile(index, warpgroup)
        def mainloop(accumulator: Any) -> list[Any]:
            loaded: list[Any] = []

            def load() -> None:
                loaded.extend(epilogue.known(tile))

            def multiply(stage: Any) -> None:
                buffer = self.memory.rhs.at[stage]
                matrix = buffer.transpose((1, 0)) if plan.transpose_weight else buffer
                plgpu.wgmma(accumulator, self.memory.lhs.at[stage, warpgroup], matrix)

            during = [load] if previous is None else self._halves(previous, load)
            multiply_stages(self.pipeline, index * plan.steps, plan.steps, multiply, during=during)
            return loaded

        product, *known = accumulate((ROWS, plan.block_n), 1, mainloop)
        return epilogue.pack(product, tile, *known)

    def _halves(self, previous: Packed, last: Callable[[], None]) -> list[Callable[[], None]]:
        """Return what to run during the first steps: the second half of the previous tile's epilogue, then `last`."""
        plan, epilogue = self.plan, self.epilogue
        count = min(plan.block_n // 64, plan.steps)
        bounds = [i * plan.pieces // count for i in range(count + 1)]

        def part(start: int, stop: int) -> None:
            nonlocal previous
            previous = epilogue.finish(previous, range(start, stop))
            if stop == plan.pieces:
                last()  # now there are registers for it

        return [functools.partial(part, *limits) for limits in itertools.pairwise(bounds)]
