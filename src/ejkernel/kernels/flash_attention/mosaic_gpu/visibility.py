# SPDX-License-Identifier: Apache-2.0
"""The range of blocks that each tile visits, and the part of that range that needs no mask.

A forward tile visits one range of key blocks. Inside it lies a range of unmasked blocks, in which every row of the tile
sees every key; all other blocks are masked. With a window alone the kernel computes the ranges; segments and masks are
read before the kernel runs, and make a table. Blocks outside the range hide every key. Blocks inside it may hide every
key too: masking makes them correct, only slower.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._hopper.device import quotient
from ejkernel.kernels.flash_attention.common import Operands, Rules
from ejkernel.kernels.flash_attention.dropout import query_words

_NO_QUERY, _NO_KEY = -(2**31), 2**31 - 1  # two segment ids that no user has, and that do not match each other


def lengths_as_segments(operands: Operands) -> Operands:
    """Return operands with lengths expressed as segments: queries and keys past the lengths match no other id.

    Key lengths without query lengths or segments stay: hiding the end of a block is cheaper than comparing ids.
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
    """Return a mask with 32 neighbours along an axis as the bits of an int32, that axis before the other.

    A thread then tests bits at constant positions, and one word shows whether any, or all, of 32 pairs are visible.

    Args:
        mask: `[batch or 1, heads or 1, queries or 1, keys or 1]`; `None` stays.
        sizes: Padded numbers of queries and keys, multiples of 32; the padding is hidden.
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
    """Return the random word of each query for the dropout, `[batch, heads, queries]`; `None` without a dropout.

    A weight then costs about ten integer operations in a kernel, and the kernel needs no random key, which `vmap` may
    have batched.
    """
    if operands.dropout_key is None:
        return None
    batch, queries, heads = operands.query.shape[:3]
    rows = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads)
    return query_words(operands.dropout_key, rows, jnp.arange(queries, dtype=jnp.int32))


class BlockRange(NamedTuple):
    """The blocks that a tile visits, by number; integers, or int32 arrays of one shape.

    In the forward and for blocks of queries they are blocks of keys; for blocks of keys, blocks of queries.

    Attributes:
        first: The first block.
        unmasked_from: The first unmasked block.
        unmasked_until: One past the last unmasked block; at most `unmasked_from` without any.
        end: One past the last block. In the forward it exceeds `first`: a tile that sees no key visits one block.
    """

    first: Any
    unmasked_from: Any
    unmasked_until: Any
    end: Any


def window_blocks(rules: Rules, keys: int, kv_block: int, low: Any, high: Any) -> BlockRange:
    """Return the blocks that rows at the positions `low` to `high` visit under the window alone.

    Args:
        rules: The window; query `i` has position `i + keys - queries`.
        keys: The number of keys.
        kv_block: Keys in a block.
        low, high: Position of the tile's first and last row, int32.
    """
    first: Any = 0
    unmasked_from: Any = 0
    unmasked_until: Any = keys // kv_block
    end: Any = _blocks(keys, kv_block)
    if rules.left is not None:
        first = jnp.minimum(quotient(jnp.maximum(low - rules.left, 0), kv_block), end - 1)
        unmasked_from = _blocks(jnp.maximum(high - rules.left, 0), kv_block)
    if rules.right is not None:
        unmasked_until = quotient(jnp.clip(low + (rules.right + 1), 0, keys), kv_block)
        end = _blocks(jnp.clip(high + (rules.right + 1), 0, keys), kv_block)
    if rules.left is not None or rules.right is not None:
        end = jnp.maximum(end, first + 1)
    return BlockRange(first, unmasked_from, unmasked_until, end)


def block_table(
    operands: Operands, rules: Rules, tile_rows: int, kv_block: int, words: jax.Array | None = None
) -> jax.Array:
    """Return the `BlockRange` of every tile, `[batch or 1, heads or 1, tiles, 4]` in int32.

    Args:
        operands: With segment ids, lengths of keys or a mask.
        rules: The window.
        tile_rows: Rows of queries in a tile.
        kv_block: Keys in a block.
        words: The mask, `packed` along the keys to whole tiles and blocks; `None` if it is not packed.
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
    """Return which blocks a tile visits under the window, and which need no mask: `[1, 1, tiles, blocks]` each."""
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
    """Return which blocks hold keys of a tile's segments, and which only of its one segment: `[batch, tiles, blocks]`.

    Args:
        queries: Ids, `[batch, tiles, rows]`, in any order.
        keys: Ids, `[batch, blocks, keys]`.
    """
    least, most = queries.min(axis=2)[:, :, None, None], queries.max(axis=2)[:, :, None, None]
    ends = queries[:, :, :1], queries[:, :, -1:]
    # Exact for tiles with at most two segments. Other tiles may see any key whose id lies within their range of ids.
    many = ~((queries == ends[0]) | (queries == ends[1])).all(axis=2)[:, :, None, None]
    ids = keys[:, None]
    own = (ids == ends[0][..., None]) | (ids == ends[1][..., None]) | (many & (least <= ids) & (ids <= most))
    whole = (keys.min(axis=2)[:, None] == least[..., 0]) & (keys.max(axis=2)[:, None] == most[..., 0])
    return own.any(axis=3), whole & (least == most)[..., 0]


