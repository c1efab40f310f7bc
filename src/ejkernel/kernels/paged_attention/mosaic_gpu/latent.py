# SPDX-License-Identifier: Apache-2.0
"""Latent attention: all query heads of a token share one key head with the values as its first columns.

The rows of both products are query heads. Two consumer warpgroups take blocks of keys in turn, each with a stage of its
own: a warpgroup computes the scores and weights of its block, and both multiply all weights with their half of the
values' columns, since the sum of a whole tile does not fit in the registers of one warpgroup. Weights replace the rest
of the keys in shared memory, which only the scores need.

The first warpgroup of a pair of blocks leads: while it computes weights, the other one computes scores, and while that
one computes weights, both multiply those of the first. A half of a stage is free as soon as its warpgroup has
multiplied it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import compat
from ejkernel.kernels._hopper.backend import Backend, backend_for
from ejkernel.kernels._hopper.device import Registers, quotient, remainder
from ejkernel.kernels._hopper.launch import PROGRAM, WARPGROUP, dispatch_warpgroup, launch, plgpu, tiled
from ejkernel.kernels._numbers import LOG2_E
from ejkernel.kernels.paged_attention.schedule import BLOCK

from .latent_memory import (
    BY_ROW,
    LAYOUT,
    Barriers,
    Buffers,
    Results,
    by_row,
    finished,
    item_of,
    load_rows,
)
from .latent_plan import REST, ROWS, LatentPlan
from .memory import Inputs, Item, Work, cache_row, scale_of_keys
from .shares import Shares, SumInputs, summed, when_begun_here

_LOWEST = -1e30  # in place of -inf, so that differences of maxima are never NaN
_REGISTERS = Registers(producer=24, consumer=240)
_SCORES = (ROWS, BLOCK)

_WIDTH = REST  # columns of one program
_TOGETHER = 2  # shares that are loaded at once


class State(NamedTuple):
    """Running sums of the softmax of a tile in one warpgroup."""

    acc: Any  # [ROWS, half]: of all blocks
    top: Any  # [ROWS], to the base 2: of all blocks
    total: Any  # [ROWS]: of the blocks of this warpgroup


def run(plan: LatentPlan, inputs: Inputs, interpret: Any = None) -> Results:
    """Run the kernel; without the rows of items with shares, `out` and `lse` are incomplete."""
    kernel = _Kernel(plan, backend_for(interpret))
    like: Any = jax.ShapeDtypeStruct
    rows = plan.parts * ROWS
    types = Results(
        out=like((plan.tokens, plan.heads, plan.value_dim), plan.dtype),
        lse=like((plan.tokens, rows), jnp.float32),
        shares=like((2 * plan.groups, 2, rows, plan.value_dim), plan.dtype),
        share_lse=like((2 * plan.groups, rows), jnp.float32),
    )
    found = launch(
        lambda given, results, memory: kernel.run(given, Results(*results), memory),
        inputs,
        list(types),
        name="latent_attention",
        programs=plan.programs,
        memory=(Buffers.types(plan), Barriers.types(plan)),
        consumers=2,
        interpret=interpret,
    )
    return Results(*found)


class _Kernel:
    """The program of one block of threads."""

    def __init__(self, plan: LatentPlan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend

    def run(self, inputs: Inputs, results: Results, memory: tuple[Buffers, Barriers]) -> None:
        """Run this warpgroup as producer or consumer."""
        self.inputs, self.results, (self.buffers, self.barriers) = inputs, results, memory
        program = lax.axis_index(PROGRAM)
        self.group, self.part = quotient(program, self.plan.parts), remainder(program, self.plan.parts)
        self.work = Work.of(inputs.programs, self.group, self.plan.group_shares)
        dispatch_warpgroup(lax.axis_index(WARPGROUP), 2, _REGISTERS, producer=self._produce, consumer=self._consume)

    def _each_item(self, body: Callable[[Item, Any], Any], state: Any) -> Any:
        """Call `body(item, state)` for each item of this program, and return the last state."""

        def one(index: Any, state: Any) -> Any:
            return body(item_of(self.inputs.tiles, index), state)

        return lax.fori_loop(self.work.first_item, self.work.last_item + 1, one, state)

    # Producer.

    def _produce(self) -> None:
        used = self._each_item(self._copy_item, (jnp.int32(0), jnp.int32(0)))
        for stage in (0, 1):
            for pipeline in (self.barriers.own, self.barriers.other):
                pipeline.producer_wait(_once(pipeline, used[stage]), stage)
        self.barriers.q.producer_wait(self.work.last_item + 1 - self.work.first_item, 0)

    def _copy_item(self, item: Item, used: tuple[Any, Any]) -> tuple[Any, Any]:
        """Copy queries and keys of an item; return how often each stage was used."""
        self._copy_queries(item)
        low, high = self.work.span(item)
        pairs = quotient(jnp.maximum(high - low, 0), 2)

        def pair(index: Any, used: tuple[Any, Any]) -> tuple[Any, Any]:
            for stage in (0, 1):
                self._copy_block(item, low + 2 * index + stage, stage, used[stage])
            return used[0] + 1, used[1] + 1

        used = lax.fori_loop(0, pairs, pair, used)
        last = low + 2 * pairs
        pl.when(last < high)(functools.partial(self._copy_block, item, last, 0, used[0]))
        return used[0] + (last < high).astype(jnp.int32), used[1]

    def _copy_queries(self, item: Item) -> None:
        plan, pipeline, buffers = self.plan, self.barriers.q, self.buffers
        pipeline.producer_wait(item.number - self.work.first_item, 0)
        heads, rows = pl.ds(self.part * plan.rows, plan.rows), pl.ds(0, plan.rows)
        targets = [(half * plan.half, plan.half, buffers.q.at[half, rows]) for half in (0, 1)]
        for start, width, target in (*targets, (plan.value_dim, REST, buffers.q_rest.at[0, rows])):
            source = self.inputs.q.at[item.token, heads, pl.ds(start, width)]
            plgpu.copy_gmem_to_smem(source, target, pipeline.full.at[0])

    def _copy_block(self, item: Item, block: Any, stage: int, used: Any) -> None:
        """Copy a block of keys into a stage, the half of its warpgroup first."""
        plan, own, other = self.plan, self.barriers.own, self.barriers.other
        size = min(BLOCK, plan.page_size)
        keys = [block * BLOCK + copy * size for copy in range(plan.copies)]
        # Before the wait, which hides their latency.
        rows = [cache_row(plan.pages, plan.page_size, size, self.inputs.table, item.sequence, key) for key in keys]

        def copy(start: int, width: int, target: Any, barrier: Any) -> None:
            for i, (key, row) in enumerate(zip(keys, rows, strict=True)):
                source = self.inputs.cache.at[pl.ds(row, size), pl.ds(start, width)]
                part = target.at[pl.ds(i * size, size)]
                if plan.copies == 1:
                    plgpu.copy_gmem_to_smem(source, part, barrier)
                else:
                    self.backend.copy_if(key < item.stop, source, part, barrier)

        own.producer_wait(_once(own, used), stage)
        copy(stage * plan.half, plan.half, self.buffers.values.at[stage, stage], own.full.at[stage])
        other.producer_wait(_once(other, used), stage)
        half = 1 - stage
        copy(half * plan.half, plan.half, self.buffers.values.at[stage, half], other.full.at[stage])
        copy(plan.value_dim, REST, self.buffers.rest.at[stage], other.full.at[stage])

    # Consumers.

    def _consume(self, warpgroup: Any) -> None:
        for own, add_pair, add_one in ((0, self._lead, self._lead_alone), (1, self._follow, self._follow_alone)):
            run = functools.partial(self._each_item, functools.partial(self._attend, own, add_pair, add_one), 0)
            pl.when(warpgroup == own)(functools.partial(_ignored, run))
        plgpu.wait_smem_to_gmem(0)

    def _attend(self, own: int, add_pair: Any, add_one: Any, item: Item, state: Any) -> Any:
        del state
        plan, q = self.plan, self.barriers.q
        q.consumer_wait(0)
        low, high = self.work.span(item)
        pairs = quotient(jnp.maximum(high - low, 0), 2)
        sums = State(
            plgpu.layout_cast(jnp.full((ROWS, plan.half), 0, jnp.float32), LAYOUT),
            plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), BY_ROW),
            plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), BY_ROW),
        )
        sums = lax.fori_loop(0, pairs, lambda i, sums: add_pair(item, low + 2 * i, sums), sums)
        last = low + 2 * pairs
        sums = lax.cond(last < high, lambda sums: add_one(item, last, sums), lambda sums: sums, sums)
        self._finish(item, own, sums)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()  # orders the interpreter's reads before the next queries
        q.consumer_release(0)
        return 0

    def _lead(self, item: Item, block: Any, sums: State) -> State:
        """Return the sums with a pair of blocks, in the first warpgroup."""
        sums = self._lead_alone(item, block, sums)
        plgpu.barrier_wait(self.barriers.weights.at[1])
        return self._add_other(block, 0, sums)

    def _lead_alone(self, item: Item, block: Any, sums: State) -> State:
        scores, exponent = self._scores(item, block, 0)
        sums, decay = self._weigh(item, block, 0, scores, exponent, sums)
        (acc,) = self.backend.accumulate(
            functools.partial(self._multiply, block, 0, 0), sums.acc * by_row(decay, sums.acc.shape)
        )
        self.barriers.own.consumer_release(0)
        return sums._replace(acc=acc)

    def _follow(self, item: Item, block: Any, sums: State) -> State:
        """Return the sums with a pair of blocks, in the second warpgroup."""
        backend, barriers = self.backend, self.barriers
        scores, exponent = self._scores(item, block + 1, 1)
        plgpu.barrier_wait(barriers.weights.at[0])
        barriers.other.consumer_wait(0)
        sums = self._raise_top(sums, 0)

        def overlapped(acc: Any) -> tuple[State, Any]:
            acc[...] = sums.acc
            self._multiply(block, 0, 1, (acc,))
            found, decay = self._weigh(item, block + 1, 1, scores, exponent, sums)
            return found._replace(acc=backend.read(acc, pending=0)), decay

        sums, decay = backend.with_accumulators(overlapped, (ROWS, self.plan.half))
        barriers.other.consumer_release(0)
        (acc,) = backend.accumulate(
            functools.partial(self._multiply, block, 1, 1), sums.acc * by_row(decay, sums.acc.shape)
        )
        barriers.own.consumer_release(1)
        return sums._replace(acc=acc)

    def _follow_alone(self, item: Item, block: Any, sums: State) -> State:
        del item
        plgpu.barrier_wait(self.barriers.weights.at[0])
        return self._add_other(block, 1, sums)

    def _add_other(self, block: Any, own: int, sums: State) -> State:
        """Add the other warpgroup's block, with weights from shared memory, and return the sums."""
        stage, other = 1 - own, self.barriers.other
        other.consumer_wait(stage)
        sums = self._raise_top(sums, stage)
        (acc,) = self.backend.accumulate(functools.partial(self._multiply, block, stage, own), sums.acc)
        other.consumer_release(stage)
        return sums._replace(acc=acc)

    def _raise_top(self, sums: State, stage: int) -> State:
        """Return the sums relative to the maxima of the other warpgroup's block."""
        top = load_rows(self.buffers.tops.at[stage])
        decay = jnp.exp2(sums.top - top)
        return State(sums.acc * by_row(decay, sums.acc.shape), top, sums.total * decay)

    def _scores(self, item: Item, block: Any, stage: int) -> tuple[Any, Any]:
        """Return the scores, and the factor that turns them into logarithms to the base 2."""
        plan, backend, buffers, barriers = self.plan, self.backend, self.buffers, self.barriers

        zero = _zero(block)

        def multiply(scores: Any) -> Any:
            for half, pipeline in ((stage, barriers.own), (1 - stage, barriers.other)):
                pipeline.consumer_wait(stage)
                values = buffers.values.at[stage + zero, half]
                backend.multiply(scores, buffers.q.at[half + zero], values.transpose((1, 0)))
            backend.multiply(scores, buffers.q_rest.at[zero], buffers.rest.at[stage + zero].transpose((1, 0)))
            return backend.read(scores, pending=0)

        scores = backend.with_accumulators(multiply, _SCORES)
        factor = plan.scale
        if self.inputs.k_scale is not None:
            factor = factor * scale_of_keys(self.inputs.k_scale, 0)
        exponent = factor * LOG2_E
        if plan.soft_cap is not None:
            scores, exponent = jnp.tanh(scores * (factor * (1 / plan.soft_cap))), plan.soft_cap * LOG2_E
        edge = (block + 1) * BLOCK > item.position + 1
        if plan.window is not None:
            edge = edge | (block * BLOCK < item.position - plan.window)
        return lax.cond(edge, lambda x: self._visible(item, block, x), lambda x: x, scores), exponent

    def _weigh(self, item: Item, block: Any, stage: int, scores: Any, exponent: Any, sums: State) -> tuple[State, Any]:
        """Put the weights of a block into shared memory; return the new sums, and the factor still due on `acc`."""
        top = jnp.maximum(sums.top, scores.max(axis=1) * exponent)
        compat.kernels.store_as_it_is(self.buffers.tops.at[stage], top)
        weights = jnp.exp2(scores * exponent - by_row(top, _SCORES))
        self.buffers.rest.at[stage + _zero(block)][...] = weights.astype(self.plan.dtype)
        self._clear_hidden_values(item, block, stage)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.weights.at[stage])
        decay = jnp.exp2(sums.top - top)
        return State(sums.acc, top, sums.total * decay + weights.sum(axis=1)), decay

    def _multiply(self, block: Any, stage: int, half: int, sums: Any) -> None:
        stage = stage + _zero(block)
        self.backend.multiply(sums[0], self.buffers.rest.at[stage], self.buffers.values.at[stage, half])

    def _visible(self, item: Item, block: Any, scores: Any) -> Any:
        """Return scores with minus infinity for keys that the token does not see."""
        key, last = plgpu.broadcasted_iota(jnp.int32, _SCORES, 1, layout=LAYOUT), item.position - block * BLOCK
        keep = key <= last
        if self.plan.window is not None:
            keep = keep & (key >= last - self.plan.window)
        return jnp.where(keep, scores, -jnp.inf)

    def _clear_hidden_values(self, item: Item, block: Any, stage: int) -> None:
        """Zero values that the token does not see: a weight of zero does not cancel a NaN."""
        last, first = item.position - block * BLOCK, jnp.int32(0)
        if self.plan.window is not None:
            first = jnp.maximum(item.position - self.plan.window, 0) - block * BLOCK

        @pl.when((last < BLOCK - 1) | (first > 0))
        def _clear() -> None:
            key = plgpu.broadcasted_iota(jnp.int32, (BLOCK, REST), 0, layout=LAYOUT)
            keep = (key <= last) & (key >= first)
            for half in (0, 1):
                for start in range(0, self.plan.half, REST):
                    part = self.buffers.values.at[stage, half, :, pl.ds(start, REST)]
                    values = plgpu.load(part, layout=LAYOUT, optimized=False)
                    part[...] = jnp.where(keep, values, jnp.zeros_like(values))

    def _finish(self, item: Item, own: int, sums: State) -> None:
        """Store the tile, or leave a share."""
        plan, work = self.plan, self.work
        totals = self.buffers.totals.at[remainder(item.number - work.first_item, 2)]
        compat.kernels.store_as_it_is(totals.at[own], sums.total)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.totals)
        plgpu.barrier_wait(self.barriers.totals)
        total = load_rows(totals.at[0]) + load_rows(totals.at[1])
        begins, columns = work.begins(item), pl.ds(own * plan.half, plan.half)
        alone = begins & work.ends(item)

        @pl.when(alone)
        def _store() -> None:
            out, lse = finished(self.inputs.sinks, self.inputs.k_scale, self.part, sums.acc, sums.top, total)
            heads = pl.ds(self.part * plan.rows, plan.rows)
            self._store(out.astype(plan.dtype), own, plan.rows, self.results.out.at[item.token, heads, columns])
            if own == 0:
                compat.kernels.store_as_it_is(self.results.lse.at[item.token, pl.ds(self.part * ROWS, ROWS)], lse)

        @pl.when(jnp.logical_not(alone))
        def _leave_share() -> None:
            slot, rows = 2 * self.group + begins.astype(jnp.int32), pl.ds(self.part * ROWS, ROWS)
            empty = total == 0.0
            share = sums.acc * by_row(jnp.where(empty, 0.0, 1 / total), sums.acc.shape)
            for number in (0, 1):
                rounded = share.astype(plan.dtype)
                self._store(rounded, own, ROWS, self.results.shares.at[slot, number, rows, columns])
                share = share - rounded.astype(jnp.float32)
            if own == 0:
                lse = jnp.where(empty, -jnp.inf, sums.top + jnp.log2(total))
                compat.kernels.store_as_it_is(self.results.share_lse.at[slot, rows], lse)

    def _store(self, values: Any, own: int, rows: int, target: Any) -> None:
        """Start copying the first rows to global memory, through the buffer of the queries after their last use."""
        buffer = self.buffers.q.at[own]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[...] = values
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, rows)], target)


