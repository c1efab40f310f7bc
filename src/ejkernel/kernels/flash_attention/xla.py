# SPDX-License-Identifier: Apache-2.0
"""Attention in plain JAX: block by block with an online softmax, so that memory grows linearly with the length.

One `lax.scan` walks over the pairs of a query block and a key block with at least one visible entry. The pairs follow
from shapes and static rules alone: hidden blocks are never computed, no loop bound depends on data, and JAX can
differentiate the forward in both modes. At run time the loop also skips pairs without a common segment.

Source: online softmax after Dao, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._numbers import has_small_range, normalized
from ejkernel.kernels._varying import of_any_example, unify_varying
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams
from ejkernel.ops.utils.values.signature import is_known

from ._xla_blocks import (
    Blocks,
    Grid,
    RowBlocks,
    default_blocks,
    even_block,
    examples_at_once,
    full,
    grid_of,
    has_blocks,
    is_on_gpu,
    over_examples,
    put,
    take,
)
from .common import (
    EMPTY_ROW_LSE,
    AttentionCall,
    AttentionImplementation,
    Gradients,
    Operands,
    Residuals,
    Rules,
    describe,
    kept,
    operands_of,
    within_window,
)

# The block sizes of the search space: queries, keys.
_CPU_BLOCKS = ((64, 128, 256, 512), (128, 256, 512, 1024))
_BLOCKS = ((256, 512, 1024), (512, 1024, 2048))

_LARGE_LSE = 1024.0  # a smaller log-sum-exp is exact to 6e-5, and so are the weights computed from it

# Letters of the einsums: b batch, g group, r head of a group, q query, k key, d head dimension, e value dimension.


class Xla(AttentionImplementation):
    """Plain JAX: supports every call on every platform."""

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
        """Return the default block sizes of the platform."""
        return _params(call, *default_blocks(call)) if has_blocks(call) else _params(call)

    def space(self, call: AttentionCall) -> list[FwdParams | BwdParams]:
        """Return the distinct pairs of block sizes for these lengths whose scores fit in memory."""
        # With symbolic lengths, neither can be decided.
        if not has_blocks(call) or not is_known(*call.query):
            return [_params(call)]
        sizes, most = (_CPU_BLOCKS, 1 << 26) if call.platform == "cpu" else (_BLOCKS, 1 << 28)
        q_blocks, kv_blocks = (
            dict.fromkeys(even_block(length, size) for size in choices)
            for length, choices in zip((call.query[1], call.key[1]), sizes, strict=True)
        )
        rows = call.query[0] * call.query[2]
        smallest = min(q_blocks) * min(kv_blocks)
        pairs = [*itertools.product(q_blocks, kv_blocks)]
        if call.platform == "gpu":
            pairs = [*dict.fromkeys((*pairs, (call.query[1], call.key[1])))]
        return [_params(call, q, kv) for q, kv in pairs if q * kv <= max(smallest, most // rows)]

    def output(self, call: AttentionCall, /, *args: Any, params: FwdParams) -> Any:
        """See `Implementation`."""
        operands = operands_of(args)
        if call.bias is None or call.return_lse or operands.sinks is not None:
            return super().output(call, *args, params=params)
        return self.attend(operands, call.rules, params, keeps_lse=False)[0]

    def attend(self, operands: Operands, rules: Rules, params: FwdParams, *, keeps_lse: bool = True) -> Residuals:
        """See `AttentionImplementation`; unset block sizes are those of `default_blocks`.

        If only the output is wanted, one kernel computes the softmax of a single block also with a bias: 107 us instead
        of 127 for 1,024 queries of 8 heads of 320 columns. With the log-sum-exp, and the backward, it took 15 % longer.
        """
        call = describe(operands, rules)
        batch, count = call.query[0], examples_at_once(call, params.q_blocksize, params.kv_blocksize)
        if count != batch:
            split = over_examples(lambda some: self.attend(some, rules, params), unify_varying(operands), batch, count)
            return cast(Residuals, split)
        grid = grid_of(call, params)
        blocks = grid.split(unify_varying(operands))
        is_single = len(grid.pairs) == grid.query_blocks == 1 and blocks.dropout_key is None and is_on_gpu(call)
        if is_single and (blocks.bias is None or not keeps_lse):
            out, lse = _attend_at_once(blocks, grid)
            return grid.join_queries(out.astype(operands.query.dtype)), grid.join_rows(lse)
        rows = (grid.query_blocks, *blocks.query.shape[1:5])
        carry: Any = (
            full((*rows, blocks.value.shape[-1]), 0, grid.dtype, blocks),
            full(rows, -jnp.inf, grid.dtype, blocks),
            full(rows, 0, grid.dtype, blocks),
        )

        def attend(rows: Any, pair: jax.Array) -> Any:
            acc, top, total = rows
            new_top, weights, decay = _weights(_logits(blocks, grid, pair), top)
            value = take(blocks.value, pair[1])
            keep = _kept(blocks, grid, pair)
            used = weights if keep is None else jnp.where(keep, weights, 0)
            product = grid.dot("bgrqk,bgke->bgrqe", used.astype(value.dtype), value)
            # The sum includes dropped weights: dropout applies to the result of the softmax.
            return acc * decay[..., None] + product, new_top, total * decay + weights.sum(axis=-1)

        def step(carry: Any, pair: jax.Array) -> tuple[Any, None]:
            new = _where_they_meet(attend, tuple(take(x, pair[0]) for x in carry), pair, blocks, grid)
            return tuple(put(x, y, pair[0]) for x, y in zip(carry, new, strict=True)), None

        acc, top, total = _over_pairs(step, carry, grid)
        empty = total == 0
        total = jnp.where(empty, 1, total)
        # Dividing inside the loop, where weights are rounded, could overflow in float16 if the divisor is small.
        out = (acc / (total[..., None] * (1 - rules.dropout_rate))).astype(operands.query.dtype)
        lse = jnp.where(empty, EMPTY_ROW_LSE, top * _factor(blocks, grid) + jnp.log(total))
        return grid.join_queries(out), grid.join_rows(lse)

    def differentiate(
        self,
        operands: Operands,
        residuals: Residuals,
        dout: jax.Array,
        rules: Rules,
        params: BwdParams,
        *,
        dlse: jax.Array | None = None,
    ) -> Gradients:
        """See `AttentionImplementation`; recomputes the probabilities block by block."""
        call = describe(operands, rules, backward=True)
        arrays = operands, residuals, dout, dlse = unify_varying((operands, residuals, dout, dlse))
        batch, count = call.query[0], examples_at_once(call, params.q_blocksize, params.kv_blocksize)
        if count != batch:

            def part(some: Any) -> Gradients:
                operands, residuals, dout, dlse = some
                return self.differentiate(operands, residuals, dout, rules, params, dlse=dlse)

            return cast(Gradients, over_examples(part, arrays, batch, count))
        (out, lse), grid = residuals, grid_of(call, params)
        blocks = grid.split(operands)
        delta = jnp.einsum("bqhe,bqhe->bhq", out, dout, preferred_element_type=grid.dtype)
        # Padding rows see no key, so they add nothing to any gradient.
        lse = grid.split_rows(lse.astype(grid.dtype), fill=EMPTY_ROW_LSE)
        empty = lse == EMPTY_ROW_LSE
        rows = RowBlocks(
            dout=grid.split_queries(dout),
            top=jnp.where(empty, jnp.inf, jnp.zeros_like(lse)),
            rest=jnp.where(empty, 0, lse),
            delta=grid.split_rows(delta, fill=0),
        )
        if not rules.partial:  # the sums over all keys are not those over these
            rows = _exact_rows(rows, blocks, grid)
        if dlse is not None:  # d lse / d logits are the weights, so dlse enters as -delta does
            rows = rows._replace(delta=rows.delta - grid.split_rows(dlse.astype(grid.dtype), fill=0))
        sums = (blocks.query, blocks.key, blocks.value, blocks.bias)
        carry: Any = tuple(None if x is None else full(x.shape, 0, grid.dtype, blocks) for x in sums)

        def add(sums: Any, pair: jax.Array) -> Any:
            return _add_gradients(sums, blocks, rows, grid, pair)

        def step(carry: Any, pair: jax.Array) -> tuple[Any, None]:
            new = _where_they_meet(add, _sums_of(carry, grid, pair), pair, blocks, grid)
            return _put_sums(carry, new, grid, pair), None

        dquery, dkey, dvalue, dbias = _over_pairs(step, carry, grid)
        return (
            grid.join_queries(dquery).astype(operands.query.dtype),
            grid.join_keys(dkey).astype(operands.key.dtype),
            grid.join_keys(dvalue / (1 - rules.dropout_rate)).astype(operands.value.dtype),
            None if operands.bias is None else grid.join_bias(dbias, operands.bias),
        )


def _attend_at_once(blocks: Blocks, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log-sum-exp of a single pair of blocks, as `Grid.split_queries` and `split_rows` do.

    XLA makes one kernel of this softmax, as of that in `jax.nn`. If it also had the log-sum-exp as a result, there
    would be a kernel for each of maximum, sum and weights: then a forward of 4,096 tokens at head_dim 512 took 919 us,
    and 645 us in `jax.nn`.
    """
    pair = jnp.asarray(grid.pairs[0])
    logits, value = _logits(blocks, grid, pair), take(blocks.value, pair[1])
    weights = _exponentials(logits.values, logits.factor)[0]
    total = jnp.maximum(weights.sum(axis=-1, keepdims=True), float(np.finfo(np.float32).tiny))
    out = grid.dot("bgrqk,bgke->bgrqe", (weights / total).astype(value.dtype), value)
    # A copy for XLA, which computes it only if the log-sum-exp is used.
    weights, top = _exponentials(lax.optimization_barrier(logits.values), logits.factor)
    total = weights.sum(axis=-1)
    empty = total == 0
    lse = jnp.where(empty, EMPTY_ROW_LSE, top * logits.factor + jnp.log(jnp.where(empty, 1, total)))
    return out[None], lse[None]


