# SPDX-License-Identifier: Apache-2.0
"""Whether a challenger beats the incumbent: pure logic, without a clock."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from ejkernel.ops.autotuner.measure.race import CLOCK, PROCESSOR, Race, RacePlan, Sample, is_disturbed

# A configuration beats itself in at most one of 10,000 comparisons of fifteen rounds; by the medians alone, in a third
# to half.
MARGIN = 0.02  # nearer than that is a tie
CONFIDENCE = 0.95
_MARGIN_OF_WORK = 0.1  # as MARGIN, of processor time: preempted work finds its caches cold, now more and now less
_SURE = 0.999  # where times are unsteady, or were looked at before: who looks often enough sees everything
_NEGLIGIBLE = 0.05  # what a challenger would gain at most, where it certainly does not win
_UNSTEADY = 1.25  # ratio of the quartiles of the shares from which on nine rounds of ten prove little
_MOST = 8  # times its first rounds that a duel lasts at most


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a challenger replaces the incumbent.

    Attributes:
        wins: Whether it does: it is faster by more than a tie, and that is no accident.
        speedup: How many times faster it is: the median over rounds of the incumbent's time over its own.
        confidence: One minus the probability that a challenger that is no faster is ahead in so many rounds.
        pairs: Rounds that both ran in.
        ahead: Rounds in which the challenger was faster.
        behind: Rounds in which the incumbent was.
        challenger: The challenger's median, seconds.
        incumbent: The incumbent's.
        settled: Whether the evidence is enough: that it wins or, as certainly, that it has little to gain. If not, the
            incumbent stays for want of evidence.
        judged_by: `clock`; or `processor`, where other processes disturbed the clock: then all these figures are of
            processor time.
    """

    wins: bool
    speedup: float
    confidence: float
    pairs: int
    ahead: int = 0
    behind: int = 0
    challenger: float = math.nan
    incumbent: float = math.nan
    settled: bool = False
    judged_by: str = CLOCK


