# SPDX-License-Identifier: Apache-2.0
"""The sizes of a schedule, and which of its parts one block of threads computes."""

from __future__ import annotations

import dataclasses

from .schedule import TileSizes, most_prefill_tiles

_MOST = 1024  # sequences, and tiles of decode
_MOST_ENTRIES = 8192  # of a page table that one block checks; it checks 16,384 later than many blocks do
_MOST_COLUMNS = 65536  # of a page table
_MOST_PREFILL = 1024  # tiles of prefill
_MOST_PAIRS = 65536  # pairs that are compared to order the tiles of prefill
_BY_SEQUENCE = 4  # comparisons of tiles that take the time of one with a sequence


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
