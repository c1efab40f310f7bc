# SPDX-License-Identifier: Apache-2.0
"""The second kernel: the sum of the shares of items that several programs computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._hopper.backend import Backend, backend_for
from ejkernel.kernels._hopper.launch import PROGRAM, launch, plgpu

from .memory import BY_ROW, LAYOUT, Item, Outputs, TileStore, Work, item_of, piece_types
from .plan import LaunchPlan
from .shares import Shares, SumInputs, summed, when_begun_here


def run(plan: LaunchPlan, given: SumInputs, interpret: Any = None) -> None:
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

    def run(self, given: SumInputs, buffer: Any) -> None:
        """Sum one item's shares."""
        program = lax.axis_index(PROGRAM)
        work = Work.of(given.programs, program)
        item = item_of(self.plan, given.tiles, jnp.maximum(work.last_item, 0))
        when_begun_here(work, item, lambda: self._sum(given, buffer, program, item, work))

    def _sum(self, given: SumInputs, buffer: Any, program: Any, item: Item, work: Work) -> None:
        rows = self.plan.rows
        shares = Shares(
            shape=(self.plan.head_dim, rows),
            axis=1,
            together=max(1, 64 // rows),
            load=lambda slot: plgpu.load(given.shares.at[slot], layout=LAYOUT, optimized=False),
            load_lse=lambda slot: plgpu.load(given.share_lse.at[slot], layout=BY_ROW, optimized=False),
        )
        found, outputs = summed(shares, program, item, work), Outputs(given.out, given.lse)
        store = TileStore(self.plan, self.backend, (given.sinks, given.scale), outputs, buffer)
        store.store(item, (found.acc,), found.top, found.total)
        plgpu.wait_smem_to_gmem(0)
