# SPDX-License-Identifier: Apache-2.0
"""The reference for attention: the formula with the full score matrix in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .common import EMPTY_ROW_LSE, Operands, Rules, accumulator, kept, within_window


def attention(operands: Operands, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """Return the output `[batch, queries, heads, value_dim]` and the log-sum-exp `[batch, heads, queries]`.

    Both are float32 (float64 for float64 arguments) and support every JAX differentiation.
    """
    dtype = accumulator(operands.query.dtype)
    query, key, value = (x.astype(dtype) for x in operands[:3])
    repeats = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, repeats, axis=2), jnp.repeat(value, repeats, axis=2)
    logits = _logits(query, key, operands, rules)
    # a bias of -inf hides a key like a mask
    visible = _visible(operands, rules) & (logits != -jnp.inf)
    # two selects: the inner one keeps -inf out of the derivative of exp, the outer one keeps empty rows at zero
    logits = jnp.where(visible, logits, 0)
    top = jnp.max(logits, axis=-1, keepdims=True, where=visible, initial=-jnp.inf)
    sink = None if operands.sinks is None else operands.sinks.astype(dtype)[None, :, None, None]
    # the result does not depend on the subtracted maximum
    top = jax.lax.stop_gradient(top if sink is None else jnp.maximum(top, sink))
    top = jnp.where(top == -jnp.inf, 0, top)  # a row without visible keys and without a sink
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits - top, 0)), 0)
    total = weights.sum(axis=-1)
    if sink is not None:
        total = total + jnp.exp(sink - top)[..., 0]
    empty = total == 0
    total = jnp.where(empty, 1, total)
    weights = _after_dropout(weights / total[..., None], operands, rules)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, value, precision="highest")
    return out, jnp.where(empty, EMPTY_ROW_LSE, top[..., 0] + jnp.log(total))


def _logits(query: jax.Array, key: jax.Array, operands: Operands, rules: Rules) -> jax.Array:
    def capped(logits: jax.Array) -> jax.Array:
        return logits if rules.soft_cap is None else rules.soft_cap * jnp.tanh(logits / rules.soft_cap)

    # by default GPUs and TPUs may round the operands of float32 products
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") * rules.scale
    if operands.bias is None:
        return capped(logits)
    bias = operands.bias.astype(logits.dtype)
    if not rules.cap_after_bias:
        return capped(logits) + bias
    # -inf hides a key, as without the cap
    return jnp.where(bias == -jnp.inf, bias, capped(logits + jnp.where(bias == -jnp.inf, 0, bias)))


def _after_dropout(weights: jax.Array, operands: Operands, rules: Rules) -> jax.Array:
    if operands.dropout_key is None:
        return weights
    batch, heads, queries, keys = weights.shape
    rows = jnp.arange(batch * heads).reshape(batch, heads)
    keep = kept(operands.dropout_key, rows, jnp.arange(queries), jnp.arange(keys), rules)
    return jnp.where(keep, weights / (1 - rules.dropout_rate), 0)


def _visible(operands: Operands, rules: Rules) -> jax.Array:
    queries, keys = operands.query.shape[1], operands.key.shape[1]
    visible = jnp.ones((1, 1, queries, keys), bool)
    window = within_window(jnp.arange(queries) + keys - queries, jnp.arange(keys), rules)
    if window is not None:
        visible &= window[None, None]
    if operands.attention_mask is not None:
        visible &= operands.attention_mask
    if operands.query_segments is not None and operands.key_segments is not None:
        visible &= (operands.query_segments[:, :, None] == operands.key_segments[:, None, :])[:, None]
    if operands.query_lengths is not None:
        visible &= (jnp.arange(queries)[None] < operands.query_lengths[:, None])[:, None, :, None]
    if operands.key_lengths is not None:
        visible &= (jnp.arange(keys)[None] < operands.key_lengths[:, None])[:, None, None]
    return visible
