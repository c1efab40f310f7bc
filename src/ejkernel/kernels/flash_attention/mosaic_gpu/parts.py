# SPDX-License-Identifier: Apache-2.0
"""Parts of a call without a mask as further examples, where its tiles are too few for the chip.

A tile of the forward has some queries of one head, and walks over all keys; in decoding there are few tiles. Parts of
the keys have tiles of their own, whose outputs are combined by their log-sum-exp (Dao et al., Flash-Decoding, 2023).

A block of threads of the backward owns some keys of one head, and walks over all queries; in cross attention there are
few keys. Parts of the queries have their own blocks of threads, whose gradients of keys and values are added up. In the
split form, blocks of the second kernel own queries. If they are few, keys are divided instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from ejkernel.kernels._hopper import MULTIPROCESSORS
from ejkernel.kernels.flash_attention.common import (
    EMPTY_ROW_LSE,
    AttentionCall,
    Gradients,
    Operands,
    Residuals,
    returned_lse,
)

from .params import ForwardParams
from .plan import forward_plan

_MOST_OF_KEYS, _MOST_OF_QUERIES = 32, 16
_LEAST_KEYS, _LEAST_QUERIES = 128, 128  # of a part
_Pull = Callable[[Operands, Residuals, jax.Array], Gradients]


def what_hides(call: AttentionCall) -> str | None:
    """Name a feature that hides keys from some queries or drops weights; `None` if every query sees the same keys.

    A single query is at the position of the last key, so a causal mask hides nothing from it.
    """
    rules = call.rules
    given = {
        "a window or a causal mask": rules.left is not None or (rules.right is not None and call.query[1] > 1),
        "a bias": call.bias is not None,
        "an attention mask": call.attention_mask is not None,
        "segment ids": call.segments,
        "query_lengths": call.query_lengths,
        "dropout": rules.dropout_rate > 0,
    }
    return next((text for text, is_given in given.items() if is_given), None)


def parts_fault(call: AttentionCall, name: str) -> str | None:
    """Return why the parameter `name` must be 1; `None` if it may be larger."""
    found = what_hides(call)
    return None if found is None else f"{name} must be 1 with {found}."


def key_parts(call: AttentionCall) -> Iterator[int]:
    """Yield the numbers of parts above 1 that divide the keys, if these may be divided."""
    if what_hides(call) is None:
        yield from _divisors(call.key[1], min(_MOST_OF_KEYS, call.key[1] // _LEAST_KEYS))


def query_parts(call: AttentionCall) -> Iterator[int]:
    """Yield the numbers of parts above 1 that divide the queries, if these may be divided."""
    if what_hides(call) is None:
        yield from _divisors(call.query[1], min(_MOST_OF_QUERIES, call.query[1] // _LEAST_QUERIES))


def _divisors(length: int, most: int) -> Iterator[int]:
    return (parts for parts in range(2, most + 1) if length % parts == 0)


def fastest_key_parts(call: AttentionCall) -> int:
    """Return the number of parts of the keys with the shortest estimated time of the forward, where tiles are few."""
    tiles = forward_plan(call, ForwardParams(warpgroups=1, ping_pong=False)).tiles
    if 2 * tiles > MULTIPROCESSORS:
        return 1

    def time(parts: int) -> float:
        """Return microseconds, as measured with 256 to 2,048 keys at D64 to D256, and with 1 to 16 parts."""
        each = (0.0037 + 0.000046 * max(call.query[3], call.value[3])) * call.key[1] / parts
        combined = 4 + 0.35 * parts if parts > 1 else 0.0
        return math.ceil(tiles * parts / MULTIPROCESSORS) * each + combined

    return min((1, *key_parts(call)), key=time)


def in_key_parts(call: AttentionCall, parts: int) -> AttentionCall:
    """Return the call with parts of the keys as examples; `parts` is reduced to a divisor of the keys."""
    parts = math.gcd(parts, call.key[1])
    key, value = ((parts * shape[0], shape[1] // parts, *shape[2:]) for shape in (call.key, call.value))
    return dataclasses.replace(call, query=(parts * call.query[0], *call.query[1:]), key=key, value=value)


def in_query_parts(call: AttentionCall, parts: int) -> AttentionCall:
    """Return the call with parts of the queries as examples; `parts` is reduced to a divisor of the queries."""
    batch, queries, *rest = call.query
    parts = math.gcd(parts, queries)
    key, value = ((parts * batch, *shape[1:]) for shape in (call.key, call.value))
    return dataclasses.replace(call, query=(parts * batch, queries // parts, *rest), key=key, value=value)


def forward_in_parts(operands: Operands, parts: int, attend: Callable[[Operands], Residuals]) -> Residuals:
    """Return output and log-sum-exp by `attend`, with so many parts of the keys as examples; without sinks."""
    parts = math.gcd(parts, operands.key.shape[1])
    out, lse = attend(_with_divided_keys(operands, parts))
    lse = returned_lse(_apart(lse, parts))
    top = lse.max(axis=1, keepdims=True)
    weights = jnp.exp(lse - jnp.where(top == -jnp.inf, 0, top))
    total = weights.sum(axis=1, keepdims=True)
    divisor = jnp.where(total == 0, 1, total)
    shares = (weights / divisor).swapaxes(2, 3)[..., None]
    merged = (_apart(out, parts).astype(jnp.float32) * shares).sum(axis=1).astype(out.dtype)
    return merged, jnp.where(total == 0, EMPTY_ROW_LSE, top + jnp.log(divisor))[:, 0]


def backward_in_key_parts(
    operands: Operands, residuals: Residuals, dout: jax.Array, parts: int, pull: _Pull
) -> Gradients:
    """Return the gradients by `pull`, with so many parts of the keys as examples: `pull` needs `Rules.partial`."""
    parts = math.gcd(parts, operands.key.shape[1])
    copies = tuple(_copied(x, parts) for x in residuals)
    found = pull(_with_divided_keys(operands, parts), (copies[0], copies[1]), _copied(dout, parts))
    dkey, dvalue = (x.reshape(like.shape) for x, like in zip(found[1:3], operands[1:3], strict=True))
    return _sum_of_parts(found[0], parts), dkey, dvalue, None


def backward_in_query_parts(
    operands: Operands, residuals: Residuals, dout: jax.Array, parts: int, pull: _Pull
) -> Gradients:
    """Return the gradients by `pull`, with so many parts of the queries as examples."""
    parts = math.gcd(parts, dout.shape[1])
    (out, lse), lengths = residuals, operands.key_lengths
    own = operands._replace(
        query=_divided(operands.query, parts),
        key=_copied(operands.key, parts),
        value=_copied(operands.value, parts),
        key_lengths=None if lengths is None else _copied(lengths, parts),
    )
    lse = _divided(lse.swapaxes(1, 2), parts).swapaxes(1, 2)
    dquery, *found, _ = pull(own, (_divided(out, parts), lse), _divided(dout, parts))
    dkey, dvalue = (_sum_of_parts(x, parts) for x in found)
    return dquery.reshape(operands.query.shape), dkey, dvalue, None


def _with_divided_keys(operands: Operands, parts: int) -> Operands:
    """Return the operands with parts of the keys as examples."""
    keys, lengths = operands.key.shape[1], operands.key_lengths
    if lengths is not None:
        before = jnp.arange(0, keys, keys // parts, dtype=lengths.dtype)[None]
        lengths = jnp.clip(jnp.clip(lengths, 0, keys)[:, None] - before, 0, keys // parts).reshape(-1)
    return operands._replace(
        query=_copied(operands.query, parts),
        key=_divided(operands.key, parts),
        value=_divided(operands.value, parts),
        key_lengths=lengths,
    )


def sum_of_heads(x: jax.Array, parts: int) -> jax.Array:
    """Return `[batch, keys, groups * parts, dim]` with the parts of each group added up."""
    if parts == 1:
        return x
    split = x.reshape(*x.shape[:2], -1, parts, x.shape[3])
    # In float32, so that the sum is rounded once.
    return split.astype(jnp.float32).sum(axis=3).astype(x.dtype)


def _sum_of_parts(x: jax.Array, parts: int) -> jax.Array:
    # In float32, so that the sum is rounded once.
    return _apart(x, parts).astype(jnp.float32).sum(axis=1).astype(x.dtype)


def _divided(x: jax.Array, parts: int) -> jax.Array:
    """Return `[batch, rows, ...]` with parts of the rows as examples."""
    return x.reshape(x.shape[0] * parts, x.shape[1] // parts, *x.shape[2:])


def _copied(x: jax.Array, parts: int) -> jax.Array:
    """Return copies of each example, one after the other."""
    return jnp.repeat(x, parts, axis=0)


def _apart(x: jax.Array, parts: int) -> jax.Array:
    """Return results with a separate axis for the parts of an example."""
    return x.reshape(-1, parts, *x.shape[1:])
