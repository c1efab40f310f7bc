# SPDX-License-Identifier: Apache-2.0
"""The reference for paged attention: one token after the other, with all of its keys, in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._numbers import accumulator

from .common import Operands, PagedCall, valid, within_cache


def attention(call: PagedCall, args: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the output `[tokens, heads, value_dim]` and the log-sum-exp `[tokens, heads]`, both float32."""
    operands = valid(call, args)
    tokens = jnp.arange(call.q[0], dtype=jnp.int32)
    if not call.table[0] or not call.q[0]:
        return jnp.zeros((*call.q[:2], call.out_dim)), jnp.full(call.q[:2], -jnp.inf)
    found: tuple[jax.Array, jax.Array] = lax.map(lambda token: _of_token(call, operands, token), tokens)
    return found


def _of_token(call: PagedCall, operands: Operands, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    offsets, lengths = operands.query_offsets, operands.kv_lengths
    sequence = jnp.clip(jnp.searchsorted(offsets, token, side="right") - 1, 0, call.table[0] - 1)
    key, value = _cached(call, operands, sequence)
    position = lengths[sequence] - (offsets[sequence + 1] - token)
    at = jnp.arange(key.shape[0])
    visible = (at <= position) & (at < lengths[sequence]) & (token < offsets[-1])
    if call.window is not None:
        visible &= at >= position - call.window
    dtype = accumulator(call.dtype)
    query = operands.q[token].astype(dtype).reshape(key.shape[1], call.group, -1)
    logits = jnp.einsum("kgd,skd->kgs", query, key, precision="highest").reshape(call.q[1], -1) * call.scale
    if call.soft_cap is not None:
        logits = call.soft_cap * jnp.tanh(logits / call.soft_cap)
    logits = jnp.where(visible, logits, -jnp.inf)
    if operands.sinks is not None:
        sink = jnp.where(token < offsets[-1], operands.sinks.astype(dtype), -jnp.inf)
        logits = jnp.concatenate([logits, sink[:, None]], axis=1)
    lse = jax.nn.logsumexp(logits, axis=1)
    weights = jnp.where(lse[:, None] == -jnp.inf, 0, jnp.exp(logits - lse[:, None]))[:, : key.shape[0]]
    value = jnp.where(visible[:, None, None], value, 0)  # a weight of zero does not cancel a NaN
    weights = weights.reshape(key.shape[1], call.group, -1)
    out = jnp.einsum("kgs,skd->kgd", weights, value, precision="highest")
    return out.reshape(call.q[1], -1), lse


def _cached(call: PagedCall, operands: Operands, sequence: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the keys and values of a sequence, `[length, kv_heads, head_dim]`, with their scales."""
    dtype = accumulator(call.dtype)
    pages = operands.kv_pages[within_cache(call, operands.page_table[sequence])].astype(dtype)
    both = pages.reshape(-1, *pages.shape[2:])
    key, value = both[:, :, 0], both[:, :, -1]
    if operands.k_scale is not None:
        key = key * operands.k_scale[:, None].astype(dtype)
    if operands.v_scale is not None:
        value = value * operands.v_scale[:, None].astype(dtype)
    return key, value if call.value_dim is None else key[..., : call.value_dim]
