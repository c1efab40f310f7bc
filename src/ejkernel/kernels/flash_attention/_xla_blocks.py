# SPDX-License-Identifier: Apache-2.0
"""Blocks of attention in plain JAX: their sizes, the visible pairs, and splitting and joining of arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel import compat
from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams
from ejkernel.ops.utils.values.signature import is_known

from .common import AttentionCall, Operands, Rules, accumulator

_MOST_SCORES = 1 << 26  # of one step on an accelerator: 256 MiB in float32
_MOST_WIDE_SCORES = 1 << 28  # of one example with wide heads
WIDEST_OF_OTHERS = 256  # head dimension up to which cuDNN, or `mosaic_gpu` with every feature, runs a call
_FEWEST_QUERIES = 128  # of a block that sees all keys


def has_blocks(call: AttentionCall) -> bool:
    """Return whether the lengths are numbers; a symbolic length, in an exported program, is one block."""
    return is_known(call.query[1], call.key[1])


def is_on_gpu(call: AttentionCall) -> bool:
    """Return whether the call's platform, or if it is unknown the target of the current lowering, is a GPU."""
    return (call.platform or compat.programs.target_kind()) == "gpu"


def default_blocks(call: AttentionCall) -> tuple[int, int]:
    """Return the default block sizes of queries and keys.

    On a CPU the scores of one step should stay in cache (2 MiB forward and 1 MiB backward measured best); elsewhere a
    step should be large enough to fill the chip. Blocks larger than the window compute hidden scores: for 512 tokens
    and a window of 48 on both sides, smaller blocks took a third of the time forward, and 0.6 of it backward. On a GPU
    a single block is best where its scores take at most 256 MiB: causal attention of 2,048 tokens at head_dim 512 took
    0.70 of the time of four blocks forward, and 0.66 backward. If those of all examples take more, but those of one do
    not, the examples are computed one after another: see `examples_at_once`. For wide heads, which other
    implementations run without most features, one example may take 1 GiB, and larger ones have blocks of queries that
    see all keys: full attention of 8,192 tokens and 4 heads of 320 columns took 1,427 us at once, 1,422 us with such
    blocks, and 3,574 us with smaller blocks of keys.

    Args:
        call: The call. If its platform is unknown, the target of the current lowering or the default backend counts.
    """
    platform = call.platform or compat.programs.target_kind()
    most = (1 << 18 if call.backward else 1 << 19) if platform == "cpu" else _MOST_SCORES
    rows = math.prod(size for size in (call.examples, call.query[0], call.query[2]) if is_known(size))
    if platform == "gpu" and call.rules.left is None:
        wide = is_known(call.query[3], call.value[3]) and max(call.query[3], call.value[3]) > WIDEST_OF_OTHERS
        at_once = rows // call.query[0] if _are_separable(call) else rows
        if at_once * call.query[1] * call.key[1] <= (_MOST_WIDE_SCORES if wide else most):
            return call.query[1], call.key[1]
        q_block = most // (rows * call.key[1])
        if wide and q_block >= _FEWEST_QUERIES:
            return even_block(call.query[1], q_block), call.key[1]
    q_most, kv_most = _largest_in_window(call.rules)
    q_block, kv_block = min(q_most, call.query[1]), min(kv_most, call.key[1])
    while rows * q_block * kv_block > most and (q_block > 64 or kv_block > 128):
        if kv_block <= 128 or (q_block >= kv_block and q_block > 64):
            q_block //= 2
        else:
            kv_block //= 2
    return even_block(call.query[1], q_block), even_block(call.key[1], kv_block)


def examples_at_once(call: AttentionCall, q_block: int | None, kv_block: int | None) -> int:
    """Return how many examples of the batch a GPU computes at once, a divisor of the batch.

    It is the whole batch, except for single blocks with scores of more than 256 MiB.

    Args:
        call: The call.
        q_block, kv_block: The blocks; `None` for the default.
    """
    batch = call.query[0]
    if not (is_on_gpu(call) and has_blocks(call) and _are_separable(call)):
        return batch
    if not is_one_block(call, q_block, kv_block):
        return batch
    scores = (call.examples or 1) * call.query[2] * call.query[1] * call.key[1]
    return max(n for n in range(1, batch + 1) if batch % n == 0 and (n == 1 or n * scores <= _MOST_SCORES))


def is_one_block(call: AttentionCall, q_block: int | None, kv_block: int | None) -> bool:
    """Return whether blocks of these sizes, or the default for `None`, hold all queries and all keys."""
    defaults = default_blocks(call)
    return (q_block or defaults[0], kv_block or defaults[1]) == (call.query[1], call.key[1])


