# SPDX-License-Identifier: Apache-2.0
"""Row norms for short rows: one warpgroup holds several rows in registers, eight lanes to a row.

A lane loads 16 bytes of a row at a time, or two such pieces, and a sum over a row takes three exchanges between lanes.
The kernel uses no shared memory: other blocks of threads work while one waits for its rows. In the backward each lane
sums the gradients of weight and bias over its rows, and XLA adds up the sums of all lanes in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat
from ejkernel.kernels._hopper.launch import PROGRAM, launch
from ejkernel.kernels._hopper.memory import plgpu

from .plan import SLAB, RowNormPlan

_Slab = Callable[[Any, list[Any], tuple[Any, ...]], tuple[Any, ...]]  # of its row numbers, its rows, the sums so far


def normalize(plan: RowNormPlan, arrays: Sequence[jax.Array], *, interpret: Any = None) -> tuple[jax.Array, ...]:
    """Run the forward; see `shared_memory.normalize`."""
    rows = [jax.ShapeDtypeStruct((plan.rows, plan.dim), jnp.dtype(plan.dtype))] * plan.results
    stats = [jax.ShapeDtypeStruct((plan.rows,), jnp.float32)] * (1 + plan.formula.centred)
    return _launch(plan, "short_row_norm_forward", _forward_slab, arrays, [*rows, *stats], interpret)


def gradients(
    plan: RowNormPlan, arrays: Sequence[jax.Array], stats: Sequence[jax.Array], *, interpret: Any = None
) -> tuple[jax.Array, ...]:
    """Run the backward; see `shared_memory.gradients`."""
    rows = jax.ShapeDtypeStruct((plan.rows, plan.dim), jnp.dtype(plan.dtype))
    sums = [jax.ShapeDtypeStruct((plan.programs, SLAB, plan.dim), jnp.float32)] * plan.sums
    ins = [*arrays[: plan.sources], *stats, *arrays[plan.sources :]]
    dx, *parts = _launch(plan, "short_row_norm_backward", _backward_slab, ins, [rows, *sums], interpret)
    return dx, *(part.sum(axis=(0, 1)) for part in parts)


def _launch(
    plan: RowNormPlan,
    name: str,
    slab: Callable[..., Any],
    arrays: Sequence[jax.Array],
    out_type: list[jax.ShapeDtypeStruct],
    interpret: Any,
) -> tuple[jax.Array, ...]:
    def body(*refs: Any) -> None:
        kernel = ShortRowKernel(plan, refs[: len(arrays)], refs[len(arrays) :])
        kernel.run(functools.partial(slab, kernel))

    options = {"name": name, "programs": plan.programs, "lane_semantics": True, "interpret": interpret}
    found: tuple[jax.Array, ...] = launch(body, out_type, **options)(*arrays)
    return found


class ShortRowKernel:
    """The program of one block of threads, a single warpgroup; it works on slabs of `SLAB` rows.

    Attributes:
        plan: The launch.
        others: References of statistics and vectors.
        written: References of the results.
        layout: The distribution of a slab over lanes: four rows per warp at a time, eight elements of a row per lane.
    """

    def __init__(self, plan: RowNormPlan, read: Sequence[Any], written: Sequence[Any]) -> None:
        self.plan, self.written = plan, written
        self._sources, self.others = read[: plan.sources], read[plan.sources :]
        tiles = plgpu.Tiling(((SLAB, 64), (4, 64), (8,)))
        self.layout = plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)

    def run(self, slab: _Slab) -> None:
        """Apply `slab` to the rows of this block of threads, and write the sums over them."""
        plan, number = self.plan, lax.axis_index(PROGRAM)
        zeros = plgpu.layout_cast(jnp.zeros((SLAB, plan.dim), jnp.float32), self.layout)
        self.vectors = [self._vector(ref) for ref in self.others[plan.stats :]]

        def step(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            first = (number + i * plan.programs) * plan.params.block_rows
            slabs = [pl.ds(first + start, SLAB) for start in range(0, plan.params.block_rows, SLAB)]
            read = [[self._load(ref.at[at]) for ref in self._sources] for at in slabs]  # all loads before any use
            for at, rows in zip(slabs, read, strict=True):
                sums = slab(at, [x.astype(jnp.float32) for x in rows], sums)
            return sums

        count = lax.div(plan.blocks - number + (plan.programs - 1), plan.programs)
        sums = lax.fori_loop(0, count, step, (zeros,) * plan.sums)
        for ref, total in zip(self.written[plan.results :] if plan.sums else (), sums, strict=True):
            compat.store_as_it_is(ref.at[number], total)

    def stat(self, index: int, at: Any) -> Any:
        """Return a statistic of each row, broadcast along the row."""
        ref = self.others[index]
        return self._along(plgpu.load(ref.at[at], layout=self.layout.reduce(1), optimized=False), 0)

    def mean(self, values: Any) -> Any:
        """Return the mean of each row."""
        return jnp.sum(values, axis=1) * (1 / self.plan.dim)

    def spread(self, by_row: Any) -> Any:
        """Return one number per row, broadcast along the row."""
        return self._along(by_row, 0)

    def weighted(self, values: Any) -> Any:
        """Return rows multiplied by the weight."""
        offset = self.plan.formula.weight
        if offset is None:
            return values
        return values * (self.vectors[0] + offset if offset else self.vectors[0])

    def _load(self, ref: Any) -> Any:
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def _vector(self, ref: Any) -> Any:
        return self._along(plgpu.load(ref, layout=self.layout.reduce(0), optimized=False).astype(jnp.float32), 1)

    def _along(self, values: Any, axis: int) -> Any:
        return plgpu.layout_cast(lax.broadcast_in_dim(values, (SLAB, self.plan.dim), (axis,)), self.layout)


def _forward_slab(kernel: ShortRowKernel, at: Any, rows: list[Any], sums: tuple[Any, ...]) -> tuple[Any, ...]:
    formula, x = kernel.plan.formula, rows[0]
    out, *extra = kernel.written
    if formula.residual:
        total, *extra = extra
        rounded = (x + rows[1]).astype(total.dtype)
        compat.store_as_it_is(total.at[at], rounded)
        x = rounded.astype(jnp.float32)
    stats = []
    if formula.centred:
        stats.append(kernel.mean(x))
        x = x - kernel.spread(stats[0])
    stats.append(lax.rsqrt(kernel.mean(x * x) + formula.eps))
    found = kernel.weighted(x * kernel.spread(stats[-1]))
    found = found + kernel.vectors[-1] if formula.bias else found
    compat.store_as_it_is(out.at[at], found.astype(out.dtype))
    for ref, values in zip(extra, stats, strict=True):
        compat.store_as_it_is(ref.at[at], values)
    return sums


def _backward_slab(kernel: ShortRowKernel, at: Any, rows: list[Any], sums: tuple[Any, ...]) -> tuple[Any, ...]:
    formula, (x, dout, *others) = kernel.plan.formula, rows
    scale = kernel.stat(formula.centred, at)
    normal = (x - kernel.stat(0, at) if formula.centred else x) * scale
    dnormal = kernel.weighted(dout)
    dx = dnormal - normal * kernel.spread(kernel.mean(dnormal * normal))
    dx = (dx - kernel.spread(kernel.mean(dnormal)) if formula.centred else dx) * scale
    dx = dx + others[0] if formula.residual else dx
    compat.store_as_it_is(kernel.written[0].at[at], dx.astype(kernel.written[0].dtype))
    terms = ([] if formula.weight is None else [dout * normal]) + [dout] * formula.bias
    return tuple(total + term for total, term in zip(sums, terms, strict=True))
