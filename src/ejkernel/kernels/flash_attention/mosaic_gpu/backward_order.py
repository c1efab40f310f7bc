# SPDX-License-Identifier: Apache-2.0
"""The order of the blocks of keys in a backward, and how long they take, from shapes alone."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np

from ejkernel.kernels._hopper import MULTIPROCESSORS

from .backward_plan import BackwardProblem, part_heads
from .params import BackwardParams

FEW_BLOCKS = 16 * MULTIPROCESSORS
_ENDS = 6  # of a block of threads, in steps of 64 queries
_CACHED = 32 << 20  # bytes of one pass over queries that the L2 cache surely keeps
_MEMORY, _MEMORY_NARROW, _MEMORY_SPLIT = 2.0, 1.4, 0.7  # time to copy a step's queries, and fused sums, from memory
_HIDDEN, _HIDDEN_SPLIT = 0.05, 0.1  # part of the lesser of two times, copies' and products', that adds to the other
_DRIFT = 0.07  # more time for each further head of more than 64 columns in the fused form, even if all is in the cache
SUMMED = 2.5e-4  # time to add up the parts of one row of keys
_UNEVEN = 0.8  # part of a block's time during which the last blocks run beside idle multiprocessors


class Order(NamedTuple):
    """How blocks of keys are dealt to multiprocessors.

    Attributes:
        together: Parts, of one or all examples, whose blocks alternate: their first keys come first, then their second
            ones. The blocks of the next as many parts follow.
        time: How long it takes, in steps of 64 queries.
    """

    together: int
    time: float


def order_of(problem: BackwardProblem, params: BackwardParams) -> Order:
    """Return the fastest order under the window alone.

    Under a causal mask most queries see the first keys. With these first, short blocks fill the gaps at the end. But
    the more parts alternate, the fewer blocks at a time share queries, and sums, in the cache. On one H100, causal
    gradients of 8,192 queries of 64 heads took 9,319 us if all heads alternate, and 5,018 us two by two.
    """
    steps = _steps_of(problem, params)
    count, alike = steps.shape[1], _alike_parts(problem, params)
    orders = [
        Order(together, _time(problem, params, steps, together))
        for together in (*(n for n in range(alike, 0, -1) if alike % n == 0), count)
    ]
    best = min(orders, key=lambda order: order.time)
    summed = SUMMED * count * problem.keys if params.head_parts > 1 else 0
    return best._replace(time=best.time + summed)


def full_time(problem: BackwardProblem, params: BackwardParams) -> float:
    """Return how long all blocks of keys take without a mask, in steps of 64 queries."""
    # Of ten gradients on one H200, it finds the fastest of 3 to 6 numbers of parts for nine, and one 1 % slower.
    count = key_blocks(problem, params) * params.head_parts
    if count > FEW_BLOCKS:
        longest = float(block_steps(problem, params.keys).max()) * max(part_heads(problem, params)) + _ENDS
        return math.ceil(count / MULTIPROCESSORS) * longest
    return _duration(_steps_of(problem, params), 1)


def window_time(problem: BackwardProblem, params: BackwardParams) -> float:
    """Return the time of the busiest multiprocessor in a window, in steps of 64 queries."""
    # It finds the fastest launch of each of eight calls on one H200; nearly two blocks per multiprocessor, the default
    # before, took up to 17 % longer.
    steps, heads = block_steps(problem, params.keys), part_heads(problem, params)
    rounds = math.ceil(key_blocks(problem, params) * params.head_parts / MULTIPROCESSORS)
    return rounds * (float(steps.max()) * max(heads) + _ENDS + 2)


def hidden_time(problem: BackwardProblem, params: BackwardParams) -> float:
    """Return a time for comparing `head_parts` if lengths or segments hide an unknown number of each block's steps."""
    # More parts do not change the steps that remain. They add ends of blocks, and fill the chip more evenly. For 40
    # gradients on one H200, its choice among 2 to 4 numbers of parts loses 0.5 % on average, and 6 % at worst.
    steps = float(block_steps(problem, params.keys).mean()) * problem.heads_per_group / params.head_parts + _ENDS
    return _ENDS * key_blocks(problem, params) * params.head_parts / MULTIPROCESSORS + _UNEVEN * steps


