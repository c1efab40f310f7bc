# SPDX-License-Identifier: Apache-2.0
"""Estimates the time left of several searches from their finished calls and rounds."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Final

from ejkernel.ops.autotuner.trials.events import RoundsFinished
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.formatting import rounded

ENOUGH: Final = 0.25  # of the candidates of a call, before their time is extrapolated
_DROPPING: Final = 4  # rounds that drop many candidates, so that their time says little


@dataclasses.dataclass(slots=True)
class _Rounds:
    """The rounds of one measurement.

    Attributes:
        event: The last event.
        began: When it began, in seconds.
        now: When the last event came, in seconds.
        samples: Number of samples so far.
    """

    event: RoundsFinished
    began: float
    now: float
    samples: int = 0

    def left(self) -> float | None:
        """Return the seconds left, at most: further candidates may be dropped. `None` if the rounds say too little."""
        event = self.event
        if not self.samples or (event.done < min(_DROPPING, event.planned) and not event.is_confirmation):
            return None
        return (self.now - self.began) / self.samples * (event.planned - event.done) * event.candidates


@dataclasses.dataclass(slots=True)
class _Search:
    """The state of one search; times are in seconds of the clock."""

    operation: str
    began: float
    candidates: int = 1
    done: float = 0.0
    compiled: float | None = None
    ended: float | None = None
    rounds: _Rounds | None = None


class TimeLeft:
    """The time left of several searches.

    The searches of one operation, forward and backward, take similar times. The time of all is therefore known once
    each operation among them had a search that ended. If nothing is measured, the calls of one operation and direction
    take similar times for each candidate, and their time is known once one of them has finished a part of its own.

    Args:
        operations: The operation of each call, as in `Invocation.op_id`.
        clock: Source of seconds.
        budget: Seconds for each search.
        limit: Seconds for all searches.
        measures: Whether candidates are measured after they are compiled; `finish` then ends a search.
    """

    def __init__(
        self,
        operations: Sequence[str],
        clock: Callable[[], float],
        *,
        budget: float | None = None,
        limit: float | None = None,
        measures: bool = True,
    ) -> None:
        # Compiling or simulating a backward call may take a hundred times as long as its forward call.
        self._family: Callable[[str], str] = _operation if measures else _direction
        self._operations = collections.Counter(map(self._family, operations))
        self._clock, self._budget, self._measures = clock, budget, measures
        self._end = math.inf if limit is None else clock() + limit
        self._searches: dict[ConfigKey, _Search] = {}
        self._together = 1  # searches that ran at the same time

    def step(self, key: ConfigKey, share: float, candidates: int = 1) -> None:
        """Note that a search has compiled this share of its candidates."""
        now = self._clock()
        search = self._searches.setdefault(key, _Search(self._family(key.op), now, candidates))
        search.done = share
        if share >= 1 and search.compiled is None:
            search.compiled = now
            if not self._measures:
                search.ended = now
        self._together = max(self._together, len(self._running()))

    def sample(self, event: RoundsFinished) -> None:
        """Note finished rounds of a search."""
        now = self._clock()
        search = self._searches.setdefault(event.key, _Search(self._family(event.key.op), now))
        before = search.rounds
        is_same = before is not None and before.event.is_confirmation == event.is_confirmation
        if before is None or not is_same or event.done < before.event.done:
            search.rounds = _Rounds(event, now, now, event.done * event.candidates)
            return
        before.samples += (event.done - before.event.done) * event.candidates
        before.event, before.now = event, now

    def finish(self, key: ConfigKey) -> None:
        """Note the end of a search."""
        search = self._searches.get(key)
        if search is not None and search.ended is None:
            search.ended, search.done = self._clock(), 1.0

    def of_rounds(self, key: ConfigKey, of: str = "") -> str:
        """Return the time left of a search's current measurement, in words; empty before its first round has ended.

        Args:
            key: The call.
            of: See `total`.
        """
        rounds = self._searches[key].rounds if key in self._searches else None
        left = None if rounds is None else rounds.left()
        if rounds is None or left is None:
            return ""
        return f", about {left:.0f} s left{of}{'' if rounds.event.is_confirmation else ', then confirming'}"

    def seconds_of_rounds(self, key: ConfigKey) -> float:
        """Return the least seconds left of a search's measurements; 0 if its rounds say too little."""
        rounds = self._searches[key].rounds if key in self._searches else None
        return 0.0 if rounds is None else rounds.left() or 0.0

    @property
    def knows_calls(self) -> bool:
        """Whether the time of all calls can be estimated, from searches that have ended."""
        return self.of_all() is not None

    def total(self, of: str = "") -> str:
        """Return the time left of all searches, in words; empty if nothing is known about it.

        Args:
            of: What the time is for, e.g. ` for all calls`, if the words should say so.
        """
        running, count = self._running(), sum(self._operations.values())
        if len(self._searches) >= count and not running:
            return ""
        seconds = self.of_all()
        if seconds is not None:
            return f", about {max(min(seconds, self._end - self._clock()), 0.0):.0f} s left{of}"
        if self._budget is not None:
            most = min(self._budget * (count - sum(search.done for search in running)), self._end - self._clock())
            words = f"{rounded(self._budget)} s per call, plus compiling and warming up"
            return f", about {most:.0f} s left{of} ({words})" if most > 0 else ""
        return self._to_compile(running, of) if self._measures else ""

    def of_all(self) -> float | None:
        """Return the seconds left of all searches; `None` if no search of some operation tells."""
        if self._measures and all(search.ended is None for search in self._searches.values()):
            return None
        unknown = self._operations - collections.Counter(search.operation for search in self._searches.values())
        usual = self._usual if self._measures else self._usual_to_compile
        parts = [self._left(search) for search in self._running()]
        parts += [usual(operation) for operation in unknown.elements()]
        known = [part for part in parts if part is not None]
        return sum(known) / self._together if len(known) == len(parts) else None

    def _usual(self, operation: str) -> float | None:
        """Return the mean seconds of the ended searches of an operation; `None` without one."""
        searches = [search for search in self._searches.values() if search.operation == operation]
        ended = [search.ended - search.began for search in searches if search.ended is not None]
        # A cheap call must not stand for all, so the budget counts as one more.
        known = [*ended, *([] if self._budget is None else [self._budget])]
        return statistics.fmean(known) if known else None

    def _to_compile(self, running: list[_Search], of: str) -> str:
        """Return the time of compiling the first searches, in words."""
        known = [one for one in running if one.compiled is None and one.done >= ENOUGH]
        if len(known) < len(running) or not known or len(self._searches) > len(running):
            return ""
        left = max((self._clock() - one.began) * (1 - one.done) / one.done for one in known)
        return f", about {left:.0f} s left{of} to compile"

    def _left(self, search: _Search) -> float | None:
        """Return the seconds left of a running search; `None` if neither its progress nor earlier searches tell."""
        if not self._measures:
            each = self._of_candidate(search.operation)
            return None if each is None else each * search.candidates * (1 - search.done)
        usual, own = self._usual(search.operation), None if search.rounds is None else search.rounds.left()
        is_confirming = search.rounds is not None and search.rounds.event.is_confirmation
        rest = None if usual is None else max(usual - (self._clock() - search.began), 0.0)
        if own is None or rest is None or is_confirming:
            return rest if own is None else own
        return max(own, rest)  # checks on new inputs precede the confirmation run

    def _usual_to_compile(self, operation: str) -> float | None:
        """Return the seconds of a call that has not begun, as large as the others of its operation on average."""
        each = self._of_candidate(operation)
        sizes = [search.candidates for search in self._searches.values() if search.operation == operation]
        return None if each is None else each * statistics.fmean(sizes)

    def _of_candidate(self, operation: str) -> float | None:
        """Return the mean seconds of a finished candidate of an operation; `None` if too few have finished."""
        known = [one for one in self._searches.values() if one.operation == operation and one.done >= ENOUGH]
        finished = sum(one.done * one.candidates for one in known)
        return sum((one.ended or self._clock()) - one.began for one in known) / finished if known else None

    def _running(self) -> list[_Search]:
        return [search for search in self._searches.values() if search.ended is None]


def _operation(op: str) -> str:
    """Return the operation of a call, for forward and backward calls alike: `rms_norm` for `rms_norm.bwd@v0`."""
    return _direction(op).partition(".")[0]


def _direction(op: str) -> str:
    """Return the operation and direction of a call: `rms_norm.bwd` for `rms_norm.bwd@v0`."""
    return op.partition("@")[0]
