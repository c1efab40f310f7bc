# SPDX-License-Identifier: Apache-2.0
"""The static description of one backward, and the shared memory that its kernels take."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.kernels._hopper import DTYPES, SHARED_MEMORY, widest_swizzle
from ejkernel.kernels.flash_attention.common import AttentionCall

from .params import BackwardParams
from .plan import ALIGNMENT, AttentionSizes, is_pieced, sizes_of

_BARRIERS = 1024  # bytes, more than the barriers of any backward kernel take
_NATIVE_DIMS = (32, 64, 96, 128, 192, 256)  # head dimensions of the backward; others are padded in shared memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardProblem(AttentionSizes):
    """The static description of one backward, for all launch parameters.

    Attributes:
        dtype: Of query, key, value and the output's cotangent.
        segments: Whether segment ids are given.
        key_lengths: Whether examples have key lengths.
        mask: Whether a boolean mask is given.
        bias: The first two sizes of the bias; `None` without one.
        bias_dtype: The dtype of the loaded bias.
        bias_whole: Whether the bias has one element per score, in `dtype`: no element of its gradient is a sum.
        pieced: As in `ForwardPlan`, of query, key, value and their gradients.
        raised: Exponent of the power of two that multiplies the weights before they are rounded to `dtype`; the stored
            gradients are free of it. In float16 the small weights of long rows would lose digits.
    """

    dtype: Any
    pieced: bool = False
    raised: int = 0
    segments: bool = False
    key_lengths: bool = False
    mask: bool = False
    bias: tuple[int, int] | None = None
    bias_dtype: Any = None
    bias_whole: bool = False

    @property
    def heads_per_group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.groups

    @property
    def ahead(self) -> int:
        """The position of query 0 among the keys."""
        return self.keys - self.queries

    @property
    def shift_in_scores(self) -> bool:
        """Whether the accumulator of a row's scores starts from the row's shift: no soft cap or bias comes between."""
        return self.rules.soft_cap is None and self.bias is None

    @property
    def gradient_scale(self) -> float:
        """Factor on the sums for query and key: the logits' scale, and the dropout's."""
        return self.rules.scale * self.value_scale

    @property
    def value_scale(self) -> float:
        """Factor on the sums for value and bias: the dropout's, without the weights' power of two."""
        return 2.0**-self.raised / (1 - self.rules.dropout_rate)

    @property
    def bias_gradient_dtype(self) -> Any:
        """The dtype of the bias's gradient in the kernel."""
        return self.dtype if self.bias_whole else jnp.dtype(jnp.float32)

    def needed_masks(self, keys_per_block: int, *, walks_queries: bool) -> tuple[bool, bool]:
        """Return whether masked tiles may come before, and after, the unmasked ones.

        Args:
            keys_per_block: Keys of a tile.
            walks_queries: Whether a block of threads owns keys and walks over queries.
        """
        # Copies fill the block past the last key with zeros, and a score of zero would have a weight.
        tail, rules = self.key_lengths or self.keys % keys_per_block != 0, self.rules
        by_end, by_start = self.segments or rules.right is not None, self.segments or rules.left is not None
        # Without unmasked tiles, all tiles count as before them for blocks of keys, and as after for blocks of queries.
        if walks_queries:
            return by_end or by_start or tail, by_start
        return by_start, by_end or by_start or tail


def backward_problem(call: AttentionCall) -> BackwardProblem:
    """Return the static description of a backward."""
    scores = (call.query[0], call.query[2], call.query[1], call.key[1])
    return BackwardProblem(
        **sizes_of(call, padded_dim),
        dtype=jnp.dtype(call.dtype),
        segments=call.segments,
        key_lengths=call.key_lengths,
        mask=call.attention_mask is not None,
        bias=None if call.bias is None else (call.bias[0], call.bias[1]),
        bias_dtype=jnp.dtype(call.bias_dtype if call.bias_dtype in DTYPES else jnp.float32),
        bias_whole=call.bias == scores and call.bias_dtype == call.dtype,
        pieced=is_pieced(call, _NATIVE_DIMS),
    )


def part_heads(problem: BackwardProblem, params: BackwardParams) -> tuple[int, ...]:
    """Return the query heads of each part of a group; the first parts have one more if the heads divide unevenly."""
    heads, longer = divmod(problem.heads_per_group, params.head_parts)
    return (heads + 1,) * longer + (heads,) * (params.head_parts - longer)


def padded_dim(dim: int) -> int:
    """Return the columns that a head dimension takes in the shared memory of the backward."""
    return next(size for size in _NATIVE_DIMS if dim <= size)


