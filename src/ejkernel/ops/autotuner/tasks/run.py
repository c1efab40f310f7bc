# SPDX-License-Identifier: Apache-2.0
"""A tuning task under way: which candidates are prepared, raced and confirmed, and who wins."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ejkernel.ops.autotuner.bench.confirmation import confirm, pair_fault
from ejkernel.ops.autotuner.bench.gradients import rule_fault
from ejkernel.ops.autotuner.bench.oracle import Oracle
from ejkernel.ops.autotuner.bench.preparation import Preparation
from ejkernel.ops.autotuner.bench.timing import Timing
from ejkernel.ops.autotuner.measure.correctness import NOT_FINITE
from ejkernel.ops.autotuner.measure.duels import Duel
from ejkernel.ops.autotuner.measure.race import Race, RacePlan
from ejkernel.ops.autotuner.measure.roofline import suspiciously_fast
from ejkernel.ops.autotuner.process.cancellation import Cancellation
from ejkernel.ops.autotuner.process.watch import Unwatched, Watch
from ejkernel.ops.autotuner.search.strategies import default_strategy
from ejkernel.ops.autotuner.tasks.configurations import Configurations
from ejkernel.ops.autotuner.tasks.decisions import (
    Decision,
    are_measured,
    at_first_look,
    at_last_look,
    faster_than,
    fastest_first,
    finalists,
    why_it_stays,
)
from ejkernel.ops.autotuner.tasks.task import SharedCall, TuningTask
from ejkernel.ops.autotuner.trials.candidates import LISTED, Candidate, config_id, distinct
from ejkernel.ops.autotuner.trials.events import CandidateFinished, Event, SearchStarted, emit
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Standing
from ejkernel.ops.autotuner.trials.status import REJECTED, Status
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.examples import why_not_finite
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import check_config
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import CandidateError, EjkernelError, KernelError, TuningError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import compact, counted
from ejkernel.ops.utils.validation import named

if TYPE_CHECKING:
    from ejkernel.ops.autotuner.compile.processes import Compiler

logger = logging.getLogger(__name__)

_SCREENING = RacePlan.fixed(2)  # of candidates that a search asked for
_DUEL = 8  # rounds of the winner and the heuristic at least; fewer prove nothing
_DUEL_SECONDS = 20.0  # for which the two go on at most where those rounds prove nothing
_DOUBTS = 2  # times that candidates which look faster than the winner are measured again, beside it
_BATCH = 8  # candidates that a search asks for at once, so that they compile side by side and run in turns


class TuningRun:
    """A task under way.

    Args:
        task: What to search for.
        watch: Who must know what is under way.
        cancellation: By which it is asked for its end.
        tell: Called with every event.
        clock: Source of seconds.
    """

    def __init__(
        self,
        task: TuningTask,
        *,
        watch: Watch | None = None,
        cancellation: Cancellation | None = None,
        tell: Callable[[Event], None] = emit,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.task = task
        self._watch = watch or Unwatched()
        self._cancellation = cancellation or Cancellation()
        self._tell = tell
        self._clock = clock
        self._known = {config_id(outcome.config): outcome for outcome in task.known}
        self._rejected = {config_id(outcome.config): outcome for outcome in task.rejected}
        self._rejected |= {token: outcome for token, outcome in self._known.items() if outcome.status in REJECTED}
        self._suspects = {config_id(config) for config in task.suspects}
        self._plan = RacePlan(rounds=task.rounds)
        self._rounds = max(_DUEL, task.rounds)  # of a race that decides
        self._ranking: list[Candidate] = []
        self._tried: list[Candidate] = []

    def run(self) -> AutotuneData:
        """Return what was found.

        Raises:
            TuningError: no candidate could be measured, or there is no truth to compare with.
        """
        task, inv = self.task, self.task.inv
        start = self._clock() - task.spent
        self._deadline = None if task.policy.budget_s is None else start + task.policy.budget_s
        self._configurations = self._found_configurations()
        first, others = self._configurations.first, self._configurations.others
        with self._naming_the_kernel():
            baseline = self._configurations.baseline
        with self._compiling_elsewhere() as compiler, self._naming_the_kernel():
            self._set_up(baseline, compiler)
            if isinstance(others, ConfigSpace) and not others.has_at_most(LISTED):
                self._ask(others, first)
            else:
                self._take_all(first, others)
            self._rule_fault = self._checked_rule()
            decision = self._decide()
        for candidate in self._tried:
            if candidate.status == Status.READY:  # compiled, and then time was up
                candidate.status = Status.SKIPPED
        self._oracle.settings.tell()
        return AutotuneData(
            inv=inv,
            calls=task.calls if task.others else (),
            config=decision.winner.config,
            outcomes=tuple(candidate.outcome() for candidate in self._tried),
            seconds=self._clock() - start,
            checked=decision.checked,
            input_sets=decision.winner.input_sets,
            why=why_it_stays(decision.standing) if decision.winner is self._tried[0] else "",
            standing=decision.standing,
            undecided=decision.undecided,
            interrupted=self._cancellation.is_requested,
            rule_fault=self._rule_fault or self._pair_fault(decision),
        )

    def _set_up(self, baseline: object, compiler: Compiler | None) -> None:
        """Make the bench: what is right, what compiles and checks candidates, and what times them."""
        task = self.task
        self._oracle = self._oracle_of(
            SharedCall(
                inv=task.inv,
                weight=task.weight,
                inputs=task.inputs,
                reference=task.reference,
                partners=task.partners,
            ),
            baseline,
        )
        self._oracle.others = [self._oracle_of(other, baseline) for other in task.others]
        programs = (task.programs, *(other.programs for other in task.others))
        self._preparation = Preparation(
            oracle=self._oracle,
            programs={
                (number, config_id(config)): program
                for number, compiled in enumerate(programs)
                for config, program in compiled
            },
            compile_elsewhere=compiler,
            width=task.width or task.policy.compile_processes or None,
            left=self._left,
            finished=self._one_finished,
        )
        self._timing = Timing(
            oracle=self._oracle, warmup=task.warmup, cold_cache=task.policy.cold_cache, stop=self._must_end
        )

    def _oracle_of(self, call: SharedCall, baseline: object) -> Oracle:
        return Oracle(
            inv=call.inv,
            baseline=baseline,
            validate=bool(self.task.policy.validate),
            seed=self.task.seed,
            reference=call.reference,
            inputs=call.inputs,
            watch=self._watch,
            limits=self.task.limits,
            left=self._left,
            weight=call.weight,
            partners=call.partners,
        )

    def _found_configurations(self) -> Configurations:
        with self._naming_the_kernel():
            try:
                return Configurations(self.task)
            except EjkernelError:
                raise
            except BaseException as error:
                raise KernelError(error_text(error)) from error

    @contextlib.contextmanager
    def _naming_the_kernel(self) -> Iterator[None]:
        """Say whose configurations something is wrong with; what a hook raises is this call's error alone."""
        op_id = self.task.inv.op_id
        try:
            with named(op_id):
                yield
        except KernelError as error:
            why = str(error).removeprefix(f"{op_id}: ")
            raise TuningError(f"{op_id}: its configurations cannot be had: {why}") from error

    @contextlib.contextmanager
    def _compiling_elsewhere(self) -> Iterator[Compiler | None]:
        """Give what compiles in the policy's processes, if there are any, for the `with` block."""
        compiler = None
        if self.task.policy.compile_processes > 0:
            from ejkernel.ops.autotuner.compile.processes import compiler_for  # imports multiprocessing

            device, count = self.task.inv.device_fingerprint, self.task.policy.compile_processes
            compiler = compiler_for(device, count, lambda: self.task.limits.compile.within(self._left()))
        try:
            yield compiler
        finally:
            if compiler is not None:
                compiler.close()

    # --- which candidates ---

    def _take_all(self, first: Sequence[object], others: Iterable[object]) -> None:
        others = list(others)
        for config in others:
            check_config(self.task.kernel, config, "each candidate")
        self._tried = distinct((*first, *others))
        self._begin(len(self._tried), self._tried)
        self._prepare(self._tried)
        self._race(self._tried, self._plan)

    def _ask(self, space: ConfigSpace[Any], first: Sequence[object]) -> None:
        """Measure the candidates that a strategy asks for, and the best of them, beside the heuristic, again."""
        points, most = space.points(), self.task.policy.max_candidates
        total = most if points is None else min(len(points), most)
        strategy = default_strategy(space, seeds=first, records=self.task.records, seed=self.task.seed)
        # The heuristic alone, so that every later time stands beside it.
        batch = distinct(first) or distinct(strategy.ask(_BATCH))
        self._begin(total, batch)
        while batch:
            self._tried += batch
            fresh = [candidate for candidate in batch if not self._recall(candidate)]
            self._prepare(fresh)
            self._race([self._tried[0], *(c for c in fresh if c is not self._tried[0])], _SCREENING)
            for candidate in batch:
                strategy.tell(candidate.config, candidate.seconds)
            # Programs take memory on the device, which candidates to come may need.
            _release_losers(self._tried)
            room = 0 if self._must_end() else min(_BATCH, total - len(self._tried))
            batch = distinct(strategy.ask(room), but=self._tried) if room > 0 else []
        known = distinct((outcome.config for outcome in self.task.known), but=self._tried)
        self._tried += [candidate for candidate in known if self._recall(candidate)]
        best = finalists(self._tried)
        self._prepare_again(best)
        if self._must_end():  # a race would have no rounds: what was sampled on the way decides
            self._ranking = [c for c in fastest_first(best) if c.compiled is not None]
        else:
            self._race(best, self._plan)

    def _prepare_again(self, finalists: Sequence[Candidate]) -> None:
        """Compile those that an earlier attempt measured; where time is up, the best of them alone."""
        missing = [candidate for candidate in finalists if candidate.compiled is None and candidate.measurement]
        if missing and self._must_end():
            self._prepare(missing[:1], stop=self._watch.is_abandoned)
        else:
            self._prepare(missing)

    def _recall(self, candidate: Candidate) -> bool:
        """Take over what an earlier attempt measured; return whether it did. The heuristic is in every race."""
        # The heuristic is measured by each attempt: it is in every race, and owns its program.
        known = self._known.get(config_id(candidate.config))
        if candidate is self._tried[0] or known is None or known.measurement is None or known.status != Status.MEASURED:
            return False
        candidate.take_over(known)
        self._preparation.note_spills(candidate.spilled)
        return True

    # --- what is done with them ---

    def _begin(self, total: int, candidates: Sequence[Candidate]) -> None:
        self._tell(SearchStarted(self.task.inv.key, total, candidates[0].config))

    def _prepare(self, candidates: Sequence[Candidate], stop: Callable[[], bool] | None = None) -> None:
        """Compile and check, until it is to stop; those that an earlier attempt rejected stay rejected."""
        stop = stop or self._must_end
        todo = []
        for candidate in candidates:
            rejected = self._rejected.get(config_id(candidate.config))
            refused = "" if rejected is not None else self._configurations.why_refused(candidate.config)
            if rejected is not None:
                candidate.take_over(rejected)
            elif refused:
                candidate.fail(Status.FAILED, CandidateError(refused))
            else:
                todo.append(candidate)
                continue
            self._one_finished(candidate)
        if self._suspects:
            self._oracle.find_truth()  # so that each of them is alone indeed
        groups = self._to_compile_together(todo)
        for group in itertools.takewhile(lambda _: not stop(), groups):
            self._preparation.prepare(group, stop=stop)
        if len(groups) > 1:
            self._preparation.settle(todo)  # one that came late may be the first of its program

    def _to_compile_together(self, candidates: Sequence[Candidate]) -> list[list[Candidate]]:
        """Return the candidates in groups: suspects alone, and after the others, who should not wait for them.

        But the very first candidate comes first if it has to be alone: as a suspect, or because time is up, so that no
        other is begun.
        """
        first = self._tried[0]
        alone = [candidate for candidate in candidates if config_id(candidate.config) in self._suspects]
        is_late = self._deadline is not None and self._clock() > self._deadline
        before = [first] if first in candidates and (first in alone or is_late) else []
        together = [candidate for candidate in candidates if candidate not in (*alone, *before)]
        return [group for group in (before, together, *([c] for c in alone if c is not first)) if group]

    def _one_finished(self, candidate: Candidate) -> None:
        self._tell(CandidateFinished(self.task.inv.key, candidate.outcome()))

    def _race(self, candidates: Iterable[Candidate], plan: RacePlan) -> None:
        runners = [candidate for candidate in candidates if candidate.compiled is not None]
        if runners:
            self._ranking = self._timing.race(runners, Race(len(runners), plan=plan))
        else:
            self._ranking = []
        for candidate in runners:
            self._tell(CandidateFinished(self.task.inv.key, candidate.outcome()))

    def _left(self) -> float:
        return math.inf if self._deadline is None else self._deadline - self._clock()

    def _must_end(self) -> bool:
        """Return whether to end with the best so far: but the very first candidate has its turn."""
        if self._watch.is_abandoned():
            return True
        if not self._tried or self._tried[0].status == Status.SKIPPED:
            return False
        return self._cancellation.is_requested or (self._deadline is not None and self._clock() > self._deadline)

    # --- who wins ---

    def _checked_rule(self) -> str:
        """Return what is wrong with the heuristic's gradients, if there is time to look."""
        if self.task.policy.validate is not True or self._must_end():
            return ""
        first = self._tried[0]
        if first.status == Status.WRONG and self.task.inv.direction == "bwd":  # which is a gradient
            return f"its gradients are wrong: {first.reason}"
        return rule_fault(self._oracle) if first.compiled is not None else ""

    def _pair_fault(self, decision: Decision) -> str:
        """Return how forward and backward disagree on residuals, as far as there was time to look."""
        kept = self._tried[0] if decision.winner is self._tried[0] and not self._must_end() else None
        return pair_fault(self._oracle, kept) if self.task.policy.validate is True else self._oracle.contract_fault

    def _decide(self) -> Decision:
        """Return who wins, after those that look faster all the same were measured again beside it.

        Who left a race early, or ran in another one, may have had luck with its few samples.
        """
        decision = self._best()
        for _ in range(_DOUBTS):
            doubtful = faster_than(decision, self._tried)
            if not doubtful or self._must_end():
                break
            self._prepare_again(doubtful)
            field = {id(candidate): candidate for candidate in (self._tried[0], decision.winner, *doubtful)}
            self._race(field.values(), RacePlan.fixed(self._rounds))
            decision = self._best()
        return dataclasses.replace(decision, doubtful=bool(faster_than(decision, self._tried)))

    def _best(self) -> Decision:
        """Return who wins: the fastest that is right on fresh inputs too, and there beats the heuristic again.

        That second race is of the two alone: of many candidates the one that noise favoured most looks best, and new
        samples do not know which one that was.
        """
        heuristic = self._tried[0]
        while self._ranking:
            rival = next((candidate for candidate in self._ranking if candidate is not heuristic), None)
            if rival is None:
                return self._stays(None)
            standing = self._first_look(rival)
            checked: tuple[str, ...] = ()
            if standing is None or standing.verdict.wins:
                checked = self._confirmed(rival)
                standing = self._duel(rival)
            if rival.compiled is None:
                self._race(self._tried, self._plan)  # some were dropped for being slower than that one
            elif standing is None or standing.verdict.wins:
                return Decision(rival, checked, standing)
            else:
                return self._stays(standing)
        self._oracle.settings.tell()
        text = _nobody_left(self.task.inv, self._tried)
        if any(NOT_FINITE in candidate.reason for candidate in self._tried):
            text = f"{text}; {why_not_finite(self.task.kernel, self.task.inputs)}"
        raise TuningError(text)

    def _stays(self, standing: Standing | None) -> Decision:
        checked = ("outputs",) if self.task.policy.validate else ()
        return Decision(self._tried[0], checked, standing)

    def _first_look(self, rival: Candidate) -> Standing | None:
        """Return how the best of a race stands against the heuristic, after more rounds where those told too little."""
        if not are_measured(rival, self._tried[0]):
            return None
        verdict = at_first_look(rival, self._tried[0])
        if verdict.wins or verdict.settled or self._must_end():
            return Standing(rival.config, verdict)
        return self._duel(rival)

    def _confirmed(self, rival: Candidate) -> tuple[str, ...]:
        """Return what was checked of a winner; nothing if it failed."""
        self._note_suspicion(rival)
        try:
            gradients = self.task.policy.validate is True
            return confirm(self._oracle, rival, gradients=gradients, rule_is_faulty=bool(self._rule_fault))
        except CandidateError as error:
            rival.fail(Status.WRONG, error)
            self._tell(CandidateFinished(self.task.inv.key, rival.outcome()))
            return ()

    def _duel(self, rival: Candidate) -> Standing | None:
        """Race it against the heuristic until it is settled who is faster; `None` if one of them cannot be measured.

        If there is no time for it, what was sampled so far decides, be it little: a large difference is enough.
        """
        heuristic = self._tried[0]
        if not are_measured(rival, heuristic):
            return None
        verdict = None
        if not self._must_end():
            duel = Duel(self._rounds, may_go_on=self._for_so_long(_DUEL_SECONDS))
            # These samples are the figures that are kept.
            self._timing.race([heuristic, rival], duel)
            verdict = duel.verdict
            if not are_measured(rival, heuristic):
                return None
        if verdict is None or (self._must_end() and not verdict.settled):
            verdict = at_last_look(rival, heuristic)
        return Standing(rival.config, verdict, alone=True)

    def _for_so_long(self, seconds: float) -> Callable[[], bool]:
        """Return what says whether so many seconds have not passed yet since it was first asked."""
        start: list[float] = []

        def not_yet() -> bool:
            now = self._clock()
            start[:] = start or [now]
            return now - start[0] < seconds

        return not_yet

    def _note_suspicion(self, winner: Candidate) -> None:
        times = [c.measurement.median for c in self._ranking if c.measurement is not None]
        if 0 in suspiciously_fast(times):
            logger.info("%s: %s is suspiciously fast; looking again", self.task.inv.op_id_v, compact(winner.config))


def _release_losers(tried: Sequence[Candidate]) -> None:
    """Let go of the programs of all but the finalists."""
    kept = {id(candidate) for candidate in finalists(tried)}
    for candidate in tried:
        if id(candidate) not in kept:
            candidate.compiled = None


def _nobody_left(inv: Invocation[Cfg, Out], tried: Sequence[Candidate]) -> str:
    reasons = collections.Counter(candidate.reason for candidate in tried)
    listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    return f"{inv.op_id}: none of {counted(len(tried), 'candidate')} could be measured: {listed}"
