# SPDX-License-Identifier: Apache-2.0
"""A consumer warpgroup of the forward: prologue, mainloop and epilogue for 64 rows of one head."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.device import remainder
from ejkernel.kernels._hopper.launch import plgpu
from ejkernel.kernels._hopper.pipeline import Pipeline
from ejkernel.kernels._numbers import LOG2_E, LOWEST
from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE, keeps

from .forward_memory import ForwardMemory, Piece, WarpgroupTile
from .masks import visible_bits, within_window
from .plan import ROWS, SMALL_CAP, ForwardPlan

_LAYOUT = plgpu.Layout.WGMMA
_BY_ROW, _BY_KEY = _LAYOUT.reduce(1), _LAYOUT.reduce(0)
_HUGE = 2.0**26  # of a logit: its neighbours in float32 are 8 apart


class _SoftmaxState(NamedTuple):
    """The state of the online softmax after some blocks of keys.

    Attributes:
        acc: Sum of weighted values, except for the last block's: `[rows, value_dim]` in float32.
        row_max: Largest logit, in the units of `ForwardConsumer._exponent`.
        row_sum: Sum of the weights.
        weights: Weights of the last block, in the dtype of the values.
        step: How many blocks this warpgroup has visited in all its tiles.
    """

    acc: Any
    row_max: Any
    row_sum: Any
    weights: Any
    step: Any


class ForwardConsumer:
    """One consumer warpgroup in one tile."""

    holds_queries = True  # some columns of them, in registers

    def __init__(self, memory: ForwardMemory, part: WarpgroupTile) -> None:
        self.memory, self.plan, self.params = memory, memory.plan, memory.plan.params
        self.inputs, self.buffers, self.barriers = memory.inputs, memory.buffers, memory.barriers
        self.backend = memory.backend
        self.part, self.tile, self.warpgroup = part, part.tile, part.warpgroup
        self.square = (ROWS, self.params.kv_block)
        self.held_columns = _held_columns(self.plan) if self.holds_queries else 0
        self.scale: Any = self.plan.rules.scale
        if self.plan.segments:
            ids = self.inputs.query_segments.at[self.tile.batch, 0, pl.ds(part.row, ROWS)]
            self.segments = plgpu.load(ids, layout=_BY_ROW, optimized=False)
        if self.inputs.dropout is not None:
            words = self.inputs.dropout.at[self.tile.batch, part.head, pl.ds(part.row, ROWS)]
            self.dropout = plgpu.load(words, layout=_BY_ROW, optimized=False)

    def run(self, step: Any) -> Any:
        """Compute and store output and log-sum-exp; return the step after the last block's."""
        plan, blocks = self.plan, self.tile.blocks
        # The prologue always masks its block.
        unmasked_from = jnp.clip(blocks.unmasked_from, blocks.first + 1, blocks.end)
        unmasked_until = jnp.clip(blocks.unmasked_until, unmasked_from, blocks.end)
        mainloop = self._overlapped if self.params.overlap else self._sequential
        state = self._prologue(step)
        self._release_previous_queries()
        # Separate loops for masked and unmasked blocks: one loop with a conditional mask took a causal forward of 4,096
        # queries at head_dim 128 3 % longer on one H200.
        if plan.masks_all:
            unmasked_until = blocks.first + 1
        else:
            if plan.table or plan.rules.left is not None:
                state = lax.fori_loop(blocks.first + 1, unmasked_from, lambda i, state: mainloop(state, i, True), state)
            state = lax.fori_loop(unmasked_from, unmasked_until, lambda i, state: mainloop(state, i, False), state)
        if plan.hides or plan.rules.right is not None or plan.has_tail:
            state = lax.fori_loop(unmasked_until, blocks.end, lambda i, state: mainloop(state, i, True), state)
        if not self.params.share_buffer:
            self._release_queries(self.part.number)
        self._epilogue(state._replace(acc=self._last_product(state)))
        return state.step

    def skip(self, step: Any) -> Any:
        """Skip a tile if its rows of this warpgroup are past the last query; return the step after the last block's."""
        barriers, blocks = self.barriers, self.tile.blocks
        barriers.query.consumer_wait(self.part.slot)
        self._release_previous_queries()

        def skip_block(_: Any, step: Any) -> Any:
            stage = barriers.key.stage(step)
            self._await_turn()
            self._pass_turn()
            for pipeline in (barriers.key, barriers.extra, barriers.value):
                if pipeline is not None:
                    pipeline.consumer_wait(stage)
                    pipeline.consumer_release(stage)
            return step + 1

        step = lax.fori_loop(blocks.first, blocks.end, skip_block, step)
        if not self.plan.frees_late:
            self._release_queries(self.part.number)
        return step

    def _prologue(self, step: Any) -> _SoftmaxState:
        """Visit the first block of keys."""
        self.barriers.query.consumer_wait(self.part.slot)
        self.held = self._held_queries()
        stage = self.barriers.key.stage(step)
        self.barriers.key.consumer_wait(stage)
        self._await_turn()

        def product(acc: Any) -> Any:
            self._multiply_keys(acc, stage, step)
            self._pass_turn()
            return acc[...]

        scores = self.backend.with_accumulators(product, self.square)
        self.barriers.key.consumer_release(stage)
        nothing = plgpu.layout_cast(jnp.full((ROWS, self.plan.value_dim), 0, jnp.float32), _LAYOUT)
        first = LOWEST if self._fixed_max is None else self._fixed_max
        row_max = plgpu.layout_cast(jnp.full((ROWS,), first, jnp.float32), _BY_ROW)
        row_sum = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), _BY_ROW)
        logits = self._logits(scores, self.tile.blocks.first, stage, True)
        row_max, row_sum, weights, _ = self._softmax(logits, self.tile.blocks.first, row_max, row_sum, True)
        return _SoftmaxState(nothing, row_max, row_sum, weights.astype(self.plan.dtype), step + 1)

    def _overlapped(self, state: _SoftmaxState, block: Any, masked: bool) -> _SoftmaxState:
        """Visit a block; its softmax overlaps with the product of the previous block's weights and values."""
        barriers, backend = self.barriers, self.backend
        stage, before = barriers.key.stage(state.step), barriers.value.stage(state.step - 1)
        barriers.key.consumer_wait(stage)
        self._await_turn()

        def products(scores: Any, acc: Any) -> Any:
            acc[...] = state.acc
            self._multiply_keys(scores, stage, state.step)
            barriers.value.consumer_wait(before)
            self._multiply_values(acc, state, before)
            self._pass_turn()
            # Products finish in order: the scores are done while the values' product runs beside the softmax. Without
            # that overlap the same forward took 4 % longer.
            found = backend.read(scores, pending=len(self.plan.value_columns))
            barriers.key.consumer_release(stage)
            logits = self._logits(found, block, stage, masked)
            row_max, row_sum, weights, decay = self._softmax(logits, block, state.row_max, state.row_sum, masked)
            total = backend.read(acc, pending=0)
            # Rounded only now: registers that a product in flight reads must not be written.
            return total, row_max, row_sum, weights.astype(self.plan.dtype), decay

        acc, row_max, row_sum, weights, decay = backend.with_accumulators(products, self.square, self._acc_shape)
        barriers.value.consumer_release(before)
        return _SoftmaxState(_decayed(acc, decay), row_max, row_sum, weights, state.step + 1)

    def _sequential(self, state: _SoftmaxState, block: Any, masked: bool) -> _SoftmaxState:
        """Visit a block: both products first, then the softmax."""
        barriers, backend = self.barriers, self.backend
        stage, before = barriers.key.stage(state.step), barriers.value.stage(state.step - 1)
        barriers.value.consumer_wait(before)
        barriers.key.consumer_wait(stage)
        self._await_turn()

        def products(scores: Any, acc: Any) -> Any:
            acc[...] = state.acc
            self._multiply_values(acc, state, before)
            self._multiply_keys(scores, stage, state.step)
            self._pass_turn()
            return backend.read(acc, pending=0), backend.read(scores, pending=0)

        acc, scores = backend.with_accumulators(products, self.square, self._acc_shape)
        barriers.key.consumer_release(stage)
        barriers.value.consumer_release(before)
        logits = self._logits(scores, block, stage, masked)
        row_max, row_sum, weights, decay = self._softmax(logits, block, state.row_max, state.row_sum, masked)
        weights = weights.astype(self.plan.dtype)
        return _SoftmaxState(_decayed(acc, decay), row_max, row_sum, weights, state.step + 1)

    def _last_product(self, state: _SoftmaxState) -> Any:
        """Return the sum of weighted values, with the last block's."""
        stage = self.barriers.value.stage(state.step - 1)
        self.barriers.value.consumer_wait(stage)
        self._prepare_last_values(stage)
        (acc,) = self.backend.accumulate(lambda sums: self._multiply_values(sums[0], state, stage), state.acc)
        self.barriers.value.consumer_release(stage)
        return acc

    def _prepare_last_values(self, stage: Any) -> None:
        """Change the values of the last block, for other kernels."""

    def _epilogue(self, state: _SoftmaxState) -> None:
        """Store output and log-sum-exp."""
        params, memory = self.params, self.memory
        share, lse = self._normalized(state) if self.inputs.sinks is None else self._with_sink(state)
        out = state.acc * along_rows(share, state.acc.shape)
        if params.persistent and not self.plan.frees_late:  # copies of the previous tile may still read the buffer
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pieces, out = memory.out(self.warpgroup, self.part.slot), out.astype(self.plan.dtype)
        for piece in pieces:
            start, width = piece.columns
            piece.tiles[...] = out[:, start : start + width] if self.plan.pieced else out
        plgpu.commit_smem()
        batch, rows, head = self.tile.batch, pl.ds(self.part.row, ROWS), self.part.head
        memory.copy_out(pieces, memory.outputs.out, (batch, rows, head))
        # Directly from registers; through shared memory a causal forward took 1 % longer.
        memory.outputs.lse.at[batch, head, rows][...] = lse
        if params.share_buffer and not self.plan.frees_late:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._release_queries(self.part.number)

    def _normalized(self, state: _SoftmaxState) -> tuple[Any, Any]:
        """Return the factor of the sum of values of each row, and the log-sum-exp."""
        empty = state.row_sum == 0.0
        # The dropout's factor is applied here, once per row rather than once per weight.
        share = jnp.where(empty, 0.0, 1 / (1 - self.plan.rules.dropout_rate) / state.row_sum)
        if self.plan.adds:
            lse = state.row_max + jnp.log2(state.row_sum) * (1 / LOG2_E)
        else:
            lse = (state.row_max + jnp.log2(state.row_sum)) * (1 / LOG2_E)
        return share, jnp.where(empty, EMPTY_ROW_LSE, lse)

    def _with_sink(self, state: _SoftmaxState) -> tuple[Any, Any]:
        """Return the same with an attention sink: one more logit in each row, with a value of zero."""
        # In the unit of the maxima: a factor would make the lowest float, which a bias may be, infinite.
        unit = LOG2_E if self.plan.adds else 1.0
        given, own = self.inputs.sinks[self.part.head], state.row_max
        # The maximum makes a sink of minus infinity finite, so that the differences below are no NaN.
        sink = jnp.maximum(given * (LOG2_E / unit), LOWEST)
        if self._fixed_max is not None:  # the maximum of a row without keys is still that of the soft cap
            own = jnp.where(state.row_sum == 0.0, LOWEST, own)
        top = jnp.maximum(own, sink)
        decay, present = jnp.exp2((own - top) * unit), jnp.where(given == -jnp.inf, 0.0, 1.0)
        total = state.row_sum * decay + jnp.exp2((sink - top) * unit) * present
        empty = total == 0.0
        share = jnp.where(empty, 0.0, decay / (total * (1 - self.plan.rules.dropout_rate)))
        lse = top * (unit / LOG2_E) + jnp.log2(total) * (1 / LOG2_E)
        return share, jnp.where(empty, EMPTY_ROW_LSE, lse)

    # Release of query buffers; a buffer that also stages the output is empty once that has been copied.

    def _release_previous_queries(self) -> None:
        """Release the previous tile's buffer; the copy of its output has had time to finish."""
        if self.plan.frees_late:

            @pl.when(self.part.number > 0)
            def _() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self._release_queries(self.part.number - 1)

    def _release_queries(self, number: Any) -> None:
        self.barriers.query.consumer_release(self.memory.query_slot(self.warpgroup, number))

    # Products, and turns at the tensor core.

    @property
    def _acc_shape(self) -> tuple[int, int]:
        return ROWS, self.plan.value_dim

    def _multiply_keys(self, scores: Any, stage: Any, step: Any) -> None:
        slot = self.part.slot
        if self.plan.has_many_descriptors:
            # The step has no sign bit, which the compiler cannot know: it computes the descriptors of the queries in
            # each step, in uniform registers. Outside of the loop it puts them into other registers, and spills some.
            slot = slot + lax.shift_right_logical(step, np.int32(31))
        left, right = self._columns(self.memory.query(slot)), self._columns(self.memory.key(stage))
        for query, key in zip([*self.held, *left[len(self.held) :]], right, strict=True):
            self.backend.multiply(scores, query, key.transpose((1, 0)))

    def _columns(self, pieces: Sequence[Piece]) -> list[Any]:
        """Return the pieces of queries or keys; whole ones are cut where the columns in registers end."""
        held = self.held_columns
        if self.plan.pieced or held in (0, self.plan.head_dim):
            return [piece.tiles for piece in pieces]
        return [
            pieces[0].tiles.at[:, pl.ds(start, end - start)] for start, end in ((0, held), (held, self.plan.head_dim))
        ]

    def _held_queries(self) -> list[Any]:
        """Return the columns of the queries that stay in registers through the mainloop."""
        tiles = self._columns(self.memory.query(self.part.slot))
        ends = itertools.accumulate(tile.shape[-1] for tile in tiles)
        held = [tile for tile, end in zip(tiles, ends, strict=True) if end <= self.held_columns]
        return [plgpu.load(tile, layout=_LAYOUT) for tile in held]

    def _multiply_values(self, acc: Any, state: _SoftmaxState, stage: Any) -> None:
        for value in self.memory.value(stage):
            start, width = value.columns
            part = acc.at[:, start : start + width] if self.plan.pieced else acc
            self.backend.multiply(part, state.weights, value.tiles)

    def _await_turn(self) -> None:
        if self.params.ping_pong:
            # Without turns all consumers compute their softmax at the same time, and that forward took 8 % longer.
            plgpu.barrier_wait(self.barriers.turn.at[self.warpgroup])

    def _pass_turn(self) -> None:
        if self.params.ping_pong:
            plgpu.barrier_arrive(self.barriers.turn.at[remainder(self.warpgroup + 1, self.params.warpgroups)])

    # Logits and weights.

    @property
    def _exponent(self) -> Any:
        """The factor that turns the values of `_logits` into logarithms to the base 2."""
        rules = self.plan.rules
        if self.plan.adds:
            return LOG2_E
        return self.scale * LOG2_E if rules.soft_cap is None else LOG2_E * rules.soft_cap

    @property
    def _fixed_max(self) -> float | None:
        """What takes the place of the rows' largest logits, as a logarithm to the base 2; `None`: they are found.

        A soft cap limits the logits, so that no weight leaves the range of float32 and bfloat16.
        """
        cap = self.plan.rules.soft_cap
        if cap is None or cap > SMALL_CAP or self.plan.dtype != "bfloat16" or self.plan.adds or self.plan.caps_late:
            return None
        return cap / 2 * LOG2_E

    def _logits(self, scores: Any, block: Any, stage: Any, masked: bool) -> Any:
        """Return the logits up to the factor `_exponent`; -inf where hidden."""
        rules = self.plan.rules
        factor = self.scale
        if rules.soft_cap is not None and not self.plan.caps_late:
            scores, factor = jnp.tanh(scores * (self.scale / rules.soft_cap)), rules.soft_cap
        if self.plan.adds or self.plan.caps_late:
            scores = scores * factor
        if self.barriers.extra is not None:
            scores = self._with_extras(scores, stage, masked)
        for visible in self._visible(block) if masked else ():
            scores = jnp.where(visible, scores, -jnp.inf)
        return scores

    def _softmax(self, logits: Any, block: Any, row_max: Any, row_sum: Any, masked: bool) -> tuple[Any, Any, Any, Any]:
        """Return the new maximum and sum, the weights, and the factor for earlier sums; `None` for a factor of 1."""
        exponent, new_max, decay = self._exponent, row_max, None
        if self._fixed_max is not None:
            weights = self._exp2(logits * exponent - self._fixed_max, masked)
        elif self.plan.adds:
            new_max = jnp.maximum(row_max, logits.max(axis=1))
            # The product with a huge maximum, such as the lowest float, is rounded too coarsely, or infinite. There the
            # logits' own rounding decides the weights, to any base.
            by_row = jnp.where(jnp.abs(new_max) > _HUGE, 1.0, exponent)
            shift = along_rows(new_max * by_row, logits.shape)
            weights = jnp.exp2(logits * along_rows(by_row, logits.shape) - shift)
            decay = jnp.exp2((row_max - new_max) * exponent)
        else:
            new_max = jnp.maximum(row_max, logits.max(axis=1) * exponent)
            weights = self._exp2(logits * exponent - along_rows(new_max, logits.shape), masked)
            decay = jnp.exp2(row_max - new_max)
        # The sum is over all weights: a dropout applies to the result of the softmax.
        row_sum = _decayed(row_sum, decay) + weights.sum(axis=1)
        if self.inputs.dropout is not None:
            weights = jnp.where(self._dropout_keeps(block), weights, 0.0)
        return new_max, row_sum, weights, decay

    def _exp2(self, x: Any, masked: bool) -> Any:
        """Return powers of two; of an unmasked block those of the last `fma_columns` keys by a polynomial."""
        first = self.params.kv_block - self.params.fma_columns
        if masked or self.barriers.extra is not None or first == self.params.kv_block:
            return jnp.exp2(x)
        found = self.backend.exp2_by_fma(x[:, first:])
        return found if first == 0 else jnp.concatenate([jnp.exp2(x[:, :first]), found], axis=1)

    def _first_key(self, block: Any) -> Any:
        return self.tile.origin + block * self.params.kv_block

    def _dropout_keeps(self, block: Any) -> Any:
        """Return which weights of a block the dropout keeps."""
        key = plgpu.broadcasted_iota(jnp.int32, self.square, 1, layout=_LAYOUT) + self._first_key(block)
        words = along_rows(self.dropout, self.square)
        return keeps(words, key.astype(words.dtype), self.plan.rules)

    def _with_extras(self, scores: Any, stage: Any, masked: bool) -> Any:
        """Return logits with bias, mask and segment ids from the extra pipeline's stage."""
        plan, buffers = self.plan, self.buffers
        extra = cast(Pipeline, self.barriers.extra)
        extra.consumer_wait(stage)
        if plan.bias:
            pieces = self.memory.bias(stage, self.warpgroup)
            parts = [plgpu.load(piece.tiles, layout=_LAYOUT, optimized=False) for piece in pieces]
            bias = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
            if plan.packs_mask and masked:
                bias = bias + self._by_key(buffers.key_bias, stage)
            scores = scores + self.backend.widened(bias)
        if plan.key_bias or (plan.key_mask and masked and not plan.packs_mask):
            scores = scores + self._by_key(buffers.key_bias, stage)
        if plan.caps_late:  # the cap would make a bias of minus infinity finite
            cap = cast(float, plan.rules.soft_cap)
            scores = jnp.where(scores == -jnp.inf, -jnp.inf, jnp.tanh(scores * (1 / cap)))
        if plan.mask and masked:
            rows = [buffers.mask.at[stage, self.warpgroup, i] for i in range(self.params.kv_block // 32)]
            words = tuple(plgpu.load(x, layout=_BY_ROW, optimized=False) for x in rows)
            scores = jnp.where(visible_bits(words, self.square), scores, -jnp.inf)
        if plan.segments and masked:
            own = self._by_key(buffers.key_segments, stage) == along_rows(self.segments, self.square)
            scores = jnp.where(own, scores, -jnp.inf)
        self.backend.order_reads()
        extra.consumer_release(stage)
        return scores

    def _by_key(self, buffer: Any, stage: Any) -> Any:
        loaded = plgpu.load(buffer.at[stage], layout=_BY_KEY, optimized=False)
        return lax.broadcast_in_dim(loaded, self.square, [1])

    def _visible(self, block: Any) -> list[Any]:
        """Return the conditions under which window and lengths let rows see the keys of a block."""
        start = self._first_key(block)
        key = plgpu.broadcasted_iota(jnp.int32, self.square, 1, layout=_LAYOUT)
        row = plgpu.broadcasted_iota(jnp.int32, self.square, 0, layout=_LAYOUT)
        # Added to the rows; a thread has two, so that the numbers of its many keys are constants.
        row = row + (self.part.row + (self.plan.keys - self.plan.queries) - start)
        conditions = within_window(self.plan.rules, row, key)
        if self.plan.key_lengths:
            # The maximum gives the length the type of values computed here, as with the table of blocks.
            conditions.append(key < jnp.maximum(self.inputs.key_lengths[self.tile.batch], 0) - start)
        elif self.plan.hides_tail:
            conditions.append(key < self.plan.keys - start)
        return conditions


def _held_columns(plan: ForwardPlan) -> int:
    """Return how many columns of the queries stay in registers, so that products read less shared memory.

    Without a window, forwards of 4,096 queries took up to 2 % less time on one H100, at head_dim 128, 168, 184 and 240;
    others took as long. A causal one at 192 took 1.4 % less with 64 columns, but 1.7 % more with 128; one at 128, and
    steps of 96 keys, spilled.
    """
    block, rules = plan.params.kv_block, plan.rules
    extras = plan.bias or plan.mask or plan.key_bias or plan.key_mask or plan.segments or rules.dropout_rate
    if extras or rules.soft_cap is not None or rules.left is not None:
        return 0
    if plan.head_dim < 128 or plan.params.warpgroups > 2 or block % 64:
        return 0
    registers = 192 if rules.right is None else 160
    # 128 threads share 64 rows of logits, weights in 16 bits, and output; 64 columns of queries take 16 registers.
    free = registers - block // 2 - block // 4 - plan.value_dim // 2
    return min(max(free, 0) // 16 * 64, 128, plan.head_dim // 64 * 64)


def _decayed(sums: Any, decay: Any) -> Any:
    """Return sums of rows, or of elements of rows, times the rows' factors."""
    if decay is None:
        return sums
    return sums * (decay if sums.ndim == 1 else along_rows(decay, sums.shape))


def along_rows(by_row: Any, shape: tuple[int, ...]) -> Any:
    """Return one number per row, broadcast along the row."""
    return lax.broadcast_in_dim(by_row, shape, [0])
