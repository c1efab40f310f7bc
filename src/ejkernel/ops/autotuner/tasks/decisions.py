# SPDX-License-Identifier: Apache-2.0
"""The decisions of a search: which candidates to measure again, and whether the best beats the heuristic."""

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

_FINALISTS = 7  # candidates measured again beside the heuristic
_HOPELESS = 1.25  # a candidate slower than this multiple of the heuristic is not measured again


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a search.

    Attributes:
        winner: The winning candidate.
        checked: The checks that it passed.
        standing: The best challenger compared with the heuristic.
        doubtful: Whether another candidate has shorter times than the winner.
        unconfirmed: Whether the search ended before the best candidate was compared with the heuristic.
    """

    winner: Candidate
    checked: tuple[str, ...]
    standing: Standing | None = None
    doubtful: bool = False
    unconfirmed: bool = False

    @property
    def undecided(self) -> bool:
        """Whether the evidence was insufficient."""
        return self.doubtful or (self.standing is not None and not self.standing.verdict.settled)


def are_measured(*candidates: Candidate) -> bool:
    """Return whether all candidates have programs and times."""
    return all(candidate.compiled is not None and candidate.measurement is not None for candidate in candidates)


def at_first_look(rival: Candidate, heuristic: Candidate) -> PairedComparison:
    """Compare two candidates by the run of all candidates; the rival needs a lead in the median beyond a tie.

    A hopelessly slow rival was dropped early. It has few samples, but its verdict is settled.
    """
    mine, theirs = rival.measurement, heuristic.measurement
    assert mine is not None  # callers check
    assert theirs is not None
    sure = compare(mine.samples, theirs.samples)
    wins = compare(mine.samples, theirs.samples, margin=MARGIN, confidence=0.0).wins
    witness = PROCESSOR if mine.method == PROCESSOR else CLOCK
    verdict = dataclasses.replace(sure, wins=wins, settled=sure.settled and sure.wins == wins, judged_by=witness)
    hopeless = not verdict.wins and verdict.speedup * _HOPELESS <= 1
    return dataclasses.replace(verdict, settled=verdict.settled or hopeless)


def why_it_stays(decision: Decision, tried: Sequence[Candidate], *, finished: bool) -> str:
    """Return why the heuristic, the first of `tried`, stays; `finished`: no candidate is left to measure."""
    standing = decision.standing
    if decision.unconfirmed:
        return "the search ended before the best candidate was compared with the heuristic"
    if not finished and all(candidate.measurement is None for candidate in tried[1:]):
        return "the search ended before another candidate was measured"
    so_far = "" if finished else " so far"
    if standing is None or (standing.verdict.settled and not standing.alone):
        return f"no candidate was measurably faster{so_far}"
    verdict = standing.verdict
    what = "did not beat the heuristic" if verdict.settled else "was neither certainly faster nor certainly slower"
    where = " in the confirmation run" if standing.alone else ""
    rounds = f"{verdict.speedup:.2f}x, ahead in {verdict.ahead} of {verdict.pairs} rounds"
    return f"{compact(standing.rival)} {what}{where}{so_far} ({rounds})"


def faster_than(decision: Decision, tried: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates with shorter times than the winner, the fastest first; empty if the search is undecided."""
    limit = None if decision.undecided else decision.winner.seconds
    if limit is None:
        return []
    return [c for c in fastest_first(tried)[:_FINALISTS] if (c.seconds or math.inf) < limit * (1 - MARGIN)]


def finalists(tried: Sequence[Candidate]) -> list[Candidate]:
    """Return the heuristic (the first candidate) and the fastest of the others."""
    return [tried[0], *fastest_first(tried[1:])[:_FINALISTS]]


def fastest_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the measured candidates, the fastest first."""
    measured = [candidate for candidate in candidates if candidate.measurement is not None]
    return sorted(measured, key=lambda c: c.measurement.median if c.measurement else math.inf)


def why_no_winner(inv: Invocation[Cfg, Out], tried: Sequence[Candidate]) -> str:
    """Return why a search has no winner: the reasons of all candidates, the most frequent first."""
    reasons = collections.Counter(candidate.reason for candidate in tried)
    listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    return f"{inv.op_id}: none of {counted(len(tried), 'candidate')} could be measured: {listed}"


def release_losers(tried: Sequence[Candidate]) -> None:
    """Release the programs of all candidates except the finalists."""
    kept = {id(candidate) for candidate in finalists(tried)}
    for candidate in tried:
        if id(candidate) not in kept:
            candidate.compiled = None


def for_so_long(seconds: float, clock: Callable[[], float]) -> Callable[[], bool]:
    """Return a function that is true until `seconds` have passed since its first call."""
    start: list[float] = []

    def not_yet() -> bool:
        now = clock()
        start[:] = start or [now]
        return now - start[0] < seconds

    return not_yet
