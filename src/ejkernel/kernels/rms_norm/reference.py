# SPDX-License-Identifier: Apache-2.0
"""The reference for RMS normalisation: the plain formula in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import accumulator


def normalize(x: jax.Array, weight: jax.Array | None, eps: float, offset: float = 0.0) -> jax.Array:
    """Return `x / sqrt(mean(x²) + eps) * (weight + offset)` over the last axis, in float32 (float64 for float64)."""
    wide = x.astype(accumulator(x.dtype))
    normal = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    if weight is None:
        return normal
    # The user may have disabled JAX's rank promotion.
    return normal * (weight.astype(wide.dtype) + offset).reshape((1,) * (x.ndim - 1) + weight.shape)
