# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation in plain JAX: all rows in one pass, which XLA fuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._numbers import accumulator
from ejkernel.kernels._row_norms.common import RESIDUALS
from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.implementation import Implementation

from .operation import LayerNormCall


class Xla(Implementation[LayerNormCall]):
    """Plain JAX: supports every call on every platform."""

    name = "xla"
    residuals = RESIDUALS
    differentiable = True
    features = frozenset(("residual",))

    def forward(self, call: LayerNormCall, /, *args: Any, params: Any) -> tuple[Any, Any]:
        """Return the output, and mean and scale of every row."""
        x, weight, bias, *residual = args
        x = x + residual[0] if residual else x
        wide = x.astype(accumulator(x.dtype))
        mean = wide.mean(axis=-1, keepdims=True)
        # Two steps: the mean of squares minus the square of the mean loses digits if the mean is large.
        centred = wide - mean
        scale = lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + call.eps)
        out = (centred * scale * _as_row(weight, wide) + _as_row(bias, wide)).astype(x.dtype)
        return ((out, x) if residual else out), (mean[..., 0], scale[..., 0])

    def backward(
        self,
        call: LayerNormCall,
        residuals: Any,
        out: Any,
        cotangents: tuple[Any, ...],
        /,
        *args: Any,
        params: Any,
    ) -> tuple[jax.Array, ...]:
        """Return the gradients of `x`, the weight, the bias, and the residual."""
        x, weight, bias, *residual = args
        # The forward returned the sum as its second result.
        x = out[1] if residual else x
        weight, x, mean, scale, dout = unify_varying((weight, x, *residuals, cotangents[0]))
        wide, dout = x.astype(scale.dtype), dout.astype(scale.dtype)
        normal = (wide - mean[..., None]) * scale[..., None]
        dnormal = dout * _as_row(weight, dout)
        along = normal * jnp.mean(dnormal * normal, axis=-1, keepdims=True)
        dx = scale[..., None] * (dnormal - dnormal.mean(axis=-1, keepdims=True) - along)
        rows = tuple(range(x.ndim - 1))
        dweight, dbias = (dout * normal).sum(rows).astype(weight.dtype), dout.sum(rows).astype(bias.dtype)
        if not residual:
            return dx.astype(x.dtype), dweight, dbias
        # Add the cotangent of the sum, which is the second result.
        dx = dx.astype(x.dtype) + cotangents[1]
        return dx, dweight, dbias, dx


def _as_row(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Return a vector with the rank and dtype of `like`."""
    # The user may have disabled JAX's rank promotion.
    return vector.astype(like.dtype).reshape((1,) * (like.ndim - 1) + vector.shape)
