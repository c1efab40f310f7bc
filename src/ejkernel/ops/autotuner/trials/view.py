# SPDX-License-Identifier: Apache-2.0
"""A search as the report and notebooks show it: its programs on one axis, failures by reason, and progress."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from ejkernel.ops.autotuner.measure.sampling import PROCESSOR
from ejkernel.ops.autotuner.trials.challenge import CPU, clock_note, clock_of, costly_bytes, is_by_another
from ejkernel.ops.autotuner.trials.outcome import Findings, relative_to_heuristic, share_of, without_common
from ejkernel.ops.autotuner.trials.programs import Outcome, program_name, ranked
from ejkernel.ops.autotuner.trials.status import SearchState, Status
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.formatting import compact, durations
from ejkernel.ops.utils.pages import microseconds

_REASONS: Final = 8  # failure groups of a search with their full reason; the others share one group
_NUMBER: Final = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One program of a search: a row of its table and a mark of its chart.

    Attributes:
        name: Its configuration, and others that compile to the same program.
        mark: `winner`, `heuristic`, `heuristic kept` or empty. If another search's configuration is in force: `in
            force`, `heuristic`, both, or `winner, not in force`.
        status: The status; files of later versions may contain others.
        group: The number of its failure group, from 1; 0 without a failure.
        time_us: The median.
        low_us, high_us: The quartiles; of fewer than four samples the least and the greatest.
        samples: Number of samples.
        compile_s: Seconds to compile.
        clock: The timer, if it is another than the heuristic's: such times do not compare.
        place_us: Place of the median on the axis; by another clock the heuristic's time times `relative`, if known.
        note: The label of the time: ` cpu` for processor time, or the timer if it is another than the heuristic's.
        why: Why it lost, if it was compared with the heuristic or its time is shorter than the winner's.
        relative: The time relative to the heuristic's as text, `-` if they do not compare; the order of the rows.
    """

    name: str
    mark: str
    status: str
    group: int = 0
    time_us: float | None = None
    low_us: float = 0.0
    high_us: float = 0.0
    samples: int = 0
    compile_s: float | None = None
    clock: str = ""
    place_us: float | None = None
    note: str = ""
    why: str = ""
    relative: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures:
    """Unmeasured candidates of a search with the same status and reason.

    Attributes:
        status: Their status.
        reason: The reason of the first candidate; the others differ at most in numbers.
        configs: Their configurations.
    """

    status: str
    reason: str
    configs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Axis:
    """A logarithmic axis; places are percentages from 4 to 96.

    Attributes:
        low, high: The values at its ends, both positive.
    """

    low: float
    high: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Axis:
        """Return the axis of a search, which spans all medians, and the quartiles by the heuristic's clock."""
        ends = [end for row in rows if not row.clock and row.samples for end in (row.low_us, row.high_us)]
        ends += [row.place_us for row in rows if row.place_us is not None]
        return cls(min(ends, default=1.0), max(ends, default=1.0))

    def at(self, value: float) -> float:
        """Return the place of a value."""
        if self.high <= self.low:
            return 50.0
        return round(4 + 92 * math.log(value / self.low) / math.log(self.high / self.low), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels of the two ends and the middle, which are times in microseconds."""
        middle = math.sqrt(self.low * self.high)
        times = [self.low] if self.high <= self.low else [self.low, middle, self.high]
        return [(self.at(time), microseconds(time)) for time in times]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchView:
    """A search.

    Attributes:
        before_us, after_us: Median time with the heuristic and with the winner.
        tuned_us: The heuristic's time divided by the speed-up that decided, for display beside `before_us`.
        note: The label of `before_us` and `tuned_us`: ` cpu` for processor time.
        rows: The programs, sorted by the ratio to the heuristic in the same rounds.
        failures: The unmeasured candidates by reason.
        best: Number of measurements and the best time so far, at each improvement.
        measured: Number of measured programs.
        standing: The comparison of the best candidate with the heuristic.
    """

    before_us: float | None = None
    after_us: float | None = None
    tuned_us: float | None = None
    note: str = ""
    rows: tuple[Row, ...] = ()
    failures: tuple[Failures, ...] = ()
    best: tuple[tuple[int, float], ...] = ()
    measured: int = 0
    standing: dict[str, Any] | None = None

    @property
    def axis(self) -> Axis:
        """The axis of all times."""
        return Axis.of(self.rows)

    @property
    def best_path(self) -> str:
        """The steps of the best time so far as an SVG path in a box of 600 by 100; lower is faster."""
        axis = Axis(self.best[-1][1], self.best[0][1])
        path = ""
        for count, time in self.best:
            x = 600 * (count - 1) / max(self.measured - 1, 1)
            y = 100 - axis.at(time)
            path += f"H{x:.0f}V{y:.0f}" if path else f"M{x:.0f} {y:.0f}"
        return path + "H600"

    def rows_and_times(self) -> Iterator[tuple[Row, str]]:
        """Return the rows, each with its time; their names lack the fields in `common`."""
        times = durations(None if row.time_us is None else row.time_us / 1e6 for row in self.rows)
        names = without_common([row.name for row in self.rows])[0] if self.rows else []
        rows = (dataclasses.replace(row, name=name) for row, name in zip(self.rows, names, strict=True))
        return zip(rows, times, strict=True)

    @property
    def common(self) -> str:
        """The fields that all configurations have in common, as far as they come first."""
        return without_common([row.name for row in self.rows])[1] if self.rows else ""


def view_of(search: Findings) -> dict[str, Any]:
    """Return the values of a search's `SearchView`."""
    failures, groups = _grouped(search.outcomes)
    return {
        "before_us": in_microseconds(search.before),
        "after_us": in_microseconds(search.after),
        "tuned_us": in_microseconds(search.tuned),
        "note": clock_note(search.heuristic),
        "rows": tuple(_row(program, search, groups) for program in ranked(search.outcomes)),
        "failures": failures,
        "best": tuple(_best_so_far(search)),
        "measured": sum(outcome.measurement is not None for outcome in search.outcomes),
        "standing": _standing(search),
    }


def in_microseconds(seconds: float | None) -> float | None:
    """Return a time in microseconds."""
    return None if seconds is None else round(seconds * 1e6, 4)


def _standing(search: Findings) -> dict[str, Any] | None:
    found = search.challenge
    if found is None:
        return None
    note = CPU if found.comparison.judged_by == PROCESSOR else ""
    words = {"in_rounds": found.in_rounds, "in_words": found.verdict(search.progress.state), "note": note}
    words["leaner"] = _leaner(search) if found.is_lead_too_small else ""
    return found.data() | {"rival": compact(found.challenger), **words}


def _leaner(search: Findings) -> str:
    """Return the fastest candidate that takes not notably more memory than the heuristic, with its time; or nothing."""
    heuristic = search.heuristic
    for outcome, _ in ranked(search.outcomes):
        if outcome is not heuristic and outcome.measurement is not None and not costly_bytes(outcome, heuristic):
            return f"{compact(outcome.config)}, {share_of(outcome, search)} of the heuristic's time"
    return ""


def _row(program: tuple[Outcome, tuple[Outcome, ...]], search: Findings, groups: dict[tuple[str, str], int]) -> Row:
    first, twins = program
    row = Row(name=program_name(program), mark="", status=printable(first.status))
    if first.measurement is None:
        return dataclasses.replace(row, group=groups.get(_group_of(first), 0))
    samples, clock = first.measurement.samples, clock_of(search.outcomes)
    relative, heuristic = relative_to_heuristic(first, search), search.heuristic.seconds
    is_other = is_by_another(first, clock)
    moved = None if relative is None or heuristic is None else relative * heuristic
    few = len(samples) < 4
    low, high = (min(samples), max(samples)) if few else np.quantile(samples, (0.25, 0.75), method="weibull")
    return dataclasses.replace(
        row,
        mark=_mark((first, *twins), search),
        time_us=in_microseconds(first.measurement.median),
        low_us=float(low) * 1e6,
        high_us=float(high) * 1e6,
        samples=len(samples),
        compile_s=first.compile_seconds,
        clock=printable(first.measurement.method) if is_other else "",
        place_us=in_microseconds(moved if is_other else first.measurement.median),
        note=printable(clock_note(first, clock)),
        why=printable(search.why_not_chosen(first)),
        relative=share_of(first, search),
    )


def _mark(program: Sequence[Outcome], search: Findings) -> str:
    is_heuristic = any(outcome is search.heuristic for outcome in program)
    is_winner = any(outcome is search.winner for outcome in program)
    if search.stays is None:
        if is_winner and not (is_heuristic and search.progress.state == SearchState.PARTIAL):
            return "heuristic kept" if is_heuristic else "winner"
        return "heuristic" if is_heuristic else ""
    if any(map(search.is_in_force, program)):
        return "heuristic, in force" if is_heuristic else "in force"
    if is_heuristic:
        return "heuristic"
    return "winner, not in force" if is_winner else ""


def _group_of(outcome: Outcome) -> tuple[str, str]:
    return str(outcome.status), _NUMBER.sub("#", outcome.reason)


def _grouped(outcomes: Sequence[Outcome]) -> tuple[tuple[Failures, ...], dict[tuple[str, str], int]]:
    """Return the unmeasured candidates by status and reason, ignoring numbers; the most frequent first.

    Also return the number of each group, from 1. The rare ones share the last number.
    """
    found: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.measurement is None and outcome.status != Status.SAME:
            found.setdefault(_group_of(outcome), []).append(outcome)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    groups = [_failures(str(members[0].status), members[0].reason, members) for _, members in ordered[:_REASONS]]
    rest = [outcome for _, members in ordered[_REASONS:] for outcome in members]
    if rest:
        groups.append(_failures("various", f"{len(ordered) - _REASONS} other reasons", rest))
    return tuple(groups), {key: min(number, _REASONS + 1) for number, (key, _) in enumerate(ordered, 1)}


def _failures(status: str, reason: str, outcomes: Sequence[Outcome]) -> Failures:
    configs = tuple(compact(outcome.config) for outcome in outcomes)
    return Failures(status=printable(status), reason=reason or "no reason recorded", configs=configs)


def _best_so_far(search: Findings) -> Iterator[tuple[int, float]]:
    """Yield the number of measurements and the best time in microseconds, at each improvement.

    As in the tables, candidates compare by their ratio to the heuristic. The time is the heuristic's times this ratio.
    """
    best, count, heuristic = math.inf, 0, search.heuristic.seconds
    clock = clock_of(search.outcomes)
    for outcome in search.outcomes:
        share = relative_to_heuristic(outcome, search)
        seconds = outcome.seconds if share is None or heuristic is None else share * heuristic
        if outcome.seconds is None or seconds is None or (share is None and is_by_another(outcome, clock)):
            continue
        count += 1
        if seconds < best:
            best = seconds
            yield count, round(best * 1e6, 4)
