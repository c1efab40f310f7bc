# SPDX-License-Identifier: Apache-2.0
"""A word-level language model that trains on packed documents: ordinary JAX that calls three ejkernel operations.

Documents of all lengths share a sequence, and no document sees another. Nothing in this file knows about
configurations; `ejkernel tune train:training_step` finds the calls by itself. `PLAIN` and `CUDNN` compute the same
three operations with JAX alone, as baselines.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import flash_attention, linear_cross_entropy, rms_norm

Params = dict[str, Any]


class Operations(NamedTuple):
    """The three operations that a model is made with.

    Attributes:
        attention: Of query, key, value, the number of every position's document, and the soft cap of the logits.
        norm: Of activations and weight.
        loss: Mean cross entropy of activations, the embedding, the next words (negative ones do not count), and the
            scale of the logits.
    """

    attention: Callable[..., jax.Array]
    norm: Callable[..., jax.Array]
    loss: Callable[..., jax.Array]


def _ejkernel_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array, cap: float | None
) -> jax.Array:
    return flash_attention(query, key, value, causal=True, segment_ids=documents, logits_soft_cap=cap)


def _plain_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array, cap: float | None
) -> jax.Array:
    mask = documents[:, None, :, None] == documents[:, None, None, :]
    if cap is None:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)
    mask = mask & jnp.tri(query.shape[1], dtype=bool)  # `dot_product_attention` has no cap, so it is written out
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask, cap * jnp.tanh(scores / cap), -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)


def _cudnn_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array, cap: float | None
) -> jax.Array:
    if cap is not None:
        raise NotImplementedError("cuDNN's attention has no soft cap")
    mask = documents[:, None, :, None] == documents[:, None, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation="cudnn")


def _plain_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale * weight).astype(x.dtype)


def _ejkernel_loss(x: jax.Array, embedding: jax.Array, labels: jax.Array, scale: float) -> jax.Array:
    loss: jax.Array = linear_cross_entropy(x, embedding, labels, transpose_weight=True, logits_scale=scale)
    return loss


def _plain_loss(x: jax.Array, embedding: jax.Array, labels: jax.Array, scale: float) -> jax.Array:
    logits = jnp.einsum("bsd,vd->bsv", x, embedding, preferred_element_type=jnp.float32) * scale
    counted = labels >= 0
    at_labels = jnp.take_along_axis(logits, jnp.where(counted, labels, 0)[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - at_labels
    return jnp.sum(losses, where=counted) / jnp.sum(counted)


EJKERNEL = Operations(attention=_ejkernel_attention, norm=rms_norm, loss=_ejkernel_loss)
PLAIN = Operations(attention=_plain_attention, norm=_plain_norm, loss=_plain_loss)
CUDNN = Operations(attention=_cudnn_attention, norm=_plain_norm, loss=_plain_loss)  # NVIDIA GPUs only


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of the model and of one batch.

    Attributes:
        layers: Number of blocks.
        width: Length of one token's vector.
        heads: Attention heads; `width` is a multiple of it.
        groups: Heads of keys and values; `heads` is a multiple of it, and `None` means as many.
        batch: Sequences a step.
        seq: Words a sequence.
        longest: Words after which a document is cut.
        vocabulary: Rows of the embedding and of the output layer, which share it; the texts have about 4,300 words, of
            which the rarest share the last row.
        dtype: Dtype of the blocks' arithmetic; parameters and the loss are float32.
        cap: Soft cap of the attention's logits.
    """

    layers: int
    width: int
    heads: int
    batch: int
    seq: int
    longest: int
    vocabulary: int
    dtype: Any
    groups: int | None = None
    cap: float | None = None

    @property
    def head_counts(self) -> tuple[int, int, int]:
        """Heads of query, key and value."""
        groups = self.groups or self.heads
        return self.heads, groups, groups

    @property
    def tokens(self) -> int:
        """Words of one step."""
        return self.batch * self.seq


SMALL = Model(layers=2, width=256, heads=4, batch=1, seq=2048, longest=512, vocabulary=2048, dtype=jnp.float32)
LARGE = Model(layers=8, width=1024, heads=8, batch=4, seq=8192, longest=2048, vocabulary=50_304, dtype=jnp.bfloat16)
# For accelerators with less memory than plain JAX needs for LARGE: (batch, seq), the largest first.
SIZES = ((4, 8192), (2, 8192), (1, 8192), (1, 4096), (1, 2048))
# Plain JAX keeps the logits of all layers for the backward: 6.5 bytes for each, measured on an H200.
BYTES_PER_LOGIT = 7


class Batch(NamedTuple):
    """Sequences of one step, `[batch, seq + 1]` each.

    Attributes:
        tokens: Numbers of words.
        documents: The number of every word's document in its sequence.
    """

    tokens: jax.Array
    documents: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The state of training: parameters, Adam's two moments and the number of steps so far."""

    params: Params
    mean: Params
    square: Params
    count: jax.Array


def default_model() -> Model:
    """Return the sizes for this machine: `SMALL` on a CPU; on an accelerator, sizes with which plain JAX fits."""
    if jax.default_backend() == "cpu":
        return SMALL
    return fitting_model(memory_limit() or 0)


