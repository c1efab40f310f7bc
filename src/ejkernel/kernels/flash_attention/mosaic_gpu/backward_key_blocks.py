# SPDX-License-Identifier: Apache-2.0
"""What backward kernels whose blocks own keys have in common: the launch, the loads and the gradients' way out.

A block walks over the visible query tiles of all heads of its group, so that dK and dV need no second sum; or of some
of the heads, with `head_parts`, and then dK and dV of the parts are added up outside.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .backward_buffers import dquery_columns, key_block_buffers
from .backward_params import BackwardParams
from .backward_problem import Inputs, Problem
from .backward_tiles import WGMMA, Beside, Range, Tile, drain, limit_of, pick, take_registers, tiled, zeros
from .machine import Machine, plgpu


class Scratch(NamedTuple):
    """Shared memory and barriers of a block; what a kernel does not use is `None`."""

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
    loaded: Any
    query_full: Any
    dout_full: Any
    query_free: Any
    dout_free: Any
    weights_full: Any
    weights_free: Any
    dscores_full: Any
    bias_full: Any
    bias_free: Any
    done: Any


class Sums(NamedTuple):
    """References to float32 sums in memory, which start from zeros; of padded lengths.

    Attributes:
        dquery: `[batch, queries, heads, head_dim]`, unscaled; `None` if another kernel computes it.
        dbias: `[batch or 1, heads or 1, keys, queries]`, or with queries before keys if it is stored rather than added
            to; `None` if there is no bias.
    """

    dquery: Any = None
    dbias: Any = None


class Block(NamedTuple):
    """What a block of the grid works on; `arrays` are references to `Inputs`, `part` counts those of all groups."""

    arrays: Any
    sums: Sums
    outputs: tuple[Any, ...]
    scratch: Scratch
    example: jax.Array
    part: jax.Array
    key: jax.Array
    tiles: Range
    limit: Any


class Step(NamedTuple):
    """One tile of queries of one head.

    Attributes:
        head: Of the queries.
        tile: Number of the tile of queries.
        number: How many steps came before.
    """

    head: jax.Array
    tile: jax.Array
    number: jax.Array


class KeyBlockKernel:
    """One launch: the gradients of keys and values, and with `form='fused'` the unscaled sum of the queries'."""

    def __init__(self, problem: Problem, params: BackwardParams, machine: Machine) -> None:
        self.problem, self.params, self.machine = problem, params, machine
        self.fused = params.form == "fused"
        self.key_blocks = -(-problem.keys // params.keys)
        self.masks = problem.needed_masks(params.keys, walks_queries=True)
        self.columns = dquery_columns(problem, params)
        self.parts = problem.groups * params.head_parts
        self.heads_per_part = problem.heads // self.parts

    def run(self, inputs: Inputs, sums: Sums) -> tuple[jax.Array, jax.Array]:
        """Return the gradients of key and value of all parts, scaled; add the others to `sums`."""
        problem, params = self.problem, self.params
        present = [x is not None for x in (*inputs, *sums)]

        def body(*refs: Any) -> None:
            given = iter(refs)
            found = [next(given) if here else None for here in present]
            arrays, totals = Inputs._make(found[: len(inputs)]), Sums._make(found[len(inputs) :])
            outputs = tuple(given)
            pl.run_scoped(
                lambda *scratch: self._block(arrays, totals, outputs, Scratch(*scratch)),
                *self._scratch_types(),
                collective_axes="wg",
            )

        dkey, dvalue = plgpu.kernel(
            body,
            out_type=self.out_types(inputs),
            grid=(problem.batch * self.parts * self.key_blocks,),
            grid_names=("block",),
            num_threads=params.warpgroups + 1,
            thread_name="wg",
            kernel_name=f"attention_backward_{params.division}",
            interpret=self.machine.interpret,
            # No thread both stores to and loads from the same shared memory, which is what the barriers that Pallas
            # would put around every access are for.
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        )(*(x for x in (*inputs, *sums) if x is not None))
        return dkey, dvalue

    def out_types(self, inputs: Inputs) -> list[jax.ShapeDtypeStruct]:
        """Return the types of what `run` returns."""
        shapes = ((*x.shape[:2], self.parts, x.shape[3]) for x in (inputs.key, inputs.value))
        # Parts are rounded, too: they leave through the buffers of keys and values, which have room for no more.
        return [jax.ShapeDtypeStruct(shape, self.problem.dtype) for shape in shapes]

    def compute(self, block: Block) -> None:
        """Do what a warpgroup that computes does."""
        raise NotImplementedError

    def _scratch_types(self) -> Scratch:
        params = self.params
        buffers: dict[str, Any] = {}
        for name, buffer in key_block_buffers(self.problem, params).items():
            dtype = jnp.float32 if buffer.itemsize == 4 else self.problem.dtype
            # The bias's 16 bits may be of the other kind than the query's.
            dtype = self.problem.bias_dtype if name == "bias" else dtype
            flat = name in ("shift", "delta")
            buffers[name] = plgpu.SMEM(buffer.shape, dtype) if flat else tiled(buffer.shape, dtype, buffer.columns)
        everyone, passed = params.warpgroups, params.division == "products"
        biases = 0 if self.problem.bias is None else buffers["bias"].shape[0]
        barriers = {
            "loaded": plgpu.Barrier(num_arrivals=2 * (params.keys // 64)),
            # Two copies each: a tile, and the numbers of its rows that its product starts from.
            "query_full": plgpu.Barrier(num_arrivals=2, num_barriers=params.q_stages),
            "dout_full": plgpu.Barrier(num_arrivals=2, num_barriers=params.dout_stages),
            "query_free": plgpu.Barrier(num_arrivals=everyone, num_barriers=params.q_stages),
            "dout_free": plgpu.Barrier(num_arrivals=everyone, num_barriers=params.dout_stages),
            "weights_full": plgpu.Barrier(num_barriers=2) if passed else None,
            "weights_free": plgpu.Barrier(num_barriers=2) if passed else None,
            # Where products are divided, one warpgroup alone has scores' gradients to share.
            "dscores_full": plgpu.Barrier(num_arrivals=1 if passed else everyone) if self.fused else None,
            "bias_full": plgpu.Barrier(num_barriers=biases) if biases else None,
            "bias_free": plgpu.Barrier(num_arrivals=everyone, num_barriers=biases) if biases else None,
            "done": plgpu.Barrier(num_arrivals=everyone),
        }
        return Scratch(**{name: (buffers | barriers).get(name) for name in Scratch._fields})

    def _block(self, arrays: Inputs, sums: Sums, outputs: tuple[Any, ...], scratch: Scratch) -> None:
        warpgroups = self.params.warpgroups
        wg, index = lax.axis_index("wg"), lax.axis_index("block")
        number, example, part = self._place(index)
        tiles = Range.load(arrays.ranges, example, number)
        limit = limit_of(self.problem, arrays, example, self.params.keys)
        block = Block(arrays, sums, outputs, scratch, example, part, number * self.params.keys, tiles, limit)

        @pl.when(wg == warpgroups)
        def _() -> None:
            take_registers(warpgroups, computes=False)
            self._load(block)

        @pl.when(wg < warpgroups)
        def _() -> None:
            take_registers(warpgroups, computes=True)
            self.compute(block)

    def _place(self, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the number of a block of keys, its example, and its part of all groups.

        Under a causal mask the first keys are seen by most queries. Where blocks are so few that groups have parts,
        those of all examples come first, and the short ones fill the gaps; else one example's share what they read.
        """
        rest, part = lax.div(index, self.parts), lax.rem(index, self.parts)
        if self.params.head_parts > 1:
            return lax.div(rest, self.problem.batch), lax.rem(rest, self.problem.batch), part
        return lax.rem(rest, self.key_blocks), lax.div(rest, self.key_blocks), part

    def _load(self, block: Block) -> None:
        params, scratch = self.params, block.scratch
        group = lax.div(block.part, params.head_parts)
        for slab in range(params.keys // 64):
            at = (block.example, pl.ds(block.key + 64 * slab, 64), group)
            plgpu.copy_gmem_to_smem(block.arrays.key.at[at], scratch.key.at[slab], scratch.loaded)
            plgpu.copy_gmem_to_smem(block.arrays.value.at[at], scratch.value.at[slab], scratch.loaded)

        def of_head(g: jax.Array, number: jax.Array) -> jax.Array:
            head = self.head(block, g)

            def of_tile(j: jax.Array, number: jax.Array) -> jax.Array:
                self._load_tile(block, Step(head, j, number))
                return number + 1

            # All from the first on: where blocks began at different queries, so as not to add to the same sums of dQ at
            # once, it took 4 % longer.
            total: jax.Array = lax.fori_loop(block.tiles.first, block.tiles.last, of_tile, number)
            return total

        steps = lax.fori_loop(0, self.heads_per_part, of_head, jnp.int32(0))
        drain(scratch.query_free, params.q_stages, steps)
        drain(scratch.dout_free, params.dout_stages, steps)
        if scratch.bias is not None:
            drain(scratch.bias_free, scratch.bias.shape[0], steps)

    def _load_tile(self, block: Block, step: Step) -> None:
        arrays, scratch = block.arrays, block.scratch
        rows = pl.ds(step.tile * self.params.q_block, self.params.q_block)
        at, row = (block.example, rows, step.head), (block.example, step.head, rows)
        rings = (
            (
                scratch.query_free,
                scratch.query_full,
                (arrays.query.at[at], scratch.query),
                (arrays.shift, scratch.shift),
            ),
            (scratch.dout_free, scratch.dout_full, (arrays.dout.at[at], scratch.dout), (arrays.delta, scratch.delta)),
        )
        # Two rings, so that cotangents may have fewer stages than queries where both do not fit.
        for free, full, (tile, tiles), (vector, vectors) in rings:
            slot = lax.rem(step.number, tiles.shape[0])

            # Nobody frees a slot before its first use.
            @pl.when(step.number >= tiles.shape[0])
            def _(free: Any = free, slot: Any = slot) -> None:
                plgpu.barrier_wait(free.at[slot])

            plgpu.copy_gmem_to_smem(tile, tiles.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(vector.at[row], vectors.at[slot], full.at[slot])
        if scratch.bias is not None:
            self._load_bias(block, step)

    def _load_bias(self, block: Block, step: Step) -> None:
        scratch, bias = block.scratch, block.arrays.bias
        slot = lax.rem(step.number, scratch.bias.shape[0])

        @pl.when(step.number >= scratch.bias.shape[0])
        def _() -> None:
            plgpu.barrier_wait(scratch.bias_free.at[slot])

        tile = self.tile(block, step, 0)
        at = (*pick(bias, tile), pl.ds(tile.query, self.params.q_block), pl.ds(block.key, self.params.keys))
        plgpu.copy_gmem_to_smem(bias.at[at], scratch.bias.at[slot], scratch.bias_full.at[slot])

    def head(self, block: Block, g: jax.Array) -> jax.Array:
        """Return a head of the block's part of a group."""
        return block.part * self.heads_per_part + g

    def slots(self, step: Step) -> tuple[jax.Array, jax.Array]:
        """Return where a step's queries and its cotangents are."""
        return lax.rem(step.number, self.params.q_stages), lax.rem(step.number, self.params.dout_stages)

    def tile(self, block: Block, step: Step, slab: Any) -> Tile:
        """Return the tile of scores of 64 of the block's keys in one step."""
        rows = self.params.q_block
        return Tile((64, rows), 1, block.example, step.head, step.tile * rows, block.key + 64 * slab, block.limit)

    def row(self, tile: Tile, vector: Any) -> jax.Array:
        """Load a number for each query, and spread it over a tile."""
        return tile.spread(tile.vector(vector, 1), 1)

    def scores_start(self, block: Block, step: Step, tile: Tile) -> jax.Array:
        """Return what the sums of products of query and key start from.

        A sum that starts from the row's shift leaves no register to the shift itself.
        """
        if not self.problem.shift_in_scores:
            return zeros(tile.shape)
        return self.row(tile, block.scratch.shift.at[self.slots(step)[0]])

    def beside(self, block: Block, step: Step, tile: Tile, mask: tuple[jax.Array, ...], wg: Any) -> Beside:
        """Return what a tile's probabilities are computed from; called when its products are there.

        Args:
            block: The block.
            step: The step.
            tile: The tile.
            mask: The words of the mask, which were loaded before.
            wg: The warpgroup, by which the bias is divided.
        """
        shift = bias = None
        if not self.problem.shift_in_scores:
            shift = self.row(tile, block.scratch.shift.at[self.slots(step)[0]])
        if block.scratch.bias is not None:
            slot = lax.rem(step.number, block.scratch.bias.shape[0])
            plgpu.barrier_wait(block.scratch.bias_full.at[slot])
            part = block.scratch.bias.at[slot, :, pl.ds(64 * wg, 64)].transpose((1, 0))
            bias = plgpu.load(part, layout=WGMMA, optimized=False).astype(jnp.float32)
            plgpu.commit_smem()  # orders the read before the copy that comes next
            plgpu.barrier_arrive(block.scratch.bias_free.at[slot])
        return Beside(shift, bias, mask)

    def send_dquery(self, block: Block, part: jax.Array, step: Step, wg: Any, at: tuple[Any, Any]) -> None:
        """Start adding a warpgroup's part of dQ to memory, in pieces of the size of its buffer.

        Args:
            block: The block.
            part: Float32, 64 rows.
            step: The tile of queries that it belongs to.
            wg: The warpgroup.
            at: First row, counted from the tile's, and first column.
        """
        place = block.scratch.dquery.at[wg]
        first = step.tile * self.params.q_block + at[0]
        width = place.shape[-1]
        for column in range(0, part.shape[1], width):
            # The piece before has to be out of the buffer; its sum in memory need not be there.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            place[...] = part[:, column : column + width]
            plgpu.commit_smem()
            target = (block.example, pl.ds(first, 64), step.head, pl.ds(at[1] + column, width))
            self.machine.add_to_memory(place, block.sums.dquery.at[target])

    def finish(self, block: Block) -> None:
        """Wait until no warpgroup needs keys and values: their buffers are free for their gradients."""
        plgpu.barrier_arrive(block.scratch.done)
        plgpu.barrier_wait(block.scratch.done)

    def store(self, block: Block, gradient: jax.Array, which: int, slab: Any) -> None:
        """Store the gradient of 64 keys (`which` 0) or values (1)."""
        place = (block.scratch.key, block.scratch.value)[which].at[slab]
        place[...] = gradient.astype(self.problem.dtype)
        plgpu.commit_smem()
        at = (block.example, pl.ds(block.key + 64 * slab, 64), block.part)
        plgpu.copy_smem_to_gmem(place, block.outputs[which].at[at])

    def over_heads(self, block: Block, body: Any, carry: Any) -> Any:
        """Run `body(head, carry)` for every head of the block's part of a group."""
        return lax.fori_loop(0, self.heads_per_part, lambda g, c: body(self.head(block, g), c), carry)
