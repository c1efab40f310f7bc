# SPDX-License-Identifier: Apache-2.0
"""Row norms for long rows: one warpgroup holds a row in shared memory and passes over it in pieces.

A row is read from global memory once, however many passes the formula takes, and few of its elements are in registers
at a time. Blocks of rows are copied ahead of the work, in pipeline stages, and results are written while it goes on. In
the backward each block of threads sums the gradients of weight and bias over its rows, in shared memory; XLA adds up
the sums of all blocks in a fixed order, so gradients repeat bit by bit.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.launch import plgpu

from .kernel import RowKernel, Rows, Term
from .plan import THREADS, RowNormPlan


class LongRowKernel(RowKernel):
    """Computes one row at a time, in pieces."""

    name = "row_norm"

    def __init__(self, plan: RowNormPlan) -> None:
        super().__init__(plan)
        part = (plan.chunk // plan.minor, plan.minor)
        self.parts = [pl.ds(i * part[0], part[0]) for i in range(plan.dim // plan.chunk)]
        # All accesses to a row use one layout: a thread loads only what it stored itself.
        self._layout = plgpu.Layout.WG_STRIDED(part, vec_size=min(4, plan.chunk // THREADS))
        self._part = part

    def memory_types(self) -> Any:
        """See `RowKernel`."""
        plan = self.plan
        block = (plan.params.stages, plan.params.block_rows, *plan.row_shape)
        rows = [plgpu.SMEM(block, jnp.dtype(plan.dtype))] * (plan.sources + plan.results)
        sums = plgpu.SMEM((plan.sums, *plan.row_shape), jnp.float32) if plan.sums else None
        full = plgpu.Barrier(num_arrivals=plan.sources, num_barriers=plan.params.stages)
        return full, rows, sums

    def over_rows(self, compute: Rows, memory: Any) -> None:
        """See `RowKernel`."""
        plan, stages = self.plan, self.plan.params.stages
        self._full, buffers, self._sums = memory
        self._read, self._written = buffers[: plan.sources], buffers[plan.sources :]
        self._zero = plgpu.layout_cast(jnp.zeros(self._part, jnp.float32), self._layout)
        count = self.count()
        for i in range(plan.sums):
            for part in self.parts:
                self._sums[i, part] = self._zero
        for step in range(stages):
            # A program may have fewer blocks than stages, and must wait for every copy that it starts.
            pl.when(step < count)(functools.partial(self._fetch, jnp.int32(step)))

        @pl.loop(0, count)
        def _step(step: Any) -> None:
            self._compute(compute, step)
            # The stage is empty: all threads finished reading it before the commit in `_compute`.
            pl.when(step + stages < count)(functools.partial(self._fetch, step + stages))

        plgpu.commit_smem()
        for i, result in enumerate(self.extra if plan.sums else ()):
            plgpu.copy_smem_to_gmem(self._sums.at[i], result.at[self.number])
        plgpu.wait_smem_to_gmem(0)

    def load(self, row: Any, part: Any) -> Any:
        """See `RowKernel`."""
        return plgpu.load(row.at[part], layout=self._layout).astype(jnp.float32)

    def store(self, row: Any, part: Any, values: Any) -> None:
        """See `RowKernel`."""
        row[part] = values.astype(row.dtype)

    def vector(self, index: int, part: Any) -> Any:
        """See `RowKernel`."""
        return self.load(self.vectors[index], part)

    def hold(self, term: Term) -> Term:
        """See `RowKernel`."""
        return term

    def mean(self, term: Term) -> Any:
        """See `RowKernel`."""
        total = self._zero
        for part in self.parts:
            total = total + term(part)
        return jnp.sum(total) * (1 / self.plan.dim)

    def spread(self, by_row: Any) -> Any:
        """See `RowKernel`."""
        return by_row

    def row_stats(self, at: Any) -> tuple[Any, Any]:
        """See `RowKernel`."""
        *mean, scale = (ref[at] for ref in self.stats)
        return (mean[0] if mean else None), scale

    def store_stat(self, ref: Any, at: Any, by_row: Any) -> None:
        """See `RowKernel`."""
        ref[at] = by_row

    def add(self, index: int, part: Any, values: Any) -> None:
        """See `RowKernel`."""
        sums = self._sums.at[index]
        sums[part] = self.load(sums, part) + values

    def _rows(self, step: Any) -> Any:
        """Return the rows of a step."""
        size = self.plan.params.block_rows
        return pl.ds((self.number + step * self.plan.programs) * size, size)

    def _fetch(self, step: Any) -> None:
        stage = lax.rem(step, self.plan.params.stages)
        for source, buffer in zip(self.sources, self._read, strict=True):
            plgpu.copy_gmem_to_smem(source.at[self._rows(step)], buffer.at[stage], self._full.at[stage])

    def _compute(self, compute: Rows, step: Any) -> None:
        plan = self.plan
        stage, rows = lax.rem(step, plan.params.stages), self._rows(step)
        plgpu.barrier_wait(self._full.at[stage])
        # Each step commits one group of copies: those that last used this stage's output buffers have read them.
        plgpu.wait_smem_to_gmem(plan.params.stages - 1, wait_read_only=True)

        @pl.loop(0, plan.params.block_rows)
        def _row(i: Any) -> None:
            compute(rows.start + i, *([x.at[stage, i] for x in buffers] for buffers in (self._read, self._written)))

        plgpu.commit_smem()
        *first, last = zip(self._written, self.results, strict=True)
        for buffer, result in first:
            plgpu.copy_smem_to_gmem(buffer.at[stage], result.at[rows], commit_group=False)
        plgpu.copy_smem_to_gmem(last[0].at[stage], last[1].at[rows])
