# SPDX-License-Identifier: Apache-2.0
"""The backward kernel whose warpgroups each own 64 keys.

Each computes the transposed scores of its keys, `K Q^T` and `V dO^T`, and its rows of dV and dK, with probabilities and
the scores' gradient in registers. In the fused form the latter go through shared memory, too, and all warpgroups
together form `dQ = dS K`, which a reducing copy adds to float32 memory.

Source: the five products, and the probabilities computed anew, are those of FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .backward_key_blocks import Block, KeyBlockKernel, Step
from .backward_tiles import Tile, kept, mask_words, pick, walk, weigh, zeros
from .machine import plgpu


class KeysKernel(KeyBlockKernel):
    """See the module; a block has 64 keys for each of its warpgroups."""

    def compute(self, block: Block) -> None:
        """Do what a warpgroup that computes does."""
        problem, wg = self.problem, lax.axis_index("wg")
        plgpu.barrier_wait(block.scratch.loaded)

        def of_head(head: jax.Array, carry: Any) -> Any:
            def of_tile(j: jax.Array, carry: Any, *, masked: bool) -> Any:
                dkey, dvalue, number = carry
                return (*self._step(block, Step(head, j, number), (dkey, dvalue), masked), number + 1)

            return walk(block.tiles, of_tile, carry, self.masks)

        start = (zeros((64, problem.head_dim)), zeros((64, problem.value_dim)), jnp.int32(0))
        dkey, dvalue, _ = self.over_heads(block, of_head, start)
        # The other warpgroups' dQ is a product with all keys of the block.
        self.finish(block)
        self.store(block, dkey * problem.gradient_scale, 0, wg)
        self.store(block, dvalue * problem.value_scale, 1, wg)
        # Copies still read shared memory, which is another block's once this one has ended.
        plgpu.wait_smem_to_gmem(0)

    def _step(self, block: Block, step: Step, gradients: Any, masked: bool) -> tuple[jax.Array, jax.Array]:
        wg, scratch, multiply = lax.axis_index("wg"), block.scratch, self.machine.multiply
        slot, dout_slot = self.slots(step)
        tile = self.tile(block, step, wg)
        query, dout = scratch.query.at[slot], scratch.dout.at[dout_slot]
        mask = mask_words(block.arrays, tile)
        plgpu.barrier_wait(scratch.query_full.at[slot])
        plgpu.barrier_wait(scratch.dout_full.at[dout_slot])

        def products(sums: Any) -> None:
            scores, dweights, dkey, dvalue = sums
            multiply(scores, scratch.key.at[wg], query.transpose((1, 0)))
            multiply(dweights, scratch.value.at[wg], dout.transpose((1, 0)))
            # Probabilities are worked out while the other product is still under way.
            raw = self.machine.read(scores, pending=1)
            beside = self.beside(block, step, tile, mask, wg)
            weights, slope = weigh(self.problem, block.arrays, tile, raw, beside, masked)
            keep = kept(self.problem, block.arrays, tile)
            dscores = self.machine.read(dweights, pending=0)
            used = weights if keep is None else jnp.where(keep, weights, 0.0)
            multiply(dvalue, used.astype(self.problem.dtype), dout)
            if keep is not None:
                # Nothing comes back through a weight that was dropped, and what remains is delta.
                dscores = jnp.where(keep, dscores, self.row(tile, scratch.delta.at[dout_slot]))
            dscores = self._through_scores(block, tile, weights * dscores, slope)
            if self.fused:
                self._share(block, step, dscores)
            # Started before the wait: dK needs this warpgroup's share alone, and dQ those of all others.
            multiply(dkey, dscores, query)
            if self.fused:
                plgpu.barrier_wait(scratch.dscores_full)
                self._add_dquery(block, step)

        # Both sums start from what is to be added to them, whose registers are free from then on: on one H200 a causal
        # gradient of 4,096 queries at head_dim 128 took 3 % less time.
        delta = self.row(tile, scratch.delta.at[dout_slot])
        start = (self.scores_start(block, step, tile), delta, *gradients)
        _, _, dkey, dvalue = self.machine.accumulate(products, *start)
        # Not before: a product that is under way still reads the tile.
        plgpu.barrier_arrive(scratch.query_free.at[slot])
        plgpu.barrier_arrive(scratch.dout_free.at[dout_slot])
        return dkey, dvalue

    def _through_scores(self, block: Block, tile: Tile, dscores: jax.Array, slope: jax.Array | None) -> jax.Array:
        """Return the gradient of the products of query and key, and send that of the bias on its way."""
        bias, capped = self.problem.bias is not None, dscores if slope is None else dscores * slope
        if bias:
            self._send_dbias(block, tile, capped if self.problem.rules.cap_after_bias else dscores)
        return capped.astype(self.problem.dtype)

    def _share(self, block: Block, step: Step, dscores: jax.Array) -> None:
        # Two slots: whoever fills one again has waited for all others to be past their use of it.
        block.scratch.dscores.at[lax.rem(step.number, 2), lax.axis_index("wg")][...] = dscores
        plgpu.commit_smem()
        # After the commit: products read by another way than stores write, and could find what was there before.
        plgpu.barrier_arrive(block.scratch.dscores_full)

    def _send_dbias(self, block: Block, tile: Tile, dscores: jax.Array) -> None:
        """Start to store a tile of the gradient of the bias, or to add it to what other examples and heads have."""
        place, target = block.scratch.dbias.at[lax.axis_index("wg")], block.sums.dbias
        # It is enough that the copy before has read the buffer: nobody looks at where it writes to.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dbias = (dscores * self.problem.value_scale).astype(self.problem.bias_gradient_dtype)
        keys, queries = pl.ds(tile.key, 64), pl.ds(tile.query, tile.shape[1])
        if self.problem.bias_whole:
            # Turned on the way: transposes of the bias and of its gradient outside of the kernel were reckoned at 420
            # of 1,110 microseconds.
            place.transpose((1, 0))[...] = dbias
            plgpu.commit_smem()
            self.machine.store_to_memory(place, target.at[(*pick(target, tile), queries, keys)])
        else:
            place[...] = dbias
            plgpu.commit_smem()
            self.machine.add_to_memory(place, target.at[(*pick(target, tile), keys, queries)])

    def _add_dquery(self, block: Block, step: Step) -> None:
        """Form this warpgroup's part of the tile's dQ, some of the rows or of the columns, and add it to memory."""
        wg, slot, part = lax.axis_index("wg"), lax.rem(step.number, 2), self.columns[0]
        by_rows = self.params.q_block == 64 * self.params.warpgroups
        rows, columns = (pl.ds(64 * wg, 64), slice(None)) if by_rows else (slice(None), pl.ds(part * wg, part))

        def products(sums: Any) -> None:
            for w in range(self.params.warpgroups):
                left = block.scratch.dscores.at[slot, w, :, rows].transpose((1, 0))
                self.machine.multiply(sums[0], left, block.scratch.key.at[w, :, columns])

        (total,) = self.machine.accumulate(products, zeros((64, part)))
        self.send_dquery(block, total, step, wg, (64 * wg, 0) if by_rows else (0, part * wg))
