# SPDX-License-Identifier: Apache-2.0
"""The order of the blocks of keys in a backward, and how long they take, from shapes alone."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from ejkernel.kernels._hopper import MULTIPROCESSORS

from .params import BackwardParams
from .plan import BackwardProblem

FEW_BLOCKS = 16 * MULTIPROCESSORS
_ENDS = 8  # of a block of threads, in steps of 64 queries
_CACHED = 32 << 20  # bytes of one pass over queries that the L2 cache surely keeps
_MEMORY = {True: 2.0, False: 0.7}  # time to copy all of a step's queries, and sums, from memory; `True` if fused
_DRIFT = 0.07  # more time for each further head of more than 64 columns in the fused form, even if all is in the cache
_SUMMED = 1.9e-4  # time to add up the parts of one row of keys


class Order(NamedTuple):
    """How blocks of keys are dealt to multiprocessors.

    Attributes:
        longest_first: Whether the first keys of all examples come first, rather than all keys of one example.
        time: How long it takes, in steps of 64 queries.
    """

    longest_first: bool
    time: float


def order_of(problem: BackwardProblem, params: BackwardParams) -> Order:
    """Return the faster order under the window alone.

    Under a causal mask most queries see the first keys. With these first, short blocks fill the gaps at the end. But
    then few blocks at a time share queries, and sums, in the cache: on one H100, the gradients of 8 examples of 1,024
    queries took 768 us instead of 575, with every other order of their blocks the same.
    """
    parts, fused = problem.groups * params.head_parts, params.form == "fused"
    heads, blocks = problem.heads // parts, -(-problem.keys // params.keys)
    steps = _steps(problem, params.keys) * heads + _ENDS
    mean = float(steps.sum()) * parts * problem.batch / MULTIPROCESSORS
    if blocks * parts * problem.batch > FEW_BLOCKS:
        return Order(False, mean)
    row = 8 * (problem.head_dim + problem.value_dim) // 2  # bytes of a query, its cotangent, and its sum
    drift = 1 + _DRIFT * (heads - 1) if fused and problem.head_dim > 64 else 1.0
    orders = []
    for first, spread in ((False, parts), (True, parts * problem.batch)):
        # Blocks that run at the same time and share queries.
        sharing = min(max(MULTIPROCESSORS / spread, 1), blocks)
        in_flight = MULTIPROCESSORS / sharing * heads * problem.queries * row
        # From 35 causal gradients with 1 to 8 parts, of 1,024 to 8,192 queries. Blocks of unequal lengths drift apart:
        # the more heads they walk over, and the more of them run at a time, the further.
        missed = 0.45 + 0.5 / sharing + min(0.35, 0.2 * heads * sharing / blocks)
        missed *= min(max(in_flight - _CACHED, 0) / (2 * _CACHED), 1)
        by_example = np.tile(np.repeat(steps, parts), problem.batch)
        busiest = _duration(np.repeat(steps, spread) if first else by_example) * drift
        orders.append(Order(first, max(busiest, _MEMORY[fused] * missed * mean)))
    best = min(orders, key=lambda order: order.time)
    summed = _SUMMED * parts * problem.batch * problem.keys if params.head_parts > 1 else 0
    return best._replace(time=best.time + summed)


def _steps(problem: BackwardProblem, keys: int) -> np.ndarray:
    """Return the steps of 64 queries of one head that see each block of keys."""
    rules = problem.rules
    key = np.arange(-(-problem.keys // keys)) * keys - problem.ahead
    first = np.zeros_like(key) if rules.right is None else key - rules.right
    last = np.full_like(key, problem.queries) if rules.left is None else key + keys + rules.left
    first, last = (np.clip(x, 0, problem.queries) for x in (first, last))
    steps: np.ndarray = np.maximum(last - first, 0) / 64
    return steps


def _duration(steps: np.ndarray) -> float:
    """Return how long blocks of threads take that start in this order, each as soon as a multiprocessor is free."""
    busy = [0.0] * MULTIPROCESSORS
    for one in steps.tolist():
        heapq.heapreplace(busy, busy[0] + one)
    return max(busy)
