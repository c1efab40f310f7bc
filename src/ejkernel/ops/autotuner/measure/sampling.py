# SPDX-License-Identifier: Apache-2.0
"""Decides which candidates get another sample: pure logic, without a clock. `paired.py` confirms the winner.

`benchmarks/noise.py` replays this logic on recorded samples of real GPUs, which gave the defaults of `SamplingPlan`.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Collection, Iterable, Sequence

from ejkernel.ops.utils.formatting import counted

CLOCK, PROCESSOR = "clock", "processor"
_UNSTEADY = 1.25  # clock time over processor time, relative to its minimum: beyond this, other processes disturb
MOSTLY_WAITS = 250.0  # a call this many times longer than its processor time mostly waits


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Processor time of a sample in seconds per call; preemption by other processes does not add to it.

    It complements the clock: waiting and parallel calls take another time than their processor time. As long as the
    ratio of clock to processor time is constant for each candidate, the clock decides.

    Attributes:
        busiest: Time of the busiest thread; on a quiet machine with parallel threads, the duration of the call.
        total: Time of all threads of the process.
    """

    busiest: float
    total: float


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The time of one call, and its processor time if known.

    If a candidate is measured on several cases, both are means, and `cases` has one sample for each case.
    """

    seconds: float
    work: Work | None = None
    cases: tuple[Sample, ...] = ()


def work_of(samples: Sequence[Sample]) -> list[float]:
    """Return the processor time of each sample's busiest thread; empty if it does not reflect the duration.

    The result is empty if the system does not report processor time, and for calls that mostly wait, e.g. for a
    callback or a disk.
    """
    work = [sample.work.busiest for sample in samples if sample.work is not None]
    if not samples or len(work) < len(samples) or min(work) <= 0:
        return []
    stretch = min(sample.seconds / busiest for sample, busiest in zip(samples, work, strict=True))
    return work if 0 < stretch <= MOSTLY_WAITS else []


def is_disturbed(noted: Iterable[Sequence[Sample]]) -> bool:
    """Return whether other processes delayed the samples so much that the clock cannot rank the candidates.

    On a quiet machine, clock time agrees with processor time up to a constant factor per candidate: with that of the
    busiest thread, or with that of all threads if the calls of a sample share them in another way each time. Waiting
    for a processor adds to the clock beside both.

    Args:
        noted: The samples of each candidate.
    """
    # With 14 busy processes on two cores, a call of 0.2 ms took 0.2 to 30 ms. Two candidates that differed by a factor
    # of 1.5 were each ahead in half of the rounds: by the clock alone, 13 of 14 searches kept a heuristic that was 1.5
    # times slower than the best candidate (benchmarks/under_load.py).
    excess: list[float] = []
    for samples in filter(None, noted):
        if not work_of(samples):
            return False
        works = [(sample.seconds, sample.work) for sample in samples if sample.work is not None]
        by_busiest = _relative(seconds / work.busiest for seconds, work in works)
        by_total = _relative(seconds / work.total for seconds, work in works)
        excess += map(min, by_busiest, by_total)
    return bool(excess) and sorted(excess)[3 * len(excess) // 4] > _UNSTEADY


def _relative(values: Iterable[float]) -> list[float]:
    """Return positive values divided by the least of them."""
    found = list(values)
    return [value / min(found) for value in found]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """The number of samples per candidate, with early stopping.

    The first stage gives every candidate a few samples and drops losers as early as possible. The second stage measures
    the finalists in interleaved rounds, so that a change of the clock frequency affects all alike.

    Attributes:
        rounds: Samples of a finalist, without the discarded ones.
        discard: Number of first samples of each candidate to ignore: clocks, caches and pages are not warm yet.
        keep: `(samples, candidates)`: after so many samples, at most so many candidates stay, not counting incumbents.
        hopeless: `(samples, ratio)`: after so many samples, a candidate is dropped if even its fastest sample takes
            more than `ratio` times the leader's time.
        trim: Share of the samples left out at each end for the trimmed mean.
        median_share: Weight of the median in the ranking figure; the trimmed mean has the rest. Both ignore spikes. If
            the clock frequency steps between two speeds, the median of a half-and-half sample is a coin toss, while
            the trimmed mean lies between the two.
    """

    # Replay on six recorded spaces, choosing among 100 configurations, against the median of ten samples: the defaults
    # take 22 to 54 % of the samples, and their choice is on average nowhere slower. Their regret on held-out samples is
    # 0.69 % against 1.02 % on the board with clock steps, 0.21 % against 0.56 % on the board that heats up, and within
    # 0.05 % elsewhere. No method foresees a clock step: on samples taken afterwards, the defaults lose 2.8 %, the
    # median of ten 3.4 %. The defaults were fitted to these spaces; options fitted to one kernel and replayed on the
    # other lose 0.05 % to the median of ten on one space of six. The replay cannot show the benefit of interleaving,
    # because the samples were not recorded interleaved.
    rounds: int = 15
    # On one recorded board the first sample is typically 12 % too low, on another 18 % too high in one case of twenty.
    discard: int = 1
    keep: tuple[tuple[int, int], ...] = ((3, 24), (6, 12))
    hopeless: tuple[tuple[int, float], ...] = ((1, 3.0), (2, 2.0), (3, 1.25))
    trim: float = 0.125
    median_share: float = 0.5

    @classmethod
    def fixed(cls, rounds: int, *, discard: int = 1) -> SamplingPlan:
        """Return the plan that gives every candidate `rounds` samples."""
        return cls(rounds=rounds, discard=discard, keep=(), hopeless=())

    def center(self, samples: Sequence[float]) -> float:
        """Return the time by which a candidate is ranked: between the trimmed mean and the median of its samples."""
        count, ordered = len(samples), sorted(samples)
        cut = min((count - 1) // 2, math.ceil(self.trim * count))
        mean = statistics.fmean(ordered[cut : count - cut])
        return self.median_share * statistics.median(ordered) + (1 - self.median_share) * mean

    def most(self, samples: int, count: int) -> int:
        """Return the largest number of candidates, of `count`, to keep after `samples` samples."""
        return min([count, *(most for after, most in self.keep if after <= samples)])

    def ratio(self, samples: int) -> float:
        """Return the ratio to the leader's time beyond which a candidate is dropped after `samples` samples."""
        return min((ratio for after, ratio in self.hopeless if after <= samples), default=math.inf)


