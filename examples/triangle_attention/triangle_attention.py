# SPDX-License-Identifier: Apache-2.0
"""Triangle attention, as in AlphaFold 2 and 3: attention along the rows or columns of a pair representation.

    python examples/triangle_attention/triangle_attention.py [--residues N]

The pair representation is `[residues, residues, channels]`. Each row is an example of `flash_attention`. The bias comes
from the pair representation itself, is shared by all rows, and has a gradient. A mask hides padded residues as keys.
`plain_attention` is the same with all scores in memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from before_after import compare

from ejkernel.modules import flash_attention, layer_norm

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def fused_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array, mask: jax.Array
) -> jax.Array:  # [rows, residues, heads, head_dim], bias [heads, queries, keys], mask [rows, keys]
    """Return the attention of each row; no array has `rows * heads * residues²` elements."""
    return flash_attention(query, key, value, bias=bias[None], attention_mask=mask)


def plain_attention(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the same in plain JAX."""
    logits = jnp.einsum("rqhd,rkhd->rhqk", query, key) * query.shape[-1] ** -0.5 + bias
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, -1e9), axis=-1)
    return jnp.einsum("rhqk,rkhd->rqhd", weights, value)


def parameters_of(channels: int, heads: int, head_dim: int) -> dict[str, jax.Array]:
    """Return random parameters."""
    shapes = {
        "to_heads": (channels, 3, heads, head_dim),
        "to_bias": (channels, heads),
        "to_gate": (channels, heads * head_dim),
        "from_heads": (heads * head_dim, channels),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return arrays | {"scale": jnp.ones(channels), "offset": jnp.zeros(channels)}


def triangle_attention(
    parameters: dict[str, jax.Array],
    pair: jax.Array,
    mask: jax.Array,
    *,
    attend: Attend = fused_attention,
    ending: bool = False,
) -> jax.Array:
    """Return the update of the pair representation.

    Args:
        parameters: See `parameters_of`.
        pair: The pair representation, `[residues, residues, channels]`.
        mask: True for valid pairs, `[residues, residues]`.
        attend: `fused_attention` or `plain_attention`.
        ending: Attend along columns, around the ending node, instead of along rows, around the starting node.
    """
    if ending:
        pair, mask = jnp.swapaxes(pair, 0, 1), jnp.swapaxes(mask, 0, 1)
    hidden = layer_norm(pair, parameters["scale"], parameters["offset"])
    query, key, value = jnp.moveaxis(jnp.einsum("ijc,cthd->ijthd", hidden, parameters["to_heads"]), 2, 0)
    bias = jnp.einsum("qkc,ch->hqk", hidden, parameters["to_bias"])
    out = attend(query, key, value, bias, mask).reshape(*pair.shape[:2], -1)
    out = (out * jax.nn.sigmoid(hidden @ parameters["to_gate"])) @ parameters["from_heads"]
    return jnp.swapaxes(out, 0, 1) if ending else out


def training_step(
    attend: Attend = fused_attention,
    *,
    residues: int = 128,
    padding: int = 16,
    channels: int = 64,
    heads: int = 4,
    head_dim: int = 16,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a step, from parameters, pairs and mask to a loss and its gradients, and its arguments."""

    def loss(parameters: Any, pair: jax.Array, mask: jax.Array) -> jax.Array:
        for ending in (False, True):
            pair = pair + triangle_attention(parameters, pair, mask, attend=attend, ending=ending)
        return jnp.mean(jnp.where(mask[..., None], pair, 0) ** 2)

    valid = jnp.arange(residues) < residues - padding
    pair = jax.random.normal(jax.random.key(1), (residues, residues, channels))
    parameters = parameters_of(channels, heads, head_dim)
    return jax.jit(jax.value_and_grad(loss, (0, 1))), (parameters, pair, valid[:, None] & valid)


def main() -> None:
    """Print whether both forms agree, with the gradient of the bias, and the memory of their temporary arrays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--residues", type=int, default=128)
    given = parser.parse_args()
    steps = [training_step(attend, residues=given.residues) for attend in (plain_attention, fused_attention)]
    compare(steps, ("with all scores", "with flash_attention"), "the two forms")


if __name__ == "__main__":
    main()
