# SPDX-License-Identifier: Apache-2.0
"""The schedule of `mosaic_gpu`: the tiles of decode and of prefill, and the blocks of keys that each program takes.

In decode the blocks of all items lie end to end, and each program takes an equal number of them (stream-K). A program
that takes part of an item leaves a share; the shares of one item are summed afterwards. In prefill a program takes
whole tiles, those with the most keys first.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 64  # keys that a program takes at once: the rows of one WGMMA instruction
PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
MOST_ROWS = 64  # of a tile of decode: with more, its sums would not fit in the registers of one warpgroup
PREFILL_ROWS = 128  # of a tile of prefill
SHORT = 1024  # elements of a vector whose running sums take fewer kernels by comparing all numbers
_FEW_TOKENS = 4  # query tokens of a short sequence, e.g. in speculative decoding

_MOST = 1024  # sequences, and tiles of decode
_MOST_ENTRIES = 8192  # of a page table that one block checks; it checks 16,384 later than many blocks do
_MOST_COLUMNS = 65536  # of a page table
_MOST_PREFILL = 1024  # tiles of prefill
_MOST_PAIRS = 65536  # pairs that are compared to order the tiles of prefill
_BY_SEQUENCE = 4  # comparisons of tiles that take the time of one with a sequence


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


class Found(NamedTuple):
    """Valid offsets and lengths of a batch, and its schedules."""

    offsets: jax.Array
    lengths: jax.Array
    short: Schedule
    prefill: Prefill


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
        return _dealt(_token_tiles(given, tokens, window, sequence), kv_heads), no_prefill()
    short = _dealt(_short_tiles(given, sizes.short, window), kv_heads)
    return short, _prefill(given, tokens, TileSizes(sizes.short, sizes.long), window)


def no_schedule() -> Schedule:
    """Return a schedule without tiles."""
    return Schedule(jnp.zeros((0, len(Tile)), jnp.int32), jnp.zeros((0, len(Share)), jnp.int32))


def no_prefill() -> Prefill:
    """Return a schedule without tiles of prefill."""
    return Prefill(jnp.zeros((0, len(PrefillTile)), jnp.int32), jnp.zeros((0,), jnp.int32))


def token_schedule(offsets: jax.Array, lengths: jax.Array, tokens: int, kv_heads: int, window: int | None) -> Schedule:
    """Return the schedule of tiles of one token each, for any number of tokens of a sequence; see `schedules`."""
    return _dealt(_token_tiles(_ranges(offsets, lengths, tokens), tokens, window), kv_heads)


class Ranges(NamedTuple):
    """The query tokens of each sequence, and its keys; the last sequence is the padding, without keys.

    The vectors are arrays, or references inside of a kernel.
    """

    begin: Any
    end: Any
    lengths: Any

    def positions(self, sequence: jax.Array, token: jax.Array) -> jax.Array:
        """Return the positions of tokens in their sequences."""
        position: jax.Array = self.lengths[sequence] - (self.end[sequence] - token)
        return position


def _ranges(offsets: jax.Array, lengths: jax.Array, tokens: int) -> Ranges:
    """Return the ranges of all sequences and of the padding behind them."""
    last = jnp.full((1,), tokens, jnp.int32)
    return Ranges(offsets, jnp.concatenate([offsets[1:], last]), jnp.pad(lengths, (0, 1)))


def searches(offsets: jax.Array, tokens: int) -> jax.Array:
    """Return a matrix whose row minima are the sequences of the tokens; that of padding is beyond the last.

    The first sequence that ends beyond a token has it, also if the offsets do not ascend: those before it end earlier,
    and so do the running maxima.
    """
    token, number = (jnp.arange(count, dtype=jnp.int32) for count in (tokens, len(offsets) - 1))
    return jnp.where(offsets[None, 1:] > token[:, None], number[None, :], len(number))


def _token_tiles(given: Ranges, tokens: int, window: int | None, sequence: jax.Array | None = None) -> jax.Array:
    """Return tiles of one token each; tile `i` has token `i`. The offsets need not ascend."""
    if sequence is None:
        sequence = jnp.min(searches(given.begin, tokens), axis=1)
    token = jnp.arange(tokens, dtype=jnp.int32)
    last = len(given.lengths) - 2
    return jnp.stack(tile_columns(given, sequence, token, jnp.ones_like(token), window, last), axis=1)


def _short_tiles(given: Ranges, most: int, window: int | None) -> jax.Array:
    """Return one tile for each sequence with at most `most` query tokens."""
    count = given.end[:-1] - given.begin[:-1]
    sequence = jnp.arange(len(count), dtype=jnp.int32)
    count = jnp.where(count > most, 0, count)
    return jnp.stack(tile_columns(given, sequence, given.begin[:-1], count, window, len(count) - 1), axis=1)


def tile_columns(
    given: Ranges, sequence: jax.Array, token: jax.Array, count: jax.Array, window: int | None, last: int
) -> tuple[jax.Array, ...]:
    """Return the columns of the table of tiles; those of padding have the number of the last sequence."""
    position = given.positions(sequence, token)
    first = jnp.zeros_like(token) if window is None else lax.div(jnp.maximum(position - window, 0), BLOCK)
    end = lax.div(jnp.maximum(position + count, 0) + (BLOCK - 1), BLOCK)
    return jnp.minimum(sequence, last), token, count, position, first, end


def _prefill(given: Ranges, tokens: int, sizes: TileSizes, window: int | None) -> Prefill:
    """Return tiles for the padding, and for sequences with more query tokens than the short ones."""
    size, sequences = sizes.long or 1, len(given.lengths) - 1
    ends = running_sum(long_tiles(given.end - given.begin, jnp.arange(sequences + 1) == sequences, sizes))
    number = ends[-1] - 1 - jnp.arange(most_prefill_tiles(tokens, sequences, size), dtype=jnp.int32)
    sequence = jnp.sum(ends[None, :] <= number[:, None], axis=1, dtype=jnp.int32)
    columns, order = prefill_columns(given, PrefillTiles(number, sequence, ends), size, window, sequences - 1)
    table = lax.optimization_barrier(jnp.stack([*columns, order], axis=1))  # one kernel
    return Prefill(_by_last_column(table), ends)


def most_prefill_tiles(tokens: int, sequences: int, size: int) -> int:
    """Return the length of the table of prefill tiles."""
    return min(tokens, sequences + 1 + tokens // size)


def long_tiles(count: jax.Array, is_padding: jax.Array, sizes: TileSizes) -> jax.Array:
    """Return the number of prefill tiles of sequences with so many query tokens."""
    size = sizes.long or 1
    return jnp.where((count > sizes.short) | is_padding, lax.div(count + (size - 1), size), 0)


class PrefillTiles(NamedTuple):
    """Tiles in reverse order, because the last tiles of a sequence have the most keys."""

    number: jax.Array  # of each tile; negative: the tile is not used
    sequence: jax.Array
    ends: Any  # of the tiles of each sequence


def prefill_columns(
    given: Ranges, tiles: PrefillTiles, size: int, window: int | None, last: int
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return the columns of the table of prefill tiles, and numbers that give the order of the tiles."""
    number, sequence, ends = tiles
    before = jnp.where(sequence > 0, ends[jnp.maximum(sequence - 1, 0)], 0)
    token = given.begin[sequence] + (number - before) * size
    own = jnp.where(number >= 0, jnp.minimum(given.end[sequence] - token, size), 0)
    position = given.positions(sequence, token)
    columns = jnp.minimum(sequence, last), token, own, position, given.lengths[sequence]
    stop = jnp.maximum(position + own, 0)
    keys = stop if window is None else stop - jnp.minimum(jnp.maximum(position - window, 0), stop)
    return columns, jnp.where(own > 0, -keys, 1)  # the longest first, and tiles that are not used last


