# SPDX-License-Identifier: Apache-2.0
"""One tuning run: sets up the measurement of a task, proposes candidates, and returns the result."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from ejkernel.ops.autotuner.bench.oracle import Oracle
from ejkernel.ops.autotuner.bench.preparation import Preparation
from ejkernel.ops.autotuner.bench.timing import Timing
from ejkernel.ops.autotuner.measure.paired import PairedSampling
from ejkernel.ops.autotuner.measure.sampling import Sampling, SamplingPlan
from ejkernel.ops.autotuner.process.watch import Cancellation, Watch
from ejkernel.ops.autotuner.search.strategies import Strategy, default_strategy
from ejkernel.ops.autotuner.tasks.decisions import Decider, why_it_stays, why_open, why_passed_over
from ejkernel.ops.autotuner.tasks.pool import Budget, Pool
from ejkernel.ops.autotuner.tasks.task import Configurations, SharedCall, TuningTask
from ejkernel.ops.autotuner.trials.candidates import LISTED, Candidate, config_id, distinct
from ejkernel.ops.autotuner.trials.events import CandidateFinished, Event, RoundsFinished, emit
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.kernel import check_config
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import EjkernelError, KernelError, TuningError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.messages.names import named

if TYPE_CHECKING:
    from ejkernel.ops.autotuner.compile.processes import Compiler

_PAUSE: Final = 0.5  # least seconds between two events
_SCREENING = SamplingPlan.fixed(2)  # for candidates proposed by a strategy
_BATCH = 8  # candidates requested from a strategy at once: they compile in parallel and run interleaved


@dataclasses.dataclass(frozen=True, slots=True)
class TuningRun:
    """One run of a task.

    Attributes:
        task: The task.
        watch: Receives the current step and its candidates.
        cancellation: Requests the end of the run.
        tell: Called with every event.
        clock: Source of seconds.
    """

    task: TuningTask
    watch: Watch = dataclasses.field(default_factory=Watch)
    cancellation: Cancellation = dataclasses.field(default_factory=Cancellation)
    tell: Callable[[Event], None] = emit
    clock: Callable[[], float] = time.perf_counter

    def run(self) -> AutotuneData:
        """Execute the run and return its results.

        Raises:
            TuningError: No candidate could be measured, or the reference failed.
        """
        task = self.task
        budget = Budget(task, self.watch, self.cancellation, self.clock)
        with self._naming_the_kernel():
            configurations = self._configurations()
            baseline = configurations.baseline
        with self._compiling_elsewhere(budget) as compiler, self._naming_the_kernel():
            oracle, *others = [self._oracle_of(call, baseline, budget) for call in task.shared]
            oracle.others = others
            pool = self._pool_of(oracle, configurations, budget, compiler)
            planned = self._measured(pool, configurations)
            decider = Decider(task, pool, budget)
            decision = decider.decide()
        pool.settle_statuses()
        oracle.settings.tell()
        data = AutotuneData(
            inv=task.inv,
            calls=task.calls if task.others else (),
            config=decision.winner.config,
            outcomes=tuple(candidate.outcome() for candidate in pool.tried),
            seconds=budget.spent(),
            checked=decision.checked,
            input_sets=decision.winner.input_sets,
            challenge=decision.challenge,
            undecided=decision.undecided,
            interrupted=budget.is_stopped,
            rule_fault=decider.fault(decision),
            planned=planned,
            unconfirmed=decision.unconfirmed,
            lacks_reference=any(one.lacks_reference for one in oracle.all),
        )
        if not data.is_kept:
            why = why_passed_over(decision) if decision.faster is None else why_open(decision)
            return dataclasses.replace(data, why=why)
        finished = data.progress.state.is_finished
        known = pool.others_are_measured
        why = why_it_stays(decision, finished=finished, others_are_measured=known, ended=budget.why_over)
        is_alone = finished and len(pool.tried) == 1
        return dataclasses.replace(data, why="the space has no other configuration" if is_alone else why)

    # --- setting up ---

    def _pool_of(
        self, oracle: Oracle, configurations: Configurations, budget: Budget, compiler: Compiler | None
    ) -> Pool:
        task = self.task
        preparation = Preparation(
            oracle=oracle,
            programs={
                (number, config_id(config)): program
                for number, call in enumerate(task.shared)
                for config, program in call.programs
            },
            compile_elsewhere=compiler,
            width=task.width or task.policy.compile_processes or None,
            left=budget.left_to_compile,
            finished=lambda candidate: self.tell(CandidateFinished(task.inv.key, candidate.outcome())),
        )
        heard = RoundsTeller(task.inv.key, self.tell)
        timing = Timing(oracle=oracle, warmup=task.warmup, cold_cache=task.policy.cold_cache, heard=heard)
        return Pool(task, configurations, preparation, timing, budget, self.tell)

    def _oracle_of(self, call: SharedCall, baseline: object, budget: Budget) -> Oracle:
        return Oracle(
            inv=call.inv,
            baseline=baseline,
            validate=bool(self.task.policy.validate),
            seed=self.task.seed,
            reference=call.reference,
            inputs=call.inputs,
            watch=self.watch,
            limits=self.task.limits,
            left=budget.left,
            weight=call.weight,
            partners=call.partners,
        )

    def _configurations(self) -> Configurations:
        try:
            return Configurations(self.task)
        except EjkernelError:
            raise
        except BaseException as error:
            raise KernelError(error_text(error)) from error

    @contextlib.contextmanager
    def _naming_the_kernel(self) -> Iterator[None]:
        """Turn errors of the kernel's hooks into a `TuningError` that names the kernel."""
        op_id = self.task.inv.op_id
        try:
            with named(op_id):
                yield
        except KernelError as error:
            why = str(error).removeprefix(f"{op_id}: ")
            raise TuningError(f"{op_id}: its configurations cannot be determined: {why}") from error

    def _compiling_elsewhere(self, budget: Budget) -> contextlib.AbstractContextManager[Compiler | None]:
        """Provide a compiler with the policy's processes for the `with` block; `None` without processes."""
        count = self.task.policy.compile_processes
        if count == 0:
            return contextlib.nullcontext()
        from ejkernel.ops.autotuner.compile.processes import compiler_for  # imports multiprocessing

        compiler = compiler_for(
            self.task.inv.device_fingerprint, count, self.task.limits.compile, budget.left_to_compile
        )
        return contextlib.nullcontext() if compiler is None else contextlib.closing(compiler)

    # --- proposing candidates ---

    def _measured(self, pool: Pool, configurations: Configurations) -> int:
        """Measure the candidates of the task; return their number, of which some may be left."""
        others = configurations.others
        if isinstance(others, ConfigSpace) and not others.has_at_most(LISTED):
            return self._proposed(pool, others, configurations.first)
        return self._listed(pool, configurations.first, others)

    def _listed(self, pool: Pool, first: Sequence[object], others: Collection[object]) -> int:
        """Measure all candidates in one run."""
        for config in others:
            check_config(self.task.kernel, config, "each candidate")
        pool.tried = _untried((*first, *others))
        pool.begin(len(pool.tried), pool.heuristic)
        fresh = [candidate for candidate in pool.tried if not pool.recall(candidate)]
        pool.prepare(fresh, stop=pool.must_measure)
        pool.measure(fresh, self._plan)
        is_resumed = len(fresh) < len(pool.tried)
        if is_resumed and pool.ranking[1:]:
            pool.measure_finalists(self._plan)
        elif is_resumed:
            pool.rank_the_best()  # an earlier search measured all others, so the budget goes to the confirmation
        return len(pool.tried)

    def _proposed(self, pool: Pool, space: ConfigSpace[Any], first: Sequence[object]) -> int:
        """Measure the candidates that a strategy proposes, then the best of them again beside the heuristic."""
        points, most = space.points(), self.task.policy.max_candidates
        total = most if points is None else min(len(points), most)
        strategy = default_strategy(space, seeds=first, records=self.task.records, seed=self.task.seed)
        # The heuristic comes first and alone: all later times are compared with it.
        batch = _untried(first) or _asked(strategy, _BATCH)
        pool.begin(total, batch[0])
        room = total
        while batch:
            pool.tried += batch
            fresh = [candidate for candidate in batch if not pool.recall(candidate)]
            pool.prepare(fresh)
            pool.measure([pool.heuristic, *(c for c in fresh if c is not pool.heuristic)], _SCREENING)
            for candidate in batch:
                strategy.tell(candidate.config, pool.comparable_seconds(candidate))
            pool.release_losers()
            room = 0 if pool.must_end() else min(_BATCH, total - len(pool.tried))
            batch = _asked(strategy, room, pool.tried)
        ended_early = room == 0 and len(pool.tried) < total
        known = (outcome.config for outcome in self.task.known if outcome.config in space)
        pool.tried += filter(pool.recall, _untried(known, pool.tried))
        pool.measure_finalists(self._plan)
        return total if ended_early else len(pool.tried)

    @property
    def _plan(self) -> SamplingPlan:
        return SamplingPlan(rounds=self.task.rounds)


