# SPDX-License-Identifier: Apache-2.0
"""The decision of a run: whether its best candidate replaces the heuristic."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TypeVar

from ejkernel.ops.autotuner.bench.checking import check_repeatedly
from ejkernel.ops.autotuner.bench.confirmation import confirm, pair_fault
from ejkernel.ops.autotuner.bench.gradients import rule_fault
from ejkernel.ops.autotuner.bench.oracle import Oracle
from ejkernel.ops.autotuner.measure.correctness import NOT_FINITE
from ejkernel.ops.autotuner.measure.measurement import more_bytes, preferred
from ejkernel.ops.autotuner.measure.paired import MARGIN, PairedComparison, PairedSampling, compare
from ejkernel.ops.autotuner.measure.sampling import CLOCK, PROCESSOR, Sampling, SamplingPlan
from ejkernel.ops.autotuner.tasks.pool import FINALISTS, Budget, Pool
from ejkernel.ops.autotuner.tasks.task import TuningTask
from ejkernel.ops.autotuner.trials.candidates import Candidate
from ejkernel.ops.autotuner.trials.challenge import Challenge, costly_bytes, least_lead
from ejkernel.ops.autotuner.trials.status import FAULTY, Status
from ejkernel.ops.core.examples import why_not_finite
from ejkernel.ops.core.kernel import overrides
from ejkernel.ops.errors import CandidateError, TuningError
from ejkernel.ops.utils.formatting import compact, counted, size

T = TypeVar("T")

_CONFIRMATION_ROUNDS = 8  # least rounds of a confirmation run; fewer prove nothing
_CONFIRMATION_SECONDS = 20.0  # longest extension of a confirmation run that is not settled after its rounds
_LAST_SECONDS = 2.0  # extra time for the confirmation run after the end was requested: a winner needs one
_DOUBTS = 2  # times that candidates with shorter times than the winner are measured again beside it
_HOPELESS = 1.25  # a candidate slower than this multiple of the heuristic is not measured again


@dataclasses.dataclass(frozen=True, slots=True)
class Conclusion:
    """The winner of a run, and the evidence.

    Attributes:
        winner: The winning candidate.
        checked: The checks that it passed.
        challenge: The best challenger compared with the heuristic.
        faster: Another candidate with shorter times than the winner; `None` without one.
        passed_over: The fastest candidate, if the winner was preferred to it because it takes less memory.
        unconfirmed: Whether the search ended before the best candidate was compared with the heuristic.
    """

    winner: Candidate
    checked: tuple[str, ...]
    challenge: Challenge | None = None
    faster: Candidate | None = None
    passed_over: Candidate | None = None
    unconfirmed: bool = False

    @property
    def undecided(self) -> bool:
        """Whether the evidence was insufficient."""
        return self.faster is not None or (self.challenge is not None and not self.challenge.comparison.settled)


class Decider:
    """Confirms the best candidate of a run against the heuristic, on new inputs.

    Args:
        task: The task.
        pool: The candidates, measured.
        budget: The time left.
    """

    def __init__(self, task: TuningTask, pool: Pool, budget: Budget) -> None:
        self._task, self._pool, self._budget = task, pool, budget
        self._oracle = pool.timing.oracle
        self._rounds = max(_CONFIRMATION_ROUNDS, task.rounds)
        self._rule_fault = ""

    def decide(self) -> Conclusion:
        """Return the decision, after candidates with shorter times than the winner were measured again beside it.

        A candidate dropped early, or measured in other rounds, may look fast because of its few samples.

        Raises:
            TuningError: No candidate could be measured.
        """
        self._rule_fault, pool = self._found_rule_fault(), self._pool
        decision = self._best()
        for _ in range(_DOUBTS):
            doubtful = self._faster_than(decision)
            if not doubtful or pool.must_end():
                break
            pool.prepare_again(doubtful)
            again = {id(candidate): candidate for candidate in (pool.heuristic, decision.winner, *doubtful)}
            pool.measure(again.values(), SamplingPlan.fixed(self._rounds))
            decision = self._best()
        return dataclasses.replace(decision, faster=next(iter(self._faster_than(decision)), None))

    def fault(self, decision: Conclusion) -> str:
        """Return the fault of the gradients: of the heuristic's, or how forward and backward disagree on residuals."""
        if self._rule_fault or self._task.policy.validate is not True:
            return self._rule_fault or self._oracle.contract_fault
        heuristic = self._pool.heuristic
        return pair_fault(
            self._oracle, heuristic if decision.winner is heuristic and not self._pool.must_end() else None
        )

    def _found_rule_fault(self) -> str:
        """Return the fault of the heuristic's gradients, if the time suffices for the check; empty without a fault."""
        if self._task.policy.validate is not True or self._pool.must_end():
            return ""
        first = self._pool.heuristic
        if first.status == Status.WRONG and self._task.inv.direction == "bwd":  # the call itself computes gradients
            return f"its gradients are wrong: {first.reason}"
        return rule_fault(self._oracle) if first.compiled else ""

    def _faster_than(self, decision: Conclusion) -> list[Candidate]:
        """Return candidates with shorter times than the winner, the fastest first; empty if undecided."""
        pool = self._pool
        if decision.undecided or decision.winner.seconds is None:
            return []
        return [
            candidate
            for candidate in pool.fastest_first(pool.tried)[:FINALISTS]
            if pool.pace(candidate) < pool.pace(decision.winner) * (1 - least_lead(candidate, decision.winner))
        ]

    def _best(self) -> Conclusion:
        """Return the fastest candidate that is correct on new inputs and beats the heuristic in a confirmation run.

        The confirmation run is paired and takes new samples: the fastest of many candidates is often the one that
        noise favoured most.
        """
        pool, heuristic = self._pool, self._pool.heuristic
        while pool.ranking:
            challenger, passed_over = self._preferred()
            # Without samples of the heuristic, and without its failure, nothing can be compared with it.
            if challenger is None or not (heuristic.status in FAULTY or _are_measured(heuristic)):
                return self._stays(None)
            challenge = self._first_look(challenger)
            if challenge is not None and not challenge.comparison.wins:
                return self._stays(challenge)
            validates = self._task.policy.validate is True
            check = functools.partial(confirm, gradients=validates, rule_is_faulty=bool(self._rule_fault))
            checked = self._checked(challenger, check) or ()
            challenge = self._confirmation_run(challenger)
            if _are_measured(challenger) and (challenge is None or challenge.comparison.wins):
                self._checked(challenger, check_repeatedly)
            if _are_measured(challenger):
                decision = self._after_confirmation_run(challenger, checked, challenge)
                return dataclasses.replace(decision, passed_over=passed_over)
            # The failed challenger caused slower candidates to be dropped.
            pool.measure(pool.tried, SamplingPlan(rounds=self._task.rounds))
        self._oracle.settings.tell()
        error = TuningError(self._why_no_winner())
        error.outcomes = tuple(candidate.outcome() for candidate in pool.tried)
        error.seconds = self._budget.spent()
        raise error

    def _preferred(self) -> tuple[Candidate | None, Candidate | None]:
        """Return the candidate to compare with the heuristic, and the fastest one if it takes notably more memory."""
        pool = self._pool
        others = [candidate for candidate in pool.ranking if candidate is not pool.heuristic]
        if not others:
            return None, None
        fastest = others[0]
        leanest = min(others, key=lambda candidate: candidate.peak_bytes or math.inf)
        # A candidate that does not beat the heuristic itself is no reason to pass over one that does.
        limit = 1 - MARGIN if pool.heuristic.measurement is not None else math.inf
        others = [candidate for candidate in others if candidate is fastest or pool.pace(candidate) < limit]
        needs = [candidate.peak_bytes for candidate in others]
        chosen = others[preferred(list(map(pool.pace, others)), needs, margin=least_lead(fastest, leanest))]
        return chosen, None if chosen is fastest else fastest

    def _first_look(self, challenger: Candidate) -> Challenge | None:
        """Compare the best candidate with the heuristic, with more rounds if the first were inconclusive.

        Return `None` if they were not measured in the same rounds.
        """
        if not _are_measured(challenger, self._pool.heuristic) or not challenger.beside:
            return None
        comparison = _at_first_look(challenger, costly_bytes(challenger, self._pool.heuristic))
        if comparison.wins or comparison.settled or self._pool.must_end():
            return Challenge(challenger.config, comparison)
        return self._confirmation_run(challenger)

    def _checked(self, challenger: Candidate, check: Callable[[Oracle, Candidate], T]) -> T | None:
        """Return the result of a check; `None` if it fails, which is the challenger's outcome."""
        try:
            return check(self._oracle, challenger)
        except CandidateError as error:
            challenger.fail(Status.WRONG, error)
            self._pool.report(challenger)
            return None

    def _confirmation_run(self, challenger: Candidate) -> Challenge | None:
        """Run the confirmation until the comparison is settled; `None` if a candidate cannot be measured.

        It may continue for a moment after the end was requested: without a confirmation run, no candidate wins.
        """
        heuristic = self._pool.heuristic
        if not _are_measured(challenger, heuristic):
            return None
        more, may_go_on = costly_bytes(challenger, heuristic), self._budget.lasts(_CONFIRMATION_SECONDS)
        paired = PairedSampling(self._rounds, more_bytes=more, may_go_on=may_go_on)
        # The log stores these samples.
        stop = self._must_end_now()
        self._pool.timing.measure([heuristic, challenger], paired, heuristic=heuristic, stop=stop)
        if not _are_measured(challenger, heuristic):
            return None
        return Challenge(challenger.config, paired.comparison, is_confirmation=True)

    def _must_end_now(self) -> Callable[[], bool]:
        """Return a function that is true a moment after the end of the search was requested."""
        has_time = self._budget.lasts(_LAST_SECONDS)
        return lambda: self._budget.is_abandoned() or (self._pool.must_end() and not has_time())

    def _after_confirmation_run(
        self, challenger: Candidate, checked: tuple[str, ...], challenge: Challenge | None
    ) -> Conclusion:
        """Return the challenger if it won the confirmation run, or if the heuristic has failed."""
        if challenge is None:
            if challenger.is_recalled:  # a search must measure its winner itself
                sampling = Sampling(1, plan=SamplingPlan.fixed(self._rounds))
                self._pool.timing.measure([challenger], sampling, stop=self._must_end_now())
            has_failed = self._pool.heuristic.status in FAULTY
            return Conclusion(challenger, checked) if has_failed and not challenger.is_recalled else self._stays(None)
        is_confirmed = challenge.comparison.wins and challenge.comparison.settled
        return Conclusion(challenger, checked, challenge) if is_confirmed else self._stays(challenge)

    def _stays(self, challenge: Challenge | None) -> Conclusion:
        checked = ("outputs",) if self._task.policy.validate else ()
        is_open = challenge is None or not challenge.comparison.settled
        unconfirmed = is_open and self._pool.others_are_measured and self._pool.must_end()
        return Conclusion(self._pool.heuristic, checked, challenge, unconfirmed=unconfirmed)

    def _why_no_winner(self) -> str:
        """Return why a search has no winner: the reasons of all candidates, the most frequent first."""
        own = [candidate for candidate in self._pool.tried if candidate.status != Status.SAME]  # one per program
        reasons = collections.Counter(candidate.reason for candidate in own)
        counts = (f"{count} x " if len(reasons) > 1 else "" for _, count in reasons.most_common())
        listed = "; ".join(f"{count}{reason}" for count, (reason, _) in zip(counts, reasons.most_common(), strict=True))
        tried = counted(len(self._pool.tried), "candidate")
        alike = f" ({counted(len(own), 'different program')})" if len(own) < len(self._pool.tried) else ""
        text = f"{self._task.inv.op_id}: none of {tried}{alike} could be measured: {listed}{self._why_no_gradient()}"
        if any(NOT_FINITE in reason for reason in reasons):
            text = f"{text}; {why_not_finite(self._task.kernel, self._task.inputs)}"
        return text

    def _why_no_gradient(self) -> str:
        """Return advice if every program of a backward call computes wrong gradients; empty otherwise."""
        inv = self._task.inv
        others = [candidate for candidate in self._pool.tried if candidate.status not in (Status.WRONG, Status.SAME)]
        if inv.direction != "bwd" or others:
            return ""
        root = inv.node.spec.kernel
        rule = next((f"{type(root).__name__}.{name}" for name in ("vjp", "custom_vjp") if overrides(root, name)), "")
        cause = f"; the gradient rule, {rule}, is wrong under every configuration" if rule else ""
        return f"{cause}; ejkernel.testing.check_kernel compares the gradient with JAX's, without tuning"


