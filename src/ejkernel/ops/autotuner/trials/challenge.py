# SPDX-License-Identifier: Apache-2.0
"""The comparison of the best candidate with the heuristic that decides a search."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ejkernel.ops.autotuner.measure.paired import PairedComparison
from ejkernel.ops.autotuner.measure.sampling import PROCESSOR
from ejkernel.ops.autotuner.trials.status import CameOut, SearchState
from ejkernel.ops.utils.formatting import compact, durations
from ejkernel.ops.utils.storage.serialize import to_data

CPU = " cpu"  # after a time by the processor's clock


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
    def came_out(self) -> CameOut:
        """The result of the comparison."""
        if not self.comparison.settled:
            return CameOut.UNDECIDED
        return CameOut.WINS if self.comparison.wins else CameOut.STAYS

    def data(self) -> dict[str, Any]:
        """Return it as plain data, with times in microseconds and `came_out` as the figures."""
        figures = self.comparison
        return {
            "rival": to_data(self.challenger),
            "verdict": self.came_out.value,
            "rival_us": round(figures.challenger * 1e6, 4),
            "heuristic_us": round(figures.incumbent * 1e6, 4),
            # JSON has no infinity.
            "speedup": round(figures.speedup, 4) if math.isfinite(figures.speedup) else None,
            "rounds": figures.pairs,
            "rival_faster": figures.ahead,
            "heuristic_faster": figures.behind,
            "confidence": round(figures.confidence, 6),
            "judged_by": figures.judged_by,
            "alone": self.is_confirmation,
            "doubt": figures.doubt,
            "interval": None if figures.interval is None else [round(end, 4) for end in figures.interval],
        }

    @property
    def in_rounds(self) -> str:
        """The speed-up that decides, and the least one that wins."""
        figures = self.comparison
        return f"{figures.in_words} in the median round, which decides (threshold {figures.least:.2f}x)"

    @property
    def in_words(self) -> str:
        """The result: `it wins`, `no difference, so the heuristic is kept`, `heuristic kept` or `undecided`."""
        return "no difference, so the heuristic is kept" if self.comparison.is_tie else self.came_out.in_words

    def verdict(self, state: SearchState) -> str:
        """Return the result in a search with this state: that of a search that is not finished stays open."""
        if state in (SearchState.COMPLETE, SearchState.FAILED) or self.came_out == CameOut.WINS:
            return self.in_words
        if self.came_out == CameOut.STAYS:
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