def _by_last_column(table: jax.Array) -> jax.Array:
    """Return the other columns, with rows in ascending order of the last; rows with equal numbers keep their order."""
    keys, others = table[:, -1], table[:, :-1]
    if len(keys) > SHORT:
        return others[jnp.argsort(keys)]
    number = jnp.arange(len(keys), dtype=jnp.int32)
    before = (keys[None, :] < keys[:, None]) | ((keys[None, :] == keys[:, None]) & (number[None, :] < number[:, None]))
    rank = jnp.sum(before, axis=1, dtype=jnp.int32)
    # A sum over all rows is one kernel, though only one row counts; an inverse of the ranks and a gather are two.
    return jnp.sum(jnp.where(rank[None, None] == number[:, None, None], others.T[None], 0), axis=2, dtype=jnp.int32)


def _dealt(tiles: jax.Array, kv_heads: int) -> Schedule:
    """Return the schedule of these tiles."""
    tiles = lax.optimization_barrier(tiles)  # otherwise another kernel computes two columns again
    ends = running_sum(blocks_of(*(tiles[:, column] for column in (Tile.COUNT, Tile.FIRST, Tile.END))) * kv_heads)
    own = shares(ends[-1], jnp.arange(PROGRAMS, dtype=jnp.int32))
    # One search for both ends takes fewer kernels than two.
    at = jnp.concatenate([own.begin, own.stop - 1])
    tile = jnp.minimum(jnp.sum(ends[None, :] <= at[:, None], axis=1, dtype=jnp.int32), len(ends) - 1)
    items, numbers = items_at(ends, tile, at, kv_heads)
    first_item, last_item = jnp.split(items, 2)
    first_block, last_block = jnp.split(numbers, 2)
    idle = own.stop <= own.begin
    columns = (
        jnp.where(idle, 0, first_item),
        jnp.where(idle, 0, first_block),
        jnp.where(idle, -1, last_item),
        last_block + 1,
        jnp.full_like(own.begin, own.size),
    )
    return Schedule(tiles, jnp.stack(columns, axis=1).astype(jnp.int32))


