# SPDX-License-Identifier: Apache-2.0
"""The layout of columns in groups: each group starts a new block.

The transpose of rows in groups, as the gradient of the groups' matrices reads it. A block of 128 belongs to one group;
the last one of each group ends with zeros, and so does the array. Blocks of rows outside all groups are zeros, too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._varying import unify_varying
from ejkernel.kernels.grouped_matmul.common import Groups, clipped_sizes, row_ends, taken_apart

from .common import BLOCK


def block_count(rows: int, groups: int) -> int:
    """Return enough blocks for any sizes: a group, or the rows after the last one, may each have one partial block."""
    return rows // BLOCK + groups + 1


def blocks_of(group_sizes: jax.Array, rows: int) -> jax.Array:
    """Return int32 `[blocks, 2]`: the first row of each block, and how many of its 128 rows are its group's.

    Blocks of the rows after the last group have none, and blocks after these begin at `rows`.
    """
    groups = group_sizes.shape[0]
    ends = jnp.append(row_ends(group_sizes, rows), jnp.int32(rows))
    starts = jnp.pad(ends[:-1], (1, 0))
    counts = _count(ends - starts)
    last = jnp.cumsum(counts, dtype=jnp.int32)
    number = jnp.arange(block_count(rows, groups), dtype=jnp.int32)
    group = jnp.sum(number[:, None] >= last[None], axis=1, dtype=jnp.int32)
    known = jnp.minimum(group, groups)
    first = jnp.where(group <= groups, starts[known] + (number - (last - counts)[known]) * BLOCK, rows)
    own = jnp.where(group < groups, jnp.minimum(ends[known] - first, BLOCK), 0)
    return jnp.stack([first, own], axis=1)


def in_columns(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Return the transpose of rows `[m, k]`, with zeros behind each group: `[k, 128 * blocks]`."""
    table = blocks_of(group_sizes, x.shape[0])
    within = jnp.arange(BLOCK, dtype=jnp.int32)[None]
    rows, own = (table[:, :1] + within).reshape(-1), (within < table[:, 1:]).reshape(-1, 1)
    found = x.at[rows].get(mode="clip") if len(x) else jnp.zeros((len(rows), x.shape[1]), x.dtype)
    found, _ = unify_varying((found, x))
    return jnp.where(own, found, jnp.zeros_like(found)).T


def whole_blocks(groups: Groups, columns: int) -> Groups:
    """Return the groups of columns: their sizes are multiples of 128."""
    sizes, first = taken_apart(groups)
    found = _count(clipped_sizes(sizes, columns)) * BLOCK
    return found if first is None else (found, first)


def _count(sizes: jax.Array) -> jax.Array:
    return lax.div(sizes + (BLOCK - 1), jnp.int32(BLOCK))
