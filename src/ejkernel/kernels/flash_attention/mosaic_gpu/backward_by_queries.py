# SPDX-License-Identifier: Apache-2.0
"""The backward kernel whose warpgroups each own 64 queries: their gradient, where another computes the others'."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .backward_buffers import query_block_buffers
from .backward_params import BackwardParams
from .backward_problem import Inputs, Problem
from .backward_tiles import (
    WGMMA,
    Beside,
    Range,
    Tile,
    drain,
    kept,
    limit_of,
    mask_words,
    pick,
    take_registers,
    tiled,
    walk,
    weigh,
    zeros,
)
from .machine import Machine, plgpu


class Scratch(NamedTuple):
    """Shared memory and barriers of a block."""

    query: Any
    dout: Any
    key: Any
    value: Any
    loaded: Any
    key_full: Any
    value_full: Any
    key_free: Any
    value_free: Any


class Block(NamedTuple):
    """What a block of the grid works on; `arrays` are references to `Inputs`."""

    arrays: Any
    output: Any
    scratch: Scratch
    example: jax.Array
    head: jax.Array
    query: jax.Array
    tiles: Range
    limit: Any


class QueriesKernel:
    """One launch: the gradient of the queries, scaled."""

    def __init__(self, problem: Problem, params: BackwardParams, machine: Machine) -> None:
        self.problem, self.params, self.machine = problem, params, machine
        self.rows = 64 * params.q_warpgroups
        self.query_blocks = -(-problem.queries // self.rows)

    def run(self, inputs: Inputs) -> jax.Array:
        """Return the gradient of the queries; `inputs.ranges` are of blocks of queries."""
        problem, params = self.problem, self.params
        present = [x is not None for x in inputs]

        def body(*refs: Any) -> None:
            given = iter(refs)
            arrays = Inputs._make(next(given) if here else None for here in present)
            output = next(given)
            pl.run_scoped(
                lambda *scratch: self._block(arrays, output, Scratch(*scratch)),
                *self._scratch_types(),
                collective_axes="wg",
            )

        dquery: jax.Array = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(inputs.query.shape, inputs.query.dtype),
            grid=(problem.batch * problem.heads * self.query_blocks,),
            grid_names=("block",),
            num_threads=params.q_warpgroups + 1,
            thread_name="wg",
            kernel_name="attention_backward_queries",
            interpret=self.machine.interpret,
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        )(*(x for x in inputs if x is not None))
        return dquery

    def _scratch_types(self) -> Scratch:
        everyone, stages = self.params.q_warpgroups, self.params.kv_stages
        buffers = query_block_buffers(self.problem, self.params)
        full, free = (plgpu.Barrier(num_arrivals=n, num_barriers=stages) for n in (1, everyone))
        return Scratch(
            **{name: tiled(buffer.shape, self.problem.dtype) for name, buffer in buffers.items()},
            # A copy arrives by itself: two for the rows of each warpgroup.
            loaded=plgpu.Barrier(num_arrivals=2 * everyone),
            key_full=full,
            value_full=full,
            key_free=free,
            value_free=free,
        )

    def _block(self, arrays: Inputs, output: Any, scratch: Scratch) -> None:
        warpgroups, heads = self.params.q_warpgroups, self.problem.heads
        wg, index = lax.axis_index("wg"), lax.axis_index("block")
        example, rest = lax.div(index, self.query_blocks * heads), lax.rem(index, self.query_blocks * heads)
        # Under a causal mask the last queries see most: they come first, and the short ones fill the gaps.
        number, head = self.query_blocks - 1 - lax.div(rest, heads), lax.rem(rest, heads)
        tiles = Range.load(arrays.ranges, example, number)
        limit = limit_of(self.problem, arrays, example, self.params.kv_block)
        block = Block(arrays, output, scratch, example, head, number * self.rows, tiles, limit)

        @pl.when(wg == warpgroups)
        def _() -> None:
            take_registers(warpgroups, computes=False)
            self._load(block)

        @pl.when(wg < warpgroups)
        def _() -> None:
            take_registers(warpgroups, computes=True)
            self._compute(block)

    def _load(self, block: Block) -> None:
        params, arrays, scratch = self.params, block.arrays, block.scratch
        for w in range(params.q_warpgroups):
            at = (block.example, pl.ds(block.query + 64 * w, 64), block.head)
            plgpu.copy_gmem_to_smem(arrays.query.at[at], scratch.query.at[w], scratch.loaded)
            plgpu.copy_gmem_to_smem(arrays.dout.at[at], scratch.dout.at[w], scratch.loaded)
        group = lax.div(block.head, self.problem.heads_per_group)

        def of_tile(j: jax.Array, number: jax.Array) -> jax.Array:
            slot = lax.rem(number, params.kv_stages)
            at = (block.example, pl.ds(j * params.kv_block, params.kv_block), group)
            # Two rings, not one of pairs: scores are begun without values, and values are done with before keys are.
            for source, to, full, free in (
                (arrays.key, scratch.key, scratch.key_full, scratch.key_free),
                (arrays.value, scratch.value, scratch.value_full, scratch.value_free),
            ):

                @pl.when(number >= params.kv_stages)
                def _(free: Any = free) -> None:
                    plgpu.barrier_wait(free.at[slot])

                plgpu.copy_gmem_to_smem(source.at[at], to.at[slot], full.at[slot])
            return number + 1

        steps = lax.fori_loop(block.tiles.first, block.tiles.last, of_tile, jnp.int32(0))
        drain(scratch.key_free, params.kv_stages, steps)
        drain(scratch.value_free, params.kv_stages, steps)

    def _compute(self, block: Block) -> None:
        wg, scratch = lax.axis_index("wg"), block.scratch
        first = block.query + 64 * wg
        rows = (block.example, block.head, pl.ds(first, 64))
        shape = (64, self.params.kv_block)
        tile = Tile(shape, 0, block.example, block.head, first, jnp.int32(0), block.limit)
        # Before the wait, so that both come from memory while the copies do.
        shift, delta = (tile.vector(x.at[rows], 0, optimized=False) for x in (block.arrays.shift, block.arrays.delta))
        plgpu.barrier_wait(scratch.loaded)

        def of_tile(j: jax.Array, carry: Any, *, masked: bool) -> Any:
            here = tile._replace(key=j * self.params.kv_block)
            return self._step(block, here, (shift, delta), carry, masked), carry[1] + 1

        masks = self.problem.needed_masks(self.params.kv_block, walks_queries=False)
        dquery, _ = walk(block.tiles, of_tile, (zeros((64, self.problem.head_dim)), jnp.int32(0)), masks)
        # Its own rows' buffer is free: no other warpgroup reads it, and all products are done.
        scratch.query.at[wg][...] = (dquery * self.problem.gradient_scale).astype(self.problem.dtype)
        plgpu.commit_smem()
        at = (block.example, pl.ds(first, 64), block.head)
        plgpu.copy_smem_to_gmem(scratch.query.at[wg], block.output.at[at])
        plgpu.wait_smem_to_gmem(0)

    def _step(self, block: Block, tile: Tile, rows: tuple[jax.Array, jax.Array], carry: Any, masked: bool) -> jax.Array:
        wg, scratch, multiply = lax.axis_index("wg"), block.scratch, self.machine.multiply
        dquery, number = carry
        slot = lax.rem(number, self.params.kv_stages)
        shift, delta = (tile.spread(x, 0) for x in rows)
        in_scores = self.problem.shift_in_scores
        mask = mask_words(block.arrays, tile)
        plgpu.barrier_wait(scratch.key_full.at[slot])

        def products(sums: Any) -> None:
            scores, dweights, dquery = sums
            multiply(scores, scratch.query.at[wg], scratch.key.at[slot].transpose((1, 0)))
            plgpu.barrier_wait(scratch.value_full.at[slot])
            multiply(dweights, scratch.dout.at[wg], scratch.value.at[slot].transpose((1, 0)))
            # The other product goes on while the probabilities are worked out.
            raw = self.machine.read(scores, pending=1)
            beside = Beside(None if in_scores else shift, self._bias(block.arrays, tile), mask)
            weights, slope = weigh(self.problem, block.arrays, tile, raw, beside, masked)
            # Rounded, they take half of the registers, which the sums of a wide head leave no more of.
            weights = (weights if slope is None else weights * slope).astype(self.problem.dtype)
            pull = self.machine.read(dweights, pending=0)
            keep = kept(self.problem, block.arrays, tile)
            dscores = weights.astype(jnp.float32) * (pull if keep is None else jnp.where(keep, pull, delta))
            # Before dQ's product, which needs the keys alone.
            plgpu.barrier_arrive(scratch.value_free.at[slot])
            dscores = dscores.astype(self.problem.dtype)
            multiply(dquery, dscores, scratch.key.at[slot])

        start = (shift if in_scores else zeros(tile.shape), delta, dquery)
        dquery = self.machine.accumulate(products, *start)[2]
        plgpu.barrier_arrive(scratch.key_free.at[slot])
        return dquery

    def _bias(self, arrays: Inputs, tile: Tile) -> jax.Array | None:
        if arrays.bias is None:
            return None
        bias: Any = arrays.bias
        at = (*pick(bias, tile), pl.ds(tile.query, tile.shape[0]), pl.ds(tile.key, tile.shape[1]))
        loaded: jax.Array = plgpu.load(bias.at[at], layout=WGMMA, optimized=False)
        return loaded.astype(jnp.float32)
