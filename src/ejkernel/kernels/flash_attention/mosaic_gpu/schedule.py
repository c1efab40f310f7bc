# SPDX-License-Identifier: Apache-2.0
"""The schedule of a persistent forward: the tiles of each block of threads.

Under a causal mask or a window some tiles are longer than others. Dealt in turns, they left some blocks of threads with
up to 1.7 times the mean work. Segments and key lengths are known only when the call runs; then XLA orders the tiles.
"""

from __future__ import annotations

import heapq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .plan import ForwardPlan
from .visibility import BlockRange, window_blocks

# Microseconds on one H100, by consumer warpgroups and keys in a block: a block of keys, and the ends of a tile. From 22
# causal forwards at head_dim 64 with 1,024 to 8,192 queries, within 3 %.
_TIMES = {(2, 128): (1.21, 1.0), (3, 64): (0.84, 1.4), (3, 128): (1.49, 3.1)}
_LAST_ROUNDS = 2  # of tiles, which are dealt by length
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


def blocks_of_rows(plan: ForwardPlan, keys: Any, row: Any, origin: Any = 0) -> BlockRange:
    """Return the blocks of keys that the tile from `row` visits, of a forward without a table.

    Args:
        plan: The plan.
        keys: The number of keys that count; with lengths an array.
        row: The first row of the tile, int32.
        origin: The first key of block 0.
    """
    low = plan.position(row)
    high = jnp.minimum(low + plan.tile_rows, plan.keys) - 1
    return window_blocks(plan.rules, keys, plan.params.kv_block, low, high, origin)


def order_by_length(plan: ForwardPlan, table: jax.Array | None, key_lengths: jax.Array | None) -> jax.Array:
    """Return the tiles of rows of all examples, the longest first: `example * row_tiles + row_tile`, in int32.

    Args:
        plan: A plan that deals by length.
        table: A `block_table`; `None` without one.
        key_lengths: `[batch]`; without a table.
    """
    if table is not None:
        lengths = (table[..., 3] - table[..., 0]).sum(axis=1, dtype=jnp.int32)
    else:
        assert key_lengths is not None  # without either, lengths are constants
        rows = np.arange(plan.row_tiles, dtype=np.int32)[None] * plan.tile_rows
        blocks = blocks_of_rows(plan, key_lengths[:, None], rows)
        lengths = blocks.end - blocks.first
    lengths = jnp.broadcast_to(lengths, (plan.batch, plan.row_tiles)).ravel()
    # Two small kernels of XLA; a sort took 2 us more.
    number = np.arange(len(lengths), dtype=np.int32)
    key = lengths * len(lengths) - number
    rank = (key[None] > key[:, None]).sum(axis=1, dtype=jnp.int32)
    return jnp.where(rank[None] == number[:, None], number[None], 0).sum(axis=1, dtype=jnp.int32)


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

    Segments, masks and lengths do not count. The unit is arbitrary, the same for all sizes in `_TIMES`.
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
    return blocks * each + ends


def duration(plan: ForwardPlan) -> float:
    """Return how long the busiest block of threads of a persistent forward takes, if the tiles divide evenly."""
    work = tile_work(plan)
    return float(max(work.sum() / plan.programs, work.max()))
