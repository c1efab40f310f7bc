# SPDX-License-Identifier: Apache-2.0
"""The dropout mask: a function of the random key and a weight's position, the same in every implementation.

The backward recomputes the mask, so nothing is stored; blocks of any size and order compute their own part.

Source: the finalizer of Appleby's MurmurHash3, which lets every bit of a word reach every other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .common import Rules

_ODD = 0x9E3779B9  # 2**32 / golden ratio: its multiples are far from each other


def kept(key: jax.Array, rows: jax.Array, queries: jax.Array, keys: jax.Array, rules: Rules) -> jax.Array:
    """Return the mask of kept weights, `[..., queries, keys]`.

    Args:
        key: Two uint32 words.
        rows: `[...]`; `batch * heads + head` for each weight matrix.
        queries: Indices of the queries, `[queries]`.
        keys: Indices of the keys, `[keys]`.
        rules: The rules with the dropout rate.
    """
    words = query_words(key, rows, queries)
    shape = (*words.shape, *keys.shape)
    return keeps(
        lax.broadcast_in_dim(words, shape, range(words.ndim)),
        lax.broadcast_in_dim(_word(keys), shape, (words.ndim,)),
        rules,
    )


def query_words(key: jax.Array, rows: jax.Array, queries: jax.Array) -> jax.Array:
    """Return the uint32 words of queries for `keeps`, `[..., queries]`; see `kept` for the arguments."""
    words = key.astype(jnp.uint32)
    row = _mixed(_word(rows) * jnp.uint32(_ODD) ^ words[0])
    return _mixed(lax.expand_dims(row, (rows.ndim,)) + _along(queries, rows.ndim) * jnp.uint32(_ODD) ^ words[1])


def keeps(words: jax.Array, keys: jax.Array, rules: Rules) -> jax.Array:
    """Return the mask of kept weights, given uint32 query words and key indices of the same shape."""
    bits = _mixed(words + keys * jnp.uint32(_ODD))
    # a rate near 1 would round to 2**32, which does not fit in a word
    keep: jax.Array = bits >= jnp.uint32(min(round(rules.dropout_rate * 2**32), 2**32 - 1))
    return keep


def _word(x: jax.Array) -> jax.Array:
    return x.astype(jnp.uint32)


def _along(indices: jax.Array, axes: int) -> jax.Array:
    """Return indices with `axes` leading axes of length 1."""
    return lax.expand_dims(_word(indices), tuple(range(axes)))


def _mixed(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    mixed: jax.Array = x ^ (x >> jnp.uint32(16))
    return mixed
