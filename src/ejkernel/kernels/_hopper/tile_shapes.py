# SPDX-License-Identifier: Apache-2.0
"""Sizes and padding that our matrix-product kernels share; importing them does not need Pallas Mosaic GPU."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .device import MULTIPROCESSORS, Registers

STEP = 64  # of the summed axis, per step of the mainloop: one swizzle wide, so that copies can start at any row
WARPGROUPS = 2  # consumers
ROWS = 64  # of one WGMMA instruction
ROW_BYTES = 128  # of a piece of the result in the epilogue: one swizzle
PIECE = 64  # columns that an epilogue handles at once: one swizzle of 16-bit numbers
TILE = (8, 64)  # rows and columns of a tile of shared memory
ALIGNED = 64  # columns are padded to whole tiles of shared memory
ALIGNED_ROW = 8  # elements of 16 bits: rows of an array that TMA copies are multiples of 16 bytes
REGISTERS = Registers(producer=40, consumer=232)
OVERHEAD = 2 * 1024  # bytes of shared memory for barriers and the alignment of buffers


def padded(size: int, multiple: int) -> int:
    """Return a size rounded up."""
    return -(-size // multiple) * multiple


def in_whole_tiles(shape: tuple[int, int]) -> bool:
    """Return whether a matrix consists of whole tiles of shared memory."""
    return not any(size % tile for size, tile in zip(shape, TILE, strict=True))


def tile_width(columns: int, widths: Sequence[int], rows: int) -> int:
    """Return a good width of tiles, for so many `rows` of tiles.

    It is the widest that wastes few columns in the last tile and keeps the GPU busy: as long as each multiprocessor has
    at most one tile, narrower tiles take less time. On one H200, 512 rows and 4,096 columns with k = 4,096 take 42 us
    in 64 tiles of 256 columns, and 24 us in 128 of 128.
    """
    covered = {size: -(-columns // size) * size for size in widths}
    width = max(size for size in widths if covered[size] <= 1.1 * min(covered.values()))
    few = [size for size in widths if size <= width and rows * covered[size] <= MULTIPROCESSORS * size]
    return min(few, default=width)


def row_tiles(rows: int, groups: int, height: int) -> int:
    """Return the number of tiles in a column of tiles if all groups have the same size, or one row if rows are few."""
    return min(rows, groups) * max(1, -(-rows // (groups * height)))


def with_zeros(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Return an array of this shape, with zeros behind the given one."""
    added = [wanted - size for wanted, size in zip(shape, array.shape, strict=True)]
    return jnp.pad(array, [(0, more) for more in added]) if any(added) else array
