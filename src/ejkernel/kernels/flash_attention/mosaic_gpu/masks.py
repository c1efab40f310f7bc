# SPDX-License-Identifier: Apache-2.0
"""Masks of score tiles inside the kernels, and the probabilities that the backward recomputes from scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.launch import plgpu
from ejkernel.kernels._numbers import LOG2_E
from ejkernel.kernels.flash_attention.common import Rules, keeps

from .backward_plan import BackwardProblem
from .visibility import BlockRange

WGMMA = plgpu.Layout.WGMMA
Carry = Any


class BackwardInputs(NamedTuple):
    """The arrays that the backward kernels read.

    The lengths of all but the first four are padded to whole blocks.

    Attributes:
        query, key, value, dout: As in `Operands`.
        shift: `[batch, heads, queries]`, added to a row's scores; see `launch.row_shift`.
        delta: `[batch, heads, queries]`, the row's sum of `out * dout`, negated; with a dropout, times the share of
            weights that it keeps.
        ranges: The range of tiles of each block; see `visibility.ranges_of_queries`.
        query_segments, key_segments: `[batch, length]`.
        key_lengths: `[batch]`.
        bias: Added to the scores, `[batch or 1, heads or 1, queries, keys]`.
        mask: One bit per pair, set where the key is visible, 32 in a word: `[batch or 1, heads or 1, queries / 32,
            keys]`, or `keys / 32, queries` for a kernel whose blocks own queries.
        dropout: `[batch, heads, queries]`, the random word of each row.
        factor: `[batch]` in float32, on the gradients of query, key and value; `None` is 1.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    dout: jax.Array
    shift: jax.Array
    delta: jax.Array
    ranges: jax.Array
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    key_lengths: jax.Array | None = None
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    dropout: jax.Array | None = None
    factor: jax.Array | None = None

    def restored(self, gradient: jax.Array, example: jax.Array) -> jax.Array:
        """Return an example's gradient times its factor."""
        return gradient if self.factor is None else gradient * self.factor[example]


class ScoreTile(NamedTuple):
    """The position of a tile of scores in the backward, for masks and bias.

    Attributes:
        shape: Rows and columns of the tile.
        query_axis: The axis of the queries in `shape`, 0 or 1; the keys are on the other axis.
        example: Index in the batch.
        head: Query head.
        query, key: Number of the tile's first query and of its first key.
        limit: See `key_limit`.
    """

    shape: tuple[int, int]
    query_axis: int
    example: jax.Array
    head: jax.Array
    query: jax.Array
    key: jax.Array
    limit: Any

    def spread(self, row: jax.Array, axis: int) -> jax.Array:
        """Broadcast a vector along `axis` over the tile."""
        return lax.broadcast_in_dim(row, self.shape, [axis])

    def vector(self, ref: Any, axis: int, *, optimized: bool = True) -> jax.Array:
        """Load a vector along `axis`; from global memory with `optimized=False`."""
        loaded: jax.Array = plgpu.load(ref, layout=WGMMA.reduce(1 - axis), optimized=optimized)
        return loaded


class ScoreTerms(NamedTuple):
    """Everything that turns the products of query and key into probabilities.

    Attributes:
        shift: The rows' shift, broadcast over the tile; `None` if the products start from it.
        bias: The tile's, in float32; `None` without one.
        mask: One vector of words along the first axis for each 32 of the second; empty without a mask.
    """

    shift: jax.Array | None
    bias: jax.Array | None
    mask: tuple[jax.Array, ...]


def visible_bits(words: Sequence[jax.Array], shape: tuple[int, int]) -> jax.Array:
    """Return where the bits of a mask are set, in a tile with the layout of accumulators.

    Args:
        words: One int32 vector along the rows for each 32 columns.
        shape: Of the tile.
    """
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    word, *others = (lax.broadcast_in_dim(x, shape, [0]) for x in words)
    for i, other in enumerate(others, 1):
        word = jnp.where(column >= 32 * i, other, word)
    # Two bits of a column's number depend on the thread: words are shifted by these once, the rest is constant.
    shifted = lax.shift_right_logical(word, column & 6)
    bit = lax.shift_left(jnp.full(shape, 1, jnp.int32), column & 25)
    found: jax.Array = (shifted & bit) != 0
    return found


def within_window(rules: Rules, query: Any, key: Any) -> list[Any]:
    """Return the conditions under which the window lets queries at these positions see the keys."""
    conditions = []
    if rules.right is not None:
        conditions.append(key <= query + rules.right)
    if rules.left is not None:
        conditions.append(key >= query - rules.left)
    return conditions


def broadcast_index(array: Any, batch: Any, head: Any) -> tuple[Any, Any]:
    """Return the index into the first two axes of an array that all examples, or all heads, may share."""
    return 0 if array.shape[0] == 1 else batch, 0 if array.shape[1] == 1 else head


def block_range(ranges: Any, example: jax.Array, block: jax.Array) -> BlockRange:
    """Read a block's range of tiles from memory; all examples share one range, or each has its own."""
    row = example if ranges.shape[0] > 1 else 0
    # The maximum gives the numbers the type of values computed here, on any mesh axis that the ranges vary over.
    return BlockRange(*(jnp.maximum(ranges[row, block, i], 0) for i in range(4)))


def over_tiles(blocks: BlockRange, step: Callable[..., Carry], carry: Carry, masks: tuple[bool, bool]) -> Carry:
    """Run `step(index, carry, masked=...)` over a range; `masks`: whether tiles before and after need a mask at all."""

    def over(start: jax.Array, stop: jax.Array, carry: Carry, masked: bool) -> Carry:
        return lax.fori_loop(start, stop, lambda j, c: step(j, c, masked=masked), carry)

    # Separate loops: one loop with a conditional mask took a causal forward 3 % longer on one H200.
    if masks[0]:
        carry = over(blocks.first, blocks.unmasked_from, carry, True)
    carry = over(blocks.unmasked_from, blocks.unmasked_until, carry, False)
    return over(blocks.unmasked_until, blocks.end, carry, True) if masks[1] else carry


