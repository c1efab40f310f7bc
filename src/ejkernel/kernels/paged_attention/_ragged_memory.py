# SPDX-License-Identifier: Apache-2.0
"""The vector memory of `tpu_ragged`.

The windows and scratch arrays of its kernel follow from the shapes. The rest are spilled registers. Their number hardly
depends on pages, window and soft cap. A table has them for common numbers of heads, and blocks of the sizes that tuning
tries. Numbers for blocks in between are interpolated; other numbers of heads have a weighted sum of sizes.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels._spilled import WEIGHTS
from ejkernel.kernels._vector_memory import LANES, REGISTER, WIDE_UNITS, Need, Parts, spilled_registers

from .common import PagedCall

PACKING = {"float32": 1, "bfloat16": 2}  # elements in 32 bits, by supported dtype
_OTHER_PROGRAMS = 1.02  # kernels of one form may take this much more, e.g. with a window
_SOFT_CAP, _BETWEEN = 1.05, 1.1
# Of 45 kernels with a soft cap, two of those with the most registers took 8 and 10 % more than without. The others took
# at most 3.5 % more.
_MANY, _SOFT_CAP_OF_MANY = 2000, 1.12
_PARTIAL = 1.12  # queries that fill tiles partly
_BEYOND = 1.3  # times as many values as by the weights, which are fitted to the smaller blocks of the table
_SPARE = 4  # registers at most

Cells = dict[tuple[int, int], int]  # registers by queries and keys of a block


def heads_of_block(call: PagedCall) -> tuple[int, int]:
    """Return the numbers of query heads and KV heads that one block of the kernel computes."""
    most = 4 * PACKING[call.dtype]
    kv_heads = most if call.pages[2] % most == 0 else call.pages[2]
    tiles, rest = divmod(kv_heads * call.group, PACKING[call.dtype])
    whole = rest == 0 and (tiles in (1, 2, 4, 8) or tiles % 8 == 0)
    return (kv_heads * call.group, kv_heads) if whole else (call.q[1], call.pages[2])


def memory(call: PagedCall, params: Any) -> Need:
    """Return the bytes of vector memory for parameters of the kernel."""
    parts = parts_of(call, params)
    registers = _interpolated(_cells(form_of_heads(call)), *block_of(call, params))
    if registers is None:
        return parts.times(_BEYOND).need(WEIGHTS)
    is_partial = params.block_queries > 8 and params.block_queries % 8 > 0
    listed = is_listed(call, params)
    margin = _OTHER_PROGRAMS if listed else _PARTIAL if is_partial else _BETWEEN
    if call.soft_cap is not None:
        margin = max(margin, _SOFT_CAP if registers < _MANY else _SOFT_CAP_OF_MANY)
    spare = min(_SPARE, registers // 8)
    return Need(parts.least, max(parts.least, int((parts.known + REGISTER * (registers + spare)) * margin)))


def is_listed(call: PagedCall, params: Any) -> bool:
    """Return whether the table has a kernel of this form."""
    return block_of(call, params) in _cells(form_of_heads(call))


def form_of_heads(call: PagedCall) -> str:
    """Return the key of a call in the table of registers."""
    heads, kv_heads = heads_of_block(call)
    return f"{call.device_fingerprint}, {call.dtype}, heads {heads}/{kv_heads}"


@functools.cache
def _cells(form: str) -> Cells:
    rows = spilled_registers().get(form, {}).items()
    return {(int(queries), int(keys)): count for queries, row in rows for keys, count in row.items()}


def _interpolated(cells: Cells, queries: int, keys: int) -> float | None:
    """Return the registers of a block, from the closest four blocks that enclose it; `None` without these."""
    if not cells:
        return None
    least = [min(sizes) for sizes in zip(*cells, strict=True)]
    place = max(queries, least[0]), max(keys, least[1])  # smaller blocks count as the smallest
    axes = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
    pairs = (
        [(low, high) for low, high in itertools.product(sizes, sizes) if low <= own <= high]
        for own, sizes in zip(place, axes, strict=True)
    )
    boxes = [box for box in itertools.product(*pairs) if all(corner in cells for corner in itertools.product(*box))]
    if not boxes:
        return None
    (q0, q1), (k0, k1) = min(boxes, key=lambda box: box[0][1] * box[1][1] / (box[0][0] * box[1][0]))
    shares = [(own - low) / max(high - low, 1) for own, (low, high) in zip(place, ((q0, q1), (k0, k1)), strict=True)]
    low, high = (cells[q0, k] + shares[0] * (cells[q1, k] - cells[q0, k]) for k in (k0, k1))
    return float(low + shares[1] * (high - low))


def parts_of(call: PagedCall, params: Any) -> Parts:
    """Return the memory of the kernel by its causes: copies of pages, sums, windows, and the values of one step."""
    heads, kv_heads = heads_of_block(call)
    itemsize, dim = jnp.dtype(call.dtype).itemsize, call.pages[4]
    queries, keys = block_of(call, params)
    rows = queries * call.group
    least = 2 * keys * 2 * kv_heads * dim * itemsize + queries * heads * (2 * LANES + dim) * 4
    buffers = 1 if call.q[0] <= queries and call.q[1] == heads else 2  # a single step needs one
    windows = buffers * 2 * queries * heads * dim * itemsize
    sizes = {"scores": rows * max(keys, LANES), "rows": rows * LANES, "keys": keys * dim}
    sizes |= {f"{name} of heads": size * kv_heads for name, size in sizes.items()}
    sizes |= {"queries": queries * heads * dim, "constant": LANES * LANES}
    # chips with a matrix unit 128 wide keep less of rows that fill their tiles partly
    is_partial, is_wide = call.group & (call.group - 1), call.device_fingerprint in WIDE_UNITS
    kind = f"paged, {call.dtype}, {'wide unit' if is_wide else 'partial' if is_partial else 'whole'}"
    return Parts(least, least + windows, kind, sizes)


def block_of(call: PagedCall, params: Any) -> tuple[int, int]:
    """Return the queries and keys of a block."""
    return params.block_queries, min(params.block_pages, call.table[1]) * call.pages[1]
