# SPDX-License-Identifier: Apache-2.0
"""The comparison of the best candidate with the heuristic that decides a search, and the clocks of its times."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from ejkernel.ops.autotuner.measure.measurement import Measurement, more_bytes
from ejkernel.ops.autotuner.measure.paired import MARGIN, PairedComparison, margin_of
from ejkernel.ops.autotuner.measure.sampling import PROCESSOR
from ejkernel.ops.autotuner.trials.status import SearchState
from ejkernel.ops.utils.formatting import compact, durations, size
from ejkernel.ops.utils.storage.serialize import to_data

CPU = " cpu"  # after a time by the processor's clock
_WALL = "wall"  # the method of the timer of the wall clock
_IN_WORDS = {"wins": "it wins", "stays": "heuristic kept", "undecided": "undecided"}


@dataclasses.dataclass(frozen=True, slots=True)
class Challenge:
    """The best challenger compared with the heuristic, by their last decisive measurement.

    Attributes:
        challenger: The challenger's configuration.
        comparison: The figures. `wins`: the challenger replaces the heuristic. `settled`: the evidence is sufficient.
        is_confirmation: Whether this was the confirmation run of the two, rather than a run with all candidates.
    """

    challenger: Any
    comparison: PairedComparison
    is_confirmation: bool = False

    @property
    def is_lead_too_small(self) -> bool:
        """Whether the challenger is faster, but by too little for the memory that it takes."""
        figures = self.comparison
        is_ahead = figures.speedup * (1 - MARGIN) > 1 and figures.ahead > figures.behind
        return figures.more_bytes > 0 and figures.settled and not figures.wins and is_ahead

    @property
    def lead_in_words(self) -> str:
        """That the lead of a challenger is too small for the memory that it takes, as a clause."""
        figures, more = self.comparison, size(self.comparison.more_bytes)
        lead = f"only {figures.in_words} as fast as the heuristic and takes {more} more memory"
        return f"{compact(self.challenger)} is {lead}, for which it needs {figures.least:.2f}x"

    @property
    def came_out(self) -> str:
        """The result of the comparison: the challenger `wins`, the heuristic `stays`, or `undecided`."""
        if not self.comparison.settled:
            return "undecided"
        return "wins" if self.comparison.wins else "stays"

    def data(self) -> dict[str, Any]:
        """Return it as plain data, with times in microseconds and `came_out` as the figures."""
        figures = self.comparison
        return {
            "rival": to_data(self.challenger),
            "verdict": self.came_out,
            "rival_us": round(figures.challenger * 1e6, 4),
            "heuristic_us": round(figures.incumbent * 1e6, 4),
            "speedup": round(figures.speedup, 6),
            "rounds": figures.pairs,
            "rival_faster": figures.ahead,
            "heuristic_faster": figures.behind,
            "confidence": round(figures.confidence, 6),
            "judged_by": figures.judged_by,
            "alone": self.is_confirmation,
            "doubt": figures.doubt,
            "interval": None if figures.interval is None else [round(end, 4) for end in figures.interval],
            "more_bytes": figures.more_bytes,
        }

    @property
    def in_rounds(self) -> str:
        """The speed-up that decides, and the least one that wins."""
        figures = self.comparison
        why = f", since it takes {size(figures.more_bytes)} more memory" if figures.more_bytes else ""
        return f"{figures.in_words} in the median round, which decides (threshold {figures.least:.2f}x{why})"

    @property
    def in_words(self) -> str:
        """The result: `it wins`, `heuristic kept` (perhaps with the reason) or `undecided`."""
        if self.is_lead_too_small:
            return f"too little for {size(self.comparison.more_bytes)} more memory, so the heuristic is kept"
        return "no difference, so the heuristic is kept" if self.comparison.is_tie else _IN_WORDS[self.came_out]

    def verdict(self, state: SearchState) -> str:
        """Return the result in a search with this state: that of a search that is not finished stays open."""
        if state in (SearchState.COMPLETE, SearchState.FAILED):
            return self.in_words
        if self.came_out == "wins":
            return "faster than the heuristic"  # other candidates may be faster still
        if self.came_out == "stays":
            return "no difference" if self.comparison.is_tie else "not faster"
        return "not finished" if state == SearchState.PARTIAL else self.in_words

    def line(self, state: SearchState = SearchState.COMPLETE, why: str = "") -> str:
        """Return it as one line of text.

        Args:
            state: The state of the search.
            why: The reason for this state, which is not repeated.
        """
        figures = self.comparison
        by_cpu = figures.judged_by == PROCESSOR
        mine, theirs = (f"{time}{CPU if by_cpu else ''}" for time in durations((figures.challenger, figures.incumbent)))
        where = "in the confirmation run" if self.is_confirmation else "in the run of all candidates"
        by = " (processor time, since other processes disturbed the clock)" if by_cpu else ""
        return (
            f"{compact(self.challenger)} {where}: {mine}, the heuristic {theirs}{by}; {self.in_rounds}; faster in "
            f"{figures.ahead} of {figures.pairs} rounds, slower in {figures.behind}; {self.verdict(state)}"
            f"{f': {figures.doubt}' if figures.doubt and not figures.settled and figures.doubt not in why else ''}"
        )


def to_decide(challenge: Challenge | None) -> str:
    """Return how to decide an undecided search with this comparison."""
    if challenge is not None and challenge.comparison.judged_by == PROCESSOR:
        return "other processes disturbed the clock; tune it again (--undecided) while no other program runs"
    return "the times vary too much; tune it again (--undecided) with a larger --budget or on a less busy machine"


class _Timed(Protocol):
    """An `Outcome`."""

    @property
    def measurement(self) -> Measurement | None: ...

    @property
    def peak_bytes(self) -> int | None: ...


def costly_bytes(one: _Timed, other: _Timed) -> int:
    """Return how many more bytes one program takes than another if they may slow it in a larger program.

    The result is 0 if the difference is not notable, and on accelerators: their allocators keep the memory that they
    mapped once.
    """
    return more_bytes(one.peak_bytes, other.peak_bytes) if clock_of([one]) in (_WALL, PROCESSOR) else 0


def least_lead(one: _Timed, other: _Timed) -> float:
    """Return how much faster than another a program must be to count as faster, as a share of the other's time."""
    return margin_of(clock_of([one]), takes_more=True) if costly_bytes(one, other) else MARGIN


def clock_of(outcomes: Sequence[_Timed]) -> str:
    """Return the timer (`Measurement.method`) of the heuristic's time or, without one, of the first program's.

    If other processes disturb the clock only later, the confirmation run measures two candidates by processor time.
    """
    return next((outcome.measurement.method for outcome in outcomes if outcome.measurement is not None), "")


def clock_note(outcome: _Timed, clock: str = "") -> str:
    """Return the label of an outcome's time: ` cpu` for processor time, the timer if it is not `clock`, or nothing.

    Wall-clock time among others is labelled ` wall-clock`.
    """
    method = clock_of([outcome])
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
