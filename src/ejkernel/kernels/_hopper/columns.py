# SPDX-License-Identifier: Apache-2.0
"""Shared memory in pieces of columns, each as wide as its swizzle, for arrays that do not divide into tiles.

Copies of whole tiles need an array of whole tiles in global memory. A piece as wide as its swizzle has the same
addresses with and without tiles. Its copy has no tiles: it starts at any row, and fills the piece with zeros past the
end of the array.
"""

from __future__ import annotations

from typing import NamedTuple

_WIDTHS = (64, 32, 16)  # of 16-bit elements: the swizzles of 128, 64 and 32 bytes


class Columns(NamedTuple):
    """Some columns of a matrix of 16-bit elements; they share a buffer and a product."""

    start: int
    width: int

    @property
    def swizzle(self) -> int:
        """The swizzle of the piece, in bytes."""
        return 2 * self.width


def split_columns(count: int, widest: int = 64) -> tuple[Columns, ...]:
    """Return pieces for `count` columns, rounded up to a multiple of 16; e.g. 64 and 16 for 80.

    Args:
        count: How many columns.
        widest: The largest width of a piece: 64, 32 or 16.
    """
    pieces: list[Columns] = []
    start = 0
    for width in _WIDTHS:
        while width <= widest and start + width < count + 16:
            pieces.append(Columns(start, width))
            start += width
    return tuple(pieces)
