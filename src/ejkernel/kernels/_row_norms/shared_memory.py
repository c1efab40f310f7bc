# SPDX-License-Identifier: Apache-2.0
"""Row norms for long rows: one warpgroup holds a row in shared memory and passes over it in pieces.

A row is read from global memory once, however many passes the formula takes, and few of its elements are in registers
at a time. Blocks of rows are copied ahead of the work, in pipeline stages, and results are written while it goes on. In
the backward each block of threads sums the gradients of weight and bias over its rows, in shared memory; XLA adds up
the sums of all blocks in a fixed order, so gradients repeat bit by bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.launch import PROGRAM, launch
from ejkernel.kernels._hopper.memory import plgpu

from .plan import THREADS, RowNormPlan

_Row = Callable[[Any, list[Any], list[Any]], None]  # of the row's number, its inputs and its outputs


def normalize(plan: RowNormPlan, arrays: Sequence[jax.Array], *, interpret: Any = None) -> tuple[jax.Array, ...]:
    """Run the forward.

    Args:
        plan: The launch.
        arrays: The rows; the residual, weight and bias, if the formula has them.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU; `None` runs it on a GPU.

    Returns:
        The normalised rows; the sums of rows and residual, for a formula with one; the mean of each row, if the formula
        subtracts it; `1 / rms` or `1 / standard deviation` of each row, in float32.
    """
    stats = [jax.ShapeDtypeStruct((plan.rows,), jnp.float32)] * (1 + plan.formula.centred)
    rows, vectors = _shaped(plan, arrays)
    return _launch(plan, "row_norm_forward", _forward_row, [*rows, *vectors], stats, interpret)


def gradients(
    plan: RowNormPlan, arrays: Sequence[jax.Array], stats: Sequence[jax.Array], *, interpret: Any = None
) -> tuple[jax.Array, ...]:
    """Run the backward.

    Args:
        plan: The launch.
        arrays: The normalised rows; the cotangent of the output; that of the sum, if there is a residual;
            the weight, if there is one.
        stats: The forward's results for each row: the mean, if the formula subtracts it, and the scale.
        interpret: As for `normalize`.

    Returns:
        The gradient of the rows, then the float32 gradients of weight and bias, if the formula has them.
    """
    sums = [jax.ShapeDtypeStruct((plan.programs, *plan.row_shape), jnp.float32)] * plan.sums
    rows, vectors = _shaped(plan, arrays)
    dx, *parts = _launch(plan, "row_norm_backward", _backward_row, [*rows, *stats, *vectors], sums, interpret)
    return dx, *(part.sum(axis=0).reshape(plan.dim) for part in parts)


def _shaped(plan: RowNormPlan, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return rows and vectors in the shapes that TMA copies."""
    rows = [x.reshape(plan.rows, *plan.row_shape) for x in arrays[: plan.sources]]
    return rows, [x.reshape(plan.row_shape) for x in arrays[plan.sources :]]


def _launch(
    plan: RowNormPlan,
    name: str,
    row: Callable[..., None],
    arrays: list[jax.Array],
    extra: list[jax.ShapeDtypeStruct],
    interpret: Any,
) -> tuple[jax.Array, ...]:
    def body(*refs: Any) -> None:
        kernel = LongRowKernel(plan, refs, extra=len(extra))
        kernel.run(functools.partial(row, kernel))

    rows = [jax.ShapeDtypeStruct((plan.rows, *plan.row_shape), jnp.dtype(plan.dtype))] * plan.results
    options = {"name": name, "programs": plan.programs, "lane_semantics": True, "interpret": interpret}
    found = launch(body, [*rows, *extra], **options)(*arrays)
    return *(x.reshape(plan.rows, plan.dim) for x in found[: plan.results]), *found[plan.results :]


