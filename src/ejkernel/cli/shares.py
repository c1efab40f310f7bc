# SPDX-License-Identifier: Apache-2.0
"""Shares of a time for all calls, `ejkernel tune --time`: the calls that take the most time come first."""

from __future__ import annotations

import functools
import itertools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ejkernel.cli.peaks import cost_of
from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.autotuner.trials.candidates import config_id, heuristic_of
from ejkernel.ops.autotuner.trials.result import AutotuningResult
from ejkernel.ops.autotuner.trials.status import SearchState
from ejkernel.ops.config.policy import policy_override
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.kernel import candidates_of, kernel_of
from ejkernel.ops.core.types import ConfigKey, Cost
from ejkernel.ops.errors import EjkernelError
from ejkernel.ops.execution.offline import tune_together

_LEAST: Final = 5.0  # seconds of a search worth its start
_ENOUGH: Final = 30.0  # seconds for more than the heuristic: compiling the other candidates, and measuring some
_WEIGHT_ALONE: Final = 0.1  # share of the time of a call with one candidate, relative to one with several
_PER_BYTE: Final = 200.0  # operations that take as long as a byte: 150 to 570 on known GPUs and TPUs
_PER_BYTE_ON_CPU: Final = 10.0

Sets = Sequence[Sequence[SharedCall]]


def tune_in_time(
    seconds: float,
    chain: ConfigSelectorChain[Any, Any],
    todo: Sets,
    more: dict[str, Any],
    spare: Callable[[], float] = lambda: 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[AutotuningResult, list[Sequence[SharedCall]]]:
    """Tune as many sets as fit into a time for all, at least one; see `share_of`.

    Searches that end without a decision, or did not start, then share the time left.

    Args:
        seconds: The time for all.
        chain: The chain that tunes and saves.
        todo: The sets of calls, in order.
        more: Further arguments of `tune_together`.
        spare: Returns the seconds beyond this time that nothing else needs now.
        clock: Source of seconds.

    Returns:
        The results, and the sets without a search.
    """
    end = clock() + seconds

    def tuned(number: int, budget: float, **options: Any) -> AutotuningResult:
        with policy_override(budget_s=max(budget, _LEAST)):
            return tune_together(chain, [todo[number]], **more | options)

    weights = list(map(weight, todo))
    results: dict[int, AutotuningResult] = {}
    for number, own in enumerate(weights):
        left = end - clock()
        if not results or left >= _LEAST * own:  # a lone candidate takes little time
            results[number] = tuned(number, share_of(left, own, sum(weights[number:])))
    undecided = [number for number in range(len(todo)) if number not in results or not _is_decided(results[number])]
    for place, number in enumerate(undecided):
        share = share_of(end - clock() + spare(), 1, len(undecided) - place)
        known = results.get(number)
        if share >= max(_LEAST, 0 if known is None else _least_again(known)):
            again = tuned(number, share, **{} if known is None else {"resume": True})
            results[number] = again if again.searches or known is None else known
    # Not `result or ...`: a result with unfinished searches has no configurations, and is false.
    found = functools.reduce(operator.or_, results.values())
    return found, [calls for number, calls in enumerate(todo) if number not in results]


def share_of(left: float, own: float, whole: float) -> float:
    """Return the seconds of a set: its share of the time left by weight, but enough for more than the heuristic."""
    return min(left, max(left * own / whole, _ENOUGH * own))


def most_first(todo: Sets, times: Mapping[ConfigKey, int]) -> list[Sequence[SharedCall]]:
    """Return the sets in the order of their searches: those that take the most time of a run first."""
    return sorted(todo, key=lambda calls: (weight(calls), _work(calls, times)), reverse=True)  # stable


def _work(calls: Sequence[SharedCall], times: Mapping[ConfigKey, int]) -> float:
    """Return the work of a set of calls in a run of the program, in operations."""
    is_cpu = calls[0].inv.device_fingerprint.startswith("cpu:")
    per_byte = _PER_BYTE_ON_CPU if is_cpu else _PER_BYTE
    # If a kernel does not define the cost, the least is to read the inputs.
    costs = [cost_of(call.inv) or Cost(flops=0, bytes=call.inv.input_bytes) for call in calls]
    numbers = [times.get(call.inv.key, 1) for call in calls]
    return sum(max(cost.flops, cost.bytes * per_byte) * n for cost, n in zip(costs, numbers, strict=True))


def _is_decided(result: AutotuningResult) -> bool:
    """Return whether more time would change nothing; a failed search has no result here."""
    return all(search.progress.state == SearchState.COMPLETE for search in result.searches)


def _least_again(result: AutotuningResult) -> float:
    """Return the least seconds for another search: an undecided one starts again, others go on."""
    found = [search.seconds for search in result.searches if search.progress.state == SearchState.UNDECIDED]
    return max(found, default=0.0)


def weight(calls: Sequence[SharedCall]) -> float:
    """Return the weight of a set of calls in a time for all: less if nothing can be compared with the heuristic."""
    inv, kernel = calls[0].inv.representative, kernel_of(calls[0].inv)
    try:
        some = {*map(config_id, [*heuristic_of(inv, kernel), *itertools.islice(candidates_of(kernel, inv), 2)])}
    except EjkernelError:  # the search raises it, too
        return 1.0
    return 1.0 if len(some) > 1 else _WEIGHT_ALONE