class Sampling:
    """Decides round by round which of `count` candidates are sampled.

    Decisions depend on the samples only. An incumbent is sampled in every round, even if it is slow: the winner is
    compared with it round by round.

        while indices := sampling.next_round():
            for index in indices:
                sampling.note(index, measure(index))

    Args:
        count: Number of candidates.
        plan: Number of samples per candidate, and when to drop slow ones.
        incumbents: Indices of candidates that are never dropped.
    """

    def __init__(self, count: int, *, plan: SamplingPlan | None = None, incumbents: Collection[int] = (0,)) -> None:
        self.plan = SamplingPlan() if plan is None else plan
        self._incumbents = frozenset(incumbents) if count else frozenset()
        self._samples: list[list[Sample]] = [[] for _ in range(count)]
        self._alive = list(range(count))
        self._failed: set[int] = set()
        self._stayed: dict[int, int] = {}  # number of rounds before a candidate was dropped
        self._round = 0  # number of samples of each live candidate, including discarded ones
        self._pending: set[int] = set()

    @property
    def running(self) -> list[int]:
        """The indices of candidates not dropped, including incumbents, in order."""
        return sorted(self._runners())

    @property
    def progress(self) -> tuple[int, int]:
        """The finished rounds, and all rounds of the plan; both include discarded ones."""
        return max(0, self._round - bool(self._pending)), self.plan.rounds + self.plan.discard

    @property
    def samples(self) -> list[tuple[float, ...]]:
        """The times of each candidate in seconds, without discarded samples."""
        return [tuple(sample.seconds for sample in samples) for samples in self.noted]

    @property
    def noted(self) -> list[tuple[Sample, ...]]:
        """The samples of each candidate, without discarded ones."""
        return [tuple(samples[self.plan.discard :]) for samples in self._samples]

    @property
    def judged(self) -> tuple[str, list[tuple[float, ...]]]:
        """The timer that ranks the candidates, `clock` or `processor`, and their times by it in seconds.

        The clock is used unless other processes disturb it.
        """
        return self.seconds_by(PROCESSOR if is_disturbed(self.noted) else CLOCK)

    def seconds_by(self, witness: str) -> tuple[str, list[tuple[float, ...]]]:
        """Return `witness` (`clock` or `processor`) and the times of each candidate by it, in seconds."""
        if witness == CLOCK:
            return witness, self.samples
        return witness, [tuple(work_of(samples)) for samples in self.noted]

    def next_round(self) -> list[int]:
        """Return the indices of the candidates to sample now, in order; empty once the sampling is decided.

        While samples of a round are missing, this returns the rest of that round.
        """
        if not self._pending and not self._is_decided():
            self._drop_losers()
            if not self._is_decided():
                self._round += 1
                self._pending = self._runners()
        return self._in_order(sorted(self._pending))

    def _in_order(self, indices: list[int]) -> list[int]:
        """Return the rest of a round in its order: a different one in each round, after the first samples.

        A candidate may change the state of the machine for the next, e.g. fill its caches. In a fixed order, a kernel
        behind a candidate with large temporary arrays took 78 us, and the same kernel elsewhere 46.
        """
        if self._round <= self.plan.discard + 1:
            return indices
        return sorted(indices, key=lambda index: random.Random(f"{self._round} {index}").random())

    def note(self, index: int, seconds: float, work: Work | None = None, cases: tuple[Sample, ...] = ()) -> None:
        """Record a sample of a candidate of this round, and its processor time if known.

        If the sample is a mean over cases, `cases` holds their samples.
        """
        self._pending.remove(index)
        self._samples[index].append(Sample(seconds, work, cases))

    def fail(self, index: int) -> None:
        """Remove a candidate that can no longer be measured, even an incumbent."""
        self._failed.add(index)
        self._pending.discard(index)
        self._alive = [other for other in self._alive if other != index]
        self._stayed.pop(index, None)

    def drop(self, index: int) -> None:
        """Stop sampling a candidate at the caller's request; an incumbent is still sampled."""
        if index in self._alive:
            self._alive.remove(index)
            self._stayed[index] = len(self.samples[index])

    def restart(self) -> None:
        """Discard all samples, because later samples are not comparable; failed candidates stay out."""
        self._samples = [[] for _ in self._samples]
        self._alive = [index for index in range(len(self._samples)) if index not in self._failed]
        self._stayed, self._round, self._pending = {}, 0, set()

    def ranking(self) -> list[int]:
        """Return the indices of candidates with samples, without failed ones, the best first.

        Candidates are ordered by rounds before they were dropped (most first), then by `SamplingPlan.center`, then by
        index.
        """
        _, samples = self.judged
        stayed = {index: len(values) for index, values in enumerate(samples) if values} | self._stayed
        keys = {
            index: (-rounds, self.plan.center(samples[index][:rounds]))
            for index, rounds in stayed.items()
            # A candidate dropped during warm-up has no samples.
            if rounds and index not in self._failed
        }
        return sorted(keys, key=lambda index: (*keys[index], index))

    def _runners(self) -> set[int]:
        return set(self._alive) | (self._incumbents - self._failed)

    def _is_decided(self) -> bool:
        """Return whether all rounds are done, no candidate is left, or all challengers of the incumbent are dropped."""
        if self._round >= self.plan.rounds + self.plan.discard or not self._runners():
            return True
        return self._round - self.plan.discard >= self._few() and len(self._runners()) == 1

    def _few(self) -> int:
        """Return the number of samples after which the plan drops no more candidates."""
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
        """Return whether a candidate is close enough to the leader by the clock, or by processor time."""
        ratio = self.plan.ratio(len(mine))
        if min(sample.seconds for sample in mine) <= ratio * self.plan.center([s.seconds for s in leader]):
            return True
        # Other processes may have delayed the clock, so early stopping requires both.
        work, best = work_of(mine), work_of(leader)
        return bool(work and best) and min(work) <= ratio * self.plan.center(best)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One of several cases on which a candidate is measured, with its times.

    Attributes:
        call: The key of the call.
        arguments: A summary of the call's arguments; empty if all cases belong to one call.
        draw: The name of the inputs; empty if the call has one set of inputs.
        weight: The weight of the case in the mean; the weights of all cases add up to 1.
        samples: Seconds per call, one for each round; after loading from a file, only their median.
    """

    call: str
    arguments: str = ""
    draw: str = ""
    weight: float = 1.0
    samples: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The name of the case in tables and messages."""
        return ", ".join(filter(None, (self.arguments, self.draw)))

    @property
    def median(self) -> float | None:
        """The median of the samples in seconds; `None` without samples."""
        return statistics.median(self.samples) if self.samples else None