def probabilities(
    problem: BackwardProblem,
    arrays: BackwardInputs,
    tile: ScoreTile,
    products: jax.Array,
    terms: ScoreTerms,
    is_masked: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return a tile's probabilities, zero for hidden keys, and the soft cap's derivative (`None` without a cap).

    Args:
        problem: The call.
        arrays: References to the inputs.
        tile: The tile's position.
        products: Of query and key; with `shift_in_scores`, plus the row's shift.
        terms: The other terms, except for positions and segments.
        is_masked: Whether position, segment or length may hide some pairs.
    """
    rules, slope = problem.rules, None
    if terms.shift is None:
        weights = jnp.exp2(products * (rules.scale * LOG2_E))
    else:
        scores, slope = _scores(rules, products, terms.bias)
        if terms.bias is None:
            weights = jnp.exp2(scores * LOG2_E + terms.shift)
        else:
            # With a bias of -1e9 scores are multiples of 64, and forward and backward round them differently.
            weights = jnp.exp2(jnp.minimum(scores + terms.shift, problem.raised / LOG2_E) * LOG2_E)
        if terms.bias is not None and rules.cap_after_bias:  # the cap makes a bias of minus infinity finite
            weights = jnp.where(terms.bias == -jnp.inf, 0.0, weights)
    if terms.mask:
        # After the exponential: the log-sum-exp is known, so no maximum is needed.
        weights = jnp.where(visible_bits(terms.mask, tile.shape), weights, 0.0)
    if is_masked:
        for condition in _conditions(problem, arrays, tile):
            weights = jnp.where(condition, weights, 0.0)
    return weights, slope


def _scores(rules: Rules, products: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Return the scores, and the derivative of the soft cap (`None` without a cap)."""
    scores, slope = products * rules.scale, None
    if bias is not None and rules.cap_after_bias:
        scores = scores + bias
    if rules.soft_cap is not None:
        squashed = jnp.tanh(scores * (1 / rules.soft_cap))
        scores, slope = squashed * rules.soft_cap, 1 - squashed * squashed
    if bias is not None and not rules.cap_after_bias:
        scores = scores + bias
    return scores, slope


def mask_words(arrays: BackwardInputs, tile: ScoreTile) -> tuple[jax.Array, ...]:
    """Load the mask words of a tile; called before the products, so that the loads overlap with them."""
    if arrays.mask is None:
        return ()
    starts = (tile.query, tile.key) if tile.query_axis == 0 else (tile.key, tile.query)
    mask, rows = cast(Any, arrays.mask), pl.ds(starts[0], tile.shape[0])
    words = lax.div(starts[1], 32)
    return tuple(
        tile.vector(mask.at[(*broadcast_index(mask, tile.example, tile.head), words + i, rows)], 0, optimized=False)
        for i in range(tile.shape[1] // 32)
    )


def dropout_keeps(problem: BackwardProblem, arrays: BackwardInputs, tile: ScoreTile) -> jax.Array | None:
    """Return which weights of a tile the dropout keeps; `None` without a dropout."""
    if arrays.dropout is None:
        return None
    axis, dropout = tile.query_axis, cast(Any, arrays.dropout)
    rows = dropout.at[tile.example, tile.head, pl.ds(tile.query, tile.shape[axis])]
    words = tile.spread(tile.vector(rows, axis, optimized=False), axis)
    key = plgpu.broadcasted_iota(jnp.int32, tile.shape, 1 - axis, layout=WGMMA) + tile.key
    return keeps(words, key.astype(words.dtype), problem.rules)


def _conditions(problem: BackwardProblem, arrays: BackwardInputs, tile: ScoreTile) -> list[jax.Array]:
    axis = tile.query_axis
    key = plgpu.broadcasted_iota(jnp.int32, tile.shape, 1 - axis, layout=WGMMA) + tile.key
    query = plgpu.broadcasted_iota(jnp.int32, tile.shape, axis, layout=WGMMA) + (tile.query + problem.ahead)
    conditions = within_window(problem.rules, query, key)
    if tile.limit is not None:
        conditions.append(key < tile.limit)
    if problem.segments:
        conditions.append(_same_segment(tile, arrays.query_segments, arrays.key_segments))
    return conditions


def _same_segment(tile: ScoreTile, query_segments: Any, key_segments: Any) -> jax.Array:
    axis = tile.query_axis
    queries = query_segments.at[tile.example, pl.ds(tile.query, tile.shape[axis])]
    keys = key_segments.at[tile.example, pl.ds(tile.key, tile.shape[1 - axis])]
    rows = tile.vector(queries, axis, optimized=False)
    columns = tile.vector(keys, 1 - axis, optimized=False)
    return tile.spread(rows, axis) == tile.spread(columns, 1 - axis)


def key_limit(problem: BackwardProblem, arrays: BackwardInputs, example: jax.Array, keys_per_block: int) -> Any:
    """Return one past the example's last key; `None` if no block extends past that.

    The limit depends on the block, not on the tile: the last tile may lie entirely past the keys, where a score of zero
    may exceed the row's log-sum-exp so far that its weight is infinite.
    """
    if arrays.key_lengths is None:
        return problem.keys if problem.keys % keys_per_block else None
    return jnp.clip(arrays.key_lengths[example], 0, problem.keys)


def zeros(shape: tuple[int, int]) -> jax.Array:
    """Return a float32 tile of zeros, in the layout of accumulators."""
    tile: jax.Array = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)
    return tile
