# SPDX-License-Identifier: Apache-2.0
"""Attention in plain JAX: block by block with an online softmax, so that memory grows linearly with the length.

One `lax.scan` walks over the pairs of a query block and a key block of which the rules let at least one entry be seen.
The pairs are known from shapes alone, so nothing that the rules hide is computed, no loop bound depends on data, and
the forward can be differentiated in any mode. Of those, pairs whose segments cannot meet are skipped as it runs.

Source: online softmax after Dao, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._numbers import has_small_range
from ejkernel.kernels._small_range import normalized
from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams
from ejkernel.ops.utils.values.signature import is_known

from ._xla_blocks import (
    Blocks,
    Grid,
    RowBlocks,
    default_blocks,
    dot,
    even_block,
    full,
    grid_of,
    has_blocks,
    join_bias,
    join_keys,
    join_queries,
    join_rows,
    missing,
    part_of,
    put,
    put_part,
    split,
    split_queries,
    split_rows,
    take,
)
from .common import EMPTY_ROW_LSE, AttentionCall, AttentionImplementation, Operands, Rules, describe, within_window
from .dropout import kept

# Blocks that are tuned over: of queries, of keys.
_CPU_BLOCKS = ((64, 128, 256, 512), (128, 256, 512, 1024))
_BLOCKS = ((256, 512, 1024), (512, 1024, 2048))

_LARGE_LSE = 1024.0  # below it a log-sum-exp is exact to 6e-5, and so are the weights that are computed from it

# Letters of the einsums: b batch, g group, r head of a group, q query, k key, d head dimension, e value dimension.


class Xla(AttentionImplementation):
    """The implementation that runs every call, everywhere."""

    name = "xla"
    params = FwdParams
    bwd_params = BwdParams
    differentiable = True
    features = frozenset(
        (
            "query_lengths",
            "key_lengths",
            "return_lse",
            "deterministic",
            "soft_cap_after_bias",
            "dropout_rate",
            "precision",
        )
    )

    def heuristic(self, call: AttentionCall) -> FwdParams | BwdParams:
        """Return blocks that fit the platform."""
        return _params(call, *default_blocks(call)) if has_blocks(call) else _params(call)

    def space(self, call: AttentionCall) -> list[FwdParams | BwdParams]:
        """Return each pair of block sizes that the lengths can tell apart, and whose scores fit in memory."""
        # Of symbols it cannot be told which blocks differ, nor what fits.
        if not has_blocks(call) or not is_known(*call.query):
            return [_params(call)]
        sizes, most = (_CPU_BLOCKS, 1 << 26) if call.platform == "cpu" else (_BLOCKS, 1 << 28)
        q_blocks, kv_blocks = (
            dict.fromkeys(even_block(length, size) for size in choices)
            for length, choices in zip((call.query[1], call.key[1]), sizes, strict=True)
        )
        rows = call.query[0] * call.query[2]
        smallest = min(q_blocks) * min(kv_blocks)
        pairs = itertools.product(q_blocks, kv_blocks)
        return [_params(call, q, kv) for q, kv in pairs if q * kv <= max(smallest, most // rows)]

    def attend(self, operands: Operands, rules: Rules, params: FwdParams) -> tuple[jax.Array, jax.Array]:
        """See `forward`."""
        return forward(operands, rules, params)

    def differentiate(
        self,
        operands: Operands,
        residuals: tuple[jax.Array, jax.Array],
        dout: jax.Array,
        rules: Rules,
        params: BwdParams,
        *,
        dlse: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """See `backward`."""
        return backward(operands, residuals, dout, rules, params, dlse=dlse)


def _params(call: AttentionCall, q_block: int | None = None, kv_block: int | None = None) -> FwdParams | BwdParams:
    of_direction = BwdParams if call.backward else FwdParams
    return of_direction(q_blocksize=q_block, kv_blocksize=kv_block)


def forward(operands: Operands, rules: Rules, params: FwdParams) -> tuple[jax.Array, jax.Array]:
    """Return the output `[batch, queries, heads, value_dim]` and the log-sum-exp `[batch, heads, queries]`.

    Args:
        operands: Of float16, bfloat16, float32 or float64.
        rules: The static part of the call.
        params: Block sizes; `None` means `default_blocks`.
    """
    grid = grid_of(describe(operands, rules), params)
    blocks = split(unify_varying(operands), grid)
    rows = (grid.query_blocks, *blocks.query.shape[1:5])
    carry: Any = (
        full((*rows, blocks.value.shape[-1]), 0, grid.dtype, blocks),
        full(rows, -jnp.inf, grid.dtype, blocks),
        full(rows, 0, grid.dtype, blocks),
    )

    def attend(rows: Any, pair: jax.Array) -> Any:
        acc, top, total = rows
        new_top, weights, decay = _weights(_logits(blocks, rules, grid, pair), top)
        value = take(blocks.value, pair[1])
        keep = _kept(blocks, rules, grid, pair)
        used = weights if keep is None else jnp.where(keep, weights, 0)
        product = dot("bgrqk,bgke->bgrqe", used.astype(value.dtype), value, grid)
        # The sum is of all weights: a dropout drops what the softmax has found.
        return acc * decay[..., None] + product, new_top, total * decay + weights.sum(axis=-1)

    def step(carry: Any, pair: jax.Array) -> tuple[Any, None]:
        new = _where_they_meet(attend, tuple(take(x, pair[0]) for x in carry), pair, blocks, grid)
        return tuple(put(x, y, pair[0]) for x, y in zip(carry, new, strict=True)), None

    (acc, top, total), _ = lax.scan(step, carry, jnp.asarray(grid.pairs))
    empty = total == 0
    total = jnp.where(empty, 1, total)
    # Not in the loop, whose weights are rounded: in float16 one that is divided by little overflows.
    out = (acc / (total[..., None] * (1 - rules.dropout_rate))).astype(operands.query.dtype)
    lse = jnp.where(empty, EMPTY_ROW_LSE, top * _factor(blocks, rules) + jnp.log(total))
    return join_queries(out, grid), join_rows(lse, grid)


def backward(
    operands: Operands,
    residuals: tuple[jax.Array, jax.Array],
    dout: jax.Array,
    rules: Rules,
    params: BwdParams,
    *,
    dlse: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return the gradients of query, key, value and bias; probabilities are computed anew, block by block.

    Args:
        operands: As the forward had them.
        residuals: Output and log-sum-exp, of whichever forward computed them.
        dout: Cotangent of the output.
        rules: As the forward had them.
        params: Block sizes; `None` means `default_blocks`.
        dlse: Cotangent of the log-sum-exp; `None`: zero.
    """
    out, lse = residuals
    grid = grid_of(describe(operands, rules, backward=True), params)
    operands, out, lse, dout, dlse = unify_varying((operands, out, lse, dout, dlse))
    blocks = split(operands, grid)
    delta = jnp.einsum("bqhe,bqhe->bhq", out, dout, preferred_element_type=grid.dtype)
    # Rows of the padding are such that see no key, and add nothing to any gradient.
    lse = split_rows(lse.astype(grid.dtype), grid, fill=EMPTY_ROW_LSE)
    empty = lse == EMPTY_ROW_LSE
    rows = RowBlocks(
        dout=split_queries(dout, grid),
        top=jnp.where(empty, jnp.inf, jnp.zeros_like(lse)),
        rest=jnp.where(empty, 0, lse),
        delta=split_rows(delta, grid, fill=0),
    )
    rows = _exact_rows(rows, blocks, rules, grid)
    if dlse is not None:  # a weight adds to the log-sum-exp as it takes from the others
        rows = rows._replace(delta=rows.delta - split_rows(dlse.astype(grid.dtype), grid, fill=0))
    sums = (blocks.query, blocks.key, blocks.value, blocks.bias)
    carry: Any = tuple(None if x is None else full(x.shape, 0, grid.dtype, blocks) for x in sums)

    def add(sums: Any, pair: jax.Array) -> Any:
        return _add_gradients(sums, blocks, rows, rules, grid, pair)

    def step(carry: Any, pair: jax.Array) -> tuple[Any, None]:
        new = _where_they_meet(add, _sums_of(carry, grid, pair), pair, blocks, grid)
        return _put_sums(carry, new, grid, pair), None

    (dquery, dkey, dvalue, dbias), _ = lax.scan(step, carry, jnp.asarray(grid.pairs))
    return (
        join_queries(dquery, grid).astype(operands.query.dtype),
        join_keys(dkey, grid).astype(operands.key.dtype),
        join_keys(dvalue / (1 - rules.dropout_rate), grid).astype(operands.value.dtype),
        None if operands.bias is None else join_bias(dbias, operands.bias),
    )


