# SPDX-License-Identifier: Apache-2.0
"""Choosing the better of several entries of one key, with the reason.

`ejkernel tune --shapes` tunes several calls together, for one configuration. Choosing the fastest entry for each call
would give them different configurations. So entries of such a set form a separate class: an entry tuned alone never
replaces one of them, and they are compared by the mean over all calls of the set.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from ejkernel.ops.config.entries import StepNote, StoredEntry, differences, measured_with, text_of_differences
from ejkernel.ops.config.shared.packs import line_of
from ejkernel.ops.utils.formatting import ratio
from ejkernel.ops.utils.storage.encode import dumps
from ejkernel.ops.utils.values.signature import digest_of

_APART: Final = 1.02  # smaller differences between speed-ups are noise; a search's winner needs the same factor


class Evidence(NamedTuple):
    """The rank of an entry among others of its key. Greater is better; different entries are never equal.

    Attributes:
        is_measured: The entry was measured, not set by hand.
        is_compared: The whole step of a program was compared without and with the winner of the search. Such an
            entry beats one that has only won by itself, so a configuration dropped for slowing a step does not return.
        is_whole: The search did not end early.
        speedup: Speed-up over the heuristic in the same search. Compared before `seconds`, since clock rates differ
            between machines.
        seconds: The measured time, negated.
        search: See `search_of`.
        time: When the entry was measured; later is better.
        content: The entry's line, which makes the order total.
    """

    is_measured: bool
    is_compared: bool
    is_whole: bool
    speedup: float
    seconds: float
    search: str
    time: str
    content: bytes


def evidence(entry: StoredEntry) -> Evidence:
    """Return the rank of an entry."""
    measured: Any = entry.measured or {}
    median = _number_in(measured.get("winner"), "median_us")
    speedup, seconds, search = _positive(entry.speedup), median, search_of(entry)
    progress = measured.get("search")
    if search:
        mean = measured.get("geometric_mean")
        before, seconds = _number_in(mean, "heuristic_us"), _number_in(mean, "winner_us")
        speedup = before / seconds if before and seconds else None
    return Evidence(
        is_measured=median is not None,
        is_compared=StepNote.stored_in(measured) is not None,
        is_whole=not isinstance(progress, dict) or progress.get("state") != "partial",
        speedup=speedup or 1.0,
        seconds=-(seconds or math.inf),
        search=search,
        time=str(entry.provenance.get("time")),
        content=line_of(entry),
    )


def _number_in(data: Any, name: str) -> float | None:
    return _positive(data.get(name)) if isinstance(data, dict) else None


def search_of(entry: StoredEntry) -> str:
    """Return a digest shared by the entries of one search for several calls; empty if the entry was tuned alone."""
    content = [entry.config_type, entry.config, (entry.measured or {}).get("cases")]
    return digest_of(dumps(content)) if calls_of(entry) else ""


def calls_of(entry: StoredEntry) -> frozenset[str]:
    """Return the keys of the calls tuned together with this entry, including its own; empty if it was tuned alone."""
    calls = frozenset(str(case.get("call")) for case in _cases(entry))
    return calls if len(calls) > 1 else frozenset()


def _cases(entry: StoredEntry) -> list[dict[str, Any]]:
    found = (entry.measured or {}).get("cases")
    return [case for case in found if isinstance(case, dict)] if isinstance(found, list) else []


def together(entry: StoredEntry) -> str:
    """Return a digest of the calls tuned together with this entry and their weights; empty if it was tuned alone."""
    if not calls_of(entry):
        return ""
    cases = (dumps([case.get(name) for name in ("call", "draw", "weight")]) for case in _cases(entry))
    return digest_of(dumps(sorted(cases)))


def provenance_class(entry: StoredEntry) -> tuple[str, ...]:
    """Return the class of an entry: versions, origin and calls tuned together. Only equal classes are comparable."""
    return (
        *measured_with(entry).values(),
        "measured" if evidence(entry).is_measured else "set by hand",
        together(entry),
    )


def best_of_classes(entries: Iterable[StoredEntry]) -> list[StoredEntry]:
    """Return the best entry of each provenance class."""
    best: dict[tuple[str, ...], StoredEntry] = {}
    for entry in entries:
        known = best.setdefault(provenance_class(entry), entry)
        if evidence(entry) > evidence(known):
            best[provenance_class(entry)] = entry
    return list(best.values())


def by_preference(entries: Iterable[StoredEntry]) -> list[StoredEntry]:
    """Return the entries of a key in lookup order: lookups on this machine use the first.

    The order: measured before set by hand; then fewest differences from the current environment; then tuned together
    with other calls, so that these keep one configuration; then the newest.
    """

    def rank(entry: StoredEntry) -> tuple[Any, ...]:
        found = evidence(entry)
        return found.is_measured, -len(differences(entry)), bool(together(entry)), found.time, found

    return sorted(best_of_classes(entries), key=rank, reverse=True)


class Verdict(NamedTuple):
    """The outcome of comparing two entries of a key.

    Attributes:
        takes: Whether the new entry replaces the existing entry.
        why: The reason, in words.
        is_conflict: Whether the configurations differ and the entries do not show which is better: one was set by
            hand, or their speed-ups are about equal.
    """

    takes: bool
    why: str
    is_conflict: bool = False


def judge(ours: StoredEntry, theirs: StoredEntry) -> Verdict:
    """Compare two different entries of one key, for a place that keeps a single entry per key."""
    mine, other = evidence(ours), evidence(theirs)
    is_same = ours.config == theirs.config and ours.config_type == theirs.config_type
    if not mine.is_measured or not other.is_measured:
        is_newer = not mine.is_measured and not other.is_measured and is_same and other > mine
        return Verdict(is_newer, f"{'theirs' if mine.is_measured else 'ours'} was set by hand", not is_same)
    if together(ours) != together(theirs) and not is_same and (calls := calls_of(ours)):
        takes = calls <= calls_of(theirs) and other.time > mine.time
        return Verdict(takes, "ours was tuned together with other calls", not takes)
    if measured_with(ours) != measured_with(theirs):
        return _of_classes(ours, theirs)
    if is_same:
        return Verdict(other > mine, "the same configuration")
    if together(ours) != together(theirs):
        mine, other = mine._replace(speedup=_own_speedup(ours)), other._replace(speedup=_own_speedup(theirs))
    if mine.is_compared != other.is_compared:
        which = "ours" if mine.is_compared else "theirs"
        return Verdict(other > mine, f"only {which} was compared in the step of a program")
    about_equal = max(mine.speedup, other.speedup) < _APART * min(mine.speedup, other.speedup)
    why = f"ours has {ratio(mine.speedup)} the heuristic's speed, theirs {ratio(other.speedup)}"
    return Verdict(other > mine, why, about_equal)


def _own_speedup(entry: StoredEntry) -> float:
    """Return the speed-up of an entry for its own call."""
    return _positive(entry.speedup) or 1.0


def _of_classes(ours: StoredEntry, theirs: StoredEntry) -> Verdict:
    mine, other = differences(ours), differences(theirs)
    if len(mine) != len(other):
        worse = "ours" if len(mine) > len(other) else "theirs"
        return Verdict(worse == "ours", f"{worse} was {text_of_differences(mine if worse == 'ours' else other)}")
    takes = evidence(theirs).time > evidence(ours).time
    return Verdict(takes, f"measured with other versions, {'ours' if takes else 'theirs'} earlier")


def _positive(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 < value <= sys.float_info.max else None