def memory_limit() -> int | None:
    """Return how many bytes JAX may use on the device; `None` if it does not say so."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def fitting_model(limit: int) -> Model:
    """Return `LARGE` with the first of `SIZES` that leaves 30 % of `limit` bytes free, or else the last one."""
    for batch, seq in SIZES:
        model = dataclasses.replace(LARGE, batch=batch, seq=seq)
        if model.batch * model.heads * model.seq**2 * model.layers * BYTES_PER_LOGIT <= 0.7 * limit:
            break
    return model


@functools.cache
def texts() -> list[np.ndarray]:
    """Return the words of the pages of `help()`, which come with every Python, numbered by frequency."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    pages = [re.findall(r"\w+| +|[^\w ]", topics[name]) for name in sorted(topics)]
    counts = collections.Counter(word for page in pages for word in page)
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common())}
    return [np.array([numbers[word] for word in page], np.int32) for page in pages]


def batch_of(model: Model, index: int) -> Batch:
    """Return batch number `index`, the same in every run."""
    rng = np.random.default_rng(index)
    tokens = np.zeros((model.batch, model.seq + 1), np.int32)
    documents = np.zeros_like(tokens)
    for row in range(model.batch):
        end = number = 0
        while end <= model.seq:
            text = texts()[rng.integers(len(texts()))][: model.longest][: model.seq + 1 - end]
            tokens[row, end : end + len(text)] = np.minimum(text, model.vocabulary - 1)  # rare words share a number
            documents[row, end : end + len(text)] = number
            end, number = end + len(text), number + 1
    return Batch(jnp.asarray(tokens), jnp.asarray(documents))


def initial_state(model: Model, seed: int = 0) -> State:
    """Return fresh parameters and zero moments."""
    keys = iter(jax.random.split(jax.random.key(seed), 1 + 4 * model.layers))

    def matrix(rows: int, columns: int) -> jax.Array:
        scale: float = rows**-0.5
        return jax.random.normal(next(keys), (rows, columns), jnp.float32) * scale

    def block() -> Params:
        width = model.width
        return {
            "attention_norm": jnp.ones(width),
            "qkv": matrix(width, sum(model.head_counts) * (width // model.heads)),
            "out": matrix(width, width),
            "mlp_norm": jnp.ones(width),
            "up": matrix(width, 4 * width),
            "down": matrix(4 * width, width),
        }

    params = {
        "embedding": matrix(model.vocabulary, model.width) * (model.vocabulary / model.width) ** 0.5,
        "blocks": [block() for _ in range(model.layers)],
        "final_norm": jnp.ones(model.width),
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    return State(params=params, mean=zeros, square=zeros, count=jnp.zeros((), jnp.int32))


def activations(
    model: Model, weights: Params, tokens: jax.Array, documents: jax.Array, operations: Operations
) -> jax.Array:
    """Return the output layer's input, `[batch, seq, width]`, for `tokens` (`[batch, seq]`)."""
    x = weights["embedding"][tokens] * model.width**0.5
    for block in weights["blocks"]:
        x = x + _attention(model, block, operations.norm(x, block["attention_norm"]), documents, operations)
        x = x + jax.nn.gelu(operations.norm(x, block["mlp_norm"]) @ block["up"]) @ block["down"]
    return operations.norm(x, weights["final_norm"])


def _attention(model: Model, block: Params, x: jax.Array, documents: jax.Array, operations: Operations) -> jax.Array:
    batch, seq, width = x.shape
    size = width // model.heads
    ends = np.cumsum(model.head_counts)[:-1]
    q, k, v = jnp.split((x @ block["qkv"]).reshape(batch, seq, -1, size), ends, axis=2)
    out = operations.attention(_rotate(q, size // 2), _rotate(k, size // 2), v, documents, model.cap)
    mixed: jax.Array = out.reshape(batch, seq, width) @ block["out"]
    return mixed


def _rotate(x: jax.Array, half: int) -> jax.Array:
    """Turn pairs of features by an angle that grows with the position (rotary embedding)."""
    angle = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angle)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def loss_of(model: Model, params: Params, batch: Batch, operations: Operations) -> jax.Array:
    """Return the mean cross entropy, in nats per word; the first word of a document is not predicted."""
    # Casting here keeps the parameters, and so Adam's small updates, in float32.
    weights = jax.tree.map(lambda leaf: leaf.astype(model.dtype), params)
    x = activations(model, weights, batch.tokens[:, :-1], batch.documents[:, :-1], operations)
    within = batch.documents[:, :-1] == batch.documents[:, 1:]
    labels = jnp.where(within, batch.tokens[:, 1:], -100)
    # Unscaled logits of the shared embedding would begin by repeating every word, for certain.
    return operations.loss(x, weights["embedding"], labels, model.width**-0.5)


def step(
    model: Model, state: State, batch: Batch, *, rate: float = 1e-3, operations: Operations = EJKERNEL
) -> tuple[State, jax.Array]:
    """Return the state after one step of Adam, and the loss before it."""
    loss, gradient = jax.value_and_grad(lambda params: loss_of(model, params, batch, operations))(state.params)
    count = state.count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, state.square, gradient)
    scale = rate * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    params = jax.tree.map(lambda p, m, s: p - scale * m / (jnp.sqrt(s) + 1e-8), state.params, mean, square)
    return State(params=params, mean=mean, square=square, count=count), loss


def training_step(
    operations: Operations = EJKERNEL, model: Model | None = None
) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """Return the step and its arguments, for `ejkernel tune`."""
    model = model or default_model()
    return jax.jit(functools.partial(step, model, operations=operations)), (initial_state(model), batch_of(model, 0))
