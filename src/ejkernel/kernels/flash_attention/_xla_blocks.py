# SPDX-License-Identifier: Apache-2.0
"""How attention in plain JAX cuts a call: the sizes of blocks, the pairs of them, and the arrays cut and joined."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel import compat
from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams
from ejkernel.ops.utils.values.signature import is_known

from .common import AttentionCall, Operands, Rules, accumulator


def has_blocks(call: AttentionCall) -> bool:
    """Return whether the lengths are numbers: a length that is a symbol, in an exported program, is one block."""
    return is_known(call.query[1], call.key[1])


def default_blocks(call: AttentionCall) -> tuple[int, int]:
    """Return the block sizes of queries and keys that are used where none are given.

    On a CPU a step's scores should stay in cache (2 MiB forward, 1 MiB backward were best where it was measured);
    elsewhere a step should be large enough to fill the chip. Blocks larger than a window compute what it hides: for 512
    tokens and a window of 48 on both sides, smaller ones took a third of the time forward, and 0.6 of it backward.

    Args:
        call: The call; of an unknown platform, what the program is being lowered for, or the default backend.
    """
    on_cpu = (call.platform or compat.target_kind()) == "cpu"
    most = (1 << 18 if call.backward else 1 << 19) if on_cpu else 1 << 26
    rows = math.prod(size for size in (call.examples, call.query[0], call.query[2]) if is_known(size))
    q_most, kv_most = _largest_in_window(call.rules)
    q_block, kv_block = min(q_most, call.query[1]), min(kv_most, call.key[1])
    while rows * q_block * kv_block > most and (q_block > 64 or kv_block > 128):
        if kv_block <= 128 or (q_block >= kv_block and q_block > 64):
            q_block //= 2
        else:
            kv_block //= 2
    return even_block(call.query[1], q_block), even_block(call.key[1], kv_block)


def _largest_in_window(rules: Rules) -> tuple[int, int]:
    if rules.left is None or rules.right is None:
        return 1024, 1024
    width = 1 << max(rules.left + rules.right - 1, 0).bit_length()
    return min(max(width, 64), 1024), min(max(width // 2, 64), 1024)


def even_block(length: int, most: int) -> int:
    """Return the block size, at most about `most`, that cuts `length` with little padding."""
    if most >= length:
        return length
    size = -(-length // -(-length // most))
    return -(-size // 16) * 16


class Blocks(NamedTuple):
    """The operands, cut: the axis of blocks is first, so that a block is one contiguous slice."""

    query: jax.Array  # [query block, b, g, r, q, d]
    key: jax.Array  # [key block, b, g, k, d]
    value: jax.Array  # [key block, b, g, k, e]
    bias: jax.Array | None  # [b, g, r, all queries, all keys], each in full or 1: not cut, it may be large
    mask: jax.Array | None  # likewise
    query_segments: jax.Array | None  # [query block, b, q]
    key_segments: jax.Array | None  # [key block, b, k]
    query_lengths: jax.Array | None  # [b]
    key_lengths: jax.Array | None  # likewise
    dropout_key: jax.Array | None


class RowBlocks(NamedTuple):
    """What the backward knows of every query: its weights are `exp((values - top) * factor - rest)`."""

    dout: jax.Array  # [query block, b, g, r, q, e]
    top: jax.Array  # [query block, b, g, r, q]; infinite for a row that sees no key, 0 if `rest` is the log-sum-exp
    rest: jax.Array  # likewise
    delta: jax.Array  # likewise


@dataclasses.dataclass(frozen=True, eq=False)  # equality of arrays is an array
class Grid:
    """How one call is cut into blocks.

    Attributes:
        pairs: `[pairs, 2]`, the query block and the key block of every step.
    """

    queries: int
    keys: int
    groups: int
    heads: int
    q_block: int
    kv_block: int
    dtype: jnp.dtype
    precision: str | None
    pairs: np.ndarray

    @property
    def query_blocks(self) -> int:
        """How many blocks of queries there are."""
        return -(-self.queries // self.q_block)


def grid_of(call: AttentionCall, params: FwdParams | BwdParams) -> Grid:
    """Return how a call is cut with these parameters."""
    queries, keys = call.query[1], call.key[1]
    if has_blocks(call):
        q_most, kv_most = default_blocks(call)
        q_block, kv_block = min(params.q_blocksize or q_most, queries), min(params.kv_blocksize or kv_most, keys)
        pairs = _visible_pairs(queries, keys, q_block, kv_block, call.rules)
    else:
        q_block, kv_block, pairs = queries, keys, np.zeros((1, 2), np.int32)
    return Grid(
        queries=queries,
        keys=keys,
        groups=call.key[2],
        heads=call.query[2],
        q_block=q_block,
        kv_block=kv_block,
        dtype=accumulator(call.dtype),
        precision=call.rules.precision,
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


def split(operands: Operands, grid: Grid) -> Blocks:
    """Return the operands, cut."""
    queries, keys = (
        None if x is None else _blocked(x, 1, block)
        for x, block in ((operands.query_segments, grid.q_block), (operands.key_segments, grid.kv_block))
    )
    return Blocks(
        query=split_queries(operands.query, grid),
        key=_split_keys(operands.key, grid),
        value=_split_keys(operands.value, grid),
        bias=None if operands.bias is None else _split_heads(operands.bias, grid),
        mask=None if operands.attention_mask is None else _split_heads(operands.attention_mask, grid),
        query_segments=queries,
        key_segments=keys,
        query_lengths=operands.query_lengths,
        key_lengths=operands.key_lengths,
        dropout_key=operands.dropout_key,
    )


def missing(length: int, block: int) -> int:
    """Return how much padding makes whole blocks of a length."""
    # A symbol, which is one block, has no remainder that is known.
    return 0 if length == block else -length % block


def _blocked(x: jax.Array, axis: int, block: int, fill: float = 0) -> jax.Array:
    """Pad `axis` to whole blocks, cut it, and bring the axis of blocks to the front."""
    padding = [(0, missing(x.shape[axis], block) if a == axis else 0) for a in range(x.ndim)]
    x = jnp.pad(x, padding, constant_values=fill) if any(after for _, after in padding) else x
    x = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def split_queries(x: jax.Array, grid: Grid) -> jax.Array:
    """Cut `[batch, queries, heads, dim]`."""
    x = x.reshape(*x.shape[:2], grid.groups, -1, x.shape[-1])
    return _blocked(x, 1, grid.q_block).transpose(0, 1, 3, 4, 2, 5)


def join_queries(x: jax.Array, grid: Grid) -> jax.Array:
    """Undo `split_queries`."""
    blocks, batch, groups, heads, block, dim = x.shape
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, blocks * block, groups * heads, dim)
    return x[:, : grid.queries]


def _split_keys(x: jax.Array, grid: Grid) -> jax.Array:
    return _blocked(x, 1, grid.kv_block).transpose(0, 1, 3, 2, 4)


def join_keys(x: jax.Array, grid: Grid) -> jax.Array:
    """Undo what `split` does to keys and values."""
    blocks, batch, groups, block, dim = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, blocks * block, groups, dim)[:, : grid.keys]


def split_rows(x: jax.Array, grid: Grid, fill: float) -> jax.Array:
    """Cut `[batch, heads, queries]`; the padding is `fill`."""
    return _blocked(x.reshape(x.shape[0], grid.groups, -1, x.shape[-1]), 3, grid.q_block, fill)


def join_rows(x: jax.Array, grid: Grid) -> jax.Array:
    """Undo `split_rows`."""
    blocks, batch, groups, heads, block = x.shape
    return x.transpose(1, 2, 3, 0, 4).reshape(batch, groups * heads, blocks * block)[..., : grid.queries]


def _split_heads(x: jax.Array, grid: Grid) -> jax.Array:
    """Cut the axis of heads of a bias or mask into groups, and pad queries and keys to whole blocks."""
    batch, heads, queries, keys = x.shape
    x = x.reshape(batch, *((1, 1) if heads == 1 else (grid.groups, -1)), queries, keys)
    after = [0 if n == 1 else missing(n, block) for n, block in ((queries, grid.q_block), (keys, grid.kv_block))]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, n) for n in after]) if any(after) else x


def join_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Return the gradient of `bias` in its shape and dtype."""
    batch, heads, queries, keys = bias.shape
    return x[..., :queries, :keys].reshape(batch, heads, queries, keys).astype(bias.dtype)


