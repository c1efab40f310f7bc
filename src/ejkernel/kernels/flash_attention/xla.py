# SPDX-License-Identifier: Apache-2.0
"""Attention in plain JAX: block by block with an online softmax, so that memory grows linearly with the length.

One `lax.scan` walks over the pairs of a query block and a key block with at least one visible entry. The pairs follow
from shapes and static rules alone: hidden blocks are never computed, no loop bound depends on data, and JAX can
differentiate the forward in both modes. At run time the loop also skips pairs without a common segment.

Source: online softmax after Dao, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._numbers import LOWEST, at_most_zero, has_small_range, normalized
from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams
from ejkernel.ops.utils.values.signature import is_known

from ._few_scores import is_fastest_in_plain_jax, is_one_step
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
from ._xla_pairs import (
    exact_rows,
    factor_of,
    gradient_of_weights,
    logits_of,
    weights_kept,
    weights_of,
    where_they_meet,
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
    operands_of,
)

# The block sizes of the search space: queries, keys.
_CPU_BLOCKS = ((64, 128, 256, 512), (128, 256, 512, 1024))
_BLOCKS = ((256, 512, 1024), (512, 1024, 2048))

# Letters of the einsums: b batch, g group, r head of a group, q query, k key, d head dimension, e value dimension.


class Xla(AttentionImplementation):
    """Plain JAX: supports every call on every platform."""

    name = "xla"
    params = FwdParams
    bwd_params = BwdParams
    differentiable = True
    is_told_of_sinks = True
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

    def preference(self, call: AttentionCall) -> int:
        """Return 2 if this is faster than the kernels for Hopper, else 0."""
        return 2 * is_fastest_in_plain_jax(call)

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
            new_top, weights, decay = weights_of(logits_of(blocks, grid, pair), top)
            value = take(blocks.value, pair[1])
            keep = weights_kept(blocks, grid, pair)
            used = weights if keep is None else jnp.where(keep, weights, 0)
            product = grid.dot("bgrqk,bgke->bgrqe", used.astype(value.dtype), value)
            # The sum includes dropped weights: dropout applies to the result of the softmax.
            return acc * decay[..., None] + product, new_top, total * decay + weights.sum(axis=-1)

        def step(carry: Any, pair: jax.Array) -> tuple[Any, None]:
            new = where_they_meet(attend, tuple(take(x, pair[0]) for x in carry), pair, blocks, grid)
            return tuple(put(x, y, pair[0]) for x, y in zip(carry, new, strict=True)), None

        acc, top, total = _over_pairs(step, carry, grid)
        empty = total == 0
        total = jnp.where(empty, 1, total)
        # Dividing inside the loop, where weights are rounded, could overflow in float16 if the divisor is small.
        out = (acc / (total[..., None] * (1 - rules.dropout_rate))).astype(operands.query.dtype)
        lse = jnp.where(empty, EMPTY_ROW_LSE, top * factor_of(blocks, grid) + jnp.log(total))
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
        has_sinks, operands = operands.sinks is not None, operands._replace(sinks=None)
        call = describe(operands, rules, backward=True)
        arrays = unify_varying((operands, residuals, dout, dlse))
        if dlse is None and not has_sinks and is_one_step(call, params.q_blocksize, params.kv_blocksize):
            return _differentiated_at_once(arrays[0], arrays[2], grid_of(call, params))
        batch, count = call.query[0], examples_at_once(call, params.q_blocksize, params.kv_blocksize)

        def pull(some: Any) -> Gradients:
            operands, residuals, dout, dlse = some
            return _differentiated(operands, residuals, dout, dlse, rules, params)

        return cast(Gradients, over_examples(pull, arrays, batch, count)) if count != batch else pull(arrays)


def _differentiated(
    operands: Operands,
    residuals: Residuals,
    dout: jax.Array,
    dlse: jax.Array | None,
    rules: Rules,
    params: BwdParams,
) -> Gradients:
    """Return the gradients of some examples."""
    (out, lse), grid = residuals, grid_of(describe(operands, rules, backward=True), params)
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
        rows = exact_rows(rows, blocks, grid)
    if dlse is not None:  # d lse / d logits are the weights, so dlse enters as -delta does
        rows = rows._replace(delta=rows.delta - grid.split_rows(dlse.astype(grid.dtype), fill=0))

    def add(sums: Any, pair: jax.Array) -> Any:
        return _add_gradients(sums, blocks, rows, grid, pair)

    def step(carry: Any, pair: jax.Array) -> tuple[Any, None]:
        new = where_they_meet(add, _sums_of(carry, grid, pair), pair, blocks, grid)
        return _put_sums(carry, new, grid, pair), None

    return _joined(_over_pairs(step, _zeros(blocks, grid), grid), operands, grid)


def _differentiated_at_once(operands: Operands, dout: jax.Array, grid: Grid) -> Gradients:
    """Return the gradients of a single pair of blocks.

    The softmax is that of `_attend_at_once`. In a program with both, XLA computes it once, and no log-sum-exp.
    """
    blocks, pair = grid.split(operands), jnp.asarray(grid.pairs[0])
    logits = logits_of(blocks, grid, pair)
    weights = _exponentials(logits.values, logits.factor)[0]
    softmax = _Softmax(weights / _positive(weights.sum(axis=-1, keepdims=True)), None, logits.slope)
    carry = _zeros(blocks, grid)
    dout = take(grid.split_queries(dout), pair[0])
    sums = _add_products(_sums_of(carry, grid, pair), blocks, dout, softmax, grid, pair)
    return _joined(_put_sums(carry, sums, grid, pair), operands, grid)


def _joined(sums: _Sums, operands: Operands, grid: Grid) -> Gradients:
    """Return the gradients in the shapes and dtypes of the operands."""
    dquery, dkey, dvalue, dbias = sums
    return (
        grid.join_queries(dquery).astype(operands.query.dtype),
        grid.join_keys(dkey).astype(operands.key.dtype),
        grid.join_keys(dvalue / (1 - grid.rules.dropout_rate)).astype(operands.value.dtype),
        None if operands.bias is None or dbias is None else grid.join_bias(dbias, operands.bias),
    )


def _attend_at_once(blocks: Blocks, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log-sum-exp of a single pair of blocks, as `Grid.split_queries` and `split_rows` do.

    XLA makes one kernel of this softmax, as of that in `jax.nn`. If it also had the log-sum-exp as a result, there
    would be a kernel for each of maximum, sum and weights: then a forward of 4,096 tokens at head_dim 512 took 919 us,
    and 645 us in `jax.nn`.
    """
    pair = jnp.asarray(grid.pairs[0])
    logits, value = logits_of(blocks, grid, pair), take(blocks.value, pair[1])
    weights = _exponentials(logits.values, logits.factor)[0]
    total = _positive(weights.sum(axis=-1, keepdims=True))
    out = grid.dot("bgrqk,bgke->bgrqe", (weights / total).astype(value.dtype), value)
    # A copy for XLA, which computes it only if the log-sum-exp is used.
    weights, top = _exponentials(lax.optimization_barrier(logits.values), logits.factor)
    total = weights.sum(axis=-1)
    empty = total == 0
    lse = jnp.where(empty, EMPTY_ROW_LSE, top * logits.factor + jnp.log(jnp.where(empty, 1, total)))
    return out[None], lse[None]


