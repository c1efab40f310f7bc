# SPDX-License-Identifier: Apache-2.0
"""What the backward kernels are told: sizes, rules and arrays, in the form that they are loaded in."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import LOG2_E
from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE, AttentionCall, Rules

from .availability import DTYPES

_NATIVE_DIMS = (32, 64, 128, 192, 256)


class Inputs(NamedTuple):
    """The arrays that the kernels read.

    Lengths of the first four are padded to multiples of 8, and their head dimensions to `padded_dim`, because the
    copies' tiles are no smaller; the others are padded to whole blocks.

    Attributes:
        query, key, value, dout: As in `Operands`.
        shift: `[batch, heads, queries]`, what a row's scores are shifted by: see `row_shift`.
        delta: The row's sum of `out * dout`, negated; with a dropout, times the part of weights that it keeps.
        ranges: Of a kernel's tiles, as `backward_visibility` has them.
        query_segments, key_segments: `[batch, length]`.
        key_lengths: `[batch]`.
        bias: What is added to the scores, `[batch or 1, heads or 1, queries, keys]`.
        mask: A bit for each pair, set where the key is visible, 32 to a word: `[batch or 1, heads or 1, queries / 32,
            keys]`, or `keys / 32, queries` for a kernel whose blocks own queries.
        dropout: `[batch, heads, queries]`, the words of the rows that a dropout's mask is drawn with.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    dout: jax.Array
    shift: jax.Array
    delta: jax.Array
    ranges: jax.Array
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    key_lengths: jax.Array | None = None
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    dropout: jax.Array | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is static about one backward.

    Attributes:
        batch, heads, groups: As in `Operands`.
        queries, keys: The lengths, not padded.
        head_dim, value_dim: As the kernels compute with them: padded.
        dtype: Of query, key, value and the output's cotangent.
        rules: Of the call.
        segments: Whether there are segment ids.
        key_lengths: Whether only some keys of each example count.
        mask: Whether there is a boolean mask.
        bias: The first two sizes of the bias, whose gradient is wanted; `None` if there is none.
        bias_dtype: In which it is loaded.
        bias_whole: Whether the bias has an element of its own for every score, in `dtype`: then no element of its
            gradient is a sum.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    groups: int
    head_dim: int
    value_dim: int
    dtype: Any
    rules: Rules
    segments: bool = False
    key_lengths: bool = False
    mask: bool = False
    bias: tuple[int, int] | None = None
    bias_dtype: Any = None
    bias_whole: bool = False

    @property
    def heads_per_group(self) -> int:
        """How many query heads read one key head."""
        return self.heads // self.groups

    @property
    def ahead(self) -> int:
        """What is added to a query's index to get its position among the keys."""
        return self.keys - self.queries

    @property
    def shift_in_scores(self) -> bool:
        """Whether a row's shift can be where its sum of products starts from: nothing happens to the score between."""
        return self.rules.soft_cap is None and self.bias is None

    @property
    def gradient_scale(self) -> float:
        """What sums for query and key are multiplied with: by the scale, and for the weights that a dropout left."""
        return self.rules.scale * self.value_scale

    @property
    def value_scale(self) -> float:
        """What sums for value and bias are multiplied with."""
        return 1 / (1 - self.rules.dropout_rate)

    @property
    def bias_gradient_dtype(self) -> Any:
        """The dtype that the gradient of the bias leaves the kernel in."""
        return self.dtype if self.bias_whole else jnp.dtype(jnp.float32)

    def needed_masks(self, keys_per_block: int, *, walks_queries: bool) -> tuple[bool, bool]:
        """Return whether a block may meet masked tiles before, and after, those without a mask.

        Args:
            keys_per_block: Keys in a tile, or in a block that all its tiles share.
            walks_queries: Whether the tiles are those of a block of keys, in the order of the queries.
        """
        # Copies fill up with zeros what lies behind the last key, and a score of zero would have a weight.
        tail, rules = self.key_lengths or self.keys % keys_per_block != 0, self.rules
        by_end, by_start = self.segments or rules.right is not None, self.segments or rules.left is not None
        # Blocks of keys that have no tile without a mask have all of them before, blocks of queries all of them after.
        if walks_queries:
            return by_end or by_start or tail, by_start
        return by_start, by_end or by_start or tail


def row_shift(lse: jax.Array, problem: Problem) -> jax.Array:
    """Return what turns a row's scores into exponents.

    It is in the units of the products of query and key, or base 2, or with a bias in those of the scores: of a row that
    the lowest float hides altogether the log-sum-exp is that float, which any factor would make infinite.
    """
    if problem.shift_in_scores:
        return lse * (-1 / problem.rules.scale)
    return lse * -LOG2_E if problem.bias is None else -lse


def padded_dim(dim: int) -> int:
    """Return the smallest head dimension that the kernels compute with and that holds `dim`."""
    return next(size for size in _NATIVE_DIMS if dim <= size)


def pad_axis(x: jax.Array, axis: int, multiple: int, fill: float = 0) -> jax.Array:
    """Pad one axis to a multiple."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)], constant_values=fill)


def problem_of(call: AttentionCall) -> Problem:
    """Return what is static about a backward, from its description."""
    scores = (call.query[0], call.query[2])
    return Problem(
        batch=call.query[0],
        queries=call.query[1],
        keys=call.key[1],
        heads=call.query[2],
        groups=call.key[2],
        head_dim=padded_dim(call.query[3]),
        value_dim=padded_dim(call.value[3]),
        dtype=jnp.dtype(call.dtype),
        rules=call.rules,
        segments=call.segments,
        key_lengths=call.key_lengths,
        mask=call.attention_mask is not None,
        bias=None if call.bias is None else (call.bias[0], call.bias[1]),
        bias_dtype=jnp.dtype(call.bias_dtype if call.bias_dtype in DTYPES else jnp.float32),
        bias_whole=call.bias == (*scores, call.query[1], call.key[1]) and call.bias_dtype == call.dtype,
    )


def row_inputs(
    residuals: tuple[jax.Array, jax.Array], dout: jax.Array, problem: Problem, q_block: int
) -> tuple[jax.Array, jax.Array]:
    """Return `Inputs.shift` and `Inputs.delta`; rows of the padding are such that see no key."""
    out, lse = residuals
    # Not an einsum: a program without a matrix product can be compiled where the device is not. It takes 40 of 850
    # microseconds of one gradient, at the memory's speed.
    delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(axis=3).transpose(0, 2, 1)
    shift = row_shift(pad_axis(lse, 2, q_block, EMPTY_ROW_LSE), problem)
    return shift, pad_axis(-delta * (1 - problem.rules.dropout_rate), 2, q_block)
