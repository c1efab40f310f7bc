# SPDX-License-Identifier: Apache-2.0
"""What the backward kernels hold in shared memory: one account for those that allocate it and those that refuse it."""

from __future__ import annotations

import math
from typing import NamedTuple

from .availability import SHARED_MEMORY
from .backward_params import BackwardParams
from .backward_problem import Problem

# What a swizzle of 128 bytes repeats after, and so what Pallas begins every buffer at.
_ALIGNMENT = 1024  # of every buffer
_BARRIERS = 1024  # bytes, more than all barriers of any kernel take


class Buffer(NamedTuple):
    """One buffer in shared memory.

    Attributes:
        shape: Its sizes.
        itemsize: Bytes of an element.
        columns: The width of the slices of its last axis that are used, if not all of it at once.
    """

    shape: tuple[int, ...]
    itemsize: int = 2
    columns: int = 0

    @property
    def nbytes(self) -> int:
        """Return its size in bytes, with what alignment costs."""
        return -(-math.prod(self.shape) * self.itemsize // _ALIGNMENT) * _ALIGNMENT


def shared_bytes(buffers: dict[str, Buffer]) -> int:
    """Return how much shared memory a block of these buffers takes."""
    return sum(buffer.nbytes for buffer in buffers.values()) + _BARRIERS


def dquery_columns(problem: Problem, params: BackwardParams) -> tuple[int, ...]:
    """Return how many columns of dQ each warpgroup of a block of keys computes; the rows are 64 in any case."""
    dim, warpgroups = problem.head_dim, params.warpgroups
    if params.division == "products":
        # Whole swizzled tiles, the larger part to the warpgroup without dK.
        first = -(-dim // 128) * 64 if dim > 64 else dim // 2
        return (first, dim - first)
    # A product has 64 rows: with 64 queries for each warpgroup they divide the rows, else the columns of the same rows.
    return (dim if params.q_block == 64 * warpgroups else dim // warpgroups,) * warpgroups


def key_block_buffers(problem: Problem, params: BackwardParams) -> dict[str, Buffer]:
    """Return the buffers of a block that owns keys."""
    slabs, rows = params.keys // 64, params.q_block
    queries, douts = params.q_stages, params.dout_stages
    fused, columns = params.form == "fused", dquery_columns(problem, params)
    # Parts may differ, as 128 and 64 of 192 do: the buffers that they leave through take both in whole pieces.
    part = math.gcd(*columns)
    used = part if fused else 0  # factors in shared memory have to be swizzled alike
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
        buffers["bias"] = Buffer((2, rows, params.keys), problem.bias_dtype.itemsize, 64)
        # Queries before keys, as the bias is, where it is stored; sums in memory are transposed outside.
        shape = (slabs, rows, 64) if problem.bias_whole else (slabs, 64, rows)
        buffers["dbias"] = Buffer(shape, problem.bias_gradient_dtype.itemsize)
    if fused:
        buffers["dscores"] = Buffer((2, slabs, 64, rows), columns=used)
        buffers["dquery"] = Buffer((params.warpgroups, 64, part), 4)
    # The bias is the first to lose its second slot: a call then keeps the stages that it was given for all else.
    if problem.bias is not None and shared_bytes(buffers) > SHARED_MEMORY:
        buffers["bias"] = buffers["bias"]._replace(shape=(1, rows, params.keys))
    return buffers


def query_block_buffers(problem: Problem, params: BackwardParams) -> dict[str, Buffer]:
    """Return the buffers of a block that owns queries."""
    warpgroups, stages, keys = params.q_warpgroups, params.kv_stages, params.kv_block
    return {
        "query": Buffer((warpgroups, 64, problem.head_dim)),
        "dout": Buffer((warpgroups, 64, problem.value_dim)),
        "key": Buffer((stages, keys, problem.head_dim)),
        "value": Buffer((stages, keys, problem.value_dim)),
    }
