# SPDX-License-Identifier: Apache-2.0
"""The formulas of the row norms, for kernels that hold a row in shared memory or several rows in registers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from ejkernel.kernels._hopper.launch import PROGRAM

from .plan import RowNormPlan

# Of the number of a row, or the slice of a slab; the rows that are read; the rows that are written.
Rows = Callable[[Any, Sequence[Any], Sequence[Any]], None]
Term = Callable[[Any], Any]  # of a piece of a row


class RowKernel:
    """The program of one block of threads, a single warpgroup; subclasses load and store rows.

    Attributes:
        plan: The launch.
        parts: The pieces of a row that are in registers at once.
        sources, results: References of the rows in global memory.
        stats, vectors: References of the statistics of the rows, and of weight and bias.
        extra: References of the results beside rows: statistics, or sums over rows.
        number: The number of this block of threads.
        memory_types: `memory_types()` returns the types of shared memory and barriers.
        over_rows: `over_rows(compute, memory)` applies `compute` to the rows of this block of threads.
        load: `load(row, part)` returns a piece of a row in float32.
        store: `store(row, part, values)` rounds and stores a piece of a row, which can then be loaded.
        vector: `vector(index, part)` returns a piece of the weight (0) or the bias (-1) in float32.
        hold: `hold(term)` returns `term`, computed once if whole rows are in registers.
        mean: `mean(term)` returns the mean of `term(part)` over each row.
        spread: `spread(by_row)` broadcasts one number per row along the row.
        row_stats: `row_stats(at)` returns the mean (or `None`) and the scale of each row, broadcast along the row.
        store_stat: `store_stat(ref, at, by_row)` stores one number per row.
        add: `add(index, part, values)` adds a piece of a row to a sum over rows.
    """

    name: str
    parts: Sequence[Any]
    memory_types: Callable[[], Any]
    over_rows: Callable[[Rows, Any], None]
    load: Callable[[Any, Any], Any]
    store: Callable[[Any, Any, Any], None]
    vector: Callable[[int, Any], Any]
    hold: Callable[[Term], Term]
    mean: Callable[[Term], Any]
    spread: Callable[[Any], Any]
    row_stats: Callable[[Any], tuple[Any, Any]]
    store_stat: Callable[[Any, Any, Any], None]
    add: Callable[[int, Any, Any], None]

    def __init__(self, plan: RowNormPlan) -> None:
        self.plan = plan

    def run(self, arrays: Sequence[Any], results: Sequence[Any], memory: Any) -> None:
        """Compute the rows of this block of threads, and write the sums over them."""
        plan = self.plan
        ends = plan.sources, plan.sources + plan.stats
        self.sources, self.stats, self.vectors = arrays[: ends[0]], arrays[slice(*ends)], arrays[ends[1] :]
        self.results, self.extra = results[: plan.results], results[plan.results :]
        self.number = lax.axis_index(PROGRAM)
        self.over_rows(self._backward if plan.backward else self._forward, memory)

    def count(self) -> Any:
        """Return how many blocks of rows this block of threads computes."""
        return lax.div(self.plan.blocks - self.number + (self.plan.programs - 1), self.plan.programs)

    def _weighted(self, values: Any, part: Any) -> Any:
        offset = self.plan.formula.weight
        if offset is None:
            return values
        weight = self.vector(0, part)
        return values * (weight + offset if offset else weight)

    def _to_normalise(self, read: Sequence[Any], written: Sequence[Any]) -> Any:
        """Return the row to normalise; with a residual, store the sum first and return it."""
        if not self.plan.formula.residual:
            return read[0]
        # Rounded first: the rows to normalise are the sums that the kernel returns, as in plain JAX.
        for part in self.parts:
            self.store(written[1], part, self.load(read[0], part) + self.load(read[1], part))
        return written[1]

    def _forward(self, at: Any, read: Sequence[Any], written: Sequence[Any]) -> None:
        formula, row = self.plan.formula, self._to_normalise(read, written)
        mean = self.mean(functools.partial(self.load, row)) if formula.centred else None

        @self.hold
        def centred(part: Any) -> Any:
            x = self.load(row, part)
            return x if mean is None else x - self.spread(mean)

        scale = lax.rsqrt(self.mean(lambda part: centred(part) * centred(part)) + formula.eps)
        for part in self.parts:
            out = self._weighted(centred(part) * self.spread(scale), part)
            self.store(written[0], part, out + self.vector(-1, part) if formula.bias else out)
        for ref, value in zip(self.extra, [scale] if mean is None else [mean, scale], strict=True):
            self.store_stat(ref, at, value)

    def _backward(self, at: Any, read: Sequence[Any], written: Sequence[Any]) -> None:
        formula, (mean, scale) = self.plan.formula, self.row_stats(at)

        @self.hold
        def normal(part: Any) -> Any:
            x = self.load(read[0], part)
            return (x if mean is None else x - mean) * scale

        @self.hold
        def dnormal(part: Any) -> Any:
            return self._weighted(self.load(read[1], part), part)

        along = self.mean(lambda part: dnormal(part) * normal(part))
        across = self.hold(lambda part: dnormal(part) - normal(part) * self.spread(along))
        shift = self.mean(dnormal) if formula.centred else None
        for part in self.parts:
            dx = (across(part) if shift is None else across(part) - self.spread(shift)) * scale
            self.store(written[0], part, dx + self.load(read[2], part) if formula.residual else dx)
            dout = self.load(read[1], part)
            if formula.weight is not None:
                self.add(0, part, dout * normal(part))
            if formula.bias:
                self.add(self.plan.sums - 1, part, dout)
