# SPDX-License-Identifier: Apache-2.0
"""Which candidates deserve another sample: pure logic, without a clock. `paired.py` says whether a winner is one.

`benchmarks/noise.py` replays it on recorded samples of real GPUs; the defaults of `RacePlan` come from there.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Sequence

from ejkernel.ops.errors import ConfigError

CLOCK, PROCESSOR = "clock", "processor"
_UNSTEADY = 1.25  # times its least that a share varies by where other processes disturb it
MOSTLY_WAITS = 250.0  # times its processor time that a call takes which is not a matter of processors at all


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Processor time that a sample took, seconds a call. Whoever preempts the sample does not add to it.

    It is noted beside each sample, but not believed by itself: what waits, or is parallel, takes another time than it
    works. As long as each candidate's clock and work keep their ratio, the clock decides.

    Attributes:
        busiest: Of the thread that worked most: as long as the call takes on a quiet machine, where its threads work
            side by side.
        total: Of all threads of the process.
    """

    busiest: float
    total: float


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """How long a call took, and its processor time where that is known and says something.

    Of a candidate that is measured on several cases these are means, and `cases` has the sample of each.
    """

    seconds: float
    work: Work | None = None
    cases: tuple[Sample, ...] = ()


def work_of(samples: Sequence[Sample]) -> list[float]:
    """Return the processor time of each sample, that of its busiest thread; nothing where it does not tell the time.

    It does not where the system is silent, and for calls that wait most of their time, for a callback or a disk.
    """
    work = [sample.work.busiest for sample in samples if sample.work is not None]
    if not samples or len(work) < len(samples) or min(work) <= 0:
        return []
    stretch = min(sample.seconds / busiest for sample, busiest in zip(samples, work, strict=True))
    return work if 0 < stretch <= MOSTLY_WAITS else []


