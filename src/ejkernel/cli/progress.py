# SPDX-License-Identifier: Apache-2.0
"""The progress of searches: a bar on a terminal, one line per call on a pipe."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn

from ejkernel.ops.autotuner.trials.events import CandidateFinished, Event, RoundsFinished
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.formatting import counted, duration

_WIDE: Final = 140  # columns of a terminal that has room for a bar beside the text
_BAR: Final = 42  # columns of the bar with its spaces
_ENOUGH: Final = 0.25  # of a call, before the time left is estimated


@dataclasses.dataclass(frozen=True, slots=True)
class _Rounds:
    """The rounds of a measurement, and when it began and was last heard of, in seconds."""

    event: RoundsFinished
    began: float
    now: float

    @classmethod
    def after(cls, before: _Rounds | None, event: RoundsFinished, now: float) -> _Rounds:
        """Return the rounds after an event."""
        if before is None or event.done < before.event.done:
            return cls(event, now, now)
        is_same = event.is_confirmation == before.event.is_confirmation
        return cls(event, before.began if is_same else now, now)

    def number(self) -> str:
        """Return the current round in words."""
        return f", round {min(self.event.done + 1, self.event.planned)} of {self.event.planned}"

    def left(self) -> str:
        """Return the time left in words; empty before the first round has ended."""
        done = self.event.done
        seconds = (self.now - self.began) * (self.event.planned - done) / max(done, 1)
        then = "" if self.event.is_confirmation else ", then confirming"
        return f", about {seconds:.0f} s left{then}" if done else ""


class SearchBar:
    """Shows the current call, its candidates, the best time so far and the time left.

    Args:
        progress: The bar.
        console: The console.
        count: Number of calls.
        doing: The action in words, e.g. "tuning".
        budget: Seconds for each call.
        clock: Source of seconds.
    """

    def __init__(
        self,
        progress: Progress,
        console: Console,
        count: int,
        doing: str,
        *,
        budget: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._console, self._doing = progress, console, doing
        self._count, self._budget, self._clock = count, budget, clock
        self._task: TaskID = progress.add_task(doing, total=max(count, 1), note="")
        self._started = clock()
        self._shares: dict[ConfigKey, float] = {}  # finished share of each started call; several may run
        self._best: dict[ConfigKey, float] = {}  # seconds
        self._current: tuple[Invocation[Any, Any], int, int] | None = None
        self._rounds: dict[ConfigKey, _Rounds] = {}

    def hear(self, event: Event) -> None:
        """Show the time of a measured candidate if it is the best of its call so far, and finished rounds."""
        if isinstance(event, RoundsFinished):
            before, now = self._rounds.get(event.key), self._clock()
            self._rounds[event.key] = _Rounds.after(before, event, now)
            if self._current is not None and self._current[0].key == event.key:
                self._show(*self._current)
        if not isinstance(event, CandidateFinished) or event.outcome.seconds is None:
            return
        if event.outcome.seconds < self._best.get(event.key, math.inf):
            self._best[event.key] = event.outcome.seconds
            if self._current is not None and self._current[0].key == event.key:
                self._show(*self._current)

    def step(self, inv: Invocation[Any, Any], done: int, total: int) -> None:
        """Show that a call has `done` finished candidates of `total`."""
        is_new = inv.key not in self._shares
        self._shares[inv.key] = done / max(total, 1)
        self._current = (inv, done, total)
        self._show(*self._current)
        if is_new and not self._console.is_terminal:
            where = f"({self._number(inv)} of {self._count})"
            text = f"{self._doing} {inv.op_id} {where}, {counted(total, 'candidate')}{self._left()}"
            self._console.print(text, highlight=False, soft_wrap=True)

    def _show(self, inv: Invocation[Any, Any], done: int, total: int) -> None:
        best = f", best {duration(self._best[inv.key])}" if inv.key in self._best else ""
        number, left = self._number(inv), self._left()
        rounds = self._rounds.get(inv.key)
        if done >= total:
            is_last = sum(self._shares.values()) >= self._count
            long, short = f"confirming the best of {total}", "confirming"
            if rounds is not None and not rounds.event.is_confirmation:
                long, short = f"measuring {counted(rounds.event.candidates, 'candidate')}", "measuring"
            left = "" if is_last else left
            if rounds is not None:
                left = f"{rounds.number()}{left or rounds.left()}"
        elif best:
            long, short = f"candidate {done} of {total}", f"{done}/{total}"
        else:
            long, short = f"compiling, {done} of {total} done", f"compiling, {done}/{total}"
        notes = (
            f"call {number} of {self._count}, {inv.op_id}: {long}{best}{left}",
            f"{number}/{self._count} {inv.op_id}: {short}{best}{left}",
            f"{number}/{self._count} {inv.op_id}: {short}{best}{left.partition(' (')[0]}",
            f"{number}/{self._count} {inv.op_id}: {short}{best}",
            f"{number}/{self._count}: {short}{best}",
        )
        note = next((text for text in notes if len(text) <= self._columns), notes[-1])
        self._progress.update(self._task, completed=sum(self._shares.values()), note=note)

    @property
    def _columns(self) -> int:
        """The columns of the text."""
        width = self._console.width
        return width - _BAR - len(self._doing) if width >= _WIDE else width

    def _number(self, inv: Invocation[Any, Any]) -> int:
        return list(self._shares).index(inv.key) + 1

    def _left(self) -> str:
        return _time_left(self._clock() - self._started, sum(self._shares.values()), self._count, self._budget)


@contextlib.contextmanager
def bars(console: Console, count: int, doing: str, *, budget: float | None = None) -> Iterator[SearchBar]:
    """Show the progress of `count` calls for the `with` block; see `SearchBar`."""
    columns: list[ProgressColumn] = [TextColumn("{task.fields[note]}", markup=False)]
    if console.width >= _WIDE:  # otherwise the text needs the whole line
        columns = [TextColumn("{task.description}"), BarColumn(), *columns]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield SearchBar(progress, console, count, doing, budget=budget)


def _time_left(elapsed: float, finished: float, count: int, budget: float | None) -> str:
    """Return the seconds left in words; empty before anything is known about them.

    Args:
        elapsed: Seconds since the start.
        finished: Number of finished calls, with fractions for running ones.
        count: Number of all calls.
        budget: Seconds for each call.
    """
    # The first candidates include the start of JAX and the device, so their progress says little.
    estimate = elapsed / finished * (count - finished) if finished >= _ENOUGH else math.inf
    most = math.inf if budget is None else budget * (count - finished)
    if math.isinf(min(estimate, most)):
        return ""
    # Calls differ in size, so the first ones say little about the others.
    if budget is None or (estimate <= most and finished >= count / 2):
        return f", about {estimate:.0f} s left"
    return f", about {most:.0f} s left ({budget:g} s per call, plus compiling and warming up)"
