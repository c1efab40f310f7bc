# SPDX-License-Identifier: Apache-2.0
"""What is known of a search whatever becomes of the process or the thread that carries it out."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops.autotuner.bench.oracle import REFERENCE
from ejkernel.ops.autotuner.tasks.task import TuningTask
from ejkernel.ops.autotuner.trials.candidates import config_id
from ejkernel.ops.autotuner.trials.events import CandidateFinished, Event, SearchStarted, emit
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.formatting import compact

_GRACE = 5.0  # seconds beyond its budget, at least, in which a search confirms its winner
_GRACE_SHARE = 0.25  # of the budget, if that is more
_TURN = 10.0  # seconds beyond the budget, at least, in which the heuristic is measured if it was not before
_START = 30.0  # seconds in which a worker starts that has a budget, at least
_LEAST = 1.0  # seconds that a candidate may be silent, however little of the budget is left
_RUNS = ("compiling", "loading", "running", "measuring")  # what takes each candidate a small part of the time


class Journal:
    """What is known of a task, from attempt to attempt.

    With a budget, silence ends an attempt sooner than it would otherwise: when it lasts for half of what is left by
    then, so that there is time for the other candidates. The heuristic has its turn even where the budget is spent,
    alone and for as long again. Where the search ends whatever is under way, is a small grace after its budget, or
    after that turn; what was not confirmed by then does not win.

    Args:
        task: What to search for.
        clock: Source of seconds.
    """

    def __init__(self, task: TuningTask, clock: Callable[[], float] = time.monotonic) -> None:
        self._task = task
        self._clock = clock
        self._start = clock() - task.spent
        self._heard: float | None = None
        self._has_started = False
        self._first: Any = None
        self._known = {config_id(outcome.config): outcome for outcome in task.known}
        self._told: dict[Any, Outcome] = {}
        self._suspects = {config_id(config): config for config in task.suspects}
        self._unexplained = 0

    def task(self) -> TuningTask:
        """Return the task as it is left to do, at the beginning of an attempt."""
        self._heard = None
        return dataclasses.replace(
            self._task,
            known=tuple(self._known.values()),
            suspects=tuple(self._suspects.values()),
            spent=self._clock() - self._start,
        )

    def note(self, event: Event) -> None:
        """Keep what an attempt says, and pass on what is new."""
        if event.key != self._task.inv.key:  # of a search that a candidate has begun
            emit(event)
            return
        # An attempt tells again what those before it have told; listeners hear what is new, and nothing twice.
        self._heard = self._heard or self._clock()
        is_new = True
        if isinstance(event, SearchStarted):
            is_new, self._has_started, self._first = not self._has_started, True, event.first
        elif isinstance(event, CandidateFinished):
            token = config_id(event.outcome.config)
            is_new = self._told.get(token) != event.outcome
            self._told[token] = self._known[token] = event.outcome
        if is_new:
            emit(event)

    # --- time ---

    def silence(self, what: str, accused: Iterable[object], allowed: float, *, is_stuck: bool = False) -> float:
        """Return the seconds without a sign of life after which an attempt is ended.

        Args:
            what: What it is at.
            accused: The candidates that are under way.
            allowed: The seconds that it asked for.
            is_stuck: Whether somebody keeps the interpreter's lock.
        """
        if self._end is None:
            return allowed
        if self._heard is None:
            return min(allowed, max(_START, self._end - self._start))
        left = self._end - self._clock()
        others = [config for config in accused if config_id(config) != config_id(self._first)]
        # A compilation too. What takes long by its nature, such as the reference or the confirmation of a winner, has
        # all that is left, unless the worker's counter says that somebody keeps the interpreter's lock.
        if others and (is_stuck or what in _RUNS):
            return min(allowed, max(_LEAST, left / 2))
        return min(allowed, max(0.0, left) + self._grace)

    def left(self) -> float:
        """Return the seconds after which an attempt is ended whatever it does."""
        if self._end is None or self._heard is None:
            return math.inf
        # A worker that takes long to start has not used up the heuristic's turn.
        return max(self._end, self._heard) + self._grace - self._clock()

    @property
    def is_over(self) -> bool:
        """Whether there is no time for another attempt."""
        if self._end is None:
            return False
        return self.left() <= 0 or (self._has_answer and self._clock() > self._end)

    @property
    def _end(self) -> float | None:
        budget = self._task.policy.budget_s
        return None if budget is None else self._start + budget

    @property
    def _grace(self) -> float:
        budget = self._task.policy.budget_s or 0.0
        return max(_GRACE, _GRACE_SHARE * budget) if self._has_answer else max(_TURN, budget)

    @property
    def _has_answer(self) -> bool:
        """Whether the heuristic was measured, which then is the answer if nothing else is."""
        return self.was_measured(self._first)

    def conclude(self, why: str) -> AutotuneData:
        """Return what is known now that the time is over: the heuristic stays, for nothing else was confirmed.

        Args:
            why: What took the time.

        Raises:
            TuningError: the heuristic was not measured.
        """
        inv, budget = self._task.inv, self._task.policy.budget_s
        if not self._has_answer:
            raise TuningError(f"{inv.op_id}: nothing was measured within the budget of {budget:g} s: {why}")
        first = self._known[config_id(self._first)]
        others = [outcome for outcome in self._known.values() if outcome is not first]
        return AutotuneData(
            inv=inv,
            calls=self._task.calls if self._task.others else (),
            config=first.config,
            outcomes=(first, *map(_skipped, others)),
            seconds=self._clock() - self._start,
            checked=("outputs",) if self._task.policy.validate else (),
            why=f"the budget of {budget:g} s was spent before another could be confirmed: {why}",
        )

    # --- blame ---

    def suspect(self, configs: Iterable[object]) -> None:
        """Have each of these candidates be alone under way in the next attempt."""
        self._suspects |= {config_id(config): config for config in configs}

    def rule_out(self, config: object, reason: str) -> None:
        """Have a candidate be out, because it ended an attempt."""
        self._suspects.pop(config_id(config), None)
        self.note(CandidateFinished(self._task.inv.key, Outcome(config=config, status=Status.CRASHED, reason=reason)))

    def was_measured(self, config: object) -> bool:
        """Return whether a candidate has run, and was timed."""
        outcome = self._known.get(config_id(config))
        return outcome is not None and outcome.status == Status.MEASURED

    def attribute_crash(self, reason: str, what: str, accused: Iterable[object]) -> None:
        """Find out who was to blame for the end of an attempt.

        One that was alone under way is. Of several any may be: whoever was announced last need not be who keeps the
        others from going on, such as by holding the interpreter's lock. The next attempt has each of them alone.

        Args:
            reason: How it ended.
            what: What it was at; of a reference, candidates that were compiled meanwhile need not be to blame.
            accused: The candidates that were under way: those that were compiled, and the one that ran.

        Raises:
            TuningError: none was, twice.
        """
        accused = {config_id(config): config for config in accused}
        if len(accused) == 1 and not what.startswith(REFERENCE):
            (culprit,) = accused.values()
            self.rule_out(culprit, reason)
        elif accused:
            # A thread that was given up is under way until it ends, and beside a reference that runs nobody is alone.
            self.suspect(accused.values())
        else:
            self._unexplained += 1
            if self._unexplained > 1:
                raise TuningError(f"{self._task.inv.op_id}: the search ends without any candidate: {reason}")


def named(accused: Iterable[object]) -> str:
    """Return candidates in words, to follow what was done with them; nothing for none."""
    listed = [compact(config) for config in accused]
    return f": {', '.join(listed)}" if listed else ""


def _skipped(outcome: Outcome) -> Outcome:
    if outcome.status != Status.READY:
        return outcome
    return dataclasses.replace(outcome, status=Status.SKIPPED, reason="the budget was spent before its turn")
