# SPDX-License-Identifier: Apache-2.0
"""Backward kernels with one block of threads per block of keys: launch, producer, epilogue.

A block walks over the query tiles that see its keys, in all heads of its group, so that dK and dV need no second sum.
With `head_parts` it walks over some of the heads, and XLA adds up dK and dV of the parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.backend import Backend
from ejkernel.kernels._hopper.launch import PROGRAM, WARPGROUP, dispatch_warpgroup, launch, plgpu, swizzled, tiled
from ejkernel.kernels._hopper.pipeline import Pipeline, unrolled_producer_tail

from .backward_order import order_of
from .backward_plan import BackwardProblem, bias_in_tiles, dquery_columns, key_block_buffers
from .masks import WGMMA, BackwardInputs, ScoreTerms, ScoreTile, block_range, broadcast_index, key_limit, zeros
from .matrices import Matrices
from .params import BackwardParams
from .plan import REGISTERS
from .visibility import BlockRange


class KeyBlockMemory(NamedTuple):
    """Shared memory and barriers of a block of threads; unused ones are `None`."""

    key: Any
    value: Any
    query: Any
    dout: Any
    shift: Any
    delta: Any
    weights: Any
    dscores: Any
    dquery: Any
    bias: Any
    dbias: Any
    loaded: Any  # keys and values
    query_full: Any
    dout_full: Any
    query_empty: Any
    dout_empty: Any
    weights_full: Any
    weights_empty: Any
    dscores_full: Any
    bias_full: Any
    bias_empty: Any
    done: Any  # no consumer needs keys and values any more

    @property
    def query_pipeline(self) -> Pipeline:
        """The stages of queries, with the shifts of their rows."""
        return Pipeline(self.query_full, self.query_empty)

    @property
    def dout_pipeline(self) -> Pipeline:
        """The stages of cotangents, with the deltas of their rows."""
        return Pipeline(self.dout_full, self.dout_empty)

    @property
    def weights_pipeline(self) -> Pipeline:
        """The stages through which one consumer warpgroup passes probabilities to the other."""
        return Pipeline(self.weights_full, self.weights_empty)

    @property
    def bias_pipeline(self) -> Pipeline | None:
        """The stages of the bias."""
        return None if self.bias is None else Pipeline(self.bias_full, self.bias_empty)


class GradientSums(NamedTuple):
    """References to float32 sums in global memory, of padded lengths, which start from zeros.

    Attributes:
        dquery: `[batch, queries, heads, head_dim]`, unscaled; `None` if another kernel computes it.
        dbias: `[batch or 1, heads or 1, keys, queries]`, or queries before keys if each element is stored once;
            `None` without a bias.
    """

    dquery: Any = None
    dbias: Any = None


class KeyBlock(NamedTuple):
    """The work of one block of threads: the gradients of some consecutive keys.

    Attributes:
        arrays: References to the `BackwardInputs`.
        sums: See `GradientSums`.
        outputs: References to dK and dV.
        memory: Shared memory.
        example: Index in the batch.
        part: Index of the part of the query heads: each group of heads has `head_parts` of them.
        key: Number of the first key.
        blocks: The range of query tiles that see these keys.
        limit: See `masks.key_limit`.
    """

    arrays: Any
    sums: GradientSums
    outputs: tuple[Any, ...]
    memory: KeyBlockMemory
    example: jax.Array
    part: jax.Array
    key: jax.Array
    blocks: BlockRange
    limit: Any


class QueryStep(NamedTuple):
    """One step of a block of keys: a tile of queries of one head.

    Attributes:
        head: Query head.
        tile: Number of the tile of queries.
        number: How many steps came before.
    """

    head: jax.Array
    tile: jax.Array
    number: jax.Array


class KeyBlockKernel:
    """One launch: the gradients of keys and values, and with `form='fused'` the unscaled sum of the queries'."""

    def __init__(self, problem: BackwardProblem, params: BackwardParams, backend: Backend) -> None:
        self.problem, self.params, self.backend = problem, params, backend
        self.fused = params.form == "fused"
        self.key_blocks = -(-problem.keys // params.keys)
        self.masks = problem.needed_masks(params.keys, walks_queries=True)
        self.columns = dquery_columns(problem, params)
        self.parts = problem.groups * params.head_parts
        # The first parts of a group have one head more if its heads do not divide evenly.
        self.heads_per_part, self.longer_parts = divmod(problem.heads_per_group, params.head_parts)
        self.programs = problem.batch * self.parts * self.key_blocks
        self.together = order_of(problem, params).together
        self.matrices = Matrices(backend, pieced=problem.pieced)
        buffers = key_block_buffers(problem, params)
        self.bias_in_tiles = problem.bias is not None and bias_in_tiles(problem, params)
        self.bias_pieces = [(0, params.keys)] if self.bias_in_tiles else [(i, 64) for i in range(params.keys // 64)]
        self.key_pieces, self.value_pieces = (self.matrices.count(buffers[name]) for name in ("key", "value"))

    def run(self, inputs: BackwardInputs, sums: GradientSums) -> tuple[jax.Array, jax.Array]:
        """Return the gradients of key and value of all parts, scaled; add the others to `sums`."""
        dkey, dvalue = launch(
            self._block,
            (inputs, sums),
            self.out_types(inputs),
            name=f"attention_backward_{self.params.division}",
            programs=self.programs,
            memory=self._memory_types(),
            consumers=self.params.warpgroups,
            interpret=self.backend.interpret,
        )
        return dkey, dvalue

    def out_types(self, inputs: BackwardInputs) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the results of `run`."""
        shapes = ((*x.shape[:2], self.parts, x.shape[3]) for x in (inputs.key, inputs.value))
        # Parts are rounded too: they leave through the buffers of keys and values, which have no room for float32.
        return [jax.ShapeDtypeStruct(shape, self.problem.dtype) for shape in shapes]

    def consume(self, block: KeyBlock) -> None:
        """Compute and store the gradients of a block of keys, in one consumer warpgroup.

        Consumers read their number from `lax.axis_index` wherever they need it. Held in a register through the mainloop
        it made a causal gradient at head_dim 128 spill 240 bytes.
        """
        raise NotImplementedError

    def _memory_types(self) -> KeyBlockMemory:
        params = self.params
        buffers: dict[str, Any] = {}
        sizes = key_block_buffers(self.problem, params)
        for name, buffer in sizes.items():
            dtype = jnp.float32 if buffer.itemsize == 4 else self.problem.dtype
            # The bias may be of the other 16-bit dtype than the query.
            dtype = self.problem.bias_dtype if name == "bias" else dtype
            stored = name == "bias" or (name == "dbias" and self.problem.bias_whole)
            if stored and not self.bias_in_tiles:
                buffers[name] = self.backend.aliased(
                    *(of_type(buffer.shape, dtype, buffer.swizzle) for of_type in (tiled, swizzled))
                )
            elif name in ("shift", "delta"):
                buffers[name] = plgpu.SMEM(buffer.shape, dtype)
            elif name in ("key", "value", "query", "dout"):
                buffers[name] = self.matrices.type(buffer, dtype)
            else:
                buffers[name] = tiled(buffer.shape, dtype, buffer.swizzle)
        consumers, passes = params.warpgroups, params.division == "products"
        biases = 0 if self.problem.bias is None else sizes["bias"].shape[0]
        bias_copies = len(self.bias_pieces)
        # A tile, and the initial accumulators of its rows.
        query = Pipeline.types(params.q_stages, consumers=consumers, copies=self.key_pieces + 1)
        dout = Pipeline.types(params.dout_stages, consumers=consumers, copies=self.value_pieces + 1)
        barriers = {
            "loaded": plgpu.Barrier(num_arrivals=(self.key_pieces + self.value_pieces) * (params.keys // 64)),
            "query_full": query.full,
            "dout_full": dout.full,
            "query_empty": query.empty,
            "dout_empty": dout.empty,
            "weights_full": plgpu.Barrier(num_barriers=2) if passes else None,
            "weights_empty": plgpu.Barrier(num_barriers=2) if passes else None,
            # With division='products' only one consumer computes the scores' gradient.
            "dscores_full": plgpu.Barrier(num_arrivals=1 if passes else consumers) if self.fused else None,
            "bias_full": plgpu.Barrier(num_arrivals=bias_copies, num_barriers=biases) if biases else None,
            "bias_empty": plgpu.Barrier(num_arrivals=consumers, num_barriers=biases) if biases else None,
            "done": plgpu.Barrier(num_arrivals=consumers),
        }
        return KeyBlockMemory(**{name: (buffers | barriers).get(name) for name in KeyBlockMemory._fields})

    def _block(self, given: tuple[BackwardInputs, GradientSums], outputs: Any, memory: KeyBlockMemory) -> None:
        (arrays, sums), warpgroup, consumers = given, lax.axis_index(WARPGROUP), self.params.warpgroups
        number, example, part = self.schedule(lax.axis_index(PROGRAM))
        blocks = block_range(arrays.ranges, example, number)
        limit = key_limit(self.problem, arrays, example, self.params.keys)
        block = KeyBlock(arrays, sums, outputs, memory, example, part, number * self.params.keys, blocks, limit)
        dispatch_warpgroup(
            warpgroup,
            consumers,
            REGISTERS[consumers] if consumers > 1 else None,  # one consumer has 255 registers as it is
            producer=lambda: self._produce(block),
            consumer=lambda _: self.consume(block),
        )

    def schedule(self, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the block of keys, the example and the part of block of threads `index`.

        See `backward_order`.
        """
        turn, rest = lax.div(index, self.together * self.key_blocks), lax.rem(index, self.together * self.key_blocks)
        number, part = lax.div(rest, self.together), turn * self.together + lax.rem(rest, self.together)
        if not self.longer_parts:
            return number, lax.div(part, self.parts), lax.rem(part, self.parts)
        groups = self.problem.groups
        which, group = lax.div(part, groups * self.problem.batch), lax.rem(part, groups)
        return number, lax.rem(lax.div(part, groups), self.problem.batch), group * self.params.head_parts + which

    # Producer.

    def _produce(self, block: KeyBlock) -> None:
        params, memory = self.params, block.memory
        group = lax.div(block.part, params.head_parts)
        for slab in range(params.keys // 64):
            at = (block.example, pl.ds(block.key + 64 * slab, 64), group)
            self.matrices.copy_in(block.arrays.key, at, memory.key, (slab,), memory.loaded)
            self.matrices.copy_in(block.arrays.value, at, memory.value, (slab,), memory.loaded)

        def of_head(g: jax.Array, number: jax.Array) -> jax.Array:
            head = self.head(block, g)

            def of_tile(j: jax.Array, number: jax.Array) -> jax.Array:
                self._copy_step(block, QueryStep(head, j, number))
                return number + 1

            # All blocks start at their first tile. Starting at different queries, so that blocks add to different parts
            # of dQ at a time, took 4 % longer.
            total: jax.Array = lax.fori_loop(block.blocks.first, block.blocks.end, of_tile, number)
            return total

        steps = lax.fori_loop(0, self.heads(block), of_head, jnp.int32(0))
        unrolled_producer_tail(steps, memory.query_pipeline, memory.dout_pipeline, memory.bias_pipeline)

    def _copy_step(self, block: KeyBlock, step: QueryStep) -> None:
        arrays, memory = block.arrays, block.memory
        rows = pl.ds(step.tile * self.params.q_block, self.params.q_block)
        at, row = (block.example, rows, step.head), (block.example, step.head, rows)
        queries = memory.query_pipeline, arrays.query, memory.query, arrays.shift, memory.shift
        douts = memory.dout_pipeline, arrays.dout, memory.dout, arrays.delta, memory.delta
        # Two pipelines: cotangents may have fewer stages than queries where memory is short.
        for pipeline, matrix, buffer, vector, vectors in (queries, douts):
            stage = pipeline.producer_acquire(step.number)
            full = pipeline.full.at[stage]
            self.matrices.copy_in(matrix, at, buffer, (stage,), full)
            plgpu.copy_gmem_to_smem(vector.at[row], vectors.at[stage], full)
        if memory.bias_pipeline is not None:
            self._copy_bias(block, step, memory.bias_pipeline)

    def _copy_bias(self, block: KeyBlock, step: QueryStep, pipeline: Pipeline) -> None:
        bias, stage = block.arrays.bias, pipeline.producer_acquire(step.number)
        rows = pl.ds(step.tile * self.params.q_block, self.params.q_block)
        buffer = block.memory.bias if self.bias_in_tiles else self.backend.views(block.memory.bias, 2)[1]
        for slab, width in self.bias_pieces:
            keys = pl.ds(block.key + slab * width, width)
            at = (*broadcast_index(bias, block.example, step.head), rows, keys)
            target = buffer.at[stage] if self.bias_in_tiles else buffer.at[stage, slab]
            plgpu.copy_gmem_to_smem(bias.at[at], target, pipeline.full.at[stage])

    # For the consumers.

    def head(self, block: KeyBlock, g: jax.Array) -> jax.Array:
        """Return head `g` of the block's part of a group."""
        if not self.longer_parts:
            return block.part * self.heads_per_part + g
        group, part = lax.div(block.part, self.params.head_parts), lax.rem(block.part, self.params.head_parts)
        first = part * self.heads_per_part + jnp.minimum(part, self.longer_parts)
        return group * self.problem.heads_per_group + first + g

    def heads(self, block: KeyBlock) -> Any:
        """Return the number of heads of the block's part of a group."""
        if not self.longer_parts:
            return self.heads_per_part
        part = lax.rem(block.part, self.params.head_parts)
        return self.heads_per_part + (part < self.longer_parts).astype(jnp.int32)

    def over_heads(self, block: KeyBlock, body: Any, carry: Any) -> Any:
        """Run `body(head, carry)` for every head of the block's part of a group."""
        return lax.fori_loop(0, self.heads(block), lambda g, c: body(self.head(block, g), c), carry)

    def stages(self, step: QueryStep) -> tuple[jax.Array, jax.Array]:
        """Return the pipeline stages of a step's queries and cotangents."""
        return lax.rem(step.number, self.params.q_stages), lax.rem(step.number, self.params.dout_stages)

    def tile(self, block: KeyBlock, step: QueryStep, slab: Any) -> ScoreTile:
        """Return the tile of scores of 64 of the block's keys in one step."""
        rows = self.params.q_block
        return ScoreTile((64, rows), 1, block.example, step.head, step.tile * rows, block.key + 64 * slab, block.limit)

    def row(self, tile: ScoreTile, vector: Any) -> jax.Array:
        """Load one number per query, and broadcast it over a tile."""
        return tile.spread(tile.vector(vector, 1), 1)

    def scores_start(self, block: KeyBlock, step: QueryStep, tile: ScoreTile) -> jax.Array:
        """Return the initial accumulator of the scores.

        An accumulator that starts from the row's shift needs no registers for the shift itself.
        """
        if not self.problem.shift_in_scores:
            return zeros(tile.shape)
        return self.row(tile, block.memory.shift.at[self.stages(step)[0]])

    def score_terms(
        self, block: KeyBlock, step: QueryStep, tile: ScoreTile, mask: tuple[jax.Array, ...], warpgroup: Any
    ) -> ScoreTerms:
        """Return the terms of a tile's probabilities; called once its products are done.

        Args:
            block: The block.
            step: The step.
            tile: The tile.
            mask: The words of the mask, loaded before.
            warpgroup: The warpgroup; the bias is divided by warpgroups.
        """
        shift = None
        if not self.problem.shift_in_scores:
            shift = self.row(tile, block.memory.shift.at[self.stages(step)[0]])
        return ScoreTerms(shift, self._bias(block, step, warpgroup), mask)

    def _bias(self, block: KeyBlock, step: QueryStep, warpgroup: Any) -> jax.Array | None:
        """Return the bias of a consumer's tile, and release its stage; `None` without a bias."""
        buffer, pipeline = block.memory.bias, block.memory.bias_pipeline
        if pipeline is None:
            return None
        stage = pipeline.stage(step.number)
        pipeline.consumer_wait(stage)
        if self.bias_in_tiles:
            part = buffer.at[stage, :, pl.ds(64 * warpgroup, 64)]
        else:
            part = self.backend.views(buffer, 2)[0].at[stage, warpgroup]
        bias: jax.Array = plgpu.load(part.transpose((1, 0)), layout=WGMMA, optimized=False)
        self.backend.order_reads()
        pipeline.consumer_release(stage)
        return self.backend.widened(bias)

    def key_columns(self, block: KeyBlock, slab: Any, first: Any, count: int) -> list[Any]:
        """Return `count` columns of 64 keys, in pieces; `first` may depend on the warpgroup."""
        if not self.problem.pieced:
            whole = isinstance(first, int) and count == self.problem.head_dim
            return [block.memory.key.at[slab, :, slice(None) if whole else pl.ds(first, count)]]
        tiles = self.backend.views(block.memory.key, 2)[0]
        width = tiles.shape[-1]
        number = lax.div(first, width) if not isinstance(first, int) else first // width
        return [tiles.at[number + i, slab] for i in range(count // width)]

    # Epilogue.

    def send_dquery(
        self, block: KeyBlock, part: jax.Array, step: QueryStep, warpgroup: Any, at: tuple[Any, Any]
    ) -> None:
        """Start adding a warpgroup's part of dQ to global memory, in pieces of the size of its buffer.

        Args:
            block: The block.
            part: Float32, 64 rows.
            step: The step that computed it.
            warpgroup: The warpgroup.
            at: First row, counted from the tile's, and first column.
        """
        buffer = block.memory.dquery.at[warpgroup]
        first = step.tile * self.params.q_block + at[0]
        width = buffer.shape[-1]
        for column in range(0, part.shape[1], width):
            # The previous piece must have left the buffer; its sum in memory may be pending.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer[...] = part[:, column : column + width]
            plgpu.commit_smem()
            target = (block.example, pl.ds(first, 64), step.head, pl.ds(at[1] + column, width))
            self.backend.add_to_memory(buffer, block.sums.dquery.at[target])

    def finish(self, block: KeyBlock) -> None:
        """Wait until no consumer needs keys and values: their buffers then stage their gradients."""
        plgpu.barrier_arrive(block.memory.done)
        plgpu.barrier_wait(block.memory.done)

    def store(self, block: KeyBlock, gradient: jax.Array, which: int, slab: Any) -> None:
        """Start storing the gradient of 64 keys (`which` 0) or values (1)."""
        buffer = (block.memory.key, block.memory.value)[which]
        gradient = block.arrays.restored(gradient, block.example)
        rows = (block.example, pl.ds(block.key + 64 * slab, 64), block.part)
        self.matrices.store(buffer, (slab,), gradient.astype(self.problem.dtype), block.outputs[which], rows)
