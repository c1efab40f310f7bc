# SPDX-License-Identifier: Apache-2.0
"""The schedule of a batch: the order of its sequences, their tiles of queries, and the pages that they read."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel import compat

from . import schedule
from .schedule import (
    SHORT,
    Prefill,
    Schedule,
    Sizes,
    TileSizes,
    first_ones,
    no_prefill,
    no_schedule,
    running_max,
    running_sum,
    schedules,
    searches,
    tile_sizes,
    token_schedule,
)

_PART, _MOST_PARTS = 64, 32  # columns of a part of a row of the page table, and parts of a row
TILE_ROWS = 128  # rows of a tile: queries times the query heads that share a KV head


class PlanArrays(NamedTuple):
    """The arrays of a `PagedPlan`, int32.

    Attributes:
        offsets, lengths: `query_offsets` and `kv_lengths` in valid form; see `valid_batch`.
        order: `[sequences]`: the sequences with one new token, then those with several, then those without. The first
            two kinds begin with the sequences that read the most pages, so that neighbours take equally long.
        decodes: `[1]`: the number of sequences with one new token.
        tiles: `[sequences + 1]`: in that order, the number of prefill tiles before each sequence.
        first_pages, end_pages: `[sequences]`: the columns of the page table that a sequence reads begin at the first
            and end before the second.
        short_tiles, short_programs, prefill_tiles, prefill_ends: The schedules of `mosaic_gpu`; see `schedules`.
        token_tiles, token_programs: That of latent attention; without tiles if the layers have several KV heads, or if
            the short tiles have one token each.
    """

    offsets: jax.Array
    lengths: jax.Array
    order: jax.Array
    decodes: jax.Array
    tiles: jax.Array
    first_pages: jax.Array
    end_pages: jax.Array
    short_tiles: jax.Array
    short_programs: jax.Array
    prefill_tiles: jax.Array
    prefill_ends: jax.Array
    token_tiles: jax.Array
    token_programs: jax.Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The sizes that a plan depends on.

    Attributes:
        tokens: New tokens of all sequences, with padding; like `pages` and `table`, -1 in a plan without arrays.
        heads, kv_heads: Heads of the layers.
        pages: Pages of the cache.
        page_size: Tokens of a page.
        table: Shape of the page table, `(sequences, pages)`.
        window: The keys that a query sees before its own; `None`: all.
    """

    tokens: int
    heads: int
    kv_heads: int
    pages: int
    page_size: int
    table: tuple[int, ...]
    window: int | None

    @classmethod
    def of(
        cls, q: tuple[int, ...], kv_pages: tuple[int, ...], page_table: tuple[int, ...], window: int | None
    ) -> BatchShape:
        """Return the sizes of a batch with arrays of these shapes."""
        pages, page_size, kv_heads = kv_pages[:3]
        cache = {"pages": pages, "page_size": page_size, "kv_heads": kv_heads}
        return cls(tokens=q[0], heads=q[1], **cache, table=page_table, window=window)

    @property
    def tile_queries(self) -> int:
        """Tokens of a prefill tile."""
        return max(1, TILE_ROWS * self.kv_heads // self.heads)

    @property
    def tile_sizes(self) -> TileSizes:
        """Query tokens of the tiles of `mosaic_gpu`."""
        return tile_sizes(self.tokens, self.table[0], self.heads, self.kv_heads)

    def differences(self, other: BatchShape) -> dict[str, tuple[Any, Any]]:
        """Return the sizes that differ and change a plan, with both values."""
        names = ("tokens", "pages", "page_size", "table")
        own, others = ({name: getattr(x, name) for name in names} for x in (self, other))
        own, others = (
            found | {"heads / kv_heads": x.heads // x.kv_heads} for found, x in ((own, self), (others, other))
        )
        known = [name for name, size in others.items() if size not in (-1, (-1, -1))]
        return {name: (own[name], others[name]) for name in known if own[name] != others[name]}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedPlan:
    """The schedule of one batch, which all layers of a model share; see `ejkernel.modules.paged_plan`.

    Attributes:
        arrays: The schedule, on the device; `None` if each layer computes its own.
        shape: The sizes of the batch.
    """

    arrays: PlanArrays | None
    shape: BatchShape = dataclasses.field(metadata={"static": True})

    @property
    def made_for(self) -> tuple[int, int | None] | None:
        """The KV heads and the window of the schedule; `None` without one."""
        return None if self.arrays is None else (self.shape.kv_heads, self.shape.window)


class _Checked(NamedTuple):
    """Offsets and lengths as in `valid_batch`, and the sequence of each token, if it was found at once."""

    offsets: jax.Array
    lengths: jax.Array
    sequence: jax.Array | None


def valid_batch(
    shape: BatchShape, page_table: jax.Array, query_offsets: jax.Array, kv_lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return offsets that ascend from 0 within the tokens, and lengths within the table.

    A sequence that needs a page outside of the cache has length 0, so that its tokens see no other sequence's page.
    """
    return _checked(shape, page_table, query_offsets, kv_lengths)[:2]


def _checked(shape: BatchShape, page_table: jax.Array, query_offsets: jax.Array, kv_lengths: jax.Array) -> _Checked:
    clipped, lengths = _clipped(shape, query_offsets), jnp.clip(kv_lengths, 0, shape.table[1] * shape.page_size)
    if not shape.table[1]:
        return _Checked(running_max(clipped), lengths, None)
    if shape.window is not None or len(clipped) > SHORT:
        offsets = running_max(clipped)
        (found,) = _minima(_lengths_by_page(shape, page_table, lengths, jnp.diff(offsets)))
        return _Checked(offsets, _of_parts(found, len(lengths)), None)
    matrices = [_lengths_by_page(shape, page_table, lengths, None), -first_ones(clipped, 0)]
    if shape.tokens <= shape.table[0]:
        matrices.append(searches(clipped, shape.tokens))
    found, negative, *sequence = _minima(*matrices)
    return _Checked(-negative, _of_parts(found, len(lengths)), sequence[0] if sequence else None)


def _lengths_by_page(
    shape: BatchShape, page_table: jax.Array, lengths: jax.Array, counts: jax.Array | None
) -> jax.Array:
    """Return for each page 0 if it is needed and outside of the cache, otherwise the length of the sequence.

    The rows are parts of those of the page table: for long rows, XLA starts a kernel for the elements, and one for the
    minima.
    """
    begin = jnp.arange(shape.table[1], dtype=jnp.int32)[None] * shape.page_size
    needed = begin < lengths[:, None]
    if counts is not None and shape.window is not None:
        needed &= begin + shape.page_size > (lengths - counts - shape.window)[:, None]
    is_outside = page_table.astype(jnp.uint32) >= shape.pages  # also negative ones
    found = jnp.where(needed & is_outside, 0, lengths[:, None])
    part = max(size for size in range(1, _PART + 1) if shape.table[1] % size == 0)
    return found.reshape(-1, part) if shape.table[1] // part <= _MOST_PARTS else found


def _minima(*matrices: jax.Array) -> list[jax.Array]:
    """Return the minimum of each row of int32 matrices, by one reduction."""
    width, most = max(x.shape[1] for x in matrices), 2**31 - 1
    padded = [jnp.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=most) for x in matrices]
    ends = list(itertools.accumulate(len(x) for x in matrices))
    found = jnp.min(jnp.concatenate(padded), axis=1)
    return [found[end - len(x) : end] for x, end in zip(matrices, ends, strict=True)]


def _of_parts(parts: jax.Array, rows: int) -> jax.Array:
    """Return the minimum of the parts of each row; their number is small."""
    by_row = parts.reshape(rows, -1)
    return functools.reduce(jnp.minimum, [by_row[:, i] for i in range(by_row.shape[1])])


def _clipped(shape: BatchShape, query_offsets: jax.Array) -> jax.Array:
    """Return offsets from 0 within the tokens, which need not ascend."""
    number = jnp.arange(len(query_offsets), dtype=jnp.int32)
    return jnp.where(number == 0, 0, jnp.clip(query_offsets, 0, shape.tokens))


def plan_arrays(
    shape: BatchShape, page_table: jax.Array, query_offsets: jax.Array, kv_lengths: jax.Array
) -> PlanArrays:
    """Return the schedule of a batch."""
    arrays = query_offsets, kv_lengths, page_table
    offsets, lengths, *tables = compat.alternatives.on_hopper_or_plain(Schedules(shape), *arrays)
    count = jnp.diff(offsets)
    zero = jnp.zeros_like(lengths)
    first = zero if shape.window is None else jnp.maximum(lengths - count - shape.window, 0) // shape.page_size
    end = jnp.where(count > 0, -(-lengths // shape.page_size), first)
    kind = jnp.where(count == 1, 0, jnp.where(count > 1, 1, 2))
    order = jnp.lexsort((first - end, kind)).astype(jnp.int32)
    tiles = jnp.where(count > 1, -(-count // shape.tile_queries), 0)[order]
    decodes = jnp.sum(count == 1, dtype=jnp.int32)[None]
    ends = jnp.pad(running_sum(tiles), (1, 0))
    # Latent attention needs its own schedule if it differs from that of decode.
    has_tokens = shape.kv_heads == 1 and shape.tokens > shape.table[0]
    single = token_tiles(shape, *arrays) if has_tokens else no_schedule()
    pages = first.astype(jnp.int32), end.astype(jnp.int32)
    return PlanArrays(
        offsets, lengths, order, decodes, ends, *pages, *Schedule(*tables[:2]), *Prefill(*tables[2:]), *single
    )


def batch_schedules(shape: BatchShape, offsets: jax.Array, lengths: jax.Array) -> tuple[Schedule, Prefill]:
    """Return the schedules of a batch with valid offsets and lengths."""
    _, _, *tables = compat.alternatives.on_hopper_or_plain(Schedules(shape), offsets, lengths)
    return Schedule(*tables[:2]), Prefill(*tables[2:])


def token_tiles(shape: BatchShape, *arrays: jax.Array) -> Schedule:
    """Return the schedule of tiles of one token each, for one KV head.

    Args:
        shape: The sizes of the batch.
        arrays: Valid offsets and lengths; or any, and the page table.
    """
    return Schedule(*compat.alternatives.on_hopper_or_plain(Schedules(shape, by_token=True), *arrays)[2:4])


@dataclasses.dataclass(frozen=True)
class Schedules:
    """Both forms of the schedules of `mosaic_gpu`; with a page table, of any offsets and lengths.

    Attributes:
        shape: The sizes of the batch.
        by_token: Whether each token has its own tile, for one KV head.
        programs: The number of programs that share decode; programs of other schedules are not reused.
    """

    shape: BatchShape
    by_token: bool = False
    programs: int = dataclasses.field(default_factory=lambda: schedule.PROGRAMS)

    def plain(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        """Return offsets, lengths, and the tables of both kinds of tiles."""
        with jax.enable_x64(False):  # all numbers are int32
            return self._plain(*arrays)

    def _plain(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        shape, (offsets, lengths, *table), sequence = self.shape, arrays, None
        if 0 in (shape.tokens, shape.table[0]):  # without tiles
            lengths = jnp.clip(lengths, 0, shape.table[1] * shape.page_size)
            return jnp.zeros_like(offsets), lengths, *no_schedule(), *no_prefill()
        given = offsets
        if table:
            # Tiles of one token do not need ascending offsets, so their kernels need not wait for them.
            given = _clipped(shape, offsets)
            offsets, lengths, sequence = _checked(shape, table[0], offsets, lengths)
        if self.by_token:
            single = token_schedule(offsets, lengths, shape.tokens, 1, shape.window)
            return offsets, lengths, *single, *no_prefill()
        given = given if shape.tokens <= len(lengths) else offsets
        short, prefill = schedules(given, lengths, shape.tokens, shape.heads, shape.kv_heads, shape.window, sequence)
        return offsets, lengths, *short, *prefill

    def on_hopper(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        """Return the same results from our kernels, where these are faster."""
        from . import plan_kernel  # Pallas is slow to import

        sizes = self._sizes if len(arrays) > 2 else dataclasses.replace(self._sizes, columns=None)
        if not sizes.fits:
            return self.plain(*arrays)
        with jax.enable_x64(False):
            found = plan_kernel.run(sizes, arrays)
        return found.offsets, found.lengths, *found.short, *found.prefill

    @property
    def _sizes(self) -> Sizes:
        shape = self.shape
        return Sizes(
            tokens=shape.tokens,
            sequences=shape.table[0],
            columns=shape.table[1],
            pages=shape.pages,
            page_size=shape.page_size,
            kv_heads=1 if self.by_token else shape.kv_heads,
            tile=TileSizes(1, None) if self.by_token else shape.tile_sizes,
            window=shape.window,
        )
