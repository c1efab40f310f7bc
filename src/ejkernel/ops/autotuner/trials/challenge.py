# SPDX-License-Identifier: Apache-2.0
"""The comparison of the best candidate with the heuristic that decides a search."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ejkernel.ops.autotuner.measure.paired import PairedComparison
from ejkernel.ops.autotuner.measure.sampling import PROCESSOR
from ejkernel.ops.autotuner.trials.status import CameOut
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

    def line(self) -> str:
        """Return it as one line of text."""
        figures = self.comparison
        by_cpu = figures.judged_by == PROCESSOR
        mine, theirs = (f"{time}{CPU if by_cpu else ''}" for time in durations((figures.challenger, figures.incumbent)))
        where = "in the confirmation run" if self.is_confirmation else "in the run of all candidates"
        by = " (processor time, since other processes disturbed the clock)" if by_cpu else ""
        return (
            f"{compact(self.challenger)} {where}: {mine}, the heuristic {theirs}{by}; {self.in_rounds}; faster in "
            f"{figures.ahead} of {figures.pairs} rounds, slower in {figures.behind}; {self.in_words}"
            f"{f': {figures.doubt}' if figures.doubt and not figures.settled else ''}"
        )
