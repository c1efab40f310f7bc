# SPDX-License-Identifier: Apache-2.0
"""What every implementation of attention shares: the operands in one form, the rules, and the description of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.kernels._numbers import accumulator as accumulator
from ejkernel.ops.implementation import Implementation, OperationCall

# The log-sum-exp of a row that sees no key. Large, so that exp(score - lse) is exactly zero in every backward;
# finite, so that no implementation meets inf - inf.
EMPTY_ROW_LSE = 1e30


_LARGEST_SCALE = 1024.0  # what a GPU's kernels take


class Operands(NamedTuple):
    """The arrays of one call.

    Attributes:
        query: `[batch, queries, heads, head_dim]`.
        key: `[batch, keys, groups, head_dim]`; head `i` reads group `i // (heads // groups)`.
        value: `[batch, keys, groups, value_dim]`.
        bias: Added to the logits; four axes, each of full size or 1, `[batch, heads, queries, keys]`.
        attention_mask: True where a key is visible; axes as `bias`.
        query_segments: `[batch, queries]`; a query sees the keys of its own segment.
        key_segments: `[batch, keys]`.
        query_lengths: `[batch]` in int32; queries from there on see nothing.
        key_lengths: `[batch]` in int32; keys from there on are hidden.
        sinks: `[heads]`; a logit that takes part in every row's softmax, with a value of zero.
        dropout_key: Two words, in uint32, that the mask of the dropout is drawn with; see `dropout.kept`.
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
    """What is static about one call.

    Query `i` stands at position `i + keys - queries`: the last query is aligned with the last key.

    Attributes:
        scale: Factor on the product of query and key.
        left: How many keys before its own position a query sees; `None`: all.
        right: How many keys after its own position a query sees; `None`: all; causal attention is 0.
        soft_cap: Scaled products are squashed into `(-soft_cap, soft_cap)` before the bias is added.
        cap_after_bias: Whether the sum of product and bias is squashed instead.
        dropout_rate: With what probability a weight is dropped; the others are divided by one less it.
        precision: Of matrix products, as `jax.lax.Precision` calls it; `None`: JAX's default.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    soft_cap: float | None = None
    cap_after_bias: bool = False
    dropout_rate: float = 0.0
    precision: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall(OperationCall):
    """A call without its arrays: all that decides whether an implementation can run it, and how.

    Attributes:
        query: Shape, as in `Operands`; so are `key`, `value`, `bias` and `attention_mask`.
        dtype: Name of the dtype of query, key and value.
        bias_dtype: Name of the dtype of `bias`, if there is one.
        segments: Whether segment ids are given.
        rules: The static part.
        query_lengths: Whether they are given; so with `key_lengths`.
        return_lse: Whether the log-sum-exp is a result too, so that a backward has its cotangent.
        deterministic: Whether results, and gradients above all, must repeat bit by bit.
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
    return_lse: bool = False
    deterministic: bool = False

    @property
    def features(self) -> frozenset[str]:
        """See `OperationCall`; attention sinks are not among them, for `AttentionImplementation` brings them in."""
        asked = {
            "query_lengths": self.query_lengths,
            "key_lengths": self.key_lengths,
            # Every forward has it; what takes more is its cotangent.
            "return_lse": self.return_lse and self.backward,
            "deterministic": self.deterministic,
            "soft_cap_after_bias": self.rules.cap_after_bias,
            "dropout_rate": self.rules.dropout_rate > 0,
            "precision": self.rules.precision is not None,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)


