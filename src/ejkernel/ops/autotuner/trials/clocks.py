# SPDX-License-Identifier: Apache-2.0
"""The clocks of a search's times: they compare only if they come from the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.sampling import PROCESSOR
from ejkernel.ops.autotuner.trials.challenge import CPU

_WALL = "wall"  # the method of the timer of the wall clock


class _Timed(Protocol):
    """An `Outcome`."""

    @property
    def measurement(self) -> Measurement | None: ...


def clock_of(outcomes: Sequence[_Timed]) -> str:
    """Return the timer (`Measurement.method`) of the heuristic's time or, without one, of the first program's.

    If other processes disturb the clock only later, the confirmation run measures two candidates by processor time.
    """
    return next((outcome.measurement.method for outcome in outcomes if outcome.measurement is not None), "")


def clock_note(outcome: _Timed, clock: str = "") -> str:
    """Return the label of an outcome's time: ` cpu` for processor time, the timer if it is not `clock`, or nothing.

    Wall-clock time among others is labelled ` wall-clock`.
    """
    method = "" if outcome.measurement is None else outcome.measurement.method
    if method == PROCESSOR:
        return CPU
    if method == _WALL and clock not in ("", _WALL):
        return " wall-clock"
    return f" by {method}" if clock and method and method != clock else ""


def is_by_another(outcome: _Timed, clock: str) -> bool:
    """Return whether another timer measured the outcome, so that its time does not compare with the heuristic's."""
    return outcome.measurement is not None and outcome.measurement.method != clock


def labelled(time: str, outcome: _Timed, clock: str) -> str:
    """Return an outcome's time with its `clock_note`, in brackets if it does not compare with the heuristic's."""
    text = f"{time}{clock_note(outcome, clock)}"
    return f"({text})" if is_by_another(outcome, clock) else text
