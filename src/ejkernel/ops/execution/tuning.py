# SPDX-License-Identifier: Apache-2.0
"""`Autotuner`: measures candidates and names a winner, or keeps the heuristic."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import logging
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ejkernel.ops.config.cache import config_token
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.space import ConfigSpace
from ejkernel.ops.core.examples import example_arrays
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, candidates_of, check_config, hook, overrides
from ejkernel.ops.core.nodes import Choice
from ejkernel.ops.errors import CandidateError, NoConfigError, SerializationError, TuningError, TuningWarning
from ejkernel.ops.execution.checking import check_results
from ejkernel.ops.execution.measuring import Measurement, apart, interleaved
from ejkernel.ops.execution.measuring import benchmark as benchmark
from ejkernel.ops.execution.outcome import FAILED, MEASURED, SAME, SKIPPED, WRONG, AutotuneData, Outcome
from ejkernel.ops.execution.result import AutotuningResult as AutotuningResult
from ejkernel.ops.execution.result import Entry as Entry
from ejkernel.ops.execution.searching import default_strategy
from ejkernel.ops.utils import services

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_HOPELESS = 1.5  # times the best median so far, after a few samples: no noise that was seen makes up for that
_FEW = 3
_SCREENING = 3  # rounds of a candidate that a search asked for
_BATCH = 8  # candidates that a search asks for at once, so that they run in turns
_FINALISTS = 7  # the best of a search that are measured again, beside the heuristic
LISTED = 24  # configurations up to which a space is measured whole
_MOST = 0.75  # share of the rounds that a winner is faster in
_MARGIN = 0.98  # a winner takes at most this share of the heuristic's time; nearer than that is a tie


@dataclasses.dataclass(slots=True)
class _Candidate:
    """A candidate under way."""

    config: Any
    compiled: Callable[..., Any] | None = None
    status: str = SKIPPED
    reason: str = "the budget was spent before its turn"
    compile_seconds: float | None = None
    measurement: Measurement | None = None

    def fail(self, status: str, error: BaseException) -> None:
        """Note the reason alone: a traceback would keep the candidate's arrays alive."""
        self.status, self.compiled = status, None
        text = str(error).strip() or "no message"
        self.reason = text if isinstance(error, CandidateError) else f"{type(error).__name__}: {text}"

    def outcome(self) -> Outcome:
        return Outcome(
            config=self.config,
            status=self.status,
            reason="" if self.status == MEASURED else self.reason,
            measurement=self.measurement,
            compile_seconds=self.compile_seconds,
        )


