# SPDX-License-Identifier: Apache-2.0
"""Definitions that all implementations share: the description of a call, and canonical group sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import accumulator, has_small_range
from ejkernel.ops.implementation import OperationCall

# The sizes of the groups; or the sizes of all groups, and the number of the first group with a matrix in this call.
Groups = jax.Array | tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulCall(OperationCall):
    """A call of the product or of its weights' gradient, without arrays; `m`, `k`, `n` are the product's in both.

    Attributes:
        rows: `m`: all rows, including those past the last group.
        groups: Number of groups with matrices in this call.
        inner: `k`: columns of the left operand.
        columns: `n`: columns of the product, or of the right operand of the weights' gradient.
        dtype: Name of the dtype of both operands.
        out_dtype: Name of the dtype of the result.
        transpose_rhs: Whether the right operand is `[groups, n, k]`.
        precision: Precision of the products, named as in `jax.lax.Precision`; `None` means JAX's default.
        activation: Name of the function applied to the product, or `None`.
        gated: Whether the result is multiplied by the product with a second matrix of each group.
        scaled: Whether each row is multiplied by a factor.
        all_groups: Number of groups that share the rows, if other devices have some of the matrices; else `None`.
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
        """Dtype of the products saved for the backward: the result's, or float32 if that may overflow.

        A float16 product may overflow although the result is finite, e.g. with a row factor of 1e-3.
        """
        return str(accumulator(self.out_dtype)) if has_small_range(self.out_dtype) else self.out_dtype

    @property
    def products(self) -> int:
        """Number of products."""
        return 2 if self.gated else 1

    @property
    def padded_groups(self) -> int | None:
        """`all_groups`, with the empty groups that launches add before and after."""
        return None if self.all_groups is None else self.all_groups + 2 * self.groups

    @property
    def usual_rows(self) -> int:
        """Rows per group if all groups have the same size."""
        return self.rows // max(1, self.groups if self.all_groups is None else self.all_groups)

    @property
    def own_rows(self) -> int:
        """Rows of the groups that have their matrices here, if all groups have the same size."""
        return self.rows if self.all_groups is None else -(-self.rows * self.groups // max(1, self.all_groups))


def taken_apart(groups: Groups) -> tuple[jax.Array, jax.Array | None]:
    """Return the sizes of all groups, and the number of the first with a matrix; `None` if all have one."""
    return groups if isinstance(groups, tuple) else (groups, None)


def clipped_sizes(group_sizes: jax.Array, rows: int) -> jax.Array:
    """Return sizes in int32, each clipped to 0 and `rows`."""
    if group_sizes.dtype.itemsize < 4:  # too narrow for `rows`
        group_sizes = group_sizes.astype(jnp.int32)
    return jnp.clip(group_sizes, 0, rows).astype(jnp.int32)


def row_ends(groups: Groups, rows: int) -> jax.Array:
    """Return the end of the rows of each group, in int32; negative sizes count as zero, ends are at most `rows`.

    Sizes are clipped first, so that their sum does not overflow.
    """
    return jnp.minimum(jnp.cumsum(clipped_sizes(taken_apart(groups)[0], rows), dtype=jnp.int32), rows)


def row_spans(groups: Groups, rows: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the starts and ends of the rows of the `count` groups with matrices; see `row_ends`.

    Groups before the first or past the last of all groups are empty.
    """
    bounds, first = jnp.pad(row_ends(groups, rows), (1, 0)), taken_apart(groups)[1]
    if first is None:
        return bounds[:-1], bounds[1:]
    last = bounds.shape[0] - 1
    at = jnp.clip(first, -count, last) + jnp.arange(count + 1, dtype=jnp.int32)
    own = bounds[jnp.clip(at, 0, last)]
    return own[:-1], own[1:]


def own_rows(groups: Groups, rows: int, count: int) -> jax.Array:
    """Return for each row whether it belongs to one of the `count` groups with matrices."""
    starts, ends = row_spans(groups, rows, count)
    row = jnp.arange(rows, dtype=ends.dtype)
    return (row >= starts[:1].sum(dtype=starts.dtype)) & (row < ends.max(initial=0))


def without_rest(x: jax.Array, own: jax.Array) -> jax.Array:
    """Return `x`, one entry per row, with zeros where `own` is false, even if the entry is NaN."""
    return jnp.where(jnp.expand_dims(own, range(1, x.ndim)), x, jnp.zeros_like(x))


# The epilogue of grouped products: an activation, a gate, a factor for each row.

PREACTIVATIONS: Final = "preactivations"  # the residuals: the products, in the call's `kept_dtype`


def _relu2(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: Final[Mapping[str, Callable[[jax.Array], jax.Array]]] = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "relu": jax.nn.relu,
    "relu2": _relu2,
}


def finished(
    products: Sequence[jax.Array], own: jax.Array, row_scale: jax.Array | None, activation: str | None
) -> jax.Array:
    """Return the result of the epilogue, in the dtype of the products, which is the accumulator dtype.

    Args:
        products: The product, and the gate's product if any; rows outside all groups are zero.
        own: For each row, whether it belongs to a group.
        row_scale: A factor for each row, or `None`; rows outside all groups ignore it.
        activation: One of `ACTIVATIONS`, for the first product, or `None`.
    """
    first, *others = products
    out = first if activation is None else ACTIVATIONS[activation](first)
    for other in others:
        out = out * other
    return out if row_scale is None else scaled_rows(out, row_scale, own)


def activated(
    call: GroupedMatmulCall,
    product: Callable[[jax.Array], jax.Array],
    rhs: Any,
    groups: Groups,
    gate: Any,
    row_scale: Any,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the output and the products to save, given a function of the matrices that returns the wide product."""
    products = [product(matrices) for matrices in (rhs, gate) if matrices is not None]
    own = own_rows(groups, call.rows, call.groups)
    out = finished(products, own, row_scale, call.activation).astype(call.out_dtype)
    return out, tuple(x.astype(call.kept_dtype) for x in products)


def scaled_rows(rows: jax.Array, row_scale: jax.Array, own: jax.Array) -> jax.Array:
    """Return own rows times their factors, multiplied in the accumulator dtype, and zeros for the others."""
    wide = accumulator(rows.dtype)
    factors = without_rest(row_scale.astype(wide), own)
    return (without_rest(rows, own).astype(wide) * factors[:, None]).astype(rows.dtype)