def blocks_of(count: jax.Array, first: jax.Array, end: jax.Array) -> jax.Array:
    """Return the blocks of keys of tiles. A tile without keys counts as one, so that a program writes its zeros."""
    return jnp.where(count > 0, jnp.maximum(end - first, 1), 0)


class Shares(NamedTuple):
    """The blocks of keys of all items that each program takes, from `begin` to before `stop`, and their number."""

    begin: jax.Array
    stop: jax.Array
    size: jax.Array


def shares(blocks: jax.Array, programs: jax.Array) -> Shares:
    """Return the shares of these programs of so many blocks."""
    size = jnp.maximum(lax.div(blocks + (PROGRAMS - 1), PROGRAMS), 1)
    begin = jnp.minimum(programs * size, blocks)
    return Shares(begin, jnp.minimum(begin + size, blocks), size)


def items_at(ends: Any, tile: jax.Array, at: jax.Array, kv_heads: int) -> tuple[jax.Array, jax.Array]:
    """Return the items of blocks of keys, and the numbers of the blocks within them.

    Args:
        ends: The ends of the blocks of each tile, for all KV heads.
        tile: The tile of each block.
        at: The number of each block.
        kv_heads: KV heads.
    """
    begin = jnp.where(tile > 0, ends[jnp.maximum(tile - 1, 0)], 0)
    size = jnp.maximum(lax.div(ends[tile] - begin, kv_heads), 1)
    head = lax.div(at - begin, size)  # `//` would take care of negative numbers
    return tile * kv_heads + head, at - begin - head * size


def power(number: int) -> int:
    """Return the number, rounded up to a power of two."""
    return 1 << max(number - 1, 0).bit_length()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a schedule.

    Attributes:
        tokens: New tokens of all sequences, with padding.
        sequences: Sequences.
        columns: Columns of the page table; `None`: the lengths are valid already.
        pages, page_size: Pages of the cache, and tokens of a page.
        kv_heads: KV heads.
        tile: Query tokens of the tiles.
        window: The keys that a query sees before its own; `None`: all.
    """

    tokens: int
    sequences: int
    columns: int | None
    pages: int
    page_size: int
    kv_heads: int
    tile: TileSizes
    window: int | None

    @property
    def short_tiles(self) -> int:
        """Tiles of decode."""
        return self.tokens if self.tile.long is None else self.sequences

    @property
    def prefill_tiles(self) -> int:
        """Tiles of prefill."""
        size = self.tile.long
        return 0 if size is None else most_prefill_tiles(self.tokens, self.sequences, size)

    @property
    def fits(self) -> bool:
        """Whether one block of threads computes the schedule faster than XLA's kernels."""
        if 0 in (self.tokens, self.sequences, self.columns) or max(self.sequences + 1, self.short_tiles) > _MOST:
            return False
        tiles = power(self.prefill_tiles)
        pairs = tiles * (power(self.sequences + 1) if self.orders_by_sequence else tiles)
        return tiles <= _MOST_PREFILL and pairs <= _MOST_PAIRS and (self.columns or 0) <= _MOST_COLUMNS

    @property
    def has_large_table(self) -> bool:
        """Whether a kernel of several blocks of threads checks the page table."""
        return self.columns is not None and power(self.sequences) * power(self.columns) > _MOST_ENTRIES

    @property
    def orders_by_sequence(self) -> bool:
        """Whether tiles of prefill are compared with sequences rather than with all tiles, to find their order."""
        return power(self.prefill_tiles) > _BY_SEQUENCE * power(self.sequences + 1)
