# SPDX-License-Identifier: Apache-2.0
"""The second kernel: the sum of the shares of items that several programs computed."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.backend import Backend, backend_for
from ejkernel.kernels._hopper.device import quotient
from ejkernel.kernels._hopper.launch import PROGRAM, launch, plgpu

from .memory import BY_ROW, LAYOUT, Item, Outputs, Sums, TileStore, Work, across, item_of, piece_types
from .plan import LaunchPlan

_LOWEST = -1e30


class _State(NamedTuple):
    acc: Any  # [head_dim, rows]
    top: Any  # [rows]
    total: Any  # [rows]


def run(plan: LaunchPlan, given: Sums, interpret: Any = None) -> None:
    """Write the sums into the references `given.out` and `given.lse`."""
    kernel = _Kernel(plan, backend_for(interpret))
    launch(
        lambda given, results, memory: kernel.run(given, memory),
        given,
        [jax.ShapeDtypeStruct((1,), jnp.int32)],  # a kernel needs a result of its own
        name="paged_attention_sums",
        programs=plan.programs,
        memory=piece_types(kernel.backend, (plan.pieces, plan.rows), plan.dtype),
        interpret=interpret,
    )


class _Kernel:
    """One program sums the item that begins in the program of the same number and ends in another."""

    def __init__(self, plan: LaunchPlan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend
        self.together = max(1, 64 // plan.rows)  # shares that are loaded at once

    def run(self, given: Sums, buffer: Any) -> None:
        """Sum one item's shares."""
        self.given, self.program = given, lax.axis_index(PROGRAM)
        work = Work.of(given.programs, self.program)
        item = item_of(self.plan, given.tiles, jnp.maximum(work.last_item, 0))

        @pl.when((work.last_item >= 0) & work.begins(item) & jnp.logical_not(work.ends(item)))
        def _sum() -> None:
            self._sum(item, work, buffer)

    def _sum(self, item: Item, work: Work, buffer: Any) -> None:
        plan = self.plan
        missing = item.blocks - work.end_block
        count = 1 + lax.div(missing + work.share - 1, work.share)
        state = _State(
            plgpu.layout_cast(jnp.full((plan.head_dim, plan.rows), 0, jnp.float32), LAYOUT),
            plgpu.layout_cast(jnp.full((plan.rows,), _LOWEST, jnp.float32), BY_ROW),
            plgpu.layout_cast(jnp.full((plan.rows,), 0, jnp.float32), BY_ROW),
        )
        rounds = quotient(count + self.together - 1, self.together)
        state = lax.fori_loop(0, rounds, functools.partial(self._add, count), state)
        outputs = Outputs(self.given.out, self.given.lse)
        TileStore(plan, self.backend, self.given, outputs, buffer).store(item, (state.acc,), state.top, state.total)
        plgpu.wait_smem_to_gmem(0)

    def _add(self, count: Any, index: Any, state: _State) -> _State:
        """Return the sums with some more shares."""
        shares, lses = [], []
        for i in range(self.together):
            number = index * self.together + i
            own = jnp.minimum(number, count - 1)
            # The first program left the share of its last item, the others that of their first.
            slot = 2 * (self.program + own) + (own == 0).astype(jnp.int32)
            lse = plgpu.load(self.given.share_lse.at[slot], layout=BY_ROW, optimized=False)
            lses.append(lse + jnp.where(number < count, 0.0, -jnp.inf))
            shares.append(plgpu.load(self.given.shares.at[slot], layout=LAYOUT, optimized=False))
        top = functools.reduce(jnp.maximum, lses, state.top)
        decay = jnp.exp2(state.top - top)
        acc, total = state.acc * across(decay, state.acc.shape), state.total * decay
        for share, lse in zip(shares, lses, strict=True):
            weight = jnp.exp2(lse - top)
            acc, total = acc + share * across(weight, acc.shape), total + weight
        return _State(acc, top, total)