def geometric_mean(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the weighted geometric mean of `(value, weight)` pairs; 0 if a value is 0."""
    pairs = list(pairs)
    # a single value is returned as it is, because the logarithm would round it
    if len(pairs) == 1:
        return pairs[0][0]
    if any(value <= 0 for value, _ in pairs):
        return 0.0
    values, weights = zip(*pairs, strict=True)
    return math.exp(statistics.fmean(map(math.log, values), weights))


def mean_sample(samples: Sequence[Sample], weights: Sequence[float]) -> Sample:
    """Return a candidate's sample of a round: the mean over its cases, with the samples of each case attached.

    Means over the same cases in the same round compare like single samples: effects on all candidates cancel out.
    """
    if len(samples) == 1:
        return samples[0]

    def mean(values: Iterable[float]) -> float:
        return geometric_mean(zip(values, weights, strict=True))

    works = [sample.work for sample in samples if sample.work is not None]
    work = None
    if len(works) == len(samples):
        work = Work(mean(work.busiest for work in works), mean(work.total for work in works))
    return Sample(mean(sample.seconds for sample in samples), work, tuple(samples))


def in_each(noted: Sequence[Sample], *, by_work: bool) -> list[tuple[float, ...]]:
    """Return the seconds of each case in a candidate's samples; an empty list if there is only one case.

    Args:
        noted: The samples.
        by_work: Whether to use processor time where it is known.
    """
    cases = zip(*(sample.cases for sample in noted), strict=True)
    return [
        tuple(s.work.busiest if by_work and s.work is not None else s.seconds for s in samples) for samples in cases
    ]


def seconds_on(call: str, mean: float, cases: Sequence[Case]) -> float:
    """Return the time of one call among those that a candidate was measured on, in seconds.

    Args:
        call: The key of the call.
        mean: The mean over all cases in seconds.
        cases: The cases, which may belong to several calls.
    """
    own = [(case.median, case.weight) for case in cases if case.call == call and case.median is not None]
    return geometric_mean(own) if 0 < len(own) < len(cases) else mean


def named_cases(cases: Sequence[Case]) -> str:
    """Return the cases as a phrase, with their weights if these differ."""
    calls = len({case.call for case in cases})
    weighted = len({round(case.weight, 9) for case in cases}) > 1
    names = [case.name + f" (weight {case.weight:.3g})" * weighted for case in cases]
    what = f"{counted(len(cases), 'case')} of {calls} calls" if calls > 1 else f"{len(cases)} draws of inputs"
    return f"{what}, by the geometric mean: {'; '.join(names)}"
