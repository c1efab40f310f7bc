# SPDX-License-Identifier: Apache-2.0
"""A layer of experts in plain JAX: a router, tokens sorted by expert, gated products by group, and their sum.

Which product is used is an argument, so that ejkernel's can be set beside JAX's; nothing else differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import grouped_matmul

Weights = dict[str, jax.Array]
Gated = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a layer and its batches are: each of `tokens` goes to `chosen` of the experts."""

    tokens: int = 128
    width: int = 32
    hidden: int = 64
    experts: int = 8
    chosen: int = 2
    dtype: Any = jnp.float32


@dataclasses.dataclass(frozen=True)
class Products:
    """How experts multiply: `silu(rows @ w) * (rows @ v)` by group, and `rows @ w` by group."""

    gated: Gated
    plain: Product


def gated(rows: jax.Array, w: jax.Array, v: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return ejkernel's gated product, which has one kernel for both products where the device allows it."""
    return grouped_matmul(rows, w, sizes, activation="silu", gate=v)


def ragged_gated(rows: jax.Array, w: jax.Array, v: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return JAX's two products by group, one through the activation, times each other."""
    return jax.nn.silu(jax.lax.ragged_dot(rows, w, sizes)) * jax.lax.ragged_dot(rows, v, sizes)


PRODUCTS = {"ejkernel": Products(gated, grouped_matmul), "ragged_dot": Products(ragged_gated, jax.lax.ragged_dot)}


def initial(size: Size, key: jax.Array) -> Weights:
    """Return random weights."""
    shapes = {
        "router": (size.width, size.experts),
        "gate": (size.experts, size.width, size.hidden),
        "up": (size.experts, size.width, size.hidden),
        "down": (size.experts, size.hidden, size.width),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: (jax.random.normal(k, shape) * shape[-2] ** -0.5).astype(size.dtype)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def experts(x: jax.Array, weights: Weights, chosen: int, products: Products) -> jax.Array:
    """Return the sum of the outputs of `chosen` experts for each token, `[tokens, width]`, weighted by the router."""
    tokens, width = x.shape
    scores = jax.nn.softmax((x @ weights["router"]).astype(jnp.float32))
    share, expert = jax.lax.top_k(scores, chosen)
    share = share / share.sum(axis=1, keepdims=True)
    order = jnp.argsort(expert.reshape(-1))
    sizes = jnp.bincount(expert.reshape(-1), length=scores.shape[1])
    rows = _taken(jnp.repeat(x, chosen, axis=0), order)
    hidden = products.gated(rows, weights["gate"], weights["up"], sizes)
    out = _taken(products.plain(hidden, weights["down"], sizes), jnp.argsort(order))
    return jnp.einsum("tcw,tc->tw", out.reshape(tokens, chosen, width), share.astype(x.dtype))


def dense(x: jax.Array, weights: Weights) -> jax.Array:
    """Return the output of a layer without experts: gate, up and down are plain matrices."""
    return (jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])) @ weights["down"]


def _taken(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Return a permutation of the rows. Rows do not repeat, so the gradient is a permutation too, not a sum."""
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")
