# SPDX-License-Identifier: Apache-2.0
"""Attention in plain JAX: logits, masks and weights of one pair of blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._numbers import at_most_zero
from ejkernel.kernels._varying import of_any_example

from ._xla_blocks import Blocks, Grid, RowBlocks, full, put, take
from .common import kept, within_window

_LARGE_LSE = 1024.0  # a smaller log-sum-exp is exact to 6e-5, and so are the weights computed from it


class Logits(NamedTuple):
    """The logits of one pair: `values * factor`.

    The maximum is subtracted from the values, so the largest difference is exactly zero for every factor. A compiler
    may fuse `values * factor - top` into one operation with one rounding, although `top` was rounded before.

    Attributes:
        values: -inf where masked.
        factor: A positive number; 1 with a bias.
        slope: The derivative of the soft cap; `None` without one.
    """

    values: jax.Array
    factor: float
    slope: jax.Array | None


def factor_of(blocks: Blocks, grid: Grid) -> float:
    """Return the factor of the logits; see `Logits`."""
    if blocks.bias is not None and not grid.rules.cap_after_bias:
        return 1.0
    return grid.rules.scale if grid.rules.soft_cap is None else grid.rules.soft_cap


def logits_of(blocks: Blocks, grid: Grid, pair: jax.Array) -> Logits:
    """Return the logits of one pair."""
    slope, factor = None, factor_of(blocks, grid)
    values = grid.dot("bgrqd,bgkd->bgrqk", take(blocks.query, pair[0]), take(blocks.key, pair[1]))
    bias = None if blocks.bias is None else grid.part_of(blocks.bias, pair).astype(grid.dtype)
    if bias is not None or grid.rules.soft_cap is not None:
        values = values * grid.rules.scale
    if bias is not None and grid.rules.cap_after_bias:
        values = values + jnp.where(bias == -jnp.inf, 0, bias)  # the cap would turn -inf into a finite number
        bias = jnp.where(bias == -jnp.inf, bias, 0)
    if grid.rules.soft_cap is not None:
        values = jnp.tanh(values / grid.rules.soft_cap)
        slope = 1 - values * values
        if factor == 1:
            values = values * grid.rules.soft_cap
    if bias is not None:
        values = values + bias
    for visible in _masks(blocks, grid, pair):
        values = jnp.where(visible, values, -jnp.inf)
    return Logits(values, factor, slope)


def weights_of(logits: Logits, top: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the new maximum of each row, the weights, and the rescaling factor for the sums of earlier blocks."""
    # The result does not depend on `top`, so neither do its derivatives.
    new_top = lax.stop_gradient(jnp.maximum(top, logits.values.max(axis=-1)))
    # For a row without a visible key so far, exp(-inf - 0) is zero but exp(-inf + inf) would be NaN.
    shift = jnp.where(new_top == -jnp.inf, 0, new_top)
    differences = logits.values - shift[..., None]
    if logits.factor == 1:  # logits with a bias may be rounded differently than for the maximum
        differences = at_most_zero(differences)
    decay = jnp.exp((lax.stop_gradient(top) - shift) * logits.factor)
    return new_top, jnp.exp(differences * logits.factor), decay


def gradient_of_weights(dout: jax.Array, value: jax.Array, keep: jax.Array | None, grid: Grid) -> jax.Array:
    """Return the gradient of one pair's weights before dropout."""
    dweights = grid.dot("bgrqe,bgke->bgrqk", dout, value)
    return dweights if keep is None else jnp.where(keep, dweights / (1 - grid.rules.dropout_rate), 0)


def exact_rows(rows: RowBlocks, blocks: Blocks, grid: Grid) -> RowBlocks:
    """Return the data of each query row for the backward, exact also for a large log-sum-exp.

    The float32 after 1e9 is 64 larger, so weights computed from such a log-sum-exp may be off by any factor. If a row
    has one, another pass over all pairs recomputes maximum, sum and delta of each row; otherwise this takes no time.
    """
    large = (jnp.abs(rows.rest) > _LARGE_LSE) & (rows.top == 0)
    at_rest: Any = jax.tree.map(lax.stop_gradient, (rows, blocks))

    def add(sums: Any, pair: jax.Array) -> Any:
        rows, blocks = at_rest
        top, total, pulled = sums
        new_top, weights, decay = weights_of(logits_of(blocks, grid, pair), top)
        keep = weights_kept(blocks, grid, pair)
        dweights = gradient_of_weights(take(rows.dout, pair[0]), take(blocks.value, pair[1]), keep, grid)
        return (
            new_top,
            total * decay + weights.sum(axis=-1),
            pulled * decay + (weights * dweights).sum(axis=-1),
        )

    def step(number: jax.Array, carry: Any) -> Any:
        pair = take(pairs, number)
        new = where_they_meet(add, tuple(take(x, pair[0]) for x in carry), pair, at_rest[1], grid)
        return tuple(put(x, y, pair[0]) for x, y in zip(carry, new, strict=True))

    pairs = jnp.asarray(grid.pairs)
    start = tuple(full(large.shape, fill, grid.dtype, at_rest[1]) for fill in (-jnp.inf, 0, 0))
    count = jnp.where(lax.stop_gradient(large).any(), jnp.int32(pairs.shape[0]), jnp.int32(0))
    # A loop instead of `lax.cond`, which runs both branches under `vmap`.
    top, total, pulled = lax.fori_loop(jnp.int32(0), count, step, start)
    large &= top > -jnp.inf  # the log-sum-exp of a row without keys is its sink
    total = jnp.where(large, total, 1)
    return _with_exact(rows, large, (top, jnp.log(total), pulled / total), factor_of(blocks, grid))


