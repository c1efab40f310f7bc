# SPDX-License-Identifier: Apache-2.0
"""Fair comparison on a noisy machine: short interleaved slices, so that a disturbance affects all functions alike."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The time of one function, in seconds.

    Attributes:
        minimum: The fastest slice: the cost without disturbance.
        median: The median slice: the cost under the current load.
        ratio: `minimum` divided by the first function's.
        median_ratio: Median over rounds of the ratio to the first function's slice.
    """

    minimum: float
    median: float
    ratio: float
    median_ratio: float

    def data(self) -> dict[str, float]:
        """Return the fields, rounded to significant digits."""
        return {name: float(f"{value:.4g}") for name, value in dataclasses.asdict(self).items()}


def compare(samples: Mapping[str, list[float]]) -> dict[str, Timing]:
    """Return a `Timing` for each name; the first is the base of the ratios."""
    base = next(iter(samples.values()))
    return {
        name: Timing(
            minimum=min(taken),
            median=statistics.median(taken),
            ratio=min(taken) / min(base),
            median_ratio=statistics.median(one / other for one, other in zip(taken, base, strict=True)),
        )
        for name, taken in samples.items()
    }


def interleave(functions: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Timing]:
    """Compare functions that each return the seconds of one slice; the order turns from round to round."""
    names = list(functions)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        turn = index % len(names)
        for name in (*names[turn:], *names[:turn]):
            samples[name].append(functions[name]())
    return compare(samples)


def per_call(function: Callable[[], Any], slice_s: float = 0.001) -> Callable[[], float]:
    """Return a function that calls `function` for about `slice_s` and returns the seconds of one call.

    Results are waited for at the end of the slice only, as a program would.
    """
    jax.block_until_ready(function())
    quickest = min(_seconds(function, 10) for _ in range(20))  # a disturbed sample makes slices too short
    number = max(1, int(slice_s / (quickest / 10)))
    return lambda: _seconds(function, number) / number


def _seconds(function: Callable[[], Any], number: int) -> float:
    repeated, out = range(number), None
    start = time.perf_counter()
    for _ in repeated:
        out = function()
    jax.block_until_ready(out)
    return time.perf_counter() - start
