# SPDX-License-Identifier: Apache-2.0
"""Blocks of a matrix in shared memory, for arrays that end anywhere: copies fill a block with zeros past the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from .backend import Backend
from .launch import SWIZZLE, plgpu, swizzled, tiled
from .tile_shapes import PIECE


def tiles_and_rows(backend: Backend, shape: tuple[int, ...], dtype: Any, swizzle: int = SWIZZLE) -> Any:
    """Return shared memory with two views: of tiles, for products, and of rows, for copies that start at any row."""
    return backend.aliased(tiled(shape, dtype, swizzle), swizzled(shape, dtype, swizzle))


def columns_from(array: Any, start: Any, size: int) -> Any:
    """Return a slice of an array's columns; copies fill those past the end with zeros, or leave them out.

    Pallas refuses a constant start out of bounds, so the kernel computes it.
    """
    is_inside = not isinstance(start, int) or start + size <= array.shape[-1]
    return pl.ds(start if is_inside else lax.add(np.int32(start), np.int32(0)), size)


class Blocks:
    """Blocks of 16-bit elements, as products take them.

    A block of an array in whole tiles takes a single copy and a single product. Other blocks consist of pieces of 64
    columns, with a copy and a product each; see `columns`.

    Args:
        backend: The backend.
        leading: Sizes of the axes that number blocks.
        rows: Rows of a block.
        columns: Its columns, a multiple of 64.
        whole: Whether the array is in whole tiles.
    """

    def __init__(
        self, backend: Backend, leading: tuple[int, ...], rows: int, columns: int, *, whole: bool = False
    ) -> None:
        self.backend, self.whole = backend, whole
        self.pieces = 1 if whole else columns // PIECE
        self._width = columns // self.pieces
        self._shape = (*leading, self.pieces, rows, self._width)

    def type(self, dtype: Any) -> Any:
        """Return the type of shared memory for the blocks."""
        return tiled(self._shape, dtype) if self.whole else tiles_and_rows(self.backend, self._shape, dtype)

    def copy(
        self, array: Any, at: tuple[Any, Any], memory: Any, number: tuple[Any, ...], barrier: Any, **options: Any
    ) -> None:
        """Start copying a block to shared memory.

        Args:
            array: The matrix in global memory.
            at: The block's first row and first column; both are traced, since Pallas refuses constants out of bounds.
            memory: Shared memory of the blocks.
            number: The block's number.
            barrier: The barrier; each of `pieces` copies arrives at it.
            **options: Options of the copies.
        """
        buffers = memory if self.whole else self.backend.views(memory, 2)[1]
        for piece in range(self.pieces):
            part = array.at[pl.ds(at[0], self._shape[-2]), pl.ds(at[1] + piece * self._width, self._width)]
            plgpu.copy_gmem_to_smem(part, buffers.at[(*number, piece)], barrier, **options)

    def matrices(self, memory: Any, *number: Any) -> list[Any]:
        """Return the pieces of a block, from left to right."""
        buffers = memory if self.whole else self.backend.views(memory, 2)[0]
        return [buffers.at[(*number, piece)] for piece in range(self.pieces)]


def multiply(accumulator: Any, left: Any, right: Sequence[Any]) -> None:
    """Start `accumulator += left @ right`, with a product for each of the pieces of `right`."""
    if len(right) == 1:
        plgpu.wgmma(accumulator, left, right[0])
        return
    for number, piece in enumerate(right):
        plgpu.wgmma(accumulator.at[:, number * PIECE : (number + 1) * PIECE], left, piece)
