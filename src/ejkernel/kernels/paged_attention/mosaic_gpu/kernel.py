# SPDX-License-Identifier: Apache-2.0
"""Attention of tiles to blocks of keys, stored, or left as shares of items of several programs, and the sum of shares.

Both products are transposed: keys are the rows of the first, and columns of values those of the second. A product then
costs as many columns as a tile has rows, e.g. 8 in decode instead of 64. Copies take longer than products, so one
consumer warpgroup suffices, and two blocks of threads fit on a multiprocessor. With many columns one fits, and takes
twice as many blocks of keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat
from ejkernel.kernels._hopper.backend import Backend, backend_for
from ejkernel.kernels._hopper.blocks import columns_from, tiles_and_rows
from ejkernel.kernels._hopper.device import quotient, remainder
from ejkernel.kernels._hopper.launch import PROGRAM, WARPGROUP, dispatch_warpgroup, launch, plgpu
from ejkernel.kernels._hopper.pipeline import producer_tail
from ejkernel.kernels._numbers import LOG2_E
from ejkernel.kernels.paged_attention.schedule import BLOCK

from .memory import (
    BY_ROW,
    LAYOUT,
    Barriers,
    Buffers,
    Inputs,
    Item,
    Outputs,
    TileStore,
    Work,
    across,
    cache_row,
    item_of,
    scale_of_keys,
)
from .plan import PIECE, LaunchPlan
from .shares import Shares, SumInputs, summed, when_begun_here

_LOWEST = -1e30  # in place of -inf, so that differences of maxima are never NaN


class Results(NamedTuple):
    """Results in global memory.

    Attributes:
        out, lse: As in `Outputs`, without the rows of items with shares.
        shares, share_lse: As in `SumInputs`.
    """

    out: Any
    lse: Any
    shares: Any
    share_lse: Any


class State(NamedTuple):
    """Running sums of the softmax of a tile."""

    acc: Sequence[Any]  # [PIECE, rows] for each piece; with 8 bits those of a unit have its even and its odd columns
    top: Any  # [rows], to the base 2
    total: Any  # [BLOCK, rows]: summed over the first axis at the end, since that needs several warps


def run(plan: LaunchPlan, inputs: Inputs, items: int, interpret: Any = None) -> Results:
    """Run the kernel.

    Args:
        plan: The static description.
        inputs: The arrays.
        items: The number of items.
        interpret: `InterpretGPUParams` to simulate it on a CPU; `None` runs it on a GPU.
    """
    kernel = _Kernel(plan, backend_for(interpret))
    like: Any = jax.ShapeDtypeStruct
    types = Results(
        out=like((plan.tokens, plan.heads, plan.out_dim), plan.dtype),
        lse=like((items, plan.rows), jnp.float32) if plan.return_lse else None,
        shares=like((2 * plan.programs, plan.width, plan.rows), jnp.float32),
        share_lse=like((2 * plan.programs, plan.rows), jnp.float32),
    )
    leaves, structure = jax.tree.flatten(types)

    found = launch(
        lambda given, results, memory: kernel.run(given, jax.tree.unflatten(structure, results), memory),
        inputs,
        leaves,
        name="paged_attention",
        programs=plan.programs,
        memory=(Buffers.types(plan, kernel.backend), Barriers.types(plan)),
        consumers=1,
        interpret=interpret,
    )
    results: Results = jax.tree.unflatten(structure, found)
    return results


class _Kernel:
    """The program of one block of threads."""

    def __init__(self, plan: LaunchPlan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend

    def run(self, inputs: Inputs, results: Results, memory: tuple[Buffers, Barriers]) -> None:
        """Run this warpgroup as producer or consumer."""
        self.inputs, self.results, (self.buffers, self.barriers) = inputs, results, memory
        self.blocks, self.units = self.backend.views(self.buffers.cache, 2)
        self.q_tiles, self.q_rows = self.backend.views(self.buffers.q, 2)
        self.program = lax.axis_index(PROGRAM)
        self.work = Work.of(inputs.programs, self.program, self.plan.shares)
        dispatch_warpgroup(lax.axis_index(WARPGROUP), 1, None, producer=self._produce, consumer=self._consume)

    def _each_item(self, body: Callable[[Item, Any], Any], step: Any) -> Any:
        """Call `body(item, step)` for each item of this program, and return the last step."""
        work, tiles = self.work, self.inputs.tiles

        def one(number: Any, step: Any) -> Any:
            return body(item_of(self.plan, tiles, number), step)

        return lax.fori_loop(work.first_item, work.last_item + 1, one, step)

    # Producer.

    def _produce(self) -> None:
        steps = self._each_item(self._copy_item, jnp.int32(0))
        producer_tail(steps, self.barriers.cache)
        producer_tail(self.work.last_item + 1 - self.work.first_item, self.barriers.q)

    def _copy_item(self, item: Item, step: Any) -> Any:
        plan, pipeline = self.plan, self.barriers.q
        slot = pipeline.producer_acquire(item.number - self.work.first_item)
        for token in range(plan.tile_tokens):
            at = jnp.minimum(item.token + token, plan.tokens - 1)
            heads, rows = (
                pl.ds(item.head * plan.group, plan.group_rows),
                pl.ds(token * plan.group_rows, plan.group_rows),
            )
            for piece in range(plan.pieces):
                columns = columns_from(self.inputs.q, piece * PIECE, PIECE)
                source = self.inputs.q.at[at, heads, columns]
                plgpu.copy_gmem_to_smem(source, self.q_rows.at[slot, piece, rows], pipeline.full.at[slot])
        low, high = self.work.span(item)
        return lax.fori_loop(low, high, lambda block, step: self._copy_block(item, block, step), step)

    def _copy_block(self, item: Item, block: Any, step: Any) -> Any:
        plan, pipeline = self.plan, self.barriers.cache
        size = min(BLOCK, plan.page_size)
        keys = [block * BLOCK + copy * size for copy in range(plan.key_copies)]
        # Before the wait, which hides their latency.
        sizes, table = (plan.pages, plan.page_size, size), self.inputs.table
        rows = [cache_row(*sizes, table, item.sequence, key) for key in keys]
        stage = pipeline.producer_acquire(step)
        for copy, (key, row) in enumerate(zip(keys, rows, strict=True)):
            for source, target in self._copies(item, pl.ds(row, size), stage, pl.ds(copy * size, size)):
                if plan.key_copies == 1:
                    plgpu.copy_gmem_to_smem(source, target, pipeline.full.at[stage])
                else:
                    self.backend.copy_if(key < item.stop, source, target, pipeline.full.at[stage])
        return step + 1

    def _copies(self, item: Item, rows: Any, stage: Any, keys: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the sources and targets of copies of these rows of the cache to these keys of a stage."""
        plan, cache = self.plan, self.inputs.cache
        if plan.is_whole:
            yield cache.at[rows, item.head], self.blocks.at[stage, keys]
            return
        for kind, unit in itertools.product(range(2), range(plan.units)):
            columns = columns_from(cache, unit * plan.unit, plan.unit)
            yield cache.at[rows, 2 * item.head + kind, columns], self.blocks.at[stage, kind * plan.units + unit, keys]

    # Consumer.

    def _consume(self, warpgroup: Any) -> None:
        del warpgroup
        outputs = Outputs(self.results.out, self.results.lse)
        factors = self.inputs.sinks, self.inputs.v_scale
        self.store = TileStore(self.plan, self.backend, factors, outputs, self.buffers.out)
        self._each_item(self._attend, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def _attend(self, item: Item, step: Any) -> Any:
        plan, pipeline = self.plan, self.barriers.q
        self.slot = pipeline.stage(item.number - self.work.first_item)
        pipeline.consumer_wait(self.slot)
        low, high = self.work.span(item)
        state = State(
            [plgpu.layout_cast(jnp.full((PIECE, plan.rows), 0, jnp.float32), LAYOUT)] * plan.pieces,
            plgpu.layout_cast(jnp.full((plan.rows,), _LOWEST, jnp.float32), BY_ROW),
            plgpu.layout_cast(jnp.full((BLOCK, plan.rows), 0, jnp.float32), LAYOUT),
        )

        def add(block: Any, state: State) -> State:
            return self._add(item, block, pipeline_stage(block), state)

        def pipeline_stage(block: Any) -> Any:
            return self.barriers.cache.stage(step + (block - low))

        state = lax.fori_loop(low, high, add, state)
        pipeline.consumer_release(self.slot)
        self._finish(item, state)
        return step + jnp.maximum(high - low, 0)

    def _add(self, item: Item, block: Any, stage: Any, state: State) -> State:
        """Return the sums with one more block of keys."""
        plan, backend, pipeline = self.plan, self.backend, self.barriers.cache
        pipeline.consumer_wait(stage)
        scores, exponent = self._scores(item, stage)
        pairs = self._seen_pairs(item, block, stage) if plan.is_narrow else None
        edge = (block + 1) * BLOCK > item.position + 1
        if plan.window is not None:
            edge = edge | (block * BLOCK < item.position + plan.tile_tokens - 1 - plan.window)
        scores = lax.cond(edge, lambda x: self._visible(item, block, x), lambda x: x, scores)
        top = jnp.maximum(state.top, scores.max(axis=0) * exponent)
        weights = jnp.exp2(scores * exponent - across(top, scores.shape))
        decay = jnp.exp2(state.top - top)
        total = state.total * across(decay, state.total.shape) + weights
        acc = [part * across(decay, part.shape) for part in state.acc]
        self.buffers.weights.transpose((1, 0))[...] = weights.astype(plan.product_dtype)
        if pairs is None:
            self._clear_hidden_values(item, block, stage)
        plgpu.commit_smem()
        wide: list[Any] = []
        if pairs is not None:
            pipeline.consumer_release(stage)  # the values are in registers
            wide = [part for unit in pairs for part in backend.widened_pairs(unit, plan.cache_dtype)]

        def multiply(sums: Any) -> None:
            # Inside: with these constant indices outside of it, Pallas cannot lower the accumulators.
            values = wide or [self._unit(stage, 1, unit).transpose((1, 0)) for unit in range(plan.units)]
            for part, value in zip(sums, values, strict=True):
                backend.multiply(part, value, self.buffers.weights.transpose((1, 0)))

        sums = backend.accumulate(multiply, *acc)
        if pairs is None:
            pipeline.consumer_release(stage)
        return State(list(sums), top, total)

    def _unit(self, stage: Any, kind: int, unit: int) -> Any:
        """Return a unit of the keys (`kind` 0) or values (1) of a stage, `[BLOCK, PIECE]`."""
        at = kind * self.plan.units + unit
        if self.plan.is_whole:
            return self.units.at[stage, :, pl.ds(at * PIECE, PIECE)]
        return self.units.at[stage, at]

    def _pairs(self, stage: Any, kind: int, unit: int) -> Any:
        """Return a unit of 8-bit keys, `[BLOCK, PIECE]` pairs, or of values, `[PIECE, BLOCK]` pairs."""
        number = kind * self.plan.units + unit
        at, first = ((stage,), number * PIECE) if self.plan.is_whole else ((stage, number), 0)
        return self.backend.load_pairs(self.buffers.cache, at, pl.ds(first, PIECE), transposed=kind == 1)

    def _scores(self, item: Item, stage: Any) -> tuple[Any, Any]:
        """Return the scores, and the factor that turns them into logarithms to the base 2."""
        plan, backend = self.plan, self.backend

        if plan.is_narrow:
            pairs = [self._pairs(stage, 0, unit) for unit in range(plan.units)]
            keys = [part for unit in pairs for part in backend.widened_pairs(unit, plan.cache_dtype)]
        else:
            keys = [self._unit(stage, 0, unit) for unit in range(plan.units)]

        def multiply(scores: Any) -> Any:
            for piece, key in enumerate(keys):
                backend.multiply(scores, key, self.q_tiles.at[self.slot, piece].transpose((1, 0)))
            return backend.read(scores, pending=0)

        scores = backend.with_accumulators(multiply, (BLOCK, plan.rows))
        factor = plan.scale
        if self.inputs.k_scale is not None:
            factor = factor * scale_of_keys(self.inputs.k_scale, item.head)
        if plan.soft_cap is None:
            return scores, factor * LOG2_E
        return jnp.tanh(scores * (factor * (1 / plan.soft_cap))), plan.soft_cap * LOG2_E

    def _seen_pairs(self, item: Item, block: Any, stage: Any) -> list[Any]:
        """Return the values of a block, pairs for each unit, with zeros for keys that no row sees."""
        pairs = [self._pairs(stage, 1, unit) for unit in range(self.plan.units)]

        def visible(pairs: Any) -> Any:
            keep = seen(plgpu.broadcasted_iota(jnp.int32, pairs[0].shape, 1, layout=LAYOUT))
            return [jnp.where(keep, unit, jnp.zeros_like(unit)) for unit in pairs]

        hidden, seen = self._seen(item, block)
        found: list[Any] = lax.cond(hidden, visible, lambda x: x, pairs)
        return found

    def _visible(self, item: Item, block: Any, scores: Any) -> Any:
        """Return scores with minus infinity where a row does not see a key."""
        plan, shape = self.plan, (BLOCK, self.plan.rows)
        token = quotient(plgpu.broadcasted_iota(jnp.int32, (plan.rows,), 0, layout=BY_ROW), plan.group_rows)
        last = across(token + (item.position - block * BLOCK), shape)
        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LAYOUT)
        keep = key <= last
        if plan.window is not None:
            keep = keep & (key >= last - plan.window)
        return jnp.where(keep, scores, -jnp.inf)

    def _clear_hidden_values(self, item: Item, block: Any, stage: Any) -> None:
        """Zero values that no row sees: a weight of zero does not cancel a NaN."""
        hidden, seen = self._seen(item, block)

        @pl.when(hidden)
        def _clear() -> None:
            key = plgpu.broadcasted_iota(jnp.int32, (BLOCK, PIECE), 0, layout=LAYOUT)
            keep = seen(key)
            for unit in range(self.plan.units):
                part = self._unit(stage, 1, unit)
                values = plgpu.load(part, layout=LAYOUT, optimized=False)
                part[...] = jnp.where(keep, values, jnp.zeros_like(values))

    def _seen(self, item: Item, block: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return whether a block has keys that no row sees, and a function from keys to whether some row sees them."""
        plan = self.plan
        stop = item.stop - block * BLOCK
        hidden = stop < BLOCK
        if plan.window is None:
            return hidden, lambda key: key < stop
        first = jnp.maximum(item.position - plan.window, 0) - block * BLOCK
        return hidden | (first > 0), lambda key: (key < stop) & (key >= first)

    def _finish(self, item: Item, state: State) -> None:
        total, begins = state.total.sum(axis=0), self.work.begins(item)
        alone = begins & self.work.ends(item)

        @pl.when(alone)
        def _store() -> None:
            self.store.store(item, state.acc, state.top, total)

        @pl.when(jnp.logical_not(alone))
        def _leave_share() -> None:
            slot = 2 * self.program + begins.astype(jnp.int32)
            empty = total == 0.0
            factor = jnp.where(empty, 0.0, 1 / total)
            for piece, sums in enumerate(state.acc):
                share = self.results.shares.at[slot, pl.ds(piece * PIECE, PIECE)]
                compat.kernels.store_as_it_is(share, sums * across(factor, sums.shape))
            lse = jnp.where(empty, -jnp.inf, state.top + jnp.log2(total))
            compat.kernels.store_as_it_is(self.results.share_lse.at[slot], lse)


def run_sums(plan: LaunchPlan, given: SumInputs, interpret: Any = None) -> None:
    """Write the sums into the references `given.out` and `given.lse`."""
    kernel = _Sums(plan, backend_for(interpret))
    launch(
        lambda given, results, memory: kernel.run(given, memory),
        given,
        [jax.ShapeDtypeStruct((1,), jnp.int32)],  # a kernel needs its own result
        name="paged_attention_sums",
        programs=plan.programs * plan.pieces,
        memory=tiles_and_rows(kernel.backend, (1, plan.rows, PIECE), plan.dtype),
        interpret=interpret,
    )


class _Sums:
    """One block of threads sums a piece of the item that begins in one program and ends in another."""

    def __init__(self, plan: LaunchPlan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend

    def run(self, given: SumInputs, buffer: Any) -> None:
        """Sum one piece of an item's shares."""
        number = lax.axis_index(PROGRAM)
        program, piece = quotient(number, self.plan.pieces), remainder(number, self.plan.pieces)
        work = Work.of(given.programs, program, self.plan.shares)
        item = item_of(self.plan, given.tiles, jnp.maximum(work.last_item, 0))
        when_begun_here(work, item, lambda: self._sum(given, buffer, (program, piece), item, work))

    def _sum(self, given: SumInputs, buffer: Any, at: tuple[Any, Any], item: Item, work: Work) -> None:
        rows, (program, piece) = self.plan.rows, at
        columns = pl.ds(piece * PIECE, PIECE)
        shares = Shares(
            shape=(PIECE, rows),
            axis=1,
            together=max(1, 64 // rows),
            load=lambda slot: plgpu.load(given.shares.at[slot, columns], layout=LAYOUT, optimized=False),
            load_lse=lambda slot: plgpu.load(given.share_lse.at[slot], layout=BY_ROW, optimized=False),
        )
        found, outputs = summed(shares, program, item, work), Outputs(given.out, given.lse)
        store = TileStore(self.plan, self.backend, (given.sinks, given.scale), outputs, buffer)
        lse = store.store_pieces(item, [found.acc], found.top, found.total, [piece * PIECE])
        if given.lse is not None:
            pl.when(piece == 0)(lambda: compat.kernels.store_as_it_is(given.lse.at[item.number], lse))
        plgpu.wait_smem_to_gmem(0)
