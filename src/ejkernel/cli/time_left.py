# SPDX-License-Identifier: Apache-2.0
"""Estimates the time left of several searches from their finished calls and rounds."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

from ejkernel.ops.autotuner.trials.events import RoundsFinished
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.formatting import rounded

ENOUGH: Final = 0.25  # of the candidates of a call, before their time is extrapolated
_DROPPING: Final = 4  # rounds that drop many candidates, so that their time says little


@dataclasses.dataclass(slots=True)
class Rounds:
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

    def in_words(self, of: str = "") -> str:
        """Return the time left in words; empty if the rounds say too little. See `TimeLeft.total` for `of`."""
        left = self.left()
        end = "" if self.event.is_confirmation else ", then confirming"
        return "" if left is None else f", about {left:.0f} s left{of}{end}"


@dataclasses.dataclass(slots=True)
class _Search:
    """The state of one search; times are in seconds of the clock.

    Attributes:
        operation: Its operation, or operation and direction.
        began: When it began.
        candidates: Number of its candidates.
        done: Finished share of them.
        ended: When it ended, if it has.
        rounds: Its current measurement, if it has begun.
    """

    operation: str
    began: float
    candidates: int = 1
    done: float = 0.0
    ended: float | None = None
    rounds: Rounds | None = None


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

    Attributes:
        count: Number of searches.
        searches: The searches that have begun, in this order; several may run.
    """

    def __init__(
        self,
        operations: Sequence[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        budget: float | None = None,
        limit: float | None = None,
        measures: bool = True,
    ) -> None:
        self._clock, self._budget, self.measures = clock, budget, measures
        self._operations = collections.Counter(map(self._family, operations))
        self._end = math.inf if limit is None else clock() + limit
        self.count, self.searches = len(operations), dict[ConfigKey, _Search]()
        self._together = 1  # searches that ran at the same time

    def step(self, key: ConfigKey, share: float, candidates: int = 1) -> None:
        """Note that a search has compiled this share of its candidates."""
        search = self.searches.setdefault(key, _Search(self._family(key.op), self._clock(), candidates))
        search.done = share
        if share >= 1 and not self.measures:
            self.finish(key)
        self._together = max(self._together, len(self._running()))

    def sample(self, event: RoundsFinished) -> None:
        """Note finished rounds of a search."""
        search, now = self.searches.get(event.key), self._clock()
        if search is None:  # a candidate has started it
            return
        rounds = search.rounds
        is_same = rounds is not None and rounds.event.is_confirmation == event.is_confirmation
        if rounds is None or not is_same or event.done < rounds.event.done:
            search.rounds = Rounds(event, now, now, event.done * event.candidates)
            return
        rounds.samples += (event.done - rounds.event.done) * event.candidates
        rounds.event, rounds.now = event, now

    def finish(self, key: ConfigKey) -> None:
        """Note the end of a search."""
        search = self.searches.get(key)
        if search is not None and search.ended is None:
            search.ended, search.done = self._clock(), 1.0

    def total(self, of: str = "") -> str:
        """Return the time left of all searches, in words; empty if nothing is known about it.

        Args:
            of: What the time is for, e.g. ` for all calls`, if the words should say so.
        """
        running = self._running()
        if len(self.searches) >= self.count and not running:
            return ""
        seconds = self.of_all()
        if seconds is not None:
            return f", about {max(min(seconds, self._end - self._clock()), 0.0):.0f} s left{of}"
        if self._budget is not None:
            most = min(self._budget * (self.count - sum(search.done for search in running)), self._end - self._clock())
            words = f"{rounded(self._budget)} s per call, plus compiling and warming up"
            return f", about {most:.0f} s left{of} ({words})" if most > 0 else ""
        return self._to_compile(running, of) if self.measures else ""

    def of_all(self) -> float | None:
        """Return the seconds left of all searches; `None` if no search of some operation tells."""
        if self.measures and all(search.ended is None for search in self.searches.values()):
            return None
        unknown = self._operations - collections.Counter(search.operation for search in self.searches.values())
        parts = [self._left(search) for search in self._running()]
        parts += [self._usual(operation) for operation in unknown.elements()]
        known = [part for part in parts if part is not None]
        return sum(known) / self._together if len(known) == len(parts) else None

    def _usual(self, operation: str) -> float | None:
        """Return the mean seconds of a search of an operation; `None` if no search tells."""
        searches = [search for search in self.searches.values() if search.operation == operation]
        if not self.measures:
            each = self._of_candidate(operation)
            return None if each is None else each * statistics.fmean(search.candidates for search in searches)
        known = [search.ended - search.began for search in searches if search.ended is not None]
        if self._budget is not None:  # a cheap call must not stand for all, so the budget counts as one more
            known.append(self._budget)
        return statistics.fmean(known) if known else None

    def _to_compile(self, running: list[_Search], of: str) -> str:
        """Return the time of compiling the first searches, in words."""
        known = [one for one in running if ENOUGH <= one.done < 1]
        if len(known) < len(running) or not known or len(self.searches) > len(running):
            return ""
        left = max((self._clock() - one.began) * (1 - one.done) / one.done for one in known)
        return f", about {left:.0f} s left{of} to compile"

    def _left(self, search: _Search) -> float | None:
        """Return the seconds left of a running search; `None` if neither its progress nor earlier searches tell."""
        if not self.measures:
            each = self._of_candidate(search.operation)
            return None if each is None else each * search.candidates * (1 - search.done)
        usual, own = self._usual(search.operation), None if search.rounds is None else search.rounds.left()
        is_confirming = search.rounds is not None and search.rounds.event.is_confirmation
        rest = None if usual is None else max(usual - (self._clock() - search.began), 0.0)
        if own is None or rest is None or is_confirming:
            return rest if own is None else own
        return max(own, rest)  # checks on new inputs precede the confirmation run

    def _of_candidate(self, operation: str) -> float | None:
        """Return the mean seconds of a finished candidate of an operation; `None` if too few have finished."""
        known = [one for one in self.searches.values() if one.operation == operation and one.done >= ENOUGH]
        finished = sum(one.done * one.candidates for one in known)
        return sum((one.ended or self._clock()) - one.began for one in known) / finished if known else None

    def _running(self) -> list[_Search]:
        return [search for search in self.searches.values() if search.ended is None]

    def _family(self, op: str) -> str:
        """Return the operation of a call, `rms_norm` for `rms_norm.bwd@v0`; without measurements with its direction.

        Compiling or simulating a backward call may take a hundred times as long as its forward call.
        """
        name = op.partition("@")[0]
        return name.partition(".")[0] if self.measures else name
