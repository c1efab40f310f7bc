# SPDX-License-Identifier: Apache-2.0
"""The second kernel of latent attention: the sum of the shares of items that several groups computed."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat
from ejkernel.kernels._hopper.backend import Backend, backend_for
from ejkernel.kernels._hopper.device import quotient, remainder
from ejkernel.kernels._hopper.launch import PROGRAM, launch, plgpu, tiled

from .latent_memory import BY_ROW, LAYOUT, by_row, finished, group_work, item_of, load_rows
from .latent_plan import REST, ROWS, LatentPlan
from .memory import Item, Work

_LOWEST = -1e30
_WIDTH = REST  # columns of one program
_TOGETHER = 2  # shares that are loaded at once


class Sums(NamedTuple):
    """Arrays in global memory, as in `Inputs` and `Results`; the output and the log-sum-exp are written in place."""

    tiles: Any
    programs: Any
    shares: Any
    share_lse: Any
    sinks: Any
    k_scale: Any
    out: Any
    lse: Any


class _State(NamedTuple):
    acc: Any  # [ROWS, _WIDTH]
    top: Any  # [ROWS]
    total: Any  # [ROWS]


def run(plan: LatentPlan, given: Sums, interpret: Any = None) -> None:
    """Write the sums into the references `given.out` and `given.lse`."""
    pieces, backend = plan.value_dim // _WIDTH, backend_for(interpret)
    launch(
        lambda given, results, memory: _Program(plan, given, backend, memory, pieces).run(),
        given,
        [jax.ShapeDtypeStruct((1,), jnp.int32)],  # a kernel needs a result of its own
        name="latent_attention_sums",
        programs=plan.programs * pieces,
        memory=tiled((ROWS, _WIDTH), plan.dtype),
        interpret=interpret,
    )


class _Program:
    """Some columns and heads of the item that begins in one group and ends in another."""

    def __init__(self, plan: LatentPlan, given: Sums, backend: Backend, buffer: Any, pieces: int) -> None:
        program = lax.axis_index(PROGRAM)
        self.plan, self.given, self.backend, self.buffer = plan, given, backend, buffer
        rest = quotient(program, pieces)
        self.group, self.part = quotient(rest, plan.parts), remainder(rest, plan.parts)
        piece = remainder(program, pieces)
        self.is_first, self.columns = piece == 0, pl.ds(piece * _WIDTH, _WIDTH)

    def run(self) -> None:
        """Sum the shares."""
        work = group_work(self.plan, self.given.programs, self.group)
        item = item_of(self.given.tiles, jnp.maximum(work.last_item, 0))

        @pl.when((work.last_item >= 0) & work.begins(item) & jnp.logical_not(work.ends(item)))
        def _sum() -> None:
            self._sum(item, work)

    def _sum(self, item: Item, work: Work) -> None:
        missing = item.blocks - work.end_block
        count = 1 + lax.div(missing + work.share - 1, work.share)
        state = _State(
            plgpu.layout_cast(jnp.full((ROWS, _WIDTH), 0, jnp.float32), LAYOUT),
            plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), BY_ROW),
            plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), BY_ROW),
        )
        rounds = quotient(count + _TOGETHER - 1, _TOGETHER)
        state = lax.fori_loop(0, rounds, functools.partial(self._add, count), state)
        out, lse = finished(self.given, self.part, *state)
        self.buffer[...] = out.astype(self.plan.dtype)
        plgpu.commit_smem()
        heads = pl.ds(self.part * self.plan.rows, self.plan.rows)
        target = self.given.out.at[item.token, heads, self.columns]
        self.backend.store_to_memory(self.buffer.at[pl.ds(0, self.plan.rows)], target)

        @pl.when(self.is_first)
        def _store() -> None:
            compat.store_as_it_is(self.given.lse.at[item.token, pl.ds(self.part * ROWS, ROWS)], lse)

        plgpu.wait_smem_to_gmem(0)

    def _add(self, count: Any, index: Any, state: _State) -> _State:
        """Return the sums with some more shares."""
        shares, lses, rows = [], [], pl.ds(self.part * ROWS, ROWS)
        for i in range(_TOGETHER):
            step = index * _TOGETHER + i
            own = jnp.minimum(step, count - 1)
            # The first group left the share of its last item, the others that of their first.
            slot = 2 * (self.group + own) + (own == 0).astype(jnp.int32)
            lse = load_rows(self.given.share_lse.at[slot, rows])
            lses.append(lse + jnp.where(step < count, 0.0, -jnp.inf))
            numbers = [self.given.shares.at[slot, number, rows, self.columns] for number in (0, 1)]
            high, low = (plgpu.load(x, layout=LAYOUT, optimized=False).astype(jnp.float32) for x in numbers)
            shares.append(high + low)
        top = functools.reduce(jnp.maximum, lses, state.top)
        decay = jnp.exp2(state.top - top)
        acc, total = state.acc * by_row(decay, state.acc.shape), state.total * decay
        for share, lse in zip(shares, lses, strict=True):
            weight = jnp.exp2(lse - top)
            acc, total = acc + share * by_row(weight, acc.shape), total + weight
        return _State(acc, top, total)
