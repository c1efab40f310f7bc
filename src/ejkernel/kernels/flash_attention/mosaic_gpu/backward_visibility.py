# SPDX-License-Identifier: Apache-2.0
"""Which tiles of scores the backward kernels compute, and in which they have to mask.

A tile is a block of keys against a block of queries. For each block of one of them, the tiles that matter are given as
a range over the blocks of the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.flash_attention.common import Rules

Array = jax.Array | np.ndarray


class Blocks(NamedTuple):
    """Sizes of the blocks that tiles are made of."""

    queries: int
    keys: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """Who sees whom in one call: the rules, the lengths, and the segment ids if there are any.

    Attributes:
        queries, keys: Lengths.
        rules: The last query is aligned with the last key.
        query_segments, key_segments: `[batch, length]`, in any order; `None` if there are none.
        query_lengths, key_lengths: `[batch]`; those from there on hide, and are hidden.
        mask: Not zero where one of 32 neighbouring queries may see a key: `[batch or 1, heads or 1, queries / 32,
            keys]`, padded to whole blocks.
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
    """Return for each block of keys the query blocks that it meets, int32 `[batch or 1, key blocks, 4]`.

    The four numbers `first <= begin <= end <= last`: only blocks in `[first, last)` have visible pairs, and in those
    in `[begin, end)` every pair is visible, boolean masks aside. Queries beyond the last, or beyond a length, count as
    visible: their log-sum-exp makes their weights zero.
    """
    some, every = _tiles(visibility, blocks)
    return _ranges(some.swapaxes(-1, -2), every.swapaxes(-1, -2), masked_after=False)


def ranges_of_keys(visibility: Visibility, blocks: Blocks) -> Array:
    """Return for each block of queries the key blocks that it meets, likewise; keys beyond the last are not visible."""
    return _ranges(*_tiles(visibility, blocks), masked_after=True)


def _tiles(visibility: Visibility, blocks: Blocks) -> tuple[Array, Array]:
    """Return `[batch or 1, query blocks, key blocks]`: whether some and whether every pair of a tile is visible."""
    some, every = _tiles_by_position(visibility, blocks)
    if visibility.query_segments is not None and visibility.key_segments is not None:
        # Ids may come in any order: extents only say what may be skipped, and in tiles that remain ids are compared.
        lowest, highest = _extent(visibility.query_segments, blocks.queries)
        key_lowest, key_highest = _extent(visibility.key_segments, blocks.keys)
        rows, columns = (lowest[:, :, None], highest[:, :, None]), (key_lowest[:, None], key_highest[:, None])
        some = some & (rows[0] <= columns[1]) & (columns[0] <= rows[1])
        every = every & (rows[0] == rows[1]) & (columns[0] == columns[1]) & (rows[0] == columns[0])
    if visibility.query_lengths is not None:
        first = np.arange(some.shape[1], dtype=np.int32)[None] * blocks.queries
        # No mask is needed where only some are behind it: their log-sum-exp makes their weights zero.
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
    """Return what the rules and the lengths say, known before anything runs."""
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
    # What shapes and rules alone decide is NumPy's, and a constant of the program.
    return np if isinstance(x, np.ndarray) else jnp


def _extent(segments: Array, size: int) -> tuple[Array, Array]:
    """Return the smallest and the largest id in each block, `[batch, blocks]`."""
    # With an id that the block has already, so that its extent stays.
    blocks = _module(segments).pad(segments, ((0, 0), (0, -segments.shape[1] % size)), mode="edge")
    blocks = blocks.reshape(blocks.shape[0], -1, size)
    return blocks.min(axis=-1), blocks.max(axis=-1)


def _some_in_blocks(words: Array, blocks: Blocks) -> Array:
    """Return whether a mask shows some pair of each tile to some head, `[batch or 1, query blocks, key blocks]`."""
    rows, keys = blocks.queries // 32, blocks.keys
    split = words.reshape(*words.shape[:2], words.shape[2] // rows, rows, words.shape[3] // keys, keys)
    some: Array = (split != 0).any(axis=(1, 3, 5))
    return some


def _ranges(some: Array, every: Array, *, masked_after: bool) -> Array:
    """Turn `[batch, blocks, others]` into ranges over the others, the unmasked one being the first run of them.

    Where there is none, all masked tiles count as before or as after it: whichever a causal mask has in any case.
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
