# SPDX-License-Identifier: Apache-2.0
"""The second kernel of latent attention: the sum of the shares of items that several groups computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat
from ejkernel.kernels._hopper.backend import Backend, backend_for
from ejkernel.kernels._hopper.device import quotient, remainder
from ejkernel.kernels._hopper.launch import PROGRAM, launch, plgpu, tiled

from .latent_memory import LAYOUT, finished, group_work, item_of, load_rows
from .latent_plan import REST, ROWS, LatentPlan
from .memory import Item, Work
from .shares import Shares, SumInputs, summed, when_begun_here

_WIDTH = REST  # columns of one program
_TOGETHER = 2  # shares that are loaded at once


def run(plan: LatentPlan, given: SumInputs, interpret: Any = None) -> None:
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

    def __init__(self, plan: LatentPlan, given: SumInputs, backend: Backend, buffer: Any, pieces: int) -> None:
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
        when_begun_here(work, item, lambda: self._sum(item, work))

    def _sum(self, item: Item, work: Work) -> None:
        shares = Shares((ROWS, _WIDTH), axis=0, together=_TOGETHER, load=self._share, load_lse=self._share_lse)
        found = summed(shares, self.group, item, work)
        out, lse = finished(self.given.sinks, self.given.scale, self.part, *found)
        self.buffer[...] = out.astype(self.plan.dtype)
        plgpu.commit_smem()
        heads = pl.ds(self.part * self.plan.rows, self.plan.rows)
        target = self.given.out.at[item.token, heads, self.columns]
        self.backend.store_to_memory(self.buffer.at[pl.ds(0, self.plan.rows)], target)

        @pl.when(self.is_first)
        def _store() -> None:
            compat.store_as_it_is(self.given.lse.at[item.token, pl.ds(self.part * ROWS, ROWS)], lse)

        plgpu.wait_smem_to_gmem(0)

    def _share_lse(self, slot: Any) -> Any:
        return load_rows(self.given.share_lse.at[slot, pl.ds(self.part * ROWS, ROWS)])

    def _share(self, slot: Any) -> Any:
        rows = pl.ds(self.part * ROWS, ROWS)
        numbers = [self.given.shares.at[slot, number, rows, self.columns] for number in (0, 1)]
        high, low = (plgpu.load(x, layout=LAYOUT, optimized=False).astype(jnp.float32) for x in numbers)
        return high + low