def part_of(x: jax.Array, grid: Grid, pair: jax.Array) -> jax.Array:
    """Return the part of a bias or mask that belongs to one pair; an axis of 1 stays."""
    for axis, block, index in ((3, grid.q_block, pair[0]), (4, grid.kv_block, pair[1])):
        if x.shape[axis] != 1:
            x = lax.dynamic_slice_in_dim(x, index * block, block, axis)
    return x


def put_part(x: jax.Array, part: jax.Array, grid: Grid, pair: jax.Array) -> jax.Array:
    """Return a bias's gradient with the part that belongs to one pair exchanged."""
    zero = jnp.zeros_like(pair[0])  # all of one type, also where integers have 64 bits
    start = [zero] * 3 + [
        index * block if x.shape[axis] != 1 else zero
        for axis, block, index in ((3, grid.q_block, pair[0]), (4, grid.kv_block, pair[1]))
    ]
    return lax.dynamic_update_slice(x, part, start)


def full(shape: tuple[int, ...], fill: float, dtype: jnp.dtype, blocks: Blocks) -> jax.Array:
    """Return a constant that varies over the mesh as the blocks do."""
    return unify_varying((jnp.full(shape, fill, dtype), blocks.query))[0]


def dot(subscripts: str, x: jax.Array, y: jax.Array, grid: Grid) -> jax.Array:
    """Return the products, summed in the grid's dtype."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=grid.dtype, precision=grid.precision)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return one block."""
    block: jax.Array = lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
    return block


def put(x: jax.Array, block: jax.Array, index: jax.Array) -> jax.Array:
    """Return `x` with one block exchanged."""
    changed: jax.Array = lax.dynamic_update_index_in_dim(x, block, index, 0)
    return changed
