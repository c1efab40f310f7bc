# SPDX-License-Identifier: Apache-2.0
"""The kernel: a row in shared memory, as in `_row_norms`, whose result is quantised before it is stored.

A warp holds a block of 128 elements, so the block's largest magnitude takes exchanges between its lanes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat
from ejkernel.kernels._hopper.launch import launch, plgpu
from ejkernel.kernels._row_norms.launch import readable
from ejkernel.kernels._row_norms.shared_memory import LongRowKernel
from ejkernel.kernels.quantized_matmul.quantized import LARGEST
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK

from .plan import QuantizedRowPlan

_TINY = float(np.finfo(np.float32).tiny)


def normalize_rows(
    plan: QuantizedRowPlan, rows: Sequence[jax.Array], vectors: Sequence[jax.Array], *, interpret: Any = None
) -> list[jax.Array]:
    """Return the numbers of the rows, the sums if there is a residual, and the scales, a row for each row.

    Args:
        plan: The launch.
        rows: The rows, and the residual if the formula has one.
        vectors: The weight, if there is one.
        interpret: `InterpretGPUParams` to simulate it on a CPU.
    """
    kernel, shape = QuantizedRowKernel(plan), (plan.rows, *plan.row_shape)
    results = [(shape, plan.values), *[(shape, plan.dtype)] * plan.formula.residual, (shape[:2], "float32")]
    with jax.enable_x64(False):  # the kernel counts in int32
        return launch(
            kernel.run,
            [*(x.reshape(shape) for x in rows), *(readable(x).reshape(plan.row_shape) for x in vectors)],
            [jax.ShapeDtypeStruct(size, jnp.dtype(dtype)) for size, dtype in results],
            name=kernel.name,
            programs=plan.programs,
            memory=kernel.memory_types(),
            lane_semantics=True,
            interpret=interpret,
        )


class QuantizedRowKernel(LongRowKernel):
    """Computes one row at a time, in pieces of whole blocks."""

    name = "quantized_row_norm"
    plan: QuantizedRowPlan

    def __init__(self, plan: QuantizedRowPlan) -> None:
        super().__init__(plan)
        # Threads hold the same elements as in the layout of `LongRowKernel`.
        tiles = plgpu.Tiling(((4, BLOCK), (4,)))
        self._blocks = plgpu.Layout.TILED(tiles, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def memory_types(self) -> Any:
        """See `RowKernel`."""
        plan, (full, [source, *others], sums) = self.plan, super().memory_types()
        result = plgpu.SMEM(source.shape, jnp.dtype(plan.values))
        # Rows to read; the result; the optional sum.
        return full, [source, *others[: plan.sources - 1], result, *others[plan.sources :]], sums

    def _forward(self, at: Any, read: Sequence[Any], written: Sequence[Any]) -> None:
        formula, row = self.plan.formula, self._to_normalise(read, written)
        scale = lax.rsqrt(self.mean(lambda part: self.load(row, part) * self.load(row, part)) + formula.eps)
        for part in self.parts:
            self._quantize(self._weighted(self._load(row, part) * scale, part), at, written[0], part)

    def _load(self, row: Any, part: Any) -> Any:
        return plgpu.load(row.at[part], layout=self._blocks, optimized=False).astype(jnp.float32)

    def vector(self, index: int, part: Any) -> Any:
        """See `RowKernel`."""
        return self._load(self.vectors[index], part)

    def _quantize(self, wide: Any, at: Any, result: Any, part: Any) -> None:
        """Store some blocks of a row, and their scales."""
        largest, top = jnp.max(jnp.abs(wide), axis=1), LARGEST[self.plan.values]
        scale = jnp.maximum(largest * (1 / top), _TINY)
        scale = jnp.where(largest < jnp.inf, scale, jnp.full_like(scale, jnp.nan))  # NaN is not less either
        factor = plgpu.layout_cast(lax.broadcast_in_dim(1.0 / scale, wide.shape, [0]), self._blocks)
        # Rounding may lead beyond the largest number: the conversion saturates.
        compat.kernels.store_as_it_is(result.at[part], (wide * factor).astype(self.plan.values))
        compat.kernels.store_as_it_is(self.extra[0].at[at, pl.ds(part.start, part.size)], scale)
