# SPDX-License-Identifier: Apache-2.0
"""A small language model in Equinox with a separate output layer, and its loss with and without logits."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp

from ejkernel.modules import linear_cross_entropy


class Model(eqx.Module):
    """An embedding, a hidden layer, and an output layer."""

    embedding: eqx.nn.Embedding
    hidden: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, vocabulary: int, width: int) -> None:
        keys = jax.random.split(jax.random.key(0), 3)
        self.embedding = eqx.nn.Embedding(vocabulary, width, key=keys[0])
        self.hidden = eqx.nn.Linear(width, width, use_bias=False, key=keys[1])
        self.head = eqx.nn.Linear(width, vocabulary, use_bias=False, key=keys[2])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the hidden states `[batch, length, width]`: the input of the output layer."""
        return jnp.tanh(self.embedding.weight[tokens] @ self.hidden.weight.T)


def loss_with_logits(model: Model, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the loss as before; this is `optax.softmax_cross_entropy_with_integer_labels(logits, labels)`."""
    logits = model(tokens) @ model.head.weight.T
    at_labels = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - at_labels).mean()


def loss(model: Model, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the same loss without logits in memory. Equinox stores `[V, d]`, so the weight is transposed."""
    return linear_cross_entropy(model(tokens), model.head.weight, labels, transpose_weight=True)


def model_of(vocabulary: int, width: int) -> Model:
    """Return the model."""
    return Model(vocabulary, width)
