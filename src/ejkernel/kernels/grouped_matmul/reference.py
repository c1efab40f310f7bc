# SPDX-License-Identifier: Apache-2.0
"""Grouped products in plain JAX: a loop over tiles of rows, each multiplied by the matrix of its group.

Each tile belongs to one group, so the work grows with the rows and not with the groups, and NaN or infinity in one
group cannot reach rows of another. The number of tiles follows from shapes, so JAX can differentiate the loop in both
modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import compat
from ejkernel.kernels._numbers import accumulator
from ejkernel.kernels._varying import unify_varying

from .common import Groups, row_spans


class Tile(NamedTuple):
    """A tile of rows of one group: scalar arrays, or arrays with one entry per tile.

    Attributes:
        group: Number of the group.
        start: The first row to read.
        first: The first row of the tile.
        end: One past the last row of the tile.
    """

    group: jax.Array
    start: jax.Array
    first: jax.Array
    end: jax.Array


def tiles_of(spans: tuple[jax.Array, jax.Array], rows: int, block: int) -> Tile:
    """Return tiles of at most `block` rows, in order; surplus tiles are empty."""
    starts, ends = spans
    groups = starts.shape[0]
    counts = lax.div(ends - starts + (block - 1), jnp.int32(block))
    last = jnp.cumsum(counts, dtype=jnp.int32)
    # Each group may have one partial tile; the number of tiles is at most the number of rows.
    number = jnp.arange(min(rows // block + groups, rows), dtype=jnp.int32)
    # Count the groups that end at or before each tile: a cumulative histogram, with memory linear in tiles and groups.
    ending = jnp.zeros(number.shape[0] + 1, jnp.int32).at[jnp.minimum(last, number.shape[0])].add(1)
    group = jnp.cumsum(ending[:-1], dtype=jnp.int32)
    known = jnp.minimum(group, groups - 1)
    first = starts[known] + (number - (last - counts)[known]) * block
    first = jnp.where(group < groups, first, rows)
    end = jnp.minimum(first + block, jnp.where(group < groups, ends[known], 0))
    return Tile(known, jnp.minimum(first, rows - block), first, end)


def product(
    lhs: jax.Array,
    rhs: jax.Array,
    groups: Groups,
    *,
    block: int,
    transpose_rhs: bool = False,
    precision: str | None = None,
) -> jax.Array:
    """Return the product `[rows, columns]` in the accumulator dtype; see `grouped_matmul`."""
    contracted = (((1,), (1 if transpose_rhs else 0,)), ((), ()))
    sum_dtype = accumulator(lhs.dtype)

    def multiply(part: jax.Array, matrix: jax.Array) -> jax.Array:
        return lax.dot_general(part, matrix, contracted, precision=precision, preferred_element_type=sum_dtype)

    out = jnp.zeros((lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]), sum_dtype)
    return by_tiles(multiply, lhs, rhs, groups, out, block=block)


def by_tiles(
    multiply: Callable[[Any, Any], jax.Array], lhs: Any, rhs: Any, groups: Groups, out: jax.Array, *, block: int
) -> jax.Array:
    """Return the product of each group's rows with its matrix, computed in tiles of at most `block` rows.

    Args:
        multiply: Returns the product of a tile: the slice of `lhs` for its rows and the slice of `rhs` for its group.
        lhs: A tree of arrays with the rows as their first axis, e.g. an array and its scales.
        rhs: A tree of arrays with the groups as their first axis.
        groups: The groups.
        out: Zeros, in the shape and dtype of the result; rows outside the groups stay zero.
        block: Rows of a tile.
    """
    rows, count = out.shape[0], jax.tree.leaves(rhs)[0].shape[0]
    lhs, rhs, groups, out = unify_varying((lhs, rhs, groups, out))  # an empty result, too, has the type of others
    if not rows or not count:
        return out
    spans = row_spans(groups, rows, count)
    block = min(block, rows)

    def step(out: jax.Array, tile: Tile) -> tuple[jax.Array, None]:
        part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, tile.start, block), lhs)
        matrix = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, tile.group, keepdims=False), rhs)
        new = multiply(part, matrix)
        # The rows read may begin before the tile or end after it: rows of other groups keep their values.
        new = jnp.where(_own(tile, block), new, lax.dynamic_slice_in_dim(out, tile.start, block))
        return lax.dynamic_update_slice_in_dim(out, new, tile.start, 0), None

    return lax.scan(step, out, tiles_of(spans, rows, block))[0]


def weights_gradient(
    lhs: jax.Array, rhs: jax.Array, groups: Groups, *, count: int, block: int, precision: str | None = None
) -> jax.Array:
    """Return the gradient `[count, k, n]` in the accumulator dtype; see `grouped_matmul_wgrad`."""
    rows, sum_dtype = lhs.shape[0], accumulator(lhs.dtype)
    out = jnp.zeros((count, lhs.shape[1], rhs.shape[1]), sum_dtype)
    lhs, rhs, groups, out = unify_varying((lhs, rhs, groups, out))
    if not out.shape[0] or not rows:
        return out
    spans = row_spans(groups, rows, count)
    block = min(block, rows)
    # On CPUs XLA has no bfloat16 product with a float32 result for one of the layouts that `vmap` leads to.
    dtype = sum_dtype if compat.programs.target_kind() == "cpu" else lhs.dtype

    def step(out: jax.Array, tile: Tile) -> tuple[jax.Array, None]:
        own = _own(tile, block)
        # Mask both operands: masking one would leave zero times NaN.
        left, right = (jnp.where(own, lax.dynamic_slice_in_dim(x, tile.start, block), 0) for x in (lhs, rhs))
        left, right = left.astype(dtype), right.astype(dtype)
        contracted = (((0,), (0,)), ((), ()))
        new = lax.dot_general(left, right, contracted, precision=precision, preferred_element_type=sum_dtype)
        before = lax.dynamic_index_in_dim(out, tile.group, keepdims=False)
        return lax.dynamic_update_index_in_dim(out, before + new, tile.group, 0), None

    return lax.scan(step, out, tiles_of(spans, rows, block))[0]


def _own(tile: Tile, block: int) -> jax.Array:
    row = (tile.start + jnp.arange(block, dtype=jnp.int32))[:, None]
    return (row >= tile.first) & (row < tile.end)
