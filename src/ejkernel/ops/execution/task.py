# SPDX-License-Identifier: Apache-2.0
"""One tuning task: which candidates are prepared, raced and confirmed, and who wins."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.space import ConfigSpace
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, candidates_of, check_config, hook
from ejkernel.ops.errors import CandidateError, NoConfigError, TuningError
from ejkernel.ops.execution.bench import Bench, Candidate, Limits, Loader, Unwatched, Watch, config_id
from ejkernel.ops.execution.confirming import confirm
from ejkernel.ops.execution.events import CandidateFinished, SearchStarted, emit
from ejkernel.ops.execution.measuring import Measurement
from ejkernel.ops.execution.outcome import CRASHED, FAILED, MEASURED, READY, SAME, SKIPPED, WRONG, AutotuneData, Outcome
from ejkernel.ops.execution.searching import Record, default_strategy

Progress = Callable[[int, int], None]

_REJECTED = (FAILED, WRONG, SAME, CRASHED)
LISTED = 24  # configurations up to which a space is measured whole
_SCREENING = 3  # rounds of a candidate that a search asked for
_BATCH = 8  # candidates that a search asks for at once, so that they compile side by side and run in turns
_FINALISTS = 7  # the best of a search that are measured again, beside the heuristic
_MOST = 0.75  # share of the rounds that a winner is faster in
_MARGIN = 0.98  # a winner takes at most this share of the heuristic's time; nearer than that is a tie


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningTask:
    """What to search for, and how; fit to be sent to a worker process.

    Attributes:
        inv: The call, abstract, with its kernel.
        candidates: What to measure beside the heuristic; the kernel's own if `None`.
        policy: `validate`, `budget_s` and `max_candidates` are heeded.
        records: What was measured elsewhere, the nearest first.
        known: Outcomes of an earlier attempt, which a worker process did not survive.
        programs: Configurations that were compiled before, with what loads their programs.
        reference: The kernel's reference for this call, compiled before.
        suspects: Configurations of which one ended that process; they are compiled one at a time.
        rounds, warmup, seed, width, limits: See `Autotuner`.
    """

    inv: Invocation[Any, Any]
    candidates: Collection[Any] | None = None
    policy: AutotunePolicy = dataclasses.field(default_factory=AutotunePolicy)
    records: tuple[Record, ...] = ()
    known: tuple[Outcome, ...] = ()
    programs: tuple[tuple[Any, Loader], ...] = ()
    reference: Loader | None = None
    suspects: tuple[Any, ...] = ()
    rounds: int = 8
    warmup: int = 2
    seed: int = 0
    width: int | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)

    @property
    def kernel(self) -> Kernel[Any, Any]:
        """The call's kernel."""
        assert self.inv.kernel is not None  # who makes a task has put it there
        return self.inv.kernel


