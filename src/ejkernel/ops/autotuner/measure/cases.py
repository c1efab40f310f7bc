# SPDX-License-Identifier: Apache-2.0
"""Candidates that are measured on several cases: inputs of one call, or several calls; pure logic, without a clock."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from ejkernel.ops.autotuner.measure.race import Sample, Work


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One of several things that a candidate is measured on, and how long it took.

    Attributes:
        call: Key of the call.
        arguments: The call's, in short; empty where all cases are of one call.
        draw: Name of the inputs; empty where the call has one set of them.
        weight: The case's weight in the mean; those of all cases add up to 1.
        samples: Seconds a call, one figure a round; what a file kept is their median.
    """

    call: str
    arguments: str = ""
    draw: str = ""
    weight: float = 1.0
    samples: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """What people call it."""
        return ", ".join(filter(None, (self.arguments, self.draw)))

    @property
    def median(self) -> float | None:
        """The median of the samples, seconds; `None` without any."""
        return statistics.median(self.samples) if self.samples else None


def geometric_mean(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the weighted geometric mean of `(value, weight)`; 0 if a value is."""
    pairs = list(pairs)
    # Of one the very figure, which a logarithm and back would round.
    if len(pairs) == 1:
        return pairs[0][0]
    if any(value <= 0 for value, _ in pairs):
        return 0.0
    total = math.fsum(weight for _, weight in pairs)
    return math.exp(math.fsum(weight * math.log(value) for value, weight in pairs) / total)


def mean_sample(samples: Sequence[Sample], weights: Sequence[float]) -> Sample:
    """Return a round's sample of a candidate: the mean of those that it took of each case, which it keeps.

    Means of the same cases in the same rounds compare as single samples do: what all candidates meet cancels out.
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
    """Return the seconds of each case, of a candidate's samples; nothing where there is one case.

    Args:
        noted: The samples.
        by_work: Whether processor time counts, where it is known.
    """
    cases = zip(*(sample.cases for sample in noted), strict=True)
    return [
        tuple(s.work.busiest if by_work and s.work is not None else s.seconds for s in samples) for samples in cases
    ]


def seconds_on(call: str, mean: float, cases: Sequence[Case]) -> float:
    """Return how long a call takes of those that a candidate was measured on.

    Args:
        call: The call's key.
        mean: Seconds, over all cases.
        cases: The cases, which may be of other calls too.
    """
    own = [(case.median, case.weight) for case in cases if case.call == call and case.median is not None]
    return geometric_mean(own) if 0 < len(own) < len(cases) else mean
