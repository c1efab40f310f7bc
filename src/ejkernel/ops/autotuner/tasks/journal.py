# SPDX-License-Identifier: Apache-2.0
"""The journal of a search: its results so far, which survive the worker or thread that found them."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ejkernel.ops.autotuner.bench.oracle import REFERENCE
from ejkernel.ops.autotuner.process.watch import Cancellation
from ejkernel.ops.autotuner.tasks.task import TuningTask
from ejkernel.ops.autotuner.trials.candidates import config_id
from ejkernel.ops.autotuner.trials.events import CandidateFinished, Event, SearchStarted, emit
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.formatting import compact, rounded

_GRACE = 5.0  # least seconds after the budget for confirming the winner
_GRACE_SHARE = 0.25  # of the budget, if that is more
_TURN = 10.0  # least seconds after the budget for measuring the heuristic, if it was not measured before
_START = 60.0  # least seconds for the start of a worker, if the search has a budget
_MOST_LOAD = 4.0  # largest factor of the limits on a busy machine
_STOPPING = 4.0  # seconds after Ctrl-C for confirming the winner
_LEAST = 2.0  # least seconds that a candidate may be silent, even with little budget left
_MOST_LOST = 20  # lost machines before a search fails; preemptible machines are lost often
_RUNS = ("compiling", "loading", "running", "measuring")  # steps that are short for each candidate


class Journal:
    """The results of a task, carried from attempt to attempt.

    A budget shortens the permitted silence: an attempt ends after a silence of half the time left, so that the other
    candidates still get time. The heuristic is measured even if the budget is spent, alone and for up to the same
    time again. A short grace period after the budget, or after that measurement, ends the search in any case;
    unconfirmed candidates do not win. After Ctrl-C the search ends within a few seconds. On a busy machine, a healthy
    worker makes little progress, so the least limits and the grace period are multiplied by the load.

    Args:
        task: The task.
        clock: Source of seconds.
        cancellation: Requested by Ctrl-C.
        is_remote: Whether the attempts run on other machines, which can be lost for many reasons.
        load: Returns the number of processes that compete for a core; see `load_per_core`.
    """

    def __init__(
        self,
        task: TuningTask,
        clock: Callable[[], float] = time.monotonic,
        *,
        cancellation: Cancellation | None = None,
        is_remote: bool = False,
        load: Callable[[], float] | None = None,
    ) -> None:
        self._task = task
        self._is_remote = is_remote
        self._load_per_core = load or load_per_core
        self._clock = clock
        self._cancellation = cancellation or Cancellation()
        self._stopping_since: float | None = None
        self._is_short_of_time = False  # whether the budget grants less than the attempt requested
        self._start = clock() - task.spent
        self._heard: float | None = None
        self._first: Any = None
        self._planned = 0
        self._known = {config_id(outcome.config): outcome for outcome in task.known}
        self._suspects = {config_id(config): config for config in task.suspects}
        self._lost_alone: collections.Counter[object] = collections.Counter()
        self._lost = 0  # attempts without a candidate; all, if remote

    def task(self) -> TuningTask:
        """Return the rest of the task for a new attempt."""
        self._heard = None
        return dataclasses.replace(
            self._task,
            known=tuple(self._known.values()),
            suspects=tuple(self._suspects.values()),
            spent=self._clock() - self._start,
        )

    def note(self, event: Event) -> None:
        """Record an event of an attempt; pass it to the listeners if it is new."""
        if event.key != self._task.inv.key:  # from a search started by a candidate
            emit(event)
            return
        # Each attempt repeats events of earlier attempts; listeners get each event once.
        self._heard = self._heard or self._clock()
        is_new = True
        if isinstance(event, SearchStarted):
            is_new, self._first = not self._planned, event.first
            self._planned = max(self._planned, event.candidates)
        elif isinstance(event, CandidateFinished):
            token = config_id(event.outcome.config)
            is_new = self._known.get(token) != event.outcome
            self._known[token] = event.outcome
        if is_new:
            emit(event)

    # --- time ---

    def silence(self, what: str, accused: Iterable[object], allowed: float, *, is_stuck: bool = False) -> float:
        """Return the seconds of silence after which an attempt is ended.

        Args:
            what: The current step.
            accused: The candidates running or compiling now.
            allowed: The seconds that the attempt requested.
            is_stuck: Whether a thread holds the interpreter's lock.
        """
        granted = self._granted(what, accused, allowed, is_stuck)
        self._is_short_of_time = granted < allowed
        return granted

    def _granted(self, what: str, accused: Iterable[object], allowed: float, is_stuck: bool) -> float:
        if self._end is None:
            return allowed
        if self._heard is None:
            return min(allowed, max(_START * self._load, self._end - self._start))
        left = self._end - self._clock()
        others = [config for config in accused if config_id(config) != config_id(self._first)]
        # This includes compilations. Long steps, e.g. the reference or the confirmation run, get all the time left,
        # unless the worker's counter shows that a thread holds the interpreter's lock.
        if others and (is_stuck or what in _RUNS):
            return min(allowed, max(_LEAST * self._load, left / 2))
        return min(allowed, max(0.0, left) + self._grace)

    def left(self) -> float:
        """Return the seconds until the attempt is ended in any case."""
        left = self._left_after_ctrl_c()
        if self._end is None or self._heard is None:
            return left
        # A slow start of the worker does not shorten the heuristic's measurement.
        return min(left, max(self._end, self._heard) + self._grace - self._clock())

    def _left_after_ctrl_c(self) -> float:
        if not self._cancellation.is_requested:
            return math.inf
        now = self._clock()
        self._stopping_since = now if self._stopping_since is None else self._stopping_since
        return self._stopping_since + _STOPPING - now

    @property
    def is_over(self) -> bool:
        """Whether the time left is too short for another attempt."""
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
        return self._load * (max(_GRACE, _GRACE_SHARE * budget) if self._has_answer else max(_TURN, budget))

    @property
    def _load(self) -> float:
        """The factor of limits that exist only to save time."""
        return 1.0 if self._is_remote else min(max(self._load_per_core(), 1.0), _MOST_LOAD)

    @property
    def _has_answer(self) -> bool:
        """Whether the heuristic was measured, so that the search has at least this result."""
        return self.was_measured(self._first)

    def conclude(self, why: str) -> AutotuneData:
        """Return the result at the end of the time: the heuristic stays, since no other candidate was confirmed.

        Args:
            why: The step that ran out of time.

        Raises:
            KeyboardInterrupt: The user pressed Ctrl-C before the heuristic was measured.
            TuningError: The heuristic was not measured within the budget.
        """
        inv, is_stopped = self._task.inv, self._cancellation.is_requested
        budget = rounded(self._task.policy.budget_s or 0.0)
        spent = "the search was stopped" if is_stopped else f"the budget of {budget} s was spent"
        if not self._has_answer:
            if is_stopped:
                raise KeyboardInterrupt
            raise TuningError(f"{inv.op_id}: nothing was measured within the budget of {budget} s: {why}")
        first = self._known[config_id(self._first)]
        others = [outcome for outcome in self._known.values() if outcome is not first]
        return AutotuneData(
            inv=inv,
            calls=self._task.calls if self._task.others else (),
            config=first.config,
            outcomes=(first, *(_skipped(outcome, f"{spent} before its turn") for outcome in others)),
            seconds=self._clock() - self._start,
            checked=("outputs",) if self._task.policy.validate else (),
            why=f"{spent} before another candidate could be confirmed ({why})",
            interrupted=is_stopped,
            planned=self._planned,
            unconfirmed=any(self.was_measured(outcome.config) for outcome in others),
        )

    # --- failure attribution ---

    def suspect(self, configs: Iterable[object]) -> None:
        """Run each of these candidates alone in the next attempt."""
        self._suspects |= {config_id(config): config for config in configs}

    def rule_out(self, config: object, reason: str, status: Status = Status.CRASHED) -> None:
        """Exclude a candidate from the rest of the search because it ended an attempt."""
        self._suspects.pop(config_id(config), None)
        self.note(CandidateFinished(self._task.inv.key, Outcome(config=config, status=status, reason=reason)))

    def was_measured(self, config: object) -> bool:
        """Return whether a candidate has been measured."""
        outcome = self._known.get(config_id(config))
        return outcome is not None and outcome.status == Status.MEASURED

    def attribute_crash(self, reason: str, what: str, accused: Iterable[object], *, is_silence: bool = False) -> None:
        """Attribute the end of an attempt to a candidate.

        A candidate that was alone is the cause; the heuristic only on the second time. On other machines, an attempt
        mostly ends for another reason, so only the second time counts, or the third for a measured candidate. With
        several candidates, any of them may be the cause: e.g. an earlier candidate may hold the interpreter's lock and
        stop the others. The next attempt runs each of them alone.

        Args:
            reason: How the attempt ended.
            what: The step at that time. During the reference, candidates that compile beside it are not accused.
            accused: The candidates at that time: those being compiled, and the running candidate.
            is_silence: Whether the attempt was ended after a silence. If the budget granted the candidate less time
                than requested, its status is `skipped`, not `crashed`.

        Raises:
            TuningError: Two attempts ended without any candidate, or twenty attempts on other machines.
        """
        accused = {config_id(config): config for config in accused}
        self._check_number_of_losses(reason, accused)
        culprit = next(iter(accused.values())) if len(accused) == 1 and not what.startswith(REFERENCE) else None
        if culprit is None:
            # Abandoned threads still run until they end, and a running reference competes with every candidate.
            self.suspect(accused.values())
            return
        self._lost_alone[config_id(culprit)] += 1
        count = self._lost_alone[config_id(culprit)]
        if count < self._least_losses(culprit):
            self.suspect([culprit])
        elif self._is_remote:
            self.rule_out(culprit, f"{count} workers were lost while it ran alone; the last loss: {reason}")
        elif is_silence and self._is_short_of_time:
            self.rule_out(culprit, f"the budget left it too little time: {reason}", Status.SKIPPED)
        else:
            self.rule_out(culprit, reason)

    def _check_number_of_losses(self, reason: str, accused: Mapping[object, object]) -> None:
        self._lost += self._is_remote or not accused
        op_id = self._task.inv.op_id
        if self._is_remote and self._lost >= _MOST_LOST:
            lost = f"a worker was lost: {reason}{named(accused.values())}"
            raise TuningError(f"{op_id}: gave up after the loss of {self._lost} workers: {lost}")
        if not self._is_remote and self._lost > 1:
            raise TuningError(f"{op_id}: the search was lost twice while no candidate ran: {reason}")

    def _least_losses(self, config: object) -> int:
        """Return the number of attempts that must end with only this candidate before it is ruled out."""
        if self._is_remote:
            return 3 if self.was_measured(config) else 2
        # Workers may die for unrelated reasons, and no winner can be confirmed without the heuristic.
        is_first = config_id(config) == config_id(self._first)
        return 2 if is_first and config_id(config) not in self._suspects else 1


def load_per_core() -> float:
    """Return the load average of the last minute per core; 1 where the system has none."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return 1.0


def named(accused: Iterable[object]) -> str:
    """Return the candidates as text to append to a message; empty without candidates."""
    listed = [compact(config) for config in accused]
    return f": {', '.join(listed)}" if listed else ""


def _skipped(outcome: Outcome, reason: str) -> Outcome:
    if outcome.status != Status.READY:
        return outcome
    return dataclasses.replace(outcome, status=Status.SKIPPED, reason=reason)