def _alike_parts(problem: BackwardProblem, params: BackwardParams) -> int:
    """Return how many consecutive parts have equally many heads: those of one example, or of all for uneven parts.

    If the heads of a group divide unevenly, the longer parts of all examples come first.
    """
    even = problem.heads_per_group % params.head_parts == 0
    return problem.groups * (params.head_parts if even else problem.batch)


def key_blocks(problem: BackwardProblem, params: BackwardParams) -> int:
    """Return the number of blocks of keys of all examples and key heads, without a list of them."""
    return problem.batch * problem.groups * -(-problem.keys // params.keys)


def _steps_of(problem: BackwardProblem, params: BackwardParams) -> np.ndarray:
    """Return the time of each block of keys of each part, `[key blocks, parts]`, in steps of 64 queries."""
    heads = np.repeat(part_heads(problem, params), problem.groups * problem.batch)
    steps: np.ndarray = block_steps(problem, params.keys)[:, None] * heads + _ENDS
    return steps


def _time(problem: BackwardProblem, params: BackwardParams, steps: np.ndarray, together: int) -> float:
    """Return how long all blocks take, in steps of 64 queries, if those of so many parts alternate."""
    blocks, fused = len(steps), params.form == "fused"
    heads, mean = problem.heads_per_group / params.head_parts, float(steps.sum()) / MULTIPROCESSORS
    # Blocks that run at the same time and share queries.
    sharing = min(max(MULTIPROCESSORS / together, 1), blocks)
    in_flight = MULTIPROCESSORS / sharing * heads * problem.queries * 4 * (problem.head_dim + problem.value_dim)
    # From 75 gradients of 1,024 to 32,768 queries with 1 to 8 parts in up to 7 orders: the one chosen is 0.3 % slower
    # than the best on average, and 4.4 % at worst. Blocks of unequal lengths drift apart: the more heads they walk
    # over, and the more of them run at a time, the further.
    missed = 0.45 + 0.5 / sharing + min(0.35, 0.2 * heads * sharing / blocks)
    missed *= min(max(in_flight - _CACHED, 0) / (2 * _CACHED), 1)
    drift = 1 + _DRIFT * (heads - 1) if fused and problem.head_dim > 64 else 1.0
    busiest = _duration(steps, together) * drift if steps.size <= FEW_BLOCKS else mean
    memory = _MEMORY_SPLIT if not fused else _MEMORY if problem.head_dim > 64 else _MEMORY_NARROW
    hidden = _HIDDEN if fused else _HIDDEN_SPLIT
    copies = memory * missed * mean
    return max(busiest, copies) + hidden * min(busiest, copies)


def _duration(steps: np.ndarray, together: int) -> float:
    """Return how long blocks of threads take that start in this order, each as soon as a multiprocessor is free."""
    busy = [0.0] * MULTIPROCESSORS
    turns = steps.reshape(steps.shape[0], -1, together).transpose(1, 0, 2)
    for one in turns.ravel().tolist():
        heapq.heapreplace(busy, busy[0] + one)
    return max(busy)


def block_steps(problem: BackwardProblem, keys: int) -> np.ndarray:
    """Return the steps of 64 queries of one head that see each block of keys."""
    rules = problem.rules
    key = np.arange(-(-problem.keys // keys)) * keys - problem.ahead
    first = np.zeros_like(key) if rules.right is None else key - rules.right
    last = np.full_like(key, problem.queries) if rules.left is None else key + keys + rules.left
    first, last = (np.clip(x, 0, problem.queries) for x in (first, last))
    steps: np.ndarray = np.maximum(last - first, 0) / 64
    return steps
