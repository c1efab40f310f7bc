# SPDX-License-Identifier: Apache-2.0
"""Gradients of few keys and many queries, as in cross attention: parts of the queries count as further examples.

A block of threads owns some keys of one head and walks over all queries that see them. With few keys, most of the chip
would be idle. Parts of the queries have their own blocks of threads, which read a copy of the keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention.common import AttentionCall, Gradients, Operands, Residuals

_MOST = 16
_LEAST_QUERIES = 128  # of a part
_Pull = Callable[[Operands, Residuals, jax.Array], Gradients]


def fault(call: AttentionCall) -> str | None:
    """Return why the queries cannot be divided; `None` if each of them sees all keys, wherever it is."""
    rules = call.rules
    given = {
        "a window or a causal mask": rules.left is not None or rules.right is not None,
        "a bias": call.bias is not None,
        "an attention mask": call.attention_mask is not None,
        "segment ids": call.segments,
        "query_lengths": call.query_lengths,
        "dropout": rules.dropout_rate > 0,
    }
    found = [name for name, is_given in given.items() if is_given]
    return f"query_parts must be 1 with {found[0]}." if found else None


def choices(call: AttentionCall) -> Iterator[int]:
    """Yield the numbers of parts above 1 that divide the queries, if they may be divided."""
    if fault(call) is None:
        most = min(_MOST, call.query[1] // _LEAST_QUERIES)
        yield from (parts for parts in range(2, most + 1) if call.query[1] % parts == 0)


def divided(call: AttentionCall, parts: int) -> AttentionCall:
    """Return the call in which parts of the queries are examples; a number that does not divide them counts less."""
    parts = math.gcd(parts, call.query[1])
    if parts == 1:
        return call
    batch, queries, *rest = call.query
    key, value = ((parts * batch, *shape[1:]) for shape in (call.key, call.value))
    return dataclasses.replace(call, query=(parts * batch, queries // parts, *rest), key=key, value=value)


def backward_in_parts(operands: Operands, residuals: Residuals, dout: jax.Array, parts: int, pull: _Pull) -> Gradients:
    """Return the gradients by `pull`, with so many parts of the queries as examples."""
    parts = math.gcd(parts, dout.shape[1])
    if parts == 1:
        return pull(operands, residuals, dout)

    def rows(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] * parts, x.shape[1] // parts, *x.shape[2:])

    def copies(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, parts, axis=0)

    (out, lse), lengths = residuals, operands.key_lengths
    own = operands._replace(
        query=rows(operands.query),
        key=copies(operands.key),
        value=copies(operands.value),
        key_lengths=None if lengths is None else copies(lengths),
    )
    split_lse = rows(lse.transpose(0, 2, 1)).transpose(0, 2, 1)
    dquery, *found, _ = pull(own, (rows(out), split_lse), rows(dout))
    # In float32, so that the sum is rounded once.
    sums = [x.reshape(-1, parts, *x.shape[1:]).astype(jnp.float32).sum(axis=1).astype(x.dtype) for x in found]
    return dquery.reshape(operands.query.shape), sums[0], sums[1], None
