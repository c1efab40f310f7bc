# SPDX-License-Identifier: Apache-2.0
"""A kernel that quantises 1x128 blocks of a matrix, and of its transpose, in one pass.

A tile of 128x128 numbers arrives in shared memory once. It is read row by row, and then transposed, by the same
instructions: a row's largest magnitude lies in four neighbouring threads either way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat
from ejkernel.kernels._hopper.backend import Backend, backend_for
from ejkernel.kernels._hopper.blocks import tiles_and_rows
from ejkernel.kernels._hopper.launch import PROGRAM, launch, plgpu
from ejkernel.kernels.quantized_matmul.quantized import LARGEST

from .common import BLOCK
from .plan import HALF, QuantizingPlan

SMALLEST = float(np.finfo(np.float32).tiny)  # the scale of zeros


class QuantizingMemory(NamedTuple):
    """Tiles in flight, their barriers, a buffer for each copy to global memory, and the columns' largest magnitudes."""

    tiles: Any
    full: Any
    out: Any
    largest: Any


def quantized_blocks(plan: QuantizingPlan, x: jax.Array, *, interpret: Any = None) -> list[jax.Array]:
    """Return the numbers `[m, k]` and their scales, and those of the transpose if the plan has it.

    Scales have rows for whole tiles.
    """
    (row_tiles, column_tiles), kernel = plan.grid, QuantizingKernel(plan, backend_for(interpret))
    m, k = plan.rows, plan.columns
    shapes = [((m, k), plan.values), ((row_tiles * BLOCK, column_tiles), "float32")]
    if plan.transposed:
        shapes += [((k, m), plan.values), ((column_tiles * (1 if plan.square else BLOCK), row_tiles), "float32")]
    return run_kernel(kernel, [x], shapes)


def run_kernel(kernel: QuantizingKernel, arrays: Sequence[Any], shapes: Sequence[tuple[Any, str]]) -> list[jax.Array]:
    """Launch a kernel, and return its results of these shapes and dtypes."""
    return launch(
        kernel.run,
        arrays,
        [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes],
        name="quantize",
        programs=kernel.plan.programs,
        memory=kernel.memory_types(),
        lane_semantics=True,
        interpret=kernel.backend.interpret,
    )