class Buffer(NamedTuple):
    """One buffer of the backward in shared memory.

    Attributes:
        shape: Its sizes.
        itemsize: Bytes of an element.
        columns: The width of the slices of its last axis that are used; 0 for the whole axis.
    """

    shape: tuple[int, ...]
    itemsize: int = 2
    columns: int = 0

    @property
    def nbytes(self) -> int:
        """Its size in bytes, aligned."""
        return -(-math.prod(self.shape) * self.itemsize // ALIGNMENT) * ALIGNMENT

    @property
    def swizzle(self) -> int:
        """The widest swizzle, in bytes, that divides rows and slices."""
        return widest_swizzle(self.shape[-1] * self.itemsize, self.columns * self.itemsize)


def shared_bytes(buffers: dict[str, Buffer]) -> int:
    """Return the bytes of shared memory that a block of threads with these buffers takes."""
    return sum(buffer.nbytes for buffer in buffers.values()) + _BARRIERS


def dquery_columns(problem: BackwardProblem, params: BackwardParams) -> tuple[int, ...]:
    """Return how many columns of dQ each consumer of a block of keys computes, for 64 rows."""
    dim, warpgroups = problem.head_dim, params.warpgroups
    if params.division == "products":
        # Whole swizzled tiles; the larger part for the warpgroup that does not compute dK.
        first = -(-dim // 128) * 64 if dim > 64 else dim // 2
        return (first, dim - first)
    # With 64 queries per warpgroup each takes 64 rows; otherwise they divide the columns of the same rows.
    if dim == 96 and warpgroups == 2 and params.q_block == 64:
        return (64, 32)  # two halves would need the narrowest swizzle
    return (dim if params.q_block == 64 * warpgroups else dim // warpgroups,) * warpgroups


def bias_in_tiles(problem: BackwardProblem, params: BackwardParams) -> bool:
    """Return whether a bias and its gradient are padded to whole tiles and copied by them.

    Otherwise 64 keys of 16 bits, one swizzle wide, are copied at any row.
    """
    divides = problem.queries % params.q_block == 0 and problem.keys % params.keys == 0
    return divides or params.form == "split" or problem.bias_dtype.itemsize > 2


def key_block_buffers(problem: BackwardProblem, params: BackwardParams) -> dict[str, Buffer]:
    """Return the buffers of a block of threads that owns keys."""
    slabs, rows = params.keys // 64, params.q_block
    queries, douts = params.q_stages, params.dout_stages
    fused, columns = params.form == "fused", dquery_columns(problem, params)
    # Parts may differ, such as 128 and 64 of 192: the buffer through which they leave takes whole pieces of both.
    part = math.gcd(*columns)
    used = part if fused else 0  # both factors of a product need the same swizzle
    buffers = {
        "key": Buffer((slabs, 64, problem.head_dim), columns=used),
        "value": Buffer((slabs, 64, problem.value_dim)),
        "query": Buffer((queries, rows, problem.head_dim), columns=used),
        "dout": Buffer((douts, rows, problem.value_dim)),
        "shift": Buffer((queries, rows), 4),
        "delta": Buffer((douts, rows), 4),
    }
    if params.division == "products":
        buffers["weights"] = Buffer((2, 64, rows))
    if problem.bias is not None:
        whole = Buffer((2, rows, params.keys), problem.bias_dtype.itemsize, 64)
        buffers["bias"] = whole if bias_in_tiles(problem, params) else Buffer((2, slabs, rows, 64))
        # A stored gradient has queries before keys, as the bias; sums in memory are transposed by XLA.
        shape = (slabs, rows, 64) if problem.bias_whole else (slabs, 64, rows)
        buffers["dbias"] = Buffer(shape, problem.bias_gradient_dtype.itemsize)
    if fused:
        buffers["dscores"] = Buffer((2, slabs, 64, rows), columns=used)
        buffers["dquery"] = Buffer((params.warpgroups, 64, part), 4)
    # If memory is short the bias loses its second stage, and all other buffers keep the stages in the parameters.
    if problem.bias is not None and shared_bytes(buffers) > SHARED_MEMORY:
        buffers["bias"] = buffers["bias"]._replace(shape=(1, *buffers["bias"].shape[1:]))
    return buffers


def query_block_buffers(problem: BackwardProblem, params: BackwardParams) -> dict[str, Buffer]:
    """Return the buffers of a block of threads that owns queries."""
    warpgroups, stages, keys = params.q_warpgroups, params.kv_stages, params.kv_block
    buffers = {
        "query": Buffer((warpgroups, 64, problem.head_dim)),
        "dout": Buffer((warpgroups, 64, problem.value_dim)),
        "key": Buffer((stages, keys, problem.head_dim)),
        "value": Buffer((stages, keys, problem.value_dim)),
    }
    # If memory is short values have one stage: they are released before dQ's product, so their copy overlaps with it.
    if shared_bytes(buffers) > SHARED_MEMORY:
        buffers["value"] = Buffer((1, keys, problem.value_dim))
    return buffers
