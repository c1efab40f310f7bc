# SPDX-License-Identifier: Apache-2.0
"""Attention in plain JAX: block by block with an online softmax, so that memory grows linearly with the length.

One `lax.scan` walks over the pairs of a query block and a key block of which the rules let at least one entry be seen.
The pairs are known from shapes alone, so nothing that the rules hide is computed, no loop bound depends on data, and
the forward can be differentiated in any mode. Of those, pairs whose segments cannot meet are skipped as it runs.

Source: online softmax after Dao, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams
from ejkernel.ops.utils.fingerprint import platform_kind
from ejkernel.ops.utils.values.signature import is_known

from .common import (
    EMPTY_ROW_LSE,
    AttentionCall,
    AttentionImplementation,
    Operands,
    Rules,
    accumulator,
    describe,
    within_window,
)

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

    def heuristic(self, call: AttentionCall) -> FwdParams | BwdParams:
        """Return blocks that fit the platform."""
        return _params(call, *default_blocks(call)) if has_blocks(call) else _params(call)

    def space(self, call: AttentionCall) -> list[FwdParams | BwdParams]:
        """Return each pair of block sizes that the lengths can tell apart, and whose scores fit in memory."""
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
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """See `backward`."""
        return backward(operands, residuals, dout, rules, params)


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
    grid = _grid(describe(operands, rules), params)
    blocks = _split(unify_varying(operands), grid)
    rows = (grid.query_blocks, *blocks.query.shape[1:5])
    carry: Any = (
        _full((*rows, blocks.value.shape[-1]), 0, grid.dtype, blocks),
        _full(rows, -jnp.inf, grid.dtype, blocks),
        _full(rows, 0, grid.dtype, blocks),
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
        value = _take(blocks.value, pair[1])
        product = _dot("bgrqk,bgke->bgrqe", weights.astype(value.dtype), value, grid.dtype)
        return acc * decay[..., None] + product, new_top, total * decay + weights.sum(axis=-1)

    def step(carry: Any, pair: jax.Array) -> tuple[Any, None]:
        new = _where_they_meet(attend, tuple(_take(x, pair[0]) for x in carry), pair, blocks)
        return tuple(_put(x, y, pair[0]) for x, y in zip(carry, new, strict=True)), None

    (acc, top, total), _ = lax.scan(step, carry, jnp.asarray(grid.pairs))
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = (acc / total[..., None]).astype(operands.query.dtype)
    lse = jnp.where(empty, EMPTY_ROW_LSE, top + jnp.log(total))
    return _join_queries(out, grid), _join_rows(lse, grid)


def backward(
    operands: Operands, residuals: tuple[jax.Array, jax.Array], dout: jax.Array, rules: Rules, params: BwdParams
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return the gradients of query, key, value and bias; probabilities are computed anew, block by block.

    Args:
        operands: As the forward had them.
        residuals: Output and log-sum-exp, of whichever forward computed them.
        dout: Cotangent of the output.
        rules: As the forward had them.
        params: Block sizes; `None` means `default_blocks`.
    """
    out, lse = residuals
    grid = _grid(describe(operands, rules, backward=True), params)
    operands, out, lse, dout = unify_varying((operands, out, lse, dout))
    blocks = _split(operands, grid)
    delta = jnp.einsum("bqhe,bqhe->bhq", out, dout, preferred_element_type=grid.dtype)
    rows = _RowBlocks(
        dout=_split_queries(dout, grid),
        lse=_split_rows(lse.astype(grid.dtype), grid, fill=EMPTY_ROW_LSE),
        delta=_split_rows(delta, grid, fill=0),
    )
    sums = (blocks.query, blocks.key, blocks.value, blocks.bias)
    carry: Any = tuple(None if x is None else _full(x.shape, 0, grid.dtype, blocks) for x in sums)

    def add(sums: Any, pair: jax.Array) -> Any:
        return _add_gradients(sums, blocks, rows, rules, grid, pair)

    def step(carry: Any, pair: jax.Array) -> tuple[Any, None]:
        new = _where_they_meet(add, _sums_of(carry, grid, pair), pair, blocks)
        return _put_sums(carry, new, grid, pair), None

    (dquery, dkey, dvalue, dbias), _ = lax.scan(step, carry, jnp.asarray(grid.pairs))
    return (
        _join_queries(dquery, grid).astype(operands.query.dtype),
        _join_keys(dkey, grid).astype(operands.key.dtype),
        _join_keys(dvalue, grid).astype(operands.value.dtype),
        None if operands.bias is None else _join_bias(dbias, operands.bias),
    )


