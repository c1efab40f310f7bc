# SPDX-License-Identifier: Apache-2.0
"""The schedule of a persistent forward: the tiles of each block of threads.

Under a causal mask or a window some tiles are longer than others. Dealt in turns, they left some blocks of threads with
up to 1.7 times the mean work.
"""

from __future__ import annotations

import heapq

import numpy as np

from .plan import ForwardPlan

# Microseconds on one H100, by consumer warpgroups and keys in a block: a block of keys, and the ends of a tile. From 22
# causal forwards at head_dim 64 with 1,024 to 8,192 queries, within 3 %.
_TIMES = {(2, 128): (1.21, 1.0), (3, 64): (0.84, 1.4), (3, 128): (1.49, 3.1)}
_LAST_ROUNDS = 2  # of tiles, which are dealt by length
_FEW_BLOCKS = 8  # of keys, in a tile of a segment
_ALIKE = (1.0, 1.0)  # others: prologue and epilogue take about as long as one block of keys


def schedule(plan: ForwardPlan) -> np.ndarray | None:
    """Return the tiles of each block of threads, `[programs, most + 1]` in int32, then `plan.tiles`.

    `None` if each block of threads has one tile, e.g. without persistence. Block of threads `i` starts with tile `i`.
    The next tiles go to the block with the least work, in their order: tiles of one head run at about the same time and
    share its keys in the cache. With all tiles ordered by length, wide causal forwards took up to 22 % longer. The last
    tiles are ordered by length, so that all blocks end together.
    """
    if plan.programs == plan.tiles:
        return None
    taken, _ = _dealt(plan)
    table = np.full((plan.programs, max(map(len, taken)) + 1), plan.tiles, np.int32)
    for row, tiles in zip(table, taken, strict=True):
        row[: len(tiles)] = sorted(tiles)
    return table


def longest_share(plan: ForwardPlan) -> float:
    """Return the estimated time of the busiest block of threads of a persistent forward, in the unit of `tile_work`."""
    return max(_dealt(plan)[1])


def _dealt(plan: ForwardPlan) -> tuple[list[list[int]], list[float]]:
    """Return the tiles of each block of threads, and the times of all blocks, in any order."""
    work = tile_work(plan)
    taken = [[program] for program in range(plan.programs)]
    loads = [(time, program) for program, time in enumerate(work[: plan.programs].tolist())]
    heapq.heapify(loads)
    last = max(plan.programs, plan.tiles - _LAST_ROUNDS * plan.programs)
    for tile in (*range(plan.programs, last), *(last + np.argsort(-work[last:], stable=True))):
        time, program = loads[0]
        taken[program].append(int(tile))
        heapq.heapreplace(loads, (time + float(work[tile]), program))
    return taken, [time for time, _ in loads]


def tile_work(plan: ForwardPlan) -> np.ndarray:
    """Return the estimated time of each tile, `[plan.tiles]`, from its number of key blocks inside the window.

    Key lengths are ignored. Of segments, whose lengths are unknown, a tile is taken to see a quarter of the keys, or
    `_FEW_BLOCKS` blocks. The unit is arbitrary, the same for all sizes in `_TIMES`.
    """
    rules, numbers = plan.rules, np.arange(plan.tiles)
    row_tile = plan.row_tiles - 1 - numbers % (plan.row_tiles * plan.bundle) // plan.bundle
    low = row_tile * plan.tile_rows + plan.keys - plan.queries
    last = np.full_like(low, plan.keys)
    if rules.right is not None:
        last = np.clip(low + plan.tile_rows + rules.right, 0, plan.keys)
    first = np.zeros_like(low) if rules.left is None else np.clip(low - rules.left, 0, plan.keys)
    block = plan.params.kv_block
    first = first if plan.slides else first // block * block
    each, ends = _TIMES.get((plan.params.warpgroups, block), _ALIKE)
    blocks: np.ndarray = np.maximum(-(-(last - first) // block), 1)
    if plan.segments:
        blocks = np.minimum(blocks, max(-(-plan.keys // (4 * block)), _FEW_BLOCKS))
    return blocks * each + ends


def duration(plan: ForwardPlan) -> float:
    """Return how long the busiest block of threads of a persistent forward takes, if the tiles divide evenly."""
    work = tile_work(plan)
    return float(max(work.sum() / plan.programs, work.max()))
