# SPDX-License-Identifier: Apache-2.0
"""The vector memory of a kernel: a lower bound, and an upper estimate.

The compiler allocates two buffers of each window, the scratch arrays, and the registers that it spills. All but the
last follow from the shapes; a line, such as the log-sum-exp of a block, has no padding. If all tiles of a block are one
basic block, scratch arrays may become registers.

Spilled registers hold intermediate values of one basic block, in which operations on whole tiles follow each other: the
float32 scores of a tile are alive until their maximum, or the product of cotangent and value, is known, and the results
of products until they are added to the sums. Segment ids put a branch around each tile. Otherwise the chunks that are
unrolled are one basic block, and the strips at the edges another. The forward computes the scores of all its chunks
ahead, but with `sum_by_product` only those of one. The backward adds each chunk to the same sums, so the scores of one
chunk are alive, or those of all strips at one edge. The factors are those of compiled kernels: `benchmarks.memory_tpu`.
Kernels that the fit had not seen spilled more, so an eighth is added to the spilled bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from ejkernel.kernels._vector_memory import LANES, USUAL_LIMIT, Need, up
from ejkernel.kernels.flash_attention.common import Rules

from .walk import Plan, Sight, scores_at_once

_LINE = 2 * 4  # bytes of a 32-bit value of a line, in two buffers
_INTERNAL = 72 << 10  # bytes of an internal scratch array on v6e; 36 KiB on v5e and v5p
_SPILLED_MARGIN = 9  # eighths of the spilled bytes: those of the fit, and one for calls that it had not seen
_MANY = 4 << 20  # scores; the compiler computes fewer of the rest ahead


class Dims(NamedTuple):
    """The sizes of a call's heads: dimensions, query heads of one key head, and bytes of an element."""

    head: int
    value: int
    repeats: int
    size: int


def limit(need: Need) -> int:
    """Return the limit to pass to the compiler: a margin costs nothing, and saves a kernel whose estimate is too low.

    The compiler accepts a limit above the chip's memory, and refuses a kernel that takes more than there is.
    """
    return USUAL_LIMIT if need.most <= USUAL_LIMIT else need.most * 5 // 4


def of_forward(
    dims: Dims, walked: tuple[Sight, Plan], rules: Rules, *, segmented: bool, sum_by_product: bool = False
) -> Need:
    """Return the bytes of the forward kernel."""
    (head, value), plan = (up(dims.head), up(dims.value)), walked[1]
    windows = 2 * dims.size * (plan.block + plan.part) * (head + value) + _LINE * plan.block
    sums = up(dims.value + 1) if sum_by_product else value
    scratch = dims.size * plan.block * head + 4 * plan.block * (LANES + sums + (0 if sum_by_product else LANES))
    # ones in the same register as a part of the value have to be merged with it
    columns = sums + (3 * LANES if sum_by_product and dims.value % LANES else LANES)
    spilled = _spilled_by_forward(dims, walked, segmented, columns, sum_by_product)
    return _total((windows, scratch, spilled), walked, segmented)