def compare(
    challenger: Sequence[float],
    incumbent: Sequence[float],
    *,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """Compare samples that were taken in the same rounds, from the first on; ties go to the incumbent.

    The confidence is that of the exact one-sided sign test: rounds are counted in which the challenger was strictly
    faster. It assumes nothing of how times are distributed, and they have spikes, steps and drift, where a test of
    means, or of ranks, which needs symmetry, is wrong. Fewer than five pairs never reach 0.95. What it does assume is
    that the challenger was not chosen for these very samples: a winner among many needs a race of the two alone.

    The medians of both, which people see, must not say otherwise, or nothing is settled.

    Args:
        challenger, incumbent: Seconds; what the longer one has more is left out.
        margin: Share of the incumbent's time by which the challenger must be faster.
        confidence: The least confidence with which it wins, or is settled not to.
    """
    pairs = list(zip(challenger, incumbent, strict=False))
    if not pairs:
        return Verdict(wins=False, speedup=1.0, confidence=0.0, pairs=0)
    shares = _shares(pairs)
    share, mine, theirs = map(statistics.median, (shares, *zip(*pairs, strict=True)))
    ahead = sum(one < other for one, other in pairs)
    sure = _chance_of_fewer(ahead, len(pairs))
    wins = share < 1 - margin and mine < theirs and sure >= confidence
    stays = min(share, mine / theirs if theirs else 1.0) >= 1 - MARGIN
    return Verdict(
        wins=wins,
        speedup=1 / share if share else math.inf,
        confidence=sure,
        pairs=len(pairs),
        ahead=ahead,
        behind=sum(one > other for one, other in pairs),
        challenger=mine,
        incumbent=theirs,
        settled=wins or (stays and _at_least(shares, confidence) >= 1 - _NEGLIGIBLE),
    )


def judge(challenger: Sequence[Sample], incumbent: Sequence[Sample], *, again: bool = False) -> Verdict:
    """Compare samples of the same rounds by the witness that can be believed.

    That is the clock, unless other processes disturb it. Then the time that processors spent says more: that of the
    busiest thread, if that of all threads together does not say otherwise, as it may where one candidate is parallel
    and the other is not, and the clock does not either. Where they disagree, the clock must be surer.

    Args:
        challenger, incumbent: The samples; those that only one has are left out.
        again: Whether it is not the first look at these samples; then more is asked of them.
    """
    pairs = list(zip(challenger, incumbent, strict=False))
    mine, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    clock = [sample.seconds for sample in mine], [sample.seconds for sample in theirs]
    # Where the system does not tell of processor time, a disturbed clock only makes a duel longer.
    disturbed = is_disturbed((mine, theirs))
    sure = _SURE if again or disturbed or _is_unsteady(_shares(list(zip(*clock, strict=True)))) else CONFIDENCE
    by_clock = compare(*clock, confidence=sure)
    if not disturbed:
        return by_clock
    busiest, total = (
        compare(
            *([getattr(sample.work, name) for sample in samples] for samples in (mine, theirs)),
            margin=_MARGIN_OF_WORK,
            confidence=sure,
        )
        for name in ("busiest", "total")
    )
    by_work = dataclasses.replace(busiest, judged_by=PROCESSOR)
    opposed = compare(*(clock[::-1] if busiest.wins else clock)).wins
    if busiest.settled and busiest.wins == total.wins and not opposed:
        return by_work
    if by_clock.settled and not busiest.settled:
        return by_clock
    return dataclasses.replace(by_work, wins=False, settled=False)


class Duel(Race):
    """A race of two, the incumbent and then the challenger, that goes on until it is settled who wins.

    They take turns in being the first of a round: who comes second may find the machine in another state.

    Args:
        rounds: After so many it is looked at for the first time, and then after as many again, eight times at most.
        may_go_on: Asked, once those are over, before every further round.
    """

    def __init__(self, rounds: int, *, may_go_on: Callable[[], bool] = lambda: True) -> None:
        super().__init__(2, plan=RacePlan.fixed(rounds), incumbents=(0, 1))
        self._may_go_on = may_go_on

    def next_round(self) -> list[int]:
        """See `Race.next_round`; every other round is in reverse order."""
        return super().next_round()[:: -1 if self._round % 2 else 1]

    @property
    def verdict(self) -> Verdict:
        """What the samples say by now."""
        incumbent, challenger = self.noted
        return judge(challenger, incumbent, again=len(challenger) > self.plan.rounds)

    @property
    def judged(self) -> tuple[str, list[tuple[float, ...]]]:
        """By what the verdict was found, and the seconds of each that it tells; see `Race.judged`."""
        return self.told_by(self.verdict.judged_by)

    def _is_decided(self) -> bool:
        counted = self._round - self.plan.discard
        if len(self.running) < 2:
            return True
        if counted < self.plan.rounds:
            return False
        if counted % self.plan.rounds == 0 and self.verdict.settled:
            return True
        return counted >= _MOST * self.plan.rounds or not self._may_go_on()


def _shares(pairs: Sequence[tuple[float, ...]]) -> list[float]:
    """Return what part of the incumbent's time the challenger took in each round, in order of size."""
    return sorted(mine / theirs if theirs else math.inf for mine, theirs in pairs)


def _is_unsteady(shares: Sequence[float]) -> bool:
    count = len(shares)
    return count > 0 and shares[3 * count // 4] > _UNSTEADY * shares[count // 4]


def _chance_of_fewer(heads: int, tosses: int) -> float:
    """Return the probability of fewer heads than that."""
    return float(sum(math.comb(tosses, k) for k in range(heads)) / 2**tosses)


def _at_least(shares: Sequence[float], confidence: float) -> float:
    """Return what the median share certainly is not below, if the sign test is to be as sure as that; 0 if nothing."""
    least, tosses, ways = 0.0, 2 ** len(shares), 0
    for below, share in enumerate(shares):
        ways += math.comb(len(shares), below)
        if ways / tosses > 1 - confidence:
            break
        least = share
    return least
