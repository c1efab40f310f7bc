# SPDX-License-Identifier: Apache-2.0
"""Consumer warpgroups of the backward kernels with blocks that own keys; see `BackwardParams.division`.

Source: the five products, with recomputed probabilities, are those of FlashAttention-2, Dao, arXiv:2307.08691.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.launch import WARPGROUP, plgpu
from ejkernel.kernels._hopper.pipeline import unrolled_producer_tail

from .backward_keys import KeyBlock, KeyBlockKernel, QueryStep
from .masks import (
    WGMMA,
    ScoreTile,
    broadcast_index,
    dropout_keeps,
    mask_words,
    over_tiles,
    probabilities,
    zeros,
)


class KeysKernel(KeyBlockKernel):
    """Each consumer owns 64 keys.

    It computes the transposed scores `K Q^T` and `V dO^T` and its rows of dV and dK, with probabilities and the scores'
    gradient in registers. In the fused form the scores' gradient also goes through shared memory, and all consumers
    together compute `dQ = dS K`, which a reducing copy adds to float32 global memory.
    """

    def consume(self, block: KeyBlock) -> None:
        """See `KeyBlockKernel`."""
        problem, warpgroup = self.problem, lax.axis_index(WARPGROUP)
        plgpu.barrier_wait(block.memory.loaded)

        def of_head(head: jax.Array, carry: Any) -> Any:
            def of_tile(j: jax.Array, carry: Any, *, masked: bool) -> Any:
                dkey, dvalue, number = carry
                return (*self._mainloop(block, QueryStep(head, j, number), (dkey, dvalue), masked), number + 1)

            return over_tiles(block.blocks, of_tile, carry, self.masks)

        start = (zeros((64, problem.head_dim)), zeros((64, problem.value_dim)), jnp.int32(0))
        dkey, dvalue, _ = self.over_heads(block, of_head, start)
        # The other consumers' dQ is a product with all keys of the block.
        self.finish(block)
        self.store(block, dkey * problem.gradient_scale, 0, warpgroup)
        self.store(block, dvalue * problem.value_scale, 1, warpgroup)
        # Copies read shared memory, which belongs to another block of threads once this one ends.
        plgpu.wait_smem_to_gmem(0)

    def _mainloop(self, block: KeyBlock, step: QueryStep, gradients: Any, masked: bool) -> tuple[jax.Array, jax.Array]:
        """Return dK and dV with one step added."""
        warpgroup, memory, matrices = lax.axis_index(WARPGROUP), block.memory, self.matrices
        stage, dout_stage = self.stages(step)
        tile = self.tile(block, step, warpgroup)
        mask = mask_words(block.arrays, tile)
        memory.query_pipeline.consumer_wait(stage)
        memory.dout_pipeline.consumer_wait(dout_stage)

        def products(sums: Any) -> None:
            scores, dweights, dkey, dvalue = sums
            query, dout = matrices.tiles(memory.query, stage), matrices.tiles(memory.dout, dout_stage)
            matrices.multiply_transposed(scores, matrices.tiles(memory.key, warpgroup), query)
            matrices.multiply_transposed(dweights, matrices.tiles(memory.value, warpgroup), dout)
            # Probabilities are computed while the second product is in flight.
            raw = self.backend.read(scores, pending=self.value_pieces)
            terms = self.score_terms(block, step, tile, mask, warpgroup)
            weights, slope = probabilities(self.problem, block.arrays, tile, raw, terms, masked)
            keep = dropout_keeps(self.problem, block.arrays, tile)
            dscores = self.backend.read(dweights, pending=0)
            used = weights if keep is None else jnp.where(keep, weights, 0.0)
            matrices.multiply(dvalue, used.astype(self.problem.dtype), dout)
            if keep is not None:
                # A dropped weight has no cotangent; only delta remains.
                dscores = jnp.where(keep, dscores, self.row(tile, memory.delta.at[dout_stage]))
            dscores = self._through_scores(block, tile, weights * dscores, slope)
            if self.fused:
                self._share(block, step, dscores)
            # Before the wait: dK needs only this consumer's share of the scores' gradient, dQ needs all shares.
            matrices.multiply(dkey, dscores, query)
            if self.fused:
                plgpu.barrier_wait(memory.dscores_full)
                self._add_dquery(block, step)

        # Both accumulators start from their addend, which then needs no registers: on one H200 a causal gradient of
        # 4,096 queries at head_dim 128 took 3 % less time.
        delta = self.row(tile, memory.delta.at[dout_stage])
        start = (self.scores_start(block, step, tile), delta, *gradients)
        _, _, dkey, dvalue = self.backend.accumulate(products, *start)
        # Not earlier: a product in flight reads the tile.
        memory.query_pipeline.consumer_release(stage)
        memory.dout_pipeline.consumer_release(dout_stage)
        return dkey, dvalue

    def _through_scores(
        self, block: KeyBlock, tile: ScoreTile, dscores: jax.Array, slope: jax.Array | None
    ) -> jax.Array:
        """Return the gradient of the products of query and key, and start storing the bias's."""
        bias, capped = self.problem.bias is not None, dscores if slope is None else dscores * slope
        if bias:
            self._send_dbias(block, tile, capped if self.problem.rules.cap_after_bias else dscores)
        return capped.astype(self.problem.dtype)

    def _share(self, block: KeyBlock, step: QueryStep, dscores: jax.Array) -> None:
        # Two buffers: before a consumer overwrites one, it has waited until all others were past their use of it.
        block.memory.dscores.at[lax.rem(step.number, 2), lax.axis_index(WARPGROUP)][...] = dscores
        plgpu.commit_smem()
        # After the commit: WGMMA reads through the asynchronous proxy, and could read old values before it.
        plgpu.barrier_arrive(block.memory.dscores_full)

    def _send_dbias(self, block: KeyBlock, tile: ScoreTile, dscores: jax.Array) -> None:
        """Start storing a tile of the bias's gradient, or adding it to that of other examples and heads."""
        target = block.sums.dbias
        # The previous copy must have read the buffer; its write may be pending.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dbias = (dscores * self.problem.value_scale).astype(self.problem.bias_gradient_dtype)
        keys, queries = pl.ds(tile.key, 64), pl.ds(tile.query, tile.shape[1])
        at = broadcast_index(target, tile.example, tile.head)
        if self.problem.bias_whole:
            self._store_dbias(block, dbias, target.at[(*at, queries, keys)])
        else:
            buffer = block.memory.dbias.at[lax.axis_index(WARPGROUP)]
            buffer[...] = dbias
            plgpu.commit_smem()
            self.backend.add_to_memory(buffer, target.at[(*at, keys, queries)])

    def _store_dbias(self, block: KeyBlock, dbias: jax.Array, target: Any) -> None:
        """Start storing a tile transposed: transposes by XLA were estimated at 420 of 1,110 microseconds."""
        buffer = block.memory.dbias
        views = [buffer] * 2 if self.bias_in_tiles else self.backend.views(buffer, 2)
        tiles, rows = (x.at[lax.axis_index(WARPGROUP)] for x in views)
        tiles.transpose((1, 0))[...] = dbias
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(rows, target)

    def _add_dquery(self, block: KeyBlock, step: QueryStep) -> None:
        """Compute this consumer's part of the step's dQ, some rows or some columns, and add it to global memory."""
        warpgroup, part = lax.axis_index(WARPGROUP), self.columns[0]
        if self.params.q_block == 64 * self.params.warpgroups:
            self._add_part(block, step, (64 * warpgroup, 0), part)
        elif len(set(self.columns)) == 1:
            self._add_part(block, step, (0, part * warpgroup), part)
        else:
            for w, width in enumerate(self.columns):
                first = sum(self.columns[:w])
                pl.when(warpgroup == w)(functools.partial(self._add_part, block, step, (0, first), width))

    def _add_part(self, block: KeyBlock, step: QueryStep, at: tuple[Any, Any], width: int) -> None:
        """Add 64 rows of `width` columns of the step's dQ, from row and column `at`, to global memory."""
        slot, whole = lax.rem(step.number, 2), self.params.q_block == 64
        rows = slice(None) if whole else pl.ds(at[0], 64)

        def products(sums: Any) -> None:
            for w in range(self.params.warpgroups):
                left = block.memory.dscores.at[slot, w, :, rows].transpose((1, 0))
                self.matrices.multiply(sums[0], left, self.key_columns(block, w, at[1], width))

        (total,) = self.backend.accumulate(products, zeros((64, width)))
        self.send_dquery(block, total, step, lax.axis_index(WARPGROUP), at)


