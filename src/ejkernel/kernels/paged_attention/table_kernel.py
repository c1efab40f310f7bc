# SPDX-License-Identifier: Apache-2.0
"""The check of a large page table by many blocks of threads, before the kernel that computes the schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .plan_sizes import Sizes, power

WARPS = 4
_BLOCKS = 128  # of threads, at least, if there are as many sequences
_AT_ONCE = 2048  # entries of the page table that a block checks at once


def run(sizes: Sizes, arrays: Sequence[jax.Array], *, interpret: bool = False) -> jax.Array:
    """Return the lengths of the sequences: 0 of one that needs a page outside of the cache.

    Args:
        sizes: The sizes.
        arrays: Offsets, lengths and the page table; int32.
        interpret: Whether to simulate the kernel.
    """
    columns = min(power(sizes.columns or 1), _AT_ONCE)
    rows = max(1, min(_AT_ONCE // columns, power(sizes.sequences) // _BLOCKS))
    call: Callable[..., jax.Array] = pl.pallas_call(
        functools.partial(_check, sizes, (rows, columns)),
        out_shape=jax.ShapeDtypeStruct((sizes.sequences,), jnp.int32),
        grid=(-(-sizes.sequences // rows),),
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
        name="paged_plan_table",
        interpret=interpret,
    )
    offsets, lengths, table = arrays
    return call(offsets, lengths, table.reshape(-1))


def _check(sizes: Sizes, tile: tuple[int, int], offsets: Any, lengths: Any, table: Any, out: Any) -> None:
    (rows, width), columns, page_size = tile, sizes.columns or 1, sizes.page_size
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    is_row = row < sizes.sequences
    length = plt.load(lengths.at[row], mask=is_row, other=0)
    length = jnp.minimum(jnp.maximum(length, 0), columns * page_size)
    first = jnp.zeros_like(length)
    if sizes.window is not None:
        count = _ascending(sizes, offsets, row + 1) - _ascending(sizes, offsets, row)
        first = lax.div(jnp.maximum(length - count - sizes.window, 0), page_size)
    end = lax.div(length + (page_size - 1), page_size)

    def step(index: jax.Array, outside: jax.Array) -> jax.Array:
        column = index * width + jnp.arange(width, dtype=jnp.int32)[None, :]
        needed = (column >= first[:, None]) & (column < end[:, None])
        page = plt.load(table.at[row[:, None] * columns + column], mask=needed, other=0)
        found = (page < 0) | (page >= sizes.pages)
        return outside | jnp.max((found & needed).astype(jnp.int32), axis=1)

    blocks = lax.div(jnp.max(end) + (width - 1), width)
    outside = lax.fori_loop(lax.div(jnp.min(first), width), blocks, step, jnp.zeros_like(length))
    plt.store(out.at[row], jnp.where(outside > 0, 0, length), mask=is_row)


def _ascending(sizes: Sizes, offsets: Any, at: jax.Array) -> jax.Array:
    """Return the offsets at these numbers, made valid: from 0 within the tokens, and ascending."""
    number = jnp.arange(power(sizes.sequences + 1), dtype=jnp.int32)
    given = plt.load(offsets.at[number], mask=(number > 0) & (number <= sizes.sequences), other=0)
    given = jnp.minimum(jnp.maximum(given, 0), sizes.tokens)
    return jnp.max(jnp.where(number[None, :] <= at[:, None], given[None, :], 0), axis=1)
