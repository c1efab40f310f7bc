# SPDX-License-Identifier: Apache-2.0
"""The kernels for short rows: a warpgroup has several of them in registers, eight lanes a row.

A lane reads 16 bytes of a row at a time, or two such pieces, and a row's sum takes three exchanges between lanes. There
is no shared memory: other blocks of threads work while one waits for its rows. In a backward each lane sums gradients
of weight and bias over its own rows, and what all lanes have is added up outside, in one order.
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

from ejkernel import compat

from .plan import SLAB, RowNormPlan

plgpu: Any = mosaic_gpu  # its annotations differ between versions

_Slab = Callable[[Any, list[Any], tuple[Any, ...]], tuple[Any, ...]]  # of its place, its rows, and sums up to it


def normalize(plan: RowNormPlan, arrays: Sequence[jax.Array], *, interpret: Any = None) -> tuple[jax.Array, ...]:
    """Run the forward; see `machine.normalize`."""
    rows = [jax.ShapeDtypeStruct((plan.rows, plan.dim), jnp.dtype(plan.dtype))] * plan.results
    stats = [jax.ShapeDtypeStruct((plan.rows,), jnp.float32)] * (1 + plan.formula.centred)

    def short_row_norm_forward(*refs: Any) -> None:
        program = _Program(plan, refs[: len(arrays)], refs[len(arrays) :])
        program.run(functools.partial(_forward_slab, program))

    found: tuple[jax.Array, ...] = _launched(plan, short_row_norm_forward, [*rows, *stats], interpret)(*arrays)
    return found


def gradients(
    plan: RowNormPlan, arrays: Sequence[jax.Array], stats: Sequence[jax.Array], *, interpret: Any = None
) -> tuple[jax.Array, ...]:
    """Run the backward; see `machine.gradients`."""
    rows = jax.ShapeDtypeStruct((plan.rows, plan.dim), jnp.dtype(plan.dtype))
    sums = [jax.ShapeDtypeStruct((plan.programs, SLAB, plan.dim), jnp.float32)] * plan.sums
    ins = [*arrays[: plan.sources], *stats, *arrays[plan.sources :]]

    def short_row_norm_backward(*refs: Any) -> None:
        program = _Program(plan, refs[: len(ins)], refs[len(ins) :])
        program.run(functools.partial(_backward_slab, program))

    dx, *parts = _launched(plan, short_row_norm_backward, [rows, *sums], interpret)(*ins)
    return dx, *(part.sum(axis=(0, 1)) for part in parts)


def _launched(
    plan: RowNormPlan, body: Callable[..., None], out_type: list[jax.ShapeDtypeStruct], interpret: Any
) -> Callable[..., Any]:
    launched: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(plan.programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    return launched


class _Program:
    """What one block of threads does.

    Attributes:
        plan: The launch.
        others: References of what is read beside rows.
        written: References of what is written.
        layout: Which lane has which element of a slab: four rows a warp at a time, eight elements of a row a lane.
    """

    def __init__(self, plan: RowNormPlan, read: Sequence[Any], written: Sequence[Any]) -> None:
        self.plan, self.written = plan, written
        self._sources, self.others = read[: plan.sources], read[plan.sources :]
        tiles = plgpu.Tiling(((SLAB, 64), (4, 64), (8,)))
        self.layout = plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)

    def run(self, slab: _Slab) -> None:
        """Compute this program's blocks of rows, slab by slab, and write what is summed over them."""
        plan, number = self.plan, lax.axis_index("program")
        zeros = plgpu.layout_cast(jnp.zeros((SLAB, plan.dim), jnp.float32), self.layout)
        self.vectors = [self._vector(ref) for ref in self.others[plan.stats :]]

        def step(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            first = (number + i * plan.programs) * plan.params.block_rows
            places = [pl.ds(first + start, SLAB) for start in range(0, plan.params.block_rows, SLAB)]
            read = [[self._load(ref.at[at]) for ref in self._sources] for at in places]  # all before any is needed
            for at, rows in zip(places, read, strict=True):
                sums = slab(at, [x.astype(jnp.float32) for x in rows], sums)
            return sums

        count = lax.div(plan.blocks - number + (plan.programs - 1), plan.programs)
        sums = lax.fori_loop(0, count, step, (zeros,) * plan.sums)
        for ref, total in zip(self.written[plan.results :] if plan.sums else (), sums, strict=True):
            compat.store_as_it_is(ref.at[number], total)

    def stat(self, index: int, at: Any) -> Any:
        """Return what is known of each row, along its row."""
        ref = self.others[index]
        return self._along(plgpu.load(ref.at[at], layout=self.layout.reduce(1), optimized=False), 0)

    def mean(self, values: Any) -> Any:
        """Return the mean over each row."""
        return jnp.sum(values, axis=1) * (1 / self.plan.dim)

    def spread(self, by_row: Any) -> Any:
        """Return a number of each row, along its row."""
        return self._along(by_row, 0)

    def weighted(self, values: Any) -> Any:
        """Return rows times the weight."""
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


def _forward_slab(program: _Program, at: Any, rows: list[Any], sums: tuple[Any, ...]) -> tuple[Any, ...]:
    formula, x = program.plan.formula, rows[0]
    out, *beside = program.written
    if formula.residual:
        total, *beside = beside
        rounded = (x + rows[1]).astype(total.dtype)
        compat.store_as_it_is(total.at[at], rounded)
        x = rounded.astype(jnp.float32)
    stats = []
    if formula.centred:
        stats.append(program.mean(x))
        x = x - program.spread(stats[0])
    stats.append(lax.rsqrt(program.mean(x * x) + formula.eps))
    found = program.weighted(x * program.spread(stats[-1]))
    found = found + program.vectors[-1] if formula.bias else found
    compat.store_as_it_is(out.at[at], found.astype(out.dtype))
    for ref, values in zip(beside, stats, strict=True):
        compat.store_as_it_is(ref.at[at], values)
    return sums


def _backward_slab(program: _Program, at: Any, rows: list[Any], sums: tuple[Any, ...]) -> tuple[Any, ...]:
    formula, (x, dout, *others) = program.plan.formula, rows
    scale = program.stat(formula.centred, at)
    normal = (x - program.stat(0, at) if formula.centred else x) * scale
    dnormal = program.weighted(dout)
    dx = dnormal - normal * program.spread(program.mean(dnormal * normal))
    dx = (dx - program.spread(program.mean(dnormal)) if formula.centred else dx) * scale
    dx = dx + others[0] if formula.residual else dx
    compat.store_as_it_is(program.written[0].at[at], dx.astype(program.written[0].dtype))
    terms = ([] if formula.weight is None else [dout * normal]) + [dout] * formula.bias
    return tuple(total + term for total, term in zip(sums, terms, strict=True))
