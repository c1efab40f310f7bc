# SPDX-License-Identifier: Apache-2.0
"""The kernel of prefill: the forward of `flash_attention` with tiles of a plan, and keys from pages.

A tile has 128 rows: query tokens of one sequence, each with some of the heads that share a KV head. A program takes
whole tiles.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.backend import backend_for
from ejkernel.kernels._hopper.device import Registers, quotient, remainder
from ejkernel.kernels._hopper.launch import PROGRAM, launch, plgpu, swizzled, tiled
from ejkernel.kernels._hopper.pipeline import Pipeline
from ejkernel.kernels.flash_attention.mosaic_gpu.forward import ForwardKernel
from ejkernel.kernels.flash_attention.mosaic_gpu.forward_memory import ForwardOutputs
from ejkernel.kernels.flash_attention.mosaic_gpu.plan import ROWS

from .memory import cache_row
from .plan import PrefillPlan
from .prefill_consumer import Item, KeyRange, PrefillConsumer, PrefillMemory

_FEW_COPIES = 2  # of keys in a block; more are a multiple of the warps
_WARPS = 4


class PrefillInputs(NamedTuple):
    """Arrays in global memory; those that a call does not have are `None`.

    Attributes:
        tiles, ends: As in `Prefill`.
        q: `[tokens, heads, head_dim]`.
        cache: `[pages * page_size, kv_heads, 2 * head_dim]`.
        table: `[sequences, pages]`.
        out: The output, `[tokens, heads, head_dim]`; written in place.
        sinks: `[heads / tile_heads, ROWS]`, times `LOG2_E`.
        k_scale, v_scale: `[kv_heads]`.
        dropout: `None`.
    """

    tiles: Any
    ends: Any
    q: Any
    cache: Any
    table: Any
    out: Any
    sinks: Any = None
    k_scale: Any = None
    v_scale: Any = None
    dropout: None = None


class PrefillBuffers(NamedTuple):
    """Shared memory; queries and output have two views, for copies and for products."""

    query: Any  # pieces, [query buffers * warpgroups, ...]
    key: Any  # [stages, keys, head_dim], or its pieces
    value: Any  # [stages, keys, head_dim], or its pieces
    out: Any  # pieces, [warpgroups, ...]; `None` in the buffers of queries


class PrefillBarriers(NamedTuple):
    """Barriers: those of `ForwardBarriers`, and one for the consumers after they have cleared values."""

    query: Pipeline
    key: Pipeline
    value: Pipeline
    extra: None
    turn: Any
    cleared: Any


def run(plan: PrefillPlan, inputs: PrefillInputs, interpret: Any = None) -> Any:
    """Write the tiles into the reference `inputs.out`; return the log-sum-exp, `[items * warpgroups, ROWS]`, if asked.

    Args:
        plan: The static description.
        inputs: The arrays.
        interpret: `InterpretGPUParams` to simulate it on a CPU; `None` runs it on a GPU.
    """
    kernel = PrefillKernel(plan, backend_for(interpret))
    like: Any = jax.ShapeDtypeStruct
    lse = like((plan.tiles * plan.params.warpgroups, ROWS), jnp.float32)
    (found,) = launch(
        kernel.run,
        inputs,
        [lse if plan.return_lse else like((1,), jnp.int32)],  # a kernel needs its own result
        name="paged_attention_prefill",
        programs=plan.programs,
        memory=(kernel.buffer_types(inputs), kernel.barrier_types(inputs)),
        consumers=plan.params.warpgroups,
        interpret=interpret,
    )
    return found if plan.return_lse else None


class PrefillKernel(ForwardKernel):
    """The program of one block of threads."""

    plan: PrefillPlan
    consumer = PrefillConsumer

    @property
    def _by_warp(self) -> bool:
        return self.plan.by_warp and self.plan.key_copies > _FEW_COPIES

    @property
    def registers(self) -> Registers:
        """Registers per thread of either role; a warp with many copies would spill with fewer."""
        few = self._by_warp or self.plan.key_copies <= _FEW_COPIES
        return super().registers if few else Registers(producer=40, consumer=232)

    def buffer_types(self, inputs: Any) -> Any:
        """Return the types of the shared memory."""
        plan, params = self.plan, self.params

        slots = params.warpgroups * params.query_buffers
        shape = params.stages, params.kv_block
        whole = tiled((*shape, plan.head_dim), plan.dtype)
        block = self._pieces(shape, plan.head_columns) if plan.pieced else whole
        out = None if params.share_buffer else self._row_types(params.warpgroups)
        return PrefillBuffers(query=self._row_types(slots), key=block, value=block, out=out)

    def _row_types(self, slots: int) -> Any:
        """Return the type of buffers of queries or output, in pieces of columns."""
        plan, tokens = self.plan, (self.plan.warpgroup_tokens, self.plan.tile_heads)
        return self.backend.aliased(
            tuple(swizzled((slots, *tokens, own.width), plan.dtype, own.swizzle) for own in plan.row_columns),
            tuple(tiled((slots, ROWS, own.width), plan.dtype, own.swizzle) for own in plan.row_columns),
        )

    def barrier_types(self, inputs: Any) -> Any:
        """Return the types of the barriers."""
        plan, params, consumers = self.plan, self.params, self.params.warpgroups
        copies = plan.key_copies * len(plan.head_columns)
        return PrefillBarriers(
            query=Pipeline.types(params.query_buffers * consumers, consumers=1, copies=len(plan.row_columns)),
            key=Pipeline.types(params.stages, consumers=consumers, copies=copies),
            value=Pipeline.types(params.stages, consumers=consumers, copies=copies),
            extra=None,
            turn=plgpu.Barrier(num_barriers=consumers),
            cleared=plgpu.Barrier(num_arrivals=consumers),
        )

    def memory_of(self, inputs: Any, outputs: Any, memory: Any) -> PrefillMemory:
        """See `ForwardKernel.memory_of`."""
        given = ForwardOutputs(inputs.out, outputs[0] if self.plan.return_lse else None)
        return PrefillMemory(self.plan, cast(Any, inputs), given, memory[0], memory[1], self.backend)

    @property
    def given(self) -> PrefillInputs:
        """The arrays."""
        return cast(PrefillInputs, self.inputs)

    # Tile scheduler.

    def _each_tile(self, body: Callable[[Any, Any, Any], Any], step: Any) -> Any:
        """Call `body(tile, step, number)` for each tile of this block of threads, and return the last step."""
        program, programs = lax.axis_index(PROGRAM), self.plan.programs
        items = jnp.maximum(self.given.ends[self.given.ends.shape[0] - 1], 0) * self.plan.bundles
        rounds = quotient(items + (programs - 1), programs)

        def dealt(i: Any) -> Any:  # every other round in reverse, so that the long tiles spread over all blocks
            return i * programs + jnp.where(remainder(i, 2) == 0, program, programs - 1 - program)

        rounds = jnp.where(dealt(jnp.maximum(rounds - 1, 0)) < items, rounds, jnp.maximum(rounds - 1, 0))
        return lax.fori_loop(jnp.int32(0), rounds, lambda i, step: body(self._tile(dealt(i)), step, i), step)

    def _tile(self, number: Any) -> Any:
        return KeyRange.of(self.plan, Item.of(self.plan, self.given.tiles, number))

    def _row_and_head(self, tile: Any, warpgroup: Any) -> tuple[Any, Any]:
        """Return the first query token of a warpgroup's part of a tile, within the tile, and the first head."""
        return self.plan.warpgroup_tokens * warpgroup, tile.item.head

    # Producer.

    def _copy_tile(self, tile: Any, counts: Any, number: Any) -> Any:
        step, tiles = counts
        plan, memory, pipeline, item = self.plan, self.memory, self.barriers.query, tile.item
        for w in range(self.params.warpgroups):
            slot = pipeline.producer_acquire(number * self.params.warpgroups + w)
            tokens = pl.ds(item.token + plan.warpgroup_tokens * w, plan.warpgroup_tokens)
            for piece in memory.query(slot):
                source = self.given.q.at[tokens, pl.ds(item.head, plan.tile_heads), pl.ds(*piece.columns)]
                plgpu.copy_gmem_to_smem(source, piece.rows, pipeline.full.at[slot])
        if not self._by_warp:
            self._copy_blocks(tile, step, range(plan.key_copies))
        else:
            plgpu.warp_map(functools.partial(self._copy_blocks_by_warp, tile, step))
        return step + (tile.blocks.end - tile.blocks.first), tiles + 1

    def _copy_blocks_by_warp(self, tile: Any, step: Any, warp: Any) -> None:
        """Copy the pages of a warp: one warp would issue the copies of small pages too slowly."""
        each = self.plan.key_copies // _WARPS
        self._copy_blocks(tile, step, [warp * each + copy for copy in range(each)])

    def _copy_blocks(self, tile: Any, step: Any, copies: Sequence[Any]) -> None:
        first, end = tile.blocks.first, tile.blocks.end
        lax.fori_loop(first, end, lambda block, step: self._copy_pages(tile, block, step, copies), step)

    def _copy_pages(self, tile: Any, block: Any, step: Any, copies: Sequence[Any]) -> Any:
        plan, item, size, inputs = self.plan, tile.item, self.plan.copied_keys, self.given
        keys = [tile.origin + block * self.params.kv_block + copy * size for copy in copies]
        # Before the wait, which hides their latency.
        rows = [cache_row(plan.pages, plan.page_size, size, inputs.table, item.sequence, key) for key in keys]
        stage = self.barriers.key.stage(step)
        memory = cast(PrefillMemory, self.memory)
        kinds = (self.barriers.key, memory.copied_keys(stage)), (self.barriers.value, memory.value(stage))
        for kind, (pipeline, pieces) in enumerate(kinds):
            pipeline.producer_wait(step, stage)
            for piece, (copy, key, row) in itertools.product(pieces, zip(copies, keys, rows, strict=True)):
                columns = pl.ds(kind * plan.head_dim + piece.columns.start, piece.columns.width)
                source, target = inputs.cache.at[pl.ds(row, size), item.kv_head, columns], pl.ds(copy * size, size)
                self.backend.copy_if(key < item.length, source, piece.rows.at[target], pipeline.full.at[stage])
        return step + 1