def _mask_pairs(mask: jax.Array, tile_rows: int, kv_block: int) -> tuple[jax.Array, jax.Array]:
    """Return where a mask shows a tile some, and all, keys of a block: `[batch or 1, heads or 1, tiles, blocks]`.

    A mask with one row, or one key, applies to all rows or keys; the axis of tiles or blocks is then 1.
    """
    rows, keys = (1 if size == 1 else block for size, block in zip(mask.shape[2:], (tile_rows, kv_block), strict=True))
    padding = [(0, 0), (0, 0), (0, -mask.shape[2] % rows), (0, -mask.shape[3] % keys)]
    shape = (*mask.shape[:2], -(-mask.shape[2] // rows), rows, -(-mask.shape[3] // keys), keys)
    some = jnp.pad(mask, padding).reshape(shape).any(axis=(3, 5))
    # Padded with True: `_window_pairs` masks the block that extends past the last key.
    every = jnp.pad(mask, padding, constant_values=True).reshape(shape).all(axis=(3, 5))
    return some, every


def _word_pairs(words: jax.Array, tile_rows: int, kv_block: int) -> tuple[jax.Array, jax.Array]:
    """Return the same for a `packed` mask; padding counts as hidden."""
    blocks, tiles = words.shape[2] * 32 // kv_block, words.shape[3] // tile_rows
    split = words.reshape(*words.shape[:2], blocks, kv_block // 32, tiles, tile_rows)
    pairs = ((split != 0).any(axis=(3, 5)), (split == -1).all(axis=(3, 5)))
    some, every = (x.swapaxes(2, 3) for x in pairs)
    return some, every


def _ranges(met: jax.Array, free: jax.Array) -> BlockRange:
    """Return the range that holds every block in `met`, and in it the first contiguous run of `free` blocks."""
    count = met.shape[-1]
    number = lax.broadcasted_iota(jnp.int32, met.shape, met.ndim - 1)
    free = jnp.broadcast_to(free & met, met.shape)
    first = jnp.where(met, number, count).min(axis=-1)
    end = jnp.where(met, number + 1, 0).max(axis=-1)
    unmasked_from = jnp.where(free, number, count).min(axis=-1)
    unmasked_until = jnp.where(free | (number < unmasked_from[..., None]), count, number).min(axis=-1)
    first = jnp.where(end == 0, 0, first)
    return BlockRange(first, unmasked_from, unmasked_until, jnp.maximum(end, first + 1))


def _tiled(ids: jax.Array, block: int) -> jax.Array:
    """Split the second axis into blocks, padded with the last id."""
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
    return ids.reshape(ids.shape[0], -1, block)


def _blocks(length: Any, block: int) -> Any:
    return -(-length // block) if isinstance(length, int) else quotient(length + (block - 1), block)


# Backward: ranges over the tiles of a block of keys, or of a block of queries.

Array = jax.Array | np.ndarray


class Blocks(NamedTuple):
    """Queries and keys of a tile."""

    queries: int
    keys: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """Everything that decides which queries see which keys in one call.

    Attributes:
        queries, keys: Lengths.
        rules: The last query is aligned with the last key.
        query_segments, key_segments: `[batch, length]`, in any order; `None` without segments.
        query_lengths, key_lengths: `[batch]`; later queries see nothing, later keys are hidden.
        mask: Nonzero if one of 32 neighbouring queries may see a key: `[batch or 1, heads or 1, queries / 32, keys]`,
            padded to whole blocks.
    """

    queries: int
    keys: int
    rules: Rules
    query_segments: Array | None = None
    key_segments: Array | None = None
    query_lengths: Array | None = None
    key_lengths: Array | None = None
    mask: Array | None = None


def ranges_of_queries(visibility: Visibility, blocks: Blocks) -> Array:
    """Return the `BlockRange` of query blocks for each block of keys, int32 `[batch or 1, key blocks, 4]`.

    Blocks outside `[first, end)` have no visible pair; in `[unmasked_from, unmasked_until)` every pair is visible,
    apart from boolean masks. Queries past the last one, or past a length, count as visible: their log-sum-exp makes
    their weights zero.
    """
    some, every = _tiles(visibility, blocks)
    return _query_ranges(some.swapaxes(-1, -2), every.swapaxes(-1, -2), masked_after=False)


def ranges_of_keys(visibility: Visibility, blocks: Blocks) -> Array:
    """Return the same of key blocks for each block of queries; keys past the last one are not visible."""
    return _query_ranges(*_tiles(visibility, blocks), masked_after=True)


def _tiles(visibility: Visibility, blocks: Blocks) -> tuple[Array, Array]:
    """Return whether some, and whether every, pair of a tile is visible: `[batch or 1, query blocks, key blocks]`."""
    some, every = _tiles_by_position(visibility, blocks)
    if visibility.query_segments is not None and visibility.key_segments is not None:
        # Ids may come in any order: their extents decide only which tiles to skip; the kernel compares ids.
        lowest, highest = _extent(visibility.query_segments, blocks.queries)
        key_lowest, key_highest = _extent(visibility.key_segments, blocks.keys)
        rows, columns = (lowest[:, :, None], highest[:, :, None]), (key_lowest[:, None], key_highest[:, None])
        some = some & (rows[0] <= columns[1]) & (columns[0] <= rows[1])
        every = every & (rows[0] == rows[1]) & (columns[0] == columns[1]) & (rows[0] == columns[0])
    if visibility.query_lengths is not None:
        first = np.arange(some.shape[1], dtype=np.int32)[None] * blocks.queries
        # A tile that is only partly past the length needs no mask: the log-sum-exp makes those weights zero.
        some = some & (first < visibility.query_lengths[:, None])[:, :, None]
    if visibility.key_lengths is not None:
        first = np.arange(some.shape[2], dtype=np.int32)[None] * blocks.keys
        some = some & (first < visibility.key_lengths[:, None])[:, None]
        every = every & (first + blocks.keys <= visibility.key_lengths[:, None])[:, None]
    if visibility.mask is not None:
        seen = _some_in_blocks(visibility.mask, blocks)
        some = some & seen[:, : some.shape[1], : some.shape[2]]
    return some, every


def _tiles_by_position(visibility: Visibility, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Return the same from window and array lengths alone, at trace time."""
    queries, keys, rules = visibility.queries, visibility.keys, visibility.rules
    first = np.arange(0, queries, blocks.queries)[None, :, None]
    last = np.minimum(first + blocks.queries, queries) - 1
    low = np.arange(0, keys, blocks.keys)[None, None, :]
    high = np.minimum(low + blocks.keys, keys) - 1
    some = np.ones((1, first.size, low.size), bool)
    every = np.broadcast_to(low + blocks.keys <= keys, some.shape)
    ahead = keys - queries
    if rules.right is not None:
        some = some & (low <= last + ahead + rules.right)
        every = every & (high <= first + ahead + rules.right)
    if rules.left is not None:
        some = some & (high >= first + ahead - rules.left)
        every = every & (low >= last + ahead - rules.left)
    return some, every


def _module(x: Array) -> Any:
    # Ranges that depend on shapes and rules alone are NumPy arrays: constants of the program.
    return np if isinstance(x, np.ndarray) else jnp


def _extent(segments: Array, size: int) -> tuple[Array, Array]:
    """Return the smallest and the largest id in each block, `[batch, blocks]` each."""
    # Padded with the last id, which leaves the extent of its block unchanged.
    blocks = _module(segments).pad(segments, ((0, 0), (0, -segments.shape[1] % size)), mode="edge")
    blocks = blocks.reshape(blocks.shape[0], -1, size)
    return blocks.min(axis=-1), blocks.max(axis=-1)


def _some_in_blocks(words: Array, blocks: Blocks) -> Array:
    """Return whether a mask shows some pair of a tile to some head: `[batch or 1, query blocks, key blocks]`."""
    rows, keys = blocks.queries // 32, blocks.keys
    split = words.reshape(*words.shape[:2], words.shape[2] // rows, rows, words.shape[3] // keys, keys)
    some: Array = (split != 0).any(axis=(1, 3, 5))
    return some


def _query_ranges(some: Array, every: Array, *, masked_after: bool) -> Array:
    """Turn `[batch, blocks, others]` into ranges over `others`; the first contiguous run is the unmasked range.

    Without such a run all tiles count as before it, or with `masked_after` as after it: a causal mask needs that loop
    in any case.
    """
    module, count = _module(some), some.shape[-1]
    index = np.arange(count).reshape(1, 1, -1)
    visible = some.any(axis=-1)
    first = module.where(visible, some.argmax(axis=-1), 0)
    last = module.where(visible, count - some[..., ::-1].argmax(axis=-1), 0)
    every = every & some
    begin = module.where(every.any(axis=-1), every.argmax(axis=-1), first if masked_after else last)
    broken = ~every & (index >= begin[..., None])
    end = module.where(broken.any(axis=-1), broken.argmax(axis=-1), count)
    end = module.clip(end, begin, module.maximum(last, begin))
    ranges: Array = module.stack([first, begin, end, last], axis=-1).astype(np.int32)
    return ranges