def _once(pipeline: Any, used: Any) -> Any:
    """Return a step that waits for a stage if it was used, for pipelines with stages that are used independently."""
    return jnp.where(used > 0, pipeline.stages, 0)


def _zero(block: Any) -> Any:
    """Return zero, which the compiler does not know.

    Otherwise it computes more than a hundred addresses of shared memory before the loop, and spills them.
    """
    return jnp.minimum(block, 0)


def _ignored(run: Callable[[], Any]) -> None:
    run()


def run_sums(plan: LatentPlan, given: SumInputs, interpret: Any = None) -> None:
    """Write the sums into the references `given.out` and `given.lse`."""
    pieces, backend = plan.value_dim // _WIDTH, backend_for(interpret)
    launch(
        lambda given, results, memory: _Sums(plan, given, backend, memory, pieces).run(),
        given,
        [jax.ShapeDtypeStruct((1,), jnp.int32)],  # a kernel needs its own result
        name="latent_attention_sums",
        programs=plan.programs * pieces,
        memory=tiled((ROWS, _WIDTH), plan.dtype),
        interpret=interpret,
    )


class _Sums:
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
        work = Work.of(self.given.programs, self.group, self.plan.group_shares)
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
        plgpu.copy_smem_to_gmem(self.buffer.at[pl.ds(0, self.plan.rows)], target)

        @pl.when(self.is_first)
        def _store() -> None:
            compat.kernels.store_as_it_is(self.given.lse.at[item.token, pl.ds(self.part * ROWS, ROWS)], lse)

        plgpu.wait_smem_to_gmem(0)

    def _share_lse(self, slot: Any) -> Any:
        return load_rows(self.given.share_lse.at[slot, pl.ds(self.part * ROWS, ROWS)])

    def _share(self, slot: Any) -> Any:
        rows = pl.ds(self.part * ROWS, ROWS)
        numbers = [self.given.shares.at[slot, number, rows, self.columns] for number in (0, 1)]
        high, low = (plgpu.load(x, layout=LAYOUT, optimized=False).astype(jnp.float32) for x in numbers)
        return high + low
