# SPDX-License-Identifier: Apache-2.0
"""The reference: the formula with all logits in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import accumulator

from .common import LinearCrossEntropyCall, Statistics, counted_columns, token_losses


def statistics(
    x: jax.Array, weight: jax.Array, labels: jax.Array, bias: jax.Array | None, call: LinearCrossEntropyCall
) -> Statistics:
    """Return all statistics of the logits, `[*batch]` each; they support every JAX differentiation."""
    dtype = accumulator(x.dtype)
    matrix = weight.astype(dtype)
    s = jnp.matmul(x.astype(dtype), matrix.T if call.transpose_weight else matrix, precision="highest")
    if bias is not None:
        s = s + jax.lax.expand_dims(bias.astype(dtype), range(s.ndim - 1))
    seen = s > -jnp.inf
    # Without -inf inside, so that derivatives of unseen logits are 0 and not NaN.
    s = jnp.where(seen, s, 0) * call.logits_scale
    if call.logits_soft_cap is not None:
        s = call.logits_soft_cap * jnp.tanh(s / call.logits_soft_cap)
    lse = jax.nn.logsumexp(s, axis=-1, where=seen)
    hit = jax.lax.broadcasted_iota(jnp.int32, s.shape, s.ndim - 1) == labels[..., None]
    label = jnp.where(hit, jnp.where(seen, s, -jnp.inf), 0).sum(axis=-1)
    softmax = jnp.where(seen, jnp.exp(jnp.where(seen, s - lse[..., None], 0)), 0)
    top = jax.lax.stop_gradient(jnp.max(s, axis=-1, where=seen, initial=-jnp.inf))
    return Statistics(lse, label, jnp.where(seen, s, 0).sum(axis=-1), (softmax * s).sum(axis=-1), top)


def wanted(found: Statistics, names: tuple[str, ...]) -> Statistics:
    """Return the log-sum-exp, the label's logit, and the optional statistics `names`."""
    return Statistics(found.lse, found.label, **{name: getattr(found, name) for name in names})


def loss_and_gradients(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    factors: jax.Array,
    bias: jax.Array | None,
    call: LinearCrossEntropyCall,
) -> tuple[Statistics, dict[str, Any]]:
    """Return the statistics, and the gradients of `sum(factors * losses)` by name."""
    columns = counted_columns(bias, call.columns)

    def loss(given: dict[str, Any]) -> tuple[jax.Array, Statistics]:
        found = statistics(given["x"], given["weight"], labels, given.get("bias"), call)
        losses = token_losses(found, label_smoothing=call.label_smoothing, z_loss=call.z_loss, columns=columns)
        return (factors * losses).sum(), found

    given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    gradients, found = jax.grad(loss, has_aux=True)(given)
    return found, gradients
