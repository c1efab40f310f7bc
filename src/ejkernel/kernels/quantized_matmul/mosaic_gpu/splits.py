# SPDX-License-Identifier: Apache-2.0
"""When several blocks of threads share the `k` of a tile, and how their sums become one."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import jax

SPLITS = (1, 2, 4, 8)  # that a search tries
_LAUNCH = 2.5  # microseconds of a launch beside its tiles
_ADDING = 4.0  # microseconds until XLA's kernel that adds the sums runs
_BYTES = 7.0e6  # per microsecond, of sums in the L2 cache
_WORTH = 0.95  # of the time without splits: the heuristic takes them
_TRIED = 1.05  # of that time: a search tries them


def added(splits: jax.Array) -> jax.Array:
    """Return the sum of the sums of splits, in order, so that it has the same bits in every run."""
    found: jax.Array = functools.reduce(operator.add, splits)
    return found


def estimated(tile_us: float, rounds: float, splits: int = 1, numbers: int = 0) -> float:
    """Return the estimated time of a launch, in microseconds.

    Args:
        tile_us: The time of a tile, or of a split of one.
        rounds: How many of these each multiprocessor has.
        splits: Blocks of threads for each tile.
        numbers: How many numbers the result has.
    """
    adding = _ADDING + numbers * (8 * splits + 2) / _BYTES if splits > 1 else 0.0
    return _LAUNCH + math.ceil(rounds) * tile_us + adding


def is_promising(split: float, whole: float) -> bool:
    """Return whether a search tries splits, given their estimated time and that without them."""
    return split <= _TRIED * whole


def fastest(times: Sequence[float]) -> int:
    """Return the number of the smallest time, or 0 unless another gains 5 %."""
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[best] < _WORTH * times[0] else 0
