# SPDX-License-Identifier: Apache-2.0
"""What one warpgroup of the forward computes of one tile: 64 rows of one head."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE

from ._forward_plan import LOG2E, ROWS
from ._forward_types import Memory, Tile, within

mgpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # its types differ from version to version

_LAYOUT = mgpu.Layout.WGMMA
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

    def __init__(self, memory: Memory, tile: Tile, warpgroup: Any, row: Any, head: Any) -> None:
        self.memory, self.plan, self.params = memory, memory.plan, memory.plan.params
        self.inputs, self.buffers, self.wait = memory.inputs, memory.buffers, memory.barriers
        self.tile, self.warpgroup, self.row, self.head = tile, warpgroup, row, head
        self.square = (ROWS, self.params.kv_block)
        if self.plan.segments:
            ids = self.inputs.query_segments.at[tile.batch, pl.ds(row, ROWS)]
            self.segments = mgpu.load(ids, layout=_BY_ROW, optimized=False)

    def run(self, step: Any) -> Any:
        """Compute and store the output and the log-sum-exp, and return the step after the last block's."""
        plan, blocks = self.plan, self.tile.blocks
        free_from = jnp.clip(blocks.free_from, blocks.first + 1, blocks.end)
        free_until = jnp.clip(blocks.free_until, free_from, blocks.end)
        next_block = self._overlapped if self.params.overlap else self._in_turn
        sums = self._first_block(step)
        if plan.table or plan.rules.left is not None:
            sums = lax.fori_loop(blocks.first + 1, free_from, lambda i, sums: next_block(sums, i, True), sums)
        sums = lax.fori_loop(free_from, free_until, lambda i, sums: next_block(sums, i, False), sums)
        if plan.table or plan.rules.right is not None or plan.hides_tail:
            sums = lax.fori_loop(free_until, blocks.end, lambda i, sums: next_block(sums, i, True), sums)
        if not self.params.share_buffer:
            mgpu.barrier_arrive(self.wait.query_free)
        self._store(sums._replace(acc=self._last_product(sums)))
        return sums.step

    def _first_block(self, step: Any) -> _Sums:
        mgpu.barrier_wait(self.wait.query_full.at[self.warpgroup])
        stage = lax.rem(step, self.params.stages)
        mgpu.barrier_wait(self.wait.key_full.at[stage])
        self._await_turn()

        def product(acc: Any) -> Any:
            self._multiply_keys(acc, stage)
            self._pass_turn()
            return acc[...]

        scores = pl.run_scoped(product, mgpu.ACC(self.square, jnp.float32))
        mgpu.barrier_arrive(self.wait.key_free.at[stage])
        nothing = mgpu.layout_cast(jnp.full((ROWS, self.plan.value_dim), 0, jnp.float32), _LAYOUT)
        top = mgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), _BY_ROW)
        total = mgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), _BY_ROW)
        logits = self._logits(scores, self.tile.blocks.first, stage, True)
        top, total, weights, _ = self._softmax(logits, top, total)
        return _Sums(nothing, top, total, weights.astype(self.plan.dtype), step + 1)

    def _overlapped(self, sums: _Sums, block: Any, masked: bool) -> _Sums:
        """Meet a block: its softmax runs while the block before's weights are multiplied with their values."""
        stage, before = lax.rem(sums.step, self.params.stages), lax.rem(sums.step - 1, self.params.stages)
        mgpu.barrier_wait(self.wait.key_full.at[stage])
        self._await_turn()

        def products(scores: Any, acc: Any) -> Any:
            self._begin(acc, sums)
            self._multiply_keys(scores, stage)
            mgpu.barrier_wait(self.wait.value_full.at[before])
            self._multiply_values(acc, sums, before)
            self._pass_turn()
            found = mgpu.wgmma_accumulator_load(scores, wait_n=1)
            mgpu.barrier_arrive(self.wait.key_free.at[stage])
            top, total, weights, decay = self._softmax(self._logits(found, block, stage, masked), sums.top, sums.total)
            acc = self._end(acc, sums, before)
            # Rounded only now: a register that a product in flight reads is not to be written.
            return acc, top, total, weights.astype(self.plan.dtype), decay

        acc, top, total, weights, decay = pl.run_scoped(products, *self._accumulators())
        mgpu.barrier_arrive(self.wait.value_free.at[before])
        return _Sums(acc * _columns(decay, acc.shape), top, total, weights, sums.step + 1)

    def _in_turn(self, sums: _Sums, block: Any, masked: bool) -> _Sums:
        """Meet a block: both products first, then the softmax."""
        stage, before = lax.rem(sums.step, self.params.stages), lax.rem(sums.step - 1, self.params.stages)
        mgpu.barrier_wait(self.wait.value_full.at[before])
        mgpu.barrier_wait(self.wait.key_full.at[stage])
        self._await_turn()

        def products(scores: Any, acc: Any) -> Any:
            self._begin(acc, sums)
            self._multiply_values(acc, sums, before)
            self._multiply_keys(scores, stage)
            self._pass_turn()
            return self._end(acc, sums, before), mgpu.wgmma_accumulator_load(scores, wait_n=0)

        acc, scores = pl.run_scoped(products, *self._accumulators())
        mgpu.barrier_arrive(self.wait.key_free.at[stage])
        mgpu.barrier_arrive(self.wait.value_free.at[before])
        logits = self._logits(scores, block, stage, masked)
        top, total, weights, decay = self._softmax(logits, sums.top, sums.total)
        weights = weights.astype(self.plan.dtype)
        return _Sums(acc * _columns(decay, acc.shape), top, total, weights, sums.step + 1)

    def _last_product(self, sums: _Sums) -> Any:
        stage = lax.rem(sums.step - 1, self.params.stages)
        mgpu.barrier_wait(self.wait.value_full.at[stage])
        if self.memory.simulated:
            acc = self._end(None, sums, stage)
        else:
            acc = pl.run_state(lambda acc: self._multiply_values(acc, sums, stage))(mgpu.ACC.init(sums.acc))
        mgpu.barrier_arrive(self.wait.value_free.at[stage])
        return acc

    def _store(self, sums: _Sums) -> None:
        params, memory = self.params, self.memory
        empty = sums.total == 0.0
        share = jnp.where(empty, 0.0, 1.0 / sums.total)
        out = sums.acc * _columns(share, sums.acc.shape)
        if self.plan.adds:
            lse = sums.top + jnp.log2(sums.total) * (1 / LOG2E)
        else:
            lse = (sums.top + jnp.log2(sums.total)) * (1 / LOG2E)
        if params.persistent and not params.share_buffer:  # the copies of the tile before may still read
            mgpu.wait_smem_to_gmem(0, wait_read_only=True)
        memory.out(self.warpgroup)[...] = out.astype(self.plan.dtype)
        self.buffers.lse.at[self.warpgroup][...] = jnp.where(empty, EMPTY_ROW_LSE, lse)
        mgpu.commit_smem()
        rows = pl.ds(self.row, ROWS)
        mgpu.copy_smem_to_gmem(memory.out(self.warpgroup), memory.outputs.out.at[self.tile.batch, rows, self.head])
        mgpu.copy_smem_to_gmem(
            self.buffers.lse.at[self.warpgroup], memory.outputs.lse.at[self.tile.batch, self.head, rows]
        )
        if params.share_buffer:
            mgpu.wait_smem_to_gmem(0, wait_read_only=True)
            mgpu.barrier_arrive(self.wait.query_free)

    # Products. No CPU simulates one with an operand in registers, as the weights are: it is then computed at its end.

    def _accumulators(self) -> tuple[Any, Any]:
        acc = None if self.memory.simulated else mgpu.ACC((ROWS, self.plan.value_dim), jnp.float32)
        return mgpu.ACC(self.square, jnp.float32), acc

    def _multiply_keys(self, scores: Any, stage: Any) -> None:
        mgpu.wgmma(scores, self.memory.query(self.warpgroup), self.buffers.key.at[stage].transpose((1, 0)))

    def _begin(self, acc: Any, sums: _Sums) -> None:
        if not self.memory.simulated:
            acc[...] = sums.acc

    def _multiply_values(self, acc: Any, sums: _Sums, stage: Any) -> None:
        if not self.memory.simulated:
            mgpu.wgmma(acc, sums.weights, self.buffers.value.at[stage])

    def _end(self, acc: Any, sums: _Sums, stage: Any) -> Any:
        if not self.memory.simulated:
            return mgpu.wgmma_accumulator_load(acc, wait_n=0)
        product = jnp.dot(sums.weights, self.buffers.value.at[stage][...], preferred_element_type=jnp.float32)
        mgpu.commit_smem()  # orders this read before the copy that comes next
        return sums.acc + product

    def _await_turn(self) -> None:
        if self.params.ping_pong:
            mgpu.barrier_wait(self.wait.turn.at[self.warpgroup])

    def _pass_turn(self) -> None:
        if self.params.ping_pong:
            mgpu.barrier_arrive(self.wait.turn.at[lax.rem(self.warpgroup + 1, self.params.warpgroups)])

    # Logits and weights.

    @property
    def _exponent(self) -> float:
        """Return what to multiply what `_logits` returns with, to have logarithms to the base 2."""
        rules = self.plan.rules
        if self.plan.adds:
            return LOG2E
        return LOG2E * (rules.scale if rules.soft_cap is None else rules.soft_cap)

    def _logits(self, scores: Any, block: Any, stage: Any, masked: bool) -> Any:
        """Return the logits, up to a factor that the exponential sees to, -inf where hidden."""
        rules = self.plan.rules
        factor = rules.scale
        if rules.soft_cap is not None:
            scores, factor = jnp.tanh(scores * (rules.scale / rules.soft_cap)), rules.soft_cap
        if self.plan.adds:
            scores = scores * factor
        bias, shown = self._extras(stage, masked)
        if bias is not None:
            scores = scores + bias.astype(jnp.float32)
        if self.plan.key_bias or (self.plan.key_mask and masked):
            scores = scores + self._by_key(self.inputs.key_bias, block)
        if masked:
            for visible in (shown, *self._visible(block)):
                scores = scores if visible is None else jnp.where(visible, scores, -jnp.inf)
        return scores

    def _softmax(self, logits: Any, top: Any, total: Any) -> tuple[Any, Any, Any, Any]:
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
        return new_top, total * decay + weights.sum(axis=1), weights, decay

    def _extras(self, stage: Any, masked: bool) -> tuple[Any, Any]:
        """Return the bias, and where the mask shows a key, of the block in a stage; `None` for what is not there."""
        if self.wait.extra_full is None:
            return None, None
        mgpu.barrier_wait(self.wait.extra_full.at[stage])
        bias, shown = (
            None if buffer is None else mgpu.load(buffer.at[stage, self.warpgroup], layout=_LAYOUT, optimized=False)
            for buffer in (self.buffers.bias, self.buffers.mask if masked else None)
        )
        mgpu.commit_smem()  # orders these reads before the copy that comes next
        mgpu.barrier_arrive(self.wait.extra_free.at[stage])
        return bias, None if shown is None else shown != 0

    def _visible(self, block: Any) -> list[Any]:
        """Return all else that hides keys of a block from rows: the window, the end of the keys, and segments."""
        plan = self.plan
        ahead_of = self.row + (plan.keys - plan.queries)
        start = block * self.params.kv_block
        key = mgpu.broadcasted_iota(jnp.int32, self.square, 1, layout=_LAYOUT) + start
        row = mgpu.broadcasted_iota(jnp.int32, self.square, 0, layout=_LAYOUT) + ahead_of
        visible = []
        if plan.rules.right is not None:
            visible.append(key <= row + plan.rules.right)
        if plan.rules.left is not None:
            visible.append(key >= row - plan.rules.left)
        if plan.hides_tail:
            visible.append(key < plan.keys)
        if plan.segments:
            ids = self.inputs.key_segments.at[self.tile.batch, pl.ds(start, self.params.kv_block)]
            own = lax.broadcast_in_dim(mgpu.load(ids, layout=_BY_KEY, optimized=False), self.square, [1])
            visible.append(own == _columns(self.segments, self.square))
        return visible

    def _by_key(self, array: Any, block: Any) -> Any:
        at = within(array, self.tile.batch, self.head)
        keys = pl.ds(block * self.params.kv_block, self.params.kv_block)
        return lax.broadcast_in_dim(mgpu.load(array.at[(*at, keys)], layout=_BY_KEY, optimized=False), self.square, [1])


def _columns(by_row: Any, shape: tuple[int, ...]) -> Any:
    """Return a number of each row, spread over the row."""
    return lax.broadcast_in_dim(by_row, shape, [0])
