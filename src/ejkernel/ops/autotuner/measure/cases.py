# SPDX-License-Identifier: Apache-2.0
"""Candidates measured on several cases: inputs of one call, or several calls. Pure logic without a clock."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from ejkernel.ops.autotuner.measure.race import Sample, Work


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
    total = math.fsum(weight for _, weight in pairs)
    return math.exp(math.fsum(weight * math.log(value) for value, weight in pairs) / total)


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