class ProductsKernel(KeyBlockKernel):
    """For wide heads: a block owns 64 keys, and its two consumers divide the products.

    The first computes the transposed scores, the probabilities and dV; the second the scores' gradient and dK. Each has
    one wide accumulator, which fits in its registers, and only probabilities pass between them, through shared memory.
    In the fused form the scores' gradient passes back, and each computes some columns of dQ; the first does so one step
    late, so that it never waits for the second.
    """

    def consume(self, block: KeyBlock) -> None:
        """See `KeyBlockKernel`. Warpgroup 0 computes dV and warpgroup 1 dK."""
        warpgroup = lax.axis_index(WARPGROUP)

        @pl.when(warpgroup == 0)
        def _() -> None:
            self._consume_values(block)

        @pl.when(warpgroup == 1)
        def _() -> None:
            self._consume_keys(block)

    # The first consumer: probabilities and dV.

    def _consume_values(self, block: KeyBlock) -> None:
        plgpu.barrier_wait(block.memory.loaded)
        # There is no step before the first; its number is odd because the second consumer fills the even buffer then.
        before = QueryStep(jnp.int32(0), jnp.int32(0), jnp.int32(1))

        def of_head(head: jax.Array, carry: Any) -> Any:
            def of_tile(j: jax.Array, carry: Any, *, masked: bool) -> Any:
                dvalue, before, number = carry
                step = QueryStep(head, j, number)
                return self._values_step(block, step, before, dvalue, masked), step, number + 1

            return over_tiles(block.blocks, of_tile, carry, self.masks)

        start = (zeros((64, self.problem.value_dim)), before, jnp.int32(0))
        dvalue, before, number = self.over_heads(block, of_head, start)
        if self.fused:

            @pl.when(number > 0)
            def _() -> None:
                plgpu.barrier_wait(block.memory.dscores_full)
                (part,) = self.backend.accumulate(
                    lambda sums: self._dquery(block, before, sums[0], 0), zeros((64, self.columns[0]))
                )
                self.send_dquery(block, part, before, 0, (0, 0))

        else:
            unrolled_producer_tail(number, block.memory.weights_pipeline)
        self.finish(block)
        self.store(block, dvalue * self.problem.value_scale, 1, 0)
        plgpu.wait_smem_to_gmem(0)

    def _values_step(
        self, block: KeyBlock, step: QueryStep, before: QueryStep, dvalue: jax.Array, masked: bool
    ) -> jax.Array:
        memory, matrices = block.memory, self.matrices
        stage, dout_stage = self.stages(step)
        tile = self.tile(block, step, 0)
        mask = mask_words(block.arrays, tile)
        memory.query_pipeline.consumer_wait(stage)

        def products(sums: Any) -> None:
            scores, dvalue = sums[:2]
            matrices.multiply_transposed(scores, matrices.tiles(memory.key, 0), matrices.tiles(memory.query, stage))
            if self.fused:

                @pl.when(step.number > 0)
                def _() -> None:
                    plgpu.barrier_wait(memory.dscores_full)

                # Queued behind the scores; it runs while the probabilities are computed.
                self._dquery(block, before, sums[2], 0)
            raw = self.backend.read(scores, pending=self.dquery_products(0) if self.fused else 0)
            terms = self.score_terms(block, step, tile, mask, 0)
            weights, slope = probabilities(self.problem, block.arrays, tile, raw, terms, masked)
            # The second consumer has no scores: it gets the weights times the soft cap's derivative. A negative sign
            # marks the weights that the dropout drops. Passed before any other wait, because it can do nothing without.
            keep = dropout_keeps(self.problem, block.arrays, tile)
            passed = weights if slope is None else weights * slope
            self._pass(block, step, passed if keep is None else jnp.where(keep, passed, -passed))
            memory.dout_pipeline.consumer_wait(dout_stage)
            used = weights if keep is None else jnp.where(keep, weights, 0.0)
            matrices.multiply(dvalue, used.astype(self.problem.dtype), matrices.tiles(memory.dout, dout_stage))
            if self.fused:
                # dQ's product came before dV's, which runs while dQ is sent.
                part = self.backend.read(sums[2], pending=self.value_pieces)

                @pl.when(step.number > 0)
                def _() -> None:
                    self.send_dquery(block, part, before, 0, (0, 0))

        start = (self.scores_start(block, step, tile), dvalue)
        extra = (zeros((64, self.columns[0])),) if self.fused else ()
        dvalue = self.backend.accumulate(products, *start, *extra)[1]
        memory.query_pipeline.consumer_release(stage)
        memory.dout_pipeline.consumer_release(dout_stage)
        return dvalue

    def _pass(self, block: KeyBlock, step: QueryStep, weights: jax.Array) -> None:
        """Pass probabilities to the second consumer.

        The fused form needs no wait: the scores' gradient of the step that used the buffer has come back since.
        """
        memory, slot = block.memory, lax.rem(step.number, 2)
        if not self.fused:
            memory.weights_pipeline.producer_wait(step.number, slot)
        memory.weights.at[slot][...] = weights.astype(self.problem.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.weights_full.at[slot])

    # The second consumer: the scores' gradient and dK.

    def _consume_keys(self, block: KeyBlock) -> None:
        plgpu.barrier_wait(block.memory.loaded)

        def of_head(head: jax.Array, carry: Any) -> Any:
            def of_tile(j: jax.Array, carry: Any) -> Any:  # hidden keys need no mask: their probability is zero
                return self._keys_step(block, QueryStep(head, j, carry[1]), carry[0]), carry[1] + 1

            return lax.fori_loop(block.blocks.first, block.blocks.end, of_tile, carry)

        dkey, _ = self.over_heads(block, of_head, (zeros((64, self.problem.head_dim)), jnp.int32(0)))
        self.finish(block)
        self.store(block, dkey * self.problem.gradient_scale, 0, 0)
        plgpu.wait_smem_to_gmem(0)

    def _keys_step(self, block: KeyBlock, step: QueryStep, dkey: jax.Array) -> jax.Array:
        memory, matrices, dtype = block.memory, self.matrices, self.problem.dtype
        stage, dout_stage = self.stages(step)
        passed = lax.rem(step.number, 2)
        tile = self.tile(block, step, 0)
        memory.dout_pipeline.consumer_wait(dout_stage)

        def products(sums: Any) -> None:
            dweights, dkey = sums[:2]
            dout = matrices.tiles(memory.dout, dout_stage)
            matrices.multiply_transposed(dweights, matrices.tiles(memory.value, 0), dout)
            dscores = self.backend.read(dweights, pending=0)
            memory.weights_pipeline.consumer_wait(passed)
            weights = plgpu.load(memory.weights.at[passed], layout=WGMMA).astype(jnp.float32)
            if block.arrays.dropout is not None:
                dscores = jnp.where(weights < 0, self.row(tile, memory.delta.at[dout_stage]), dscores)
                weights = jnp.abs(weights)
            dscores = (weights * dscores).astype(dtype)
            if self.fused:
                # No wait: the first consumer passes this step's probabilities only after it has used the buffer.
                memory.dscores.at[passed, 0][...] = dscores
                plgpu.commit_smem()
                plgpu.barrier_arrive(memory.dscores_full)
            else:
                # Without dQ nothing else tells the first consumer that the probabilities have been read.
                memory.weights_pipeline.consumer_release(passed)
            memory.query_pipeline.consumer_wait(stage)
            if self.fused:
                # Before dK, so that dQ can be sent while that product runs.
                self._dquery(block, step, sums[2], 1)
            matrices.multiply(dkey, dscores, matrices.tiles(memory.query, stage))
            if self.fused:
                part = self.backend.read(sums[2], pending=self.key_pieces)
                self.send_dquery(block, part, step, 1, (0, self.columns[0]))

        start = (self.row(tile, memory.delta.at[dout_stage]), dkey)
        extra = (zeros((64, self.columns[1])),) if self.fused else ()
        dkey = self.backend.accumulate(products, *start, *extra)[1]
        memory.query_pipeline.consumer_release(stage)
        memory.dout_pipeline.consumer_release(dout_stage)
        return dkey

    def _dquery(self, block: KeyBlock, step: QueryStep, total: Any, consumer: int) -> None:
        """Start a consumer's columns of a step's dQ."""
        left = block.memory.dscores.at[lax.rem(step.number, 2), 0].transpose((1, 0))
        columns = self.key_columns(block, 0, self.columns[0] * consumer, self.columns[consumer])
        self.matrices.multiply(total, left, columns)

    def dquery_products(self, consumer: int) -> int:
        """Return how many products a consumer's columns of dQ take."""
        return self.key_pieces * self.columns[consumer] // self.problem.head_dim if self.problem.pieced else 1
