# SPDX-License-Identifier: Apache-2.0
"""The range of blocks that each tile visits, and the part of that range that needs no mask.

A forward tile visits one range of key blocks. Inside it lies a range of unmasked blocks: every row of the tile sees
every key of these; all other blocks are masked. With a window alone the kernel computes the ranges; segments and masks
are read before the kernel runs, and make a table. Blocks outside the range hide every key. Blocks inside it may hide
every key too: masking makes them correct, only slower.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._hopper.device import quotient
from ejkernel.kernels.flash_attention.common import HIDDEN_KEY, HIDDEN_QUERY, Operands, Rules, hidden_past, query_words

_ALIGNED = 8  # rows of the tiles of shared memory


def lengths_as_segments(operands: Operands) -> Operands:
    """Return operands with lengths expressed as segments: queries and keys past the lengths match no other id.

    Key lengths without query lengths or segments stay: hiding the end of a block is cheaper than comparing ids.
    """
    queries, keys = operands.query_segments, operands.key_segments
    if operands.query_lengths is None and (operands.key_lengths is None or queries is None):
        return operands
    return operands._replace(
        query_segments=hidden_past(queries, operands.query_lengths, operands.query.shape[:2], HIDDEN_QUERY),
        key_segments=hidden_past(keys, operands.key_lengths, operands.key.shape[:2], HIDDEN_KEY),
        query_lengths=None,
        key_lengths=None,
    )


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


def window_origin(rules: Rules, low: Any) -> Any:
    """Return the key from which a tile counts its blocks, if these need not be the same for all tiles.

    It is the first key that the window shows to the row at position `low`, rounded down to whole tiles of shared
    memory: the window then takes as few blocks as it can.
    """
    assert rules.left is not None
    return quotient(jnp.maximum(low - rules.left, 0), _ALIGNED) * _ALIGNED


def window_blocks(rules: Rules, keys: Any, kv_block: int, low: Any, high: Any, origin: Any = 0) -> BlockRange:
    """Return the blocks that rows at the positions `low` to `high` visit under the window and a length alone.

    Args:
        rules: The window; query `i` has position `i + keys - queries`.
        keys: The number of keys, or of those that count.
        kv_block: Keys in a block.
        low, high: Position of the tile's first and last row, int32.
        origin: The first key of block 0.
    """
    first: Any = 0
    unmasked_from: Any = 0
    unmasked_until: Any = _floor(keys - origin, kv_block)
    end: Any = _blocks(keys - origin, kv_block)
    if not isinstance(end, int):  # an example may have no keys
        end = jnp.maximum(end, 1)
    if rules.left is not None:
        first = jnp.minimum(quotient(jnp.maximum(low - rules.left, 0) - origin, kv_block), end - 1)
        unmasked_from = _blocks(jnp.maximum(high - rules.left - origin, 0), kv_block)
    if rules.right is not None:
        unmasked_until = quotient(jnp.maximum(jnp.clip(low + (rules.right + 1), 0, keys) - origin, 0), kv_block)
        end = _blocks(jnp.maximum(jnp.clip(high + (rules.right + 1), 0, keys) - origin, 0), kv_block)
    if rules.left is not None or rules.right is not None:
        end = jnp.maximum(end, first + 1)
    return BlockRange(first, unmasked_from, unmasked_until, end)


Array = jax.Array | np.ndarray


class Blocks(NamedTuple):
    """Queries and keys of a tile."""

    queries: int
    keys: int


def block_table(
    operands: Operands, rules: Rules, tile_rows: int, kv_block: int, words: jax.Array | None = None
) -> jax.Array:
    """Return the `BlockRange` of every tile of the forward, `[batch or 1, heads or 1, tiles, 4]` in int32.

    Args:
        operands: With segment ids, lengths of keys or a mask.
        rules: The window.
        tile_rows: Rows of queries in a tile.
        kv_block: Keys in a block.
        words: The mask, `packed` along the keys to whole tiles and blocks; `None` if it is not packed.
    """
    blocks, mask = Blocks(tile_rows, kv_block), operands.attention_mask
    some, every = _tiles(operands, rules, blocks)
    if mask is not None:
        pairs = _mask_pairs(mask, blocks) if words is None else _word_pairs(words, blocks, 3)
        some, every = some & pairs[0], every & pairs[1]
    first, unmasked_from, unmasked_until, end = _ranges(some, every, masked_after=False)
    return jnp.stack([first, unmasked_from, unmasked_until, jnp.maximum(end, first + 1)], axis=-1).astype(jnp.int32)


def ranges_of_queries(operands: Operands, rules: Rules, blocks: Blocks, words: Array | None = None) -> Array:
    """Return the `BlockRange` of query blocks for each block of keys, int32 `[batch or 1, key blocks, 4]`.

    Blocks outside `[first, end)` have no visible pair; in `[unmasked_from, unmasked_until)` every pair is visible,
    apart from boolean masks. Queries past the last one, or past a length, count as visible: their log-sum-exp makes
    their weights zero. Without arrays that decide, the ranges are a NumPy array, a constant of the program.

    Args:
        operands: Arrays of the call.
        rules: The window.
        blocks: Queries and keys of a tile.
        words: The mask, `packed` along the queries to whole blocks; `None` without a mask.
    """
    if words is None and operands.query_segments is None:
        return _stacked(_ranges_by_position(operands, rules, blocks, masked_after=False))
    some, every = (x.swapaxes(1, 2) for x in _seen_by_heads(operands, rules, blocks, words))
    return _stacked(_ranges(some, every, masked_after=False))


def ranges_of_keys(operands: Operands, rules: Rules, blocks: Blocks, words: Array | None = None) -> Array:
    """Return the same of key blocks for each block of queries; keys past the last one are not visible."""
    if words is None and operands.query_segments is None:
        return _stacked(_ranges_by_position(operands, rules, blocks, masked_after=True))
    return _stacked(_ranges(*_seen_by_heads(operands, rules, blocks, words), masked_after=True))


def _ranges_by_position(operands: Operands, rules: Rules, blocks: Blocks, *, masked_after: bool) -> BlockRange:
    """Return the same under a window and lengths alone, `[batch or 1, blocks]`.

    Of ranges under the window, which are constants, lengths cut off the end: one small kernel of XLA. A search in
    arrays of visible tiles takes more.
    """
    alone = operands._replace(query_lengths=None, key_lengths=None)
    some, every = _seen_by_heads(alone, rules, blocks, None)
    axes = (0, 1, 2) if masked_after else (0, 2, 1)
    window = _ranges(some.transpose(axes), every.transpose(axes), masked_after=masked_after)
    if operands.query_lengths is None and operands.key_lengths is None:
        return window
    sizes = (operands.query.shape[1], operands.key.shape[1])
    lengths = [
        jnp.full((1, 1), size, jnp.int32) if given is None else jnp.clip(given, 0, size).astype(jnp.int32)[:, None]
        for given, size in zip((operands.query_lengths, operands.key_lengths), sizes, strict=True)
    ]
    own, other = lengths if masked_after else lengths[::-1]
    size, step = blocks if masked_after else blocks[::-1]
    start = np.arange(window.first.shape[1], dtype=np.int32)[None] * size
    last = jnp.where(start < own, jnp.minimum(window.end, _blocks(other, step)), 0)
    first = jnp.where(last > window.first, window.first, 0)
    last = jnp.where(last > window.first, last, 0)
    # Of a tile that is only partly past the queries' length, the log-sum-exp makes the weights zero.
    until = _floor(other, step) if masked_after else jnp.where(start + size <= own, last, 0)
    until = jnp.minimum(jnp.minimum(window.unmasked_until, until), last)
    some, without = until > window.unmasked_from, first if masked_after else last
    begin = jnp.where(some, window.unmasked_from, without)
    return BlockRange(first, begin, jnp.where(some, until, without), last)


def _seen_by_heads(operands: Operands, rules: Rules, blocks: Blocks, words: Array | None) -> tuple[Array, Array]:
    """Return whether some head may see some pair of a tile, and whether window and segments hide none of its pairs."""
    some, every = (x[:, 0] for x in _tiles(operands, rules, blocks))
    if words is not None:
        seen = jnp.any(_word_pairs(words, blocks, 2)[0], axis=1)
        some = some & seen[:, : some.shape[1], : some.shape[2]]
    return some, every


def _tiles(operands: Operands, rules: Rules, blocks: Blocks) -> tuple[Array, Array]:
    """Return whether some, and whether every, pair of a tile is visible, apart from masks.

    The axes are `[batch or 1, 1, query blocks, key blocks]`.
    """
    arrays = (operands.query_segments, operands.key_segments, operands.query_lengths, operands.key_lengths)
    queries, keys = operands.query.shape[1], operands.key.shape[1]
    module = _module(*arrays)
    first = module.arange(0, queries, blocks.queries, dtype=np.int32)[None, None, :, None]
    start = module.arange(0, keys, blocks.keys, dtype=np.int32)[None, None, None]
    low, end = first + (keys - queries), start + blocks.keys
    high = module.minimum(low + blocks.queries, keys) - 1
    some = module.ones((1, 1, first.shape[2], start.shape[3]), bool)
    every = some & (end <= keys)
    if rules.left is not None:
        some, every = some & (end > low - rules.left), every & (start >= high - rules.left)
    if rules.right is not None:
        some, every = some & (start <= high + rules.right), every & (end <= low + rules.right + 1)
    if operands.query_segments is not None and operands.key_segments is not None:
        pairs = _segment_pairs(
            _tiled(operands.query_segments, blocks.queries), _tiled(operands.key_segments, blocks.keys)
        )
        some, every = some & pairs[0][:, None], every & pairs[1][:, None]
    if operands.query_lengths is not None:
        # A tile that is only partly past the length needs no mask: the log-sum-exp makes those weights zero.
        some = some & (first < operands.query_lengths[:, None, None, None])
    if operands.key_lengths is not None:
        lengths = operands.key_lengths[:, None, None, None]
        some, every = some & (start < lengths), every & (end <= lengths)
    return some, every


def _segment_pairs(queries: Any, keys: Any) -> tuple[Array, Array]:
    """Return which blocks hold keys of a tile's segments, and which only of its one segment: `[batch, tiles, blocks]`.

    Args:
        queries: Ids, `[batch, tiles, rows]`, in any order.
        keys: Ids, `[batch, blocks, keys]`.
    """
    least, most = queries.min(axis=2)[:, :, None, None], queries.max(axis=2)[:, :, None, None]
    ends = queries[:, :, :1], queries[:, :, -1:]
    # Exact for tiles with at most two segments. Other tiles may see any key with an id within their range of ids.
    many = ~((queries == ends[0]) | (queries == ends[1])).all(axis=2)[:, :, None, None]
    ids = keys[:, None]
    own = (ids == ends[0][..., None]) | (ids == ends[1][..., None]) | (many & (least <= ids) & (ids <= most))
    whole = (keys.min(axis=2)[:, None] == least[..., 0]) & (keys.max(axis=2)[:, None] == most[..., 0])
    return own.any(axis=3), whole & (least == most)[..., 0]


def _mask_pairs(mask: jax.Array, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    """Return where a mask shows a tile some, and all, keys of a block: `[batch or 1, heads or 1, tiles, blocks]`.

    A mask with one row, or one key, applies to all rows or keys; the axis of tiles or blocks is then 1.
    """
    rows, keys = (1 if size == 1 else block for size, block in zip(mask.shape[2:], blocks, strict=True))
    padding = [(0, 0), (0, 0), (0, -mask.shape[2] % rows), (0, -mask.shape[3] % keys)]
    shape = (*mask.shape[:2], -(-mask.shape[2] // rows), rows, -(-mask.shape[3] // keys), keys)
    some = jnp.pad(mask, padding).reshape(shape).any(axis=(3, 5))
    # Padded with True: `_tiles` masks the block that extends past the last key.
    every = jnp.pad(mask, padding, constant_values=True).reshape(shape).all(axis=(3, 5))
    return some, every


def _word_pairs(words: Any, blocks: Blocks, axis: int) -> tuple[Array, Array]:
    """Return the same for a mask `packed` along `axis`; padding counts as hidden."""
    rows, columns = (blocks.queries // 32, blocks.keys) if axis == 2 else (blocks.keys // 32, blocks.queries)
    split = words.reshape(*words.shape[:2], words.shape[2] // rows, rows, words.shape[3] // columns, columns)
    some, every = (split != 0).any(axis=(3, 5)), (split == -1).all(axis=(3, 5))
    return (some, every) if axis == 2 else (some.swapaxes(2, 3), every.swapaxes(2, 3))


def _ranges(some: Array, every: Array, *, masked_after: bool) -> BlockRange:
    """Return the ranges over the last axis of `[..., blocks, others]`; the first contiguous run is the unmasked range.

    Without such a run all tiles count as before it, or with `masked_after` as after it: a causal mask needs that loop
    in any case.
    """
    # One pass over the blocks: XLA makes one kernel of all four minima.
    module, count = _module(some, every), some.shape[-1]
    # The user may have disabled JAX's rank promotion.
    number = np.arange(count, dtype=np.int32).reshape((1,) * (some.ndim - 1) + (count,))

    def least(condition: Array, numbers: np.ndarray) -> Array:
        found: Array = module.where(condition, numbers, count).min(axis=-1)
        return found

    every = every & some
    following = module.pad(every[..., 1:], [(0, 0)] * (some.ndim - 1) + [(0, 1)])
    first, last = least(some, number), count - least(some, number[..., ::-1])
    first = module.where(last > 0, first, 0)
    begin, end = least(every, number), least(every & ~following, number + 1)
    found, without = begin < count, first if masked_after else last
    return BlockRange(first, module.where(found, begin, without), module.where(found, end, without), last)


def _stacked(ranges: BlockRange) -> Array:
    stacked: Array = _module(*ranges).stack(ranges, axis=-1).astype(np.int32)
    return stacked


def _tiled(ids: Array, block: int) -> Array:
    """Split the second axis into blocks, padded with the last id."""
    padded: Any = _module(ids).pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
    tiles: Array = padded.reshape(ids.shape[0], -1, block)
    return tiles


def _module(*arrays: Any) -> Any:
    """Return the module that computes with these arrays; `None` is skipped."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def _floor(length: Any, block: int) -> Any:
    return length // block if isinstance(length, int) else quotient(length, block)


def _blocks(length: Any, block: int) -> Any:
    return -(-length // block) if isinstance(length, int) else quotient(length + (block - 1), block)
