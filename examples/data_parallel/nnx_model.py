# SPDX-License-Identifier: Apache-2.0
"""A transformer in Flax NNX with ejkernel's attention and norms; its code does not mention devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from parts import Attention, Size, descended, next_token_loss, placed

from ejkernel.modules import rms_norm


class Norm(nnx.Module):
    """`rms_norm` with its weight."""

    def __init__(self, size: Size) -> None:
        self.weight = nnx.Param(jnp.ones(size.width, size.dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        return rms_norm(x, self.weight[...])


class Block(nnx.Module):
    """Attention and a perceptron, each after a norm and beside a residual."""

    def __init__(self, size: Size, attention: Attention, rngs: nnx.Rngs) -> None:
        def linear(rows: int, columns: int) -> nnx.Linear:
            return nnx.Linear(rows, columns, use_bias=False, dtype=size.dtype, param_dtype=size.dtype, rngs=rngs)

        grouped = size.groups * size.head_dim
        self.to_query, self.to_key, self.to_value = (linear(size.width, n) for n in (size.width, grouped, grouped))
        self.from_heads = linear(size.width, size.width)
        self.to_hidden, self.from_hidden = linear(size.width, 4 * size.width), linear(4 * size.width, size.width)
        self.first, self.second = Norm(size), Norm(size)
        self.head_dim, self.attention = size.head_dim, attention

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute it for `[batch, length, width]`."""
        hidden = self.first(x)
        query, key, value = (self._heads(layer(hidden)) for layer in (self.to_query, self.to_key, self.to_value))
        x = x + self.from_heads(self.attention(query, key, value).reshape(x.shape))
        out: jax.Array = x + self.from_hidden(nnx.gelu(self.to_hidden(self.second(x))))
        return out

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)


class Transformer(nnx.Module):
    """Blocks between an embedding and its transpose."""

    def __init__(self, size: Size, attention: Attention, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(size.vocabulary, size.width, dtype=size.dtype, param_dtype=size.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(size, attention, rngs) for _ in range(size.layers)])
        self.norm = Norm(size)

    def __call__(self, batch: jax.Array) -> jax.Array:
        """Return the logits of the next tokens."""
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        logits: jax.Array = self.embedding.attend(self.norm(x))
        return logits


def training(size: Size, attention: Attention, mesh: Mesh) -> tuple[Callable[..., Any], Any]:
    """Return a step, from parameters and tokens to parameters and loss, and the first parameters."""
    definition, parameters = nnx.split(Transformer(size, attention, nnx.Rngs(0)), nnx.Param)

    @jax.jit
    def step(parameters: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        def loss(parameters: Any) -> jax.Array:
            return next_token_loss(nnx.merge(definition, parameters)(batch), batch)

        value, gradients = jax.value_and_grad(loss)(parameters)
        return descended(parameters, gradients), value

    return step, placed(parameters, mesh)