def _exponentials(values: jax.Array, factor: float) -> tuple[jax.Array, jax.Array]:
    """Return the exponentials of `values * factor` without their maximum along rows, and the maximum of `values`."""
    top = lax.stop_gradient(jnp.maximum(values.max(axis=-1, keepdims=True), LOWEST))
    return jnp.exp((values - top) * factor), top[..., 0]


def _positive(total: jax.Array) -> jax.Array:
    """Return sums of exponentials as divisors: a small number in place of 0, the sum of a row without visible keys."""
    return jnp.maximum(total, float(np.finfo(np.float32).tiny))


def _params(call: AttentionCall, q_block: int | None = None, kv_block: int | None = None) -> FwdParams | BwdParams:
    of_direction = BwdParams if call.backward else FwdParams
    return of_direction(q_blocksize=q_block, kv_blocksize=kv_block)


def _over_pairs(step: Callable[[Any, jax.Array], tuple[Any, None]], carry: Any, grid: Grid) -> Any:
    """Return the carry after a step for each pair; a single pair needs no loop."""
    if len(grid.pairs) == 1:
        return step(carry, jnp.asarray(grid.pairs[0]))[0]
    return lax.scan(step, carry, jnp.asarray(grid.pairs))[0]


_Sums = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


class _Softmax(NamedTuple):
    """The weights of a pair, the sum of each row's weights times their gradients if it is known, and `Logits.slope`."""

    weights: jax.Array
    delta: jax.Array | None
    slope: jax.Array | None


def _zeros(blocks: Blocks, grid: Grid) -> _Sums:
    """Return the gradients before the first pair."""
    query, key, value = (full(x.shape, 0, grid.dtype, blocks) for x in (blocks.query, blocks.key, blocks.value))
    return query, key, value, None if blocks.bias is None else full(blocks.bias.shape, 0, grid.dtype, blocks)


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
    i = pair[0]
    logits = logits_of(blocks, grid, pair)
    differences = (logits.values - take(rows.top, i)[..., None]) * logits.factor - take(rows.rest, i)[..., None]
    softmax = _Softmax(jnp.exp(at_most_zero(differences)), take(rows.delta, i), logits.slope)
    return _add_products(sums, blocks, take(rows.dout, i), softmax, grid, pair)


def _add_products(
    sums: _Sums, blocks: Blocks, dout: jax.Array, softmax: _Softmax, grid: Grid, pair: jax.Array
) -> _Sums:
    """Return `sums` plus the products of a pair's softmax, queries, keys, values and `dout`."""
    dquery, dkey, dvalue, dbias = sums
    i, j = pair[0], pair[1]
    query, key, value = take(blocks.query, i), take(blocks.key, j), take(blocks.value, j)
    weights, delta, slope = softmax
    keep = weights_kept(blocks, grid, pair)
    used = weights if keep is None else jnp.where(keep, weights, 0)
    dweights = gradient_of_weights(dout, value, keep, grid)
    if delta is None:
        delta = (weights * dweights).sum(axis=-1)
    dlogits = weights * (dweights - delta[..., None])
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