def has_blocks(call: AttentionCall) -> bool:
    """Return whether the lengths are numbers: a length that is a symbol, in an exported program, is one block."""
    return is_known(call.query[1], call.key[1])


def default_blocks(call: AttentionCall) -> tuple[int, int]:
    """Return the block sizes of queries and keys that are used where none are given.

    On a CPU a step's scores should stay in cache (2 MiB forward, 1 MiB backward were best where it was measured);
    elsewhere a step should be large enough to fill the chip.

    Args:
        call: The call; of an unknown platform, this process's default backend.
    """
    on_cpu = (call.platform or platform_kind(jax.default_backend())) == "cpu"
    most = (1 << 18 if call.backward else 1 << 19) if on_cpu else 1 << 26
    rows = math.prod(size for size in (call.examples, call.query[0], call.query[2]) if is_known(size))
    q_block, kv_block = min(1024, call.query[1]), min(1024, call.key[1])
    while rows * q_block * kv_block > most and (q_block > 64 or kv_block > 128):
        if kv_block <= 128 or (q_block >= kv_block and q_block > 64):
            q_block //= 2
        else:
            kv_block //= 2
    return even_block(call.query[1], q_block), even_block(call.key[1], kv_block)


def even_block(length: int, most: int) -> int:
    """Return the block size, at most about `most`, that cuts `length` with little padding."""
    if most >= length:
        return length
    size = -(-length // -(-length // most))
    return -(-size // 16) * 16


def _where_they_meet(change: Callable[[Any, jax.Array], Any], state: Any, pair: jax.Array, blocks: _Blocks) -> Any:
    """Return `change(state, pair)`, or `state` where the two blocks have no segment in common in any example."""
    if blocks.query_segments is None or blocks.key_segments is None:
        return change(state, pair)
    queries, keys = _take(blocks.query_segments, pair[0]), _take(blocks.key_segments, pair[1])
    # Ids that rise, as those of packed documents, are told apart by their ranges; of others some pairs are in vain.
    meet = (queries.min(axis=1) <= keys.max(axis=1)) & (keys.min(axis=1) <= queries.max(axis=1))
    return lax.cond(meet.any(), change, lambda state, _: state, state, pair)


_Sums = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


def _sums_of(sums: _Sums, grid: _Grid, pair: jax.Array) -> _Sums:
    """Return the parts of the gradients that one pair adds to."""
    dquery, dkey, dvalue, dbias = sums
    window = None if dbias is None else _window(dbias, grid, pair)
    return _take(dquery, pair[0]), _take(dkey, pair[1]), _take(dvalue, pair[1]), window


def _put_sums(sums: _Sums, parts: _Sums, grid: _Grid, pair: jax.Array) -> _Sums:
    """Return the gradients with the parts of one pair exchanged."""
    i, j = pair[0], pair[1]
    dbias = None if sums[3] is None or parts[3] is None else _put_window(sums[3], parts[3], grid, pair)
    return _put(sums[0], parts[0], i), _put(sums[1], parts[1], j), _put(sums[2], parts[2], j), dbias


def _add_gradients(sums: _Sums, blocks: _Blocks, rows: _RowBlocks, rules: Rules, grid: _Grid, pair: jax.Array) -> _Sums:
    """Return the gradients of one pair, added to `sums`, which are of its blocks alone."""
    dquery, dkey, dvalue, dbias = sums
    i, j = pair[0], pair[1]
    query, key, value = _take(blocks.query, i), _take(blocks.key, j), _take(blocks.value, j)
    dout = _take(rows.dout, i)
    logits, slope = _logits(blocks, rules, grid, pair)
    weights = jnp.exp(logits - _take(rows.lse, i)[..., None])
    dweights = _dot("bgrqe,bgke->bgrqk", dout, value, grid.dtype)
    dlogits = weights * (dweights - _take(rows.delta, i)[..., None])
    if dbias is not None:
        # the axes along which the bias was broadcast
        axes = tuple(a for a in range(5) if dbias.shape[a] == 1 and dlogits.shape[a] != 1)
        dbias = dbias + dlogits.sum(axis=axes, keepdims=True)
    dscores = (dlogits * rules.scale if slope is None else dlogits * slope * rules.scale).astype(query.dtype)
    return (
        dquery + _dot("bgrqk,bgkd->bgrqd", dscores, key, grid.dtype),
        dkey + _dot("bgrqk,bgrqd->bgkd", dscores, query, grid.dtype),
        dvalue + _dot("bgrqk,bgrqe->bgke", weights.astype(dout.dtype), dout, grid.dtype),
        dbias,
    )


class _Blocks(NamedTuple):
    """The operands, cut: the axis of blocks is first, so that a block is one contiguous slice."""

    query: jax.Array  # [query block, b, g, r, q, d]
    key: jax.Array  # [key block, b, g, k, d]
    value: jax.Array  # [key block, b, g, k, e]
    bias: jax.Array | None  # [b, g, r, all queries, all keys], each in full or 1: not cut, it may be large
    mask: jax.Array | None  # likewise
    query_segments: jax.Array | None  # [query block, b, q]
    key_segments: jax.Array | None  # [key block, b, k]


class _RowBlocks(NamedTuple):
    """What the backward knows of every query."""

    dout: jax.Array  # [query block, b, g, r, q, e]
    lse: jax.Array  # [query block, b, g, r, q]
    delta: jax.Array  # likewise


@dataclasses.dataclass(frozen=True, eq=False)
class _Grid:
    """How one call is cut into blocks.

    Attributes:
        pairs: `[pairs, 2]`, the query block and the key block of every step.
    """

    queries: int
    keys: int
    groups: int
    q_block: int
    kv_block: int
    dtype: jnp.dtype
    pairs: np.ndarray

    @property
    def query_blocks(self) -> int:
        return -(-self.queries // self.q_block)


def _grid(call: AttentionCall, params: FwdParams | BwdParams) -> _Grid:
    queries, keys = call.query[1], call.key[1]
    if has_blocks(call):
        q_most, kv_most = default_blocks(call)
        q_block, kv_block = min(params.q_blocksize or q_most, queries), min(params.kv_blocksize or kv_most, keys)
        pairs = _visible_pairs(queries, keys, q_block, kv_block, call.rules)
    else:
        q_block, kv_block, pairs = queries, keys, np.zeros((1, 2), np.int32)
    return _Grid(
        queries=queries,
        keys=keys,
        groups=call.key[2],
        q_block=q_block,
        kv_block=kv_block,
        dtype=accumulator(call.dtype),
        pairs=pairs,
    )


def _visible_pairs(queries: int, keys: int, q_block: int, kv_block: int, rules: Rules) -> np.ndarray:
    """Return the pairs of blocks in which the window lets some query see some key, ordered by query block."""
    start = np.arange(0, queries, q_block)
    first, last = start + keys - queries, np.minimum(start + q_block, queries) - 1 + keys - queries
    lowest = np.zeros_like(first) if rules.left is None else np.maximum(first - rules.left, 0)
    highest = np.full_like(last, keys - 1) if rules.right is None else np.minimum(last + rules.right, keys - 1)
    begin, end = lowest // kv_block, highest // kv_block + 1
    pairs = [(i, j) for i in range(len(start)) for j in range(begin[i], end[i])]
    return np.asarray(pairs, np.int32).reshape(-1, 2)


def _logits(blocks: _Blocks, rules: Rules, grid: _Grid, pair: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return the logits of one pair, -inf where masked, and the derivative of the soft cap if there is one."""
    slope = None
    logits = _dot("bgrqd,bgkd->bgrqk", _take(blocks.query, pair[0]), _take(blocks.key, pair[1]), grid.dtype)
    logits = logits * rules.scale
    if rules.soft_cap is not None:
        squashed = jnp.tanh(logits / rules.soft_cap)
        logits, slope = squashed * rules.soft_cap, 1 - squashed * squashed
    if blocks.bias is not None:
        logits = logits + _window(blocks.bias, grid, pair).astype(grid.dtype)
    for visible in _masks(blocks, rules, grid, pair):
        logits = jnp.where(visible, logits, -jnp.inf)
    return logits, slope


def _masks(blocks: _Blocks, rules: Rules, grid: _Grid, pair: jax.Array) -> list[jax.Array]:
    """Return all that hides keys from queries in one pair, each to be broadcast to `[b, g, r, q, k]`."""
    keys = pair[1] * grid.kv_block + jnp.arange(grid.kv_block, dtype=jnp.int32)
    queries = pair[0] * grid.q_block + jnp.arange(grid.q_block, dtype=jnp.int32)
    window = within_window(queries + (grid.keys - grid.queries), keys, rules)
    masks = [] if window is None else [window]
    if _missing(grid.keys, grid.kv_block):
        masks.append(keys < grid.keys)
    if blocks.mask is not None:
        masks.append(_window(blocks.mask, grid, pair))
    if blocks.query_segments is not None and blocks.key_segments is not None:
        same = _take(blocks.query_segments, pair[0])[:, :, None] == _take(blocks.key_segments, pair[1])[:, None, :]
        masks.append(same[:, None, None])
    return masks


def _split(operands: Operands, grid: _Grid) -> _Blocks:
    queries, keys = (
        None if x is None else _blocked(x, 1, block)
        for x, block in ((operands.query_segments, grid.q_block), (operands.key_segments, grid.kv_block))
    )
    return _Blocks(
        query=_split_queries(operands.query, grid),
        key=_split_keys(operands.key, grid),
        value=_split_keys(operands.value, grid),
        bias=None if operands.bias is None else _split_heads(operands.bias, grid),
        mask=None if operands.attention_mask is None else _split_heads(operands.attention_mask, grid),
        query_segments=queries,
        key_segments=keys,
    )


def _missing(length: int, block: int) -> int:
    """Return how much padding makes whole blocks of a length."""
    return 0 if length == block else -length % block


def _blocked(x: jax.Array, axis: int, block: int, fill: float = 0) -> jax.Array:
    """Pad `axis` to whole blocks, cut it, and bring the axis of blocks to the front."""
    padding = [(0, _missing(x.shape[axis], block) if a == axis else 0) for a in range(x.ndim)]
    x = jnp.pad(x, padding, constant_values=fill) if any(after for _, after in padding) else x
    x = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _split_queries(x: jax.Array, grid: _Grid) -> jax.Array:
    x = x.reshape(*x.shape[:2], grid.groups, -1, x.shape[-1])
    return _blocked(x, 1, grid.q_block).transpose(0, 1, 3, 4, 2, 5)


def _join_queries(x: jax.Array, grid: _Grid) -> jax.Array:
    blocks, batch, groups, heads, block, dim = x.shape
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, blocks * block, groups * heads, dim)
    return x[:, : grid.queries]


def _split_keys(x: jax.Array, grid: _Grid) -> jax.Array:
    return _blocked(x, 1, grid.kv_block).transpose(0, 1, 3, 2, 4)


def _join_keys(x: jax.Array, grid: _Grid) -> jax.Array:
    blocks, batch, groups, block, dim = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, blocks * block, groups, dim)[:, : grid.keys]


def _split_rows(x: jax.Array, grid: _Grid, fill: float) -> jax.Array:
    return _blocked(x.reshape(x.shape[0], grid.groups, -1, x.shape[-1]), 3, grid.q_block, fill)


def _join_rows(x: jax.Array, grid: _Grid) -> jax.Array:
    blocks, batch, groups, heads, block = x.shape
    return x.transpose(1, 2, 3, 0, 4).reshape(batch, groups * heads, blocks * block)[..., : grid.queries]


def _split_heads(x: jax.Array, grid: _Grid) -> jax.Array:
    """Cut the axis of heads of a bias or mask into groups, and pad queries and keys to whole blocks."""
    batch, heads, queries, keys = x.shape
    x = x.reshape(batch, *((1, 1) if heads == 1 else (grid.groups, -1)), queries, keys)
    after = [0 if n == 1 else _missing(n, block) for n, block in ((queries, grid.q_block), (keys, grid.kv_block))]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, n) for n in after]) if any(after) else x


def _join_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    batch, heads, queries, keys = bias.shape
    return x[..., :queries, :keys].reshape(batch, heads, queries, keys).astype(bias.dtype)


def _window(x: jax.Array, grid: _Grid, pair: jax.Array) -> jax.Array:
    """Return the part of a bias or mask that belongs to one pair; an axis of 1 stays."""
    for axis, block, index in ((3, grid.q_block, pair[0]), (4, grid.kv_block, pair[1])):
        if x.shape[axis] != 1:
            x = lax.dynamic_slice_in_dim(x, index * block, block, axis)
    return x


def _put_window(x: jax.Array, window: jax.Array, grid: _Grid, pair: jax.Array) -> jax.Array:
    """Return a bias's gradient with the part that belongs to one pair exchanged."""
    start = [0, 0, 0] + [
        index * block if x.shape[axis] != 1 else 0
        for axis, block, index in ((3, grid.q_block, pair[0]), (4, grid.kv_block, pair[1]))
    ]
    return lax.dynamic_update_slice(x, window, start)


def _full(shape: tuple[int, ...], fill: float, dtype: jnp.dtype, blocks: _Blocks) -> jax.Array:
    """Return a constant that varies over the mesh as the blocks do."""
    return unify_varying((jnp.full(shape, fill, dtype), blocks.query))[0]


def _dot(subscripts: str, x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=dtype)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    block: jax.Array = lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
    return block


def _put(x: jax.Array, block: jax.Array, index: jax.Array) -> jax.Array:
    changed: jax.Array = lax.dynamic_update_index_in_dim(x, block, index, 0)
    return changed
