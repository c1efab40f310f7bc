# SPDX-License-Identifier: Apache-2.0
"""What all implementations share: the description of a call, and sizes of groups in the form that they rely on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.ops.implementation import OperationCall


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulCall(OperationCall):
    """A call without its arrays, of a product or of its weights' gradient; `m`, `k`, `n` of the one are the other's.

    Attributes:
        rows: `m`: rows of all groups, and those past the last one.
        groups: How many groups there are.
        inner: `k`: columns of the left operand.
        columns: `n`: columns of the product, or of the right operand of the weights' gradient.
        dtype: Name of the dtype of both operands.
        out_dtype: Name of the result's.
        transpose_rhs: Whether the right operand is `[groups, n, k]`.
        precision: Of the products, as `jax.lax.Precision` calls it; `None`: JAX's default.
        activation: Name of the function of the product; `None`: none.
        gated: Whether it is multiplied with the product of a second matrix of each group.
        scaled: Whether each row is multiplied with a number.
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

    @property
    def features(self) -> frozenset[str]:
        """See `OperationCall`."""
        asked = {
            "precision": self.precision is not None,
            "activation": self.activation is not None,
            "gate": self.gated,
            "row_scale": self.scaled,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)

    @property
    def products(self) -> int:
        """How many products there are."""
        return 2 if self.gated else 1


def clipped_sizes(group_sizes: jax.Array, rows: int) -> jax.Array:
    """Return sizes in int32, at least zero and at most `rows` each."""
    if group_sizes.dtype.itemsize < 4:  # which could not hold `rows`
        group_sizes = group_sizes.astype(jnp.int32)
    return jnp.clip(group_sizes, 0, rows).astype(jnp.int32)


def row_ends(group_sizes: jax.Array, rows: int) -> jax.Array:
    """Return where the rows of each group end, in int32: negative sizes count as zero, and rows there are not as none.

    Sizes are clipped first, so that their sum does not overflow.
    """
    return jnp.minimum(jnp.cumsum(clipped_sizes(group_sizes, rows), dtype=jnp.int32), rows)


def without_rest(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Return rows, or a number for each, with those past the last group set to zero, whatever lies there."""
    ends = row_ends(group_sizes, x.shape[0])
    within = jnp.arange(x.shape[0], dtype=ends.dtype) < ends.max(initial=0)
    return jnp.where(jnp.expand_dims(within, range(1, x.ndim)), x, jnp.zeros_like(x))