def _are_measured(*candidates: Candidate) -> bool:
    """Return whether all candidates have programs and times."""
    return all(candidate.compiled and candidate.measurement is not None for candidate in candidates)


def _at_first_look(challenger: Candidate, more_bytes: int) -> PairedComparison:
    """Compare a candidate with the heuristic in the same rounds; it needs a lead in the median beyond a tie.

    A hopelessly slow challenger was dropped early. It has few samples, but its comparison is settled.
    """
    mine = challenger.measurement
    assert mine is not None  # callers check
    sure = compare(mine.samples, challenger.beside, more_bytes=more_bytes)
    clock = PROCESSOR if mine.method == PROCESSOR else CLOCK
    wins = compare(mine.samples, challenger.beside, confidence=0.0, more_bytes=more_bytes).wins
    settled = sure.settled and sure.wins == wins
    comparison = dataclasses.replace(sure, wins=wins, settled=settled, judged_by=clock)
    hopeless = not comparison.wins and comparison.speedup * _HOPELESS <= 1
    return dataclasses.replace(comparison, settled=comparison.settled or hopeless)


def why_it_stays(
    decision: Conclusion, *, finished: bool, others_are_measured: bool, ended: str = "the search ended"
) -> str:
    """Return why the heuristic stays, in a finished search perhaps because it is undecided.

    Args:
        decision: The decision.
        finished: Whether no candidate is left to measure, and the best one was compared with the heuristic.
        others_are_measured: Whether a candidate beside the heuristic has times.
        ended: Why the search ended, as the start of a sentence.
    """
    challenge, winner = decision.challenge, decision.winner
    is_confirmed = challenge is not None and challenge.is_confirmation
    if not finished and winner.measurement is None and winner.status not in FAULTY:
        return f"{ended} before the heuristic was measured"
    if decision.unconfirmed and not is_confirmed:
        return f"{ended} before the best candidate was compared with the heuristic"
    if not finished and not others_are_measured:
        return f"{ended} when only the heuristic was measured"
    if decision.faster is not None:
        return why_open(decision)
    so_far = "" if finished else " so far"
    if challenge is not None and challenge.is_lead_too_small:
        return f"{challenge.lead_in_words}{so_far}"
    if challenge is None or (challenge.comparison.settled and not is_confirmed):
        return f"no candidate was measurably faster{so_far}"
    comparison, name = challenge.comparison, compact(challenge.challenger)
    where = " in the confirmation run" if is_confirmed else ""
    rounds = f"{comparison.in_words}{where}, ahead in {comparison.ahead} of {counted(comparison.pairs, 'round')}"
    if decision.unconfirmed:
        return (
            f"{ended} before {name} was confirmed: {rounds} so far{f'; {comparison.doubt}' if comparison.doubt else ''}"
        )
    if comparison.is_tie:
        return (
            f"no difference to {name}{where}{so_far}: {comparison.in_words} over {counted(comparison.pairs, 'round')}"
        )
    if comparison.settled:
        return f"{name} did not beat the heuristic{so_far}: {rounds}"
    return f"it is open whether {name} is faster{so_far}: {rounds}; {comparison.doubt}"


def why_passed_over(decision: Conclusion) -> str:
    """Return why the winner was preferred to the fastest candidate; empty if it was not."""
    other, winner = decision.passed_over, decision.winner
    more = 0 if other is None else more_bytes(other.peak_bytes, winner.peak_bytes)
    if other is None or not more or other.seconds is None or winner.seconds is None:
        return ""
    return f"about the same time as {compact(other.config)}, which takes {size(more)} more memory"


def why_open(decision: Conclusion) -> str:
    """Return why a search with a candidate that seems faster than its winner is undecided."""
    assert decision.faster is not None  # callers check
    challenge, name = decision.challenge, compact(decision.faster.config)
    if challenge is None or challenge.challenger is not decision.faster.config:
        return f"{name} has a shorter time than the chosen configuration, but was not confirmed"
    where = "in the confirmation run" if challenge.is_confirmation else "in the rounds with both"
    return f"{name} has a shorter time than the heuristic, but is not faster {where}: {challenge.comparison.in_words}"
