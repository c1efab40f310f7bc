# SPDX-License-Identifier: Apache-2.0
"""What is known of a search whatever becomes of the process or the thread that carries it out."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops.autotuner.bench.oracle import REFERENCE
from ejkernel.ops.autotuner.process.cancellation import Cancellation
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
_STOPPING = 4.0  # seconds after Ctrl-C in which a search confirms its winner
_LEAST = 1.0  # seconds that a candidate may be silent, however little of the budget is left
_RUNS = ("compiling", "loading", "running", "measuring")  # what takes each candidate a small part of the time


class Journal:
    """What is known of a task, from attempt to attempt.

    With a budget, silence ends an attempt sooner than it would otherwise: when it lasts for half of what is left by
    then, so that there is time for the other candidates. The heuristic has its turn even where the budget is spent,
    alone and for as long again. Where the search ends whatever is under way, is a small grace after its budget, or
    after that turn; what was not confirmed by then does not win. After Ctrl-C it ends within a few seconds, whatever
    the budget is.

    Args:
        task: What to search for.
        clock: Source of seconds.
        cancellation: Requested by Ctrl-C.
    """

    def __init__(
        self,
        task: TuningTask,
        clock: Callable[[], float] = time.monotonic,
        *,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._task = task
        self._clock = clock
        self._cancellation = cancellation or Cancellation()
        self._stopping_since: float | None = None
        self._is_short_of_time = False  # whether the budget allows less than the attempt has asked for
        self._start = clock() - task.spent
        self._heard: float | None = None
        self._has_started = False
        self._first: Any = None
        self._planned = 0
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
            self._planned = max(self._planned, event.candidates)
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
        granted = self._granted(what, accused, allowed, is_stuck)
        self._is_short_of_time = granted < allowed
        return granted

    def _granted(self, what: str, accused: Iterable[object], allowed: float, is_stuck: bool) -> float:
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
        left = self._left_after_ctrl_c()
        if self._end is None or self._heard is None:
            return left
        # A worker that takes long to start has not used up the heuristic's turn.
        return min(left, max(self._end, self._heard) + self._grace - self._clock())

    def _left_after_ctrl_c(self) -> float:
        if not self._cancellation.is_requested:
            return math.inf
        now = self._clock()
        self._stopping_since = now if self._stopping_since is None else self._stopping_since
        return self._stopping_since + _STOPPING - now

    @property
    def is_over(self) -> bool:
        """Whether there is no time for another attempt."""
        if self._cancellation.is_requested:
            return True
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
            KeyboardInterrupt: Ctrl-C came before the heuristic was measured.
            TuningError: the heuristic was not measured within the budget.
        """
        inv, is_stopped = self._task.inv, self._cancellation.is_requested
        spent = "the search was stopped" if is_stopped else f"the budget of {self._task.policy.budget_s:g} s was spent"
        if not self._has_answer:
            if is_stopped:
                raise KeyboardInterrupt
            budget = self._task.policy.budget_s
            raise TuningError(f"{inv.op_id}: nothing was measured within the budget of {budget:g} s: {why}")
        first = self._known[config_id(self._first)]
        others = [outcome for outcome in self._known.values() if outcome is not first]
        return AutotuneData(
            inv=inv,
            calls=self._task.calls if self._task.others else (),
            config=first.config,
            outcomes=(first, *(_skipped(outcome, f"{spent} before its turn") for outcome in others)),
            seconds=self._clock() - self._start,
            checked=("outputs",) if self._task.policy.validate else (),
            why=f"{spent} before another could be confirmed: {why}",
            interrupted=is_stopped,
            planned=self._planned,
            unconfirmed=any(self.was_measured(outcome.config) for outcome in others),
        )

    # --- blame ---

    def suspect(self, configs: Iterable[object]) -> None:
        """Have each of these candidates be alone under way in the next attempt."""
        self._suspects |= {config_id(config): config for config in configs}

    def rule_out(self, config: object, reason: str, status: Status = Status.CRASHED) -> None:
        """Have a candidate be out for the rest of the search, because it ended an attempt."""
        self._suspects.pop(config_id(config), None)
        self.note(CandidateFinished(self._task.inv.key, Outcome(config=config, status=status, reason=reason)))

    def was_measured(self, config: object) -> bool:
        """Return whether a candidate has run, and was timed."""
        outcome = self._known.get(config_id(config))
        return outcome is not None and outcome.status == Status.MEASURED

    def attribute_crash(self, reason: str, what: str, accused: Iterable[object], *, is_silence: bool = False) -> None:
        """Find out who was to blame for the end of an attempt.

        One that was alone under way is; the heuristic only if that happens twice. Of several any may be: the one that
        was announced last need not be the one that keeps the others from going on, such as by holding the interpreter's
        lock. The next attempt has each of them alone.

        Args:
            reason: How it ended.
            what: What it was at; of a reference, candidates that were compiled meanwhile need not be to blame.
            accused: The candidates that were under way: those that were compiled, and the one that ran.
            is_silence: Whether it was ended for its silence. A candidate that had less time than it asked for, because
                the budget is small, is skipped and no failure.

        Raises:
            TuningError: none was, twice.
        """
        accused = {config_id(config): config for config in accused}
        if len(accused) == 1 and not what.startswith(REFERENCE):
            (culprit,) = accused.values()
            is_first = config_id(culprit) == config_id(self._first)
            if is_first and config_id(culprit) not in self._suspects:
                # Without the heuristic no winner can be confirmed, and a worker may end for reasons of its own.
                self.suspect([culprit])
            elif is_silence and self._is_short_of_time:
                self.rule_out(culprit, f"the budget left it too little time: {reason}", Status.SKIPPED)
            else:
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


def _skipped(outcome: Outcome, reason: str) -> Outcome:
    if outcome.status != Status.READY:
        return outcome
    return dataclasses.replace(outcome, status=Status.SKIPPED, reason=reason)