def _where_they_meet(
    change: Callable[[Any, jax.Array], Any], state: Any, pair: jax.Array, blocks: Blocks, grid: Grid
) -> Any:
    """Return `change(state, pair)`, or `state` where segments and lengths hide all of the pair in every example."""
    meet = []
    if blocks.query_segments is not None and blocks.key_segments is not None:
        queries, keys = take(blocks.query_segments, pair[0]), take(blocks.key_segments, pair[1])
        # Ids that rise, as those of packed documents, are told apart by their ranges; of others some pairs are in vain.
        meet += [queries.min(axis=1) <= keys.max(axis=1), keys.min(axis=1) <= queries.max(axis=1)]
    if blocks.query_lengths is not None:
        meet.append(pair[0] * grid.q_block < blocks.query_lengths)
    if blocks.key_lengths is not None:
        meet.append(pair[1] * grid.kv_block < blocks.key_lengths)
    if not meet:
        return change(state, pair)
    return lax.cond(functools.reduce(jnp.logical_and, meet).any(), change, lambda state, _: state, state, pair)


_Sums = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


def _sums_of(sums: _Sums, grid: Grid, pair: jax.Array) -> _Sums:
    """Return the parts of the gradients that one pair adds to."""
    dquery, dkey, dvalue, dbias = sums
    part = None if dbias is None else part_of(dbias, grid, pair)
    return take(dquery, pair[0]), take(dkey, pair[1]), take(dvalue, pair[1]), part


