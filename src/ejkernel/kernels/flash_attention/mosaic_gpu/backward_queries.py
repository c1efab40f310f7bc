# SPDX-License-Identifier: Apache-2.0
"""The backward kernel with one block of threads per block of queries: dQ of `form='split'`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.backend import Backend
from ejkernel.kernels._hopper.launch import PROGRAM, WARPGROUP, dispatch_warpgroup, launch, plgpu
from ejkernel.kernels._hopper.pipeline import Pipeline, unrolled_producer_tail

from .backward_plan import BackwardProblem, query_block_buffers
from .masks import (
    WGMMA,
    BackwardInputs,
    ScoreTerms,
    ScoreTile,
    block_range,
    broadcast_index,
    dropout_keeps,
    key_limit,
    mask_words,
    over_tiles,
    probabilities,
    zeros,
)
from .matrices import Matrices
from .params import BackwardParams
from .plan import REGISTERS
from .visibility import BlockRange


class QueryBlockMemory(NamedTuple):
    """Shared memory and barriers of a block of threads."""

    query: Any
    dout: Any
    key: Any
    value: Any
    loaded: Any  # queries and cotangents
    key_full: Any
    value_full: Any
    key_empty: Any
    value_empty: Any

    @property
    def key_pipeline(self) -> Pipeline:
        """The stages of keys."""
        return Pipeline(self.key_full, self.key_empty)

    @property
    def value_pipeline(self) -> Pipeline:
        """The stages of values."""
        return Pipeline(self.value_full, self.value_empty)


class QueryBlock(NamedTuple):
    """The work of one block of threads; `arrays` are references to `BackwardInputs`."""

    arrays: Any
    output: Any
    memory: QueryBlockMemory
    example: jax.Array
    head: jax.Array
    query: jax.Array
    blocks: BlockRange
    limit: Any


class QueriesKernel:
    """One launch: the gradient of the queries, scaled. Each consumer owns 64 queries."""

    def __init__(self, problem: BackwardProblem, params: BackwardParams, backend: Backend) -> None:
        self.problem, self.params, self.backend = problem, params, backend
        self.rows = 64 * params.q_warpgroups
        self.query_blocks = -(-problem.queries // self.rows)
        self.matrices = Matrices(backend, pieced=problem.pieced)
        buffers = query_block_buffers(problem, params)
        self.key_pieces, self.value_pieces = (self.matrices.count(buffers[name]) for name in ("key", "value"))

    def run(self, inputs: BackwardInputs) -> jax.Array:
        """Return the gradient of the queries; `inputs.ranges` are of blocks of queries."""
        problem, params = self.problem, self.params
        [dquery] = launch(
            self._block,
            inputs,
            [jax.ShapeDtypeStruct(inputs.query.shape, inputs.query.dtype)],
            name="attention_backward_queries",
            programs=problem.batch * problem.heads * self.query_blocks,
            memory=self._memory_types(),
            consumers=params.q_warpgroups,
            interpret=self.backend.interpret,
        )
        return dquery

    def _memory_types(self) -> QueryBlockMemory:
        consumers = self.params.q_warpgroups
        buffers = query_block_buffers(self.problem, self.params)
        key, value = (
            Pipeline.types(buffers[name].shape[0], consumers=consumers, copies=pieces)
            for name, pieces in (("key", self.key_pieces), ("value", self.value_pieces))
        )
        return QueryBlockMemory(
            **{name: self.matrices.type(buffer, self.problem.dtype) for name, buffer in buffers.items()},
            # Two matrices for each consumer.
            loaded=plgpu.Barrier(num_arrivals=(self.key_pieces + self.value_pieces) * consumers),
            key_full=key.full,
            value_full=value.full,
            key_empty=key.empty,
            value_empty=value.empty,
        )

    def _block(self, arrays: BackwardInputs, outputs: Any, memory: QueryBlockMemory) -> None:
        warpgroup, consumers, heads = lax.axis_index(WARPGROUP), self.params.q_warpgroups, self.problem.heads
        index = lax.axis_index(PROGRAM)
        example, rest = lax.div(index, self.query_blocks * heads), lax.rem(index, self.query_blocks * heads)
        # Under a causal mask the last queries see most keys: they come first, and short blocks fill the gaps.
        number, head = self.query_blocks - 1 - lax.div(rest, heads), lax.rem(rest, heads)
        blocks = block_range(arrays.ranges, example, number)
        limit = key_limit(self.problem, arrays, example, self.params.kv_block)
        block = QueryBlock(arrays, outputs[0], memory, example, head, number * self.rows, blocks, limit)
        dispatch_warpgroup(
            warpgroup,
            consumers,
            REGISTERS[consumers] if consumers > 1 else None,  # one consumer has 255 registers as it is
            producer=lambda: self._produce(block),
            consumer=lambda _: self._consume(block),
        )

    # Producer.

    def _produce(self, block: QueryBlock) -> None:
        params, arrays, memory = self.params, block.arrays, block.memory
        for w in range(params.q_warpgroups):
            at = (block.example, pl.ds(block.query + 64 * w, 64), block.head)
            self.matrices.copy_in(arrays.query, at, memory.query, (w,), memory.loaded)
            self.matrices.copy_in(arrays.dout, at, memory.dout, (w,), memory.loaded)
        group = lax.div(block.head, self.problem.heads_per_group)

        def of_tile(j: jax.Array, number: jax.Array) -> jax.Array:
            at = (block.example, pl.ds(j * params.kv_block, params.kv_block), group)
            # Two pipelines: scores start without values, and values are released before keys.
            for source, buffer, pipeline in (
                (arrays.key, memory.key, memory.key_pipeline),
                (arrays.value, memory.value, memory.value_pipeline),
            ):
                stage = pipeline.producer_acquire(number)
                self.matrices.copy_in(source, at, buffer, (stage,), pipeline.full.at[stage])
            return number + 1

        steps = lax.fori_loop(block.blocks.first, block.blocks.end, of_tile, jnp.int32(0))
        unrolled_producer_tail(steps, memory.key_pipeline, memory.value_pipeline)

    # Consumers.

    def _consume(self, block: QueryBlock) -> None:
        warpgroup, memory = lax.axis_index(WARPGROUP), block.memory
        first = block.query + 64 * warpgroup
        rows = (block.example, block.head, pl.ds(first, 64))
        shape = (64, self.params.kv_block)
        tile = ScoreTile(shape, 0, block.example, block.head, first, jnp.int32(0), block.limit)
        # Before the wait, so that these loads overlap with the copies.
        shift, delta = (tile.vector(x.at[rows], 0, optimized=False) for x in (block.arrays.shift, block.arrays.delta))
        plgpu.barrier_wait(memory.loaded)

        def of_tile(j: jax.Array, carry: Any, *, masked: bool) -> Any:
            here = tile._replace(key=j * self.params.kv_block)
            return self._mainloop(block, here, (shift, delta), carry, masked), carry[1] + 1

        masks = self.problem.needed_masks(self.params.kv_block, walks_queries=False)
        dquery, _ = over_tiles(block.blocks, of_tile, (zeros((64, self.problem.head_dim)), jnp.int32(0)), masks)
        # The buffer of this consumer's queries is free: no other one reads it, and all products are done.
        dquery = block.arrays.restored(dquery * self.problem.gradient_scale, block.example).astype(self.problem.dtype)
        at = (block.example, pl.ds(first, 64), block.head)
        self.matrices.store(memory.query, (warpgroup,), dquery, block.output, at)
        plgpu.wait_smem_to_gmem(0)

    def _mainloop(
        self, block: QueryBlock, tile: ScoreTile, rows: tuple[jax.Array, jax.Array], carry: Any, masked: bool
    ) -> jax.Array:
        """Return dQ with one tile added."""
        # Read again: held in a register through the loop, it makes the kernel spill.
        warpgroup, memory, matrices = lax.axis_index(WARPGROUP), block.memory, self.matrices
        dquery, number = carry
        stage, value_stage = memory.key_pipeline.stage(number), memory.value_pipeline.stage(number)
        shift, delta = (tile.spread(x, 0) for x in rows)
        in_scores = self.problem.shift_in_scores
        mask = mask_words(block.arrays, tile)
        memory.key_pipeline.consumer_wait(stage)

        def products(sums: Any) -> None:
            scores, dweights, dquery = sums
            key = matrices.tiles(memory.key, stage)
            matrices.multiply_transposed(scores, matrices.tiles(memory.query, warpgroup), key)
            memory.value_pipeline.consumer_wait(value_stage)
            value = matrices.tiles(memory.value, value_stage)
            matrices.multiply_transposed(dweights, matrices.tiles(memory.dout, warpgroup), value)
            # Probabilities are computed while the second product is in flight.
            raw = self.backend.read(scores, pending=self.value_pieces)
            terms = ScoreTerms(None if in_scores else shift, self._bias(block.arrays, tile), mask)
            weights, slope = probabilities(self.problem, block.arrays, tile, raw, terms, masked)
            # Rounded to half of the registers: the accumulator of a wide head leaves room for no more.
            weights = (weights if slope is None else weights * slope).astype(self.problem.dtype)
            pull = self.backend.read(dweights, pending=0)
            keep = dropout_keeps(self.problem, block.arrays, tile)
            dscores = weights.astype(jnp.float32) * (pull if keep is None else jnp.where(keep, pull, delta))
            # Before dQ's product, which needs only the keys.
            memory.value_pipeline.consumer_release(value_stage)
            dscores = dscores.astype(self.problem.dtype)
            matrices.multiply(dquery, dscores, key)

        start = (shift if in_scores else zeros(tile.shape), delta, dquery)
        dquery = self.backend.accumulate(products, *start)[2]
        memory.key_pipeline.consumer_release(stage)
        return dquery

    def _bias(self, arrays: BackwardInputs, tile: ScoreTile) -> jax.Array | None:
        if arrays.bias is None:
            return None
        bias: Any = arrays.bias
        pairs = (pl.ds(tile.query, tile.shape[0]), pl.ds(tile.key, tile.shape[1]))
        at = (*broadcast_index(bias, tile.example, tile.head), *pairs)
        loaded: jax.Array = plgpu.load(bias.at[at], layout=WGMMA, optimized=False)
        return loaded.astype(jnp.float32)
