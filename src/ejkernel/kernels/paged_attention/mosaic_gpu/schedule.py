# SPDX-License-Identifier: Apache-2.0
"""The schedule of a launch: its tiles, and the blocks of keys that each program takes.

The blocks of all items lie end to end, and each program takes an equal number of them (stream-K). A program that takes
part of an item leaves a share; the shares of one item are summed afterwards.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .plan import BLOCK


class Tile(enum.IntEnum):
    """Columns of the table of tiles."""

    SEQUENCE = 0
    TOKEN = 1  # the first query token
    COUNT = 2  # query tokens; 0: the tile is not used
    POSITION = 3  # of the first query token in its sequence; negative: it sees no key
    FIRST = 4  # the first block of keys
    END = 5  # the block after the last


class Share(enum.IntEnum):
    """Columns of the table of programs."""

    FIRST_ITEM = 0
    FIRST_BLOCK = 1  # within the first item
    LAST_ITEM = 2  # -1: the program has no item
    END_BLOCK = 3  # within the last item
    BLOCKS = 4  # of each program


class Schedule(NamedTuple):
    """The tables of one launch, int32."""

    tiles: jax.Array  # [tiles, 6]
    programs: jax.Array  # [programs, 5]


class Ranges(NamedTuple):
    """The query tokens of each sequence, and its keys; the last sequence is the padding, without keys."""

    begin: jax.Array
    end: jax.Array
    lengths: jax.Array


def ranges(offsets: jax.Array, lengths: jax.Array, tokens: int) -> Ranges:
    """Return the ranges of all sequences and of the padding behind them."""
    last = jnp.full((1,), tokens, jnp.int32)
    return Ranges(offsets, jnp.concatenate([offsets[1:], last]), jnp.pad(lengths, (0, 1)))


def token_tiles(given: Ranges, tokens: int, window: int | None) -> jax.Array:
    """Return tiles of one token each; tile `i` has token `i`."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence = jnp.sum(given.end[None, :] <= token[:, None], axis=1, dtype=jnp.int32)
    return _table(given, sequence, token, jnp.ones_like(token), window)


def short_tiles(given: Ranges, most: int, window: int | None) -> jax.Array:
    """Return one tile for each sequence with at most `most` query tokens."""
    count = given.end[:-1] - given.begin[:-1]
    sequence = jnp.arange(len(count), dtype=jnp.int32)
    return _table(given, sequence, given.begin[:-1], jnp.where(count > most, 0, count), window)


def long_tiles(given: Ranges, tokens: int, size: int, shortest: int, window: int | None) -> jax.Array:
    """Return tiles of `size` tokens for the padding, and for sequences with at least `shortest` query tokens."""
    count = given.end - given.begin
    is_long = (count >= shortest).at[-1].set(True)
    ends = jnp.cumsum(jnp.where(is_long, -(-count // size), 0), dtype=jnp.int32)
    number = jnp.arange(min(tokens, len(count) + tokens // size), dtype=jnp.int32)
    sequence = jnp.sum(ends[None, :] <= number[:, None], axis=1, dtype=jnp.int32)
    used = sequence < len(count)
    sequence = jnp.minimum(sequence, len(count) - 1)
    before = jnp.where(sequence > 0, ends[sequence - 1], 0)
    token = given.begin[sequence] + (number - before) * size
    return _table(given, sequence, token, jnp.where(used, jnp.minimum(given.end[sequence] - token, size), 0), window)


def _table(
    given: Ranges, sequence: jax.Array, token: jax.Array, count: jax.Array, window: int | None
) -> jax.Array:
    position = given.lengths[sequence] - (given.end[sequence] - token)
    first = jnp.zeros_like(token) if window is None else jnp.maximum(position - window, 0) // BLOCK
    end = -(-jnp.maximum(position + count, 0) // BLOCK)
    sequence = jnp.minimum(sequence, len(given.lengths) - 2)
    return jnp.stack([sequence, token, count, position, first, end], axis=1)


def schedule(tiles: jax.Array, kv_heads: int, programs: int) -> Schedule:
    """Return the schedule of these tiles."""
    count, first, end = (tiles[:, column] for column in (Tile.COUNT, Tile.FIRST, Tile.END))
    # A tile without keys counts as one block, so that a program writes its zeros.
    blocks = jnp.where(count > 0, jnp.maximum(end - first, 1), 0)
    ends = jnp.cumsum(blocks * kv_heads, dtype=jnp.int32)
    share = jnp.maximum(-(-ends[-1] // programs), 1)
    begin = jnp.minimum(jnp.arange(programs, dtype=jnp.int32) * share, ends[-1])
    stop = jnp.minimum(begin + share, ends[-1])

    def item_and_block(at: jax.Array) -> tuple[jax.Array, jax.Array]:
        tile = jnp.sum(ends[None, :] <= at[:, None], axis=1, dtype=jnp.int32)
        tile = jnp.minimum(tile, len(ends) - 1)
        rest, size = at - (ends[tile] - blocks[tile] * kv_heads), jnp.maximum(blocks[tile], 1)
        return tile * kv_heads + rest // size, rest % size

    first_item, first_block = item_and_block(begin)
    last_item, last_block = item_and_block(stop - 1)
    idle = stop <= begin
    columns = (
        jnp.where(idle, 0, first_item),
        jnp.where(idle, 0, first_block),
        jnp.where(idle, -1, last_item),
        last_block + 1,
        jnp.full_like(begin, share),
    )
    return Schedule(tiles, jnp.stack(columns, axis=1).astype(jnp.int32))
