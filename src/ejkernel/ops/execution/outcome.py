# SPDX-License-Identifier: Apache-2.0
"""What a search found out: the fate of every candidate, and the winner."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.execution.measuring import Measurement
from ejkernel.ops.utils.serialize import to_data
from ejkernel.ops.utils.tables import arguments, compact, duration, text_table

READY = "ready"
MEASURED = "measured"
FAILED = "failed"
WRONG = "wrong"
SKIPPED = "skipped"
SAME = "same"
CRASHED = "crashed"
PRUNED = "pruned"
REJECTED = (FAILED, WRONG, PRUNED, CRASHED)  # another attempt would come to the same

_REASON = 100  # characters of a reason that a table shows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one candidate.

    Attributes:
        config: The candidate.
        status: `measured`; `failed` (raised); `wrong` (results differ from the reference); `same` (the program of
            another candidate); `pruned` (not run, because its program spills many registers); `crashed` (its process
            ended, had to be ended, or was left alone); `skipped` (out of time). While the search goes on, also `ready`
            (compiled and checked).
        reason: Why it was not measured.
        measurement: Its times.
        compile_seconds: How long lowering and compiling took.
        peak_bytes: Memory that a call takes, inputs and results included, where the compiler tells.
        spilled: Bytes of registers that a thread spills to memory, where the compiler tells: on GPUs, of programs that
            were compiled in a process of their own.
    """

    config: Any
    status: str
    reason: str = ""
    measurement: Measurement | None = None
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    spilled: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutotuneData:
    """A search that found a configuration.

    Attributes:
        inv: The call.
        config: The winner.
        outcomes: What became of each candidate; the heuristic is the first.
        seconds: How long the search took.
        checked: What of the winner was checked: `outputs`, and `gradients` where the call is a forward that has one.
        confidence: Probability that the winner is not ahead of the heuristic by accident, of their race of the two
            alone; `None` if the heuristic stays, or could not be measured.
        why: Why the heuristic stays, if it does.
        interrupted: Whether it was stopped before its end, and this is the best so far.
    """

    inv: Invocation[Any, Any]
    config: Any
    outcomes: tuple[Outcome, ...]
    seconds: float
    checked: tuple[str, ...] = ()
    confidence: float | None = None
    why: str = ""
    interrupted: bool = False

    @property
    def key(self) -> ConfigKey:
        """The key of the call."""
        return self.inv.key

    @property
    def winner(self) -> Outcome:
        """The winner's outcome."""
        return next(outcome for outcome in self.outcomes if outcome.config is self.config)

    @property
    def heuristic(self) -> Outcome:
        """The heuristic's outcome."""
        return self.outcomes[0]

    @property
    def speedup(self) -> float | None:
        """How many times faster than the heuristic the winner is; `None` if the heuristic was not measured."""
        before, after = self.heuristic.measurement, self.winner.measurement
        return None if before is None or after is None else before.median / after.median

    def summary(self) -> str:
        """Return the fate of every candidate as a table for people, the fastest first."""
        title = f"{self.inv.op_id_v}  {arguments(self.inv.description)}\n{self.key.device}, call {self.key.call}"
        return summary_of(title, self.outcomes, self.winner, self.seconds, self.why)

    def summary_data(self) -> dict[str, Any]:
        """Return what a cache entry keeps of the search, as plain data."""
        failures = [
            {"config": to_data(outcome.config), "status": outcome.status, "reason": outcome.reason}
            for outcome in self.outcomes
            if outcome.status in (FAILED, WRONG, CRASHED)
        ]
        return {
            "winner": _times(self.winner),
            "heuristic": _times(self.heuristic),
            "speedup": self.speedup,
            "candidates": len(self.outcomes),
            "seconds": round(self.seconds, 3),
            "checked": list(self.checked),
            "confidence": None if self.confidence is None else round(self.confidence, 4),
            "interrupted": self.interrupted,
            "skipped": sum(outcome.status == SKIPPED for outcome in self.outcomes),
            "failures": failures,
        }


def summary_of(title: str, outcomes: Sequence[Outcome], winner: Outcome, seconds: float, why: str = "") -> str:
    """Return a search as text: `title`, what came out, and a table of the outcomes, the fastest first.

    Args:
        title: What was searched for.
        outcomes: What became of each candidate; the heuristic is the first.
        winner: One of them.
        seconds: How long the search took.
        why: Why the heuristic stays, if it does.
    """
    heuristic = outcomes[0].measurement
    if winner is outcomes[0]:
        found = f"the heuristic stays{': ' if why else ''}{why}"
    elif heuristic is None or winner.measurement is None:
        found = "the heuristic could not be measured"
    else:
        found = f"{heuristic.median / winner.measurement.median:.2f}x the heuristic's speed"
    ranked = sorted(outcomes, key=lambda o: math.inf if o.measurement is None else o.measurement.median)
    rows = [_cells(outcome, outcome is outcomes[0], outcome is winner, heuristic) for outcome in ranked]
    table = text_table(("", "configuration", "status", "median", "spread", "of heuristic", "reason"), rows)
    return f"{title}\n{len(outcomes)} candidates in {seconds:.1f} s; {found}\n{table}"


def _cells(outcome: Outcome, first: bool, won: bool, heuristic: Measurement | None) -> tuple[str, ...]:
    measured, text = outcome.measurement, " ".join(outcome.reason.split())
    reason = text if len(text) <= _REASON else text[: _REASON - 3] + "..."
    times = ("-", "-", "-")
    if measured is not None:
        share = "-" if heuristic is None else f"{measured.median / heuristic.median:.0%}"
        times = (duration(measured.median), f"{measured.spread:.0%}" if len(measured.samples) > 3 else "-", share)
    return "*" if won else "h" if first else "", compact(outcome.config), outcome.status, *times, reason


def _times(outcome: Outcome) -> dict[str, Any] | None:
    measurement = outcome.measurement
    if measurement is None:
        return None
    return {
        "median_us": round(measurement.median * 1e6, 3),
        "spread": round(measurement.spread, 4),
        "samples": len(measurement.samples),
        "method": measurement.method,
    }
