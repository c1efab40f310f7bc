# SPDX-License-Identifier: Apache-2.0
"""The kernel that quantises rows in groups, and their columns with a block of its own for the start of each group.

A tile of 128x128 numbers is a block of columns: it begins at any row, and may end with rows of the next group. Those
rows count as zeros in the columns. As rows they are quantised twice, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.backend import backend_for
from ejkernel.kernels._hopper.launch import plgpu, swizzled, tiled

from .common import BLOCK
from .kernel import QuantizingKernel, QuantizingMemory, loaded, run_kernel
from .plan import HALF, QuantizingPlan


def quantized_groups(plan: QuantizingPlan, x: jax.Array, table: jax.Array, *, interpret: Any = None) -> list[jax.Array]:
    """Return the numbers `[m, k]` and their scales, and those of the columns in groups.

    Scales of rows have 128 more rows. Those of columns are `[blocks, k]`, as the weights' gradient reads them, with
    columns for whole tiles.

    Args:
        plan: The launch.
        x: The rows.
        table: As `groups.blocks_of` returns it.
        interpret: `InterpretGPUParams` to simulate it on a CPU.
    """
    (blocks, tiles), kernel = plan.grid, _GroupedKernel(plan, backend_for(interpret))
    shapes = [
        ((plan.rows, plan.columns), plan.values),
        ((plan.rows + BLOCK, tiles), "float32"),
        ((plan.columns, blocks * BLOCK), plan.values),
        ((blocks, tiles * BLOCK), "float32"),
    ]
    return run_kernel(kernel, [x, table], shapes)


class _GroupedKernel(QuantizingKernel):
    """The program of one block of threads."""

    def memory_types(self) -> QuantizingMemory:
        """See `QuantizingKernel`; copies use the swizzled views, which may start at any row."""
        plan, backend = self.plan, self.backend
        tiles, out = (plan.slots, 2, BLOCK, HALF), (plan.copies, HALF, BLOCK)
        return QuantizingMemory(
            backend.aliased(tiled(tiles, plan.dtype), swizzled(tiles, plan.dtype)),
            plgpu.Barrier(num_arrivals=2, num_barriers=plan.slots),
            backend.aliased(tiled(out, plan.values), swizzled(out, plan.values)),
        )

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: QuantizingMemory) -> None:
        """See `QuantizingKernel`."""
        _, self.table = arrays
        self.tiles, self.copied_tiles = self.backend.views(memory.tiles, 2)
        super().run(arrays, results, memory)

    def _views(self) -> tuple[Any, Any]:
        """See `QuantizingKernel`."""
        out, copied = self.backend.views(self.memory.out, 2)
        return out, copied

    def _row(self, block: Any) -> Any:
        """Return the first row of a block; blocks without rows read the last one."""
        return jnp.minimum(self.table[lax.div(block, BLOCK), 0], self.plan.rows - 1)

    def _fetch(self, first: Any, i: Any) -> None:
        (block, column), slot = self._start(first, i), lax.rem(i, self.plan.slots)
        rows = pl.ds(self._row(block), BLOCK)
        for half in range(2):
            source = self.x.at[rows, pl.ds(column + half * HALF, HALF)]
            plgpu.copy_gmem_to_smem(source, self.copied_tiles.at[slot, half], self.memory.full.at[slot])

    def _rows(self, slot: Any, half: int, row: Any, column: Any) -> None:
        rows = [loaded(self.tiles.at[slot, part, pl.ds(half * HALF, HALF)]) for part in range(2)]
        self._store(jnp.concatenate(rows, axis=1), half, self.results[:2], (self._row(row) + half * HALF, column))

    def _columns(self, slot: Any, half: int, row: Any, column: Any) -> None:
        columns = loaded(self.tiles.at[slot, half].transpose((1, 0)))
        number = plgpu.broadcasted_iota(jnp.int32, columns.shape, 1, layout=plgpu.Layout.WGMMA)
        block = lax.div(row, BLOCK)
        own = jnp.where(number < self.table[block, 1], columns, jnp.zeros_like(columns))
        scale = self._quantize(own, 2 + half)
        (values, scales), at = self.results[2:], pl.ds(column + half * HALF, HALF)
        scales.at[block, at][...] = scale
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.copied.at[2 + half], values.at[at, pl.ds(row, BLOCK)])
