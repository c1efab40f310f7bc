# SPDX-License-Identifier: Apache-2.0
"""What the backward kernels share: loops over tiles, masks, and probabilities from scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._numbers import LOG2_E
from ejkernel.kernels.flash_attention.common import Rules
from ejkernel.kernels.flash_attention.dropout import keeps

from .backward_problem import Inputs, Problem
from .machine import plgpu, shown

WGMMA = plgpu.Layout.WGMMA
# A thread's registers, by how many warpgroups compute: of 65,536 for all, in steps of 8. One alone has 255 at once.
_LOADER_REGISTERS = {2: 24, 3: 32}
_COMPUTE_REGISTERS = {2: 240, 3: 160}
Carry = Any


class Range(NamedTuple):
    """The tiles of one block: `[first, begin)` and `[end, last)` are masked, `[begin, end)` are not."""

    first: jax.Array
    begin: jax.Array
    end: jax.Array
    last: jax.Array

    @classmethod
    def load(cls, ranges: Any, example: jax.Array, block: jax.Array) -> Range:
        """Read a block's range from memory; there is one for all examples, or one for each."""
        row = example if ranges.shape[0] > 1 else 0
        # The maximum gives them the type of numbers that are computed here, whatever mesh the ranges vary over.
        return cls(*(jnp.maximum(ranges[row, block, i], 0) for i in range(4)))


class Tile(NamedTuple):
    """Where a tile of scores stands.

    Attributes:
        shape: Its sizes.
        query_axis: Which of its axes is that of the queries.
        example: Index in the batch.
        head: Of the queries.
        query, key: Its first query and key.
        limit: One past the last key of the example that counts; `None` if no block has keys behind that.
    """

    shape: tuple[int, int]
    query_axis: int
    example: jax.Array
    head: jax.Array
    query: jax.Array
    key: jax.Array
    limit: Any

    def spread(self, row: jax.Array, axis: int) -> jax.Array:
        """Repeat a vector that lies along `axis` over the whole tile."""
        return lax.broadcast_in_dim(row, self.shape, [axis])

    def vector(self, ref: Any, axis: int, *, optimized: bool = True) -> jax.Array:
        """Load a vector that lies along `axis`."""
        # What Pallas calls optimized is a load from shared memory; asked for it elsewhere, it refuses.
        loaded: jax.Array = plgpu.load(ref, layout=WGMMA.reduce(1 - axis), optimized=optimized)
        return loaded


def tiled(shape: tuple[int, ...], dtype: Any, columns: int = 0) -> Any:
    """Return the type of a buffer in shared memory that matrix products and copies take.

    Args:
        shape: Its sizes; the last two are cut into tiles.
        dtype: Of its elements.
        columns: The width of the slices of the last axis that are used, if not all of it at once.
    """
    swizzle = swizzle_of(shape[-1], jnp.dtype(dtype).itemsize, columns)
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def swizzle_of(width: int, itemsize: int, columns: int = 0) -> int:
    """Return the widest swizzle, in bytes, whose tiles divide rows of `width` elements and slices of `columns`."""
    return next(s for s in (128, 64, 32) if not width * itemsize % s and not columns * itemsize % s)


def walk(where: Range, step: Callable[..., Carry], carry: Carry, masks: tuple[bool, bool]) -> Carry:
    """Run `step(index, carry, masked=...)` over a range; `masks`: whether tiles before and after need a mask at all."""

    def over(start: jax.Array, stop: jax.Array, carry: Carry, masked: bool) -> Carry:
        return lax.fori_loop(start, stop, lambda j, c: step(j, c, masked=masked), carry)

    # Loops of their own rather than a mask under a condition: that took a causal forward 3 % longer on one H200.
    if masks[0]:
        carry = over(where.first, where.begin, carry, True)
    carry = over(where.begin, where.end, carry, False)
    return over(where.end, where.last, carry, True) if masks[1] else carry


class Beside(NamedTuple):
    """What the probabilities of a tile are computed from, beside the products of query and key.

    Attributes:
        shift: The rows' shift, spread over the tile; `None` if the products start from it.
        bias: The tile's, in float32; `None` if there is none.
        mask: Vectors of words along the first axis, one for each 32 along the second; empty if there is no mask.
    """

    shift: jax.Array | None
    bias: jax.Array | None
    mask: tuple[jax.Array, ...]