def _asked(strategy: Strategy, room: int, tried: Sequence[Candidate] = ()) -> list[Candidate]:
    """Ask a strategy for at most `room` new candidates; return none if it has no more points."""
    while room > 0 and (asked := strategy.ask(room)):
        if batch := _untried(asked, tried):
            return batch
    return []


def _untried(configs: Iterable[object], tried: Sequence[Candidate] = ()) -> list[Candidate]:
    """Return a candidate for each new configuration; several points of a space may have the same."""
    return list(map(Candidate, distinct(configs, but=[candidate.config for candidate in tried])))


class RoundsTeller:
    """Sends an event when a measurement begins, and about twice a second from then on.

    Args:
        key: The key of the call.
        tell: Called with the events.
        clock: Source of seconds.
    """

    def __init__(
        self, key: ConfigKey, tell: Callable[[Event], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._key, self._tell, self._clock = key, tell, clock
        self._last: tuple[Sampling, int, float] | None = None

    def __call__(self, sampling: Sampling) -> None:
        """Note that a sample of this sampling was taken, or is about to be."""
        (done, planned), now = sampling.progress, self._clock()
        if self._last is not None and self._last[0] is sampling and (done == self._last[1] or now < self._last[2]):
            return
        self._last = sampling, done, now + _PAUSE
        count, is_confirmation = len(sampling.running), isinstance(sampling, PairedSampling)
        self._tell(RoundsFinished(self._key, count, done, planned, is_confirmation))
