# SPDX-License-Identifier: Apache-2.0
"""Shared by all implementations of attention: operands, static rules, and the description of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel import compat
from ejkernel.kernels._numbers import accumulator as accumulator
from ejkernel.ops.implementation import Implementation, OperationCall
from ejkernel.ops.utils.values.signature import is_known

# The log-sum-exp of a row without visible keys: large, so that exp(score - lse) is exactly zero in every backward, and
# finite, to avoid inf - inf.
EMPTY_ROW_LSE = 1e30


Residuals = tuple[jax.Array, jax.Array]
"""The output `[batch, queries, heads, value_dim]` and the log-sum-exp `[batch, heads, queries]`."""
Gradients = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
"""The gradients of query, key, value and bias; `None` without a bias."""

# Segment ids of hidden queries and keys; see `hidden_past`. Hidden keys come last: ascending ids still ascend.
HIDDEN_QUERY, HIDDEN_KEY = -(2**31), 2**31 - 1

_LARGEST_SCALE = 1024.0  # limit of the kernels
_LOWEST_LSE = -1e29  # up to that scale; hidden keys have logits of -1e30 or less
_ODD = 0x9E3779B9  # 2**32 / golden ratio: its multiples are far from each other


class Operands(NamedTuple):
    """The arrays of one call.

    Attributes:
        query: `[batch, queries, heads, head_dim]`.
        key: `[batch, keys, groups, head_dim]`; head `i` reads group `i // (heads // groups)`.
        value: `[batch, keys, groups, value_dim]`.
        bias: Added to the logits; four axes, each of full size or 1, `[batch, heads, queries, keys]`.
        attention_mask: True where a key is visible; axes as for `bias`.
        query_segments: `[batch, queries]`; a query sees the keys of its own segment.
        key_segments: `[batch, keys]`.
        query_lengths: int32 `[batch]`; queries past the length see no key.
        key_lengths: int32 `[batch]`; keys past the length are masked.
        sinks: `[heads]`; an extra logit in every row's softmax, with a value of zero.
        dropout_key: Two uint32 words that seed the dropout mask; see `kept`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None = None
    attention_mask: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    query_lengths: jax.Array | None = None
    key_lengths: jax.Array | None = None
    sinks: jax.Array | None = None
    dropout_key: jax.Array | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The static options of one call.

    Query `i` is at position `i + keys - queries`: the last query is aligned with the last key.

    Attributes:
        scale: The factor on the product of query and key.
        left: The number of visible keys before a query's position; `None` means all.
        right: The number of visible keys after a query's position; `None` means all, 0 is causal attention.
        soft_cap: Scaled products are capped to `(-soft_cap, soft_cap)` by tanh before the bias is added.
        cap_after_bias: Whether to cap the sum of product and bias instead.
        dropout_rate: The probability of dropping a weight; the others are divided by `1 - dropout_rate`.
        precision: The matmul precision, a name of `jax.lax.Precision`; `None` for JAX's default.
        partial: Whether the rows see more keys than those of the call, and the output and log-sum-exp that the backward
            gets are over all of them; see `context`.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    soft_cap: float | None = None
    cap_after_bias: bool = False
    dropout_rate: float = 0.0
    precision: str | None = None
    partial: bool = False

    def at_lengths(self, queries: int, keys: int) -> Rules:
        """Return the rules without the sides of a window that hide no key at these lengths, e.g. 4,095 of 2,048."""
        if not is_known(queries, keys):
            return self
        left, right = self.left, self.right
        return dataclasses.replace(
            self,
            left=None if left is None or left >= keys - 1 else left,
            right=None if right is None or right >= max(queries - 1, 1) else right,  # causal attention stays causal
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall(OperationCall):
    """The abstract call: everything on which an implementation's support and choices depend.

    Attributes:
        query: The shape, as in `Operands`; the same for `key`, `value`, `bias` and `attention_mask`.
        dtype: The dtype name of query, key and value.
        bias_dtype: The dtype name of `bias`, if given.
        segments: Whether segment ids are given.
        rules: The static options.
        query_lengths: Whether query lengths are given; `key_lengths` and `sinks` are the same.
        return_lse: Whether the log-sum-exp is a result, so that the backward receives its cotangent.
        deterministic: Whether results and gradients must be bitwise reproducible.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    rules: Rules
    bias: tuple[int, ...] | None = None
    bias_dtype: str | None = None
    attention_mask: tuple[int, ...] | None = None
    segments: bool = False
    query_lengths: bool = False
    key_lengths: bool = False
    sinks: bool = False
    return_lse: bool = False
    deterministic: bool = False

    @property
    def features(self) -> frozenset[str]:
        """See `OperationCall`; sinks are not a feature, because `AttentionImplementation` adds them."""
        asked = {
            "query_lengths": self.query_lengths,
            "key_lengths": self.key_lengths,
            # every forward computes it; only its cotangent needs support
            "return_lse": self.return_lse and self.backward,
            "deterministic": self.deterministic,
            "soft_cap_after_bias": self.rules.cap_after_bias,
            "dropout_rate": self.rules.dropout_rate > 0,
            "precision": self.rules.precision not in (None, "default"),
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)


class AttentionImplementation(Implementation[AttentionCall]):
    """Base of the attention implementations: their calling convention and residuals.

    Attention sinks multiply each row of `attend`'s result by one factor and change nothing else that `differentiate`
    reads, so this class adds them for all implementations.
    """

    residuals = "the log-sum-exp of every row, [batch, heads, queries] in float32"
    adds_sinks = False  # whether `attend` does
    is_told_of_sinks = False  # whether the operands of `differentiate` have them; the residuals always include them

    def attend(self, operands: Operands, rules: Rules, params: Any) -> Residuals:
        """Return the output and the log-sum-exp; the operands have sinks only if `adds_sinks`."""
        raise NotImplementedError

    def differentiate(
        self, operands: Operands, residuals: Residuals, dout: jax.Array, rules: Rules, params: Any
    ) -> Gradients:
        """Return the gradients of query, key, value and bias.

        If `"return_lse"` is a feature, `dlse` is the cotangent of the log-sum-exp.

        Args:
            operands: The operands of the forward.
            residuals: The output and log-sum-exp of any implementation's forward.
            dout: The cotangent of the output.
            rules: The rules of the forward.
            params: The parameters of the backward.
        """
        raise NotImplementedError

    def forward(self, call: AttentionCall, /, *args: Any, params: Any) -> tuple[Any, jax.Array]:
        """See `Implementation`."""
        operands = operands_of(args)
        sinks = None if self.adds_sinks else operands.sinks
        out, lse = self.attend(operands if sinks is None else operands._replace(sinks=None), call.rules, params)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        return ((out, returned_lse(lse)) if call.return_lse else out), lse

    def backward(
        self, call: AttentionCall, residuals: Any, out: Any, cotangents: tuple[Any, ...], /, *args: Any, params: Any
    ) -> tuple[Any, ...]:
        """See `Implementation`."""
        operands, lse, dlse = operands_of(args), residuals, None
        dout = cotangents[0]
        if call.return_lse:
            # the log-sum-exp of a row without visible keys is -inf, and its derivative is zero
            out, dlse = out[0], jnp.where(lse == EMPTY_ROW_LSE, 0, cotangents[1].astype(lse.dtype))
        more = {} if dlse is None else {"dlse": dlse}
        residuals = out, lse_of_keys(operands, lse, call.rules)
        own = operands if self.is_told_of_sinks else operands._replace(sinks=None)
        found = self.differentiate(own, residuals, dout, call.rules, params, **more)
        dsinks = gradient_of_sinks(operands.sinks, out, lse, (dout, *more.values()))
        return (*found, None, None, None, dsinks, None)[: len(args)]


def with_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the output and log-sum-exp with one more logit per head, with value zero, in every row's softmax."""
    sink, empty = sinks.astype(lse.dtype)[None, :, None], lse == EMPTY_ROW_LSE
    seen = jnp.where(empty, 0, lse)  # keeps unused values and their derivatives finite
    both = jnp.logaddexp(seen, jnp.broadcast_to(sink, seen.shape))
    share = jnp.where(empty, 0, jnp.exp(seen - both))
    scaled = out.astype(lse.dtype) * share.transpose(0, 2, 1)[..., None]
    # a sink of -inf is no sink: a row without visible keys stays empty
    alone = jnp.where(sink == -jnp.inf, EMPTY_ROW_LSE, sink)
    return scaled.astype(out.dtype), jnp.where(empty, alone, both)


def lse_of_keys(operands: Operands, lse: jax.Array, rules: Rules) -> jax.Array:
    """Return the log-sum-exp for the gradients of query, key and value: queries past the lengths see no key.

    With a sink their log-sum-exp is the sink, but kernels leave it to the log-sum-exp to make their weights zero. A row
    without keys may have a sink such as the lowest float32, below the finite logits with which kernels hide keys.
    """
    if operands.sinks is not None and rules.scale <= _LARGEST_SCALE:
        # Keys with a bias may also have a log-sum-exp as low, but not that of the sink.
        is_sink = True if operands.bias is None else lse <= 0.9 * operands.sinks.astype(lse.dtype)[None, :, None]
        lse = jnp.where(is_sink, jnp.maximum(lse, _LOWEST_LSE), lse)
    if operands.query_lengths is None:
        return lse
    past = jnp.arange(lse.shape[2], dtype=jnp.int32)[None, None] >= operands.query_lengths[:, None, None]
    return jnp.where(past, EMPTY_ROW_LSE, lse)


def returned_lse(lse: jax.Array) -> jax.Array:
    """Return the log-sum-exp for users: -inf for a row without visible keys."""
    return jnp.where(lse == EMPTY_ROW_LSE, -jnp.inf, lse)


def gradient_of_sinks(
    sinks: jax.Array | None, out: jax.Array, lse: jax.Array, cotangents: Sequence[jax.Array]
) -> jax.Array | None:
    """Return the gradient of the sinks, given the cotangents of the output and, if it is a result, the log-sum-exp."""
    if sinks is None:
        return None
    # the sink's value is zero, so its gradient depends only on the product of output and cotangent
    pull = -jnp.einsum("bqhe,bqhe->bhq", out, cotangents[0], preferred_element_type=lse.dtype)
    for dlse in cotangents[1:]:
        pull += jnp.where(lse == EMPTY_ROW_LSE, 0, dlse.astype(lse.dtype))
    # rounding may leave a large log-sum-exp below the sink
    weight = jnp.exp(jnp.minimum(sinks.astype(lse.dtype)[None, :, None] - lse, 0))
    return (weight * pull).sum(axis=(0, 2)).astype(sinks.dtype)


def all_arguments(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the positional arguments of the operation, with `None` for those that the call omits."""
    return (*args, *[None] * 6)[:9]


def operands_of(args: Sequence[Any]) -> Operands:
    """Return the positional arguments of the operation, some of them pairs, as operands."""
    *main, segments, lengths, sinks, dropout_key = all_arguments(args)
    none = (None, None)
    return Operands._make([*main, *(segments or none), *(lengths or none), sinks, dropout_key])


def arguments_of(operands: Operands) -> tuple[Any, ...]:
    """Return operands as positional arguments of the operation, the inverse of `operands_of`."""
    segments, lengths = (
        None if all(x is None for x in pair) else pair
        for pair in (
            (operands.query_segments, operands.key_segments),
            (operands.query_lengths, operands.key_lengths),
        )
    )
    return without_trailing((*operands[:5], segments, lengths, operands.sinks, operands.dropout_key))


def without_trailing(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the positional arguments of the operation that are part of a call's key."""
    given = max((index for index, array in enumerate(args) if array is not None), default=0)
    # The first six arguments existed from the start. Later ones are omitted at their default, so that earlier keys
    # remain valid.
    return args[: max(6, given + 1)]


def describe(
    operands: Operands, rules: Rules, *, platform: str | None = None, fingerprint: str = "", **options: Any
) -> AttentionCall:
    """Return the abstract call for these shapes and dtypes of operands.

    Args:
        operands: Arrays, or their types.
        rules: The static options.
        platform: The platform, if known.
        fingerprint: The device's, if known.
        **options: Other fields of the call: `backward`, `return_lse` or `deterministic`.
    """
    bias, mask = operands.bias, operands.attention_mask
    return AttentionCall(
        query=tuple(operands.query.shape),
        key=tuple(operands.key.shape),
        value=tuple(operands.value.shape),
        dtype=str(operands.query.dtype),
        rules=rules.at_lengths(operands.query.shape[1], operands.key.shape[1]),
        bias=None if bias is None else tuple(bias.shape),
        bias_dtype=None if bias is None else str(bias.dtype),
        attention_mask=None if mask is None else tuple(mask.shape),
        segments=operands.query_segments is not None,
        query_lengths=operands.query_lengths is not None,
        key_lengths=operands.key_lengths is not None,
        sinks=operands.sinks is not None,
        platform=platform,
        device_fingerprint=fingerprint,
        partitioned=compat.programs.is_split_by_xla(),
        **options,
    )


def within_window(query_positions: jax.Array, key_positions: jax.Array, rules: Rules) -> jax.Array | None:
    """Return `[queries, keys]`, true where the rules let a query see a key; `None` if every key is visible.

    Positions come from the arrays and not from lengths. If the ends of lengths were aligned, the blocks hidden by a
    causal mask would be known only at run time.
    """
    ahead = key_positions[None, :] - query_positions[:, None]
    visible = None if rules.right is None else ahead <= rules.right
    if rules.left is None:
        return visible
    recent = ahead >= -rules.left
    return recent if visible is None else visible & recent


def scale_reason(call: AttentionCall, name: str) -> str | None:
    """Return why a kernel that subtracts scaled logits refuses `call`, and an alternative; `None` if it supports it.

    Such a kernel computes `products * scale - maximum` in one operation with a rounded maximum. For logits of 1e9 the
    difference is off by up to 32, and its exponential by any factor.
    """
    if call.rules.scale <= _LARGEST_SCALE:
        return None
    return (
        f"softmax_scale is {call.rules.scale:g}, and {name} takes up to {_LARGEST_SCALE:g}, because the rounding of "
        "larger logits makes its weights inexact; use 'xla'."
    )


def hidden_past(ids: jax.Array | None, lengths: jax.Array | None, shape: tuple[int, ...], hidden: int) -> jax.Array:
    """Return int32 segment ids of this shape that are `hidden` past the lengths; without ids, others are 0.

    Where one side of a call has hidden ids, the other's come from here, too: a user's id that equals `HIDDEN_QUERY` or
    `HIDDEN_KEY` becomes a hash, which seldom meets another id.
    """
    found = jnp.zeros(shape, jnp.int32)
    if ids is not None:
        found = ids.astype(jnp.int32)
        found = jnp.where((found == HIDDEN_QUERY) | (found == HIDDEN_KEY), found ^ jnp.int32(_ODD >> 1), found)
    if lengths is None:
        return found
    return jnp.where(jnp.arange(shape[1], dtype=jnp.int32)[None] < lengths[:, None], found, jnp.int32(hidden))


def visible_pairs(queries: int, keys: int, rules: Rules) -> int:
    """Return the number of visible pairs of query and key in one head."""
    positions = np.arange(queries) + keys - queries
    first = 0 if rules.left is None else np.clip(positions - rules.left, 0, keys)
    end = keys if rules.right is None else np.clip(positions + rules.right + 1, 0, keys)
    return int(np.maximum(np.broadcast_to(end - first, positions.shape), 0).sum())


# Dropout.


def kept(key: jax.Array, rows: jax.Array, queries: jax.Array, keys: jax.Array, rules: Rules) -> jax.Array:
    """Return the dropout mask of kept weights, `[..., queries, keys]`.

    It is a function of the random key and a weight's position, the same in every implementation. The backward
    recomputes it, so nothing is stored; blocks of any size and order compute their own part.

    Args:
        key: Two uint32 words.
        rows: `[...]`; `batch * heads + head` for each weight matrix.
        queries: Indices of the queries, `[queries]`.
        keys: Indices of the keys, `[keys]`.
        rules: The rules with the dropout rate.

    Source: the finalizer of Appleby's MurmurHash3, which lets every bit of a word reach every other.
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