class LongRowKernel:
    """The program of one block of threads, a single warpgroup.

    Attributes:
        plan: The launch.
        others: References of statistics and vectors.
        extra: References of the results beside rows.
        parts: The pieces of a row.
    """

    def __init__(self, plan: RowNormPlan, refs: tuple[Any, ...], *, extra: int) -> None:
        self.plan = plan
        ins = len(refs) - plan.results - extra
        self._sources, self.others = refs[: plan.sources], refs[plan.sources : ins]
        self._results, self.extra = refs[ins : ins + plan.results], refs[ins + plan.results :]
        part = (plan.chunk // plan.minor, plan.minor)
        self.parts = [pl.ds(i * part[0], part[0]) for i in range(plan.dim // plan.chunk)]
        # All accesses to a row use one layout: a thread loads only what it stored itself.
        self._layout = plgpu.Layout.WG_STRIDED(part, vec_size=min(4, plan.chunk // THREADS))
        self._zero = plgpu.layout_cast(jnp.zeros(part, jnp.float32), self._layout)

    def load(self, ref: Any, part: Any) -> Any:
        """Return a piece of a row, in float32."""
        return plgpu.load(ref.at[part], layout=self._layout).astype(jnp.float32)

    def mean(self, term: Callable[[Any], Any]) -> Any:
        """Return the mean over a row of `term(part)`."""
        total = self._zero
        for part in self.parts:
            total = total + term(part)
        return jnp.sum(total) * (1 / self.plan.dim)

    def weighted(self, values: Any, part: Any) -> Any:
        """Return a piece of a row, multiplied by the weight."""
        offset = self.plan.formula.weight
        if offset is None:
            return values
        weight = self.load(self.others[-2 if self.plan.formula.bias and not self.plan.backward else -1], part)
        return values * (weight + offset if offset else weight)

    def run(self, row: _Row) -> None:
        """Apply `row` to the rows of this block of threads, and write the sums over them."""
        plan = self.plan
        block = (plan.params.stages, plan.params.block_rows, *plan.row_shape)
        rows = [plgpu.SMEM(block, jnp.dtype(plan.dtype))] * (plan.sources + plan.results)
        sums = [plgpu.SMEM((plan.sums, *plan.row_shape), jnp.float32)] if plan.sums else []
        full = plgpu.Barrier(num_arrivals=plan.sources, num_barriers=plan.params.stages)
        pl.run_scoped(functools.partial(self._run, row), full, *rows, *sums)

    def _run(self, row: _Row, full: Any, *buffers: Any) -> None:
        plan, stages = self.plan, self.plan.params.stages
        ends = plan.sources, plan.sources + plan.results
        self._full, self._read, self._written = full, buffers[: ends[0]], buffers[ends[0] : ends[1]]
        self.sums = buffers[-1]
        self._number = lax.axis_index(PROGRAM)
        count = lax.div(plan.blocks - self._number + (plan.programs - 1), plan.programs)
        for i in range(plan.sums):
            for part in self.parts:
                self.sums[i, part] = self._zero
        for step in range(stages):
            # A program may have fewer blocks than stages, and must wait for every copy that it starts.
            pl.when(step < count)(functools.partial(self._fetch, jnp.int32(step)))

        @pl.loop(0, count)
        def _step(step: Any) -> None:
            self._compute(row, step)
            # The stage is empty: all threads finished reading it before the commit in `_compute`.
            pl.when(step + stages < count)(functools.partial(self._fetch, step + stages))

        plgpu.commit_smem()
        for i, result in enumerate(self.extra if plan.sums else ()):
            plgpu.copy_smem_to_gmem(self.sums.at[i], result.at[self._number])
        plgpu.wait_smem_to_gmem(0)

    def add(self, i: int, part: Any, values: Any) -> None:
        """Add a piece of a row to sum number `i`."""
        sums = self.sums.at[i]
        sums[part] = self.load(sums, part) + values

    def _rows(self, step: Any) -> Any:
        """Return the rows of a step."""
        size = self.plan.params.block_rows
        return pl.ds((self._number + step * self.plan.programs) * size, size)

    def _fetch(self, step: Any) -> None:
        stage = lax.rem(step, self.plan.params.stages)
        for source, buffer in zip(self._sources, self._read, strict=True):
            plgpu.copy_gmem_to_smem(source.at[self._rows(step)], buffer.at[stage], self._full.at[stage])

    def _compute(self, row: _Row, step: Any) -> None:
        plan = self.plan
        stage, rows = lax.rem(step, plan.params.stages), self._rows(step)
        plgpu.barrier_wait(self._full.at[stage])
        # Each step commits one group of copies: those that last used this stage's output buffers have read them.
        plgpu.wait_smem_to_gmem(plan.params.stages - 1, wait_read_only=True)

        @pl.loop(0, plan.params.block_rows)
        def _row(i: Any) -> None:
            row(rows.start + i, *([x.at[stage, i] for x in buffers] for buffers in (self._read, self._written)))

        plgpu.commit_smem()
        *first, last = zip(self._written, self._results, strict=True)
        for buffer, result in first:
            plgpu.copy_smem_to_gmem(buffer.at[stage], result.at[rows], commit_group=False)
        plgpu.copy_smem_to_gmem(last[0].at[stage], last[1].at[rows])


def _forward_row(kernel: LongRowKernel, number: Any, read: list[Any], written: list[Any]) -> None:
    formula, values = kernel.plan.formula, read[0]
    if formula.residual:
        # Read back after rounding: the rows to normalise are the sums that the kernel returns, as in plain JAX.
        values = written[1]
        for part in kernel.parts:
            values[part] = (kernel.load(read[0], part) + kernel.load(read[1], part)).astype(values.dtype)
    mean = kernel.mean(functools.partial(kernel.load, values)) if formula.centred else None

    def centred(part: Any) -> Any:
        x = kernel.load(values, part)
        return x if mean is None else x - mean

    scale = lax.rsqrt(kernel.mean(lambda part: centred(part) * centred(part)) + formula.eps)
    for part in kernel.parts:
        out = kernel.weighted(centred(part) * scale, part)
        out = out + kernel.load(kernel.others[-1], part) if formula.bias else out
        written[0][part] = out.astype(written[0].dtype)
    for ref, value in zip(kernel.extra, [scale] if mean is None else [mean, scale], strict=True):
        ref[number] = value


def _backward_row(kernel: LongRowKernel, number: Any, read: list[Any], written: list[Any]) -> None:
    formula = kernel.plan.formula
    mean, scale = (kernel.others[0][number] if formula.centred else None), kernel.others[formula.centred][number]

    def normal(part: Any) -> Any:
        x = kernel.load(read[0], part)
        return (x if mean is None else x - mean) * scale

    def dnormal(part: Any) -> Any:
        return kernel.weighted(kernel.load(read[1], part), part)

    along = kernel.mean(lambda part: dnormal(part) * normal(part))
    shift = kernel.mean(dnormal) if formula.centred else None
    for part in kernel.parts:
        dx = dnormal(part) - normal(part) * along
        dx = (dx if shift is None else dx - shift) * scale
        dx = dx + kernel.load(read[2], part) if formula.residual else dx
        written[0][part] = dx.astype(written[0].dtype)
        dout = kernel.load(read[1], part)
        if formula.weight is not None:
            kernel.add(0, part, dout * normal(part))
        if formula.bias:
            kernel.add(kernel.plan.sums - 1, part, dout)
