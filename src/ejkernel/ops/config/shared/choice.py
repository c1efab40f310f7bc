# SPDX-License-Identifier: Apache-2.0
"""Which of several entries of one key is better, and why."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.config.shared.packs import line_of
from ejkernel.ops.config.staleness import differences, made_with, told
from ejkernel.ops.utils.formatting import ratio

_APART: Final = 1.02  # speed-ups that differ by less do not tell two configurations apart; a winner is held to the same


class Evidence(NamedTuple):
    """What speaks for an entry; the greater is the better, and no two different entries are equal.

    Attributes:
        is_measured: It was measured, and not set by hand.
        is_whole: Its search was not interrupted.
        speedup: Over the heuristic, in one race; clocks differ between machines, so this counts before times.
        time: When it was measured, the later the better.
        content: Something of its own.
    """

    is_measured: bool
    is_whole: bool
    speedup: float
    seconds: float
    time: str
    content: bytes


def evidence(entry: StoredEntry) -> Evidence:
    """Return what speaks for an entry."""
    measured: Any = entry.measured or {}
    winner = measured.get("winner")
    median = _positive(winner.get("median_us") if isinstance(winner, dict) else None)
    return Evidence(
        is_measured=median is not None,
        is_whole=measured.get("interrupted") is not True,
        speedup=_positive(measured.get("speedup")) or 1.0,
        seconds=-(median or math.inf),
        time=str(entry.provenance.get("time")),
        content=line_of(entry),
    )


def provenance_class(entry: StoredEntry) -> tuple[str, ...]:
    """Return what an entry was measured with, as far as it decides whether two entries may be compared."""
    return (*made_with(entry).values(), "measured" if evidence(entry).is_measured else "set by hand")


def best_of_classes(entries: Iterable[StoredEntry]) -> list[StoredEntry]:
    """Return of each provenance class the best entry."""
    best: dict[tuple[str, ...], StoredEntry] = {}
    for entry in entries:
        known = best.setdefault(provenance_class(entry), entry)
        if evidence(entry) > evidence(known):
            best[provenance_class(entry)] = entry
    return list(best.values())


def by_preference(entries: Iterable[StoredEntry]) -> list[StoredEntry]:
    """Return the entries of a key in the order in which they answer here.

    What was measured comes before what was set by hand, then what was measured with what is here, then the newest.
    """

    def rank(entry: StoredEntry) -> tuple[Any, ...]:
        found = evidence(entry)
        return found.is_measured, -len(differences(entry)), found.time, found

    return sorted(best_of_classes(entries), key=rank, reverse=True)


class Verdict(NamedTuple):
    """Which of two entries of a key is to stay.

    Attributes:
        takes: Whether the other one replaces the one that is there.
        why: In words.
        is_conflict: Whether they name different configurations, and what is known of them does not tell which is the
            better: one was set by hand, or their speed-ups are about the same.
    """

    takes: bool
    why: str
    is_conflict: bool = False


def judge(ours: StoredEntry, theirs: StoredEntry) -> Verdict:
    """Return which of two entries of one key, that are not equal, is to stay where there is room for one."""
    mine, other = evidence(ours), evidence(theirs)
    is_same = ours.config == theirs.config and ours.config_type == theirs.config_type
    if not mine.is_measured or not other.is_measured:
        is_newer = not mine.is_measured and not other.is_measured and is_same and other > mine
        return Verdict(is_newer, f"{'theirs' if mine.is_measured else 'ours'} was set by hand", not is_same)
    if provenance_class(ours) != provenance_class(theirs):
        return _of_classes(ours, theirs)
    if is_same:
        return Verdict(other > mine, "the same configuration")
    about_equal = max(mine.speedup, other.speedup) < _APART * min(mine.speedup, other.speedup)
    why = f"ours has {ratio(mine.speedup)} the heuristic's speed, theirs {ratio(other.speedup)}"
    return Verdict(other > mine, why, about_equal)


def _of_classes(ours: StoredEntry, theirs: StoredEntry) -> Verdict:
    mine, other = differences(ours), differences(theirs)
    if len(mine) != len(other):
        worse = "ours" if len(mine) > len(other) else "theirs"
        return Verdict(worse == "ours", f"{worse} was {told(mine if worse == 'ours' else other)}")
    takes = evidence(theirs).time > evidence(ours).time
    return Verdict(takes, f"measured with other versions, {'ours' if takes else 'theirs'} earlier")


def _positive(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 < value <= sys.float_info.max else None
