# SPDX-License-Identifier: Apache-2.0
"""One tuning run: prepares, measures and confirms candidates, and decides the winner."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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
from ejkernel.ops.autotuner.measure.paired import PairedRace
from ejkernel.ops.autotuner.measure.race import Race, RacePlan
from ejkernel.ops.autotuner.process.cancellation import Cancellation
from ejkernel.ops.autotuner.process.watch import Unwatched, Watch
from ejkernel.ops.autotuner.search.strategies import default_strategy
from ejkernel.ops.autotuner.tasks.decisions import (
    Decision,
    are_measured,
    at_first_look,
    faster_than,
    fastest_first,
    finalists,
    for_so_long,
    release_losers,
    why_it_stays,
    why_no_winner,
)
from ejkernel.ops.autotuner.tasks.task import Configurations, SharedCall, TuningTask
from ejkernel.ops.autotuner.trials.candidates import LISTED, Candidate, config_id, distinct
from ejkernel.ops.autotuner.trials.events import CandidateFinished, Event, SearchStarted, emit
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Standing
from ejkernel.ops.autotuner.trials.status import FAULTY, REJECTED, Status
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.examples import why_not_finite
from ejkernel.ops.core.kernel import check_config
from ejkernel.ops.errors import CandidateError, EjkernelError, KernelError, TuningError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.validation import named

if TYPE_CHECKING:
    from ejkernel.ops.autotuner.compile.processes import Compiler

_SCREENING = RacePlan.fixed(2)  # for candidates proposed by a strategy
_CONFIRMATION_ROUNDS = 8  # least rounds of a confirmation run; fewer prove nothing
_CONFIRMATION_SECONDS = 20.0  # longest extension of a confirmation run that is not settled after its rounds
_LAST_SECONDS = 2.0  # extra time for the confirmation run after the end was requested: a winner needs one
_PREPARING = 2 / 3  # share of the budget for compiling; then the compiled candidates are measured
_DOUBTS = 2  # times that candidates with shorter times than the winner are measured again beside it
_BATCH = 8  # candidates requested from a strategy at once: they compile in parallel and run interleaved


class TuningRun:
    """One run of a task.

    Args:
        task: The task.
        watch: Receives the current step and its candidates.
        cancellation: Requests the end of the run.
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
        out = REJECTED | {
            Status.SKIPPED
        }  # a skipped candidate ended an attempt because the budget left it too little time
        self._rejected |= {token: outcome for token, outcome in self._known.items() if outcome.status in out}
        self._suspects = {config_id(config) for config in task.suspects}
        self._plan = RacePlan(rounds=task.rounds)
        self._rounds = max(_CONFIRMATION_ROUNDS, task.rounds)
        self._ranking: list[Candidate] = []
        self._tried: list[Candidate] = []
        self._planned = 0  # number of candidates in the search
        self._ended_early = False  # the run ended before the strategy proposed all candidates

    def run(self) -> AutotuneData:
        """Execute the run and return its results.

        Raises:
            TuningError: No candidate could be measured, or the reference failed.
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
        self._settle_statuses()
        self._oracle.settings.tell()
        data = AutotuneData(
            inv=inv,
            calls=task.calls if task.others else (),
            config=decision.winner.config,
            outcomes=tuple(candidate.outcome() for candidate in self._tried),
            seconds=self._clock() - start,
            checked=decision.checked,
            input_sets=decision.winner.input_sets,
            standing=decision.standing,
            undecided=decision.undecided,
            interrupted=self._cancellation.is_requested,
            rule_fault=self._rule_fault or self._pair_fault(decision),
            planned=self._planned if self._ended_early else len(self._tried),
            unconfirmed=decision.unconfirmed,
        )
        if not data.is_kept:
            return data
        why = why_it_stays(decision, self._tried, finished=data.progress.state.is_finished)
        return dataclasses.replace(data, why=why)

    def _settle_statuses(self) -> None:
        """Mark candidates that were never measured as skipped, with the reason."""
        for candidate in self._tried:
            if candidate.status == Status.READY and candidate.measurement is None:  # compiled, but the time was over
                candidate.status = Status.SKIPPED
            is_given_up = config_id(candidate.config) in self._rejected
            if candidate.status == Status.SKIPPED and self._cancellation.is_requested and not is_given_up:
                candidate.reason = "the search was stopped before its turn"

    def _set_up(self, baseline: object, compiler: Compiler | None) -> None:
        """Create the oracle (reference results), the preparation (compiling, checking) and the timing."""
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
        """Turn errors of the kernel's hooks into a `TuningError` that names the kernel."""
        op_id = self.task.inv.op_id
        try:
            with named(op_id):
                yield
        except KernelError as error:
            why = str(error).removeprefix(f"{op_id}: ")
            raise TuningError(f"{op_id}: its configurations cannot be determined: {why}") from error

    @contextlib.contextmanager
    def _compiling_elsewhere(self) -> Iterator[Compiler | None]:
        """Provide a compiler with the policy's processes for the `with` block; `None` without processes."""
        compiler = None
        if self.task.policy.compile_processes > 0:
            from ejkernel.ops.autotuner.compile.processes import compiler_for  # imports multiprocessing

            device, count = self.task.inv.device_fingerprint, self.task.policy.compile_processes
            compiler = compiler_for(device, count, self.task.limits.compile, self._left)
        try:
            yield compiler
        finally:
            if compiler is not None:
                compiler.close()

    # --- choosing candidates ---

    def _take_all(self, first: Sequence[object], others: Iterable[object]) -> None:
        others = list(others)
        for config in others:
            check_config(self.task.kernel, config, "each candidate")
        self._tried = distinct((*first, *others))
        self._begin(len(self._tried), self._tried)
        fresh = [candidate for candidate in self._tried if not self._recall(candidate)]
        self._prepare(fresh, stop=self._must_race)
        self._race(fresh, self._plan)
        if len(fresh) < len(self._tried):
            self._race_finalists()

    def _ask(self, space: ConfigSpace[Any], first: Sequence[object]) -> None:
        """Measure the candidates that a strategy proposes, then the best of them again beside the heuristic."""
        points, most = space.points(), self.task.policy.max_candidates
        total = most if points is None else min(len(points), most)
        strategy = default_strategy(space, seeds=first, records=self.task.records, seed=self.task.seed)
        # The heuristic comes first and alone: all later times are compared with it.
        batch = distinct(first) or distinct(strategy.ask(_BATCH))
        self._begin(total, batch)
        while batch:
            self._tried += batch
            fresh = [candidate for candidate in batch if not self._recall(candidate)]
            self._prepare(fresh)
            self._race([self._tried[0], *(c for c in fresh if c is not self._tried[0])], _SCREENING)
            for candidate in batch:
                strategy.tell(candidate.config, candidate.seconds)
            # Programs occupy device memory that later candidates may need.
            release_losers(self._tried)
            room = 0 if self._must_end() else min(_BATCH, total - len(self._tried))
            batch = distinct(strategy.ask(room), but=self._tried) if room > 0 else []
            self._ended_early = room == 0 and len(self._tried) < total
        known = distinct((o.config for o in self.task.known if o.config in space), but=self._tried)
        self._tried += [candidate for candidate in known if self._recall(candidate)]
        self._race_finalists()

    def _race_finalists(self) -> None:
        """Measure the best candidates again beside the heuristic, since their times come from different runs."""
        best = finalists(self._tried)
        self._prepare_again(best)
        if self._must_end():  # no time for further rounds: the samples so far decide
            self._ranking = [c for c in fastest_first(best) if c.compiled is not None]
        else:
            self._race(best, self._plan)

    def _prepare_again(self, finalists: Sequence[Candidate]) -> None:
        """Compile finalists that an earlier attempt measured; only the best of them if the time is over."""
        missing = [candidate for candidate in finalists if candidate.compiled is None and candidate.measurement]
        if missing and self._must_end():
            self._prepare(missing[:1], stop=self._watch.is_abandoned)
        else:
            self._prepare(missing)

    def _recall(self, candidate: Candidate) -> bool:
        """Copy the outcome of an earlier attempt, if one exists; return whether it did."""
        # Each attempt measures the heuristic again: it takes part in every run, and owns its program.
        known = self._known.get(config_id(candidate.config))
        if candidate is self._tried[0] or known is None or known.measurement is None or known.status != Status.MEASURED:
            return False
        candidate.take_over(known)
        candidate.is_recalled = True
        self._preparation.note_spills(candidate.spilled)
        return True

    # --- compiling, checking and measuring ---

    def _begin(self, total: int, candidates: Sequence[Candidate]) -> None:
        self._planned = total
        self._tell(SearchStarted(self.task.inv.key, total, candidates[0].config))

    def _prepare(self, candidates: Sequence[Candidate], stop: Callable[[], bool] | None = None) -> None:
        """Compile and check candidates until `stop`; candidates rejected by an earlier attempt stay rejected."""
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
            self._oracle.compute_references()  # before the suspects, so that each of them runs alone
        groups = self._to_compile_together(todo)
        for group in itertools.takewhile(lambda _: not stop(), groups):
            self._preparation.prepare(group, stop=stop)
        if len(groups) > 1:
            self._preparation.settle(todo)  # a candidate prepared late may be the first of its program

    def _to_compile_together(self, candidates: Sequence[Candidate]) -> list[list[Candidate]]:
        """Return groups of candidates: all others together, then each suspect alone.

        The first candidate (the heuristic) forms the first group if it is a suspect. The same holds if the time is
        over, so that no other candidate starts.
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
        """Return whether to end with the best result so far; the first candidate is always measured."""
        if self._watch.is_abandoned():
            return True
        if not self._tried or self._tried[0].status == Status.SKIPPED:
            return False
        return self._cancellation.is_requested or (self._deadline is not None and self._clock() > self._deadline)

    def _must_race(self) -> bool:
        """Return whether to stop compiling and start measuring, before a small budget is spent on compiling."""
        if self._must_end() or self._deadline is None or self.task.policy.budget_s is None:
            return self._must_end()
        is_late = self._left() < (1 - _PREPARING) * self.task.policy.budget_s
        return is_late and any(candidate.status == Status.READY for candidate in self._tried[1:])

    # --- deciding ---

    def _checked_rule(self) -> str:
        """Return the fault of the heuristic's gradients, if the time suffices for the check; empty without a fault."""
        if self.task.policy.validate is not True or self._must_end():
            return ""
        first = self._tried[0]
        if first.status == Status.WRONG and self.task.inv.direction == "bwd":  # the call itself computes gradients
            return f"its gradients are wrong: {first.reason}"
        return rule_fault(self._oracle) if first.compiled is not None else ""

    def _pair_fault(self, decision: Decision) -> str:
        """Return how forward and backward disagree on residuals, as far as it was checked."""
        kept = self._tried[0] if decision.winner is self._tried[0] and not self._must_end() else None
        return pair_fault(self._oracle, kept) if self.task.policy.validate is True else self._oracle.contract_fault

    def _decide(self) -> Decision:
        """Return the decision, after candidates with shorter times than the winner were measured again beside it.

        A candidate dropped early, or measured in another run, may look fast because of its few samples.
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
        """Return the fastest candidate that is correct on new inputs and beats the heuristic in a confirmation run.

        The confirmation run is paired and takes new samples: the fastest of many candidates is often the one that
        noise favoured most.
        """
        heuristic = self._tried[0]
        while self._ranking:
            rival = next((candidate for candidate in self._ranking if candidate is not heuristic), None)
            # Without samples of the heuristic, and without its failure, nothing can be compared with it.
            if rival is None or not (heuristic.status in FAULTY or are_measured(heuristic)):
                return self._stays(None)
            standing = self._first_look(rival)
            if standing is not None and not standing.verdict.wins:
                return self._stays(standing)
            checked = self._confirmed(rival)
            standing = self._confirmation_run(rival)
            if are_measured(rival):
                return self._after_confirmation_run(rival, checked, standing)
            self._race(self._tried, self._plan)  # the failed rival caused slower candidates to be dropped
        self._oracle.settings.tell()
        text = why_no_winner(self.task.inv, self._tried)
        if any(NOT_FINITE in candidate.reason for candidate in self._tried):
            text = f"{text}; {why_not_finite(self.task.kernel, self.task.inputs)}"
        raise TuningError(text)

    def _after_confirmation_run(
        self, rival: Candidate, checked: tuple[str, ...], standing: Standing | None
    ) -> Decision:
        """Return the rival if it won the confirmation run, or if the heuristic has failed."""
        if standing is None:
            if rival.is_recalled:  # a search must measure its winner itself
                self._timing.race([rival], Race(1, plan=RacePlan.fixed(self._rounds)), stop=self._must_end_now())
            has_failed = self._tried[0].status in FAULTY
            return Decision(rival, checked) if has_failed and not rival.is_recalled else self._stays(None)
        is_confirmed = standing.verdict.wins and standing.verdict.settled
        return Decision(rival, checked, standing) if is_confirmed else self._stays(standing)

    def _stays(self, standing: Standing | None) -> Decision:
        checked = ("outputs",) if self.task.policy.validate else ()
        is_open = standing is None or not standing.verdict.settled
        others = any(candidate.measurement is not None for candidate in self._tried[1:])
        unconfirmed = is_open and others and self._must_end()
        return Decision(self._tried[0], checked, standing, unconfirmed=unconfirmed)

    def _first_look(self, rival: Candidate) -> Standing | None:
        """Compare the best candidate of a run with the heuristic, with more rounds if the first were inconclusive."""
        if not are_measured(rival, self._tried[0]):
            return None
        verdict = at_first_look(rival, self._tried[0])
        if verdict.wins or verdict.settled or self._must_end():
            return Standing(rival.config, verdict)
        return self._confirmation_run(rival)

    def _confirmed(self, rival: Candidate) -> tuple[str, ...]:
        """Return the checks that a winner passed; empty if it failed."""
        try:
            gradients = self.task.policy.validate is True
            return confirm(self._oracle, rival, gradients=gradients, rule_is_faulty=bool(self._rule_fault))
        except CandidateError as error:
            rival.fail(Status.WRONG, error)
            self._tell(CandidateFinished(self.task.inv.key, rival.outcome()))
            return ()

    def _confirmation_run(self, rival: Candidate) -> Standing | None:
        """Run the confirmation until the comparison is settled; `None` if a candidate cannot be measured.

        It may continue for a moment after the end was requested: without a confirmation run, no candidate wins.
        """
        heuristic = self._tried[0]
        if not are_measured(rival, heuristic):
            return None
        paired = PairedRace(self._rounds, may_go_on=for_so_long(_CONFIRMATION_SECONDS, self._clock))
        # The log stores these samples.
        self._timing.race([heuristic, rival], paired, stop=self._must_end_now())
        if not are_measured(rival, heuristic):
            return None
        return Standing(rival.config, paired.verdict, alone=True)

    def _must_end_now(self) -> Callable[[], bool]:
        """Return a function that is true a moment after the end of the search was requested."""
        has_time = for_so_long(_LAST_SECONDS, self._clock)
        return lambda: self._watch.is_abandoned() or (self._must_end() and not has_time())