def of_queries(dims: Dims, walked: tuple[Sight, Plan], rules: Rules, *, segmented: bool) -> Need:
    """Return the bytes of the kernel for the query's gradient."""
    (head, value), plan = (up(dims.head), up(dims.value)), walked[1]
    windows = 2 * dims.size * (plan.block * (2 * head + value) + plan.part * (head + value)) + 2 * _LINE * plan.block
    scratch = dims.size * plan.block * head + 4 * plan.block * (2 * LANES + head)
    scores = scores_at_once(*walked, branches=segmented)
    live = max(scores.tile, scores.strip) if segmented else max(scores.chunk, scores.edges * 17 // 20)
    wide, capped = dims.size == 4, rules.soft_cap is not None
    split = (7 if segmented else 5) * wide  # float32 operands are split into three of the matrix unit's
    spilled = 4 * (live * (2 + capped + split) // 2 + plan.rows * (head + 2 * LANES))
    parts = _float32_parts(dims, plan.block * 3 // 2, segmented)
    return _total((windows, scratch, spilled), walked, segmented, parts)


def of_keys(
    dims: Dims, walked: tuple[Sight, Plan], rules: Rules, *, fused: bool, segmented: bool, transpose: bool = False
) -> Need:
    """Return the bytes of the kernel for the gradients of key and value."""
    (head, value), plan = (up(dims.head), up(dims.value)), walked[1]
    windows = 2 * dims.size * (2 * plan.block * (head + value) + plan.part * (head * (2 if fused else 1) + value))
    kept = plan.block * plan.blocks if fused and dims.repeats > 1 else plan.block
    scratch = dims.size * plan.block * head + 4 * kept * (head + value)
    if fused:
        scratch += 4 * plan.part * (up(dims.head, 8) if transpose else head)
    windows += 2 * _LINE * plan.part
    spilled = _spilled_by_backward(dims, walked, rules, fused=fused, segmented=segmented, transpose=transpose)
    parts = _float32_parts(dims, plan.block + (0 if fused else 2 * plan.chunk), segmented)
    return _total((windows, scratch, spilled), walked, segmented, parts)


def _float32_parts(dims: Dims, rows: int, segmented: bool) -> int:
    """Return the bytes of rows of two float32 operands, split in three parts each, if a backward spills them whole."""
    whole = dims.size == 4 and not segmented and dims.head > 3 * LANES // 2
    return 2 * 3 * 4 * rows * up(dims.head) if whole else 0


def _total(sizes: tuple[int, int, int], walked: tuple[Sight, Plan], segmented: bool, parts: int = 0) -> Need:
    """Return the sum of the bytes of windows, scratch arrays, spilled registers and float32 parts."""
    (windows, scratch, spilled), (sight, plan) = sizes, walked
    windows += _LINE * (plan.block + plan.part) if segmented else 0
    most = (windows + scratch + parts + spilled * _SPILLED_MARGIN // 8 + _INTERNAL) * 65 // 64
    is_straight = plan.blocks == 1 or (sight.everything and plan.columns <= plan.unroll * plan.chunk)
    return Need(windows if is_straight else windows + scratch, most)


def _is_partial(dim: int) -> bool:
    """Return whether a product has several registers per row, the last of them partly used."""
    return dim > LANES and dim % LANES != 0


def _spilled_by_forward(
    dims: Dims, walked: tuple[Sight, Plan], segmented: bool, columns: int, sum_by_product: bool
) -> int:
    """Return the bytes of spilled registers; `columns` are those of the product with the values, and of row values."""
    (sight, plan), scores = walked, scores_at_once(*walked, branches=segmented)
    split = 4 * (dims.size == 4)  # float32 operands are split into three of the matrix unit's
    if segmented:
        rows = plan.block if sum_by_product and dims.value % LANES else plan.rows
        columns += 2 * LANES if _is_partial(dims.value) and not sum_by_product else 0
        tiles = ((scores.tile, rows if scores.tile else 0), (scores.strip, plan.strip if scores.strip else 0))
        return max(4 * (size * (4 + 2 * split) // 4 + rows * (columns + split * LANES // 4)) for size, rows in tiles)
    if not scores.tile:
        parts = plan.block * (up(max(dims.head, dims.value)) - LANES)
        return (scores.edges * 7 // 20 + parts) * (4 + split)
    two_edges = sight.before is not None and sight.after is not None
    edges = scores.edges * 17 // 20 if two_edges else scores.edges
    if split:
        lanes = 3 * LANES if _is_partial(dims.value) else LANES
        return 4 * (max(scores.ahead * 5, edges * 2) + plan.rows * (columns + lanes))
    results = plan.block * columns
    if sum_by_product:
        return 4 * (max(scores.chunk, edges) + results * 6 // 5)
    if sight.everything:
        return 4 * scores.ahead * 19 // 20
    ahead = scores.ahead if scores.ahead <= _MANY else _MANY + (scores.ahead - _MANY) * 17 // 20
    return 4 * (max(ahead, edges) + results * 19 // 20)


def _spilled_by_backward(
    dims: Dims, walked: tuple[Sight, Plan], rules: Rules, *, fused: bool, segmented: bool, transpose: bool
) -> int:
    """Return the bytes of spilled registers: live scores and results of products."""
    (sight, plan), scores = walked, scores_at_once(*walked, branches=segmented)
    head, value = up(dims.head), up(dims.value)
    # the soft cap's derivative, and the parts of float32 operands
    capped = 0 if rules.soft_cap is None else 4 if segmented else 5 if sight.everything else 6
    factor = 4 + capped + 14 * (dims.size == 4)
    if not scores.tile:
        width = scores.strip // plan.strip
        live = min(scores.edges, 2 * scores.strip) if dims.size == 4 else scores.strip
        return live * factor + 4 * (plan.strip * (head + value) + (width * head if fused else 0))
    own, others = plan.rows * (head + value), plan.chunk * head if fused else 0
    if segmented or (sight.before is None) == (sight.after is None):
        # products of several matrix units' widths are added up in parts
        results = (own + others) * 3 // 4 if max(head, value) == LANES else own * 23 // 20 + 2 * others
        results += 3 * plan.rows * head if dims.size == 4 and segmented and not fused and head > LANES else 0
        found = max(scores.tile, scores.strip if segmented else 0) * factor + 4 * results
        # the strips of a single block are not in a branch
        static = plan.blocks == 1 and not segmented
        return max(found, scores.edges * factor + 4 * (own + others) * 23 // 20) if static else found
    unroll = min(plan.unroll, plan.columns // plan.chunk)
    partial = own + others if _is_partial(dims.value) or _is_partial(dims.head) else 0
    chunks = (scores.chunk * factor + 4 * unroll * (own + others)) * 27 // 25
    return max(chunks, scores.edges * factor + 4 * (own + others) * 11 // 10) + 4 * partial
