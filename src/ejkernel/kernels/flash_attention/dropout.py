# SPDX-License-Identifier: Apache-2.0
"""Which weights a dropout keeps: a function of its key and of a weight's place, the same in every implementation.

Nothing is stored for the backward, which asks again; blocks of any size, in any order, ask for their own part.

Source: the finalizer of Appleby's MurmurHash3, which lets every bit of a word reach every other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .common import Rules

_ODD = 0x9E3779B9  # 2**32 over the golden ratio: multiples of it are far from each other


def kept(key: jax.Array, rows: jax.Array, queries: jax.Array, keys: jax.Array, rules: Rules) -> jax.Array:
    """Return which weights are kept, `[..., queries, keys]`.

    Args:
        key: Two words, in uint32.
        rows: `[...]`, for each matrix of weights `batch * heads + head`.
        queries: Indices of queries, `[queries]`.
        keys: Indices of keys, `[keys]`.
        rules: Of which the rate counts.
    """
    words = query_words(key, rows, queries)
    shape = (*words.shape, *keys.shape)
    return keeps(
        lax.broadcast_in_dim(words, shape, range(words.ndim)),
        lax.broadcast_in_dim(_word(keys), shape, (words.ndim,)),
        rules,
    )


def query_words(key: jax.Array, rows: jax.Array, queries: jax.Array) -> jax.Array:
    """Return what `keeps` has to know of queries, `[..., queries]` in uint32; for the arguments see `kept`."""
    words = key.astype(jnp.uint32)
    row = _mixed(_word(rows) * jnp.uint32(_ODD) ^ words[0])
    return _mixed(lax.expand_dims(row, (rows.ndim,)) + _along(queries, rows.ndim) * jnp.uint32(_ODD) ^ words[1])


def keeps(words: jax.Array, keys: jax.Array, rules: Rules) -> jax.Array:
    """Return which weights are kept, given words of their queries and indices of their keys, of one shape in uint32."""
    bits = _mixed(words + keys * jnp.uint32(_ODD))
    # A rate near 1 is rounded to 2**32, which a word does not hold.
    keep: jax.Array = bits >= jnp.uint32(min(round(rules.dropout_rate * 2**32), 2**32 - 1))
    return keep


def _word(x: jax.Array) -> jax.Array:
    return x.astype(jnp.uint32)


def _along(indices: jax.Array, axes: int) -> jax.Array:
    """Return indices with so many axes before theirs."""
    return lax.expand_dims(_word(indices), tuple(range(axes)))


def _mixed(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    mixed: jax.Array = x ^ (x >> jnp.uint32(16))
    return mixed
