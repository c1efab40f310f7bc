# SPDX-License-Identifier: Apache-2.0
"""What one warpgroup of the forward computes of one tile: 64 rows of one head."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._numbers import LOG2_E
from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE
from ejkernel.kernels.flash_attention.dropout import keeps

from ._forward_plan import ROWS
from ._forward_types import Memory, Part
from .machine import plgpu, shown
from .visibility import remainder

_LAYOUT = plgpu.Layout.WGMMA
_BY_ROW, _BY_KEY = _LAYOUT.reduce(1), _LAYOUT.reduce(0)
_LOWEST = float(np.finfo(np.float32).min)  # the first maximum: finite, so that -inf - top is -inf and not NaN


class _Sums(NamedTuple):
    """What is carried from block to block.

    Attributes:
        acc: Sum of weighted values without the last block's, `[rows, value_dim]` in float32.
        top: Largest logit so far, in the units of `Rows._exponent`.
        total: Sum of the weights so far.
        weights: Those of the last block, in the dtype of the values.
        step: How many blocks this warpgroup has met in all its tiles.
    """

    acc: Any
    top: Any
    total: Any
    weights: Any
    step: Any


class Rows:
    """The rows of one warpgroup."""

    def __init__(self, memory: Memory, part: Part) -> None:
        self.memory, self.plan, self.params = memory, memory.plan, memory.plan.params
        self.inputs, self.buffers, self.wait = memory.inputs, memory.buffers, memory.barriers
        self.part, self.tile, self.warpgroup = part, part.tile, part.warpgroup
        self.square = (ROWS, self.params.kv_block)
        if self.plan.segments:
            ids = self.inputs.query_segments.at[self.tile.batch, 0, pl.ds(part.row, ROWS)]
            self.segments = plgpu.load(ids, layout=_BY_ROW, optimized=False)
        if self.inputs.dropout is not None:
            words = self.inputs.dropout.at[self.tile.batch, part.head, pl.ds(part.row, ROWS)]
            self.dropout = plgpu.load(words, layout=_BY_ROW, optimized=False)

    def run(self, step: Any) -> Any:
        """Compute and store the output and the log-sum-exp, and return the step after the last block's."""
        plan, blocks = self.plan, self.tile.blocks
        # The first block, which begins the sums, is masked in any case.
        free_from = jnp.clip(blocks.free_from, blocks.first + 1, blocks.end)
        free_until = jnp.clip(blocks.free_until, free_from, blocks.end)
        next_block = self._overlapped if self.params.overlap else self._in_turn
        sums = self._first_block(step)
        self._release_before()
        # Loops of their own for what has to be masked: one loop with a mask under a condition took a causal forward of
        # 4,096 queries at head_dim 128 3 % longer on one H200.
        if plan.table or plan.rules.left is not None:
            sums = lax.fori_loop(blocks.first + 1, free_from, lambda i, sums: next_block(sums, i, True), sums)
        sums = lax.fori_loop(free_from, free_until, lambda i, sums: next_block(sums, i, False), sums)
        if plan.table or plan.rules.right is not None or plan.hides_tail:
            sums = lax.fori_loop(free_until, blocks.end, lambda i, sums: next_block(sums, i, True), sums)
        if not self.params.share_buffer:
            self._release(self.part.number)
        self._store(sums._replace(acc=self._last_product(sums)))
        return sums.step

    def _first_block(self, step: Any) -> _Sums:
        plgpu.barrier_wait(self.wait.query_full.at[self.part.slot])
        stage = remainder(step, self.params.stages)
        plgpu.barrier_wait(self.wait.key_full.at[stage])
        self._await_turn()

        def product(acc: Any) -> Any:
            self._multiply_keys(acc, stage)
            self._pass_turn()
            return acc[...]

        scores = pl.run_scoped(product, plgpu.ACC(self.square, jnp.float32))
        plgpu.barrier_arrive(self.wait.key_free.at[stage])
        nothing = plgpu.layout_cast(jnp.full((ROWS, self.plan.value_dim), 0, jnp.float32), _LAYOUT)
        top = plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), _BY_ROW)
        total = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), _BY_ROW)
        logits = self._logits(scores, self.tile.blocks.first, stage, True)
        top, total, weights, _ = self._softmax(logits, self.tile.blocks.first, top, total)
        return _Sums(nothing, top, total, weights.astype(self.plan.dtype), step + 1)

    def _overlapped(self, sums: _Sums, block: Any, masked: bool) -> _Sums:
        """Meet a block: its softmax runs while the block before's weights are multiplied with their values."""
        stage, before = remainder(sums.step, self.params.stages), remainder(sums.step - 1, self.params.stages)
        plgpu.barrier_wait(self.wait.key_full.at[stage])
        self._await_turn()

        def products(scores: Any, acc: Any) -> Any:
            self._begin(acc, sums)
            self._multiply_keys(scores, stage)
            plgpu.barrier_wait(self.wait.value_full.at[before])
            self._multiply_values(acc, sums, before)
            self._pass_turn()
            # Begun first, the scores are done first: the values' product goes on beside the softmax. Without that
            # overlap the same forward took 4 % longer.
            found = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            plgpu.barrier_arrive(self.wait.key_free.at[stage])
            logits = self._logits(found, block, stage, masked)
            top, total, weights, decay = self._softmax(logits, block, sums.top, sums.total)
            acc = self._end(acc, sums, before)
            # Rounded only now: a register that a product in flight reads is not to be written.
            return acc, top, total, weights.astype(self.plan.dtype), decay

        acc, top, total, weights, decay = pl.run_scoped(products, *self._accumulators())
        plgpu.barrier_arrive(self.wait.value_free.at[before])
        return _Sums(acc * _columns(decay, acc.shape), top, total, weights, sums.step + 1)

    def _in_turn(self, sums: _Sums, block: Any, masked: bool) -> _Sums:
        """Meet a block: both products first, then the softmax."""
        stage, before = remainder(sums.step, self.params.stages), remainder(sums.step - 1, self.params.stages)
        plgpu.barrier_wait(self.wait.value_full.at[before])
        plgpu.barrier_wait(self.wait.key_full.at[stage])
        self._await_turn()

        def products(scores: Any, acc: Any) -> Any:
            self._begin(acc, sums)
            self._multiply_values(acc, sums, before)
            self._multiply_keys(scores, stage)
            self._pass_turn()
            return self._end(acc, sums, before), plgpu.wgmma_accumulator_load(scores, wait_n=0)

        acc, scores = pl.run_scoped(products, *self._accumulators())
        plgpu.barrier_arrive(self.wait.key_free.at[stage])
        plgpu.barrier_arrive(self.wait.value_free.at[before])
        logits = self._logits(scores, block, stage, masked)
        top, total, weights, decay = self._softmax(logits, block, sums.top, sums.total)
        weights = weights.astype(self.plan.dtype)
        return _Sums(acc * _columns(decay, acc.shape), top, total, weights, sums.step + 1)

    def _last_product(self, sums: _Sums) -> Any:
        stage = remainder(sums.step - 1, self.params.stages)
        plgpu.barrier_wait(self.wait.value_full.at[stage])
        if self.memory.simulated:
            acc = self._end(None, sums, stage)
        else:
            acc = pl.run_state(lambda acc: self._multiply_values(acc, sums, stage))(plgpu.ACC.init(sums.acc))
        plgpu.barrier_arrive(self.wait.value_free.at[stage])
        return acc

    def _store(self, sums: _Sums) -> None:
        params, memory = self.params, self.memory
        empty = sums.total == 0.0
        # What a dropout's weights are divided by is one number a row here; before, it would be one a weight.
        share = jnp.where(empty, 0.0, 1 / (1 - self.plan.rules.dropout_rate) / sums.total)
        out = sums.acc * _columns(share, sums.acc.shape)
        if self.plan.adds:
            lse = sums.top + jnp.log2(sums.total) * (1 / LOG2_E)
        else:
            lse = (sums.top + jnp.log2(sums.total)) * (1 / LOG2_E)
        if params.persistent and not self.plan.frees_late:  # the copies of the tile before may still read
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer = memory.out(self.warpgroup, self.part.slot)
        buffer[...] = out.astype(self.plan.dtype)
        plgpu.commit_smem()
        batch, rows, head = self.tile.batch, pl.ds(self.part.row, ROWS), self.part.head
        plgpu.copy_smem_to_gmem(buffer, memory.outputs.out.at[batch, rows, head])
        # From registers, as it lies there; by way of shared memory a causal forward took 1 % longer.
        memory.outputs.lse.at[batch, head, rows][...] = jnp.where(empty, EMPTY_ROW_LSE, lse)
        if params.share_buffer and not self.plan.frees_late:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._release(self.part.number)

    # Buffers of queries. One that holds the output too is free when that has been copied.

    def _release_before(self) -> None:
        """Free the buffer of the tile before, now that its output has had time to be copied."""
        if self.plan.frees_late:

            @pl.when(self.part.number > 0)
            def _() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self._release(self.part.number - 1)

    def _release(self, number: Any) -> None:
        plgpu.barrier_arrive(self.wait.query_free.at[remainder(number, self.params.query_buffers)])

    # Products. No CPU simulates one with an operand in registers, as the weights are: it is then computed at its end.

    def _accumulators(self) -> tuple[Any, Any]:
        acc = None if self.memory.simulated else plgpu.ACC((ROWS, self.plan.value_dim), jnp.float32)
        return plgpu.ACC(self.square, jnp.float32), acc

    def _multiply_keys(self, scores: Any, stage: Any) -> None:
        plgpu.wgmma(scores, self.memory.query(self.part.slot), self.buffers.key.at[stage].transpose((1, 0)))

    def _begin(self, acc: Any, sums: _Sums) -> None:
        if not self.memory.simulated:
            acc[...] = sums.acc

    def _multiply_values(self, acc: Any, sums: _Sums, stage: Any) -> None:
        if not self.memory.simulated:
            plgpu.wgmma(acc, sums.weights, self.buffers.value.at[stage])

    def _end(self, acc: Any, sums: _Sums, stage: Any) -> Any:
        if not self.memory.simulated:
            return plgpu.wgmma_accumulator_load(acc, wait_n=0)
        product = jnp.dot(sums.weights, self.buffers.value.at[stage][...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # orders this read before the copy that comes next
        return sums.acc + product

    def _await_turn(self) -> None:
        if self.params.ping_pong:
            # Without turns all compute their softmax at the same time, and that forward took 8 % longer.
            plgpu.barrier_wait(self.wait.turn.at[self.warpgroup])

    def _pass_turn(self) -> None:
        if self.params.ping_pong:
            plgpu.barrier_arrive(self.wait.turn.at[remainder(self.warpgroup + 1, self.params.warpgroups)])

    # Logits and weights.

    @property
    def _exponent(self) -> float:
        """Return what to multiply what `_logits` returns with, to have logarithms to the base 2."""
        rules = self.plan.rules
        if self.plan.adds:
            return LOG2_E
        return LOG2_E * (rules.scale if rules.soft_cap is None else rules.soft_cap)

    def _logits(self, scores: Any, block: Any, stage: Any, masked: bool) -> Any:
        """Return the logits, up to a factor that the exponential sees to, -inf where hidden."""
        rules = self.plan.rules
        factor = rules.scale
        if rules.soft_cap is not None and not self.plan.caps_late:
            scores, factor = jnp.tanh(scores * (rules.scale / rules.soft_cap)), rules.soft_cap
        if self.plan.adds or self.plan.caps_late:
            scores = scores * factor
        if self.wait.extra_full is not None:
            scores = self._with_extras(scores, stage, masked)
        for visible in self._visible(block) if masked else ():
            scores = jnp.where(visible, scores, -jnp.inf)
        return scores

    def _softmax(self, logits: Any, block: Any, top: Any, total: Any) -> tuple[Any, Any, Any, Any]:
        """Return the new maximum and sum, the weights, and what earlier sums are to be multiplied with."""
        exponent = self._exponent
        if self.plan.adds:  # differences first: a bias may be the lowest float that there is
            new_top = jnp.maximum(top, logits.max(axis=1))
            weights = jnp.exp2((logits - _columns(new_top, logits.shape)) * exponent)
            decay = jnp.exp2((top - new_top) * exponent)
        else:
            new_top = jnp.maximum(top, logits.max(axis=1) * exponent)
            weights = jnp.exp2(logits * exponent - _columns(new_top, logits.shape))
            decay = jnp.exp2(top - new_top)
        # Of all weights: a dropout drops what the softmax has found.
        total = total * decay + weights.sum(axis=1)
        if self.inputs.dropout is not None:
            weights = jnp.where(self._kept(block), weights, 0.0)
        return new_top, total, weights, decay

    def _kept(self, block: Any) -> Any:
        """Return which weights of a block a dropout keeps."""
        key = plgpu.broadcasted_iota(jnp.int32, self.square, 1, layout=_LAYOUT) + block * self.params.kv_block
        words = _columns(self.dropout, self.square)
        return keeps(words, key.astype(words.dtype), self.plan.rules)

    def _with_extras(self, scores: Any, stage: Any, masked: bool) -> Any:
        """Return logits with all that was copied beside the keys in a stage; each is used at once."""
        plan, buffers = self.plan, self.buffers
        plgpu.barrier_wait(self.wait.extra_full.at[stage])
        if plan.bias:
            bias = plgpu.load(buffers.bias.at[stage, self.warpgroup], layout=_LAYOUT, optimized=False)
            scores = scores + bias.astype(jnp.float32)
        if plan.key_bias or (plan.key_mask and masked):
            scores = scores + self._by_key(buffers.key_bias, stage)
        if plan.caps_late:  # what a bias of minus infinity hides, the cap would show
            cap = cast(float, plan.rules.soft_cap)
            scores = jnp.where(scores == -jnp.inf, -jnp.inf, jnp.tanh(scores * (1 / cap)))
        if plan.mask and masked:
            rows = [buffers.mask.at[stage, self.warpgroup, i] for i in range(self.params.kv_block // 32)]
            words = tuple(plgpu.load(x, layout=_BY_ROW, optimized=False) for x in rows)
            scores = jnp.where(shown(words, self.square), scores, -jnp.inf)
        if plan.segments and masked:
            own = self._by_key(buffers.key_segments, stage) == _columns(self.segments, self.square)
            scores = jnp.where(own, scores, -jnp.inf)
        plgpu.commit_smem()  # orders these reads before the copy that comes next
        plgpu.barrier_arrive(self.wait.extra_free.at[stage])
        return scores

    def _by_key(self, buffer: Any, stage: Any) -> Any:
        loaded = plgpu.load(buffer.at[stage], layout=_BY_KEY, optimized=False)
        return lax.broadcast_in_dim(loaded, self.square, [1])

    def _visible(self, block: Any) -> list[Any]:
        """Return where the window and the end of the keys let rows see the keys of a block."""
        rules, start = self.plan.rules, block * self.params.kv_block
        key = plgpu.broadcasted_iota(jnp.int32, self.square, 1, layout=_LAYOUT)
        row = plgpu.broadcasted_iota(jnp.int32, self.square, 0, layout=_LAYOUT)
        # The block's start goes to the rows, of which a thread has two: numbers of its many keys are then constants.
        row = row + (self.part.row + (self.plan.keys - self.plan.queries) - start)
        visible = []
        if rules.right is not None:
            visible.append(key <= row + rules.right)
        if rules.left is not None:
            visible.append(key >= row - rules.left)
        if self.plan.key_lengths:
            # The maximum gives it the type of numbers that are computed here, as it does those of the table.
            visible.append(key < jnp.maximum(self.inputs.key_lengths[self.tile.batch], 0) - start)
        elif self.plan.hides_tail:
            visible.append(key < self.plan.keys - start)
        return visible


def _columns(by_row: Any, shape: tuple[int, ...]) -> Any:
    """Return a number of each row, spread over the row."""
    return lax.broadcast_in_dim(by_row, shape, [0])
