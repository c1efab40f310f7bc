# SPDX-License-Identifier: Apache-2.0
"""Which of several entries of one key is better, and why.

Calls may have been tuned together, for one configuration (`ejkernel tune --shapes`). To take the better measured of
each would leave them with several, so all that is asked here of such an entry has one answer for the whole set: it is
of a class of its own, which no entry that was tuned alone takes the place of, and is judged by the mean of all calls.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.config.shared.packs import line_of
from ejkernel.ops.config.staleness import differences, made_with, told
from ejkernel.ops.utils.formatting import ratio
from ejkernel.ops.utils.storage.encode import dumps

_APART: Final = 1.02  # speed-ups that differ by less do not tell two configurations apart; a winner is held to the same


class Evidence(NamedTuple):
    """What speaks for an entry; the greater is the better, and no two different entries are equal.

    Attributes:
        is_measured: It was measured, and not set by hand.
        is_whole: Its search was not interrupted.
        speedup: Over the heuristic, in one race; clocks differ between machines, so this counts before times.
        seconds: How long it takes, negative.
        search: See `search_of`.
        time: When it was measured, the later the better.
        content: Something of its own.
    """

    is_measured: bool
    is_whole: bool
    speedup: float
    seconds: float
    search: str
    time: str
    content: bytes


def evidence(entry: StoredEntry) -> Evidence:
    """Return what speaks for an entry."""
    measured: Any = entry.measured or {}
    median = _number_in(measured.get("winner"), "median_us")
    speedup, seconds, search = _positive(measured.get("speedup")), median, search_of(entry)
    if search:
        mean = measured.get("geometric_mean")
        before, seconds = _number_in(mean, "heuristic_us"), _number_in(mean, "winner_us")
        speedup = before / seconds if before and seconds else None
    return Evidence(
        is_measured=median is not None,
        is_whole=measured.get("interrupted") is not True,
        speedup=speedup or 1.0,
        seconds=-(seconds or math.inf),
        search=search,
        time=str(entry.provenance.get("time")),
        content=line_of(entry),
    )


def _number_in(data: Any, name: str) -> float | None:
    return _positive(data.get(name)) if isinstance(data, dict) else None


def search_of(entry: StoredEntry) -> str:
    """Return what entries of one search for several calls have in common, and no others; empty if it was for one."""
    return _digest([entry.config_type, entry.config, (entry.measured or {})["cases"]]) if calls_of(entry) else ""


def calls_of(entry: StoredEntry) -> frozenset[str]:
    """Return the keys of the calls that an entry was tuned together with, and its own; none if it was tuned alone."""
    calls = frozenset(str(case.get("call")) for case in _cases(entry))
    return calls if len(calls) > 1 else frozenset()


def _cases(entry: StoredEntry) -> list[dict[str, Any]]:
    found = (entry.measured or {}).get("cases")
    return [case for case in found if isinstance(case, dict)] if isinstance(found, list) else []


def together(entry: StoredEntry) -> str:
    """Return what tells the calls that an entry was tuned together with, as they were weighted; empty if alone."""
    if not calls_of(entry):
        return ""
    return _digest(sorted(dumps([case.get(name) for name in ("call", "draw", "weight")]) for case in _cases(entry)))


def _digest(data: object) -> str:
    return hashlib.sha256(dumps(data).encode()).hexdigest()


def provenance_class(entry: StoredEntry) -> tuple[str, ...]:
    """Return what an entry was measured with, as far as it decides whether two entries may be compared."""
    return (*made_with(entry).values(), "measured" if evidence(entry).is_measured else "set by hand", together(entry))


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

    What was measured comes before what was set by hand, then what was measured with what is here, then what was tuned
    together with other calls, which would have several configurations otherwise, then the newest.
    """

    def rank(entry: StoredEntry) -> tuple[Any, ...]:
        found = evidence(entry)
        return found.is_measured, -len(differences(entry)), bool(together(entry)), found.time, found

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
    if together(ours) != together(theirs) and not is_same and (calls := calls_of(ours)):
        takes = calls <= calls_of(theirs) and other.time > mine.time
        return Verdict(takes, "ours was tuned together with other calls", not takes)
    if made_with(ours) != made_with(theirs):
        return _of_classes(ours, theirs)
    if is_same:
        return Verdict(other > mine, "the same configuration")
    if together(ours) != together(theirs):
        mine, other = mine._replace(speedup=_own_speedup(ours)), other._replace(speedup=_own_speedup(theirs))
    about_equal = max(mine.speedup, other.speedup) < _APART * min(mine.speedup, other.speedup)
    why = f"ours has {ratio(mine.speedup)} the heuristic's speed, theirs {ratio(other.speedup)}"
    return Verdict(other > mine, why, about_equal)


def _own_speedup(entry: StoredEntry) -> float:
    """Return what an entry brings its own call."""
    return _positive((entry.measured or {}).get("speedup")) or 1.0


def _of_classes(ours: StoredEntry, theirs: StoredEntry) -> Verdict:
    mine, other = differences(ours), differences(theirs)
    if len(mine) != len(other):
        worse = "ours" if len(mine) > len(other) else "theirs"
        return Verdict(worse == "ours", f"{worse} was {told(mine if worse == 'ours' else other)}")
    takes = evidence(theirs).time > evidence(ours).time
    return Verdict(takes, f"measured with other versions, {'ours' if takes else 'theirs'} earlier")


def _positive(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 < value <= sys.float_info.max else None
