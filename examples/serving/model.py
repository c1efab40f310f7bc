# SPDX-License-Identifier: Apache-2.0
"""A small decoder in plain JAX: one function for a whole text, and one for a step with a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.modules import PagedPlan, append_to_pages, flash_attention, paged_attention, paged_plan, rms_norm


class Model(NamedTuple):
    """Sizes of the decoder."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocabulary: int = 256
    dtype: str = "float32"


class Batch(NamedTuple):
    """The new tokens of a step; see `paged_attention`."""

    tokens: Any  # [tokens]
    positions: Any  # [tokens]
    page_table: Any  # [sequences, pages]
    query_offsets: Any  # [sequences + 1]
    kv_lengths: Any  # [sequences]


Attend = Callable[[jax.Array, jax.Array, Batch, PagedPlan], jax.Array]


def parameters(model: Model, seed: int = 0) -> dict[str, Any]:
    """Return random weights."""
    heads, kv_heads = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = {
        "query": (model.width, heads),
        "key": (model.width, kv_heads),
        "value": (model.width, kv_heads),
        "out": (heads, model.width),
        "up": (model.width, 4 * model.width),
        "down": (4 * model.width, model.width),
    }
    keys = iter(jax.random.split(jax.random.key(seed), 1 + model.layers * len(shapes)))

    def normal(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(jax.random.normal(next(keys), shape) * shape[0] ** -0.5, model.dtype)

    layers = [{name: normal(shape) for name, shape in shapes.items()} for _ in range(model.layers)]
    return {"embedding": normal((model.vocabulary, model.width)) * 16, "layers": layers}


def caches(model: Model, pages: int, page_size: int) -> list[jax.Array]:
    """Return an empty cache for each layer."""
    shape = (pages, page_size, model.kv_heads, 2, model.head_dim)
    return [jnp.zeros(shape, model.dtype) for _ in range(model.layers)]


def whole(model: Model, weights: Any, tokens: jax.Array) -> jax.Array:
    """Return the most likely token after each token of one text, computed without a cache."""
    x, positions = weights["embedding"][tokens], jnp.arange(len(tokens))
    for layer in weights["layers"]:
        query, key, value = _projected(model, layer, x, positions)
        out = flash_attention(query[None], key[None], value[None], causal=True)[0]
        x = _rest_of_layer(layer, x, out)
    return _next_tokens(weights, x)


def paged(q: jax.Array, cache: jax.Array, batch: Batch, plan: PagedPlan) -> jax.Array:
    """Attend to a paged cache."""
    return paged_attention(q, cache, *batch[2:], plan=plan)


def gathered(
    q: jax.Array, cache: jax.Array, batch: Batch, plan: PagedPlan, implementation: Literal["xla", "cudnn"] | None = None
) -> jax.Array:
    """Attend to a padded copy of all pages with `jax.nn`; only for one new token of each sequence."""
    both = cache[batch.page_table].reshape(batch.page_table.shape[0], -1, *cache.shape[2:])
    queries = jnp.diff(batch.query_offsets)
    out = jax.nn.dot_product_attention(
        q[:, None],
        both[:, :, :, 0],
        both[:, :, :, 1],
        query_seq_lengths=queries,
        key_value_seq_lengths=batch.kv_lengths,
        implementation=implementation,
    )
    return out[:, 0]


def step(
    model: Model, weights: Any, cached: list[jax.Array], batch: Batch, attend: Attend = paged
) -> tuple[jax.Array, list[jax.Array]]:
    """Return each sequence's most likely next token, and the caches with the new tokens. Donate the caches."""
    plan = paged_plan(
        batch.query_offsets,
        batch.kv_lengths,
        heads=model.heads,
        kv_heads=model.kv_heads,
        page_size=cached[0].shape[1],
        tokens=len(batch.tokens),
        pages=len(cached[0]),
        page_table=batch.page_table,
    )
    x, written = weights["embedding"][batch.tokens], []
    for layer, cache in zip(weights["layers"], cached, strict=True):
        query, key, value = _projected(model, layer, x, batch.positions)
        written.append(append_to_pages(cache, key, value, *batch[2:]))
        x = _rest_of_layer(layer, x, attend(query, written[-1], batch, plan))
    last = jnp.maximum(batch.query_offsets[1:] - 1, 0)
    return _next_tokens(weights, x[last]), written


def _projected(model: Model, layer: Any, x: jax.Array, positions: jax.Array) -> list[jax.Array]:
    normed = rms_norm(x)
    query, key, value = (
        (normed @ layer[name]).reshape(len(x), -1, model.head_dim) for name in ("query", "key", "value")
    )
    return [_rotated(query, positions), _rotated(key, positions), value]


def _rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [left * jnp.cos(angles) - right * jnp.sin(angles), right * jnp.cos(angles) + left * jnp.sin(angles)]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _rest_of_layer(layer: Any, x: jax.Array, attended: jax.Array) -> jax.Array:
    x = x + attended.reshape(len(x), -1) @ layer["out"]
    out: jax.Array = x + jax.nn.gelu(rms_norm(x) @ layer["up"]) @ layer["down"]
    return out


def _next_tokens(weights: Any, x: jax.Array) -> jax.Array:
    return jnp.argmax(rms_norm(x) @ weights["embedding"].T, axis=-1)
