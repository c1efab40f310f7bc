# SPDX-License-Identifier: Apache-2.0
"""The forward kernel: launch, tile scheduler and producer warpgroup; `forward_mainloop` has the consumers.

Each consumer warpgroup owns 64 query rows of one head. While it computes the softmax of one block of keys, its tensor
core multiplies the weights of the previous block with that block's values. With `ping_pong`, consumers take turns at
the tensor core, so that one's softmax overlaps with another's products.

Source: the schedule of FlashAttention-3, Shah et al., arXiv:2407.08608.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.backend import Backend, backend_for
from ejkernel.kernels._hopper.columns import Columns
from ejkernel.kernels._hopper.device import Registers, quotient, remainder
from ejkernel.kernels._hopper.launch import PROGRAM, WARPGROUP, dispatch_warpgroup, plgpu, swizzled, tiled
from ejkernel.kernels._hopper.launch import launch as launch_kernel
from ejkernel.kernels._hopper.pipeline import Pipeline, producer_tail

from .forward_mainloop import ForwardConsumer
from .forward_memory import (
    ForwardBarriers,
    ForwardBuffers,
    ForwardInputs,
    ForwardMemory,
    ForwardOutputs,
    QueryTile,
    WarpgroupTile,
)
from .masks import broadcast_index
from .plan import REGISTERS, ROWS, ForwardPlan
from .schedule import blocks_of_rows
from .visibility import BlockRange, window_origin


def launch(
    plan: ForwardPlan, inputs: ForwardInputs, outputs: ForwardOutputs, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel.

    Args:
        plan: The static description.
        inputs: The arrays.
        outputs: Shapes and dtypes of the results.
        interpret: `InterpretGPUParams` to simulate it on a CPU; `None` runs it on a GPU.
    """
    kernel = ForwardKernel(plan, backend_for(interpret))
    out, lse = launch_kernel(
        kernel.run,
        inputs,
        outputs,
        name="flash_attention_forward",
        programs=plan.programs,
        memory=(kernel.buffer_types(inputs), kernel.barrier_types(inputs)),
        consumers=plan.params.warpgroups,
        interpret=interpret,
    )
    return out, lse


