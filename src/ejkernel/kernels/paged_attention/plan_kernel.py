# SPDX-License-Identifier: Apache-2.0
"""The schedule of `mosaic_gpu` as one kernel, which takes less time than XLA's several kernels.

Its results are those of `schedule.py`, bit for bit. The first block of threads writes the schedule of decode, and the
others write rows of the table of prefill tiles; each finds the valid offsets and lengths for itself. Numbers that other
threads of a block need go through global memory, in arrays that the kernel returns, with a barrier between.
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
    Tile,
    TileSizes,
    blocks_of,
    items_at,
    long_tiles,
    most_prefill_tiles,
    no_prefill,
    prefill_columns,
    shares,
    tile_columns,
)

WARPS = 16
_AT_ONCE = 16384  # elements of a matrix that the threads hold
_RANKED = 128  # prefill tiles of a block of threads, and tiles with which it compares them at once
_MOST_TABLE = 4 * _AT_ONCE  # elements of a page table
_MOST = 1024  # sequences, and tiles of either kind


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
    def programs(self) -> int:
        """Blocks of threads."""
        return 1 + -(-self.prefill_tiles // _RANKED)

    @property
    def checks_quickly(self) -> bool:
        """Whether one block of threads reads the page table in little time."""
        return 0 < _power(self.sequences) * (self.columns or 0) <= _MOST_TABLE

    @property
    def fits(self) -> bool:
        """Whether one block of threads computes the schedule in little time."""
        most = max(self.sequences + 1, self.short_tiles, self.prefill_tiles)
        return self.tokens > 0 and self.sequences > 0 and most <= _MOST and self.columns != 0


class _Results(NamedTuple):
    """References to the results, and to numbers that threads exchange; without prefill some are `None`."""

    offsets: Any  # [sequences + 1]
    lengths: Any  # [sequences]
    short_tiles: Any  # [tiles, 6]
    short_programs: Any  # [programs, 5]
    bounds: Any  # for each block of threads [sequences + 2]: offsets, and the number of tokens
    all_lengths: Any  # for each block of threads [sequences + 1]: lengths, and 0
    ends: Any  # [tiles of decode]: of their blocks of keys
    prefill_tiles: Any = None  # [tiles, 5]
    prefill_ends: Any = None  # [sequences + 1]
    orders: Any = None  # [tiles of prefill]


class _From(NamedTuple):
    """The elements of a reference from `first` on."""

    ref: Any
    first: Any

    def __getitem__(self, index: Any) -> Any:
        return self.ref[self.first + index]

    def after(self) -> _From:
        """Return the elements without the first."""
        return _From(self.ref, self.first + 1)

    def load(self, at: jax.Array, inside: jax.Array, other: int = 0) -> jax.Array:
        """Return elements; `other` where `inside` is false."""
        return _loaded(self.ref, self.first + at, inside, other)

    def store(self, at: jax.Array, values: jax.Array, inside: jax.Array) -> None:
        """Store elements where `inside` is true."""
        plt.store(self.ref.at[self.first + at], values, mask=inside)


def run(sizes: Sizes, arrays: Sequence[jax.Array], *, interpret: bool = False) -> Found:
    """Return offsets, lengths and schedules.

    Args:
        sizes: The sizes.
        arrays: Offsets and lengths, and the page table if `sizes` has columns; all int32.
        interpret: Whether to simulate the kernel.
    """
    sequences, short, prefill = sizes.sequences, sizes.short_tiles, sizes.prefill_tiles
    shapes = [(sequences + 1,), (sequences,), (short, len(Tile)), (PROGRAMS, len(Share))]
    shapes += [(sizes.programs, sequences + 2), (sizes.programs, sequences + 1), (short,)]
    if prefill:
        shapes += [(prefill, len(PrefillTile)), (sequences + 1,), (prefill,)]

    def kernel(*refs: Any) -> None:
        _Kernel(sizes, _Results(*refs[len(arrays) :]), interpret).run(*refs[: len(arrays)])

    call: Callable[..., list[jax.Array]] = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((math.prod(shape),), jnp.int32) for shape in shapes],
        grid=(sizes.programs,),
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
        name="paged_plan",
        interpret=interpret,
    )
    flat = call(*arrays[:2], *(table.reshape(-1) for table in arrays[2:]))
    found = _Results(*(x.reshape(shape) for x, shape in zip(flat, shapes, strict=True)))
    own = Prefill(found.prefill_tiles, found.prefill_ends) if prefill else no_prefill()
    return Found(found.offsets, found.lengths, Schedule(found.short_tiles, found.short_programs), own)


def _power(number: int) -> int:
    """Return the first power of two that is not smaller."""
    return 1 << max(number - 1, 0).bit_length()


def _numbers(count: int) -> jax.Array:
    """Return the first numbers, as many as the threads hold for `count` elements."""
    return jnp.arange(_power(count), dtype=jnp.int32)


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
        self.program = pl.program_id(0)
        self.bounds = _From(results.bounds, self.program * (sizes.sequences + 2))
        self.lengths = _From(results.all_lengths, self.program * (sizes.sequences + 1))

    def run(self, offsets: Any, lengths: Any, table: Any = None) -> None:
        """Write the results of this block of threads."""
        size = self.sizes.tile.long
        self._ascend(offsets)
        self._clip(lengths, table)
        self._wait()
        given = Ranges(self.bounds, self.bounds.after(), self.lengths)

        @pl.when(self.program == 0)
        def _short() -> None:
            self._decode(given)

        if size is not None:

            @pl.when(self.program > 0)
            def _long() -> None:
                self._prefill(given, size)

    def _wait(self) -> None:
        """Wait until each thread of the block sees what the others have stored."""
        if not self.interpret:
            plt.debug_barrier()

    def _ascend(self, given: Any) -> None:
        """Store offsets that ascend from 0 within the tokens."""
        count, tokens = self.sizes.sequences + 1, self.sizes.tokens
        number = _numbers(count + 1)
        inside = number < count

        def clipped(at: jax.Array) -> jax.Array:
            found = jnp.minimum(jnp.maximum(_loaded(given, at, inside & (at > 0)), 0), tokens)
            return jnp.where(inside, found, tokens)

        def step(index: jax.Array, offsets: jax.Array) -> jax.Array:
            distance = jnp.left_shift(1, index)
            self._wait()
            self.bounds.store(number, offsets, inside)
            self._wait()
            earlier = self.bounds.load(jnp.maximum(number - distance, 0), inside)
            return jnp.where(number >= distance, jnp.maximum(offsets, earlier), offsets)

        offsets = clipped(number)
        falls = jnp.max((clipped(jnp.maximum(number - 1, 0)) > offsets).astype(jnp.int32))
        offsets = lax.fori_loop(0, falls * count.bit_length(), step, offsets)
        self._wait()
        self._store(self.bounds, self.results.offsets, number, offsets, inside)
        self.bounds.store(number, jnp.full_like(number, tokens), number == count)

    def _clip(self, given: Any, table: Any) -> None:
        """Store lengths within the page table: 0 of a sequence that needs a page outside of the cache."""
        sizes = self.sizes
        number = _numbers(sizes.sequences + 1)
        lengths = self._valid(_loaded(given, number, number < sizes.sequences))
        self._store(self.lengths, self.results.lengths, number, lengths, number < sizes.sequences)
        self.lengths.store(number, jnp.zeros_like(number), number == sizes.sequences)
        if table is None:
            return
        if sizes.window is not None:
            self._wait()
        width = min(_power(sizes.columns or 1), _AT_ONCE)
        height = min(_power(sizes.sequences), _AT_ONCE // width)
        across, down = -(-(sizes.columns or 1) // width), -(-sizes.sequences // height)

        def wrong(index: Any) -> tuple[jax.Array, jax.Array]:
            row = index // across if isinstance(index, int) else lax.div(index, across)
            number, column = row * height + _numbers(height), (index - row * across) * width + _numbers(width)
            return number, self._outside(given, table, number, column)

        def step(index: jax.Array, _: None) -> None:
            number, outside = wrong(index)
            is_wrong = jnp.max(outside, axis=1) > 0
            self._store(self.lengths, self.results.lengths, number, jnp.zeros_like(number), is_wrong)

        # Usually there is none, and one reduction of all elements tells so.
        found = [wrong(index)[1] for index in range(across * down)]
        some = jnp.max(functools.reduce(jnp.maximum, found))
        self._wait()
        lax.fori_loop(0, some * across * down, step, None)

    def _valid(self, lengths: jax.Array) -> jax.Array:
        columns, most = self.sizes.columns, 2**31 - 1
        most = most if columns is None else columns * self.sizes.page_size
        return jnp.minimum(jnp.maximum(lengths, 0), most)

    def _outside(self, given: Any, table: Any, number: jax.Array, column: jax.Array) -> jax.Array:
        """Return 1 for elements of the page table that are needed and outside of the cache, otherwise 0."""
        sizes, columns = self.sizes, self.sizes.columns or 1
        is_sequence, begin = number < sizes.sequences, (column * sizes.page_size)[None, :]
        inside = is_sequence[:, None] & (column < columns)[None, :]
        lengths = self._valid(_loaded(given, number, is_sequence))
        page = _loaded(table, number[:, None] * columns + column[None, :], inside)
        needed = inside & (begin < lengths[:, None])
        if sizes.window is not None:
            count = self.bounds.load(number + 1, is_sequence) - self.bounds.load(number, is_sequence)
            needed &= begin + sizes.page_size > (lengths - count - sizes.window)[:, None]
        return (needed & ((page < 0) | (page >= sizes.pages))).astype(jnp.int32)

    def _store(self, own: _From, result: Any, number: jax.Array, values: jax.Array, inside: jax.Array) -> None:
        """Store values for this block of threads, and those of the first block as results."""
        own.store(number, values, inside)
        plt.store(result.at[number], values, mask=inside & (self.program == 0))

    def _decode(self, given: Ranges) -> None:
        """Store the tiles of decode and the shares of the programs."""
        sizes, results = self.sizes, self.results
        number = _numbers(sizes.short_tiles)
        inside = number < sizes.short_tiles
        if sizes.tile.long is None:
            found = _count(self.bounds.after(), sizes.sequences, number)
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
        total = jnp.sum(blocks, dtype=jnp.int32)
        self._wait()
        self._deal(total)

    def _deal(self, blocks: jax.Array) -> None:
        """Store the shares of the programs."""
        sizes, programs, most = self.sizes, self.results.short_programs, _power(PROGRAMS)
        number = jnp.arange(2 * most, dtype=jnp.int32)  # first where each program begins, then where it stops
        begins, program = number < most, number & (most - 1)
        own = shares(blocks, program)
        at = jnp.where(begins, own.begin, own.stop - 1)
        ends = _From(self.results.ends, 0)
        tile = jnp.minimum(_count(ends, sizes.short_tiles, at), sizes.short_tiles - 1)
        item, block = items_at(ends, tile, at, sizes.kv_heads)
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

    def _prefill(self, given: Ranges, size: int) -> None:
        """Store the prefill tiles of this block of threads in their places."""
        sizes, results, count = self.sizes, self.results, self.sizes.prefill_tiles
        number = _numbers(sizes.sequences + 1)
        inside = number <= sizes.sequences
        sequence = jnp.where(inside, number, 0)
        tiles = long_tiles(given.end[sequence] - given.begin[sequence], number == sizes.sequences, sizes.tile)
        tiles = jnp.where(inside, tiles, 0)
        plt.store(results.prefill_ends.at[number], jnp.cumsum(tiles, dtype=jnp.int32), mask=inside)
        total = jnp.sum(tiles, dtype=jnp.int32)
        self._wait()

        def found(row: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
            number, ends = total - 1 - row, _From(results.prefill_ends, 0)
            sequence = jnp.where(row < count, _count(ends, sizes.sequences + 1, number), 0)
            tiles = PrefillTiles(number, sequence, ends)
            return prefill_columns(given, tiles, size, sizes.window, sizes.sequences - 1)

        row = _numbers(count)
        plt.store(results.orders.at[row], found(row)[1], mask=row < count)
        row = (self.program - 1) * _RANKED + jnp.arange(_RANKED, dtype=jnp.int32)
        columns, order = found(row)
        self._wait()
        _store_columns(results.prefill_tiles, self._rank(row, order), columns, row < count)

    def _rank(self, row: jax.Array, order: jax.Array) -> jax.Array:
        """Return how many rows come before each of these rows."""
        count = self.sizes.prefill_tiles

        def step(index: jax.Array, rank: jax.Array) -> jax.Array:
            other = index * _RANKED + jnp.arange(_RANKED, dtype=jnp.int32)
            its = _loaded(self.results.orders, other, other < count, 2**31 - 1)[None, :]
            is_before = (its < order[:, None]) | ((its == order[:, None]) & (other[None, :] < row[:, None]))
            return rank + jnp.sum(is_before.astype(jnp.int32), axis=1, dtype=jnp.int32)

        rank: jax.Array = lax.fori_loop(0, -(-count // _RANKED), step, jnp.zeros_like(row))
        return rank


def _count(vector: _From, count: int, at: jax.Array) -> jax.Array:
    """Return how many of the first `count` elements, which ascend, are at most these numbers."""
    number = _numbers(count)
    if len(number) * len(at) <= _AT_ONCE:
        found = vector.load(number, number < count, 2**31 - 1)
        return jnp.sum((found[None, :] <= at[:, None]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    low, step = jnp.zeros_like(at), len(number)
    while step:
        probe = low + step
        found = vector.load(jnp.minimum(probe, count) - 1, probe <= count, 2**31 - 1)
        low, step = jnp.where((probe <= count) & (found <= at), probe, low), step // 2
    return low
