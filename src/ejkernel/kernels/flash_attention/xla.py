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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
        logits, _ = _logits(blocks, rules, grid, pair)
        # The result does not depend on `top`, so neither do its derivatives.
        new_top = lax.stop_gradient(jnp.maximum(top, logits.max(axis=-1)))
        # A row that has seen nothing yet: exp(-inf - 0) is zero where exp(-inf + inf) is NaN.
        shift = jnp.where(new_top == -jnp.inf, 0, new_top)
        weights = jnp.exp(logits - shift[..., None])
        decay = jnp.exp(lax.stop_gradient(top) - shift)
        value = take(blocks.value, pair[1])
        keep = _kept(blocks, rules, grid, pair)
        used = weights if keep is None else jnp.where(keep, weights / (1 - rules.dropout_rate), 0)
        product = dot("bgrqk,bgke->bgrqe", used.astype(value.dtype), value, grid)
        # The sum is of all weights: a dropout drops what the softmax has found.
        return acc * decay[..., None] + product, new_top, total * decay + weights.sum(axis=-1)

    def step(carry: Any, pair: jax.Array) -> tuple[Any, None]:
        new = _where_they_meet(attend, tuple(take(x, pair[0]) for x in carry), pair, blocks, grid)
        return tuple(put(x, y, pair[0]) for x, y in zip(carry, new, strict=True)), None

    (acc, top, total), _ = lax.scan(step, carry, jnp.asarray(grid.pairs))
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = (acc / total[..., None]).astype(operands.query.dtype)
    lse = jnp.where(empty, EMPTY_ROW_LSE, top + jnp.log(total))
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
    if dlse is not None:  # a weight adds to the log-sum-exp as it takes from the others
        delta = delta - dlse.astype(grid.dtype)
    rows = RowBlocks(
        dout=split_queries(dout, grid),
        # Rows of the padding are such that see no key, and add nothing to any gradient.
        lse=split_rows(lse.astype(grid.dtype), grid, fill=EMPTY_ROW_LSE),
        delta=split_rows(delta, grid, fill=0),
    )
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
        join_keys(dvalue, grid).astype(operands.value.dtype),
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
    logits, slope = _logits(blocks, rules, grid, pair)
    weights = jnp.exp(logits - take(rows.lse, i)[..., None])
    dweights = dot("bgrqe,bgke->bgrqk", dout, value, grid)
    keep = _kept(blocks, rules, grid, pair)
    used = weights if keep is None else jnp.where(keep, weights / (1 - rules.dropout_rate), 0)
    if keep is not None:
        dweights = jnp.where(keep, dweights / (1 - rules.dropout_rate), 0)
    dlogits = weights * (dweights - take(rows.delta, i)[..., None])
    dproducts = dlogits if slope is None else dlogits * slope
    if dbias is not None:
        dlogits = dproducts if rules.cap_after_bias else dlogits
        # the axes along which the bias was broadcast
        axes = tuple(a for a in range(5) if dbias.shape[a] == 1 and dlogits.shape[a] != 1)
        dbias = dbias + dlogits.sum(axis=axes, keepdims=True)
    dscores = (dproducts * rules.scale).astype(query.dtype)
    return (
        dquery + dot("bgrqk,bgkd->bgrqd", dscores, key, grid),
        dkey + dot("bgrqk,bgrqd->bgkd", dscores, query, grid),
        dvalue + dot("bgrqk,bgrqe->bgke", used.astype(dout.dtype), dout, grid),
        dbias,
    )


def _logits(blocks: Blocks, rules: Rules, grid: Grid, pair: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return the logits of one pair, -inf where masked, and the derivative of the soft cap if there is one."""
    slope = None
    logits = dot("bgrqd,bgkd->bgrqk", take(blocks.query, pair[0]), take(blocks.key, pair[1]), grid)
    logits = logits * rules.scale
    bias = None if blocks.bias is None else part_of(blocks.bias, grid, pair).astype(grid.dtype)
    if bias is not None and rules.cap_after_bias:
        logits = logits + jnp.where(bias == -jnp.inf, 0, bias)  # what it hides, the cap would show
        bias = jnp.where(bias == -jnp.inf, bias, 0)
    if rules.soft_cap is not None:
        squashed = jnp.tanh(logits / rules.soft_cap)
        logits, slope = squashed * rules.soft_cap, 1 - squashed * squashed
    if bias is not None:
        logits = logits + bias
    for visible in _masks(blocks, rules, grid, pair):
        logits = jnp.where(visible, logits, -jnp.inf)
    return logits, slope


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