def is_disturbed(noted: Iterable[Sequence[Sample]]) -> bool:
    """Return whether other processes held the samples up, so that the clock told of them as much as of the candidates.

    On a quiet machine the clock and the busiest thread agree, but for a factor that each candidate keeps.

    Args:
        noted: The samples of each candidate.
    """
    # With 14 busy processes on two cores, a call of 0.2 ms took 0.2 to 30 ms, and of two that were 1.5 times apart each
    # was ahead in half of the rounds: by the clock alone, a heuristic that was 1.5 times slower than the other was kept
    # in 13 of 14 searches (benchmarks/under_load.py).
    excess: list[float] = []
    for samples in filter(None, noted):
        stretches = [s.seconds / busiest for s, busiest in zip(samples, work_of(samples), strict=False)]
        if not stretches:
            return False
        excess += [stretch / min(stretches) for stretch in stretches]
    return bool(excess) and sorted(excess)[3 * len(excess) // 4] > _UNSTEADY


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RacePlan:
    """How many samples a race spends, and on whom.

    The first stage gives every candidate a few samples, and lets go of losers as early as it can. The second measures
    the finalists in turns, spread over the rest of the race, so that a change of the machine's clock hits all alike.

    Attributes:
        rounds: Samples of a finalist, those that are discarded apart.
        discard: First samples of each candidate that do not count: clocks, caches and pages are not warm yet.
        keep: `(samples, candidates)`: after so many samples, at most so many candidates stay; the incumbents apart.
        hopeless: `(samples, ratio)`: after so many samples, who was never faster than `ratio` times the leader goes.
        trim: Share of the samples left out at each end before their mean is taken.
        median_share: Weight of the median beside that mean, in the figure that candidates are ranked by. Spikes must
            not count, so it cannot be the mean of all. But where the clock steps between two speeds, the median of
            samples that are half of the one and half of the other is a coin toss: half-way between the two is better.
    """

    # Replayed on six recorded spaces, picking among 100, the pick of these defaults is on average nowhere slower than
    # that of a median of ten, for 22 to 54 % of its samples: its regret against held-out samples is 0.69 % where that
    # one's is 1.02 % on the board whose clock steps, 0.21 % for 0.56 % on the one that heats up, and within 0.05 % of
    # it elsewhere. No way of measuring foresees a step: against samples that come after, this one loses 2.8 %, a median
    # of ten 3.4 %. The defaults were looked for on these spaces; options chosen on one kernel and replayed on the other
    # lose 0.05 % to the median of ten on one space of six. What interleaving adds the replay cannot show, because the
    # samples were not recorded in turns.
    rounds: int = 15
    # The first sample is typically 12 % too low on one of the recorded boards, and on another 18 % too high in one case
    # of twenty.
    discard: int = 1
    keep: tuple[tuple[int, int], ...] = ((3, 24), (6, 12))
    hopeless: tuple[tuple[int, float], ...] = ((1, 3.0), (2, 2.0), (3, 1.25))
    trim: float = 0.125
    median_share: float = 0.5

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.discard < 0:
            raise ConfigError(f"rounds must be positive and discard >= 0, got {self.rounds!r} and {self.discard!r}.")
        if not 0 <= self.trim <= 0.5:
            raise ConfigError(f"trim must be in 0 ... 0.5, got {self.trim!r}.")
        if not 0 <= self.median_share <= 1:
            raise ConfigError(f"median_share must be in 0 ... 1, got {self.median_share!r}; 1 ranks by the median.")
        if not all(samples >= 1 and most >= 1 for samples, most in self.keep):
            raise ConfigError(f"keep must hold pairs (samples, candidates) of positive integers, got {self.keep!r}.")
        if not all(samples >= 1 and ratio >= 1 for samples, ratio in self.hopeless):
            raise ConfigError(f"hopeless must hold pairs (samples >= 1, ratio >= 1), got {self.hopeless!r}.")

    @classmethod
    def fixed(cls, rounds: int, *, discard: int = 1) -> RacePlan:
        """Return the plan that gives every candidate `rounds` samples."""
        return cls(rounds=rounds, discard=discard, keep=(), hopeless=())

    def center(self, samples: Sequence[float]) -> float:
        """Return the figure that candidates are ranked by, of one candidate's samples."""
        count, ordered = len(samples), sorted(samples)
        cut = min((count - 1) // 2, math.ceil(self.trim * count))
        mean = statistics.fmean(ordered[cut : count - cut])
        return self.median_share * statistics.median(ordered) + (1 - self.median_share) * mean

    def most(self, samples: int, count: int) -> int:
        """Return how many of `count` candidates may stay after so many samples."""
        return min([count, *(most for after, most in self.keep if after <= samples)])

    def ratio(self, samples: int) -> float:
        """Return the ratio to the leader beyond which a candidate is hopeless after so many samples."""
        return min((ratio for after, ratio in self.hopeless if after <= samples), default=math.inf)


class Race:
    """Decides round by round which of `count` candidates are sampled, from the samples alone.

    Equal samples give equal decisions. An incumbent is sampled in every round, though it may have lost long ago: the
    winner is compared with it round by round.

        while indices := race.next_round():
            for index in indices:
                race.note(index, measure(index))

    Args:
        count: How many candidates there are.
        plan: How many samples are spent, and on whom.
        incumbents: Candidates that are never dropped.

    Raises:
        ConfigError: an incumbent is not a candidate.
    """

    def __init__(self, count: int, *, plan: RacePlan | None = None, incumbents: Collection[int] = (0,)) -> None:
        if count and not all(0 <= index < count for index in incumbents):
            raise ConfigError(f"incumbents must be among the {count} candidates, got {sorted(incumbents)}.")
        self.plan = RacePlan() if plan is None else plan
        self._incumbents = frozenset(incumbents) if count else frozenset()
        self._samples: list[list[Sample]] = [[] for _ in range(count)]
        self._alive = list(range(count))
        self._failed: set[int] = set()
        self._stayed: dict[int, int] = {}  # rounds that a candidate stayed for
        self._round = 0  # the number of samples that each live candidate has, those that are discarded included
        self._pending: set[int] = set()

    @property
    def count(self) -> int:
        """How many candidates there are."""
        return len(self._samples)

    @property
    def running(self) -> list[int]:
        """Who is still in the race, the incumbents included, in order."""
        return sorted(self._runners())

    @property
    def samples(self) -> list[tuple[float, ...]]:
        """Seconds that were noted of each candidate, in order, without what is discarded."""
        return [tuple(sample.seconds for sample in samples) for samples in self.noted]

    @property
    def noted(self) -> list[tuple[Sample, ...]]:
        """All that was noted of each candidate, in order, without what is discarded."""
        return [tuple(samples[self.plan.discard :]) for samples in self._samples]

    @property
    def judged(self) -> tuple[str, list[tuple[float, ...]]]:
        """By what candidates are ranked, `clock` or `processor`, and the seconds of each that it tells.

        It is the clock, unless other processes disturb it.
        """
        return self.seconds_by(PROCESSOR if is_disturbed(self.noted) else CLOCK)

    def seconds_by(self, witness: str) -> tuple[str, list[tuple[float, ...]]]:
        """Return `witness` (`clock` or `processor`) and the seconds of each candidate by that clock."""
        if witness == CLOCK:
            return witness, self.samples
        return witness, [tuple(work_of(samples)) for samples in self.noted]

    def next_round(self) -> list[int]:
        """Return who is to be sampled once now, in order; nobody once the race is decided.

        Before all of a round are noted (or failed), the rest of that round is returned.
        """
        if not self._pending and not self._is_decided():
            self._drop_losers()
            if not self._is_decided():
                self._round += 1
                self._pending = self._runners()
        return sorted(self._pending)

    def note(self, index: int, seconds: float, work: Work | None = None, cases: tuple[Sample, ...] = ()) -> None:
        """Note a sample of a candidate that this round asked for, and its processor time where that is known.

        Where the sample is a mean, `cases` are what it is the mean of.

        Raises:
            ConfigError: it did not ask, or `seconds` is not a positive finite number.
        """
        if index not in self._pending:
            raise ConfigError(f"index must be one of next_round()'s {sorted(self._pending)}, got {index!r}.")
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"seconds must be a finite number >= 0, got {seconds!r}.")
        self._pending.discard(index)
        self._samples[index].append(Sample(seconds, work, cases))

    def fail(self, index: int) -> None:
        """Take a candidate out of the race for good, an incumbent too: it can no longer be measured."""
        self._failed.add(index)
        self._pending.discard(index)
        self._alive = [other for other in self._alive if other != index]
        self._stayed.pop(index, None)

    def drop(self, index: int) -> None:
        """Give a candidate no further samples, because the caller knows better; an incumbent has them all the same."""
        if index in self._alive:
            self._alive.remove(index)
            self._stayed[index] = len(self.samples[index])

    def restart(self) -> None:
        """Forget all samples, because they cannot be compared with those to come; who failed stays out."""
        self._samples = [[] for _ in self._samples]
        self._alive = [index for index in range(len(self._samples)) if index not in self._failed]
        self._stayed, self._round, self._pending = {}, 0, set()

    def ranking(self) -> list[int]:
        """Return the candidates that have a sample and did not fail, the best first.

        Those that stayed longer come first; of equals those whose figure, `RacePlan.center`, is less; then by index.
        """
        _, samples = self.judged
        stayed = {index: len(values) for index, values in enumerate(samples) if values} | self._stayed
        keys = {
            index: (-rounds, self.plan.center(samples[index][:rounds]))
            for index, rounds in stayed.items()
            # One that was dropped while it warmed up has no samples: nothing is known of it.
            if rounds and index not in self._failed
        }
        return sorted(keys, key=lambda index: (*keys[index], index))

    def _runners(self) -> set[int]:
        return set(self._alive) | (self._incumbents - self._failed)

    def _is_decided(self) -> bool:
        """Return whether the plan is spent, nobody is left, or an incumbent is alone and has shown that it is best."""
        if self._round >= self.plan.rounds + self.plan.discard or not self._runners():
            return True
        return self._round - self.plan.discard >= self._few() and len(self._runners()) == 1

    def _few(self) -> int:
        """Return after how many samples the plan has made all of its distinctions."""
        return max((after for after, _ in (*self.plan.hopeless, *self.plan.keep)), default=self.plan.rounds)

    def _drop_losers(self) -> None:
        counted = self._round - self.plan.discard
        if counted < 1 or not self._alive:
            return
        noted, (_, samples) = self.noted, self.judged
        figures = {index: self.plan.center(samples[index]) for index in self._alive}
        ordered = sorted(self._alive, key=lambda index: (figures[index], index))
        leader = noted[ordered[0]]
        near = (index for index in ordered[: self.plan.most(counted, len(ordered))] if self._near(noted[index], leader))
        staying = {ordered[0], *near}
        self._stayed |= {index: counted for index in ordered if index not in staying}
        self._alive = sorted(staying)

    def _near(self, mine: Sequence[Sample], leader: Sequence[Sample]) -> bool:
        """Return whether a candidate is not hopeless: by the clock or, for that may have been held up, by its work."""
        ratio = self.plan.ratio(len(mine))
        if min(sample.seconds for sample in mine) <= ratio * self.plan.center([s.seconds for s in leader]):
            return True
        # Dropped early by both or not at all.
        work, best = work_of(mine), work_of(leader)
        return bool(work and best) and min(work) <= ratio * self.plan.center(best)
