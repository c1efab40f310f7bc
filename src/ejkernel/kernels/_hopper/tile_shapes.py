# SPDX-License-Identifier: Apache-2.0
"""Sizes and padding that our matrix-product kernels share; importing them does not need Pallas Mosaic GPU."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .device import Registers

STEP = 64  # of the summed axis, per step of the mainloop: one swizzle wide, so that copies can start at any row
WARPGROUPS = 2  # consumers
ROWS = 64  # of one WGMMA instruction
ROW_BYTES = 128  # of a piece of the result in the epilogue: one swizzle
PIECE = 64  # columns that an epilogue handles at once: one swizzle of 16-bit numbers
TILE = (8, 64)  # rows and columns of a tile of shared memory
ALIGNED = 64  # columns are padded to whole tiles of shared memory
REGISTERS = Registers(producer=40, consumer=232)
OVERHEAD = 2 * 1024  # bytes of shared memory for barriers and the alignment of buffers


def padded(size: int, multiple: int) -> int:
    """Return a size rounded up."""
    return -(-size // multiple) * multiple


def with_zeros(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Return an array of this shape, with zeros behind the given one."""
    added = [wanted - size for wanted, size in zip(shape, array.shape, strict=True)]
    return jnp.pad(array, [(0, more) for more in added]) if any(added) else array
