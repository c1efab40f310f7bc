# SPDX-License-Identifier: Apache-2.0
"""A transformer in Equinox with ejkernel's attention and norms; its code does not mention devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from parts import Attention, Size, descended, next_token_loss, placed

from ejkernel.modules import rms_norm


def _matrix(key: jax.Array, rows: int, columns: int, dtype: Any) -> jax.Array:
    scale: float = rows**-0.5
    return (jax.random.normal(key, (rows, columns)) * scale).astype(dtype)


class Block(eqx.Module):
    """Attention and a perceptron, each after a norm and beside a residual."""

    to_query: jax.Array
    to_key: jax.Array
    to_value: jax.Array
    from_heads: jax.Array
    to_hidden: jax.Array
    from_hidden: jax.Array
    norms: tuple[jax.Array, jax.Array]
    head_dim: int = eqx.field(static=True)
    attention: Attention = eqx.field(static=True)

    def __init__(self, size: Size, attention: Attention, key: jax.Array) -> None:
        keys = jax.random.split(key, 6)
        grouped = size.groups * size.head_dim
        width, hidden, dtype = size.width, 4 * size.width, size.dtype
        self.to_query = _matrix(keys[0], width, width, dtype)
        self.to_key = _matrix(keys[1], width, grouped, dtype)
        self.to_value = _matrix(keys[2], width, grouped, dtype)
        self.from_heads = _matrix(keys[3], width, width, dtype)
        self.to_hidden = _matrix(keys[4], width, hidden, dtype)
        self.from_hidden = _matrix(keys[5], hidden, width, dtype)
        self.norms = (jnp.ones(width, dtype), jnp.ones(width, dtype))
        self.head_dim, self.attention = size.head_dim, attention

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute it for `[batch, length, width]`."""
        hidden = rms_norm(x, self.norms[0])
        query, key, value = (self._heads(hidden @ matrix) for matrix in (self.to_query, self.to_key, self.to_value))
        x = x + self.attention(query, key, value).reshape(x.shape) @ self.from_heads
        return x + jax.nn.gelu(rms_norm(x, self.norms[1]) @ self.to_hidden) @ self.from_hidden

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)


class Transformer(eqx.Module):
    """Blocks between an embedding and its transpose."""

    embedding: jax.Array
    blocks: list[Block]
    norm: jax.Array

    def __init__(self, size: Size, attention: Attention, key: jax.Array) -> None:
        first, *rest = jax.random.split(key, size.layers + 1)
        self.embedding = _matrix(first, size.vocabulary, size.width, size.dtype)
        self.blocks = [Block(size, attention, k) for k in rest]
        self.norm = jnp.ones(size.width, size.dtype)

    def __call__(self, batch: jax.Array) -> jax.Array:
        """Return the logits of the next tokens."""
        x = self.embedding[batch]
        for block in self.blocks:
            x = block(x)
        return rms_norm(x, self.norm) @ self.embedding.T


def training(size: Size, attention: Attention, mesh: Mesh) -> tuple[Callable[..., Any], Any]:
    """Return a step, from parameters and tokens to parameters and loss, and the first parameters."""
    parameters, static = eqx.partition(Transformer(size, attention, jax.random.key(0)), eqx.is_array)

    @jax.jit
    def step(parameters: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        def loss(parameters: Any) -> jax.Array:
            return next_token_loss(eqx.combine(parameters, static)(batch), batch)

        value, gradients = jax.value_and_grad(loss)(parameters)
        return descended(parameters, gradients), value

    return step, placed(parameters, mesh)
