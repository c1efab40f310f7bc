# SPDX-License-Identifier: Apache-2.0
"""Estimates the time left of several searches from their finished calls and rounds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Final

from ejkernel.ops.autotuner.trials.events import RoundsFinished
from ejkernel.ops.core.types import ConfigKey

_ENOUGH: Final = 0.25  # of the candidates of a call, before their time is extrapolated
_PAIR: Final = 2  # candidates of a confirmation run


@dataclasses.dataclass(slots=True)
class _Rounds:
    """The rounds of one measurement.

    Attributes:
        event: The last event.
        began: When it began, in seconds.
        samples: Number of samples so far.
        expected: Seconds of this confirmation run as expected before it began.
    """

    event: RoundsFinished
    began: float
    now: float
    samples: int = 0
    expected: float | None = None

    def sample_seconds(self) -> float | None:
        """Return the seconds of a sample with all that it needs; `None` before the first round has ended."""
        return (self.now - self.began) / self.samples if self.samples else None

    def left(self) -> float | None:
        """Return the seconds left, at most: slow candidates may be dropped early."""
        per_sample = self.sample_seconds()
        rounds = self.event.planned - self.event.done
        return None if per_sample is None else per_sample * rounds * self.event.candidates


@dataclasses.dataclass(slots=True)
class _Search:
    """The state of one search; times are in seconds of the clock."""

    began: float
    done: float = 0.0
    compiled: float | None = None
    ended: float | None = None
    rounds: _Rounds | None = None


class TimeLeft:
    """The time left of `count` searches.

    Args:
        count: Number of searches.
        clock: Source of seconds.
        budget: Seconds for each of them.
        measures: Whether candidates are measured after they are compiled; `finish` then ends a search.
    """

    def __init__(
        self, count: int, clock: Callable[[], float], *, budget: float | None = None, measures: bool = True
    ) -> None:
        self._count, self._clock, self._budget, self._measures = count, clock, budget, measures
        self._searches: dict[ConfigKey, _Search] = {}
        self._together = 1  # searches that ran at the same time
        self._stretched: list[float] = []  # seconds of confirmation runs as multiples of those expected

    def step(self, key: ConfigKey, share: float) -> None:
        """Note that a search has compiled this share of its candidates."""
        now = self._clock()
        search = self._searches.setdefault(key, _Search(now))
        search.done = share
        if share >= 1 and search.compiled is None:
            search.compiled = now
            search.ended = None if self._measures else now
        self._together = max(self._together, len(self._running()))

    def sample(self, event: RoundsFinished) -> None:
        """Note finished rounds of a search."""
        search, now = self._searches.setdefault(event.key, _Search(self._clock())), self._clock()
        before = search.rounds
        is_same = before is not None and before.event.is_confirmation == event.is_confirmation
        if before is None or not is_same or event.done < before.event.done:
            is_first_confirmation = event.is_confirmation and before is not None and not is_same
            expected = self._confirmation(before) if is_first_confirmation else None
            search.rounds = _Rounds(event, now, now, event.done * event.candidates, expected)
            return
        before.samples += (event.done - before.event.done) * event.candidates
        before.event, before.now = event, now

    def finish(self, key: ConfigKey) -> None:
        """Note the end of a search."""
        search, now = self._searches.get(key), self._clock()
        if search is None or search.ended is not None:
            return
        search.ended, search.done = now, 1.0
        rounds = search.rounds
        if rounds is not None and rounds.event.is_confirmation and rounds.expected:
            self._stretched.append((now - rounds.began) / rounds.expected)

    def of_rounds(self, key: ConfigKey) -> str:
        """Return the time left of a search's current measurement, in words; empty before its first round has ended."""
        rounds = self._searches[key].rounds if key in self._searches else None
        left = None if rounds is None else rounds.left()
        if rounds is None or left is None:
            return ""
        if rounds.event.is_confirmation:
            return f", about {self._confirming(rounds, left):.0f} s left"
        then = self._confirmation(rounds)
        return f", about {left:.0f} s left, then confirming" + (f" for about {then:.0f} s" if then else "")

    @property
    def knows_calls(self) -> bool:
        """Whether the time of all calls can be estimated: from a search that has ended, or from the first one's rounds.

        With a budget, the rounds of the first search say little about the others.
        """
        return any(search.ended is not None for search in self._searches.values()) or self.by_first() is not None

    def total(self) -> str:
        """Return the time left of all searches, in words; empty if nothing is known about it."""
        ended = [search.ended - search.began for search in self._searches.values() if search.ended is not None]
        running = self._running()
        if len(ended) == self._count:
            return ""
        if ended:
            # With a budget, the unknown calls count as one that spends it, so that a cheap call does not stand for all.
            each = statistics.fmean([*ended, *([] if self._budget is None else [self._budget])])
            todo = (self._count - len(self._searches)) * each + sum(self._left(one, each) for one in running)
            return f", about {todo / self._together:.0f} s left"
        if self._budget is not None:
            most = self._budget * (self._count - sum(search.done for search in running))
            words = f"{self._budget:g} s per call, plus compiling and warming up"
            return f", about {most:.0f} s left ({words})" if most > 0 else ""
        return self._by_first_in_words() or self._to_compile(running)

    def by_first(self) -> float | None:
        """Return the seconds left if all calls take as long as the first, now being measured.

        `None` with a budget, and before the first call's rounds show how long it takes.
        """
        running = self._running()
        is_first = len(running) == 1 == len(self._searches) and self._budget is None
        if not is_first or running[0].rounds is None or running[0].rounds.left() is None:
            return None
        own: float = self._left(running[0], 0.0)
        return own + (self._count - 1) * (self._clock() - running[0].began + own)

    def _by_first_in_words(self) -> str:
        seconds = self.by_first()
        if seconds is None:
            return ""
        return f", about {seconds:.0f} s left" + " if all calls take as long" * (self._count > 1)

    def _to_compile(self, running: list[_Search]) -> str:
        """Return the time of compiling the first searches, in words."""
        known = [one for one in running if one.compiled is None and one.done >= _ENOUGH]
        if len(known) < len(running) or not known:
            return ""
        left = max((self._clock() - one.began) * (1 - one.done) / one.done for one in known)
        return f", about {left:.0f} s left to compile" if self._measures or self._count == 1 else ""

    def _left(self, search: _Search, each: float) -> float:
        """Return the seconds left of a running search, if others took `each` seconds."""
        left = max(each - (self._clock() - search.began), 0.0)
        rounds = search.rounds
        own = None if rounds is None else rounds.left()
        if rounds is None or own is None:
            return left
        if rounds.event.is_confirmation:
            return self._confirming(rounds, own)
        return own + (self._confirmation(rounds) or 0.0)

    def _confirmation(self, rounds: _Rounds | None) -> float | None:
        """Return the seconds of a confirmation run of as many rounds, as long as earlier ones took."""
        per_sample = None if rounds is None else rounds.sample_seconds()
        if rounds is None or per_sample is None:
            return None
        stretched = statistics.fmean(self._stretched) if self._stretched else 1.0
        return per_sample * _PAIR * rounds.event.planned * stretched

    def _confirming(self, rounds: _Rounds, left: float) -> float:
        """Return the seconds left of a confirmation run, which goes on for longer if earlier ones did."""
        expected = (rounds.expected or 0.0) - (rounds.now - rounds.began)
        return max(left, expected)

    def _running(self) -> list[_Search]:
        return [search for search in self._searches.values() if search.ended is None]