def _exponentials(values: jax.Array, factor: float) -> tuple[jax.Array, jax.Array]:
    """Return the exponentials of `values * factor` without their maximum along rows, and the maximum of `values`."""
    top = lax.stop_gradient(jnp.maximum(values.max(axis=-1, keepdims=True), float(np.finfo(np.float32).min)))
    return jnp.exp((values - top) * factor), top[..., 0]


def _params(call: AttentionCall, q_block: int | None = None, kv_block: int | None = None) -> FwdParams | BwdParams:
    of_direction = BwdParams if call.backward else FwdParams
    return of_direction(q_blocksize=q_block, kv_blocksize=kv_block)


def _over_pairs(step: Callable[[Any, jax.Array], tuple[Any, None]], carry: Any, grid: Grid) -> Any:
    """Return the carry after a step for each pair; a single pair needs no loop."""
    if len(grid.pairs) == 1:
        return step(carry, jnp.asarray(grid.pairs[0]))[0]
    return lax.scan(step, carry, jnp.asarray(grid.pairs))[0]


def _where_they_meet(
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


_Sums = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


def _sums_of(sums: _Sums, grid: Grid, pair: jax.Array) -> _Sums:
    """Return the blocks of the gradients that one pair contributes to."""
    dquery, dkey, dvalue, dbias = sums
    part = None if dbias is None else grid.part_of(dbias, pair)
    return take(dquery, pair[0]), take(dkey, pair[1]), take(dvalue, pair[1]), part


def _put_sums(sums: _Sums, parts: _Sums, grid: Grid, pair: jax.Array) -> _Sums:
    """Return the gradients with the blocks of one pair replaced."""
    i, j = pair[0], pair[1]
    dbias = None if sums[3] is None or parts[3] is None else grid.put_part(sums[3], parts[3], pair)
    return put(sums[0], parts[0], i), put(sums[1], parts[1], j), put(sums[2], parts[2], j), dbias


def _add_gradients(sums: _Sums, blocks: Blocks, rows: RowBlocks, grid: Grid, pair: jax.Array) -> _Sums:
    """Return `sums`, the gradients of one pair's blocks, plus the contributions of that pair."""
    dquery, dkey, dvalue, dbias = sums
    i, j = pair[0], pair[1]
    query, key, value = take(blocks.query, i), take(blocks.key, j), take(blocks.value, j)
    dout = take(rows.dout, i)
    logits = _logits(blocks, grid, pair)
    slope = logits.slope
    differences = (logits.values - take(rows.top, i)[..., None]) * logits.factor - take(rows.rest, i)[..., None]
    weights = jnp.exp(_at_most_zero(differences))
    keep = _kept(blocks, grid, pair)
    used = weights if keep is None else jnp.where(keep, weights, 0)
    dweights = _gradient_of_weights(dout, value, keep, grid)
    dlogits = weights * (dweights - take(rows.delta, i)[..., None])
    dproducts = dlogits if slope is None else dlogits * slope
    if dbias is not None:
        dlogits = dproducts if grid.rules.cap_after_bias else dlogits
        # the axes along which the bias was broadcast
        axes = tuple(a for a in range(5) if dbias.shape[a] == 1 and dlogits.shape[a] != 1)
        dbias = dbias + dlogits.sum(axis=axes, keepdims=True)
    dscores, size = _in_range(dproducts * grid.rules.scale, query.dtype)
    return (
        dquery + grid.dot("bgrqk,bgkd->bgrqd", dscores, key) * size,
        dkey + grid.dot("bgrqk,bgrqd->bgkd", dscores, query) * size[:, :, 0],
        dvalue + grid.dot("bgrqk,bgrqe->bgke", used.astype(dout.dtype), dout),
        dbias,
    )


def _in_range(dscores: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of one pair's scores scaled into the range of `dtype`, and the factors `[b, g, 1, 1, 1]`.

    The gradient is the product of both results.
    """
    if not has_small_range(dtype):
        return dscores.astype(dtype), jnp.ones((1,) * dscores.ndim, dscores.dtype)
    scaled, size = normalized(dscores, (2, 3, 4))
    return scaled.astype(dtype), size


class _Logits(NamedTuple):
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


def _factor(blocks: Blocks, grid: Grid) -> float:
    """Return the factor of the logits; see `_Logits`."""
    if blocks.bias is not None and not grid.rules.cap_after_bias:
        return 1.0
    return grid.rules.scale if grid.rules.soft_cap is None else grid.rules.soft_cap


def _logits(blocks: Blocks, grid: Grid, pair: jax.Array) -> _Logits:
    """Return the logits of one pair."""
    slope, factor = None, _factor(blocks, grid)
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
    return _Logits(values, factor, slope)


def _weights(logits: _Logits, top: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the new maximum of each row, the weights, and the rescaling factor for the sums of earlier blocks."""
    # The result does not depend on `top`, so neither do its derivatives.
    new_top = lax.stop_gradient(jnp.maximum(top, logits.values.max(axis=-1)))
    # For a row without a visible key so far, exp(-inf - 0) is zero but exp(-inf + inf) would be NaN.
    shift = jnp.where(new_top == -jnp.inf, 0, new_top)
    differences = logits.values - shift[..., None]
    if logits.factor == 1:  # logits with a bias may be rounded differently than for the maximum
        differences = _at_most_zero(differences)
    decay = jnp.exp((lax.stop_gradient(top) - shift) * logits.factor)
    return new_top, jnp.exp(differences * logits.factor), decay


def _at_most_zero(x: jax.Array) -> jax.Array:
    """Return `min(x, 0)` with a derivative of 1: only rounding makes `x` positive."""
    return x - lax.stop_gradient(jnp.maximum(x, 0))


def _gradient_of_weights(dout: jax.Array, value: jax.Array, keep: jax.Array | None, grid: Grid) -> jax.Array:
    """Return the gradient of one pair's weights before dropout."""
    dweights = grid.dot("bgrqe,bgke->bgrqk", dout, value)
    return dweights if keep is None else jnp.where(keep, dweights / (1 - grid.rules.dropout_rate), 0)


def _exact_rows(rows: RowBlocks, blocks: Blocks, grid: Grid) -> RowBlocks:
    """Return the data of each query row for the backward, exact also for a large log-sum-exp.

    The float32 after 1e9 is 64 larger, so weights computed from such a log-sum-exp may be off by any factor. If a row
    has one, another pass over all pairs recomputes maximum, sum and delta of each row; otherwise this takes no time.
    """
    large = (jnp.abs(rows.rest) > _LARGE_LSE) & (rows.top == 0)
    at_rest: Any = jax.tree.map(lax.stop_gradient, (rows, blocks))

    def add(sums: Any, pair: jax.Array) -> Any:
        rows, blocks = at_rest
        top, total, pulled = sums
        new_top, weights, decay = _weights(_logits(blocks, grid, pair), top)
        keep = _kept(blocks, grid, pair)
        dweights = _gradient_of_weights(take(rows.dout, pair[0]), take(blocks.value, pair[1]), keep, grid)
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
    # A loop instead of `lax.cond`, which runs both branches under `vmap`.
    top, total, pulled = lax.fori_loop(jnp.int32(0), count, step, start)
    total = jnp.where(large, total, 1)
    return _with_exact(rows, large, (top, jnp.log(total), pulled / total), _factor(blocks, grid))


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


def _kept(blocks: Blocks, grid: Grid, pair: jax.Array) -> jax.Array | None:
    """Return which weights of one pair the dropout keeps; `None` without dropout."""
    if blocks.dropout_key is None:
        return None
    batch, groups, heads = blocks.query.shape[1:4]
    rows = jnp.arange(batch * grid.heads, dtype=jnp.int32).reshape(batch, groups, heads)
    return kept(blocks.dropout_key, rows, *_positions(grid, pair), grid.rules)
