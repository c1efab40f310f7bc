# SPDX-License-Identifier: Apache-2.0
"""The kernels: a warpgroup has a row to itself, in shared memory, and goes over it piece by piece as often as it needs.

So a row is read from memory once, whatever is computed of it, and few of its elements are in registers at a time.
Blocks of rows are copied ahead of the work, and results are written while it goes on. In a backward each block of
threads sums the gradients of weight and bias over its own rows, in shared memory; the sums of all are added up outside,
in one order, so that gradients repeat bit by bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from .plan import THREADS, RowNormPlan

plgpu: Any = mosaic_gpu  # its annotations differ between versions

_Row = Callable[[Any, list[Any], list[Any]], None]  # of its number, and of what is read and written of it


def normalize(plan: RowNormPlan, arrays: Sequence[jax.Array], *, interpret: Any = None) -> tuple[jax.Array, ...]:
    """Run the forward.

    Args:
        plan: The launch.
        arrays: The rows; what is added to them, if it is in the formula; the weight and the bias, if they are.
        interpret: How to simulate the kernel on a CPU; `None`: run it on a GPU.

    Returns:
        The normalised rows; the sums that they are of, if the formula has them; the mean of each, if it is taken off;
        and `1 / rms` or `1 / standard deviation` of each, in float32.
    """
    stats = [jax.ShapeDtypeStruct((plan.rows,), jnp.float32)] * (1 + plan.formula.centred)

    def row_norm_forward(*refs: Any) -> None:
        program = _Program(plan, refs, beside=len(stats))
        program.run(functools.partial(_forward_row, program))

    rows, vectors = _shaped(plan, arrays)
    return _launch(plan, row_norm_forward, [*rows, *vectors], stats, interpret)


def gradients(
    plan: RowNormPlan, arrays: Sequence[jax.Array], stats: Sequence[jax.Array], *, interpret: Any = None
) -> tuple[jax.Array, ...]:
    """Run the backward.

    Args:
        plan: The launch.
        arrays: The rows that were normalised, the gradient of the result, and that of the sums, if the formula has
            them; then the weight, if there is one.
        stats: What the forward says of each row.
        interpret: As for `normalize`.

    Returns:
        The gradient of the rows, then those of weight and bias, if there are any, in float32.
    """
    sums = [jax.ShapeDtypeStruct((plan.programs, *plan.row_shape), jnp.float32)] * plan.sums

    def row_norm_backward(*refs: Any) -> None:
        program = _Program(plan, refs, beside=len(sums))
        program.run(functools.partial(_backward_row, program))

    rows, vectors = _shaped(plan, arrays)
    dx, *parts = _launch(plan, row_norm_backward, [*rows, *stats, *vectors], sums, interpret)
    return dx, *(part.sum(axis=0).reshape(plan.dim) for part in parts)


def _shaped(plan: RowNormPlan, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the arrays of rows, and the vectors, as copies take them."""
    rows = [x.reshape(plan.rows, *plan.row_shape) for x in arrays[: plan.sources]]
    return rows, [x.reshape(plan.row_shape) for x in arrays[plan.sources :]]