def _are_separable(call: AttentionCall) -> bool:
    """Return whether examples can be computed apart: they share no gradient, random numbers, or split axis."""
    apart = call.bias is None and not call.rules.dropout_rate and not call.partitioned
    return apart and is_known(call.examples, call.query[0], call.query[2])


def over_examples(run: Callable[[Any], Any], arrays: Any, batch: int, count: int) -> Any:
    """Return `run(arrays)`, computed for `count` examples after another; arrays of one example belong to all."""
    leaves, structure = jax.tree.flatten(arrays)
    split = [x for x in leaves if x.shape[0] == batch]

    def part(some: list[jax.Array]) -> Any:
        parts = iter(some)
        return run(jax.tree.unflatten(structure, [next(parts) if x.shape[0] == batch else x for x in leaves]))

    found = lax.map(part, [x.reshape(-1, count, *x.shape[1:]) for x in split])
    return jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), found)


def _largest_in_window(rules: Rules) -> tuple[int, int]:
    if rules.left is None or rules.right is None:
        return 1024, 1024
    width = 1 << max(rules.left + rules.right - 1, 0).bit_length()
    return min(max(width, 64), 1024), min(max(width // 2, 64), 1024)


def even_block(length: int, most: int) -> int:
    """Return a block size of at most about `most` that divides `length` with little padding."""
    if most >= length:
        return length
    size = -(-length // -(-length // most))
    return -(-size // 16) * 16


class Blocks(NamedTuple):
    """The operands split into blocks: the block axis comes first, so each block is one contiguous slice."""

    query: jax.Array  # [query block, b, g, r, q, d]
    key: jax.Array  # [key block, b, g, k, d]
    value: jax.Array  # [key block, b, g, k, e]
    bias: jax.Array | None  # [b, g, r, all queries, all keys], each in full or 1: not split, as it may be large
    mask: jax.Array | None  # as bias
    query_segments: jax.Array | None  # [query block, b, q]
    key_segments: jax.Array | None  # [key block, b, k]
    query_lengths: jax.Array | None  # [b]
    key_lengths: jax.Array | None  # [b]
    dropout_key: jax.Array | None


class RowBlocks(NamedTuple):
    """Data of each query row for the backward: its weights are `exp((values - top) * factor - rest)`."""

    dout: jax.Array  # [query block, b, g, r, q, e]
    top: jax.Array  # [query block, b, g, r, q]; infinite for a row without a visible key, 0 if `rest` is the lse
    rest: jax.Array  # [query block, b, g, r, q]
    delta: jax.Array  # [query block, b, g, r, q]


@dataclasses.dataclass(frozen=True, eq=False)  # equality of arrays is an array
class Grid:
    """The block structure of one call.

    Attributes:
        dtype: The dtype of the accumulators.
        rules: The static options of the call.
        pairs: `[pairs, 2]`, the query block and the key block of every step.
    """

    queries: int
    keys: int
    groups: int
    heads: int
    q_block: int
    kv_block: int
    dtype: jnp.dtype
    rules: Rules
    pairs: np.ndarray

    @property
    def query_blocks(self) -> int:
        """Number of query blocks."""
        return -(-self.queries // self.q_block)

    @property
    def pads_keys(self) -> bool:
        """Whether the last block of keys extends past the last key."""
        return _missing(self.keys, self.kv_block) > 0

    def split(self, operands: Operands) -> Blocks:
        """Split the operands into blocks."""
        pairs = ((operands.query_segments, self.q_block), (operands.key_segments, self.kv_block))
        queries, keys = (None if x is None else _blocked(x, 1, block) for x, block in pairs)
        return Blocks(
            query=self.split_queries(operands.query),
            key=self._split_keys(operands.key),
            value=self._split_keys(operands.value),
            bias=None if operands.bias is None else self._split_heads(operands.bias),
            mask=None if operands.attention_mask is None else self._split_heads(operands.attention_mask),
            query_segments=queries,
            key_segments=keys,
            query_lengths=operands.query_lengths,
            key_lengths=operands.key_lengths,
            dropout_key=operands.dropout_key,
        )

    def split_queries(self, x: jax.Array) -> jax.Array:
        """Split `[batch, queries, heads, dim]`."""
        x = x.reshape(*x.shape[:2], self.groups, -1, x.shape[-1])
        return _blocked(x, 1, self.q_block).transpose(0, 1, 3, 4, 2, 5)

    def join_queries(self, x: jax.Array) -> jax.Array:
        """Undo `split_queries`."""
        blocks, batch, groups, heads, block, dim = x.shape
        x = x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, blocks * block, groups * heads, dim)
        return x[:, : self.queries]

    def _split_keys(self, x: jax.Array) -> jax.Array:
        return _blocked(x, 1, self.kv_block).transpose(0, 1, 3, 2, 4)

    def join_keys(self, x: jax.Array) -> jax.Array:
        """Undo `split` for keys or values."""
        blocks, batch, groups, block, dim = x.shape
        return x.transpose(1, 0, 3, 2, 4).reshape(batch, blocks * block, groups, dim)[:, : self.keys]

    def split_rows(self, x: jax.Array, fill: float) -> jax.Array:
        """Split `[batch, heads, queries]`; the padding is `fill`."""
        return _blocked(x.reshape(x.shape[0], self.groups, -1, x.shape[-1]), 3, self.q_block, fill)

    def join_rows(self, x: jax.Array) -> jax.Array:
        """Undo `split_rows`."""
        blocks, batch, groups, heads, block = x.shape
        return x.transpose(1, 2, 3, 0, 4).reshape(batch, groups * heads, blocks * block)[..., : self.queries]

    def _split_heads(self, x: jax.Array) -> jax.Array:
        """Split the head axis of a bias or mask into groups, and pad queries and keys to whole blocks."""
        batch, heads, queries, keys = x.shape
        x = x.reshape(batch, *((1, 1) if heads == 1 else (self.groups, -1)), queries, keys)
        after = [0 if n == 1 else _missing(n, block) for n, block in ((queries, self.q_block), (keys, self.kv_block))]
        return jnp.pad(x, [(0, 0)] * 3 + [(0, n) for n in after]) if any(after) else x

    @staticmethod
    def join_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
        """Return the gradient of `bias` in its shape and dtype."""
        batch, heads, queries, keys = bias.shape
        return x[..., :queries, :keys].reshape(batch, heads, queries, keys).astype(bias.dtype)

    def part_of(self, x: jax.Array, pair: jax.Array) -> jax.Array:
        """Return the block of a bias or mask for one pair; an axis of length 1 stays."""
        for axis, block, index in ((3, self.q_block, pair[0]), (4, self.kv_block, pair[1])):
            if x.shape[axis] != 1:
                x = lax.dynamic_slice_in_dim(x, index * block, block, axis)
        return x

    def put_part(self, x: jax.Array, part: jax.Array, pair: jax.Array) -> jax.Array:
        """Return the gradient of a bias with the block of one pair replaced."""
        zero = jnp.zeros_like(pair[0])  # all indices need one dtype, also with 64-bit integers enabled
        start = [zero] * 3 + [
            index * block if x.shape[axis] != 1 else zero
            for axis, block, index in ((3, self.q_block, pair[0]), (4, self.kv_block, pair[1]))
        ]
        return lax.dynamic_update_slice(x, part, start)

    def dot(self, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return the einsum of two operands, accumulated in the grid's dtype."""
        return jnp.einsum(subscripts, x, y, preferred_element_type=self.dtype, precision=self.rules.precision)


def grid_of(call: AttentionCall, params: FwdParams | BwdParams) -> Grid:
    """Return the block structure of a call with these parameters."""
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
        rules=call.rules,
        pairs=pairs,
    )


def _visible_pairs(queries: int, keys: int, q_block: int, kv_block: int, rules: Rules) -> np.ndarray:
    """Return the pairs of blocks with at least one visible key under the window, ordered by query block."""
    start = np.arange(0, queries, q_block)
    first, last = start + keys - queries, np.minimum(start + q_block, queries) - 1 + keys - queries
    lowest = np.zeros_like(first) if rules.left is None else np.maximum(first - rules.left, 0)
    highest = np.full_like(last, keys - 1) if rules.right is None else np.minimum(last + rules.right, keys - 1)
    begin, end = lowest // kv_block, highest // kv_block + 1
    pairs = [(i, j) for i in range(len(start)) for j in range(begin[i], end[i])]
    return np.asarray(pairs, np.int32).reshape(-1, 2)


def _missing(length: int, block: int) -> int:
    """Return the padding that rounds a length up to whole blocks."""
    # A symbolic length is one block; its remainder is unknown.
    return 0 if length == block else -length % block


def _blocked(x: jax.Array, axis: int, block: int, fill: float = 0) -> jax.Array:
    """Pad `axis` to whole blocks, split it, and move the block axis to the front."""
    padding = [(0, _missing(x.shape[axis], block) if a == axis else 0) for a in range(x.ndim)]
    x = jnp.pad(x, padding, constant_values=fill) if any(after for _, after in padding) else x
    x = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def full(shape: tuple[int, ...], fill: float, dtype: jnp.dtype, blocks: Blocks) -> jax.Array:
    """Return a constant that varies over the mesh as the blocks do."""
    return unify_varying((jnp.full(shape, fill, dtype), blocks.query))[0]


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return one block."""
    block: jax.Array = lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
    return block


def put(x: jax.Array, block: jax.Array, index: jax.Array) -> jax.Array:
    """Return `x` with one block replaced."""
    changed: jax.Array = lax.dynamic_update_index_in_dim(x, block, index, 0)
    return changed
