# SPDX-License-Identifier: Apache-2.0
"""What all implementations share: the description of a call, and sizes of groups in the form that they rely on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import accumulator, has_small_range
from ejkernel.ops.implementation import OperationCall

# The sizes of groups; or those of all, and the number of the first of those that the call has matrices of.
Groups = jax.Array | tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulCall(OperationCall):
    """A call without its arrays, of a product or of its weights' gradient; `m`, `k`, `n` of the one are the other's.

    Attributes:
        rows: `m`: rows of all groups, and those past the last one.
        groups: How many groups there are matrices of.
        inner: `k`: columns of the left operand.
        columns: `n`: columns of the product, or of the right operand of the weights' gradient.
        dtype: Name of the dtype of both operands.
        out_dtype: Name of the result's.
        transpose_rhs: Whether the right operand is `[groups, n, k]`.
        precision: Of the products, as `jax.lax.Precision` calls it; `None`: JAX's default.
        activation: Name of the function of the product; `None`: none.
        gated: Whether it is multiplied with the product of a second matrix of each group.
        scaled: Whether each row is multiplied with a number.
        all_groups: How many groups share the rows, where some have their matrices elsewhere; `None`: none has.
    """

    rows: int
    groups: int
    inner: int
    columns: int
    dtype: str
    out_dtype: str
    transpose_rhs: bool = False
    precision: str | None = None
    activation: str | None = None
    gated: bool = False
    scaled: bool = False
    all_groups: int | None = None

    @property
    def features(self) -> frozenset[str]:
        """See `OperationCall`."""
        asked = {
            "precision": self.precision is not None,
            "activation": self.activation is not None,
            "gate": self.gated,
            "row_scale": self.scaled,
            "first_group": self.all_groups is not None,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)

    @property
    def kept_dtype(self) -> str:
        """Name of the dtype of products that are kept for a backward: the result's, or float32 if that may overflow.

        A float16 product may be infinite where what is made of it, e.g. with a row factor of 1e-3, is not.
        """
        return str(accumulator(self.out_dtype)) if has_small_range(self.out_dtype) else self.out_dtype

    @property
    def products(self) -> int:
        """How many products there are."""
        return 2 if self.gated else 1

    @property
    def usual_rows(self) -> int:
        """How many rows a group has, if all have as many."""
        return self.rows // max(1, self.groups if self.all_groups is None else self.all_groups)


def taken_apart(groups: Groups) -> tuple[jax.Array, jax.Array | None]:
    """Return the sizes of all groups, and the number of the first that there are matrices of; `None`: of all."""
    return groups if isinstance(groups, tuple) else (groups, None)


def clipped_sizes(group_sizes: jax.Array, rows: int) -> jax.Array:
    """Return sizes in int32, at least zero and at most `rows` each."""
    if group_sizes.dtype.itemsize < 4:  # which could not hold `rows`
        group_sizes = group_sizes.astype(jnp.int32)
    return jnp.clip(group_sizes, 0, rows).astype(jnp.int32)


def row_ends(groups: Groups, rows: int) -> jax.Array:
    """Return where the rows of each group end, in int32: negative sizes count as zero, and rows there are not as none.

    Sizes are clipped first, so that their sum does not overflow.
    """
    return jnp.minimum(jnp.cumsum(clipped_sizes(taken_apart(groups)[0], rows), dtype=jnp.int32), rows)


def row_spans(groups: Groups, rows: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Return where the rows of each of the `count` groups that there are matrices of begin and end; see `row_ends`.

    Those before the first of all groups, and past the last, are empty.
    """
    bounds, first = jnp.pad(row_ends(groups, rows), (1, 0)), taken_apart(groups)[1]
    if first is None:
        return bounds[:-1], bounds[1:]
    last = bounds.shape[0] - 1
    at = jnp.clip(first, -count, last) + jnp.arange(count + 1, dtype=jnp.int32)
    own = bounds[jnp.clip(at, 0, last)]
    return own[:-1], own[1:]


def own_rows(groups: Groups, rows: int, count: int) -> jax.Array:
    """Return of each row whether it belongs to one of the `count` groups that there are matrices of."""
    starts, ends = row_spans(groups, rows, count)
    row = jnp.arange(rows, dtype=ends.dtype)
    return (row >= starts[:1].sum(dtype=starts.dtype)) & (row < ends.max(initial=0))


def without_rest(x: jax.Array, own: jax.Array) -> jax.Array:
    """Return rows, or a number for each, with zeros where they are not `own`, whatever lies there."""
    return jnp.where(jnp.expand_dims(own, range(1, x.ndim)), x, jnp.zeros_like(x))
