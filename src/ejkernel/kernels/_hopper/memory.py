# SPDX-License-Identifier: Apache-2.0
"""Types of shared memory."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # its annotations differ between versions, and few of them accept a slice of a reference

SWIZZLE = 128  # bytes, the widest


def tiled(shape: tuple[int, ...], dtype: Any, swizzle: int = SWIZZLE) -> Any:
    """Return shared memory in tiles of eight rows, one swizzle wide: the layout that WGMMA and TMA take."""
    dtype = jnp.dtype(dtype)
    transforms = (plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return swizzled shared memory without tiles.

    If the last axis is one swizzle wide, every element has the same address as in `tiled`. TMA copies of this view may
    then start at any row in global memory; copies of tiles must start at multiples of eight.
    """
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=(plgpu.SwizzleTransform(SWIZZLE),))
