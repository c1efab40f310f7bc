# SPDX-License-Identifier: Apache-2.0
"""A small language model in Flax NNX with tied embeddings, and its loss with and without logits in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ejkernel.modules import linear_cross_entropy


class Model(nnx.Module):
    """An embedding, a hidden layer, and the embedding again."""

    def __init__(self, vocabulary: int, width: int, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(vocabulary, width, rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the hidden states `[batch, length, width]`: the input of the output layer."""
        out: jax.Array = jnp.tanh(self.hidden(self.embedding(tokens)))
        return out


def loss_with_logits(model: Model, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the loss as before."""
    logits = model.embedding.attend(model(tokens))
    found: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return found


def loss(model: Model, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the same loss without logits in memory; the embedding is `[V, d]`, a transposed weight."""
    return linear_cross_entropy(model(tokens), model.embedding.embedding[...], labels, transpose_weight=True)


def model_of(vocabulary: int, width: int) -> Model:
    """Return the model."""
    return Model(vocabulary, width, nnx.Rngs(0))