class AttentionImplementation(Implementation[AttentionCall]):
    """What the implementations of attention have in common: how they are called, and what a forward leaves.

    Attention sinks change what `attend` found by one factor a row, and nothing else that `differentiate` reads, so
    that they are brought in here, for all implementations.
    """

    residuals = "the log-sum-exp of every row, [batch, heads, queries] in float32"

    def attend(self, operands: Operands, rules: Rules, params: Any) -> tuple[jax.Array, jax.Array]:
        """Return the output `[batch, queries, heads, value_dim]` and the log-sum-exp; sinks are left out."""
        raise NotImplementedError

    def differentiate(
        self, operands: Operands, residuals: tuple[jax.Array, jax.Array], dout: jax.Array, rules: Rules, params: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Return the gradients of query, key, value and bias.

        Where `"return_lse"` is among the features, the cotangent of the log-sum-exp is given as `dlse`.

        Args:
            operands: As the forward had them.
            residuals: Output and log-sum-exp, of whichever forward computed them.
            dout: Cotangent of the output.
            rules: As the forward had them.
            params: Parameters of the backward.
        """
        raise NotImplementedError

    def forward(self, call: AttentionCall, /, *args: Any, params: Any) -> tuple[Any, jax.Array]:
        """See `Implementation`."""
        operands = operands_of(args)
        out, lse = self.attend(operands._replace(sinks=None), call.rules, params)
        if operands.sinks is not None:
            out, lse = with_sinks(out, lse, operands.sinks)
        return ((out, returned_lse(lse)) if call.return_lse else out), lse

    def backward(
        self, call: AttentionCall, residuals: Any, out: Any, cotangents: tuple[Any, ...], /, *args: Any, params: Any
    ) -> tuple[Any, ...]:
        """See `Implementation`."""
        operands, lse, dlse = operands_of(args), residuals, None
        dout = cotangents[0]
        if call.return_lse:
            # A row that sees no key has minus infinity, which no argument moves.
            out, dlse = out[0], jnp.where(lse == EMPTY_ROW_LSE, 0, cotangents[1].astype(lse.dtype))
        more = {} if dlse is None else {"dlse": dlse}
        found = self.differentiate(operands._replace(sinks=None), (out, lse), dout, call.rules, params, **more)
        dsinks = None if operands.sinks is None else _gradient_of_sinks(operands.sinks, out, lse, dout, dlse)
        return (*found, None, None, None, dsinks, None)[: len(args)]


def with_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return output and log-sum-exp as they are if every row's softmax has one more logit, of a value of zero."""
    sink, empty = sinks.astype(lse.dtype)[None, :, None], lse == EMPTY_ROW_LSE
    seen = jnp.where(empty, 0, lse)  # keeps what is not used, and its derivative, finite
    both = jnp.logaddexp(seen, jnp.broadcast_to(sink, seen.shape))
    share = jnp.where(empty, 0, jnp.exp(seen - both))
    scaled = out.astype(lse.dtype) * share.transpose(0, 2, 1)[..., None]
    # A sink of minus infinity is none: a row that sees nothing else has nothing at all.
    alone = jnp.where(sink == -jnp.inf, EMPTY_ROW_LSE, sink)
    return scaled.astype(out.dtype), jnp.where(empty, alone, both)


def returned_lse(lse: jax.Array) -> jax.Array:
    """Return the log-sum-exp as users have it: minus infinity for a row that sees no key."""
    return jnp.where(lse == EMPTY_ROW_LSE, -jnp.inf, lse)


def _gradient_of_sinks(
    sinks: jax.Array, out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> jax.Array:
    # The sink's value is zero, so its weight pulls at the output's product with the cotangent alone.
    pull = jnp.einsum("bqhe,bqhe->bhq", out, dout, preferred_element_type=lse.dtype)
    pull = -pull if dlse is None else dlse - pull
    # Rounding may leave a large log-sum-exp below the sink.
    weight = jnp.exp(jnp.minimum(sinks.astype(lse.dtype)[None, :, None] - lse, 0))
    return (weight * pull).sum(axis=(0, 2)).astype(sinks.dtype)


def operands_of(args: Sequence[Any]) -> Operands:
    """Return the positional arguments of the operation, of which some are pairs, as operands."""
    query, key, value, bias, mask, segments, lengths, sinks, dropout_key = (*args, *[None] * 6)[:9]
    query_segments, key_segments = segments or (None, None)
    query_lengths, key_lengths = lengths or (None, None)
    return Operands(
        query=query,
        key=key,
        value=value,
        bias=bias,
        attention_mask=mask,
        query_segments=query_segments,
        key_segments=key_segments,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        sinks=sinks,
        dropout_key=dropout_key,
    )


def describe(
    operands: Operands, rules: Rules, *, platform: str | None = None, fingerprint: str = "", backward: bool = False
) -> AttentionCall:
    """Return the description of a call; only shapes and dtypes of `operands` are looked at."""
    bias, mask = operands.bias, operands.attention_mask
    return AttentionCall(
        query=tuple(operands.query.shape),
        key=tuple(operands.key.shape),
        value=tuple(operands.value.shape),
        dtype=str(operands.query.dtype),
        rules=rules,
        bias=None if bias is None else tuple(bias.shape),
        bias_dtype=None if bias is None else str(bias.dtype),
        attention_mask=None if mask is None else tuple(mask.shape),
        segments=operands.query_segments is not None,
        query_lengths=operands.query_lengths is not None,
        key_lengths=operands.key_lengths is not None,
        platform=platform,
        device_fingerprint=fingerprint,
        backward=backward,
        partitioned=compat.is_partitioned() and not compat.knows_devices(),
    )


def within_window(query_positions: jax.Array, key_positions: jax.Array, rules: Rules) -> jax.Array | None:
    """Return `[queries, keys]`, true where the rules let a query see a key; `None` if they let it see every key.

    Positions are those of the arrays, whatever the lengths of an example: with lengths' ends aligned it would be known
    only as the program runs which blocks a causal mask hides.
    """
    ahead = key_positions[None, :] - query_positions[:, None]
    visible = None if rules.right is None else ahead <= rules.right
    if rules.left is None:
        return visible
    recent = ahead >= -rules.left
    return recent if visible is None else visible & recent


def scale_reason(call: AttentionCall, name: str) -> str | None:
    """Return why a kernel that subtracts scaled logits does not run `call`, and what would; `None` if it does.

    It computes `products * scale - maximum` in one operation, where the maximum was rounded before. With logits of 1e9
    the difference is off by up to 32, and its exponential by any factor.
    """
    if call.rules.scale <= _LARGEST_SCALE:
        return None
    return (
        f"softmax_scale is {call.rules.scale:g}, and {name} takes up to {_LARGEST_SCALE:g}, beyond which the rounding "
        "of logits makes its weights inexact; use 'xla'."
    )


def visible_pairs(queries: int, keys: int, rules: Rules) -> int:
    """Return how many pairs of a query and a key the rules let see each other, in one head."""
    positions = np.arange(queries) + keys - queries
    first = 0 if rules.left is None else np.clip(positions - rules.left, 0, keys)
    end = keys if rules.right is None else np.clip(positions + rules.right + 1, 0, keys)
    return int(np.maximum(np.broadcast_to(end - first, positions.shape), 0).sum())