class TuningRun:
    """A task under way.

    Args:
        task: What to search for.
        progress: Called with how many candidates are compiled and checked, and how many there are.
        watch: Who must know what is under way.
        stop: Whether to end as soon as possible, with the best so far.
        clock: Source of seconds.
    """

    def __init__(
        self,
        task: TuningTask,
        *,
        progress: Progress | None = None,
        watch: Watch | None = None,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.task = task
        self._progress = progress
        self._watch = watch or Unwatched()
        self._stop = stop
        self._clock = clock
        self._known = {config_id(outcome.config): outcome for outcome in task.known}
        self._suspects = {config_id(config) for config in task.suspects}
        self._tried: list[Candidate] = []
        self._finished = 0
        self._shown: int | None = None
        self._total = 0

    def run(self) -> AutotuneData:
        """Return what was found.

        Raises:
            TuningError: no candidate could be measured, or there is no truth to compare with.
        """
        task, inv = self.task, self.task.inv
        start = self._clock()
        self._deadline = None if task.policy.budget_s is None else start + task.policy.budget_s
        first = heuristic_of(inv, task.kernel)
        others = candidates_of(task.kernel, inv) if task.candidates is None else task.candidates
        self._bench = Bench(
            inv=inv,
            baseline=_first(inv, first, others),
            policy=task.policy,
            seed=task.seed,
            width=task.width or task.policy.compile_processes or None,
            limits=task.limits,
            watch=self._watch,
            programs={config_id(config): program for config, program in task.programs},
            reference=task.reference,
            compile_elsewhere=self._elsewhere(),
            stop=self._must_end,
        )
        if isinstance(others, ConfigSpace) and others.size > LISTED:
            self._ask(others, first)
        else:
            self._take_all(first, others)
        winner, checked = self._decide()
        for candidate in self._tried:
            if candidate.status == READY:
                candidate.status = SKIPPED
        self._note_progress(self._total)
        return AutotuneData(
            inv=inv,
            config=winner.config,
            outcomes=tuple(candidate.outcome() for candidate in self._tried),
            seconds=self._clock() - start,
            checked=checked,
            interrupted=self._stop(),
        )

    def _elsewhere(self) -> Any:
        if self.task.policy.compile_processes == 0:
            return None
        from ejkernel.ops.execution.ahead import compiler_for  # imports multiprocessing

        return compiler_for(self.task.inv.device_fingerprint, self.task.policy.compile_processes)

    # --- which candidates ---

    def _take_all(self, first: Sequence[Any], others: Iterable[Any]) -> None:
        others = list(others)
        for config in others:
            check_config(self.task.kernel, config, "each candidate")
        self._tried = _distinct((*first, *others))
        self._begin(len(self._tried))
        self._prepare(self._tried)
        self._race(self._tried, self.task.rounds)

    def _ask(self, space: ConfigSpace[Any], first: Sequence[Any]) -> None:
        """Measure the candidates that a strategy asks for, and the best of them, beside the heuristic, again."""
        total = min(space.size, self.task.policy.max_candidates)
        strategy = default_strategy(space, seeds=first, records=self.task.records, seed=self.task.seed)
        batch = _distinct(first) or _distinct(strategy.ask(_BATCH))
        self._begin(total)
        while batch:
            self._tried += batch
            fresh = [candidate for candidate in batch if not self._recall(candidate)]
            self._prepare(fresh)
            self._race(fresh, _SCREENING)
            for candidate in batch:
                strategy.tell(candidate.config, candidate.measurement.median if candidate.measurement else None)
            _release_losers(self._tried)
            room = 0 if self._must_end() else min(_BATCH, total - len(self._tried))
            batch = _distinct(strategy.ask(room), but=self._tried) if room > 0 else []
        finalists = _finalists(self._tried)
        self._prepare([candidate for candidate in finalists if candidate.compiled is None])
        self._race(finalists, self.task.rounds)

    def _recall(self, candidate: Candidate) -> bool:
        """Take over what an earlier attempt measured; return whether it did."""
        known = self._known.get(config_id(candidate.config))
        if known is None or known.status != MEASURED or known.measurement is None:
            return False
        candidate.status, candidate.measurement = MEASURED, known.measurement
        candidate.compile_seconds, candidate.peak_bytes = known.compile_seconds, known.peak_bytes
        return True

    # --- what is done with them ---

    def _begin(self, total: int) -> None:
        self._total = total
        emit(SearchStarted(self.task.inv.key, total))
        self._note_progress(0)

    def _note_progress(self, done: int) -> None:
        done = min(done, self._total)
        if self._progress is not None and done != self._shown:
            self._progress(done, self._total)
        self._shown = done

    def _prepare(self, candidates: Sequence[Candidate]) -> None:
        """Compile and check; those that an earlier attempt rejected stay rejected."""
        todo = []
        for candidate in candidates:
            known = self._known.get(config_id(candidate.config))
            if known is not None and known.status in _REJECTED:
                candidate.status, candidate.reason = known.status, known.reason
                candidate.compile_seconds, candidate.peak_bytes = known.compile_seconds, known.peak_bytes
                self._one_finished(candidate)
            else:
                todo.append(candidate)
        suspects = [candidate for candidate in todo if config_id(candidate.config) in self._suspects]
        self._bench.prepare([candidate for candidate in todo if candidate not in suspects], self._one_finished)
        for suspect in suspects:
            self._bench.prepare([suspect], self._one_finished)

    def _one_finished(self, candidate: Candidate) -> None:
        self._finished += 1
        self._note_progress(self._finished)
        emit(CandidateFinished(self.task.inv.key, candidate.outcome()))

    def _race(self, candidates: Iterable[Candidate], rounds: int) -> None:
        runners = [candidate for candidate in candidates if candidate.compiled is not None]
        self._bench.race(runners, rounds, self.task.warmup, self._deadline)
        for candidate in runners:
            emit(CandidateFinished(self.task.inv.key, candidate.outcome()))

    def _must_end(self) -> bool:
        """Return whether to end with the best so far: but the very first candidate has its turn."""
        if not self._tried or self._tried[0].status == SKIPPED:
            return False
        return self._stop() or (self._deadline is not None and self._clock() > self._deadline)

    # --- who wins ---

    def _decide(self) -> tuple[Candidate, tuple[str, ...]]:
        """Return the winner, and what was checked of it: the best that holds its lead and is right on fresh inputs."""
        heuristic = self._tried[0]
        while True:
            winner = self._winner()
            if winner is heuristic:
                return winner, ("outputs",) if self.task.policy.validate else ()
            if heuristic.compiled is not None and not self._holds_its_lead(winner, heuristic):
                return heuristic, ("outputs",) if self.task.policy.validate else ()
            try:
                return winner, confirm(self._bench, winner)
            except CandidateError as error:
                winner.fail(WRONG, error)
                emit(CandidateFinished(self.task.inv.key, winner.outcome()))
                self._race(self._tried, self.task.rounds)  # some were dropped for being slower than that one

    def _winner(self) -> Candidate:
        """Return the fastest finalist that ran in every round, if it beats the heuristic, the first candidate."""
        times = {id(c): c.measurement for c in self._tried if c.compiled is not None and c.measurement is not None}
        if not times:
            raise TuningError(_nobody_left(self.task.inv, self._tried))
        full = max(len(measurement.samples) for measurement in times.values())
        in_every_round = [c for c in self._tried if id(c) in times and len(times[id(c)].samples) == full]
        best = min(in_every_round, key=lambda candidate: times[id(candidate)].median)
        heuristic = times.get(id(self._tried[0]))
        return best if heuristic is None or _beats(times[id(best)], heuristic) else self._tried[0]

    def _holds_its_lead(self, winner: Candidate, heuristic: Candidate) -> bool:
        """Return whether the winner beats the heuristic again, in a race of the two alone.

        Of many candidates the one that noise favoured most looks best; new samples do not know which one that was.
        """
        self._bench.race([heuristic, winner], self.task.rounds, self.task.warmup, self._deadline)
        if winner.measurement is None or heuristic.measurement is None:
            return winner.measurement is not None
        return _beats(winner.measurement, heuristic.measurement)


def heuristic_of(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> list[Any]:
    """Return the heuristic's configuration, if the kernel has any to offer."""
    try:
        config = hook(kernel, "heuristic_cfg", inv.platform)(inv)
    except NoConfigError:
        return []
    check_config(kernel, config, "what heuristic_cfg returns")
    return [config]


def _first(inv: Invocation[Any, Any], first: Sequence[Any], others: Collection[Any]) -> Any:
    for config in (*first, *itertools.islice(others, 1)):
        return config
    raise TuningError(f"{inv.op_id}: there is nothing to measure; config_space(inv) returned no configuration.")


def _distinct(configs: Iterable[Any], but: Sequence[Candidate] = ()) -> list[Candidate]:
    """Return one candidate for each configuration, in their order, leaving out those of `but`."""
    found: dict[Any, Candidate] = {}
    known = {config_id(candidate.config) for candidate in but}
    for config in configs:
        token = config_id(config)
        if token not in known:
            found.setdefault(token, Candidate(config))
    return list(found.values())


def _finalists(tried: Sequence[Candidate]) -> list[Candidate]:
    """Return the heuristic, which is the first, and the best of the others."""
    measured = [candidate for candidate in tried[1:] if candidate.measurement is not None]
    best = sorted(measured, key=lambda c: c.measurement.median if c.measurement else math.inf)
    return [tried[0], *best[:_FINALISTS]]


def _release_losers(tried: Sequence[Candidate]) -> None:
    """Let go of the programs of all but the finalists."""
    kept = {id(candidate) for candidate in _finalists(tried)}
    for candidate in tried:
        if id(candidate) not in kept:
            candidate.compiled = None


def _nobody_left(inv: Invocation[Any, Any], tried: Sequence[Candidate]) -> str:
    reasons = collections.Counter(candidate.reason for candidate in tried)
    listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    return f"{inv.op_id}: none of {len(tried)} candidates could be measured: {listed}"


def _beats(challenger: Measurement, incumbent: Measurement) -> bool:
    """Return whether the challenger is faster by more than a tie, in most of the rounds that both ran in."""
    if challenger.median > _MARGIN * incumbent.median:
        return False
    pairs = list(zip(challenger.samples, incumbent.samples, strict=False))
    return sum(mine < theirs for mine, theirs in pairs) >= _MOST * len(pairs)
