# SPDX-License-Identifier: Apache-2.0
"""An upper bound on the vector memory that a kernel takes."""

from __future__ import annotations

from typing import NamedTuple

from .numbers import up
from .params import LANES, BackwardParams, ForwardParams
from .walk import Plan

_DEFAULT = 16 << 20  # the compiler's default limit, in bytes


class Dims(NamedTuple):
    """The sizes of a call's heads: dimensions, query heads of one key head, and bytes of an element."""

    head: int
    value: int
    repeats: int
    size: int


def limit(needed: int) -> int:
    """Return the limit to pass to the compiler."""
    return max(needed, _DEFAULT)


def of_forward(dims: Dims, plan: Plan, params: ForwardParams, *, segmented: bool) -> int:
    """Return an upper bound on the bytes of the forward kernel."""
    head, value = up(dims.head), up(dims.value)
    windows = 2 * dims.size * (plan.block + plan.part) * (head + value) + 2 * 4 * 8 * plan.block
    ids = 2 * 4 * 8 * (plan.block + plan.part) if segmented else 0
    scratch = dims.size * plan.block * head + 4 * plan.block * (2 * LANES + value)
    return windows + ids + scratch + _tiles(plan, 3)


def of_queries(dims: Dims, plan: Plan, *, segmented: bool) -> int:
    """Return an upper bound on the bytes of the kernel for the query's gradient."""
    head, value = up(dims.head), up(dims.value)
    windows = (
        2 * dims.size * (plan.block * (2 * head + value) + plan.part * (head + value)) + 2 * 2 * 4 * 8 * plan.block
    )
    ids = 2 * 4 * 8 * (plan.block + plan.part) if segmented else 0
    scratch = dims.size * plan.block * head + 4 * plan.block * (2 * LANES + head)
    return windows + ids + scratch + _tiles(plan, 4)


def of_keys(dims: Dims, plan: Plan, params: BackwardParams, *, segmented: bool) -> int:
    """Return an upper bound on the bytes of the kernel for the gradients of key and value."""
    head, value = up(dims.head), up(dims.value)
    fused = params.query is None
    windows = 2 * dims.size * (2 * plan.block * (head + value) + plan.part * (head * (2 if fused else 1) + value))
    lines = 2 * 2 * 4 * 8 * plan.part + (2 * 4 * 8 * (plan.block + plan.part) if segmented else 0)
    kept = plan.block * plan.blocks if fused and dims.repeats > 1 else plan.block
    scratch = dims.size * plan.block * head + 4 * kept * (head + value) + (4 * plan.part * head if fused else 0)
    return windows + lines + scratch + _tiles(plan, 4)


def _tiles(plan: Plan, live: int) -> int:
    return live * 4 * plan.rows * plan.chunk * plan.unroll
