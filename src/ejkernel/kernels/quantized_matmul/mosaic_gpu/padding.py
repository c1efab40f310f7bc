# SPDX-License-Identifier: Apache-2.0
"""Arrays with room behind them, as copies of whole tiles need it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ejkernel.kernels.quantized_matmul.quantized import Block, spread


def with_zeros(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Return an array with zeros behind it."""
    added = [(0, wanted - size) for wanted, size in zip(shape, array.shape, strict=True)]
    return jnp.pad(array, added) if any(more for _, more in added) else array


def each_factor(scale: jax.Array, shape: tuple[int, ...], block: Block, room: int) -> jax.Array:
    """Return float32 factors of rows or of each group's columns, with room behind them for tiles that end later."""
    each = spread(scale.astype(jnp.float32), (*shape, 1), block)[..., 0]
    added = [(0, 0)] * (len(shape) - 1) + [(0, room - shape[-1])]
    return jnp.pad(jnp.broadcast_to(each, shape), added).reshape(-1)
