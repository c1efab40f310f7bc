# SPDX-License-Identifier: Apache-2.0
"""The schedule of `mosaic_gpu`: the tiles of decode and of prefill, and the blocks of keys that each program takes.

In decode the blocks of all items lie end to end, and each program takes an equal number of them (stream-K). A program
that takes part of an item leaves a share; the shares of one item are summed afterwards. In prefill a program takes
whole tiles, those with the most keys first.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 64  # keys that a program takes at once: the rows of one WGMMA instruction
PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
MOST_ROWS = 64  # of a tile of decode: with more, its sums would not fit in the registers of one warpgroup
PREFILL_ROWS = 128  # of a tile of prefill
SHORT = 1024  # elements of a vector whose running sums take fewer kernels by comparing all numbers
_FEW_TOKENS = 4  # query tokens of a short sequence, e.g. in speculative decoding


class Tile(enum.IntEnum):
    """Columns of the table of tiles."""

    SEQUENCE = 0
    TOKEN = 1  # the first query token
    COUNT = 2  # query tokens; 0: the tile is not used
    POSITION = 3  # of the first query token in its sequence; negative: it sees no key
    FIRST = 4  # the first block of keys
    END = 5  # the block after the last


class PrefillTile(enum.IntEnum):
    """Columns of the table of prefill tiles; the first ones are those of `Tile`."""

    SEQUENCE = 0
    TOKEN = 1
    COUNT = 2
    POSITION = 3
    LENGTH = 4  # keys of the sequence


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


class Prefill(NamedTuple):
    """The tiles of sequences with many query tokens, int32; those with the most keys come first."""

    tiles: jax.Array  # [tiles, 5]
    ends: jax.Array  # [sequences + 1], of the tiles of each sequence and of the padding; without tiles empty


class TileSizes(NamedTuple):
    """Query tokens of a tile.

    Attributes:
        short: Of decode: of a sequence with at most so many query tokens.
        long: Of prefill; `None` if there are no more tokens than sequences: all tiles have one token then.
    """

    short: int
    long: int | None


def tile_sizes(tokens: int, sequences: int, heads: int, kv_heads: int) -> TileSizes:
    """Return the sizes of the tiles of a batch."""
    if tokens <= sequences:
        return TileSizes(1, None)
    most, average = max(1, MOST_ROWS // group_rows(heads // kv_heads)), -(-tokens // sequences)
    # With more tokens, some sequences prefill, and the others probably decode one token.
    short = min(average, most) if average <= _FEW_TOKENS else 1
    return TileSizes(short, PREFILL_ROWS // prefill_heads(heads // kv_heads))


def prefill_heads(group: int) -> int:
    """Return the query heads of a KV head that share a tile of prefill: as many as divide its rows."""
    return min(group & -group, MOST_ROWS)


def running_sum(x: jax.Array) -> jax.Array:
    """Return the sums of the first elements of an int32 vector."""
    return jnp.sum(first_ones(x, 0), axis=1, dtype=jnp.int32) if len(x) <= SHORT else jnp.cumsum(x, dtype=jnp.int32)


def running_max(x: jax.Array) -> jax.Array:
    """Return the maxima of the first elements of an int32 vector."""
    return jnp.max(first_ones(x, -(2**31)), axis=1) if len(x) <= SHORT else lax.cummax(x)


def first_ones(x: jax.Array, other: int) -> jax.Array:
    """Return a matrix whose row `i` has the first `i + 1` elements: a GPU reduces it in one kernel, not in several."""
    number = jnp.arange(len(x), dtype=jnp.int32)
    return jnp.where(number[None, :] <= number[:, None], x[None, :], other)


def group_rows(group: int) -> int:
    """Return the rows of one token: the query heads of a KV head, padded because copies begin at multiples of 8."""
    return -(-group // 8) * 8


def schedules(  # noqa: PLR0917
    offsets: jax.Array,
    lengths: jax.Array,
    tokens: int,
    heads: int,
    kv_heads: int,
    window: int | None,
    sequence: jax.Array | None = None,
) -> tuple[Schedule, Prefill]:
    """Return the schedules of sequences with few and with many query tokens; the latter may have no tiles.

    Args:
        offsets: `[sequences + 1]`; from 0 to at most `tokens`, and ascending if there are more tokens than sequences.
        lengths: `[sequences]`; not negative.
        tokens: All query tokens, with padding.
        heads: Query heads.
        kv_heads: KV heads.
        window: The keys that a query sees before its own; `None`: all.
        sequence: `[tokens]`: the sequence of each token, as from `searches`, if it is known.
    """
    sizes = tile_sizes(tokens, len(lengths), heads, kv_heads)
    given = _ranges(offsets, lengths, tokens)
    if sizes.long is None:
        none = Prefill(*(jnp.zeros(shape, jnp.int32) for shape in ((0, len(PrefillTile)), (0,))))
        return _dealt(_token_tiles(given, tokens, window, sequence), kv_heads), none
    short = _dealt(_short_tiles(given, sizes.short, window), kv_heads)
    return short, _prefill(given, tokens, TileSizes(sizes.short, sizes.long), window)


def no_schedule() -> Schedule:
    """Return a schedule without tiles."""
    return Schedule(jnp.zeros((0, len(Tile)), jnp.int32), jnp.zeros((0, len(Share)), jnp.int32))


def token_schedule(offsets: jax.Array, lengths: jax.Array, tokens: int, kv_heads: int, window: int | None) -> Schedule:
    """Return the schedule of tiles of one token each, for any number of tokens of a sequence; see `schedules`."""
    return _dealt(_token_tiles(_ranges(offsets, lengths, tokens), tokens, window), kv_heads)


class _Ranges(NamedTuple):
    """The query tokens of each sequence, and its keys; the last sequence is the padding, without keys."""

    begin: jax.Array
    end: jax.Array
    lengths: jax.Array


def _ranges(offsets: jax.Array, lengths: jax.Array, tokens: int) -> _Ranges:
    """Return the ranges of all sequences and of the padding behind them."""
    last = jnp.full((1,), tokens, jnp.int32)
    return _Ranges(offsets, jnp.concatenate([offsets[1:], last]), jnp.pad(lengths, (0, 1)))


def searches(offsets: jax.Array, tokens: int) -> jax.Array:
    """Return a matrix whose row minima are the sequences of the tokens; that of padding is beyond the last.

    The first sequence that ends beyond a token has it, also if the offsets do not ascend: those before it end earlier,
    and so do the running maxima.
    """
    token, number = (jnp.arange(count, dtype=jnp.int32) for count in (tokens, len(offsets) - 1))
    return jnp.where(offsets[None, 1:] > token[:, None], number[None, :], len(number))


def _token_tiles(given: _Ranges, tokens: int, window: int | None, sequence: jax.Array | None = None) -> jax.Array:
    """Return tiles of one token each; tile `i` has token `i`. The offsets need not ascend."""
    if sequence is None:
        sequence = jnp.min(searches(given.begin, tokens), axis=1)
    token = jnp.arange(tokens, dtype=jnp.int32)
    return _table(given, sequence, token, jnp.ones_like(token), window)


def _short_tiles(given: _Ranges, most: int, window: int | None) -> jax.Array:
    """Return one tile for each sequence with at most `most` query tokens."""
    count = given.end[:-1] - given.begin[:-1]
    sequence = jnp.arange(len(count), dtype=jnp.int32)
    return _table(given, sequence, given.begin[:-1], jnp.where(count > most, 0, count), window)


def _prefill(given: _Ranges, tokens: int, sizes: TileSizes, window: int | None) -> Prefill:
    """Return tiles for the padding, and for sequences with more query tokens than the short ones."""
    size = sizes.long or 1
    count = given.end - given.begin
    is_long = (count > sizes.short).at[-1].set(True)
    ends = running_sum(jnp.where(is_long, -(-count // size), 0))
    # In reverse: the last tiles of a sequence have the most keys.
    number = ends[-1] - 1 - jnp.arange(min(tokens, len(count) + tokens // size), dtype=jnp.int32)
    sequence = jnp.sum(ends[None, :] <= number[:, None], axis=1, dtype=jnp.int32)
    before = jnp.where(sequence > 0, ends[sequence - 1], 0)
    token = given.begin[sequence] + (number - before) * size
    own = jnp.where(number >= 0, jnp.minimum(given.end[sequence] - token, size), 0)
    position = _position(given, sequence, token)
    columns = jnp.minimum(sequence, len(given.lengths) - 2), token, own, position, given.lengths[sequence]
    stop = jnp.maximum(position + own, 0)
    keys = stop if window is None else stop - jnp.clip(position - window, 0, stop)
    order = jnp.where(own > 0, -keys, 1)  # the longest first, and tiles that are not used last
    table = lax.optimization_barrier(jnp.stack([*columns, order], axis=1))  # one kernel
    return Prefill(_by_last_column(table), ends)


def _by_last_column(table: jax.Array) -> jax.Array:
    """Return the other columns, with rows in ascending order of the last; rows with equal numbers keep their order."""
    keys, others = table[:, -1], table[:, :-1]
    if len(keys) > SHORT:
        return others[jnp.argsort(keys)]
    number = jnp.arange(len(keys), dtype=jnp.int32)
    before = (keys[None, :] < keys[:, None]) | ((keys[None, :] == keys[:, None]) & (number[None, :] < number[:, None]))
    rank = jnp.sum(before, axis=1, dtype=jnp.int32)
    # A sum over all rows, of which one counts, is one kernel; an inverse of the ranks and a gather are two.
    return jnp.sum(jnp.where(rank == number[:, None, None], others.T[None], 0), axis=2, dtype=jnp.int32)


def _table(given: _Ranges, sequence: jax.Array, token: jax.Array, count: jax.Array, window: int | None) -> jax.Array:
    position = _position(given, sequence, token)
    first = jnp.zeros_like(token) if window is None else jnp.maximum(position - window, 0) // BLOCK
    end = -(-jnp.maximum(position + count, 0) // BLOCK)
    sequence = jnp.minimum(sequence, len(given.lengths) - 2)
    return jnp.stack([sequence, token, count, position, first, end], axis=1)


def _position(given: _Ranges, sequence: jax.Array, token: jax.Array) -> jax.Array:
    """Return the positions of tokens in their sequences."""
    return given.lengths[sequence] - (given.end[sequence] - token)


def _dealt(tiles: jax.Array, kv_heads: int) -> Schedule:
    """Return the schedule of these tiles."""
    programs, tiles = PROGRAMS, lax.optimization_barrier(tiles)  # otherwise another kernel computes two columns again
    count, first, end = (tiles[:, column] for column in (Tile.COUNT, Tile.FIRST, Tile.END))
    # A tile without keys counts as one block, so that a program writes its zeros.
    blocks = jnp.where(count > 0, jnp.maximum(end - first, 1), 0)
    ends = running_sum(blocks * kv_heads)
    share = jnp.maximum(lax.div(ends[-1] + (programs - 1), programs), 1)
    begin = jnp.minimum(jnp.arange(programs, dtype=jnp.int32) * share, ends[-1])
    stop = jnp.minimum(begin + share, ends[-1])

    # One search for both ends takes fewer kernels than two.
    at = jnp.concatenate([begin, stop - 1])
    tile = jnp.minimum(jnp.sum(ends[None, :] <= at[:, None], axis=1, dtype=jnp.int32), len(ends) - 1)
    rest, size = at - (ends[tile] - blocks[tile] * kv_heads), jnp.maximum(blocks[tile], 1)
    head = lax.div(rest, size)  # `//` would take care of negative numbers
    items, numbers = tile * kv_heads + head, rest - head * size
    first_item, last_item = jnp.split(items, 2)
    first_block, last_block = jnp.split(numbers, 2)
    idle = stop <= begin
    columns = (
        jnp.where(idle, 0, first_item),
        jnp.where(idle, 0, first_block),
        jnp.where(idle, -1, last_item),
        last_block + 1,
        jnp.full_like(begin, share),
    )
    return Schedule(tiles, jnp.stack(columns, axis=1).astype(jnp.int32))
