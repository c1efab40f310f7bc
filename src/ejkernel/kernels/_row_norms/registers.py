# SPDX-License-Identifier: Apache-2.0
"""Row norms for short rows: one warpgroup holds several rows in registers, eight lanes to a row.

A lane loads 16 bytes of a row at a time, or two such pieces, and a sum over a row takes three exchanges between lanes.
The kernel uses no shared memory: other blocks of threads work while one waits for its rows. In the backward each lane
sums the gradients of weight and bias over its rows, and XLA adds up the sums of all lanes in a fixed order.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat
from ejkernel.kernels._hopper.launch import plgpu

from .kernel import RowKernel, Rows, Term
from .plan import SLAB, RowNormPlan


class _Slab:
    """Rows in registers: float32 `values`, and for results the reference to store them to."""

    def __init__(self, values: Any = None, ref: Any = None) -> None:
        self.values, self.ref = values, ref


class ShortRowKernel(RowKernel):
    """Computes slabs of `SLAB` rows: four rows per warp at a time, eight elements of a row per lane."""

    name = "short_row_norm"
    parts = (None,)

    def __init__(self, plan: RowNormPlan) -> None:
        super().__init__(plan)
        tiles = plgpu.Tiling(((SLAB, 64), (4, 64), (8,)))
        self._layout = plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)

    def memory_types(self) -> Any:
        """See `RowKernel`."""
        return ()

    def over_rows(self, compute: Rows, memory: Any) -> None:
        """See `RowKernel`."""
        plan = self.plan
        zeros = plgpu.layout_cast(jnp.zeros((SLAB, plan.dim), jnp.float32), self._layout)
        by_element = self._layout.reduce(0)
        vectors = [plgpu.load(ref, layout=by_element, optimized=False).astype(jnp.float32) for ref in self.vectors]
        self._vectors = [self._along(x, 1) for x in vectors]

        def step(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            first = (self.number + i * plan.programs) * plan.params.block_rows
            slabs = [pl.ds(first + start, SLAB) for start in range(0, plan.params.block_rows, SLAB)]
            # All loads before any use.
            read = [[plgpu.load(x.at[at], layout=self._layout, optimized=False) for x in self.sources] for at in slabs]
            self._sums = list(sums)
            for at, rows in zip(slabs, read, strict=True):
                written = [_Slab(ref=ref.at[at]) for ref in self.results]
                compute(at, [_Slab(x.astype(jnp.float32)) for x in rows], written)
            return tuple(self._sums)

        sums = lax.fori_loop(0, self.count(), step, (zeros,) * plan.sums)
        for ref, total in zip(self.extra if plan.sums else (), sums, strict=True):
            compat.kernels.store_as_it_is(ref.at[self.number], total)

    def load(self, row: _Slab, part: None) -> Any:
        """See `RowKernel`."""
        return row.values

    def store(self, row: _Slab, part: None, values: Any) -> None:
        """See `RowKernel`."""
        rounded = values.astype(row.ref.dtype)
        compat.kernels.store_as_it_is(row.ref, rounded)
        row.values = rounded.astype(jnp.float32)

    def vector(self, index: int, part: None) -> Any:
        """See `RowKernel`."""
        return self._vectors[index]

    def hold(self, term: Term) -> Term:
        """See `RowKernel`."""
        values = term(None)
        return lambda _: values

    def mean(self, term: Term) -> Any:
        """See `RowKernel`."""
        return jnp.sum(term(None), axis=1) * (1 / self.plan.dim)

    def spread(self, by_row: Any) -> Any:
        """See `RowKernel`."""
        return self._along(by_row, 0)

    def row_stats(self, at: Any) -> tuple[Any, Any]:
        """See `RowKernel`."""
        layout = self._layout.reduce(1)
        scale, *mean = (self.spread(plgpu.load(x.at[at], layout=layout, optimized=False)) for x in self.stats[::-1])
        return (mean[0] if mean else None), scale

    def store_stat(self, ref: Any, at: Any, by_row: Any) -> None:
        """See `RowKernel`."""
        compat.kernels.store_as_it_is(ref.at[at], by_row)

    def add(self, index: int, part: None, values: Any) -> None:
        """See `RowKernel`."""
        self._sums[index] = self._sums[index] + values

    def _along(self, values: Any, axis: int) -> Any:
        return plgpu.layout_cast(lax.broadcast_in_dim(values, (SLAB, self.plan.dim), (axis,)), self._layout)
