# SPDX-License-Identifier: Apache-2.0
"""An upper bound on the vector memory that a kernel takes."""

from __future__ import annotations

from typing import NamedTuple

from ejkernel.kernels.flash_attention._tpu import LANES
from ejkernel.kernels.flash_attention.common import Rules

from .numbers import up
from .walk import Plan, Sight, scores_at_once

_DEFAULT = 16 << 20  # the compiler's default limit, in bytes
_LINES = 2 * 4 * 8  # bytes of a 32-bit value along a vector register's row, in a window: eight rows, two buffers


class Dims(NamedTuple):
    """The sizes of a call's heads: dimensions, query heads of one key head, and bytes of an element."""

    head: int
    value: int
    repeats: int
    size: int


def limit(needed: int) -> int:
    """Return the limit to pass to the compiler."""
    return max(needed, _DEFAULT)


def of_forward(dims: Dims, walked: tuple[Sight, Plan], rules: Rules, *, segmented: bool) -> int:
    """Return an upper bound on the bytes of the forward kernel."""
    (head, value), plan = (up(dims.head), up(dims.value)), walked[1]
    windows = 2 * dims.size * (plan.block + plan.part) * (head + value) + _LINES * plan.block
    scratch = dims.size * plan.block * head + 4 * plan.block * (2 * LANES + value)
    return windows + scratch + _ids(plan, segmented) + _scores(dims, walked, rules, segmented)


def of_queries(dims: Dims, walked: tuple[Sight, Plan], rules: Rules, *, segmented: bool) -> int:
    """Return an upper bound on the bytes of the kernel for the query's gradient."""
    (head, value), plan = (up(dims.head), up(dims.value)), walked[1]
    windows = 2 * dims.size * (plan.block * (2 * head + value) + plan.part * (head + value)) + 2 * _LINES * plan.block
    scratch = dims.size * plan.block * head + 4 * plan.block * (2 * LANES + head)
    return windows + scratch + _ids(plan, segmented) + _scores(dims, walked, rules, segmented)


def of_keys(dims: Dims, walked: tuple[Sight, Plan], rules: Rules, *, fused: bool, segmented: bool) -> int:
    """Return an upper bound on the bytes of the kernel for the gradients of key and value."""
    (head, value), plan = (up(dims.head), up(dims.value)), walked[1]
    windows = 2 * dims.size * (2 * plan.block * (head + value) + plan.part * (head * (2 if fused else 1) + value))
    kept = plan.block * plan.blocks if fused and dims.repeats > 1 else plan.block
    scratch = dims.size * plan.block * head + 4 * kept * (head + value) + (4 * plan.part * head if fused else 0)
    lines = 2 * _LINES * plan.part + _ids(plan, segmented)
    return windows + lines + scratch + _scores(dims, walked, rules, segmented)


def _ids(plan: Plan, segmented: bool) -> int:
    return _LINES * (plan.block + plan.part) if segmented else 0


def _scores(dims: Dims, walked: tuple[Sight, Plan], rules: Rules, segmented: bool) -> int:
    """Return the bytes of the intermediate values of a basic block.

    In bfloat16 and without a cap, the compiler needs 0.3 to 0.9 of the float32 scores of one chunk on v6e, and up to
    2.3 of them for two chunks on v5e; of strips, whose tiles have one size each, at most 0.8 of their scores.
    """
    size = 4 + 2 * (rules.soft_cap is not None) + 2 * segmented + 4 * (dims.size == 4)
    edges, chunk = scores_at_once(*walked)
    return size * max(edges * 5 // 4, (walked[1].unroll + 1) * chunk)
