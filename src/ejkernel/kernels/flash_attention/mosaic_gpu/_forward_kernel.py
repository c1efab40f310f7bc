# SPDX-License-Identifier: Apache-2.0
"""The forward's kernel: one warpgroup copies, the others compute.

Every computing warpgroup owns 64 rows. It multiplies them with a block of keys, and while it works out the softmax of
the result, its tensor core multiplies the weights of the block before with that block's values. Two warpgroups take
turns at the tensor core, so that what one computes in between hides behind the other's products.

Source: the schedule after Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ._forward_plan import REGISTERS, ROWS, ForwardPlan, swizzle
from ._forward_rows import Rows
from ._forward_types import Barriers, Buffers, Inputs, Memory, Outputs, Part, Tile, within
from .machine import plgpu
from .visibility import BlockRange, quotient, remainder, window_blocks


def launch(plan: ForwardPlan, inputs: Inputs, outputs: Outputs, interpret: Any = None) -> tuple[jax.Array, jax.Array]:
    """Run the kernel.

    Args:
        plan: What is static.
        inputs: The arrays.
        outputs: Shapes and dtypes of the results.
        interpret: How to simulate it on a CPU (`InterpretGPUParams`); `None`: run it on a GPU.
    """
    names = [name for name, array in zip(inputs._fields, inputs, strict=True) if array is not None]

    def flash_attention_forward(*refs: Any) -> None:
        given = Inputs(**dict(zip(names, refs, strict=False)))
        program = _Program(plan, given, Outputs(*refs[len(names) :]), simulated=interpret is not None)
        pl.run_scoped(program.run, program.buffers(), program.barriers(), collective_axes="warpgroup")

    kernel = plgpu.kernel(
        flash_attention_forward,
        out_type=list(outputs),
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=plan.params.warpgroups + 1,
        thread_name="warpgroup",
        # No thread both stores to and loads from the same shared memory, which is what the barriers that Pallas would
        # put around every access are for.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    out, lse = kernel(*(array for array in inputs if array is not None))
    return out, lse


class _Program:
    """What one block of threads does."""

    def __init__(self, plan: ForwardPlan, inputs: Inputs, outputs: Outputs, *, simulated: bool) -> None:
        self.plan, self.params = plan, plan.params
        self.inputs, self.outputs = inputs, outputs
        self.simulated = simulated

    def buffers(self) -> Buffers:
        """Return the types of the shared memory."""
        plan, params = self.plan, self.params
        rows, slots = (params.warpgroups, ROWS), params.warpgroups * params.query_buffers
        query = _buffer((slots, ROWS, plan.head_dim), plan.dtype, plan.head_swizzle)
        out: Any = _buffer((*rows, plan.value_dim), plan.dtype, plan.out_swizzle)
        if params.share_buffer:  # the same bytes of a warpgroup, so that none writes where another still reads
            shared = (slots, ROWS * plan.head_dim // plan.value_dim, plan.value_dim)
            query, out = plgpu.RefUnion(query, _buffer(shared, plan.dtype, plan.out_swizzle)), None
        block = (params.stages, params.kv_block)
        return Buffers(
            query=query,
            key=_buffer((*block, plan.head_dim), plan.dtype, plan.head_swizzle),
            value=_buffer((*block, plan.value_dim), plan.dtype, plan.value_swizzle),
            out=out,
            bias=self._bias(),
            mask=None if self.inputs.mask is None else plgpu.SMEM(self._words, jnp.int32),
            key_bias=None if self.inputs.key_bias is None else plgpu.SMEM(block, jnp.float32),
            key_segments=None if self.inputs.key_segments is None else plgpu.SMEM(block, jnp.int32),
        )

    def barriers(self) -> Barriers:
        """Return the types of the barriers."""
        inputs, stages, warpgroups = self.inputs, self.params.stages, self.params.warpgroups
        extras = warpgroups * ((inputs.bias is not None) + (inputs.mask is not None))
        extras += (inputs.key_bias is not None) + (inputs.key_segments is not None)
        full = plgpu.Barrier(num_barriers=stages)
        free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
        return Barriers(
            # A warpgroup waits for its own rows alone, and who copies for all that read the tile.
            query_full=plgpu.Barrier(num_barriers=self.params.query_buffers * warpgroups),
            query_free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=self.params.query_buffers),
            key_full=full,
            key_free=free,
            value_full=full,
            value_free=free,
            extra_full=plgpu.Barrier(num_arrivals=extras, num_barriers=stages) if extras else None,
            extra_free=free if extras else None,
            turn=plgpu.Barrier(num_barriers=warpgroups),
        )

    def run(self, buffers: Buffers, barriers: Barriers) -> None:
        """Be the warpgroup that this is."""
        self.shared, self.wait = buffers, barriers
        self.memory = Memory(self.plan, self.inputs, self.outputs, buffers, barriers, self.simulated)
        warpgroup = lax.axis_index("warpgroup")
        few, many = REGISTERS[self.params.warpgroups]

        @pl.when(warpgroup == self.params.warpgroups)
        def _copying() -> None:
            plgpu.set_max_registers(few, action="decrease")
            self._copy()

        @pl.when(warpgroup < self.params.warpgroups)
        def _computing() -> None:
            plgpu.set_max_registers(many, action="increase")
            self._compute(warpgroup)

    def _each_tile(self, body: Callable[[Tile, Any, Any], Any], step: Any) -> Any:
        """Call `body(tile, step, number)` for each of this program's tiles, and return the last step."""
        program, programs, tiles = lax.axis_index("program"), self.plan.programs, self.plan.tiles
        if not self.params.persistent:
            return body(self._tile(program), step, np.int32(0))
        rounds = -(-tiles // programs)

        def place(i: Any) -> Any:  # every other round is dealt backwards, so that nobody gets all the long tiles
            return i * programs + jnp.where(remainder(i, 2) == 0, program, programs - 1 - program)

        count = jnp.where(place(np.int32(rounds - 1)) < tiles, rounds, rounds - 1)
        return lax.fori_loop(np.int32(0), count, lambda i, step: body(self._tile(place(i)), step, i), step)

    def _tile(self, number: Any) -> Tile:
        """Return the tile of that number; the last rows come first, for under a causal mask they take longest."""
        plan = self.plan
        heads = plan.heads // plan.tile_heads
        together = heads // plan.groups if self.params.heads_first and heads % plan.groups == 0 else heads
        batch, rest = quotient(number, plan.row_tiles * heads), remainder(number, plan.row_tiles * heads)
        bundle, rest = quotient(rest, plan.row_tiles * together), remainder(rest, plan.row_tiles * together)
        row_tile = plan.row_tiles - 1 - quotient(rest, together)
        head = (bundle * together + remainder(rest, together)) * plan.tile_heads
        row = row_tile * plan.tile_rows
        return Tile(batch, head, row, self._blocks(batch, head, row, row_tile))

    def _blocks(self, batch: Any, head: Any, row: Any, row_tile: Any) -> BlockRange:
        plan = self.plan
        if self.inputs.table is not None:
            at = within(self.inputs.table, batch, head)
            # The maximum gives a number the type of those that are computed here, whatever mesh the table varies over.
            return BlockRange(*(jnp.maximum(self.inputs.table[(*at, row_tile, i)], 0) for i in range(4)))
        low = row + (plan.keys - plan.queries)
        high = jnp.minimum(low + plan.tile_rows, plan.keys) - 1
        blocks = window_blocks(plan.rules, plan.keys, self.params.kv_block, low, high)
        return BlockRange(*(jnp.int32(x) if isinstance(x, int) else x for x in blocks))

    # What copies.

    def _copy(self) -> None:
        step, tiles = self._each_tile(self._copy_tile, (jnp.int32(0), jnp.int32(0)))
        # Wait for all that was freed, so that no barrier is left with an arrival that nobody saw.
        self._drain(step, self.params.stages, (self.wait.key_free, self.wait.value_free, self.wait.extra_free))
        self._drain(tiles, self.params.query_buffers, (self.wait.query_free,), kept=int(self.plan.frees_late))

    def _drain(self, count: Any, slots: int, barriers: tuple[Any, ...], kept: int = 0) -> None:
        """Wait until the last of `count` uses of each slot is over, but for the last `kept`, which are never freed."""

        @pl.loop(jnp.maximum(count - slots, 0), count - kept)
        def _wait(i: Any) -> None:
            for free in barriers:
                if free is not None:
                    plgpu.barrier_wait(free.at[remainder(i, slots)])

    def _copy_tile(self, tile: Tile, counts: Any, number: Any) -> Any:
        step, tiles = counts
        buffers = self.params.query_buffers
        if self.params.persistent:

            @pl.when(number >= buffers)
            def _() -> None:
                plgpu.barrier_wait(self.wait.query_free.at[remainder(number, buffers)])

        for w in range(self.params.warpgroups):
            row, head = self._own(tile, w)
            source = self.inputs.query.at[tile.batch, pl.ds(row, ROWS), head]
            slot = self.memory.query_slot(w, number)
            plgpu.copy_gmem_to_smem(source, self.memory.query(slot), self.wait.query_full.at[slot])
        step = lax.fori_loop(tile.blocks.first, tile.blocks.end, lambda i, step: self._copy_block(tile, i, step), step)
        return step, tiles + 1

    def _copy_block(self, tile: Tile, block: Any, step: Any) -> Any:
        stage = remainder(step, self.params.stages)
        group = quotient(tile.head, self.plan.heads // self.plan.groups)
        at = (tile.batch, pl.ds(block * self.params.kv_block, self.params.kv_block), group)
        shared, wait = self.shared, self.wait

        def when_free(barrier: Any) -> None:
            @pl.when(step >= self.params.stages)
            def _() -> None:
                plgpu.barrier_wait(barrier.at[stage])

        # In the order in which they are needed: scores, what is added to them, and only then values.
        when_free(wait.key_free)
        plgpu.copy_gmem_to_smem(self.inputs.key.at[at], shared.key.at[stage], wait.key_full.at[stage])
        if wait.extra_free is not None:
            when_free(wait.extra_free)
            self._copy_extras(tile, block, stage)
        when_free(wait.value_free)
        plgpu.copy_gmem_to_smem(self.inputs.value.at[at], shared.value.at[stage], wait.value_full.at[stage])
        return step + 1

    def _copy_extras(self, tile: Tile, block: Any, stage: Any) -> None:
        keys, full = pl.ds(block * self.params.kv_block, self.params.kv_block), self.wait.extra_full.at[stage]
        for source, target in self.memory.by_key():
            at = (*within(source, tile.batch, tile.head), keys)
            plgpu.copy_gmem_to_smem(source.at[at], target.at[stage], full)
        bias, mask, words = self.inputs.bias, self.inputs.mask, self._words[2]
        for w in range(self.params.warpgroups):
            row, head = self._own(tile, w)
            rows = pl.ds(row, ROWS)
            if bias is not None:
                block_at = (*within(bias, tile.batch, head), rows, keys)
                plgpu.copy_gmem_to_smem(bias.at[block_at], self.shared.bias.at[stage, w], full)
            if mask is not None:
                block_at = (*within(mask, tile.batch, head), pl.ds(block * words, words), rows)
                plgpu.copy_gmem_to_smem(mask.at[block_at], self.shared.mask.at[stage, w], full)

    def _part(self, tile: Tile, warpgroup: Any, number: Any) -> Part:
        return Part(tile, number, warpgroup, self.memory.query_slot(warpgroup, number), *self._own(tile, warpgroup))

    def _own(self, tile: Tile, warpgroup: Any) -> tuple[Any, Any]:
        """Return the first row and the head of a warpgroup's part of a tile."""
        if self.params.pack_heads:
            return tile.row, tile.head + warpgroup
        return tile.row + ROWS * warpgroup, tile.head

    # What computes.

    def _compute(self, warpgroup: Any) -> None:
        wait, last = self.wait, self.params.warpgroups - 1
        if self.params.ping_pong:
            # Somebody has to give the first turn away.
            @pl.when(warpgroup == last)
            def _first_turn() -> None:
                plgpu.barrier_arrive(wait.turn.at[0])

        def tile(tile: Tile, step: Any, number: Any) -> Any:
            return Rows(self.memory, self._part(tile, warpgroup, number)).run(step)

        self._each_tile(tile, jnp.int32(0))
        # The turn that was passed on last: no barrier is left with an arrival that nobody saw.
        if self.params.ping_pong:

            @pl.when(warpgroup == 0)
            def _last_turn() -> None:
                plgpu.barrier_wait(wait.turn.at[0])

        plgpu.wait_smem_to_gmem(0)

    @property
    def _words(self) -> tuple[int, ...]:
        """Return the shape of the buffers of a mask."""
        return self.params.stages, self.params.warpgroups, self.params.kv_block // 32, ROWS

    def _bias(self) -> Any:
        """Return the type of the buffers of a bias."""
        bias = self.inputs.bias
        if bias is None:
            return None
        shape = (self.params.stages, self.params.warpgroups, ROWS, self.params.kv_block)
        return _buffer(shape, bias.dtype, swizzle(self.params.kv_block * bias.dtype.itemsize))


def _buffer(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    """Return the type of shared memory in tiles of eight rows, as wide as the swizzle, which tensor cores read."""
    dtype = jnp.dtype(dtype)
    tiles = plgpu.TilingTransform((8, swizzle // dtype.itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiles, plgpu.SwizzleTransform(swizzle)))
