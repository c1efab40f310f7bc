# SPDX-License-Identifier: Apache-2.0
"""Epilogues of our matrix-product kernels, in pieces: 64 rows, those of a warpgroup, and 64 columns.

With whole tiles too many values would be live at once, and stores would not overlap with arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .launch import plgpu
from .tile_shapes import PIECE, ROWS


def piece_of(tile: Any, index: int) -> Any:
    """Return the columns of a tile that belong to a piece."""
    return tile[:, index * PIECE : (index + 1) * PIECE]


def load_rows(numbers: Any, *at: Any) -> Any:
    """Return the numbers of 64 rows in global memory; the last index of `at` is the first row."""
    rows = numbers.at[(*at[:-1], pl.ds(at[-1], ROWS))]
    return plgpu.load(rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def across(numbers: Any) -> Any:
    """Return numbers per row, broadcast over the columns of a piece."""
    return lax.broadcast_in_dim(numbers, (ROWS, PIECE), [0])


def numbered(axis: int) -> Any:
    """Return the number of each element's row (axis 0) or column (axis 1) in a piece."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, PIECE), axis, layout=plgpu.Layout.WGMMA)


def store_piece(
    values: Any, buffers: Any, at: tuple[Any, int], copy: Callable[[Any], None], *, copied: Any = None
) -> None:
    """Copy a piece to global memory, through the next staging buffer of this warpgroup.

    Args:
        values: The piece, in the dtype of the buffers.
        buffers: The staging buffers of all warpgroups. The number per warpgroup divides the pieces of a tile.
        at: The numbers of this warpgroup, and of the piece among those of a tile.
        copy: Starts the copy of a buffer to global memory.
        copied: The view of the buffers that `copy` takes, if it is another one.
    """
    warpgroup, index = at
    count = buffers.shape[1]
    place = warpgroup, index % count
    # The copy that last read this buffer is the oldest of `count` copies.
    plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)
    buffers.at[place][...] = values
    plgpu.commit_smem()
    copy((buffers if copied is None else copied).at[place])
