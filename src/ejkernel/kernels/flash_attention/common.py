# SPDX-License-Identifier: Apache-2.0
"""What every implementation of attention shares: the operands in one form, the rules, and the description of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel import compat
from ejkernel.ops.implementation import Implementation, OperationCall

# The log-sum-exp of a row that sees no key. Large, so that exp(score - lse) is exactly zero in every backward;
# finite, so that no implementation meets inf - inf.
EMPTY_ROW_LSE = 1e30


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
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None = None
    attention_mask: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is static about one call.

    Query `i` stands at position `i + keys - queries`: the last query is aligned with the last key.

    Attributes:
        scale: Factor on the product of query and key.
        left: How many keys before its own position a query sees; `None`: all.
        right: How many keys after its own position a query sees; `None`: all; causal attention is 0.
        soft_cap: Scaled products are squashed into `(-soft_cap, soft_cap)` before the bias is added.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    soft_cap: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall(OperationCall):
    """A call without its arrays: all that decides whether an implementation can run it, and how.

    Attributes:
        query: Shape, as in `Operands`; so are `key`, `value`, `bias` and `attention_mask`.
        dtype: Name of the dtype of query, key and value.
        bias_dtype: Name of the dtype of `bias`, if there is one.
        segments: Whether segment ids are given.
        rules: The static part.
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


class AttentionImplementation(Implementation[AttentionCall]):
    """What the implementations of attention have in common: how they are called, and what a forward leaves."""

    residuals = "the log-sum-exp of every row, [batch, heads, queries] in float32"

    def attend(self, operands: Operands, rules: Rules, params: Any) -> tuple[jax.Array, jax.Array]:
        """Return the output `[batch, queries, heads, value_dim]` and the log-sum-exp."""
        raise NotImplementedError

    def differentiate(
        self, operands: Operands, residuals: tuple[jax.Array, jax.Array], dout: jax.Array, rules: Rules, params: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Return the gradients of query, key, value and bias.

        Args:
            operands: As the forward had them.
            residuals: Output and log-sum-exp, of whichever forward computed them.
            dout: Cotangent of the output.
            rules: As the forward had them.
            params: Parameters of the backward.
        """
        raise NotImplementedError

    def forward(self, call: AttentionCall, /, *args: Any, params: Any) -> tuple[jax.Array, jax.Array]:
        """See `Implementation`."""
        return self.attend(operands_of(args), call.rules, params)

    def backward(
        self, call: AttentionCall, residuals: Any, out: Any, cotangents: tuple[Any, ...], /, *args: Any, params: Any
    ) -> tuple[Any, ...]:
        """See `Implementation`."""
        found = self.differentiate(operands_of(args), (out, residuals), cotangents[0], call.rules, params)
        return (*found, None, None)


def operands_of(args: Sequence[Any]) -> Operands:
    """Return the positional arguments of the operation, of which the last is a pair of segment ids, as operands."""
    *arrays, segments = args
    return Operands(*arrays, *((None, None) if segments is None else segments))


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
        platform=platform,
        device_fingerprint=fingerprint,
        backward=backward,
        partitioned=compat.is_partitioned() and not compat.knows_devices(),
    )


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype that sums run in: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def within_window(query_positions: jax.Array, key_positions: jax.Array, rules: Rules) -> jax.Array | None:
    """Return `[queries, keys]`, true where the rules let a query see a key; `None` if they let it see every key."""
    ahead = key_positions[None, :] - query_positions[:, None]
    visible = None if rules.right is None else ahead <= rules.right
    if rules.left is None:
        return visible
    recent = ahead >= -rules.left
    return recent if visible is None else visible & recent


def visible_pairs(queries: int, keys: int, rules: Rules) -> int:
    """Return how many pairs of a query and a key the rules let see each other, in one head."""
    positions = np.arange(queries) + keys - queries
    first = 0 if rules.left is None else np.clip(positions - rules.left, 0, keys)
    end = keys if rules.right is None else np.clip(positions + rules.right + 1, 0, keys)
    return int(np.maximum(np.broadcast_to(end - first, positions.shape), 0).sum())
