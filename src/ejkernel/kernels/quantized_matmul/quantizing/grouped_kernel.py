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
from ejkernel.kernels._hopper.launch import plgpu

from .common import BLOCK
from .kernel import QuantizingKernel, QuantizingMemory, run_kernel
from .plan import HALF, QuantizingPlan


def quantized_groups(plan: QuantizingPlan, x: jax.Array, table: jax.Array, *, interpret: Any = None) -> list[jax.Array]:
    """Return the numbers `[m, k]` and their scales, and those of the columns in groups.

    Scales of rows have 128 more rows. Those of columns are `[blocks, k]`, as the weights' gradient reads them, with
    columns for whole tiles; or `[blocks, tiles of columns]`, one for each square.

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
        ((blocks, tiles * (1 if plan.square else BLOCK)), "float32"),
    ]
    return run_kernel(kernel, [x, table], shapes)


class _GroupedKernel(QuantizingKernel):
    """The program of one block of threads."""

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: QuantizingMemory) -> None:
        """See `QuantizingKernel`."""
        self.table = arrays[1]
        super().run(arrays, results, memory)

    def _row(self, row: Any) -> Any:
        # Blocks without rows read the last one.
        return jnp.minimum(self.table[lax.div(row, BLOCK), 0], self.plan.rows - 1)

    def _loaded_columns(self, slot: Any, half: int, row: Any) -> Any:
        wide = super()._loaded_columns(slot, half, row)
        number = plgpu.broadcasted_iota(jnp.int32, wide.shape, 1, layout=plgpu.Layout.WGMMA)
        return jnp.where(number < self.table[lax.div(row, BLOCK), 1], wide, jnp.zeros_like(wide))

    def _place(self, row: Any, column: Any) -> tuple[Any, Any]:
        return lax.div(row, BLOCK), lax.div(column, BLOCK)

    def _columns(self, slot: Any, half: int, row: Any, column: Any) -> None:
        block, columns = lax.div(row, BLOCK), pl.ds(column + half * HALF, HALF)
        scale = self._quantize(self._loaded_columns(slot, half, row), 2 + half)
        values, scales = self.results[2:]
        scales.at[block, columns][...] = scale
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.copied.at[2 + half], values.at[columns, pl.ds(row, BLOCK)])
