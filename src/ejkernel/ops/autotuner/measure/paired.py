# SPDX-License-Identifier: Apache-2.0
"""The paired comparison of a challenger with the incumbent: pure logic, without a clock."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from ejkernel.ops.autotuner.measure.sampling import CLOCK, PROCESSOR, Sample, Sampling, SamplingPlan, is_disturbed

# A configuration beats itself in at most one of 10,000 comparisons of fifteen rounds; by medians alone, in a third to
# half of them.
MARGIN = 0.02  # a smaller difference is a tie
CONFIDENCE = 0.95
_MARGIN_OF_WORK = 0.1  # MARGIN for processor time, which varies more: preempted work finds cold caches
# MARGIN for a challenger that takes notably more memory. Such a candidate may be the faster one alone and the slower
# one in a program, e.g. because an array that exceeds the allocator's threshold is mapped anew in each step.
_MARGIN_OF_MEMORY = 0.05
_MARGIN_OF_BOTH = 0.15  # by processor time, for such a challenger
_SURE = 0.999  # confidence for unsteady times and repeated looks at the samples (multiple comparisons)
_NEGLIGIBLE = 0.05  # largest possible gain of a challenger that is settled not to win
_DOUBT = _NEGLIGIBLE - MARGIN  # how far beyond a tie the gain of such a challenger may be
_UNSTEADY = 1.25  # ratio of the quartiles of the shares above which nine rounds of ten prove little
_NARROW = 0.02  # half the width of an interval that is shown as a deviation
_LEAST = 1e-9  # of a share: a clock may read no time at all
_MOST = 8  # maximum length of a paired sampling, as a multiple of its first rounds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """The result of a comparison of a challenger with the incumbent.

    Attributes:
        wins: Whether the challenger replaces the incumbent: it is faster by more than a tie, with enough confidence.
        speedup: The median over rounds of the incumbent's time divided by the challenger's.
        confidence: One minus the probability that an equally fast challenger is ahead in as many rounds.
        pairs: Rounds with a sample of both.
        ahead: Rounds with a faster challenger.
        behind: Rounds with a faster incumbent.
        challenger: The challenger's median, seconds.
        incumbent: The incumbent's median, seconds.
        settled: Whether the evidence suffices: the challenger wins or, with the same confidence, has little to gain. If
            not settled, the incumbent stays.
        judged_by: `clock`, or `processor` if other processes disturbed the clock; then all figures are processor time.
        doubt: Why it is not settled; empty if it is.
        interval: The 95 % interval of `speedup`; `None` with too few rounds.
        more_bytes: Bytes that the challenger takes more than the incumbent, which raise `least`; 0 if not notably more.
    """

    wins: bool
    speedup: float
    confidence: float
    pairs: int
    ahead: int = 0
    behind: int = 0
    challenger: float = 0.0
    incumbent: float = 0.0
    settled: bool = False
    judged_by: str = CLOCK
    doubt: str = ""
    interval: tuple[float, float] | None = None
    more_bytes: int = 0

    @property
    def is_tie(self) -> bool:
        """Whether the incumbent stays because no difference was found, rather than as the faster one."""
        if not self.settled or self.wins or self.interval is None:
            return False
        return self.interval[0] <= 1 <= self.interval[1] and self.speedup >= 1 - _NEGLIGIBLE

    @property
    def in_words(self) -> str:
        """The speed-up with its interval: `1.00x ± 0.3 %` or, if it is wide, `1.11x (1.02 to 1.34)`."""
        if self.interval is None:
            return f"{self.speedup:.2f}x"
        low, high = self.interval
        half = (high - low) / 2 / self.speedup
        around = f" ± {100 * half:.1f} %" if half < _NARROW else f" ({low:.2f} to {high:.2f})"
        return f"{self.speedup:.2f}x{around}"

    @property
    def least(self) -> float:
        """The least speed-up that wins."""
        return 1 / (1 - margin_of(self.judged_by, takes_more=self.more_bytes > 0))


def margin_of(clock: str, *, takes_more: bool) -> float:
    """Return how much faster a challenger must be, as a share of the incumbent's time.

    Args:
        clock: `clock` or `processor`, the clock of the times.
        takes_more: Whether the challenger takes notably more memory than the incumbent.
    """
    if clock == PROCESSOR:
        return _MARGIN_OF_BOTH if takes_more else _MARGIN_OF_WORK
    return _MARGIN_OF_MEMORY if takes_more else MARGIN


def compare(
    challenger: Sequence[float],
    incumbent: Sequence[float],
    *,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
    is_last: bool = False,
    more_bytes: int = 0,
) -> PairedComparison:
    """Compare samples of the same rounds; ties go to the incumbent.

    The confidence is that of the exact one-sided sign test, which counts rounds with a strictly faster challenger. The
    test assumes no distribution. Times have spikes, steps and drift, which break tests of means and tests of ranks
    (those need symmetry). Fewer than five pairs never reach 0.95. The samples must not be those that selected the
    challenger: the winner among many candidates needs another sampling against the incumbent alone.

    The reported medians must agree with the test, or the comparison is not settled. After the last round, a tie needs
    less: the incumbent stays either way, and no later look at the samples can follow.

    Args:
        challenger, incumbent: Seconds per round; extra samples of the longer one are ignored.
        margin: Share of the incumbent's time by which the challenger must be faster.
        confidence: The least confidence that settles the comparison.
        is_last: Whether these are the final samples.
        more_bytes: Bytes that the challenger takes notably more than the incumbent. With any, a larger lead is a tie,
            and only rounds with a larger one count for the challenger.
    """
    pairs = list(zip(challenger, incumbent, strict=False))
    if not pairs:
        return PairedComparison(wins=False, speedup=1.0, confidence=0.0, pairs=0, more_bytes=more_bytes)
    tie = _MARGIN_OF_MEMORY if more_bytes else MARGIN
    margin, negligible = max(margin, tie), tie + _DOUBT
    shares = _shares(pairs)
    share, mine, theirs = map(statistics.median, (shares, *zip(*pairs, strict=True)))
    ahead = sum(one < other for one, other in pairs)
    sure = _chance_of_fewer(ahead, len(pairs))
    clear = sum(one < other * (1 - margin) for one, other in pairs) if more_bytes else ahead
    surely = _chance_of_fewer(clear, len(pairs))
    wins = share < 1 - margin and mine < theirs and surely >= confidence
    by_medians = mine / theirs if theirs else 1.0
    stays = share >= 1 - tie and by_medians >= 1 - (negligible if is_last else tie)
    gain = 1 - _at_least(shares, min(confidence, CONFIDENCE) if is_last else confidence)
    settled = wins or (stays and gain <= (max(negligible, margin) if is_last else negligible))
    return PairedComparison(
        wins=wins,
        speedup=1 / max(share, _LEAST),
        confidence=sure,
        pairs=len(pairs),
        ahead=ahead,
        behind=sum(one > other for one, other in pairs),
        challenger=mine,
        incumbent=theirs,
        settled=settled,
        doubt="" if settled else _doubt(share, margin, surely, confidence, gain, mine < theirs),
        interval=_interval(shares),
        more_bytes=more_bytes,
    )


def _doubt(share: float, margin: float, sure: float, confidence: float, gain: float, has_lower_median: bool) -> str:
    """Return why a comparison is not settled; `gain` is the largest share of the time that it may save."""
    if share >= 1 - margin:
        slower = "it is slower in the median round" if share > 1 else "too few rounds to tell"
        return f"it may take up to {gain:.0%} less time" if gain < 1 else slower
    if not has_lower_median:
        return "it is ahead in the median round, but its median time is not shorter"
    enough = f" by {margin:.0%}" if margin not in (MARGIN, _MARGIN_OF_WORK) else ""
    return f"the confidence that it is faster{enough} is {sure:.2%}, and {confidence:.1%} is needed"


def judge(
    challenger: Sequence[Sample],
    incumbent: Sequence[Sample],
    *,
    again: bool = False,
    is_last: bool = False,
    more_bytes: int = 0,
) -> PairedComparison:
    """Compare samples of the same rounds by clock time or, if other processes disturb the clock, by processor time.

    Processor time means that of the busiest thread. It decides only if neither the clock nor the total of all threads
    contradicts it; the total may, for example if only one candidate is parallel. Otherwise the clock decides, with a
    higher confidence. After the last round, more rounds cannot resolve a contradiction, so the clock also decides it:
    against the challenger, and for it if the time of the busiest thread agrees.

    Args:
        challenger, incumbent: The samples; extra samples of the longer one are ignored.
        again: Whether these samples were compared before; then a higher confidence is required.
        is_last: Whether these are the final samples.
        more_bytes: As in `compare`.
    """
    pairs = list(zip(challenger, incumbent, strict=False))
    mine, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    clock = [sample.seconds for sample in mine], [sample.seconds for sample in theirs]
    # On systems without processor times, a disturbed clock only prolongs the sampling.
    disturbed = is_disturbed((mine, theirs))
    sure = _SURE if again or disturbed or _is_unsteady(_shares(list(zip(*clock, strict=True)))) else CONFIDENCE
    by_clock = compare(*clock, confidence=sure, is_last=is_last, more_bytes=more_bytes)
    if not disturbed:
        return by_clock
    busiest, total = (
        compare(
            *([getattr(sample.work, name) for sample in samples] for samples in (mine, theirs)),
            margin=margin_of(PROCESSOR, takes_more=more_bytes > 0),
            confidence=sure,
            is_last=is_last,
            more_bytes=more_bytes,
        )
        for name in ("busiest", "total")
    )
    by_work = dataclasses.replace(busiest, judged_by=PROCESSOR)
    opposed = compare(*(clock[::-1] if busiest.wins else clock)).wins
    if busiest.settled and busiest.wins == total.wins and not opposed:
        return by_work
    if by_clock.settled and (not busiest.settled or (is_last and (busiest.wins or not by_clock.wins))):
        return by_clock
    if opposed:
        shown = "shows that it is faster" if busiest.wins else "does not show that it is faster"
        other = f"shows that it is {'slower' if busiest.wins else 'faster'} ({by_clock.speedup:.2f}x)"
        doubt = f"processor time {shown}, but the clock, which other processes disturbed, {other}"
    elif busiest.settled:
        doubt = (
            f"that is the processor time of its busiest thread; that of all its threads shows {total.speedup:.2f}x, "
            f"and both must show {by_work.least:.2f}x"
        )
    else:
        doubt = busiest.doubt
    return dataclasses.replace(by_work, wins=False, settled=False, doubt=doubt)


class PairedSampling(Sampling):
    """A sampling of the incumbent (index 0) and a challenger (index 1) that runs until the comparison is settled.

    They alternate in starting a round, because the first may change the state of the machine for the second.

    Args:
        rounds: Rounds between two looks at the samples; the sampling ends after eight times as many.
        more_bytes: As in `compare`.
        may_go_on: Called before each round after the first `rounds`; false ends the sampling.
    """

    def __init__(self, rounds: int, *, more_bytes: int = 0, may_go_on: Callable[[], bool] = lambda: True) -> None:
        super().__init__(2, plan=SamplingPlan.fixed(rounds), incumbents=(0, 1))
        self._more_bytes = more_bytes
        self._may_go_on = may_go_on

    def _in_order(self, indices: list[int]) -> list[int]:
        """Return them in reverse order in every second round."""
        return indices[:: -1 if self._round % 2 else 1]

    @property
    def progress(self) -> tuple[int, int]:
        """The finished rounds, and the rounds until the next look at the samples."""
        done, first = super().progress
        looks = math.ceil(max(1, done - self.plan.discard) / self.plan.rounds)
        return done, first + (looks - 1) * self.plan.rounds

    @property
    def comparison(self) -> PairedComparison:
        """The comparison of the samples so far."""
        incumbent, challenger = self.noted
        again = len(challenger) > self.plan.rounds
        found = judge(challenger, incumbent, again=again, more_bytes=self._more_bytes)
        if found.settled or not self._is_over():
            return found
        return judge(challenger, incumbent, again=again, is_last=True, more_bytes=self._more_bytes)

    @property
    def judged(self) -> tuple[str, list[tuple[float, ...]]]:
        """The clock of the comparison, and the seconds of both candidates by it; see `Sampling.judged`."""
        return self.seconds_by(self.comparison.judged_by)

    def _is_decided(self) -> bool:
        counted = self._round - self.plan.discard
        if len(self.running) < 2:
            return True
        if counted < self.plan.rounds:
            return False
        if counted % self.plan.rounds == 0 and self.comparison.settled:
            return True
        return self._is_over()

    def _is_over(self) -> bool:
        """Return whether the sampling ends here, at its round or time limit."""
        counted = self._round - self.plan.discard
        return counted >= _MOST * self.plan.rounds or (counted >= self.plan.rounds and not self._may_go_on())


def _shares(pairs: Sequence[tuple[float, ...]]) -> list[float]:
    """Return the challenger's time divided by the incumbent's for each round, in ascending order."""
    return sorted(mine / theirs if theirs else math.inf for mine, theirs in pairs)


def _is_unsteady(shares: Sequence[float]) -> bool:
    count = len(shares)
    return count > 0 and shares[3 * count // 4] > _UNSTEADY * shares[count // 4]


def _chance_of_fewer(heads: int, tosses: int) -> float:
    """Return the probability of fewer than `heads` heads in `tosses` tosses."""
    return float(sum(math.comb(tosses, k) for k in range(heads)) / 2**tosses)


def _interval(shares: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the speed-up by the sign test, from shares in ascending order."""
    half = 1 - (1 - CONFIDENCE) / 2
    least_share = _at_least(shares, half)
    least = _at_least([1 / share if share else math.inf for share in reversed(shares)], half)
    return (least, 1 / least_share) if least_share > 0 and 0 < least < math.inf else None


def _at_least(shares: Sequence[float], confidence: float) -> float:
    """Return a lower bound of the median share by the sign test with this confidence; 0 if too few rounds."""
    least, tosses, ways = 0.0, 2 ** len(shares), 0
    for below, share in enumerate(shares):
        ways += math.comb(len(shares), below)
        if ways / tosses > 1 - confidence:
            break
        least = share
    return least
