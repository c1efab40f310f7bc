# SPDX-License-Identifier: Apache-2.0
"""The backward of float32 operands with many rows per key head, as several backwards with fewer rows each.

The gradient of a key may be a sum over all rows, i.e. queries times heads per key head. The kernel stores the sum in
float16, so with very many rows its terms have few digits. Slices of heads and queries have fewer rows; their gradients
of keys and values are added up in float32.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention.common import AttentionCall, Gradients, Operands, Residuals, Rules, describe

from .params import BackwardParams
from .single import backward_of_single

MOST_ROWS = 32768
_QUERY_STEP = 128  # slices begin at a multiple of all tiles


class Slices(NamedTuple):
    """The division of one call.

    Attributes:
        parts: Parts of the query heads of each key head.
        queries: Queries of a slice; the last may have fewer.
    """

    parts: int
    queries: int

    def is_whole(self, call: AttentionCall) -> bool:
        """Return whether one slice holds the whole call."""
        return self.parts == 1 and self.queries >= call.query[1]


class _Span(NamedTuple):
    """Rows of one slice, the keys that they may see, and the rules for these."""

    rows: slice
    keys: slice
    rules: Rules


def slices_of(call: AttentionCall) -> Slices:
    """Return the fewest slices with at most `MOST_ROWS` rows per key head: slices of heads, then of queries."""
    length, heads = call.query[1], call.query[2] // max(call.key[2], 1)
    divisors = (n for n in range(1, heads + 1) if heads % n == 0)
    parts = next((n for n in divisors if length * heads // n <= MOST_ROWS), max(heads, 1))
    count = -(-length * max(heads, 1) // parts // MOST_ROWS)
    if count <= 1:
        return Slices(parts, length)
    return Slices(parts, -(-length // count // _QUERY_STEP) * _QUERY_STEP)


def slice_of(call: AttentionCall) -> AttentionCall:
    """Return the call that a backward of one slice is, with the keys of the whole call."""
    slices = slices_of(call)
    batch, queries, heads, dim = call.query
    sizes = (heads // slices.parts, min(slices.queries, queries))
    mask = call.attention_mask
    if mask is not None:
        mask = (mask[0], *(min(size, own) for size, own in zip(mask[1:3], sizes, strict=True)), mask[3])
    return dataclasses.replace(call, query=(batch, sizes[1], sizes[0], dim), attention_mask=mask)


def slicing_reason(call: AttentionCall) -> str | None:
    """Return why a call with too many rows cannot be sliced; `None` if it can, or need not be."""
    slices = slices_of(call)
    if slices.is_whole(call):
        return None
    rows = call.query[1] * (call.query[2] // call.key[2])
    start = f"the gradient of a float32 key may be a sum over {rows} rows (queries times heads per key head), "
    given = "bias" if call.bias is not None else "dropout" if call.rules.dropout_rate else None
    if given is not None:
        return f"{start}and beyond {MOST_ROWS} 'mosaic_gpu' takes no {given}; use 'xla', or bfloat16."
    if slices.queries < call.query[1] > call.key[1]:
        return f"{start}and beyond {MOST_ROWS} 'mosaic_gpu' needs as many keys as queries; use 'xla', or bfloat16."
    return None


def backward_in_slices(
    operands: Operands,
    residuals: Residuals,
    dout: jax.Array,
    rules: Rules,
    params: BackwardParams,
    **options: Any,
) -> Gradients:
    """Return the gradients as `single.backward_of_single`, with its `options`."""
    call = describe(operands, rules)
    slices = slices_of(call)
    if slices.is_whole(call):
        return backward_of_single(operands, residuals, dout, rules, params, **options)
    queries, keys, groups = operands.query.shape[1], operands.key.shape[1], operands.key.shape[2]
    of_queries, of_keys, of_values = [], [], []
    for span in _spans(queries, keys, rules, slices):
        found = []
        for part in range(slices.parts):
            take = _Part(groups, slices.parts, part)
            dquery, dkey, dvalue, _ = backward_of_single(
                _operands_of(operands, span, take),
                (take(residuals[0][:, span.rows], 2), take(residuals[1][:, :, span.rows], 1)),
                take(dout[:, span.rows], 2),
                span.rules,
                params,
                **options,
            )
            found.append(dquery.reshape(*dquery.shape[:2], groups, 1, -1, dquery.shape[3]))
            around = ((0, 0), (span.keys.start, keys - span.keys.stop), (0, 0), (0, 0))
            of_keys.append(jnp.pad(dkey, around))
            of_values.append(jnp.pad(dvalue, around))
        merged = jnp.concatenate(found, axis=3)
        of_queries.append(merged.reshape(*merged.shape[:2], -1, merged.shape[5]))
    return jnp.concatenate(of_queries, axis=1), sum(of_keys[1:], of_keys[0]), sum(of_values[1:], of_values[0]), None


class _Part(NamedTuple):
    """One of several parts of the query heads of each key head."""

    groups: int
    parts: int
    number: int

    def __call__(self, x: jax.Array, axis: int) -> jax.Array:
        """Return the heads of this part; `axis` is that of all heads."""
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        return (
            x.reshape(*before, self.groups, self.parts, -1, *after)
            .take(self.number, axis + 1)
            .reshape(*before, -1, *after)
        )


def _spans(queries: int, keys: int, rules: Rules, slices: Slices) -> Iterator[_Span]:
    """Return the slices of queries; rules count from the last key, so keys past the last query shift them."""
    ahead = keys - queries
    starts = range(0, queries, slices.queries)
    for start, end in itertools.pairwise((*starts, queries)):
        first = 0 if rules.left is None else max(0, start + ahead - rules.left)
        last = keys if rules.right is None else min(keys, end + ahead + rules.right)
        past = last - end - ahead  # keys after the position of the last query
        left = None if rules.left is None else rules.left + past
        right = None if rules.right is None else rules.right - past
        yield _Span(slice(start, end), slice(first, last), dataclasses.replace(rules, left=left, right=right))


def _operands_of(operands: Operands, span: _Span, take: _Part) -> Operands:
    def part(x: jax.Array | None, where: slice) -> jax.Array | None:
        return None if x is None else x[:, where]

    def within(lengths: jax.Array | None, where: slice) -> jax.Array | None:
        return None if lengths is None else jnp.clip(lengths - where.start, 0, where.stop - where.start)

    mask = operands.attention_mask
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, span.rows]
        mask = mask if mask.shape[3] == 1 else mask[..., span.keys]
        mask = mask if mask.shape[1] == 1 else take(mask, 1)
    return Operands(
        query=take(operands.query[:, span.rows], 2),
        key=operands.key[:, span.keys],
        value=operands.value[:, span.keys],
        attention_mask=mask,
        query_segments=part(operands.query_segments, span.rows),
        key_segments=part(operands.key_segments, span.keys),
        query_lengths=within(operands.query_lengths, span.rows),
        key_lengths=within(operands.key_lengths, span.keys),
        sinks=None if operands.sinks is None else take(operands.sinks, 0),
    )
