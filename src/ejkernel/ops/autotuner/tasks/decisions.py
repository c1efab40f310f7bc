# SPDX-License-Identifier: Apache-2.0
"""What a search decides by: who is measured again, and how the best stands against the heuristic."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

from ejkernel.ops.autotuner.measure.paired import MARGIN, PairedComparison, compare
from ejkernel.ops.autotuner.measure.race import CLOCK, PROCESSOR
from ejkernel.ops.autotuner.trials.candidates import Candidate
from ejkernel.ops.autotuner.trials.outcome import Standing
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.utils.formatting import compact, counted

_FINALISTS = 7  # the best of a search that are measured again, beside the heuristic
_HOPELESS = 1.25  # times the heuristic's time that a candidate takes for which it is not measured again


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """Who won.

    Attributes:
        winner: That candidate.
        checked: What was checked of it.
        standing: How the best of the others stands against the heuristic.
        doubtful: Whether the times of another say that it is faster than the winner.
        unconfirmed: Whether the search had to end before the best candidate was compared with the heuristic.
    """

    winner: Candidate
    checked: tuple[str, ...]
    standing: Standing | None = None
    doubtful: bool = False
    unconfirmed: bool = False

    @property
    def undecided(self) -> bool:
        """Whether the evidence was too little."""
        return self.doubtful or (self.standing is not None and not self.standing.verdict.settled)


def are_measured(*candidates: Candidate) -> bool:
    """Return whether all can be measured, and were."""
    return all(candidate.compiled is not None and candidate.measurement is not None for candidate in candidates)


def at_first_look(rival: Candidate, heuristic: Candidate) -> PairedComparison:
    """Compare two by a race of many, where a rival wins that is faster by more than a tie in the median.

    One that was dropped on the way because it is hopeless has few samples, and is settled all the same.
    """
    mine, theirs = rival.measurement, heuristic.measurement
    assert mine is not None  # who compares them has seen to it
    assert theirs is not None
    sure = compare(mine.samples, theirs.samples)
    wins = compare(mine.samples, theirs.samples, margin=MARGIN, confidence=0.0).wins
    witness = PROCESSOR if mine.method == PROCESSOR else CLOCK
    verdict = dataclasses.replace(sure, wins=wins, settled=sure.settled and sure.wins == wins, judged_by=witness)
    hopeless = not verdict.wins and verdict.speedup * _HOPELESS <= 1
    return dataclasses.replace(verdict, settled=verdict.settled or hopeless)


def why_it_stays(standing: Standing | None, *, unconfirmed: bool = False) -> str:
    """Return why the heuristic stays."""
    if unconfirmed:
        return "the search ended before the best candidate was compared with it"
    if standing is None or (standing.verdict.settled and not standing.alone):
        return "no candidate was faster by more than a tie"
    verdict = standing.verdict
    what = "did not beat it" if verdict.settled else "was not certainly faster, nor slower,"
    where = " in a race of the two alone" if standing.alone else ""
    rounds = f"{verdict.speedup:.2f}x, ahead in {verdict.ahead} of {verdict.pairs} rounds"
    return f"{compact(standing.rival)} {what}{where} ({rounds})"


def faster_than(decision: Decision, tried: Sequence[Candidate]) -> list[Candidate]:
    """Return whose times say that they are faster than the winner, the fastest first; nobody if it is undecided."""
    limit = None if decision.undecided else decision.winner.seconds
    if limit is None:
        return []
    return [c for c in fastest_first(tried)[:_FINALISTS] if (c.seconds or math.inf) < limit * (1 - MARGIN)]


def finalists(tried: Sequence[Candidate]) -> list[Candidate]:
    """Return the heuristic, which is the first, and the best of the others."""
    return [tried[0], *fastest_first(tried[1:])[:_FINALISTS]]


def fastest_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return those that were measured."""
    measured = [candidate for candidate in candidates if candidate.measurement is not None]
    return sorted(measured, key=lambda c: c.measurement.median if c.measurement else math.inf)


def nobody_left(inv: Invocation[Cfg, Out], tried: Sequence[Candidate]) -> str:
    """Return why a search has no winner: the candidates' reasons, the most frequent first."""
    reasons = collections.Counter(candidate.reason for candidate in tried)
    listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    return f"{inv.op_id}: none of {counted(len(tried), 'candidate')} could be measured: {listed}"


def release_losers(tried: Sequence[Candidate]) -> None:
    """Let go of the programs of all but the finalists."""
    kept = {id(candidate) for candidate in finalists(tried)}
    for candidate in tried:
        if id(candidate) not in kept:
            candidate.compiled = None


def for_so_long(seconds: float, clock: Callable[[], float]) -> Callable[[], bool]:
    """Return what says whether so many seconds have not passed yet since it was first asked."""
    start: list[float] = []

    def not_yet() -> bool:
        now = clock()
        start[:] = start or [now]
        return now - start[0] < seconds

    return not_yet
