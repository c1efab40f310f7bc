# SPDX-License-Identifier: Apache-2.0
"""The backward kernel for wide heads: 64 keys a block, and two warpgroups that divide the products.

One computes the transposed scores, the probabilities and dV; the other their gradient and dK. So each has one wide
sum, which fits in its registers, and only probabilities pass between them, through shared memory. In the fused form the
scores' gradient passes back, and each forms some columns of dQ; the first does so one step late, so that it never waits
for the second.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .backward_key_blocks import Block, KeyBlockKernel, Step
from .backward_tiles import WGMMA, kept, mask_words, walk, weigh, zeros
from .machine import plgpu


class ProductsKernel(KeyBlockKernel):
    """See the module; a block has 64 keys."""

    def compute(self, block: Block) -> None:
        """Do what a warpgroup that computes does."""
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _() -> None:
            self._values(block)

        @pl.when(wg == 1)
        def _() -> None:
            self._keys(block)

    def _values(self, block: Block) -> None:
        """Be the warpgroup of the probabilities."""
        plgpu.barrier_wait(block.scratch.loaded)
        # Of the step before the first nothing is used; its number is odd, for the other fills the even slot just then.
        before = Step(jnp.int32(0), jnp.int32(0), jnp.int32(1))

        def of_head(head: jax.Array, carry: Any) -> Any:
            def of_tile(j: jax.Array, carry: Any, *, masked: bool) -> Any:
                dvalue, before, number = carry
                step = Step(head, j, number)
                return self._values_step(block, step, before, dvalue, masked), step, number + 1

            return walk(block.tiles, of_tile, carry, self.masks)

        start = (zeros((64, self.problem.value_dim)), before, jnp.int32(0))
        dvalue, before, number = self.over_heads(block, of_head, start)
        if self.fused:

            @pl.when(number > 0)
            def _() -> None:
                plgpu.barrier_wait(block.scratch.dscores_full)
                (part,) = self.machine.accumulate(
                    lambda sums: self._dquery(block, before, sums[0], 0), zeros((64, self.columns[0]))
                )
                self.send_dquery(block, part, before, 0, (0, 0))

        else:
            # No barrier is left with an arrival that nobody saw.
            self._drain_weights(block, number)
        self.finish(block)
        self.store(block, dvalue * self.problem.value_scale, 1, 0)
        plgpu.wait_smem_to_gmem(0)

    def _values_step(self, block: Block, step: Step, before: Step, dvalue: jax.Array, masked: bool) -> jax.Array:
        scratch, multiply = block.scratch, self.machine.multiply
        slot, dout_slot = self.slots(step)
        tile = self.tile(block, step, 0)
        mask = mask_words(block.arrays, tile)
        plgpu.barrier_wait(scratch.query_full.at[slot])

        def products(sums: Any) -> None:
            scores, dvalue = sums[:2]
            multiply(scores, scratch.key.at[0], scratch.query.at[slot].transpose((1, 0)))
            if self.fused:

                @pl.when(step.number > 0)
                def _() -> None:
                    plgpu.barrier_wait(scratch.dscores_full)

                # Behind the scores, whose probabilities are worked out while it runs.
                self._dquery(block, before, sums[2], 0)
            raw = self.machine.read(scores, pending=1 if self.fused else 0)
            beside = self.beside(block, step, tile, mask, 0)
            weights, slope = weigh(self.problem, block.arrays, tile, raw, beside, masked)
            keep, passed = kept(self.problem, block.arrays, tile), weights if slope is None else weights * slope
            # The soft cap's derivative goes along, for the other has no scores to take it from.
            # The sign says what a dropout drops, so that the other need not find it out again.
            # Handed over before anything else is waited for: the other warpgroup can do nothing without them.
            self._pass(block, step, passed if keep is None else jnp.where(keep, passed, -passed))
            plgpu.barrier_wait(scratch.dout_full.at[dout_slot])
            used = weights if keep is None else jnp.where(keep, weights, 0.0)
            multiply(dvalue, used.astype(self.problem.dtype), scratch.dout.at[dout_slot])
            if self.fused:
                # dQ's product came before dV's, which goes on while the part is sent.
                part = self.machine.read(sums[2], pending=1)

                @pl.when(step.number > 0)
                def _() -> None:
                    self.send_dquery(block, part, before, 0, (0, 0))

        start = (self.scores_start(block, step, tile), dvalue)
        extra = (zeros((64, self.columns[0])),) if self.fused else ()
        dvalue = self.machine.accumulate(products, *start, *extra)[1]
        plgpu.barrier_arrive(scratch.query_free.at[slot])
        plgpu.barrier_arrive(scratch.dout_free.at[dout_slot])
        return dvalue

    def _pass(self, block: Block, step: Step, weights: jax.Array) -> None:
        """Hand the probabilities over; the fused form needs no barrier: the scores' gradient has come back since."""
        scratch, slot = block.scratch, lax.rem(step.number, 2)
        if not self.fused:

            @pl.when(step.number >= 2)
            def _() -> None:
                plgpu.barrier_wait(scratch.weights_free.at[slot])

        scratch.weights.at[slot][...] = weights.astype(self.problem.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.weights_full.at[slot])

    def _drain_weights(self, block: Block, steps: jax.Array) -> None:
        for slot in range(2):

            @pl.when(slot < steps)
            def _(slot: int = slot) -> None:
                plgpu.barrier_wait(block.scratch.weights_free.at[slot])

    def _keys(self, block: Block) -> None:
        """Be the warpgroup of the scores' gradient."""
        plgpu.barrier_wait(block.scratch.loaded)

        def of_head(head: jax.Array, carry: Any) -> Any:
            def of_tile(j: jax.Array, carry: Any, *, masked: bool) -> Any:
                del masked  # where a query sees no key the probability is zero
                return self._keys_step(block, Step(head, j, carry[1]), carry[0]), carry[1] + 1

            return lax.fori_loop(block.tiles.first, block.tiles.last, lambda j, c: of_tile(j, c, masked=False), carry)

        dkey, _ = self.over_heads(block, of_head, (zeros((64, self.problem.head_dim)), jnp.int32(0)))
        self.finish(block)
        self.store(block, dkey * self.problem.gradient_scale, 0, 0)
        plgpu.wait_smem_to_gmem(0)

    def _keys_step(self, block: Block, step: Step, dkey: jax.Array) -> jax.Array:
        scratch, multiply, dtype = block.scratch, self.machine.multiply, self.problem.dtype
        slot, dout_slot = self.slots(step)
        passed = lax.rem(step.number, 2)
        tile = self.tile(block, step, 0)
        plgpu.barrier_wait(scratch.dout_full.at[dout_slot])

        def products(sums: Any) -> None:
            dweights, dkey = sums[:2]
            multiply(dweights, scratch.value.at[0], scratch.dout.at[dout_slot].transpose((1, 0)))
            dscores = self.machine.read(dweights, pending=0)
            plgpu.barrier_wait(scratch.weights_full.at[passed])
            weights = plgpu.load(scratch.weights.at[passed], layout=WGMMA).astype(jnp.float32)
            if block.arrays.dropout is not None:
                dscores = jnp.where(weights < 0, self.row(tile, scratch.delta.at[dout_slot]), dscores)
                weights = jnp.abs(weights)
            dscores = (weights * dscores).astype(dtype)
            if self.fused:
                # Nobody is waited for: the probabilities of this step come after the other has used the slot.
                scratch.dscores.at[passed, 0][...] = dscores
                plgpu.commit_smem()
                plgpu.barrier_arrive(scratch.dscores_full)
            else:
                # Without dQ nothing goes back that would tell the other that they have been read.
                plgpu.barrier_arrive(scratch.weights_free.at[passed])
            plgpu.barrier_wait(scratch.query_full.at[slot])
            if self.fused:
                # Before dK, so that it can be sent while that product runs.
                self._dquery(block, step, sums[2], 1)
            multiply(dkey, dscores, scratch.query.at[slot])
            if self.fused:
                self.send_dquery(block, self.machine.read(sums[2], pending=1), step, 1, (0, self.columns[0]))

        start = (self.row(tile, scratch.delta.at[dout_slot]), dkey)
        extra = (zeros((64, self.columns[1])),) if self.fused else ()
        dkey = self.machine.accumulate(products, *start, *extra)[1]
        plgpu.barrier_arrive(scratch.query_free.at[slot])
        plgpu.barrier_arrive(scratch.dout_free.at[dout_slot])
        return dkey

    def _dquery(self, block: Block, step: Step, total: Any, role: int) -> None:
        """Start this warpgroup's columns of a step's dQ."""
        columns = pl.ds(self.columns[0] * role, self.columns[role])
        left = block.scratch.dscores.at[lax.rem(step.number, 2), 0].transpose((1, 0))
        self.machine.multiply(total, left, block.scratch.key.at[0, :, columns])
