# SPDX-License-Identifier: Apache-2.0
"""Attention of wide heads: kernels for weights and scores' gradients in memory, then products of XLA's.

A tile has 128 queries of one head, 64 for each consumer, and 128 or 256 keys. The forward has two launches: the first
finds the log-sum-exp, and stores no scores; the second computes them again, and stores the weights. XLA's forward
stores the scores in float32, and reads them for the maximum, the sum and the weights, which takes longer.

In the backward a tile's mainloop multiplies queries with keys, then cotangents with values: both products share the
pipeline, and a consumer holds only one of them, beside the weights in bfloat16. Of a tile that no query sees, zeros are
stored.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper import MULTIPROCESSORS
from ejkernel.kernels._hopper.epilogue import across, load_rows, numbered, piece_of, store_piece
from ejkernel.kernels._hopper.launch import PROGRAM, WARPGROUP, dispatch_warpgroup, launch, plgpu, tiled
from ejkernel.kernels._hopper.pipeline import Pipeline, producer_tail
from ejkernel.kernels._hopper.products import accumulate, multiply_stages
from ejkernel.kernels._hopper.tile_shapes import PIECE, REGISTERS, ROWS, STEP, WARPGROUPS
from ejkernel.kernels._numbers import LOG2_E, LOWEST
from ejkernel.kernels.flash_attention._batches import fold_examples
from ejkernel.kernels.flash_attention._xla_blocks import over_examples
from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE, Gradients, Operands, Residuals, Rules, describe

from .params import BackwardParams, ForwardParams
from .wide_support import WidePlan, examples_at_once, plan_of

STATISTICS, WEIGHTS, GRADIENTS = "statistics", "weights", "gradients"  # the results that a launch stores
_TILE_ROWS = ROWS * WARPGROUPS


class WideInputs(NamedTuple):
    """Operands of a kernel, `[batch, length, heads, columns]`; numbers per row `[batch, heads, rows]` in float32.

    Attributes:
        query, key: Padded.
        lengths: The lengths of the keys, `[batch]` in int32, if given.
        lse: The log-sum-exp in base 2; infinite for rows that see no key. Not for statistics.
        dout, value: Padded; for gradients alone.
        delta: The sums over columns of output times cotangent; for gradients alone.
    """

    query: Any
    key: Any
    lengths: Any = None
    lse: Any = None
    dout: Any = None
    value: Any = None
    delta: Any = None


class _Memory(NamedTuple):
    """Shared memory and barriers; types before `run_scoped`, references inside it."""

    rows: Any
    columns: Any
    out: Any
    pipeline: Pipeline


class _Tile(NamedTuple):
    """Example and head of a tile, its first query and key, and whether a query sees a key."""

    example: Any
    head: Any
    query: Any
    key: Any
    seen: Any


def forward_of_wide(operands: Operands, rules: Rules, params: ForwardParams, *, interpret: Any = None) -> Residuals:
    """Return the output and the log-sum-exp; the arguments are those of `launch.forward`."""

    def attend(operands: Operands) -> tuple[jax.Array, ...]:
        return _by_examples(lambda plan, operands: _attend(operands, plan, interpret), (operands,), rules, params)

    out, lse = fold_examples(attend)(operands)
    return out, lse


def backward_of_wide(
    operands: Operands,
    residuals: Residuals,
    dout: jax.Array,
    rules: Rules,
    params: BackwardParams,
    *,
    interpret: Any = None,
) -> Gradients:
    """Return the gradients of query, key and value; the arguments are those of `launch.backward`."""

    def pull(*arrays: Any) -> tuple[jax.Array, ...]:
        def of_examples(plan: WidePlan, operands: Operands, residuals: Residuals, dout: jax.Array) -> Any:
            return _gradients(operands, residuals, dout, plan, interpret)

        return _by_examples(of_examples, arrays, rules, params)

    dquery, dkey, dvalue = fold_examples(pull)(operands, residuals, dout)
    return dquery, dkey, dvalue, None


def _by_examples(run: Any, arrays: Any, rules: Rules, params: ForwardParams | BackwardParams) -> tuple[jax.Array, ...]:
    """Return `run(plan, *arrays)`, for as many examples at once as their weights fit in memory."""
    call = describe(arrays[0], rules)
    batch, count = call.query[0], examples_at_once(call)
    plan = plan_of(call, params, count)

    def part(some: Any) -> tuple[jax.Array, ...]:
        with jax.enable_x64(False):  # the kernels count in int32
            found: tuple[jax.Array, ...] = run(plan, *some)
            return found

    return part(arrays) if count == batch else tuple(over_examples(part, arrays, batch, count))


def _inputs(operands: Operands, plan: WidePlan) -> WideInputs:
    lengths = operands.key_lengths
    return WideInputs(
        query=_padded(operands.query, plan.rows, plan.head_dim),
        key=_padded(operands.key, plan.columns, plan.head_dim),
        lengths=None if lengths is None else jnp.clip(lengths, 0, plan.keys).astype(jnp.int32),
    )


def _padded(x: jax.Array, length: int, columns: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, columns - x.shape[3])))


def _attend(operands: Operands, plan: WidePlan, interpret: Any) -> tuple[jax.Array, jax.Array]:
    inputs = _inputs(operands, plan)
    tops, totals = _WideKernel(plan, STATISTICS).run(inputs, interpret)
    top = tops.max(axis=0)
    shift = jnp.where(top == -jnp.inf, 0, top)
    total = (totals * jnp.exp2(tops - shift)).sum(axis=0)
    empty = total == 0
    in_base_2 = jnp.where(empty, jnp.inf, shift + jnp.log2(jnp.where(empty, 1, total)))
    [weights] = _WideKernel(plan, WEIGHTS).run(inputs._replace(lse=in_base_2), interpret)
    value = _padded(operands.value, plan.columns, operands.value.shape[3])
    out = jnp.einsum("bgrqk,bkge->bqgre", _by_group(weights, plan), value)[:, : plan.queries]
    lse = jnp.where(empty, EMPTY_ROW_LSE, in_base_2 * (1 / LOG2_E))[..., : plan.queries]
    return out.reshape(*operands.query.shape[:3], -1), lse


def _gradients(
    operands: Operands, residuals: Residuals, dout: jax.Array, plan: WidePlan, interpret: Any
) -> tuple[jax.Array, ...]:
    query, key, value = operands[:3]
    (out, lse), inputs = residuals, _inputs(operands, plan)
    delta = jnp.einsum("bqhe,bqhe->bhq", out, dout, preferred_element_type=jnp.float32)
    more = ((0, 0), (0, 0), (0, plan.row_tiles * _TILE_ROWS - plan.queries))
    # The maximum keeps that of a row with nothing but a sink of the lowest float finite: -inf minus -inf would be NaN.
    finite = jnp.maximum(lse * LOG2_E, LOWEST)
    in_base_2 = jnp.where(lse == EMPTY_ROW_LSE, jnp.inf, finite)
    inputs = inputs._replace(
        lse=jnp.pad(in_base_2, more, constant_values=jnp.inf),
        dout=_padded(dout.astype(query.dtype), plan.rows, plan.value_dim),
        value=_padded(value, plan.columns, plan.value_dim),
        delta=jnp.pad(delta, more),
    )
    weights, dscores = (_by_group(x, plan) for x in _WideKernel(plan, GRADIENTS).run(inputs, interpret))
    of_query, of_dout = (x.reshape(*x.shape[:2], plan.groups, -1, x.shape[3]) for x in (inputs.query, inputs.dout))
    found = (
        jnp.einsum("bgrqk,bkgd->bqgrd", dscores, inputs.key).reshape(*inputs.query.shape),
        jnp.einsum("bgrqk,bqgrd->bkgd", dscores, of_query),
        jnp.einsum("bgrqk,bqgre->bkge", weights, of_dout),
    )
    return tuple(x[:, : like.shape[1], :, : like.shape[3]] for x, like in zip(found, (query, key, value), strict=True))


def _by_group(matrix: jax.Array, plan: WidePlan) -> jax.Array:
    """Return `[batch, groups, heads of a group, rows, columns]`."""
    return matrix.reshape(plan.batch, plan.groups, plan.heads // plan.groups, plan.rows, plan.columns)


class _WideKernel:
    """One launch.

    `statistics` stores for each tile the largest logit of a row, in base 2, and the sum of the row's exponentials
    relative to it, `[column tiles, batch, heads, rows]`, with rows padded to whole tiles. `weights` stores these, and
    `gradients` the weights and the gradient of the scores, `[batch, heads, rows, columns]`.
    """

    def __init__(self, plan: WidePlan, mode: str) -> None:
        self.plan, self.mode = plan, mode
        self.per_head = plan.row_tiles * plan.column_tiles
        self.tiles = plan.batch * plan.heads * self.per_head
        self.programs = min(self.tiles, MULTIPROCESSORS)
        # of the mainloop: of the scores, and of the product of cotangents and values
        self.steps = (plan.head_dim // STEP, plan.value_dim // STEP if mode == GRADIENTS else 0)

    def run(self, inputs: WideInputs, interpret: Any) -> list[jax.Array]:
        """Return the results."""
        plan, dtype = self.plan, self.plan.dtype
        rows = plan.row_tiles * _TILE_ROWS
        part = jax.ShapeDtypeStruct((plan.column_tiles, plan.batch, plan.heads, rows), jnp.float32)
        matrix = jax.ShapeDtypeStruct((plan.batch, plan.heads, plan.rows, plan.columns), dtype)
        return launch(
            self._block,
            inputs,
            {STATISTICS: [part, part], WEIGHTS: [matrix], GRADIENTS: [matrix, matrix]}[self.mode],
            name=f"attention_wide_{self.mode}",
            programs=self.programs,
            memory=_Memory(
                tiled((plan.stages, WARPGROUPS, ROWS, STEP), dtype),
                tiled((plan.stages, plan.kv_block, STEP), dtype),
                None if self.mode == STATISTICS else tiled((WARPGROUPS, plan.slots, ROWS, PIECE), dtype),
                Pipeline.types(plan.stages, consumers=WARPGROUPS, copies=WARPGROUPS + 1),
            ),
            consumers=WARPGROUPS,
            lane_semantics=True,
            interpret=interpret,
        )

    def _block(self, inputs: WideInputs, results: Any, memory: _Memory) -> None:
        self.inputs, self.results, self.memory = inputs, results, memory
        program = lax.axis_index(PROGRAM)
        self.own = lax.div(self.tiles - program + (self.programs - 1), self.programs)
        dispatch_warpgroup(
            lax.axis_index(WARPGROUP), WARPGROUPS, REGISTERS, producer=self._produce, consumer=self._consume
        )

    def _tile(self, index: Any) -> _Tile:
        plan, rules = self.plan, self.plan.rules
        number = lax.axis_index(PROGRAM) + index * self.programs
        which, rest = lax.div(number, self.per_head), lax.rem(number, self.per_head)
        query = lax.rem(rest, plan.row_tiles) * _TILE_ROWS
        key = lax.div(rest, plan.row_tiles) * plan.kv_block
        position = query + (plan.keys - plan.queries)
        seen: Any = True
        if rules.right is not None:
            seen = key <= position + (_TILE_ROWS - 1 + rules.right)
        if rules.left is not None:
            seen = jnp.logical_and(seen, key + (plan.kv_block - 1) >= position - rules.left)
        return _Tile(lax.div(which, plan.heads), lax.rem(which, plan.heads), query, key, seen)

    @property
    def _hides(self) -> bool:
        """Whether the rules may hide a whole tile."""
        return not (self.plan.rules.left is self.plan.rules.right is None)

    @property
    def _ends(self) -> bool:
        """Whether a tile may have columns past the end of the keys that count."""
        plan = self.plan
        stored = plan.columns != plan.keys  # padding, up to the next piece
        return plan.lengths or stored or (self.mode == STATISTICS and plan.keys % plan.kv_block > 0)

    @property
    def _may_hide(self) -> bool:
        return self._hides or self._ends

    # Producer.

    def _produce(self) -> None:
        def tile(index: Any, step: Any) -> Any:
            at = self._tile(index)

            def copy() -> None:
                self._copy(at, self.inputs.query, self.inputs.key, self.steps[0], step)
                if self.mode == GRADIENTS:
                    self._copy(at, self.inputs.dout, self.inputs.value, self.steps[1], step + self.steps[0])

            return self._if_seen(at, copy, step)

        total = lax.fori_loop(0, self.own, tile, jnp.int32(0))
        producer_tail(total, self.memory.pipeline)

    def _if_seen(self, tile: _Tile, run: Any, step: Any) -> Any:
        """Call `run` if a query of the tile sees a key; return the step after it."""
        if not self._hides:
            run()
            return step + sum(self.steps)
        pl.when(tile.seen)(run)
        return step + jnp.where(tile.seen, sum(self.steps), 0).astype(jnp.int32)

    def _copy(self, tile: _Tile, of_rows: Any, of_columns: Any, steps: int, first: Any) -> None:
        plan, memory = self.plan, self.memory
        group = lax.div(tile.head, plan.heads // plan.groups)

        @pl.loop(0, steps)
        def _step(i: Any) -> None:
            stage = memory.pipeline.producer_acquire(first + i)
            full, along = memory.pipeline.full.at[stage], pl.ds(i * STEP, STEP)
            for w in range(WARPGROUPS):
                rows = pl.ds(tile.query + ROWS * w, ROWS)
                source = of_rows.at[tile.example, rows, tile.head, along]
                plgpu.copy_gmem_to_smem(source, memory.rows.at[stage, w], full)
            source = of_columns.at[tile.example, pl.ds(tile.key, plan.kv_block), group, along]
            plgpu.copy_gmem_to_smem(source, memory.columns.at[stage], full)

    # Consumers.

    def _consume(self, warpgroup: Any) -> None:
        compute = {STATISTICS: self._statistics, WEIGHTS: self._weights, GRADIENTS: self._gradients}[self.mode]

        def tile(index: Any, step: Any) -> Any:
            at = self._tile(index)
            if self._hides:
                pl.when(jnp.logical_not(at.seen))(lambda: self._store_nothing(at, warpgroup))

            def run() -> None:
                compute(at, step, warpgroup)

            return self._if_seen(at, run, step)

        lax.fori_loop(0, self.own, tile, jnp.int32(0))
        if self.mode != STATISTICS:
            plgpu.wait_smem_to_gmem(0)

    def _statistics(self, tile: _Tile, step: Any, warpgroup: Any) -> None:
        logits = self._logits(tile, step, warpgroup)
        highest = logits[0]
        for piece in logits[1:]:
            highest = jnp.maximum(highest, piece)
        top = highest.max(axis=1)
        finite = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top) if self._may_hide else top
        parts = [jnp.exp2(piece - across(finite)) for piece in logits]
        total = functools.reduce(jnp.add, parts).sum(axis=1)
        self._store_parts(tile, warpgroup, top, total)

    def _weights(self, tile: _Tile, step: Any, warpgroup: Any) -> list[Any]:
        """Store and return the weights of a tile, in pieces."""
        lse, found = load_rows(self.inputs.lse, tile.example, tile.head, tile.query + warpgroup * ROWS), []
        for i, piece in enumerate(self._logits(tile, step, warpgroup)):
            found.append(jnp.exp2(piece - across(lse)).astype(self.plan.dtype))
            self._store(0, found[i], tile, warpgroup, i)
        return found

    def _gradients(self, tile: _Tile, step: Any, warpgroup: Any) -> None:
        delta = load_rows(self.inputs.delta, tile.example, tile.head, tile.query + warpgroup * ROWS)
        weights = self._weights(tile, step, warpgroup)
        products = self._product(step + self.steps[0], self.steps[1], warpgroup)
        for i, weight in enumerate(weights):
            slope = (piece_of(products, i) - across(delta)) * self.plan.rules.scale
            self._store(1, (weight.astype(jnp.float32) * slope).astype(self.plan.dtype), tile, warpgroup, i)

    def _logits(self, tile: _Tile, step: Any, warpgroup: Any) -> list[Any]:
        """Return the logits of a tile in base 2, in pieces; -inf where hidden."""
        scores, found = self._product(step, self.steps[0], warpgroup), []
        for i in range(self.plan.kv_block // PIECE):
            piece, visible = piece_of(scores, i) * (self.plan.rules.scale * LOG2_E), self._visible(tile, warpgroup, i)
            found.append(piece if visible is None else jnp.where(visible, piece, -jnp.inf))
        return found

    def _product(self, step: Any, steps: int, warpgroup: Any) -> Any:
        memory = self.memory

        def mainloop(accumulator: Any) -> None:
            def multiply(stage: Any) -> None:
                plgpu.wgmma(accumulator, memory.rows.at[stage, warpgroup], memory.columns.at[stage].transpose((1, 0)))

            multiply_stages(memory.pipeline, step, steps, multiply)

        [product] = accumulate((ROWS, self.plan.kv_block), 1, mainloop)
        return product

    def _visible(self, tile: _Tile, warpgroup: Any, index: int) -> Any:
        """Return which weights of a piece are not zero; `None`: all."""
        plan, rules = self.plan, self.plan.rules
        keys = numbered(1)
        ahead = keys - numbered(0)  # plus this number:
        offset = tile.key + index * PIECE - (tile.query + warpgroup * ROWS + (plan.keys - plan.queries))
        found = []
        if rules.right is not None:
            found.append(ahead <= rules.right - offset)
        if rules.left is not None:
            found.append(ahead >= -rules.left - offset)
        end = plan.keys if self.inputs.lengths is None else self.inputs.lengths[tile.example]
        if self._ends:
            found.append(keys < end - tile.key - index * PIECE)
        visible = None
        for mask in found:
            visible = mask if visible is None else visible & mask
        return visible

    def _store_nothing(self, tile: _Tile, warpgroup: Any) -> None:
        """Store the results of a tile that no query sees."""
        if self.mode == STATISTICS:
            zeros = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            self._store_parts(tile, warpgroup, zeros - jnp.inf, zeros)
            return
        empty = plgpu.layout_cast(jnp.zeros((ROWS, PIECE), self.plan.dtype), plgpu.Layout.WGMMA)
        for result in range(len(self.results)):
            for i in range(self.plan.kv_block // PIECE):
                self._store(result, empty, tile, warpgroup, i)

    def _store_parts(self, tile: _Tile, warpgroup: Any, *values: Any) -> None:
        rows = pl.ds(tile.query + warpgroup * ROWS, ROWS)
        for ref, value in zip(self.results, values, strict=True):
            ref.at[lax.div(tile.key, self.plan.kv_block), tile.example, tile.head, rows][...] = value

    def _store(self, result: int, values: Any, tile: _Tile, warpgroup: Any, index: int) -> None:
        def copy(buffer: Any) -> None:
            at = pl.ds(tile.query + warpgroup * ROWS, ROWS), pl.ds(tile.key + index * PIECE, PIECE)
            plgpu.copy_smem_to_gmem(buffer, self.results[result].at[tile.example, tile.head, *at])

        place = warpgroup, result * (self.plan.kv_block // PIECE) + index
        store_piece(values, self.memory.out, place, copy)