def _put_sums(sums: _Sums, parts: _Sums, grid: Grid, pair: jax.Array) -> _Sums:
    """Return the gradients with the parts of one pair exchanged."""
    i, j = pair[0], pair[1]
    dbias = None if sums[3] is None or parts[3] is None else put_part(sums[3], parts[3], grid, pair)
    return put(sums[0], parts[0], i), put(sums[1], parts[1], j), put(sums[2], parts[2], j), dbias


def _add_gradients(sums: _Sums, blocks: Blocks, rows: RowBlocks, rules: Rules, grid: Grid, pair: jax.Array) -> _Sums:
    """Return the gradients of one pair, added to `sums`, which are of its blocks alone."""
    dquery, dkey, dvalue, dbias = sums
    i, j = pair[0], pair[1]
    query, key, value = take(blocks.query, i), take(blocks.key, j), take(blocks.value, j)
    dout = take(rows.dout, i)
    logits = _logits(blocks, rules, grid, pair)
    slope = logits.slope
    differences = (logits.values - take(rows.top, i)[..., None]) * logits.factor - take(rows.rest, i)[..., None]
    weights = jnp.exp(_at_most_zero(differences))
    keep = _kept(blocks, rules, grid, pair)
    used = weights if keep is None else jnp.where(keep, weights, 0)
    dweights = _gradient_of_weights(dout, value, keep, rules, grid)
    dlogits = weights * (dweights - take(rows.delta, i)[..., None])
    dproducts = dlogits if slope is None else dlogits * slope
    if dbias is not None:
        dlogits = dproducts if rules.cap_after_bias else dlogits
        # the axes along which the bias was broadcast
        axes = tuple(a for a in range(5) if dbias.shape[a] == 1 and dlogits.shape[a] != 1)
        dbias = dbias + dlogits.sum(axis=axes, keepdims=True)
    dscores, size = _in_range(dproducts * rules.scale, query.dtype)
    return (
        dquery + dot("bgrqk,bgkd->bgrqd", dscores, key, grid) * size,
        dkey + dot("bgrqk,bgrqd->bgkd", dscores, query, grid) * size[:, :, 0],
        dvalue + dot("bgrqk,bgrqe->bgke", used.astype(dout.dtype), dout, grid),
        dbias,
    )


