# SPDX-License-Identifier: Apache-2.0
"""Shares of a time for all calls, `ejkernel tune --time`."""

from __future__ import annotations

import functools
import itertools
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.autotuner.trials.candidates import config_id, heuristic_of
from ejkernel.ops.autotuner.trials.result import AutotuningResult
from ejkernel.ops.autotuner.trials.status import SearchState
from ejkernel.ops.config.policy import policy_override
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.kernel import candidates_of, kernel_of
from ejkernel.ops.errors import EjkernelError
from ejkernel.ops.execution.offline import tune_together

_LEAST: Final = 5.0  # seconds of a search worth its start
_WEIGHT_ALONE: Final = 0.1  # share of the time of a call with one candidate, relative to one with several

Sets = Sequence[Sequence[SharedCall]]


def tune_in_time(
    seconds: float,
    chain: ConfigSelectorChain[Any, Any],
    todo: Sets,
    more: dict[str, Any],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[AutotuningResult, list[Sequence[SharedCall]]]:
    """Tune as many sets as fit into a time for all, at least one; each gets a share of the rest, by its weight.

    Searches that end without a decision then share the time left.

    Args:
        seconds: The time for all.
        chain: The chain that tunes and saves.
        todo: The sets of calls.
        more: Further arguments of `tune_together`.
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
            results[number] = tuned(number, left * own / sum(weights[number:]))
    undecided = [number for number, result in results.items() if not _is_decided(result)]
    for place, number in enumerate(undecided):
        share = (end - clock()) / (len(undecided) - place)
        if share >= max(_LEAST, _least_again(results[number])):
            again = tuned(number, share, resume=True)
            results[number] = again if again.searches else results[number]
    # Not `result or ...`: a result with unfinished searches has no configurations, and is false.
    found = functools.reduce(operator.or_, results.values())
    return found, [calls for number, calls in enumerate(todo) if number not in results]


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
