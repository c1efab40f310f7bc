# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation as its formula says, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def normalize(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Return `x / sqrt(mean(x²) + eps) * weight` over the last axis, in float32 (float64 for float64)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps) * weight.astype(wide.dtype)
