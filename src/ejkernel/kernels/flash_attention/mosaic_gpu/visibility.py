# SPDX-License-Identifier: Apache-2.0
"""Which blocks of keys a tile of queries meets, and which of these every row sees whole.

A tile walks over one range of blocks. Somewhere in it lies a range of free blocks, in which every row of the tile sees
every key; all others need a mask. What the window alone decides is arithmetic, done as the tile begins; segments and
masks are looked at before the kernel runs, and make a table. Blocks that a table leaves out hide every key; blocks that
it keeps may do so too, and are right all the same, for they are masked.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.flash_attention.common import Operands, Rules
from ejkernel.kernels.flash_attention.dropout import query_words

_NO_QUERY, _NO_KEY = -(2**31), 2**31 - 1  # ids of segments that are no user's, and of each other's sight


def lengths_as_segments(operands: Operands) -> Operands:
    """Return operands whose queries and keys behind the lengths are of segments of their own: nobody sees those.

    Lengths of keys alone stay: to hide a block's end is cheaper than to compare ids.
    """
    queries, keys = operands.query_segments, operands.key_segments
    if operands.query_lengths is None and (operands.key_lengths is None or queries is None):
        return operands
    if queries is None or keys is None:
        queries, keys = (jnp.zeros(x.shape[:2], jnp.int32) for x in operands[:2])
    return operands._replace(
        query_segments=_hidden_from(queries, operands.query_lengths, _NO_QUERY),
        key_segments=_hidden_from(keys, operands.key_lengths, _NO_KEY),
        query_lengths=None,
        key_lengths=None,
    )


def _hidden_from(segments: jax.Array, lengths: jax.Array | None, segment: int) -> jax.Array:
    segments = segments.astype(jnp.int32)
    if lengths is None:
        return segments
    hidden = jnp.arange(segments.shape[1], dtype=jnp.int32)[None] >= lengths[:, None]
    return jnp.where(hidden, jnp.int32(segment), segments)


def packed(mask: Any, sizes: tuple[int, int], axis: int) -> jax.Array | None:
    """Return a mask of pairs with 32 neighbours along an axis as the bits of an int32, that axis before the other.

    A thread then tests bits whose places are constants, and a word tells of 32 pairs whether any is visible, and all.

    Args:
        mask: `[batch or 1, heads or 1, queries or 1, keys or 1]`; `None` stays.
        sizes: How many queries and keys there are to be, multiples of 32; those that the mask lacks are hidden.
        axis: 2 for queries, 3 for keys.
    """
    if mask is None:
        return None
    missing = [(0, size - own) if own > 1 else (0, 0) for size, own in zip(sizes, mask.shape[2:], strict=True)]
    mask = jnp.pad(mask, [(0, 0), (0, 0), *missing])
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], *sizes))
    split = mask.reshape(*mask.shape[:axis], sizes[axis - 2] // 32, 32, *mask.shape[axis + 1 :])
    # XLA transposes the mask before a sum over queries, and before each of 32 slices of keys.
    if axis == 2:
        bits = (lax.index_in_dim(split, i, axis + 1, keepdims=False).astype(jnp.int32) << i for i in range(32))
        return functools.reduce(jnp.bitwise_or, bits)
    places = lax.broadcasted_iota(jnp.int32, split.shape, axis + 1)
    words = lax.shift_left(split.astype(jnp.int32), places).sum(axis=axis + 1, dtype=jnp.int32)
    return words.swapaxes(2, 3)


def dropout_words(operands: Operands) -> jax.Array | None:
    """Return the words of the queries that a dropout's mask is drawn with, `[batch, heads, queries]`.

    A weight then costs about ten integer operations in a kernel, and no key of random numbers, which a `vmap` may have
    batched, gets into it.
    """
    if operands.dropout_key is None:
        return None
    batch, queries, heads = operands.query.shape[:3]
    rows = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads)
    return query_words(operands.dropout_key, rows, jnp.arange(queries, dtype=jnp.int32))


class BlockRange(NamedTuple):
    """Blocks of keys, by number; integers, or int32 arrays of one shape.

    Attributes:
        first: The first that a tile meets.
        free_from: The first free one.
        free_until: One past the last free one; at most `free_from` if there is none.
        end: One past the last that a tile meets, greater than `first`: a tile whose rows see nothing meets one block.
    """

    first: Any
    free_from: Any
    free_until: Any
    end: Any


def window_blocks(rules: Rules, keys: int, kv_block: int, low: Any, high: Any) -> BlockRange:
    """Return the blocks that the rules alone let rows at the positions `low` to `high` meet.

    Args:
        rules: The window; query `i` stands at position `i + keys - queries`.
        keys: How many keys there are.
        kv_block: Keys in a block.
        low, high: Position of the tile's first and last row, int32.
    """
    first: Any = 0
    free_from: Any = 0
    free_until: Any = keys // kv_block
    end: Any = _blocks(keys, kv_block)
    if rules.left is not None:
        first = jnp.minimum(quotient(jnp.maximum(low - rules.left, 0), kv_block), end - 1)
        free_from = _blocks(jnp.maximum(high - rules.left, 0), kv_block)
    if rules.right is not None:
        free_until = quotient(jnp.clip(low + (rules.right + 1), 0, keys), kv_block)
        end = _blocks(jnp.clip(high + (rules.right + 1), 0, keys), kv_block)
    if rules.left is not None or rules.right is not None:
        end = jnp.maximum(end, first + 1)
    return BlockRange(first, free_from, free_until, end)


def block_table(
    operands: Operands, rules: Rules, tile_rows: int, kv_block: int, words: jax.Array | None = None
) -> jax.Array:
    """Return the `BlockRange` of every tile, `[batch or 1, heads or 1, tiles, 4]` in int32.

    Args:
        operands: With segment ids, lengths of keys or a mask.
        rules: The window.
        tile_rows: Rows of queries in a tile.
        kv_block: Keys in a block.
        words: The mask as `packed` along the keys, to whole tiles and blocks, if it has been.
    """
    met, free = _window_pairs(operands, rules, tile_rows, kv_block)
    if operands.query_segments is not None and operands.key_segments is not None:
        queries, keys = _tiled(operands.query_segments, tile_rows), _tiled(operands.key_segments, kv_block)
        met_segments, free_segments = _segment_pairs(queries, keys)
        met, free = met & met_segments[:, None], free & free_segments[:, None]
    if operands.key_lengths is not None:
        end = jnp.arange(1, met.shape[-1] + 1, dtype=jnp.int32)[None, None, None] * kv_block
        lengths = operands.key_lengths[:, None, None, None]
        met, free = met & (end - kv_block < lengths), free & (end <= lengths)
    mask = operands.attention_mask
    if mask is not None:
        pairs = _mask_pairs(mask, tile_rows, kv_block) if words is None else _word_pairs(words, tile_rows, kv_block)
        met, free = met & pairs[0], free & pairs[1]
    return jnp.stack(_ranges(met, free), axis=-1)


def _window_pairs(operands: Operands, rules: Rules, tile_rows: int, kv_block: int) -> tuple[jax.Array, jax.Array]:
    """Return which blocks the window lets a tile meet, and which it leaves free, each `[1, 1, tiles, blocks]`."""
    queries, keys = operands.query.shape[1], operands.key.shape[1]
    low = jnp.arange(0, queries, tile_rows, dtype=jnp.int32)[:, None] + (keys - queries)
    high = jnp.minimum(low + tile_rows, keys) - 1
    start = jnp.arange(0, keys, kv_block, dtype=jnp.int32)[None]
    end = start + kv_block
    met = jnp.ones((low.shape[0], start.shape[1]), bool)
    free = met & (end <= keys)
    if rules.left is not None:
        met, free = met & (end > low - rules.left), free & (start >= high - rules.left)
    if rules.right is not None:
        met, free = met & (start <= high + rules.right), free & (end <= low + rules.right + 1)
    return met[None, None], free[None, None]


def _segment_pairs(queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return which blocks have a key of a tile's segments, and which are of its only one: `[batch, tiles, blocks]`.

    Args:
        queries: Ids, `[batch, tiles, rows]`, in any order.
        keys: Ids, `[batch, blocks, keys]`.
    """
    least, most = queries.min(axis=2)[:, :, None, None], queries.max(axis=2)[:, :, None, None]
    ends = queries[:, :, :1], queries[:, :, -1:]
    # Of a tile with at most two segments it is known exactly which keys it sees; of any other, that the keys' ids have
    # to lie between its own.
    many = ~((queries == ends[0]) | (queries == ends[1])).all(axis=2)[:, :, None, None]
    ids = keys[:, None]
    own = (ids == ends[0][..., None]) | (ids == ends[1][..., None]) | (many & (least <= ids) & (ids <= most))
    whole = (keys.min(axis=2)[:, None] == least[..., 0]) & (keys.max(axis=2)[:, None] == most[..., 0])
    return own.any(axis=3), whole & (least == most)[..., 0]


