# SPDX-License-Identifier: Apache-2.0
"""Compare builds of one program in interleaved rounds; used by `ejkernel bench`, `tune` and the demo.

Each round runs one step of every build, in changing order, so that other load on the machine slows all builds alike.
All results come from ratios within a round: the median over the rounds, and its 95 % interval. This module does not
import JAX.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

WARM_UP: Final = 2  # the first executions fault in memory and fill caches
FEWEST: Final = 6  # rounds that a 95 % interval needs
CLOSE: Final = 1.1  # an interval whose ends differ by less settles a question even if 1 is in it
_TIE: Final = 0.02  # smaller differences are reported as none, even if they are certain
_TICK: Final = 5.0  # seconds between two lines of progress
_ADVICE: Final = "docs/troubleshooting.md, Slow programs, lists causes and remedies."


def run_rounds(
    steps: Sequence[Callable[[Any], object]],
    rounds: int,
    *,
    deadline: float = math.inf,
    inputs: Callable[[int], Any] = lambda number: number,
    say: Callable[[str], object] = lambda text: None,
) -> None:
    """Run `WARM_UP` rounds and then `rounds` more; each step records its own time.

    Args:
        steps: One step for each build; it receives the inputs of the round.
        rounds: Rounds after the warm-up.
        deadline: Value of `time.monotonic()` after which no round begins, except the first `FEWEST`.
        inputs: Returns the inputs of a round.
        say: Prints a line of progress.
    """
    started = said = time.monotonic()
    for number in range(WARM_UP + rounds):
        now = time.monotonic()
        if now > deadline and number >= WARM_UP + FEWEST:
            return
        if now - said > _TICK:
            each, least = (now - started) / number, max(WARM_UP + FEWEST - number, 0)
            left = min(each * (WARM_UP + rounds - number), max(deadline - now, each * least))
            round_ = f"round {number + 1 - WARM_UP} of at most {rounds}" if number >= WARM_UP else "warming up"
            say(f"{round_}, about {left:.0f} s left")
            said = now
        given = inputs(number)
        for step in _order(steps, number):
            step(given)


def _order(steps: Sequence[Callable[[Any], object]], number: int) -> Sequence[Callable[[Any], object]]:
    """Return the steps in the order of a round, so that each starts and follows each other equally often."""
    first = number // 2 % len(steps)
    order = [*steps[first:], *steps[:first]]
    return order[::-1] if number % 2 else order


def ratio(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """Return the median of `slow / fast` over the rounds, and its 95 % interval.

    The interval is that of the sign test, which assumes no distribution of the times.
    """
    ratios = sorted(a / b for a, b in zip(slow, fast, strict=True))
    low, high = interval(ratios)
    return {"median": statistics.median(ratios), "low": low, "high": high}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median of sorted values; of fewer than `FEWEST`, the first and the last."""
    n = len(values)
    outside = 0
    while 2 * sum(math.comb(n, k) for k in range(outside + 1)) <= 0.05 * 2**n:
        outside += 1
    return values[max(outside - 1, 0)], values[-max(outside, 1)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The times of all builds relative to one of them, the reference.

    Attributes:
        rounds: Timed rounds.
        seconds: Time of a step, by build: the reference's median times the ratio of the two. The median of each build's
            own times could contradict the ratios on a busy machine.
        over: Ratio of each build's time to the reference's, with its interval.
        middle: The quartiles of each build's own times.
    """

    rounds: int
    seconds: dict[str, float]
    over: dict[str, dict[str, float]]
    middle: dict[str, tuple[float, float]]


def compared(samples: Mapping[str, Sequence[float]], reference: str) -> Comparison:
    """Return the comparison of the builds' times, those of the warm-up included; `reference` names a build."""
    running = {name: seconds[WARM_UP:] for name, seconds in samples.items()}
    over = {name: ratio(seconds, running[reference]) for name, seconds in running.items()}
    median = statistics.median(running[reference])
    quartiles = {name: statistics.quantiles(seconds, n=4) for name, seconds in running.items()}
    return Comparison(
        rounds=len(running[reference]),
        seconds={name: median * found["median"] for name, found in over.items()},
        over=over,
        middle={name: (found[0], found[-1]) for name, found in quartiles.items()},
    )


def verdict(build: str, other: str, over: Mapping[str, float], *, advice: str = _ADVICE) -> str:
    """Return whether `build` is faster than `other`, given the ratio of the other's time to the build's.

    Args:
        build, other: The two, in words.
        over: The ratio.
        advice: A remedy if the build is slower.
    """
    spread = f"{over['low']:.2f} to {over['high']:.2f}"
    first = build[:1].upper() + build[1:]
    if _is_tie(over):
        return f"{first} and {other} are equally fast within {_TIE:.0%} ({spread})."
    if over["low"] > 1:
        return f"{first} is {over['median']:.2f} times as fast as {other} ({spread})."
    if is_slower(over):
        return f"{first} is SLOWER than {other}: {over['median']:.2f} times as fast ({spread}). {advice}".rstrip()
    if over["high"] < CLOSE * over["low"]:
        return f"{first} and {other} are equally fast ({spread})."
    return f"This machine is too noisy to tell whether {build} is faster than {other} ({spread})."


def is_slower(over: Mapping[str, float]) -> bool:
    """Return whether a build is certainly and notably slower, given the ratio of another's time to its own."""
    return over["high"] < 1 and not _is_tie(over)


def _is_tie(over: Mapping[str, float]) -> bool:
    return over["low"] > 1 - _TIE and over["high"] < 1 + _TIE


def busy(build: str, middle: tuple[float, float]) -> str:
    """Return a sentence if the times of a build vary much; empty otherwise."""
    low, high = middle
    if high <= CLOSE * low:
        return ""
    factor, unit = (1e3, "ms") if high >= 1e-3 else (1e6, "us")
    return f"The machine was busy: half of the {build} steps took {factor * low:.1f} to {factor * high:.1f} {unit}."