def _in_range(dscores: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of one pair's scores in `dtype`, and the factors `[b, g, 1, 1, 1]` that it lacks."""
    if not has_small_range(dtype):
        return dscores.astype(dtype), jnp.ones((1,) * dscores.ndim, dscores.dtype)
    scaled, size = normalized(dscores, (2, 3, 4))
    return scaled.astype(dtype), size


class _Logits(NamedTuple):
    """The logits of one pair: `values * factor`.

    The maximum is subtracted from the values: what is left of the largest is exactly zero, whatever the factor. Of
    `values * factor - top` a compiler may make one operation that rounds once, where `top` was rounded before.

    Attributes:
        values: -inf where masked.
        factor: A positive number; 1 where a bias was added.
        slope: The derivative of the soft cap; `None`: there is none.
    """

    values: jax.Array
    factor: float
    slope: jax.Array | None


def _factor(blocks: Blocks, rules: Rules) -> float:
    """Return what the values of `_logits` are multiplied with."""
    if blocks.bias is not None and not rules.cap_after_bias:
        return 1.0
    return rules.scale if rules.soft_cap is None else rules.soft_cap


def _logits(blocks: Blocks, rules: Rules, grid: Grid, pair: jax.Array) -> _Logits:
    """Return the logits of one pair."""
    slope, factor = None, _factor(blocks, rules)
    values = dot("bgrqd,bgkd->bgrqk", take(blocks.query, pair[0]), take(blocks.key, pair[1]), grid)
    bias = None if blocks.bias is None else part_of(blocks.bias, grid, pair).astype(grid.dtype)
    if bias is not None or rules.soft_cap is not None:
        values = values * rules.scale
    if bias is not None and rules.cap_after_bias:
        values = values + jnp.where(bias == -jnp.inf, 0, bias)  # what it hides, the cap would show
        bias = jnp.where(bias == -jnp.inf, bias, 0)
    if rules.soft_cap is not None:
        values = jnp.tanh(values / rules.soft_cap)
        slope = 1 - values * values
        if factor == 1:
            values = values * rules.soft_cap
    if bias is not None:
        values = values + bias
    for visible in _masks(blocks, rules, grid, pair):
        values = jnp.where(visible, values, -jnp.inf)
    return _Logits(values, factor, slope)


def _weights(logits: _Logits, top: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the new maximum of each row, the weights, and what sums of earlier blocks are to be multiplied with."""
    # The result does not depend on `top`, so neither do its derivatives.
    new_top = lax.stop_gradient(jnp.maximum(top, logits.values.max(axis=-1)))
    # A row that has seen nothing yet: exp(-inf - 0) is zero where exp(-inf + inf) is NaN.
    shift = jnp.where(new_top == -jnp.inf, 0, new_top)
    differences = logits.values - shift[..., None]
    if logits.factor == 1:  # what a bias was added to may be rounded in another way than for the maximum
        differences = _at_most_zero(differences)
    decay = jnp.exp((lax.stop_gradient(top) - shift) * logits.factor)
    return new_top, jnp.exp(differences * logits.factor), decay


def _at_most_zero(x: jax.Array) -> jax.Array:
    """Return `min(x, 0)` with a derivative of 1: what is above zero is there by rounding."""
    return x - lax.stop_gradient(jnp.maximum(x, 0))


def _gradient_of_weights(
    dout: jax.Array, value: jax.Array, keep: jax.Array | None, rules: Rules, grid: Grid
) -> jax.Array:
    """Return the gradient of one pair's weights, as they are before the dropout."""
    dweights = dot("bgrqe,bgke->bgrqk", dout, value, grid)
    return dweights if keep is None else jnp.where(keep, dweights / (1 - rules.dropout_rate), 0)


def _exact_rows(rows: RowBlocks, blocks: Blocks, rules: Rules, grid: Grid) -> RowBlocks:
    """Return what the backward knows of every query, exact also where the log-sum-exp is large.

    Of 1e9 the next float32 is 64 more: weights that are computed from it may be off by any factor. If there is such a
    row, one more pass over all pairs finds maximum, sum and delta of each row anew; else it takes no time.
    """
    large = (jnp.abs(rows.rest) > _LARGE_LSE) & (rows.top == 0)
    at_rest: Any = jax.tree.map(lax.stop_gradient, (rows, blocks))

    def add(sums: Any, pair: jax.Array) -> Any:
        rows, blocks = at_rest
        top, total, pulled = sums
        new_top, weights, decay = _weights(_logits(blocks, rules, grid, pair), top)
        keep = _kept(blocks, rules, grid, pair)
        dweights = _gradient_of_weights(take(rows.dout, pair[0]), take(blocks.value, pair[1]), keep, rules, grid)
        return (
            new_top,
            total * decay + weights.sum(axis=-1),
            pulled * decay + (weights * dweights).sum(axis=-1),
        )

    def step(number: jax.Array, carry: Any) -> Any:
        pair = take(pairs, number)
        new = _where_they_meet(add, tuple(take(x, pair[0]) for x in carry), pair, at_rest[1], grid)
        return tuple(put(x, y, pair[0]) for x, y in zip(carry, new, strict=True))

    pairs = jnp.asarray(grid.pairs)
    start = tuple(full(large.shape, fill, grid.dtype, at_rest[1]) for fill in (-jnp.inf, 0, 0))
    count = jnp.where(lax.stop_gradient(large).any(), jnp.int32(pairs.shape[0]), jnp.int32(0))
    # A loop rather than a condition: under `vmap` both branches of a condition run.
    top, total, pulled = lax.fori_loop(jnp.int32(0), count, step, start)
    total = jnp.where(large, total, 1)
    return _with_exact(rows, large, (top, jnp.log(total), pulled / total), _factor(blocks, rules))


def _with_exact(rows: RowBlocks, large: jax.Array, found: Any, factor: float) -> RowBlocks:
    """Return rows with maximum, logarithm of the sum and delta from `found` where they are `large`."""
    top, rest, delta = found
    # What the log-sum-exp has on top of these sums is an attention sink's, unless it is rounding.
    more = lax.stop_gradient(rows.rest) - (top * factor + rest)
    more = jnp.where(more > 1e-6 * jnp.abs(lax.stop_gradient(rows.rest)), more, 0)
    # The values are constants, the derivatives are those of the residuals.
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


def _masks(blocks: Blocks, rules: Rules, grid: Grid, pair: jax.Array) -> list[jax.Array]:
    """Return all that hides keys from queries in one pair, each to be broadcast to `[b, g, r, q, k]`."""
    queries, keys = _positions(grid, pair)
    window = within_window(queries + (grid.keys - grid.queries), keys, rules)
    masks = [] if window is None else [window[None, None, None]]
    if missing(grid.keys, grid.kv_block):
        masks.append((keys < grid.keys)[None, None, None, None])
    if blocks.mask is not None:
        masks.append(part_of(blocks.mask, grid, pair))
    if blocks.query_segments is not None and blocks.key_segments is not None:
        same = take(blocks.query_segments, pair[0])[:, :, None] == take(blocks.key_segments, pair[1])[:, None, :]
        masks.append(same[:, None, None])
    if blocks.query_lengths is not None:
        masks.append((queries[None] < blocks.query_lengths[:, None])[:, None, None, :, None])
    if blocks.key_lengths is not None:
        masks.append((keys[None] < blocks.key_lengths[:, None])[:, None, None, None])
    return masks


def _kept(blocks: Blocks, rules: Rules, grid: Grid, pair: jax.Array) -> jax.Array | None:
    """Return which weights of one pair a dropout keeps; `None`: there is none."""
    if blocks.dropout_key is None:
        return None
    batch, groups, heads = blocks.query.shape[1:4]
    rows = jnp.arange(batch * grid.heads, dtype=jnp.int32).reshape(batch, groups, heads)
    return kept(blocks.dropout_key, rows, *_positions(grid, pair), rules)
