# SPDX-License-Identifier: Apache-2.0
"""A model in Flax NNX with Gemma's architecture, whose attention is replaced by `flash_attention` in five lines.

    python examples/gemma/gemma.py [--seq N]

`Attention` computes the scores as an array, as Gemma in the examples of google/flax does. `Fused` replaces the method
`attend`. Layers alternate between a sliding window and global attention; heads share keys; logits are capped.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from before_after import compare

from ejkernel.modules import flash_attention


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of the model; `window` holds for every second layer."""

    layers: int = 2
    width: int = 256
    heads: int = 4
    groups: int = 1
    head_dim: int = 64
    hidden: int = 1024
    vocabulary: int = 4096
    window: int = 256
    cap: float = 50.0


class Norm(nnx.Module):
    """Root-mean-square norm, with weights stored around zero."""

    def __init__(self, width: int) -> None:
        self.weight = nnx.Param(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        out: jax.Array = x * jax.lax.rsqrt(mean + 1e-6) * (1 + self.weight[...])
        return out


class Attention(nnx.Module):
    """Causal attention with grouped heads, rotated positions and capped logits; `window=None` is global."""

    def __init__(self, size: Size, window: int | None, rngs: nnx.Rngs) -> None:
        def weights(*shape: int) -> Any:
            return nnx.Param(rngs.params.normal(shape) * size.width**-0.5)

        self.to_query = weights(size.heads, size.width, size.head_dim)
        self.to_key_value = weights(2, size.groups, size.width, size.head_dim)
        self.from_heads = weights(size.heads, size.head_dim, size.width)
        self.window, self.cap, self.head_dim = window, size.cap, size.head_dim

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute it for `[batch, length, width]`."""
        query = rotated(jnp.einsum("btd,ndh->btnh", x, self.to_query[...])) * self.head_dim**-0.5
        key, value = jnp.einsum("bsd,ckdh->cbskh", x, self.to_key_value[...])
        return jnp.einsum("btnh,nhd->btd", self.attend(query, rotated(key), value), self.from_heads[...])

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """Return the attention of `[batch, length, heads, head_dim]`, with all scores in memory."""
        batch, length, heads, dim = query.shape
        grouped = query.reshape(batch, length, key.shape[2], -1, dim)
        logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key)
        logits = jnp.tanh(logits / self.cap) * self.cap
        distance = jnp.arange(length)[:, None] - jnp.arange(length)
        visible = (distance >= 0) & (distance <= (length if self.window is None else self.window))
        weights = jax.nn.softmax(jnp.where(visible, logits, -2.3819763e38), axis=-1)
        return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(batch, length, heads, dim)


class Fused(Attention):
    """The same attention, without the scores in memory."""

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """Return the attention of `[batch, length, heads, head_dim]`."""
        return flash_attention(
            query, key, value, causal=True, softmax_scale=1.0,
            sliding_window=self.window, logits_soft_cap=self.cap,
        )  # fmt: skip


class Block(nnx.Module):
    """Attention and a gated perceptron, each between two norms and beside a residual."""

    def __init__(self, size: Size, attention: Attention, rngs: nnx.Rngs) -> None:
        def linear(rows: int, columns: int) -> nnx.Linear:
            return nnx.Linear(rows, columns, use_bias=False, rngs=rngs)

        self.attention = attention
        self.gate, self.up = linear(size.width, size.hidden), linear(size.width, size.hidden)
        self.down = linear(size.hidden, size.width)
        self.norms = nnx.List([Norm(size.width) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute it for `[batch, length, width]`."""
        before, after, before_hidden, after_hidden = self.norms
        x = x + after(self.attention(before(x)))
        hidden = before_hidden(x)
        out: jax.Array = x + after_hidden(self.down(nnx.gelu(self.gate(hidden)) * self.up(hidden)))
        return out


class Gemma(nnx.Module):
    """Blocks between an embedding and its transpose; `attention` is `Attention` or `Fused`."""

    def __init__(self, size: Size, attention: type[Attention], rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(size.vocabulary, size.width, rngs=rngs)
        windows = [None if layer % 2 else size.window for layer in range(size.layers)]
        self.blocks = nnx.List([Block(size, attention(size, window, rngs), rngs) for window in windows])
        self.norm = Norm(size.width)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of the next tokens."""
        x = self.embedding(tokens) * self.embedding.features**0.5
        for block in self.blocks:
            x = block(x)
        logits: jax.Array = self.embedding.attend(self.norm(x))
        return logits


def rotated(x: jax.Array) -> jax.Array:
    """Rotate the halves of each head by its position."""
    length, dim = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] * 10_000.0 ** -(2 * jnp.arange(dim // 2) / dim)
    sine, cosine = (wave(angles)[:, None, :].astype(x.dtype) for wave in (jnp.sin, jnp.cos))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def training_step(
    attention: type[Attention] = Fused, size: Size | None = None, *, batch: int = 1, seq: int = 1024
) -> tuple[Callable[..., Any], tuple[Any, jax.Array]]:
    """Return a step, from parameters and tokens to the loss and its gradients, and its arguments."""
    size = size or Size()
    definition, parameters = nnx.split(Gemma(size, attention, nnx.Rngs(0)), nnx.Param)

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(definition, parameters)(tokens)
        scores = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    tokens = jax.random.randint(jax.random.key(1), (batch, seq), 0, size.vocabulary)
    return jax.jit(jax.value_and_grad(loss)), (parameters, tokens)


def main() -> None:
    """Print whether both models agree, and the memory of their temporary arrays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=1024)
    given = parser.parse_args()
    steps = [training_step(attention, seq=given.seq) for attention in (Attention, Fused)]
    compare(steps, ("with all scores", "with flash_attention"), "the models")


if __name__ == "__main__":
    main()
