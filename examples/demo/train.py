# SPDX-License-Identifier: Apache-2.0
"""A byte-level language model and its training step: ordinary JAX that calls two ejkernel operations.

Nothing in this file knows about configurations. `ejkernel tune train:training_step` finds the calls by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import flash_attention, rms_norm

VOCABULARY = 256  # bytes
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of the model and of one batch.

    Attributes:
        layers: Number of blocks.
        width: Length of one token's vector.
        heads: Attention heads; `width` is a multiple of it.
        batch: Sequences a step.
        seq: Bytes a sequence.
        dtype: What the blocks compute in; parameters and the loss are float32.
    """

    layers: int
    width: int
    heads: int
    batch: int
    seq: int
    dtype: Any

    @property
    def tokens(self) -> int:
        """Bytes that one step predicts."""
        return self.batch * self.seq


SMALL = Model(layers=4, width=256, heads=4, batch=2, seq=1024, dtype=jnp.float32)
LARGE = Model(layers=12, width=1024, heads=8, batch=4, seq=4096, dtype=jnp.bfloat16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """What a step hands to the next: parameters, Adam's two moments and the number of steps so far."""

    params: Params
    mean: Params
    square: Params
    count: jax.Array


def default_model() -> Model:
    """Return the sizes for this machine: `SMALL` on a CPU, `LARGE` on an accelerator."""
    return SMALL if jax.default_backend() == "cpu" else LARGE


@functools.cache
def text() -> np.ndarray:
    """Return the bytes of a long English text that comes with every Python: the language reference of `help()`."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("this Python has no pydoc_data.topics; the demo reads its text from there.")
    return np.frombuffer(Path(spec.origin).read_bytes(), dtype=np.uint8)


def batch_of(model: Model, index: int) -> jax.Array:
    """Return batch number `index`: `[batch, seq + 1]` bytes, the same in every run."""
    data = text()
    starts = np.random.default_rng(index).integers(0, len(data) - model.seq - 1, size=model.batch)
    return jnp.asarray(np.stack([data[start : start + model.seq + 1] for start in starts]).astype(np.int32))


def initial_state(model: Model, seed: int = 0) -> State:
    """Return fresh parameters and zero moments."""
    keys = iter(jax.random.split(jax.random.key(seed), 1 + 4 * model.layers))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns), jnp.float32) * rows**-0.5

    def block() -> Params:
        width = model.width
        return {
            "attention_norm": jnp.ones(width),
            "qkv": matrix(width, 3 * width),
            "out": matrix(width, width),
            "mlp_norm": jnp.ones(width),
            "up": matrix(width, 4 * width),
            "down": matrix(4 * width, width),
        }

    params = {
        "embedding": matrix(VOCABULARY, model.width),
        "blocks": [block() for _ in range(model.layers)],
        "final_norm": jnp.ones(model.width),
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    return State(params=params, mean=zeros, square=zeros, count=jnp.zeros((), jnp.int32))


def logits(model: Model, params: Params, tokens: jax.Array) -> jax.Array:
    """Return float32 scores `[batch, seq, 256]` for the byte after each of `tokens` (`[batch, seq]`)."""
    # Casting here keeps the parameters, and so Adam's small updates, in float32.
    weights = jax.tree.map(lambda leaf: leaf.astype(model.dtype), params)
    x = weights["embedding"][tokens] * model.width**0.5
    for block in weights["blocks"]:
        x = x + _attention(model, block, rms_norm(x, block["attention_norm"]))
        x = x + jax.nn.gelu(rms_norm(x, block["mlp_norm"]) @ block["up"]) @ block["down"]
    x = rms_norm(x, weights["final_norm"])
    scores = jnp.einsum("bsd,vd->bsv", x, weights["embedding"], preferred_element_type=jnp.float32)
    return scores * model.width**-0.5  # else the shared embedding would begin by repeating every byte, for certain


def _attention(model: Model, block: Params, x: jax.Array) -> jax.Array:
    batch, seq, width = x.shape
    q, k, v = jnp.split((x @ block["qkv"]).reshape(batch, seq, 3 * model.heads, width // model.heads), 3, axis=2)
    half = width // model.heads // 2
    return flash_attention(_rotate(q, half), _rotate(k, half), v, causal=True).reshape(batch, seq, width) @ block["out"]


def _rotate(x: jax.Array, half: int) -> jax.Array:
    """Turn pairs of features by an angle that grows with the position (rotary embedding)."""
    angle = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angle)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def loss_of(model: Model, params: Params, batch: jax.Array) -> jax.Array:
    """Return the mean cross entropy, in nats a byte."""
    scores = jax.nn.log_softmax(logits(model, params, batch[:, :-1]))
    return -jnp.take_along_axis(scores, batch[:, 1:, None], axis=-1).mean()


def step(model: Model, state: State, batch: jax.Array, *, rate: float = 1e-3) -> tuple[State, jax.Array]:
    """Return the state after one step of Adam, and the loss before it."""
    loss, gradient = jax.value_and_grad(functools.partial(loss_of, model))(state.params, batch)
    count = state.count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, state.square, gradient)
    scale = rate * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    params = jax.tree.map(lambda p, m, s: p - scale * m / (jnp.sqrt(s) + 1e-8), state.params, mean, square)
    return State(params=params, mean=mean, square=square, count=count), loss


def training_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the step and arguments for it: what `ejkernel tune` asks for."""
    model = default_model()
    return jax.jit(functools.partial(step, model)), (initial_state(model), batch_of(model, 0))