def weigh(
    problem: Problem, arrays: Inputs, tile: Tile, products: jax.Array, beside: Beside, is_masked: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return a tile's probabilities, zero where a query sees no key, and the soft cap's derivative if there is one.

    Args:
        problem: The call.
        arrays: References to the inputs.
        tile: Where the tile stands.
        products: Of query and key; with `shift_in_scores`, shifted by the row's.
        beside: All else, but for positions and segments.
        is_masked: Whether some pairs may be hidden by position, by segment or by length.
    """
    rules, slope = problem.rules, None
    if beside.shift is None:
        weights = jnp.exp2(products * (rules.scale * LOG2_E))
    else:
        scores, slope = _scores(rules, products, beside.bias)
        if beside.bias is None:
            weights = jnp.exp2(scores * LOG2_E + beside.shift)
        else:
            # A bias of -1e9 leaves scores that are rounded to multiples of 64, here and in the forward in two ways.
            weights = jnp.exp2(jnp.minimum(scores + beside.shift, 0.0) * LOG2_E)
        if beside.bias is not None and rules.cap_after_bias:  # what a bias of minus infinity hides, the cap shows
            weights = jnp.where(beside.bias == -jnp.inf, 0.0, weights)
    if beside.mask:
        # After the exponential, as no maximum is looked for: the row's log-sum-exp is known.
        weights = jnp.where(shown(beside.mask, tile.shape), weights, 0.0)
    if is_masked:
        for condition in _conditions(problem, arrays, tile):
            weights = jnp.where(condition, weights, 0.0)
    return weights, slope


def _scores(rules: Rules, products: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Return the scores, and the derivative of the soft cap if there is one."""
    scores, slope = products * rules.scale, None
    if bias is not None and rules.cap_after_bias:
        scores = scores + bias
    if rules.soft_cap is not None:
        squashed = jnp.tanh(scores * (1 / rules.soft_cap))
        scores, slope = squashed * rules.soft_cap, 1 - squashed * squashed
    if bias is not None and not rules.cap_after_bias:
        scores = scores + bias
    return scores, slope


def mask_words(arrays: Inputs, tile: Tile) -> tuple[jax.Array, ...]:
    """Load the words of a mask that a tile needs; before its products, so that nobody waits for them."""
    if arrays.mask is None:
        return ()
    starts = (tile.query, tile.key) if tile.query_axis == 0 else (tile.key, tile.query)
    mask, rows = cast(Any, arrays.mask), pl.ds(starts[0], tile.shape[0])
    words = lax.div(starts[1], 32)
    return tuple(
        tile.vector(mask.at[(*pick(mask, tile), words + i, rows)], 0, optimized=False)
        for i in range(tile.shape[1] // 32)
    )


def kept(problem: Problem, arrays: Inputs, tile: Tile) -> jax.Array | None:
    """Return which weights of a tile a dropout keeps; `None`: there is none."""
    if arrays.dropout is None:
        return None
    axis, dropout = tile.query_axis, cast(Any, arrays.dropout)
    rows = dropout.at[tile.example, tile.head, pl.ds(tile.query, tile.shape[axis])]
    words = tile.spread(tile.vector(rows, axis, optimized=False), axis)
    key = plgpu.broadcasted_iota(jnp.int32, tile.shape, 1 - axis, layout=WGMMA) + tile.key
    return keeps(words, key.astype(words.dtype), problem.rules)


def pick(ref: Any, tile: Tile) -> tuple[Any, Any]:
    """Return the first two indices into an array that all examples, or all heads, may have in common."""
    return 0 if ref.shape[0] == 1 else tile.example, 0 if ref.shape[1] == 1 else tile.head


def _conditions(problem: Problem, arrays: Inputs, tile: Tile) -> list[jax.Array]:
    rules, axis = problem.rules, tile.query_axis
    key = plgpu.broadcasted_iota(jnp.int32, tile.shape, 1 - axis, layout=WGMMA) + tile.key
    query = plgpu.broadcasted_iota(jnp.int32, tile.shape, axis, layout=WGMMA) + (tile.query + problem.ahead)
    conditions = []
    if rules.right is not None:
        conditions.append(key <= query + rules.right)
    if rules.left is not None:
        conditions.append(key >= query - rules.left)
    if tile.limit is not None:
        conditions.append(key < tile.limit)
    if problem.segments:
        conditions.append(_same_segment(tile, arrays.query_segments, arrays.key_segments))
    return conditions


def _same_segment(tile: Tile, query_segments: Any, key_segments: Any) -> jax.Array:
    axis = tile.query_axis
    queries = query_segments.at[tile.example, pl.ds(tile.query, tile.shape[axis])]
    keys = key_segments.at[tile.example, pl.ds(tile.key, tile.shape[1 - axis])]
    rows = tile.vector(queries, axis, optimized=False)
    columns = tile.vector(keys, 1 - axis, optimized=False)
    return tile.spread(rows, axis) == tile.spread(columns, 1 - axis)


def limit_of(problem: Problem, arrays: Inputs, example: jax.Array, keys_per_block: int) -> Any:
    """Return one past the last key of an example that counts; `None` if no block has keys behind that.

    Of a block rather than of a tile: the last tile may lie wholly behind the keys, where a score of zero may be so much
    more than the row's log-sum-exp that its weight is infinite.
    """
    if arrays.key_lengths is None:
        return problem.keys if problem.keys % keys_per_block else None
    return jnp.clip(arrays.key_lengths[example], 0, problem.keys)


def zeros(shape: tuple[int, int]) -> jax.Array:
    """Return a float32 tile of zeros, in the layout of accumulators."""
    tile: jax.Array = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)
    return tile


def take_registers(warpgroups: int, *, computes: bool) -> None:
    """Move registers from the warpgroup that loads to those that compute; each calls this first."""
    if warpgroups > 1:
        registers = (_COMPUTE_REGISTERS if computes else _LOADER_REGISTERS)[warpgroups]
        plgpu.set_max_registers(registers, action="increase" if computes else "decrease")


def drain(barrier: Any, stages: int, steps: jax.Array) -> None:
    """Wait until the last uses of a ring's slots are over: a kernel must not end before."""
    for slot in range(stages):

        @pl.when(slot < steps)
        def _(slot: int = slot) -> None:
            plgpu.barrier_wait(barrier.at[slot])