def _with_exact(rows: RowBlocks, large: jax.Array, found: Any, factor: float) -> RowBlocks:
    """Return rows with maximum, logarithm of the sum and delta from `found` where they are `large`."""
    top, rest, delta = found
    # The difference between the log-sum-exp and these sums comes from an attention sink, or from rounding.
    more = lax.stop_gradient(rows.rest) - (top * factor + rest)
    more = jnp.where(more > 1e-6 * jnp.abs(lax.stop_gradient(rows.rest)), more, 0)
    # Values are constants; derivatives flow through the residuals.
    lse = jnp.where(jnp.isfinite(rows.rest), rows.rest, 0)
    rest = rest + more + (lse - lax.stop_gradient(lse))
    delta = delta * jnp.exp(-more) + (rows.delta - lax.stop_gradient(rows.delta))
    return rows._replace(
        top=jnp.where(large, top, rows.top),
        rest=jnp.where(large, rest, rows.rest),
        delta=jnp.where(large, delta, rows.delta),
    )


def _positions(grid: Grid, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the indices of the queries and of the keys of one pair."""
    sizes = (grid.q_block, grid.kv_block)
    queries, keys = (pair[axis] * size + jnp.arange(size, dtype=jnp.int32) for axis, size in enumerate(sizes))
    return queries, keys


def _masks(blocks: Blocks, grid: Grid, pair: jax.Array) -> list[jax.Array]:
    """Return the masks of one pair, each broadcastable to `[b, g, r, q, k]`; false hides a key from a query."""
    queries, keys = _positions(grid, pair)
    window = within_window(queries + (grid.keys - grid.queries), keys, grid.rules)
    masks = [] if window is None else [window[None, None, None]]
    if grid.pads_keys:
        masks.append((keys < grid.keys)[None, None, None, None])
    if blocks.mask is not None:
        masks.append(grid.part_of(blocks.mask, pair))
    if blocks.query_segments is not None and blocks.key_segments is not None:
        same = take(blocks.query_segments, pair[0])[:, :, None] == take(blocks.key_segments, pair[1])[:, None, :]
        masks.append(same[:, None, None])
    if blocks.query_lengths is not None:
        masks.append((queries[None] < blocks.query_lengths[:, None])[:, None, None, :, None])
    if blocks.key_lengths is not None:
        masks.append((keys[None] < blocks.key_lengths[:, None])[:, None, None, None])
    return masks


def weights_kept(blocks: Blocks, grid: Grid, pair: jax.Array) -> jax.Array | None:
    """Return which weights of one pair the dropout keeps; `None` without dropout."""
    if blocks.dropout_key is None:
        return None
    batch, groups, heads = blocks.query.shape[1:4]
    rows = jnp.arange(batch * grid.heads, dtype=jnp.int32).reshape(batch, groups, heads)
    return kept(blocks.dropout_key, rows, *_positions(grid, pair), grid.rules)


def where_they_meet(
    change: Callable[[Any, jax.Array], Any], state: Any, pair: jax.Array, blocks: Blocks, grid: Grid
) -> Any:
    """Return `change(state, pair)`, or `state` if segments and lengths hide the whole pair in every example."""
    meet = []
    if blocks.query_segments is not None and blocks.key_segments is not None:
        queries, keys = take(blocks.query_segments, pair[0]), take(blocks.key_segments, pair[1])
        # Comparing ranges is exact for rising ids, e.g. packed documents; with other ids some pairs run needlessly.
        meet += [queries.min(axis=1) <= keys.max(axis=1), keys.min(axis=1) <= queries.max(axis=1)]
    if blocks.query_lengths is not None:
        meet.append(pair[0] * grid.q_block < blocks.query_lengths)
    if blocks.key_lengths is not None:
        meet.append(pair[1] * grid.kv_block < blocks.key_lengths)
    if not meet:
        return change(state, pair)
    do_meet = of_any_example(functools.reduce(jnp.logical_and, meet).any())
    return lax.cond(do_meet, change, lambda state, _: state, state, pair)
