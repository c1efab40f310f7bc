# SPDX-License-Identifier: Apache-2.0
"""The candidates of one run: recalled from earlier attempts, compiled, checked and timed, within a budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from ejkernel.ops.autotuner.bench.preparation import Preparation
from ejkernel.ops.autotuner.bench.timing import Timing
from ejkernel.ops.autotuner.measure.sampling import Sampling, SamplingPlan
from ejkernel.ops.autotuner.process.watch import Cancellation, Watch
from ejkernel.ops.autotuner.tasks.task import Configurations, TuningTask
from ejkernel.ops.autotuner.trials.candidates import Candidate, config_id
from ejkernel.ops.autotuner.trials.events import CandidateFinished, Event, SearchStarted
from ejkernel.ops.autotuner.trials.status import REJECTED, Status
from ejkernel.ops.errors import CandidateError

FINALISTS = 7  # candidates measured again beside the heuristic
_PREPARING = 2 / 3  # share of the budget for compiling; then the compiled candidates are measured


class Budget:
    """The time of a run, and requests to end it.

    Args:
        task: The task, with its budget and the seconds spent by earlier attempts.
        watch: Tells whether the run was abandoned.
        cancellation: Requests the end of the run.
        clock: Source of seconds.

    Attributes:
        needs_heuristic: Returns whether the heuristic must still be compiled; set by the `Pool`.
    """

    def __init__(self, task: TuningTask, watch: Watch, cancellation: Cancellation, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = task.policy.budget_s, clock
        self._start = clock() - task.spent
        self._cancellation = cancellation
        self.is_abandoned = watch.is_abandoned
        self.needs_heuristic: Callable[[], bool] = lambda: True

    def spent(self) -> float:
        """Return the seconds since the first attempt began."""
        return self._clock() - self._start

    def left(self) -> float:
        """Return the seconds left."""
        return math.inf if self._seconds is None else self._start + self._seconds - self._clock()

    def left_to_compile(self) -> float:
        """Return the seconds left for compiling; infinite before the heuristic, which gets the time that it needs."""
        return math.inf if self.needs_heuristic() else self.left()

    @property
    def is_stopped(self) -> bool:
        """Whether the user requested the end."""
        return self._cancellation.is_requested

    @property
    def is_over(self) -> bool:
        """Whether to end with the best result so far."""
        return self.is_stopped or self.left() < 0

    @property
    def why_over(self) -> str:
        """Why the run ends, as the start of a sentence about the unfinished rest."""
        if self.is_stopped:
            return "the search was stopped"
        return "the budget was spent" if self.left() < 0 else "the search ended"

    @property
    def is_for_measuring(self) -> bool:
        """Whether the rest of the budget should go to measuring, not to compiling."""
        return self._seconds is not None and self.left() < (1 - _PREPARING) * self._seconds

    def lasts(self, seconds: float) -> Callable[[], bool]:
        """Return a function that is true until `seconds` have passed since its first call."""
        start: list[float] = []

        def not_yet() -> bool:
            now = self._clock()
            start[:] = start or [now]
            return now - start[0] < seconds

        return not_yet


class Pool:
    """The candidates of a run.

    Args:
        task: The task.
        configurations: Tells which configurations all calls can share.
        preparation: Compiles and checks candidates.
        timing: Times them, with the inputs and reference results.
        budget: The time left.
        tell: Called with every event.

    Attributes:
        tried: The candidates so far; the first is the heuristic.
        ranking: The candidates with samples of the last `measure`, the best first.
        timing: Times candidates without ranking them.
    """

    def __init__(
        self,
        task: TuningTask,
        configurations: Configurations,
        preparation: Preparation,
        timing: Timing,
        budget: Budget,
        tell: Callable[[Event], None],
    ) -> None:
        self.tried: list[Candidate] = []
        self.ranking: list[Candidate] = []
        self._key = task.inv.key
        self.timing = timing
        self._configurations, self._preparation = configurations, preparation
        self._budget, self._tell = budget, tell
        budget.needs_heuristic = lambda: not self._has_tried_the_heuristic
        self._known = {config_id(outcome.config): outcome for outcome in task.known}
        # A skipped candidate ended an attempt because the budget left it too little time.
        out = REJECTED | {Status.SKIPPED}
        self._rejected = {config_id(outcome.config): outcome for outcome in task.rejected}
        self._rejected |= {token: outcome for token, outcome in self._known.items() if outcome.status in out}
        self._suspects = {config_id(config) for config in task.suspects}
        self._first_seconds: float | None = None

    @property
    def heuristic(self) -> Candidate:
        """The candidate that all others are compared with."""
        return self.tried[0]

    @property
    def others_are_measured(self) -> bool:
        """Whether a candidate beside the heuristic has times."""
        return any(candidate.measurement is not None for candidate in self.tried[1:])

    def begin(self, total: int, first: Candidate) -> None:
        """Report the start of the search, with the number of its candidates and the first of them."""
        self._tell(SearchStarted(self._key, total, first.config))

    def report(self, candidate: Candidate) -> None:
        """Report the outcome of a candidate so far."""
        self._tell(CandidateFinished(self._key, candidate.outcome()))

    def must_end(self) -> bool:
        """Return whether to end with the best result so far; the heuristic is always measured."""
        if self._budget.is_abandoned():
            return True
        return self._has_tried_the_heuristic and self._budget.is_over

    def must_measure(self) -> bool:
        """Return whether to stop compiling and start measuring, before a small budget is spent on compiling."""
        is_time = self._has_tried_the_heuristic and self._budget.is_for_measuring
        return self.must_end() or (is_time and any(each.status == Status.READY for each in self.tried[1:]))

    @property
    def _has_tried_the_heuristic(self) -> bool:
        return bool(self.tried) and self.heuristic.status != Status.SKIPPED

    def recall(self, candidate: Candidate) -> bool:
        """Copy the outcome of an earlier attempt or search, if one exists; return whether it did."""
        known = self._known.get(config_id(candidate.config))
        # Each attempt measures the heuristic again: it takes part in every timing, and owns its program.
        if candidate is self.heuristic or known is None or known.measurement is None or known.status != Status.MEASURED:
            return False
        candidate.take_over(known)
        candidate.is_recalled = True
        self._preparation.note_spills(candidate.spilled)
        return True

    def prepare(self, candidates: Sequence[Candidate], stop: Callable[[], bool] | None = None) -> None:
        """Compile and check candidates until `stop`; candidates rejected by an earlier attempt stay rejected."""
        stop = stop or self.must_end
        todo = [candidate for candidate in candidates if not self._is_rejected(candidate)]
        if self._suspects:
            self.timing.oracle.compute_references()  # before the suspects, so that each of them runs alone
        groups = self._to_compile_together(todo)
        for group in itertools.takewhile(lambda _: not stop(), groups):
            self._preparation.prepare(group, stop=stop)
        if len(groups) > 1:
            self._preparation.settle(todo)  # a candidate prepared late may be the first of its program
        for candidate in todo:
            got, want = candidate.result_types, self.heuristic.result_types
            # Programs are traced with the heuristic. The reference may differ from both, as only its values count.
            if candidate.status == Status.READY and want and got != want:
                candidate.fail(Status.WRONG, CandidateError(f"returns {got}, the heuristic {want}"))
                self.report(candidate)

    def _is_rejected(self, candidate: Candidate) -> bool:
        rejected = self._rejected.get(config_id(candidate.config))
        if rejected is not None:
            candidate.take_over(rejected)
        elif refused := self._configurations.why_refused(candidate.config):
            candidate.fail(Status.FAILED, CandidateError(refused))
        else:
            return False
        self.report(candidate)
        return True

    def _to_compile_together(self, candidates: Sequence[Candidate]) -> list[list[Candidate]]:
        """Return groups of candidates: all others together, then each suspect alone.

        The heuristic forms the first group if it is a suspect. The same holds if the time is over, so that no other
        candidate starts.
        """
        first = self.heuristic
        alone = [candidate for candidate in candidates if config_id(candidate.config) in self._suspects]
        before = [first] if first in candidates and (first in alone or self._budget.left() < 0) else []
        together = [candidate for candidate in candidates if candidate not in (*alone, *before)]
        return [group for group in (before, together, *([c] for c in alone if c is not first)) if group]

    def prepare_again(self, candidates: Sequence[Candidate]) -> None:
        """Compile measured candidates without programs; only the best of them if the time is over."""
        missing = [candidate for candidate in candidates if not candidate.compiled and candidate.measurement]
        if self.must_end():
            self.prepare(missing[:1], stop=self._budget.is_abandoned)
        else:
            self.prepare(missing)

    def measure(self, candidates: Iterable[Candidate], plan: SamplingPlan) -> None:
        """Time the compiled candidates in interleaved rounds, and rank them."""
        compiled = [candidate for candidate in candidates if candidate.compiled]
        sampling = Sampling(len(compiled), plan=plan)
        if compiled:
            self.ranking = self.timing.measure(compiled, sampling, heuristic=self.heuristic, stop=self.must_end)
        else:
            self.ranking = []
        for candidate in compiled:
            self.report(candidate)

    def measure_finalists(self, plan: SamplingPlan) -> None:
        """Measure the best candidates again beside the heuristic, since their times come from different rounds."""
        best = self._finalists()
        self.prepare_again(best)
        if self.must_end():  # no time for further rounds: the samples so far decide
            self.ranking = [candidate for candidate in self.fastest_first(best) if candidate.compiled]
        else:
            self.measure(best, plan)

    def rank_the_best(self) -> None:
        """Rank the heuristic and the best other candidate by earlier times, without new rounds; compile the latter."""
        best = self.fastest_first(self.tried[1:])[:1]
        self.prepare_again(best)
        compiled = (candidate for candidate in (self.heuristic, *best) if candidate.compiled)
        self.ranking = self.fastest_first(list(compiled))

    def release_losers(self) -> None:
        """Release the programs of all candidates except the finalists: they occupy device memory."""
        kept = {id(candidate) for candidate in self._finalists()}
        for candidate in self.tried:
            if id(candidate) not in kept:
                candidate.compiled = ()

    def _finalists(self) -> list[Candidate]:
        return [self.heuristic, *self.fastest_first(self.tried[1:])[:FINALISTS]]

    def fastest_first(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the measured candidates, the fastest first; see `pace`."""
        return sorted((c for c in candidates if c.measurement is not None), key=self.pace)

    def pace(self, candidate: Candidate) -> float:
        """Return the time of a candidate (of its twin, if it has one) to compare with others; infinite without one.

        It is the ratio to the heuristic in the same rounds. Seconds of different rounds do not compare: other processes
        slow some rounds down, and a disturbed clock is replaced by processor time.
        """
        measured = candidate if candidate.twin is None else candidate.twin
        found, heuristic = measured.measurement, self.heuristic.measurement
        if found is None or heuristic is None:  # without the heuristic's times, seconds are all there is
            return math.inf if found is None else found.median
        if found.relative is not None:
            return found.relative
        return found.median / heuristic.median if found.method == heuristic.method else math.inf

    def comparable_seconds(self, candidate: Candidate) -> float | None:
        """Return a candidate's seconds at the pace of the heuristic's first rounds; `None` without a time."""
        if self._first_seconds is None:
            self._first_seconds = self.heuristic.seconds
        seconds = self.pace(candidate) * (self._first_seconds or 1.0)  # without the heuristic's time, paces are seconds
        return seconds if math.isfinite(seconds) else None

    def settle_statuses(self) -> None:
        """Mark candidates never measured as skipped, with the reason."""
        for candidate in self.tried:
            if candidate.status == Status.READY and candidate.measurement is None:  # compiled, but the time was over
                candidate.status = Status.SKIPPED
            is_given_up = config_id(candidate.config) in self._rejected
            if candidate.status == Status.SKIPPED and self._budget.is_stopped and not is_given_up:
                candidate.reason = "the search was stopped before its turn"
