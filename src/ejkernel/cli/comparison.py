# SPDX-License-Identifier: Apache-2.0
"""Comparison of two sets of searches: of two caches, two runs or two devices."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

from ejkernel.cli.report_data import CallReport
from ejkernel.ops.autotuner.trials.view import Axis
from ejkernel.ops.utils.formatting import counted, ratio

FASTER: Final = "faster"
SLOWER: Final = "slower"
UNDECIDED: Final = "undecided"
UNCHANGED: Final = "unchanged"
SAME: Final = "same configuration"
TWO_CLOCKS: Final = "two clocks"
NO_TIME: Final = "no time"
ONLY_BEFORE: Final = "only before"
ONLY_AFTER: Final = "only after"
_ORDER: Final = (SLOWER, FASTER, UNDECIDED, UNCHANGED, SAME, TWO_CLOCKS, ONLY_AFTER, ONLY_BEFORE, NO_TIME)
_COUNTED: Final = (SLOWER, FASTER, UNDECIDED)  # the mean covers these calls
_EXPLAINED: Final = {TWO_CLOCKS: "with times by two clocks, which do not compare"}
_SOFTWARE: Final = ("ejkernel", "jax", "jaxlib", "driver")  # a new version can change the time of a configuration


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The time before over the time after.

    Attributes:
        median: The ratio of the medians.
        low, high: Its range: the ratios of opposite ends of the two intervals; `None` if one is missing.
    """

    median: float
    low: float | None
    high: float | None

    @property
    def in_words(self) -> str:
        """The ratio as text."""
        return ratio(self.median)

    @property
    def verdict(self) -> str:
        """`faster` or `slower` if the intervals do not overlap, else `undecided`."""
        if self.low is None or self.high is None:
            return UNDECIDED
        return FASTER if self.low > 1 else SLOWER if self.high < 1 else UNDECIDED


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedCall:
    """A call with both sides.

    Attributes:
        op, call: Its operation and key.
        arguments: The arguments as text.
        before, after: The sides; `None` if the call is not in it.
        ratio: The ratio of the times; `None` unless both are known, by the same timer.
        times: How often a run of the tuned program makes the call, after or else before; `None` if unknown.
    """

    op: str
    call: str
    arguments: str
    before: CallReport | None
    after: CallReport | None
    ratio: Ratio | None
    times: int | None = None

    @property
    def verdict(self) -> str:
        """The result in a word or two."""
        if self.before is None or self.after is None:
            return ONLY_AFTER if self.before is None else ONLY_BEFORE
        if _by_two_clocks(self.before, self.after):
            return TWO_CLOCKS
        if self.ratio is None:
            return NO_TIME
        # The same measurement, e.g. in a copy of the cache.
        if dataclasses.replace(self.before, source=self.after.source) == self.after:
            return UNCHANGED
        return SAME if self._is_same_program else self.ratio.verdict

    @property
    def same_configuration(self) -> bool:
        """Whether both sides have the same configuration."""
        return self.before is not None and self.after is not None and self.before.config == self.after.config

    @property
    def _is_same_program(self) -> bool:
        """Whether both sides run the same configuration on one device with the same software.

        A difference of their times then comes from the machine's load, not from tuning.
        """
        if self.before is None or self.after is None or not self.same_configuration:
            return False
        mine, theirs = ([side.versions.get(name) for name in _SOFTWARE] for side in (self.before, self.after))
        return self.before.device == self.after.device and mine == theirs

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return dataclasses.asdict(self) | {"verdict": self.verdict, "same_configuration": self.same_configuration}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two sets of calls.

    Attributes:
        before, after: The names of the two sides.
        calls: The calls of both; slower ones first, then faster ones.
    """

    before: str
    after: str
    calls: tuple[ComparedCall, ...]

    @property
    def verdicts(self) -> list[str]:
        """The results that occur, in the order of the calls."""
        return list(dict.fromkeys(call.verdict for call in self.calls))

    @property
    def mean(self) -> float | None:
        """The geometric mean of the ratios of calls that are faster, slower or undecided; `None` without any."""
        found = [call.ratio.median for call in self.calls if call.ratio is not None and call.verdict in _COUNTED]
        return math.exp(sum(map(math.log, found)) / len(found)) if found else None

    @property
    def in_words(self) -> str:
        """The number of calls by result, and the mean ratio."""
        counts = collections.Counter(call.verdict for call in self.calls)
        shown = [verdict for verdict in self.verdicts if verdict != SAME]
        parts = [", ".join(f"{counts[verdict]} {_EXPLAINED.get(verdict, verdict)}" for verdict in shown)]
        parts += [f"{counts[SAME]} with the same configuration on both sides, not compared"] if SAME in counts else []
        compared = sum(counts[verdict] for verdict in _COUNTED)
        mean = "" if self.mean is None else f"; geometric mean of {counted(compared, 'ratio')}: {ratio(self.mean)}"
        return f"{counted(len(self.calls), 'call')}: {'; '.join(filter(None, parts))}{mean}"

    @property
    def axis(self) -> Axis | None:
        """The axis of the ranges, which contains 1; `None` without a range."""
        ends = [end for call in self.calls if call.ratio for end in (call.ratio.low, call.ratio.high) if end]
        return Axis(min(*ends, 1 / 1.05), max(*ends, 1.05)) if ends else None

    def devices(self, side: int) -> list[str]:
        """Return the devices before (0) or after (1)."""
        sides = [(call.before, call.after)[side] for call in self.calls]
        return sorted({found.device for found in sides if found is not None})

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        calls = [call.data() for call in self.calls]
        return {"before": self.before, "after": self.after, "geometric_mean": self.mean, "calls": calls}


def compare(before: Sequence[CallReport], after: Sequence[CallReport], old: str, new: str) -> Comparison:
    """Return the comparison of two sets of calls.

    Calls are paired by operation and key. The devices must be equal too, unless each side has only one device.

    Args:
        before, after: The calls.
        old, new: Their names, e.g. the folders of two caches.
    """
    across = len({call.device for call in before}) <= 1 and len({call.device for call in after}) <= 1

    def key(call: CallReport) -> tuple[str, str, str]:
        return call.op, call.call, "" if across else call.device

    left, right = ({key(call): call for call in calls} for calls in (before, after))
    found = [_compared(left.get(each), right.get(each)) for each in left | right]
    return Comparison(old, new, tuple(sorted(found, key=_rank)))


def _compared(before: CallReport | None, after: CallReport | None) -> ComparedCall:
    shown: Any = after or before  # one side has the call
    return ComparedCall(
        op=shown.op,
        call=shown.call,
        arguments=shown.arguments,
        before=before,
        after=after,
        ratio=None if before is None or after is None else _ratio(before, after),
        times=next((side.times for side in (after, before) if side is not None and side.times), None),
    )


def _rank(call: ComparedCall) -> tuple[int, float, str, str]:
    far = 0.0 if call.ratio is None else -abs(math.log(call.ratio.median))
    return _ORDER.index(call.verdict), far, call.op, call.arguments


def _by_two_clocks(before: CallReport, after: CallReport) -> bool:
    return bool(before.clock and after.clock) and before.clock != after.clock


def _ratio(before: CallReport, after: CallReport) -> Ratio | None:
    # Files may hold any number.
    old, new = before.after_us, after.after_us
    if old is None or new is None or _by_two_clocks(before, after) or not (0 < old < math.inf and 0 < new < math.inf):
        return None
    median = old / new
    if before.after_range is None or after.after_range is None:
        return Ratio(median, None, None)
    (old_low, old_high), (new_low, new_high) = before.after_range, after.after_range
    return Ratio(median, old_low / new_high, old_high / new_low)
