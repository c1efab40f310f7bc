# SPDX-License-Identifier: Apache-2.0
"""Scales with room behind them, as copies need it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels._hopper.tile_shapes import padded, with_zeros
from ejkernel.kernels.quantized_matmul.quantized import Block, spread

from .plan import CHUNK


def in_chunks(scale: jax.Array) -> jax.Array:
    """Return float32 scales that copies of four along the last axis can read."""
    return with_zeros(scale.astype(jnp.float32), (*scale.shape[:-1], padded(scale.shape[-1], CHUNK)))


def each_factor(scale: jax.Array, shape: tuple[int, ...], block: Block, room: int) -> jax.Array:
    """Return float32 factors of rows or of each group's columns, with room behind them for tiles that end later."""
    each = spread(scale.astype(jnp.float32), (*shape, 1), block)[..., 0]
    added = [(0, 0)] * (len(shape) - 1) + [(0, room - shape[-1])]
    return jnp.pad(jnp.broadcast_to(each, shape), added).reshape(-1)