def _launch(
    plan: RowNormPlan,
    body: Callable[..., None],
    arrays: list[jax.Array],
    beside: list[jax.ShapeDtypeStruct],
    interpret: Any,
) -> tuple[jax.Array, ...]:
    written = [jax.ShapeDtypeStruct((plan.rows, *plan.row_shape), jnp.dtype(plan.dtype))] * plan.results
    kernel = plgpu.kernel(
        body,
        out_type=[*written, *beside],
        grid=(plan.programs,),
        grid_names=("program",),
        # A piece of a row has one layout throughout: what a thread stores it alone loads, and needs none of the
        # barriers that Pallas would put around every access.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    found = kernel(*arrays)
    return *(x.reshape(plan.rows, plan.dim) for x in found[: plan.results]), *found[plan.results :]


class _Program:
    """What one block of threads does.

    Attributes:
        plan: The launch.
        others: References of what is read beside rows.
        beside: References of what is written beside rows.
        parts: The pieces of a row.
    """

    def __init__(self, plan: RowNormPlan, refs: tuple[Any, ...], *, beside: int) -> None:
        self.plan = plan
        ins = len(refs) - plan.results - beside
        self._sources, self.others = refs[: plan.sources], refs[plan.sources : ins]
        self._results, self.beside = refs[ins : ins + plan.results], refs[ins + plan.results :]
        part = (plan.chunk // plan.minor, plan.minor)
        self.parts = [pl.ds(i * part[0], part[0]) for i in range(plan.dim // plan.chunk)]
        self._layout = plgpu.Layout.WG_STRIDED(part, vec_size=min(4, plan.chunk // THREADS))
        self._zero = plgpu.layout_cast(jnp.zeros(part, jnp.float32), self._layout)

    def load(self, ref: Any, part: Any) -> Any:
        """Return a piece of a row, in float32."""
        return plgpu.load(ref.at[part], layout=self._layout).astype(jnp.float32)

    def mean(self, term: Callable[[Any], Any]) -> Any:
        """Return the mean over a row of what `term` returns of each of its pieces."""
        total = self._zero
        for part in self.parts:
            total = total + term(part)
        return jnp.sum(total) * (1 / self.plan.dim)

    def weighted(self, values: Any, part: Any) -> Any:
        """Return a piece of a row, times the weight's."""
        offset = self.plan.formula.weight
        if offset is None:
            return values
        weight = self.load(self.others[-2 if self.plan.formula.bias and not self.plan.backward else -1], part)
        return values * (weight + offset if offset else weight)

    def run(self, row: _Row) -> None:
        """Compute this program's rows with `row`, and write what is summed over them."""
        plan = self.plan
        block = (plan.params.stages, plan.params.block_rows, *plan.row_shape)
        rows = [plgpu.SMEM(block, jnp.dtype(plan.dtype))] * (plan.sources + plan.results)
        sums = [plgpu.SMEM((plan.sums, *plan.row_shape), jnp.float32)] if plan.sums else []
        barrier = plgpu.Barrier(num_arrivals=plan.sources, num_barriers=plan.params.stages)
        pl.run_scoped(functools.partial(self._run, row), barrier, *rows, *sums)

    def _run(self, row: _Row, full: Any, *buffers: Any) -> None:
        plan, stages = self.plan, self.plan.params.stages
        ends = plan.sources, plan.sources + plan.results
        self._full, self._read, self._written = full, buffers[: ends[0]], buffers[ends[0] : ends[1]]
        self.sums = buffers[-1]
        self._number = lax.axis_index("program")
        count = lax.div(plan.blocks - self._number + (plan.programs - 1), plan.programs)
        for i in range(plan.sums):
            for part in self.parts:
                self.sums[i, part] = self._zero
        for step in range(stages):
            # A program may have fewer blocks than stages, and each copy has to be waited for.
            pl.when(step < count)(functools.partial(self._fetch, jnp.int32(step)))

        @pl.loop(0, count)
        def _step(step: Any) -> None:
            self._compute(row, step)
            # The stage is free: at the commit in `_compute` all threads have read what they need of it.
            pl.when(step + stages < count)(functools.partial(self._fetch, step + stages))

        plgpu.commit_smem()
        for i, result in enumerate(self.beside if plan.sums else ()):
            plgpu.copy_smem_to_gmem(self.sums.at[i], result.at[self._number])
        plgpu.wait_smem_to_gmem(0)

    def add(self, i: int, part: Any, values: Any) -> None:
        """Add a piece of a row to that of the sums of that number."""
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
        # One group of copies a step: the results that were last in this stage's buffers have been read.
        plgpu.wait_smem_to_gmem(plan.params.stages - 1, wait_read_only=True)

        @pl.loop(0, plan.params.block_rows)
        def _row(i: Any) -> None:
            row(rows.start + i, *([x.at[stage, i] for x in buffers] for buffers in (self._read, self._written)))

        plgpu.commit_smem()
        *first, last = zip(self._written, self._results, strict=True)
        for buffer, result in first:
            plgpu.copy_smem_to_gmem(buffer.at[stage], result.at[rows], commit_group=False)
        plgpu.copy_smem_to_gmem(last[0].at[stage], last[1].at[rows])


def _forward_row(program: _Program, number: Any, read: list[Any], written: list[Any]) -> None:
    formula, values = program.plan.formula, read[0]
    if formula.residual:
        # Read back as it is rounded: what is normalised is the sum that is returned, as in plain JAX.
        values = written[1]
        for part in program.parts:
            values[part] = (program.load(read[0], part) + program.load(read[1], part)).astype(values.dtype)
    mean = program.mean(functools.partial(program.load, values)) if formula.centred else None

    def centred(part: Any) -> Any:
        x = program.load(values, part)
        return x if mean is None else x - mean

    scale = lax.rsqrt(program.mean(lambda part: centred(part) * centred(part)) + formula.eps)
    for part in program.parts:
        out = program.weighted(centred(part) * scale, part)
        out = out + program.load(program.others[-1], part) if formula.bias else out
        written[0][part] = out.astype(written[0].dtype)
    for ref, value in zip(program.beside, [scale] if mean is None else [mean, scale], strict=True):
        ref[number] = value


def _backward_row(program: _Program, number: Any, read: list[Any], written: list[Any]) -> None:
    formula = program.plan.formula
    mean, scale = (program.others[0][number] if formula.centred else None), program.others[formula.centred][number]

    def normal(part: Any) -> Any:
        x = program.load(read[0], part)
        return (x if mean is None else x - mean) * scale

    def dnormal(part: Any) -> Any:
        return program.weighted(program.load(read[1], part), part)

    along = program.mean(lambda part: dnormal(part) * normal(part))
    shift = program.mean(dnormal) if formula.centred else None
    for part in program.parts:
        dx = dnormal(part) - normal(part) * along
        dx = (dx if shift is None else dx - shift) * scale
        dx = dx + program.load(read[2], part) if formula.residual else dx
        written[0][part] = dx.astype(written[0].dtype)
        dout = program.load(read[1], part)
        if formula.weight is not None:
            program.add(0, part, dout * normal(part))
        if formula.bias:
            program.add(program.plan.sums - 1, part, dout)
