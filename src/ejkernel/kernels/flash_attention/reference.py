# SPDX-License-Identifier: Apache-2.0
"""Attention as its formula says, with the whole score matrix in float32: the truth that implementations are held to."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .common import EMPTY_ROW_LSE, Operands, Rules, accumulator, within_window


def attention(operands: Operands, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """Return the output `[batch, queries, heads, value_dim]` and the log-sum-exp `[batch, heads, queries]`.

    Both are float32 (float64 for float64 arguments), and differentiable in every way that JAX knows.
    """
    dtype = accumulator(operands.query.dtype)
    query, key, value = (x.astype(dtype) for x in operands[:3])
    repeats = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, repeats, axis=2), jnp.repeat(value, repeats, axis=2)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") * rules.scale
    if rules.soft_cap is not None:
        logits = rules.soft_cap * jnp.tanh(logits / rules.soft_cap)
    if operands.bias is not None:
        logits = logits + operands.bias.astype(dtype)
    visible = _visible(operands, rules) & (logits != -jnp.inf)
    # Two selects: the inner one keeps -inf out of the derivative of exp, the outer one keeps empty rows at zero.
    logits = jnp.where(visible, logits, 0)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, where=visible, initial=-jnp.inf))
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits - top, 0)), 0)
    total = weights.sum(axis=-1)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights / total[..., None], value, precision="highest")
    return out, jnp.where(empty, EMPTY_ROW_LSE, top[..., 0] + jnp.log(total))


def _visible(operands: Operands, rules: Rules) -> jax.Array:
    queries, keys = operands.query.shape[1], operands.key.shape[1]
    visible = jnp.ones((1, 1, queries, keys), bool)
    window = within_window(jnp.arange(queries) + keys - queries, jnp.arange(keys), rules)
    if window is not None:
        visible &= window
    if operands.attention_mask is not None:
        visible &= operands.attention_mask
    if operands.query_segments is not None and operands.key_segments is not None:
        visible &= (operands.query_segments[:, :, None] == operands.key_segments[:, None, :])[:, None]
    return visible