def _mask_pairs(mask: jax.Array, tile_rows: int, kv_block: int) -> tuple[jax.Array, jax.Array]:
    """Return in which blocks a mask shows a tile any key, and in which all: `[batch or 1, heads or 1, tiles, blocks]`.

    A mask with one row, or one key, stands for all rows or keys; the axis of tiles or blocks then is 1.
    """
    rows, keys = (1 if size == 1 else block for size, block in zip(mask.shape[2:], (tile_rows, kv_block), strict=True))
    padding = [(0, 0), (0, 0), (0, -mask.shape[2] % rows), (0, -mask.shape[3] % keys)]
    shape = (*mask.shape[:2], -(-mask.shape[2] // rows), rows, -(-mask.shape[3] // keys), keys)
    some = jnp.pad(mask, padding).reshape(shape).any(axis=(3, 5))
    # Filled up with True: whether a block goes on behind the last key is the window's to say.
    every = jnp.pad(mask, padding, constant_values=True).reshape(shape).all(axis=(3, 5))
    return some, every


def _word_pairs(words: jax.Array, tile_rows: int, kv_block: int) -> tuple[jax.Array, jax.Array]:
    """Return the same of a mask that is `packed`; what was filled up counts as hidden."""
    blocks, tiles = words.shape[2] * 32 // kv_block, words.shape[3] // tile_rows
    split = words.reshape(*words.shape[:2], blocks, kv_block // 32, tiles, tile_rows)
    pairs = ((split != 0).any(axis=(3, 5)), (split == -1).all(axis=(3, 5)))
    some, every = (x.swapaxes(2, 3) for x in pairs)
    return some, every


def _ranges(met: jax.Array, free: jax.Array) -> BlockRange:
    """Return the range that holds every block that is met, and in it the first unbroken run of free ones."""
    count = met.shape[-1]
    number = lax.broadcasted_iota(jnp.int32, met.shape, met.ndim - 1)
    free = jnp.broadcast_to(free & met, met.shape)
    first = jnp.where(met, number, count).min(axis=-1)
    end = jnp.where(met, number + 1, 0).max(axis=-1)
    free_from = jnp.where(free, number, count).min(axis=-1)
    free_until = jnp.where(free | (number < free_from[..., None]), count, number).min(axis=-1)
    first = jnp.where(end == 0, 0, first)
    return BlockRange(first, free_from, free_until, jnp.maximum(end, first + 1))


def _tiled(ids: jax.Array, block: int) -> jax.Array:
    """Cut the second axis into blocks; the last id fills up the last block."""
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
    return ids.reshape(ids.shape[0], -1, block)


def _blocks(length: Any, block: int) -> Any:
    return -(-length // block) if isinstance(length, int) else quotient(length + (block - 1), block)


def quotient(number: Any, divisor: int) -> Any:
    """Return the quotient of an int32 number, which is not negative."""
    return lax.div(number, np.int32(divisor))


def remainder(number: Any, divisor: int) -> Any:
    """Return what `quotient` leaves."""
    return lax.rem(number, np.int32(divisor))
