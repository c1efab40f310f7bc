# SPDX-License-Identifier: Apache-2.0
"""Shared by both models: their sizes, the mesh, the shardings of arrays, and two attentions to choose from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import flash_attention

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a model and its batches are."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    groups: int = 2
    vocabulary: int = 128
    batch: int = 4
    length: int = 32
    dtype: Any = jnp.float32

    @property
    def head_dim(self) -> int:
        """The length of a head."""
        return self.width // self.heads


def ours(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Ejkernel's attention, which splits itself."""
    return flash_attention(query, key, value, causal=True)


def plain(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """JAX's, with cuDNN where that runs."""
    cudnn = jax.default_backend() == "gpu" and query.dtype != jnp.float32
    implementation: Literal["cudnn", "xla"] = "cudnn" if cudnn else "xla"
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)


def mesh_of(data: int, model: int) -> Mesh:
    """Return a mesh: examples are divided over `data`, heads and hidden units over `model`."""
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def placed(parameters: Any, mesh: Mesh) -> Any:
    """Return the parameters where they belong: matrices `to_` heads and hidden units by column, `from_` them by row."""

    def place(path: Any, array: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        spec = P(None, "model") if "to_" in name else P("model", None) if "from_" in name else P()
        there: jax.Array = jax.device_put(array, NamedSharding(mesh, spec))
        return there

    return jax.tree_util.tree_map_with_path(place, parameters)


def tokens(size: Size, mesh: Mesh, step: int) -> jax.Array:
    """Return a batch of random tokens, its examples divided."""
    made = jax.random.randint(jax.random.key(step), (size.batch, size.length), 0, size.vocabulary)
    divided: jax.Array = jax.device_put(made, NamedSharding(mesh, P("data")))
    return divided


def next_token_loss(logits: jax.Array, batch: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of each token given those before it."""
    scores = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.take_along_axis(scores, batch[:, 1:, None], axis=-1).mean()


def descended(parameters: Any, gradients: Any, rate: float = 0.1) -> Any:
    """Return the parameters after a step of gradient descent."""
    return jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), parameters, gradients)