class ForwardKernel:
    """The program of one block of threads."""

    consumer: type[ForwardConsumer] = ForwardConsumer

    @property
    def registers(self) -> Registers:
        """Registers per thread of either role."""
        return REGISTERS[self.params.warpgroups]

    def __init__(self, plan: ForwardPlan, backend: Backend) -> None:
        self.plan, self.params, self.backend = plan, plan.params, backend

    def buffer_types(self, inputs: ForwardInputs) -> ForwardBuffers:
        """Return the types of the shared memory."""
        params, bias = self.params, inputs.bias
        block, rows = (params.stages, params.kv_block), (params.stages, params.warpgroups, ROWS)
        query, key, value, out = self._piece_types() if self.plan.pieced else self._tile_types()
        return ForwardBuffers(
            query=query,
            key=key,
            value=value,
            out=out,
            bias=None if bias is None else self._pieces(rows, self.plan.bias_columns, bias.dtype),
            mask=None if inputs.mask is None else plgpu.SMEM(self._mask_shape, jnp.int32),
            key_bias=None if inputs.key_bias is None else plgpu.SMEM(block, inputs.key_bias.dtype),
            key_segments=None if inputs.key_segments is None else plgpu.SMEM(block, jnp.int32),
        )

    def _tile_types(self) -> tuple[Any, Any, Any, Any]:
        """Return the types of query, key, value and output in whole tiles."""
        plan, params = self.plan, self.params
        slots, block = params.warpgroups * params.query_buffers, (params.stages, params.kv_block)
        query: Any = tiled((slots, ROWS, plan.head_dim), plan.dtype, plan.head_swizzle)
        out: Any = tiled((params.warpgroups, ROWS, plan.value_dim), plan.dtype, plan.out_swizzle)
        if params.share_buffer:  # per warpgroup: none overwrites queries that another still reads
            shared = (slots, ROWS * plan.head_dim // plan.value_dim, plan.value_dim)
            query, out = plgpu.RefUnion(query, tiled(shared, plan.dtype, plan.out_swizzle)), None
        key = tiled((*block, plan.head_dim), plan.dtype, plan.head_swizzle)
        return query, key, tiled((*block, plan.value_dim), plan.dtype, plan.value_swizzle), out

    def _piece_types(self) -> tuple[Any, Any, Any, Any]:
        """Return the types of query, key, value and output in pieces of columns."""
        plan, params, pieces = self.plan, self.params, self._pieces
        slots, block = params.warpgroups * params.query_buffers, (params.stages, params.kv_block)
        # A shared buffer needs no type of its own: the pieces of the output are the first ones of the queries.
        out = None if params.share_buffer else pieces((params.warpgroups, ROWS), plan.out_columns)
        query = pieces((slots, ROWS), plan.head_columns)
        return query, pieces(block, plan.head_columns), pieces(block, plan.value_columns), out

    def _pieces(self, shape: tuple[int, ...], columns: tuple[Columns, ...], dtype: Any = None) -> Any:
        """Return the type of a buffer in pieces of columns, by default of operands."""
        dtype = jnp.dtype(dtype or self.plan.dtype)
        sizes = [((*shape, piece.width), dtype, piece.width * dtype.itemsize) for piece in columns]
        return self.backend.aliased(*(tuple(type_of(*size) for size in sizes) for type_of in (tiled, swizzled)))

    def barrier_types(self, inputs: ForwardInputs) -> ForwardBarriers:
        """Return the types of the barriers."""
        stages, consumers = self.params.stages, self.params.warpgroups
        extras = consumers * (len(self.plan.bias_columns) + (inputs.mask is not None))
        extras += (inputs.key_bias is not None) + (inputs.key_segments is not None)
        query_pieces, value_pieces = len(self.plan.head_columns), len(self.plan.value_columns)
        return ForwardBarriers(
            # Each consumer has its own stages, and starts its part of a tile before the others.
            query=Pipeline.types(self.params.query_buffers * consumers, consumers=1, copies=query_pieces),
            key=Pipeline.types(stages, consumers=consumers, copies=query_pieces),
            value=Pipeline.types(stages, consumers=consumers, copies=value_pieces),
            extra=Pipeline.types(stages, consumers=consumers, copies=extras) if extras else None,
            turn=plgpu.Barrier(num_barriers=consumers),
        )

    def run(self, inputs: ForwardInputs, outputs: Any, memory: tuple[ForwardBuffers, ForwardBarriers]) -> None:
        """Run this warpgroup as producer or consumer."""
        self.inputs, (self.buffers, self.barriers) = inputs, memory
        self.memory = self.memory_of(inputs, outputs, memory)
        warpgroup, consumers = lax.axis_index(WARPGROUP), self.params.warpgroups
        dispatch_warpgroup(warpgroup, consumers, self.registers, producer=self._produce, consumer=self._consume)

    def memory_of(self, inputs: Any, outputs: Any, memory: Any) -> ForwardMemory:
        """Return the memory and barriers shared by all warpgroups."""
        return ForwardMemory(self.plan, inputs, ForwardOutputs(*outputs), memory[0], memory[1], self.backend)

    # Tile scheduler.

    def _each_tile(self, body: Callable[[QueryTile, Any, Any], Any], carry: Any) -> Any:
        """Call `body(tile, carry, number)` for each tile of this block of threads, and return the last carry."""
        program, plan = lax.axis_index(PROGRAM), self.plan
        if plan.programs == plan.tiles:
            return body(self._tile(program), carry, np.int32(0))

        def step(state: Any) -> Any:
            number, tile, carry = state
            following = self._tile_in_turn(program, number + 1)  # before the tile is computed, which hides the latency
            return number + 1, following, body(self._tile(tile), carry, number)

        first = self._tile_in_turn(program, np.int32(0)) if plan.deals_by_length else program
        return lax.while_loop(lambda state: state[1] < plan.tiles, step, (jnp.int32(0), first, carry))[2]

    def _tile_in_turn(self, program: Any, turn: Any) -> Any:
        """Return the tile of a block of threads in a turn; the number of tiles if all are dealt."""
        if self.inputs.schedule is not None:
            return self.inputs.schedule[program, turn]
        # Longest first, forwards and backwards: all blocks of threads end at about the same time.
        plan, backwards = self.plan, remainder(turn, 2) == 1
        place = turn * plan.programs + jnp.where(backwards, plan.programs - 1 - program, program)
        heads = plan.head_tiles
        rows = self.inputs.order[jnp.minimum(quotient(place, heads), plan.batch * plan.row_tiles - 1)]
        return jnp.where(place < plan.tiles, rows * heads + remainder(place, heads), plan.tiles)

    def _place_of(self, number: Any) -> tuple[Any, Any, Any]:
        """Return the example, head and tile of rows of tile `number`."""
        plan, bundle = self.plan, self.plan.bundle
        heads = plan.head_tiles
        if plan.deals_by_length:
            rows, head = quotient(number, heads), remainder(number, heads)
            return quotient(rows, plan.row_tiles), head * plan.tile_heads, remainder(rows, plan.row_tiles)
        tiles = plan.row_tiles * bundle
        place = remainder(number, tiles)
        # Counted over all examples.
        head = quotient(number, tiles) * bundle + remainder(place, bundle)
        # The last rows come first, because they take longest under a causal mask.
        row_tile = plan.row_tiles - 1 - quotient(place, bundle)
        return quotient(head, heads), remainder(head, heads) * plan.tile_heads, row_tile

    def _tile(self, number: Any) -> QueryTile:
        plan = self.plan
        batch, head, row_tile = self._place_of(number)
        row = row_tile * plan.tile_rows
        blocks, origin = self._blocks(batch, head, row, row_tile)
        if plan.programs < plan.tiles and plan.has_many_descriptors:
            # The number has no sign bit, which the compiler cannot know: it keeps the loop over a single masked block.
            # Otherwise it moves 40 descriptors from other registers to uniform ones in each step of the mainloop.
            blocks = blocks._replace(end=blocks.end + lax.shift_right_logical(number, np.int32(31)))
        return QueryTile(batch, head, row, blocks, origin)

    def _blocks(self, batch: Any, head: Any, row: Any, row_tile: Any) -> tuple[BlockRange, Any]:
        plan, origin = self.plan, np.int32(0)
        if self.inputs.table is not None:
            at = broadcast_index(self.inputs.table, batch, head)
            # The maximum gives the numbers the type of values computed here, on any mesh axis that the table varies
            # over.
            return BlockRange(*(jnp.maximum(self.inputs.table[(*at, row_tile, i)], 0) for i in range(4))), origin
        origin = window_origin(plan.rules, plan.position(row)) if plan.slides else origin
        # The maximum gives the length the type of values computed here, as above.
        keys = jnp.maximum(self.inputs.key_lengths[batch], 0) if plan.key_lengths else plan.keys
        blocks = blocks_of_rows(plan, keys, row, origin)
        blocks = BlockRange(*(jnp.int32(x) if isinstance(x, int) else x for x in blocks))
        return blocks, origin

    def _warpgroup_tile(self, tile: QueryTile, warpgroup: Any, number: Any) -> WarpgroupTile:
        slot = self.memory.query_slot(warpgroup, number)
        return WarpgroupTile(tile, number, warpgroup, slot, *self._row_and_head(tile, warpgroup))

    def _row_and_head(self, tile: QueryTile, warpgroup: Any) -> tuple[Any, Any]:
        """Return the first row and the head of a warpgroup's part of a tile."""
        if self.params.pack_heads:
            return tile.row, tile.head + warpgroup
        return tile.row + ROWS * warpgroup, tile.head

    # Producer.

    def _produce(self) -> None:
        barriers = self.barriers
        step, tiles = self._each_tile(self._copy_tile, (jnp.int32(0), jnp.int32(0)))
        producer_tail(step, barriers.key, barriers.value, barriers.extra)
        consumers = self.params.warpgroups
        producer_tail(tiles * consumers, barriers.query, unreleased=consumers * self.plan.frees_late)

    def _copy_tile(self, tile: QueryTile, counts: Any, number: Any) -> Any:
        (step, tiles), first = counts, tile.blocks.first
        if self.params.persistent and self.params.query_buffers == 1:
            # The consumers need the buffer of the queries longer than the stages of keys.
            self._copy_keys(tile, first, step)
            self._copy_queries(tile, number)
            self._copy_values(tile, first, step)
            first, step = first + 1, step + 1
        else:
            self._copy_queries(tile, number)
        step = lax.fori_loop(first, tile.blocks.end, lambda i, step: self._copy_block(tile, i, step), step)
        return step, tiles + 1

    def _copy_queries(self, tile: QueryTile, number: Any) -> None:
        pipeline, consumers = self.barriers.query, self.params.warpgroups
        for w in range(consumers):
            row, head = self._row_and_head(tile, w)
            slot = self.memory.query_slot(w, number)
            if self.params.persistent:
                pipeline.producer_wait(number * consumers + w, slot)
            at = (tile.batch, pl.ds(row, ROWS), head)
            self.memory.copy_in(self.inputs.query, at, self.memory.query(slot), pipeline.full.at[slot])

    def _copy_block(self, tile: QueryTile, block: Any, step: Any) -> Any:
        # In the order of use: scores, their extra terms, and only then values.
        self._copy_keys(tile, block, step)
        self._copy_values(tile, block, step)
        return step + 1

    def _copy_keys(self, tile: QueryTile, block: Any, step: Any) -> None:
        barriers, stage = self.barriers, self.barriers.key.stage(step)
        barriers.key.producer_wait(step, stage)
        at = self._keys_at(tile, block)
        self.memory.copy_in(self.inputs.key, at, self.memory.key(stage), barriers.key.full.at[stage])
        if barriers.extra is not None:
            barriers.extra.producer_wait(step, stage)
            self._copy_extras(tile, block, stage)

    def _copy_values(self, tile: QueryTile, block: Any, step: Any) -> None:
        pipeline, stage = self.barriers.value, self.barriers.value.stage(step)
        pipeline.producer_wait(step, stage)
        at = self._keys_at(tile, block)
        self.memory.copy_in(self.inputs.value, at, self.memory.value(stage), pipeline.full.at[stage])

    def _keys_at(self, tile: QueryTile, block: Any) -> tuple[Any, ...]:
        """Return the index of a block of keys, or values, in memory."""
        group = quotient(tile.head, self.plan.heads // self.plan.groups)
        return tile.batch, pl.ds(tile.origin + block * self.params.kv_block, self.params.kv_block), group

    def _copy_extras(self, tile: QueryTile, block: Any, stage: Any) -> None:
        assert self.barriers.extra is not None  # the caller has checked
        keys, full = pl.ds(block * self.params.kv_block, self.params.kv_block), self.barriers.extra.full.at[stage]
        for source, target in self.memory.by_key():
            at = (*broadcast_index(source, tile.batch, tile.head), keys)
            plgpu.copy_gmem_to_smem(source.at[at], target.at[stage], full)
        bias, mask, words, first = self.inputs.bias, self.inputs.mask, self._mask_shape[2], block * self.params.kv_block
        for w in range(self.params.warpgroups):
            row, head = self._row_and_head(tile, w)
            rows = pl.ds(row, ROWS)
            if bias is not None:
                for piece in self.memory.bias(stage, w):
                    some = pl.ds(first + piece.columns.start, piece.columns.width)
                    block_at = (*broadcast_index(bias, tile.batch, head), rows, some)
                    plgpu.copy_gmem_to_smem(bias.at[block_at], piece.rows, full)
            if mask is not None:
                block_at = (*broadcast_index(mask, tile.batch, head), pl.ds(block * words, words), rows)
                plgpu.copy_gmem_to_smem(mask.at[block_at], self.buffers.mask.at[stage, w], full)

    # Consumers.

    def _consume(self, warpgroup: Any) -> None:
        turn, last = self.barriers.turn, self.params.warpgroups - 1
        if self.params.ping_pong:

            @pl.when(warpgroup == last)
            def _first_turn() -> None:
                plgpu.barrier_arrive(turn.at[0])

        def compute(tile: QueryTile, step: Any, number: Any) -> Any:
            consumer = self.consumer(self.memory, self._warpgroup_tile(tile, warpgroup, number))
            if not self.plan.leaves_idle:
                return consumer.run(step)
            return lax.cond(consumer.part.row < self.plan.queries, consumer.run, consumer.skip, step)

        self._each_tile(compute, jnp.int32(0))
        if self.params.ping_pong:
            # The last turn: no barrier may keep an arrival without a wait.
            @pl.when(warpgroup == 0)
            def _last_turn() -> None:
                plgpu.barrier_wait(turn.at[0])

        plgpu.wait_smem_to_gmem(0)

    @property
    def _mask_shape(self) -> tuple[int, ...]:
        """The shape of the stages of a mask, in words of 32 keys."""
        return self.params.stages, self.params.warpgroups, self.params.kv_block // 32, ROWS
