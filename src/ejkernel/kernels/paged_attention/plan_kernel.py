# SPDX-License-Identifier: Apache-2.0
"""The schedule of `mosaic_gpu` as one kernel of one block of threads, after another for a large page table.

Its results are those of `schedule.py`, bit for bit. Numbers that other threads need go through global memory, in
arrays that the kernel returns, with a barrier between.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .schedule import (
    PROGRAMS,
    Found,
    Prefill,
    PrefillTile,
    PrefillTiles,
    Ranges,
    Schedule,
    Share,
    Sizes,
    Tile,
    blocks_of,
    items_at,
    long_tiles,
    no_prefill,
    power,
    prefill_columns,
    shares,
    tile_columns,
)

WARPS = 16
_SEARCHED = 1024  # comparisons of a search that compares all pairs of numbers; with more, it halves intervals
_COMPARED = 8192  # pairs of tiles, or of a tile and a sequence, that are compared at once

_TABLE_WARPS = 4
_BLOCKS = 128  # of threads, at least, if there are as many sequences
_AT_ONCE = 2048  # entries of the page table that a block checks at once


class _Results(NamedTuple):
    """References to the results, and to numbers that threads exchange; without prefill some are `None`."""

    offsets: Any  # [sequences + 1]
    lengths: Any  # [sequences]
    short_tiles: Any  # [tiles, 6]
    short_programs: Any  # [programs, 5]
    bounds: Any  # [sequences + 2]: offsets, and the number of tokens
    all_lengths: Any  # [sequences + 1]: lengths, and 0
    ends: Any  # [tiles of decode]: of their blocks
    prefill_tiles: Any = None  # [tiles, 5]
    prefill_ends: Any = None  # [sequences + 1]
    orders: Any = None  # [tiles of prefill]


class _Tiles(NamedTuple):
    """Tiles of prefill."""

    row: jax.Array
    sequence: jax.Array
    number: jax.Array  # as in `PrefillTiles`
    order: jax.Array  # as from `prefill_columns`


class _After(NamedTuple):
    """A vector without its first element."""

    whole: Any

    def __getitem__(self, index: Any) -> Any:
        return self.whole[index + 1]


def run(sizes: Sizes, arrays: Sequence[jax.Array], *, interpret: bool = False) -> Found:
    """Return offsets, lengths and schedules.

    Args:
        sizes: The sizes.
        arrays: Offsets and lengths, and the page table if `sizes` has columns; all int32.
        interpret: Whether to simulate the kernel.
    """
    if sizes.has_large_table:
        lengths = checked_lengths(sizes, arrays, interpret=interpret)
        sizes, arrays = dataclasses.replace(sizes, columns=None), (arrays[0], lengths)
    sequences, short, prefill = sizes.sequences, sizes.short_tiles, sizes.prefill_tiles
    shapes = [(sequences + 1,), (sequences,), (short, len(Tile)), (PROGRAMS, len(Share))]
    shapes += [(sequences + 2,), (sequences + 1,), (short,)]
    if prefill:
        shapes += [(prefill, len(PrefillTile)), (sequences + 1,), (prefill,)]

    def kernel(*refs: Any) -> None:
        _Kernel(sizes, _Results(*refs[len(arrays) :]), interpret).run(*refs[: len(arrays)])

    call: Callable[..., list[jax.Array]] = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((math.prod(shape),), jnp.int32) for shape in shapes],
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
        name="paged_plan",
        interpret=interpret,
    )
    flat = call(*arrays[:2], *(table.reshape(-1) for table in arrays[2:]))
    found = _Results(*(x.reshape(shape) for x, shape in zip(flat, shapes, strict=True)))
    own = Prefill(found.prefill_tiles, found.prefill_ends) if prefill else no_prefill()
    return Found(found.offsets, found.lengths, Schedule(found.short_tiles, found.short_programs), own)


def _numbers(count: int) -> jax.Array:
    """Return the first numbers, as many as the threads hold for `count` elements."""
    return jnp.arange(power(count), dtype=jnp.int32)


def _loaded(ref: Any, at: jax.Array, inside: jax.Array, other: int = 0) -> jax.Array:
    found: jax.Array = plt.load(ref.at[at], mask=inside, other=other)
    return found


def _store_columns(ref: Any, rows: jax.Array, columns: Sequence[jax.Array], inside: jax.Array) -> None:
    for number, column in enumerate(columns):
        plt.store(ref.at[rows * len(columns) + number], column, mask=inside)


class _Kernel:
    """The kernel's steps."""

    def __init__(self, sizes: Sizes, results: _Results, interpret: bool) -> None:
        self.sizes, self.results, self.interpret = sizes, results, interpret

    def run(self, offsets: Any, lengths: Any, table: Any = None) -> None:
        """Write all results."""
        sizes, results, size = self.sizes, self.results, self.sizes.tile.long
        self._ascend(offsets)
        if table is None:
            number = _numbers(sizes.sequences)
            self._store_lengths(number, _loaded(lengths, number, number < sizes.sequences))
        else:
            self._check(lengths, table)
        plt.store(results.all_lengths.at[_numbers(1) + sizes.sequences], jnp.zeros((1,), jnp.int32))
        self._wait()
        given = Ranges(results.bounds, _After(results.bounds), results.all_lengths)
        blocks = self._decode(given)
        tiles = None if size is None else self._find(given, size)
        self._wait()
        self._deal(blocks)
        if size is not None and tiles is not None:
            self._prefill(given, tiles, size)

    def _wait(self) -> None:
        """Synchronize the threads, so that each sees the stores of the others."""
        if not self.interpret:
            plt.debug_barrier()

    def _ascend(self, given: Any) -> None:
        """Store offsets that ascend from 0 within the tokens."""
        results, count, tokens = self.results, self.sizes.sequences + 1, self.sizes.tokens
        number = _numbers(count + 1)
        inside = number < count

        def clipped(at: jax.Array) -> jax.Array:
            found = jnp.minimum(jnp.maximum(_loaded(given, at, inside & (at > 0)), 0), tokens)
            return jnp.where(inside, found, tokens)

        def step(index: jax.Array, offsets: jax.Array) -> jax.Array:
            distance = jnp.left_shift(1, index)
            self._wait()
            plt.store(results.bounds.at[number], offsets, mask=inside)
            self._wait()
            earlier = _loaded(results.bounds, jnp.maximum(number - distance, 0), inside)
            return jnp.where(number >= distance, jnp.maximum(offsets, earlier), offsets)

        offsets = clipped(number)
        falls = jnp.max((clipped(jnp.maximum(number - 1, 0)) > offsets).astype(jnp.int32))
        offsets = lax.fori_loop(0, falls * count.bit_length(), step, offsets)
        self._wait()
        plt.store(results.bounds.at[number], jnp.where(inside, offsets, tokens), mask=number <= count)
        plt.store(results.offsets.at[number], offsets, mask=inside)

    def _check(self, given: Any, table: Any) -> None:
        """Store the lengths of the sequences: 0 of one that needs a page outside of the cache."""
        sizes, columns = self.sizes, self.sizes.columns or 1
        if sizes.window is not None:
            self._wait()
        number, column = _numbers(sizes.sequences), _numbers(columns)
        is_sequence, begin = number < sizes.sequences, (column * sizes.page_size)[None, :]
        lengths = jnp.minimum(jnp.maximum(_loaded(given, number, is_sequence), 0), columns * sizes.page_size)
        inside = is_sequence[:, None] & (column < columns)[None, :]
        needed = inside & (begin < lengths[:, None])
        if sizes.window is not None:
            ends, begins = (_loaded(self.results.bounds, number + more, is_sequence) for more in (1, 0))
            needed &= begin + sizes.page_size > (lengths - (ends - begins) - sizes.window)[:, None]
        # All elements are loaded, because those that are needed are known only when the lengths have arrived.
        page = _loaded(table, number[:, None] * columns + column[None, :], inside)
        outside = (needed & ((page < 0) | (page >= sizes.pages))).astype(jnp.int32)
        self._store_lengths(number, jnp.where(jnp.max(outside, axis=1) > 0, 0, lengths))

    def _store_lengths(self, number: jax.Array, lengths: jax.Array) -> None:
        sequences = self.sizes.sequences
        plt.store(self.results.lengths.at[number], lengths, mask=number < sequences)
        plt.store(self.results.all_lengths.at[number], lengths, mask=number < sequences)

    def _decode(self, given: Ranges) -> jax.Array:
        """Store the tiles of decode and the ends of their blocks; return the number of blocks."""
        sizes, results = self.sizes, self.results
        number = _numbers(sizes.short_tiles)
        inside = number < sizes.short_tiles
        if sizes.tile.long is None:
            found = _count(results.bounds, 1, sizes.sequences, number)
            sequence, token, count = jnp.where(inside, found, 0), number, jnp.ones_like(number)
        else:
            sequence = jnp.where(inside, number, 0)
            token = given.begin[sequence]
            count = given.end[sequence] - token
            count = jnp.where(count > sizes.tile.short, 0, count)
        columns = tile_columns(given, sequence, token, count, sizes.window, sizes.sequences - 1)
        _store_columns(results.short_tiles, number, columns, inside)
        blocks = blocks_of(*(columns[column] for column in (Tile.COUNT, Tile.FIRST, Tile.END))) * sizes.kv_heads
        blocks = jnp.where(inside, blocks, 0)
        plt.store(results.ends.at[number], jnp.cumsum(blocks, dtype=jnp.int32), mask=inside)
        return jnp.sum(blocks, dtype=jnp.int32)

    def _deal(self, blocks: jax.Array) -> None:
        """Store the shares of the programs."""
        sizes, programs, most = self.sizes, self.results.short_programs, power(PROGRAMS)
        number = jnp.arange(2 * most, dtype=jnp.int32)  # first where each program begins, then where it stops
        begins, program = number < most, number & (most - 1)
        own = shares(blocks, program)
        at = jnp.where(begins, own.begin, own.stop - 1)
        tile = jnp.minimum(_count(self.results.ends, 0, sizes.short_tiles, at), sizes.short_tiles - 1)
        item, block = items_at(self.results.ends, tile, at, sizes.kv_heads)
        idle, inside = own.stop <= own.begin, program < PROGRAMS
        item = jnp.where(idle, jnp.where(begins, 0, -1), item)
        block = jnp.where(begins, jnp.where(idle, 0, block), block + 1)
        columns = (
            (jnp.where(begins, int(Share.FIRST_ITEM), int(Share.LAST_ITEM)), item),
            (jnp.where(begins, int(Share.FIRST_BLOCK), int(Share.END_BLOCK)), block),
            (jnp.full_like(number, int(Share.BLOCKS)), jnp.zeros_like(number) + own.size),
        )
        for column, value in columns:
            plt.store(programs.at[program * len(Share) + column], value, mask=inside)

    def _find(self, given: Ranges, size: int) -> jax.Array:
        """Store the ends of the prefill tiles of each sequence; return the number of tiles."""
        sequences, ends = self.sizes.sequences, self.results.prefill_ends
        number = _numbers(sequences + 1)
        inside = number <= sequences
        sequence = jnp.where(inside, number, 0)
        own = long_tiles(given.end[sequence] - given.begin[sequence], number == sequences, self.sizes.tile)
        own = jnp.where(inside, own, 0)
        plt.store(ends.at[number], jnp.cumsum(own, dtype=jnp.int32), mask=inside)
        return jnp.sum(own, dtype=jnp.int32)

    def _prefill(self, given: Ranges, tiles: jax.Array, size: int) -> None:
        """Store the prefill tiles in their order."""
        sizes, results, count = self.sizes, self.results, self.sizes.prefill_tiles
        row = _numbers(count)
        number, inside = tiles - 1 - row, row < count
        sequence = jnp.where(inside, _count(results.prefill_ends, 0, sizes.sequences + 1, number), 0)
        found = PrefillTiles(number, sequence, results.prefill_ends)
        columns, order = prefill_columns(given, found, size, sizes.window, sizes.sequences - 1)
        if sizes.orders_by_sequence:
            own = _Tiles(row, sequence, number, order)
            rank = self._rank_by_sequence(given, own, size)
        else:
            rank = self._rank(row, order)
        _store_columns(results.prefill_tiles, rank, columns, inside)

    def _rank(self, row: jax.Array, order: jax.Array) -> jax.Array:
        """Return how many tiles precede each tile, by comparing all pairs."""
        count, at_once = self.sizes.prefill_tiles, max(1, _COMPARED // len(row))
        plt.store(self.results.orders.at[row], order, mask=row < count)
        self._wait()

        def step(index: jax.Array, rank: jax.Array) -> jax.Array:
            other = index * at_once + jnp.arange(at_once, dtype=jnp.int32)
            its = _loaded(self.results.orders, other, other < count, 2**31 - 1)[None, :]
            is_before = (its < order[:, None]) | ((its == order[:, None]) & (other[None, :] < row[:, None]))
            return rank + jnp.sum(is_before.astype(jnp.int32), axis=1, dtype=jnp.int32)

        return _repeated(-(-count // at_once), step, jnp.zeros_like(row))

    def _rank_by_sequence(self, given: Ranges, own: _Tiles, size: int) -> jax.Array:
        """Return how many tiles come before each one, from the numbers of keys of a sequence's tiles, which ascend.

        Only the last tile of a sequence, which may have fewer tokens, does not follow that order with a window.
        """
        sizes, ends = self.sizes, self.results.prefill_ends
        at_once = min(power(sizes.sequences + 1), max(1, _COMPARED // len(own.row)))
        keys = jnp.maximum(-own.order, 0)
        most = 2**31 - 1 if sizes.window is None else size + sizes.window

        def step(index: jax.Array, rank: jax.Array) -> jax.Array:
            number = index * at_once + jnp.arange(at_once, dtype=jnp.int32)
            inside = number <= sizes.sequences
            its = jnp.where(inside, number, 0)
            count = given.end[its] - given.begin[its]
            begin = jnp.where(its > 0, ends[jnp.maximum(its - 1, 0)], 0)
            tiles = jnp.where(inside, ends[its] - begin, 0)
            first, whole = given.lengths[its] - count, jnp.maximum(tiles - 1, 0)
            position, stop = first + whole * size, jnp.maximum(given.lengths[its], 0)
            if sizes.window is not None:
                stop -= jnp.minimum(jnp.maximum(position - sizes.window, 0), stop)
            last = jnp.where(tiles > 0, stop, -1)  # keys of the last tile
            is_own = number[None, :] == own.sequence[:, None]
            later = (ends[its] - 1)[None, :] - own.number[:, None]  # tiles of the own sequence; 0: it is the last one
            before = (number[None, :] < own.sequence[:, None]) | (is_own & (later <= 0))
            # Tiles with equally many keys come in descending order of their numbers.
            at_least = keys[:, None] + before.astype(jnp.int32)
            skipped = jnp.maximum(
                lax.shift_right_arithmetic(
                    at_least - first[None, :] + (size - 1), jnp.full_like(at_least, size.bit_length() - 1)
                )
                - 1,
                0,
            )
            found = jnp.maximum(whole[None, :] - skipped, 0)
            found = jnp.where(at_least <= 0, whole[None, :], jnp.where(at_least > most, 0, found))
            found += (last[None, :] >= at_least).astype(jnp.int32)
            of_own = later - 1 + (last[None, :] >= keys[:, None]).astype(jnp.int32)
            return rank + jnp.sum(jnp.where(is_own & (later > 0), of_own, found), axis=1, dtype=jnp.int32)

        rank = _repeated(-(-(sizes.sequences + 1) // at_once), step, jnp.zeros_like(own.row))
        return jnp.where(own.number >= 0, rank, own.row)


def _repeated(count: int, step: Callable[[Any, jax.Array], jax.Array], first: jax.Array) -> jax.Array:
    found: jax.Array = step(jnp.int32(0), first) if count == 1 else lax.fori_loop(0, count, step, first)
    return found


def _count(ref: Any, first: int, count: int, at: jax.Array) -> jax.Array:
    """Return how many of the `count` elements behind the `first` ones, which ascend, are at most these numbers."""
    number = _numbers(count)
    if len(number) * len(at) <= _SEARCHED:
        found = _loaded(ref, first + number, number < count, 2**31 - 1)
        return jnp.sum((found[None, :] <= at[:, None]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    low, step = jnp.zeros_like(at), len(number)
    while step:
        probe = low + step
        found = _loaded(ref, first + jnp.minimum(probe, count) - 1, probe <= count, 2**31 - 1)
        low, step = jnp.where((probe <= count) & (found <= at), probe, low), step // 2
    return low


def checked_lengths(sizes: Sizes, arrays: Sequence[jax.Array], *, interpret: bool = False) -> jax.Array:
    """Return the lengths of the sequences: 0 of one that needs a page outside of the cache.

    Args:
        sizes: The sizes.
        arrays: Offsets, lengths and the page table; int32.
        interpret: Whether to simulate the kernel.
    """
    columns = min(power(sizes.columns or 1), _AT_ONCE)
    rows = max(1, min(_AT_ONCE // columns, power(sizes.sequences) // _BLOCKS))
    call: Callable[..., jax.Array] = pl.pallas_call(
        functools.partial(_check, sizes, (rows, columns)),
        out_shape=jax.ShapeDtypeStruct((sizes.sequences,), jnp.int32),
        grid=(-(-sizes.sequences // rows),),
        compiler_params=plt.CompilerParams(num_warps=_TABLE_WARPS, num_stages=1),
        name="paged_plan_table",
        interpret=interpret,
    )
    offsets, lengths, table = arrays
    return call(offsets, lengths, table.reshape(-1))


def _check(sizes: Sizes, tile: tuple[int, int], offsets: Any, lengths: Any, table: Any, out: Any) -> None:
    (rows, width), columns, page_size = tile, sizes.columns or 1, sizes.page_size
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    is_row = row < sizes.sequences
    length = plt.load(lengths.at[row], mask=is_row, other=0)
    length = jnp.minimum(jnp.maximum(length, 0), columns * page_size)
    first = jnp.zeros_like(length)
    if sizes.window is not None:
        count = _ascending(sizes, offsets, row + 1) - _ascending(sizes, offsets, row)
        first = lax.div(jnp.maximum(length - count - sizes.window, 0), page_size)
    end = lax.div(length + (page_size - 1), page_size)

    def step(index: jax.Array, outside: jax.Array) -> jax.Array:
        column = index * width + jnp.arange(width, dtype=jnp.int32)[None, :]
        needed = (column >= first[:, None]) & (column < end[:, None])
        page = plt.load(table.at[row[:, None] * columns + column], mask=needed, other=0)
        found = (page < 0) | (page >= sizes.pages)
        return outside | jnp.max((found & needed).astype(jnp.int32), axis=1)

    blocks = lax.div(jnp.max(end) + (width - 1), width)
    outside = lax.fori_loop(lax.div(jnp.min(first), width), blocks, step, jnp.zeros_like(length))
    plt.store(out.at[row], jnp.where(outside > 0, 0, length), mask=is_row)


def _ascending(sizes: Sizes, offsets: Any, at: jax.Array) -> jax.Array:
    """Return the offsets at these numbers, made valid: from 0 within the tokens, and ascending."""
    number = jnp.arange(power(sizes.sequences + 1), dtype=jnp.int32)
    given = plt.load(offsets.at[number], mask=(number > 0) & (number <= sizes.sequences), other=0)
    given = jnp.minimum(jnp.maximum(given, 0), sizes.tokens)
    return jnp.max(jnp.where(number[None, :] <= at[:, None], given[None, :], 0), axis=1)
