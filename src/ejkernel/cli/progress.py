# SPDX-License-Identifier: Apache-2.0
"""The progress of searches: a bar on a terminal, one line per call on a pipe."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn

from ejkernel.cli.time_left import ENOUGH, Rounds, TimeLeft
from ejkernel.ops.autotuner.trials.challenge import clock_note
from ejkernel.ops.autotuner.trials.events import CandidateFinished, Event, RoundsFinished, SearchFinished
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.formatting import counted, duration

_WIDE: Final = 140  # columns of a terminal that has room for a bar beside the text
_LONG: Final = 10.0  # seconds left that are worth a line on a pipe
_BAR: Final = 42  # columns of the bar with its spaces


class SearchBar:
    """Shows the current call, its candidates, the best time so far and the time left.

    Args:
        progress: The bar.
        console: The console.
        left: The time left of the calls.
        doing: The action in words, e.g. "tuning".
    """

    def __init__(self, progress: Progress, console: Console, left: TimeLeft, doing: str) -> None:
        self._progress, self._console, self._left, self._doing = progress, console, left, doing
        self._task: TaskID = progress.add_task(doing, total=max(left.count, 1), note="")
        self._best: dict[ConfigKey, Outcome] = {}
        self._current: tuple[Invocation[Any, Any], int, int] | None = None
        self._has_told = False

    def hear(self, event: Event) -> None:
        """Show the time of a measured candidate if it is the best of its call so far, and finished rounds.

        As in the tables, the ratio to the heuristic in the same rounds decides, if it is known.
        """
        if isinstance(event, SearchFinished):
            self._left.finish(event.key)
        elif isinstance(event, RoundsFinished):
            self._left.sample(event)
            self._show_again(event.key)
            self._tell_once(event.key)
        elif isinstance(event, CandidateFinished) and event.outcome.seconds is not None:
            best = self._best.get(event.key)
            if best is None or _is_faster(event.outcome, best):
                self._best[event.key] = event.outcome
                self._show_again(event.key)

    def step(self, inv: Invocation[Any, Any], done: int, total: int) -> None:
        """Show that a call has `done` finished candidates of `total`."""
        earlier, share = self._left.searches.get(inv.key), done / max(total, 1)
        before = None if earlier is None else earlier.done
        self._left.step(inv.key, share, total)
        self._current = (inv, done, total)
        self._show(*self._current)
        is_known = not self._left.measures and (before or 0) < ENOUGH <= share and (self._left.of_all() or 0) >= _LONG
        if (before is None or is_known) and not self._console.is_terminal:
            where = f"({self._number(inv)} of {self._left.count})"
            left = self._left.total(" for all calls")
            count = counted(total, "candidate") if before is None else f"{done} of {counted(total, 'candidate')}"
            text = f"{self._doing} {inv.op_id} {where}, {count}{left}"
            self._console.print(text, highlight=False, soft_wrap=True)

    def _tell_once(self, key: ConfigKey) -> None:
        """Print the time left of the first call on a pipe, when its rounds have shown it."""
        rounds = self._rounds(key)
        if self._console.is_terminal or self._has_told or rounds is None or (rounds.left() or 0) < _LONG:
            return
        self._has_told = True
        left = rounds.in_words(" for its candidates").removeprefix(", ")
        self._console.print(f"  {key.op.partition('@')[0]}: {left}", highlight=False, soft_wrap=True)

    def _show_again(self, key: ConfigKey) -> None:
        """Show the current call again if it has this key."""
        if self._current is not None and self._current[0].key == key:
            self._show(*self._current)

    def _show(self, inv: Invocation[Any, Any], done: int, total: int) -> None:
        fastest = self._best.get(inv.key)
        best = "" if fastest is None else f", best {duration(fastest.seconds)}{clock_note(fastest)}"
        share = "" if fastest is None or fastest.relative is None else f" ({fastest.relative:.0%} of heuristic)"
        number, left, count = self._number(inv), self._left.total(), self._left.count
        rounds, finished = self._rounds(inv.key), sum(search.done for search in self._left.searches.values())
        if done >= total:
            is_last = finished >= count
            long, short = f"confirming the best of {total}", "confirming"
            if rounds is not None:
                event = rounds.event
                if not event.is_confirmation:
                    long, short = f"measuring {counted(event.candidates, 'candidate')}", "measuring"
                left = left if self._left.of_all() is not None and not is_last else rounds.in_words()
                left = f", round {min(event.done + 1, event.planned)} of {event.planned}{left}"
            elif is_last:
                left = ""
        elif best:
            long, short = f"candidate {done} of {total}", f"{done}/{total}"
        else:
            long, short = f"compiling, {done} of {total} done", f"compiling, {done}/{total}"
        notes = (
            f"call {number} of {count}, {inv.op_id}: {long}{best}{share}{left}",
            f"call {number} of {count}, {inv.op_id}: {long}{best}{left}",
            f"{number}/{count} {inv.op_id}: {short}{best}{left}",
            f"{number}/{count} {inv.op_id}: {short}{best}{left.partition(' (')[0]}",
            f"{number}/{count} {inv.op_id}: {short}{best}",
            f"{number}/{count}: {short}{best}",
        )
        note = next((text for text in notes if len(text) <= self._columns), notes[-1])
        self._progress.update(self._task, completed=finished, note=note)

    @property
    def _columns(self) -> int:
        """The columns of the text."""
        width = self._console.width
        return width - _BAR - len(self._doing) if width >= _WIDE else width

    def _number(self, inv: Invocation[Any, Any]) -> int:
        return list(self._left.searches).index(inv.key) + 1

    def _rounds(self, key: ConfigKey) -> Rounds | None:
        return self._left.searches[key].rounds if key in self._left.searches else None


def _is_faster(outcome: Outcome, best: Outcome) -> bool:
    """Return whether an outcome is faster than the best so far."""
    if outcome.relative is not None and best.relative is not None:
        return outcome.relative < best.relative
    return (outcome.seconds or math.inf) < (best.seconds or math.inf)


@contextlib.contextmanager
def bars(console: Console, left: TimeLeft, doing: str) -> Iterator[SearchBar]:
    """Show the progress of calls for the `with` block; see `SearchBar`."""
    columns: list[ProgressColumn] = [TextColumn("{task.fields[note]}", markup=False)]
    if console.width >= _WIDE:  # otherwise the text needs the whole line
        columns = [TextColumn("{task.description}"), BarColumn(), *columns]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield SearchBar(progress, console, left, doing)
