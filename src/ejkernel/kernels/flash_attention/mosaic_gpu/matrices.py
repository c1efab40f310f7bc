# SPDX-License-Identifier: Apache-2.0
"""Matrices in shared memory of the backward kernels: whole, or in pieces of columns; see `_hopper.columns`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ejkernel.kernels._hopper.backend import Backend
from ejkernel.kernels._hopper.blocks import columns_from, tiles_and_rows
from ejkernel.kernels._hopper.launch import plgpu, tiled

from .backward_plan import Buffer


class Matrices:
    """Types, copies and products of matrices of 16-bit elements.

    A buffer of whole matrices has the axes of its `Buffer`. In a buffer of pieces, the number of the piece comes first.

    Args:
        backend: The backend.
        pieced: Whether matrices are stored in pieces.
    """

    def __init__(self, backend: Backend, *, pieced: bool) -> None:
        self.backend, self.pieced = backend, pieced

    def count(self, buffer: Buffer) -> int:
        """Return the number of pieces, each of one copy and one product."""
        return buffer.shape[-1] // _width(buffer) if self.pieced else 1

    def type(self, buffer: Buffer, dtype: Any) -> Any:
        """Return the type of a buffer."""
        if not self.pieced:
            return tiled(buffer.shape, dtype, buffer.swizzle)
        shape = (self.count(buffer), *buffer.shape[:-1], _width(buffer))
        return tiles_and_rows(self.backend, shape, dtype, buffer.swizzle)

    def tiles(self, buffer: Any, *at: Any) -> list[Any]:
        """Return the pieces of a matrix, as products and assignments take them."""
        if not self.pieced:
            return [buffer.at[at]]
        tiles = self.backend.views(buffer, 2)[0]
        return [tiles.at[(piece, *at)] for piece in range(tiles.shape[0])]

    def copy_in(self, source: Any, rows: tuple[Any, ...], buffer: Any, at: tuple[Any, ...], barrier: Any) -> None:
        """Start copying the rows `source.at[rows]` to the matrix `buffer.at[at]`."""
        for part, piece in self._parts(source, rows, buffer, at):
            plgpu.copy_gmem_to_smem(part, piece, barrier)

    def copy_out(self, buffer: Any, at: tuple[Any, ...], target: Any, rows: tuple[Any, ...]) -> None:
        """Start copying the matrix `buffer.at[at]` to the rows `target.at[rows]`."""
        for part, piece in self._parts(target, rows, buffer, at):
            plgpu.copy_smem_to_gmem(piece, part)

    def _parts(self, array: Any, rows: tuple[Any, ...], buffer: Any, at: tuple[Any, ...]) -> list[tuple[Any, Any]]:
        """Return the part of the array of each piece, and the piece as copies take it."""
        if not self.pieced:
            return [(array.at[rows], buffer.at[at])]
        pieces = self.backend.views(buffer, 2)[1]
        count, width = pieces.shape[0], pieces.shape[-1]
        columns = [columns_from(array, piece * width, width) for piece in range(count)]
        return [(array.at[(*rows, own)], pieces.at[(piece, *at)]) for piece, own in enumerate(columns)]

    def store(self, buffer: Any, at: tuple[Any, ...], value: Any, target: Any, rows: tuple[Any, ...]) -> None:
        """Start storing a matrix through a buffer that no product needs any more."""
        self.assign(buffer, at, value)
        plgpu.commit_smem()
        self.copy_out(buffer, at, target, rows)

    def assign(self, buffer: Any, at: tuple[Any, ...], value: Any) -> None:
        """Store a matrix in shared memory."""
        for piece, tile in enumerate(self.tiles(buffer, *at)):
            width = tile.shape[-1]
            tile[...] = value[:, piece * width : (piece + 1) * width] if self.pieced else value

    def multiply_transposed(self, total: Any, left: Sequence[Any], right: Sequence[Any]) -> None:
        """Start `total += left @ right.T`."""
        for one, other in zip(left, right, strict=True):
            self.backend.multiply(total, one, other.transpose((1, 0)))

    def multiply(self, total: Any, left: Any, right: Sequence[Any]) -> None:
        """Start `total += left @ right`."""
        if not self.pieced:
            self.backend.multiply(total, left, right[0])
            return
        for piece, tile in enumerate(right):
            width = tile.shape[-1]
            self.backend.multiply(total.at[:, piece * width : (piece + 1) * width], left, tile)


def _width(buffer: Buffer) -> int:
    return buffer.swizzle // buffer.itemsize