class QuantizingKernel:
    """The program of one block of threads, a single warpgroup."""

    def __init__(self, plan: QuantizingPlan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend

    def memory_types(self) -> QuantizingMemory:
        """Return the types of shared memory and barriers.

        A tile has two halves of its columns, each one swizzle wide. Copies use views without tiles: these may start at
        any row, and an array may have any size.
        """
        plan, backend = self.plan, self.backend
        tiles, out = (plan.slots, 2, BLOCK, HALF), (plan.copies, HALF, BLOCK)
        return QuantizingMemory(
            tiles_and_rows(backend, tiles, plan.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=plan.slots),
            tiles_and_rows(backend, out, plan.values),
            plgpu.SMEM((BLOCK,), jnp.float32),
        )

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: QuantizingMemory) -> None:
        """Quantise every `programs`-th tile."""
        plan, self.memory, self.results = self.plan, memory, results
        self.x, *_ = arrays
        self.tiles, self.copied_tiles = self.backend.views(memory.tiles, 2)
        self.buffers, self.copied = self.backend.views(memory.out, 2)
        first = lax.axis_index(PROGRAM)
        count = lax.div(plan.grid[0] * plan.grid[1] - first + (plan.programs - 1), plan.programs)
        for i in range(plan.slots):
            pl.when(i < count)(functools.partial(self._fetch, first, jnp.int32(i)))

        @pl.loop(0, count)
        def _tile(i: Any) -> None:
            slot = lax.rem(i, plan.slots)
            plgpu.barrier_wait(memory.full.at[slot])
            row, column = self._start(first, i)
            for half in range(2):
                self._rows(slot, half, row, column)
            if plan.square:
                self._square(slot, row, column)
            elif plan.transposed:
                for half in range(2):
                    self._columns(slot, half, row, column)
            # All threads have read the tile: the last store waited for them.
            pl.when(i + plan.slots < count)(lambda: self._fetch(first, i + plan.slots))

        plgpu.wait_smem_to_gmem(0)

    def _start(self, first: Any, i: Any) -> tuple[Any, Any]:
        """Return the first row and column of this block's tile `i`."""
        number, columns = first + i * self.plan.programs, self.plan.grid[1]
        row = lax.div(number, columns)
        return row * BLOCK, (number - row * columns) * BLOCK

    def _row(self, row: Any) -> Any:
        """Return the row of the matrix at which the tile begins whose columns begin at `row`."""
        return row

    def _fetch(self, first: Any, i: Any) -> None:
        (row, column), slot = self._start(first, i), lax.rem(i, self.plan.slots)
        rows = pl.ds(self._row(row), BLOCK)
        for half in range(2):
            source = self.x.at[rows, pl.ds(column + half * HALF, HALF)]
            plgpu.copy_gmem_to_smem(source, self.copied_tiles.at[slot, half], self.memory.full.at[slot])

    def _rows(self, slot: Any, half: int, row: Any, column: Any) -> None:
        """Quantise half of a tile's rows."""
        rows = [loaded(self.tiles.at[slot, part, pl.ds(half * HALF, HALF)]) for part in range(2)]
        self._store(jnp.concatenate(rows, axis=1), half, self.results[:2], (self._row(row) + half * HALF, column))

    def _columns(self, slot: Any, half: int, row: Any, column: Any) -> None:
        """Quantise half of a tile's columns, as rows of the transpose."""
        self._store(self._loaded_columns(slot, half, row), 2 + half, self.results[2:], (column + half * HALF, row))

    def _loaded_columns(self, slot: Any, half: int, row: Any) -> Any:
        """Return half of the columns of the tile whose rows begin at `row`, as float32 rows of the transpose."""
        del row
        return loaded(self.tiles.at[slot, half].transpose((1, 0)))

    def _square(self, slot: Any, row: Any, column: Any) -> None:
        """Quantise a tile's columns with one scale, as rows of the transpose."""
        own, (values, scales) = self.memory.largest, self.results[2:]
        wide = [self._loaded_columns(slot, half, row) for half in range(2)]
        for half, each in enumerate(wide):
            compat.kernels.store_as_it_is(own.at[pl.ds(half * HALF, HALF)], jnp.max(jnp.abs(each), axis=1))
        plgpu.commit_smem()
        largest = jnp.max(plgpu.load(own, layout=plgpu.Layout.WG_STRIDED((BLOCK,), vec_size=1)))
        scale = _scale_for(largest, self.plan.values)
        scales[self._place(row, column)] = scale
        for half, each in enumerate(wide):
            self._convert(each * (1.0 / scale), 2 + half)
            plgpu.commit_smem()
            columns = pl.ds(column + half * HALF, HALF)
            plgpu.copy_smem_to_gmem(self.copied.at[2 + half], values.at[columns, pl.ds(row, BLOCK)])

    def _place(self, row: Any, column: Any) -> tuple[Any, Any]:
        """Return the index of a tile's scale of columns."""
        return lax.div(column, BLOCK), lax.div(row, BLOCK)

    def _store(self, wide: Any, slot: int, results: Sequence[Any], at: tuple[Any, Any]) -> None:
        """Quantise 64 rows of 128 numbers, and store them with their scales."""
        (values, scales), (row, column) = results, at
        scale = self._quantize(wide, slot)
        compat.kernels.store_as_it_is(scales.at[pl.ds(row, HALF), lax.div(column, BLOCK)], scale)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.copied.at[slot], values.at[pl.ds(row, HALF), pl.ds(column, BLOCK)])

    def _quantize(self, wide: Any, slot: int) -> Any:
        """Return the scales of 64 rows of 128 numbers, which lie quantised in a buffer then."""
        scale = scale_of(wide, self.plan.values)
        self._convert(wide * lax.broadcast_in_dim(1.0 / scale, wide.shape, [0]), slot)
        return scale

    def _convert(self, scaled: Any, slot: int) -> None:
        """Store 64 rows of 128 numbers in a buffer, in 8 bits."""
        # The copy that last read this buffer is the oldest of all.
        plgpu.wait_smem_to_gmem(self.plan.copies - 1, wait_read_only=True)
        # Rounding may lead beyond the largest number: the conversion saturates.
        self.buffers.at[slot][...] = scaled.astype(self.plan.values)


def loaded(tile: Any) -> Any:
    """Return a tile of shared memory in float32."""
    return plgpu.load(tile, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def scale_of(wide: Any, dtype: str) -> Any:
    """Return scales that make float32 rows in registers fit in a float8 dtype."""
    return _scale_for(jnp.max(jnp.abs(wide), axis=1), dtype)


def _scale_for(largest: Any, dtype: str) -> Any:
    """Return the scales that map magnitudes to the dtype's largest number."""
    scale = jnp.maximum(largest * (1 / LARGEST[dtype]), SMALLEST)
    return jnp.where(largest < jnp.inf, scale, jnp.full_like(scale, jnp.nan))  # NaN is not less either