class Autotuner:
    """Measures the candidates of a call, on inputs made from its signature, and names the fastest right one.

    Candidates are compiled ahead of time, checked against the kernel's reference, and timed in interleaved rounds on
    a thread of their own, where no trace of the caller is open. A candidate that fails, or is wrong, is an outcome
    with its reason; it never ends the search. The heuristic stays unless it is beaten in the same rounds.

    Args:
        rounds: Samples of each candidate that stays in the race.
        warmup: Calls of each candidate before its first sample.
        seed: Of the random inputs.
        clock: Source of seconds, for budgets.
    """

    def __init__(
        self, *, rounds: int = 8, warmup: int = 2, seed: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.rounds = rounds
        self.warmup = warmup
        self.seed = seed
        self._clock = clock

    def tune(
        self,
        inv: Invocation[Any, Any],
        kernel: Kernel[Any, Any],
        *,
        candidates: Collection[Any] | None = None,
        policy: AutotunePolicy | None = None,
        progress: Progress | None = None,
    ) -> AutotuneData:
        """Return the search for the best configuration of `inv`.

        Args:
            inv: The call; it may be derived (a backward) or batched.
            kernel: Its kernel.
            candidates: What to measure beside the heuristic, the kernel's `config_space` by default. A list is
                measured whole; of a larger `ConfigSpace`, what a search asks for.
            policy: `validate`, `budget_s` and `max_candidates` are heeded.
            progress: Called with how many candidates are compiled and checked, and how many there are.

        Raises:
            TuningError: no candidate could be measured, or the reference itself failed.
        """
        inv = dataclasses.replace(inv.abstract(), kernel=kernel)
        return apart(lambda: self._tune(inv, kernel, candidates, policy or AutotunePolicy(), progress))

    def _tune(
        self,
        inv: Invocation[Any, Any],
        kernel: Kernel[Any, Any],
        given: Collection[Any] | None,
        policy: AutotunePolicy,
        progress: Progress | None,
    ) -> AutotuneData:
        start = self._clock()
        first = _heuristic(inv, kernel)
        others = candidates_of(kernel, inv) if given is None else given
        baseline = Choice(config=_first(inv, first, others), platform=inv.platform)
        arrays, truth = _inputs_and_truth(inv, kernel, baseline, policy, np.random.default_rng(self.seed))
        deadline = None if policy.budget_s is None else start + policy.budget_s
        bench = _Bench(inv, arrays, truth, self.warmup, deadline, self._clock)
        if isinstance(others, ConfigSpace) and others.size > LISTED:
            candidates = self._search(others, first, bench, policy, progress)
        else:
            for config in others:
                check_config(kernel, config, "each candidate")
            candidates = _distinct((*first, *others))
            bench.prepare_all(candidates, len(candidates), progress)
        finalists = [candidate for candidate in candidates if candidate.compiled is not None]
        bench.race(finalists, self.rounds)
        winner = _winner(inv, candidates, finalists)
        if winner is not candidates[0] and candidates[0].compiled is not None:
            winner = self._confirmed(bench, winner, candidates[0])
        if progress is not None:
            progress(len(candidates), len(candidates))
        outcomes = tuple(candidate.outcome() for candidate in candidates)
        tuned = AutotuneData(inv=inv, config=winner.config, outcomes=outcomes, seconds=self._clock() - start)
        _report(tuned)
        return tuned

    def _confirmed(self, bench: _Bench, winner: _Candidate, heuristic: _Candidate) -> _Candidate:
        """Return the winner if it beats the heuristic again, in a race of the two alone; else the heuristic.

        Of many candidates the one that noise favoured most looks best; new samples do not know which one that was.
        """
        bench.race([heuristic, winner], self.rounds)
        confirmed = winner.measurement and heuristic.measurement and _beats(winner.measurement, heuristic.measurement)
        return winner if confirmed else heuristic

    def _search(
        self,
        space: ConfigSpace[Any],
        first: Sequence[Any],
        bench: _Bench,
        policy: AutotunePolicy,
        progress: Progress | None,
    ) -> list[_Candidate]:
        """Return the candidates that a strategy asked for; the best of them, and the heuristic, stay compiled."""
        total = min(space.size, policy.max_candidates)
        strategy = default_strategy(space, seeds=first, seed=self.seed)
        tried = [_Candidate(config) for config in first]
        batch = tried.copy()
        while batch:
            bench.prepare_all(batch, total, progress, done=len(tried) - len(batch))
            bench.race([candidate for candidate in batch if candidate.compiled is not None], _SCREENING)
            for candidate in batch:
                strategy.tell(candidate.config, candidate.measurement.median if candidate.measurement else None)
            _release_losers(tried)
            room = 0 if bench.is_over() else min(_BATCH, total - len(tried))
            batch = _distinct(strategy.ask(room), but=tried) if room > 0 else []
            tried += batch
        return tried


@dataclasses.dataclass(frozen=True, slots=True)
class _Bench:
    """A call's inputs and the truth about them; candidates are compiled, checked and timed on it."""

    inv: Invocation[Any, Any]
    arrays: Sequence[Any]
    truth: Sequence[Any] | None
    warmup: int
    deadline: float | None
    clock: Callable[[], float]
    programs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def is_over(self) -> bool:
        return self.deadline is not None and self.clock() > self.deadline

    def prepare_all(
        self, candidates: Sequence[_Candidate], total: int, progress: Progress | None, done: int = 0
    ) -> None:
        """Prepare candidates until time is up; the very first always."""
        for index, candidate in enumerate(candidates, done):
            if progress is not None:
                progress(index, total)
            if index and self.is_over():
                return
            self._prepare(candidate)

    def _prepare(self, candidate: _Candidate) -> None:
        """Compile and run a candidate once, and compare its results; a failure is noted, whatever it is."""
        choice = Choice(config=candidate.config, platform=self.inv.platform)
        start = time.perf_counter()
        try:
            lowered = jax.jit(self.inv.node.flat(choice)).lower(*self.arrays)
            program = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            if program in self.programs:
                candidate.status, candidate.reason = SAME, f"the same program as {self.programs[program]!r}"
                return
            self.programs[program] = candidate.config
            compiled = lowered.compile()
            candidate.compile_seconds = time.perf_counter() - start
            results = jax.block_until_ready(compiled(*self.arrays))
        except Exception as error:  # noqa: BLE001 - a candidate may fail in every way; the reason is kept
            candidate.fail(FAILED, error)
            return
        try:
            if self.truth is not None:
                check_results(results, self.truth, platform=self.inv.platform, precision=self.inv.precision)
        except CandidateError as error:
            candidate.fail(WRONG, error)
            return
        candidate.compiled = compiled

    def race(self, runners: Sequence[_Candidate], rounds: int) -> None:
        """Measure compiled candidates, round by round."""
        if not runners:
            return
        functions = [_Run(runner.config, runner.compiled, self.arrays) for runner in runners]
        measurements = interleaved(
            functions, rounds=rounds, warmup=self.warmup, keep=_still_in_the_race, deadline=self.deadline
        )
        for runner, measurement in zip(runners, measurements, strict=True):
            runner.measurement, runner.status = measurement, MEASURED


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """One call of a candidate."""

    config: Any
    compiled: Any
    arrays: Sequence[Any]

    def __call__(self) -> Any:
        return self.compiled(*self.arrays)


def _heuristic(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> list[Any]:
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


def _distinct(configs: Iterable[Any], but: Sequence[_Candidate] = ()) -> list[_Candidate]:
    """Return one candidate for each configuration, in their order, leaving out those of `but`."""
    found: dict[Any, _Candidate] = {}
    known = {_token(candidate.config) for candidate in but}
    for config in configs:
        token = _token(config)
        if token not in known:
            found.setdefault(token, _Candidate(config))
    return list(found.values())


def _release_losers(tried: Sequence[_Candidate]) -> None:
    """Let go of the programs of all but the heuristic, which is the first, and the finalists."""
    measured = sorted(
        (candidate for candidate in tried[1:] if candidate.measurement is not None),
        key=lambda candidate: candidate.measurement.median if candidate.measurement else math.inf,
    )
    for candidate in measured[_FINALISTS:]:
        candidate.compiled = None


def _token(config: Any) -> Any:
    try:
        return config_token(config)
    except SerializationError as error:
        raise TuningError(f"configurations must be plain data, got {config!r}: {error}") from error


def _inputs_and_truth(
    inv: Invocation[Any, Any],
    kernel: Kernel[Any, Any],
    baseline: Choice,
    policy: AutotunePolicy,
    rng: np.random.Generator,
) -> tuple[list[Any], Sequence[Any] | None]:
    has_reference = overrides(kernel, "reference")
    choice = dataclasses.replace(baseline, reference=True) if has_reference else baseline
    try:
        arrays = example_arrays(inv, rng, baseline)
        truth = jax.block_until_ready(jax.jit(inv.node.flat(choice))(*arrays)) if policy.validate else None
    except Exception as error:  # whatever it is, without inputs and truth no candidate can be judged
        what = "the reference" if has_reference else "the heuristic, which stands for a reference,"
        raise TuningError(f"{inv.op_id}: example inputs or {what} failed: {type(error).__name__}: {error}") from error
    return arrays, truth


def _still_in_the_race(samples: Sequence[Sequence[float]]) -> list[bool]:
    """Say who is worth another round; the heuristic always is, for it is what a winner is compared with."""
    if len(samples[0]) < _FEW:
        return [True] * len(samples)
    medians = [float(np.median(values)) for values in samples]
    return [index == 0 or median < _HOPELESS * min(medians) for index, median in enumerate(medians)]


def _winner(inv: Invocation[Any, Any], candidates: Sequence[_Candidate], finalists: Sequence[_Candidate]) -> _Candidate:
    """Return the fastest finalist that ran in every round, if it beats the heuristic, the first candidate."""
    times = {id(runner): runner.measurement for runner in finalists if runner.measurement is not None}
    if not times:
        reasons = collections.Counter(candidate.reason for candidate in candidates)
        listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        raise TuningError(f"{inv.op_id}: none of {len(candidates)} candidates could be measured: {listed}")
    full = max(len(measurement.samples) for measurement in times.values())
    in_every_round = [runner for runner in finalists if len(times[id(runner)].samples) == full]
    best = min(in_every_round, key=lambda runner: times[id(runner)].median)
    heuristic = times.get(id(candidates[0]))
    return best if heuristic is None or _beats(times[id(best)], heuristic) else candidates[0]


def _beats(challenger: Measurement, incumbent: Measurement) -> bool:
    """Return whether the challenger is faster by more than a tie, in most of the rounds that both ran in."""
    if challenger.median > _MARGIN * incumbent.median:
        return False
    pairs = list(zip(challenger.samples, incumbent.samples, strict=False))
    return sum(mine < theirs for mine, theirs in pairs) >= _MOST * len(pairs)


def _report(tuned: AutotuneData) -> None:
    others = [outcome for outcome in tuned.outcomes[1:] if outcome.status != SAME]
    rejected = [outcome for outcome in others if outcome.status in (FAILED, WRONG)]
    if others and len(rejected) == len(others):
        text = (
            f"{tuned.inv.op_id}: all {len(others)} candidates beside the heuristic were rejected; the first, "
            f"{rejected[0].config!r}, {rejected[0].status}: {rejected[0].reason}"
        )
        warnings.warn(text, TuningWarning, stacklevel=2)
    speedup = tuned.speedup
    logger.info(
        "tuned %s in %.1f s: %d candidates, %s, %s",
        tuned.inv.op_id_v,
        tuned.seconds,
        len(tuned.outcomes),
        tuned.config,
        "the heuristic could not be measured" if speedup is None else f"{speedup:.2f}x the heuristic's speed",
    )


def __getattr__(name: str) -> Any:
    """Find `autotune` and `autotune_recorded` here too; their module imports this one."""
    if name in ("autotune", "autotune_recorded"):
        from ejkernel.ops.execution import offline

        return getattr(offline, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


services.provide(default_tuner=Autotuner)
