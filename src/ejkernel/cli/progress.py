# SPDX-License-Identifier: Apache-2.0
"""The progress of searches: a bar on a terminal, one line per call on a pipe."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn

from ejkernel.cli.time_left import ENOUGH, TimeLeft
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
        operations: The operation of each call.
        doing: The action in words, e.g. "tuning".
        budget: Seconds for each call.
        limit: Seconds for all calls.
        measures: Whether candidates are measured after they are compiled.
        clock: Source of seconds.
    """

    def __init__(
        self,
        progress: Progress,
        console: Console,
        operations: Sequence[str],
        doing: str,
        *,
        budget: float | None = None,
        limit: float | None = None,
        measures: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._console, self._doing, self._count = progress, console, doing, len(operations)
        self._measures = measures
        self._time = TimeLeft(operations, clock, budget=budget, limit=limit, measures=measures)
        self._task: TaskID = progress.add_task(doing, total=max(self._count, 1), note="")
        self._shares: dict[ConfigKey, float] = {}  # finished share of each started call; several may run
        self._best: dict[ConfigKey, Outcome] = {}
        self._current: tuple[Invocation[Any, Any], int, int] | None = None
        self._rounds: dict[ConfigKey, RoundsFinished] = {}
        self._has_told = False

    def hear(self, event: Event) -> None:
        """Show the time of a measured candidate if it is the best of its call so far, and finished rounds.

        As in the tables, the ratio to the heuristic in the same rounds decides, if it is known.
        """
        if isinstance(event, SearchFinished):
            self._time.finish(event.key)
        if isinstance(event, RoundsFinished):
            self._rounds[event.key] = event
            self._time.sample(event)
            self._show_again(event.key)
            self._tell_once(event.key)
        if not isinstance(event, CandidateFinished) or event.outcome.seconds is None:
            return
        best = self._best.get(event.key)
        if best is None or _is_faster(event.outcome, best):
            self._best[event.key] = event.outcome
            self._show_again(event.key)

    def step(self, inv: Invocation[Any, Any], done: int, total: int) -> None:
        """Show that a call has `done` finished candidates of `total`."""
        before, share = self._shares.get(inv.key), done / max(total, 1)
        self._shares[inv.key] = share
        self._time.step(inv.key, share, total)
        self._current = (inv, done, total)
        self._show(*self._current)
        is_known = not self._measures and (before or 0) < ENOUGH <= share and (self._time.of_all() or 0) >= _LONG
        if (before is None or is_known) and not self._console.is_terminal:
            where = f"({self._number(inv)} of {self._count})"
            left = self._time.total(" for all calls")
            count = counted(total, "candidate") if before is None else f"{done} of {counted(total, 'candidate')}"
            text = f"{self._doing} {inv.op_id} {where}, {count}{left}"
            self._console.print(text, highlight=False, soft_wrap=True)

    def _tell_once(self, key: ConfigKey) -> None:
        """Print the time left of the first call on a pipe, when its rounds have shown it."""
        if self._console.is_terminal or self._has_told or self._time.seconds_of_rounds(key) < _LONG:
            return
        self._has_told = True
        left = self._time.of_rounds(key, " for its candidates").removeprefix(", ")
        self._console.print(f"  {key.op.partition('@')[0]}: {left}", highlight=False, soft_wrap=True)

    def _show_again(self, key: ConfigKey) -> None:
        """Show the current call again if it has this key."""
        if self._current is not None and self._current[0].key == key:
            self._show(*self._current)

    def _show(self, inv: Invocation[Any, Any], done: int, total: int) -> None:
        fastest = self._best.get(inv.key)
        best = "" if fastest is None else f", best {duration(fastest.seconds)}{clock_note(fastest)}"
        share = "" if fastest is None or fastest.relative is None else f" ({fastest.relative:.0%} of heuristic)"
        number, left = self._number(inv), self._time.total()
        rounds = self._rounds.get(inv.key)
        if done >= total:
            is_last = sum(self._shares.values()) >= self._count
            long, short = f"confirming the best of {total}", "confirming"
            if rounds is not None and not rounds.is_confirmation:
                long, short = f"measuring {counted(rounds.candidates, 'candidate')}", "measuring"
            if rounds is not None:
                own = self._time.of_rounds(inv.key)
                left = f", round {min(rounds.done + 1, rounds.planned)} of {rounds.planned}" + (
                    left if self._time.knows_calls and not is_last else own
                )
            elif is_last:
                left = ""
        elif best:
            long, short = f"candidate {done} of {total}", f"{done}/{total}"
        else:
            long, short = f"compiling, {done} of {total} done", f"compiling, {done}/{total}"
        notes = (
            f"call {number} of {self._count}, {inv.op_id}: {long}{best}{share}{left}",
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


def _is_faster(outcome: Outcome, best: Outcome) -> bool:
    """Return whether an outcome is faster than the best so far."""
    if outcome.relative is not None and best.relative is not None:
        return outcome.relative < best.relative
    return (outcome.seconds or math.inf) < (best.seconds or math.inf)


@contextlib.contextmanager
def bars(
    console: Console,
    operations: Sequence[str],
    doing: str,
    *,
    budget: float | None = None,
    limit: float | None = None,
    measures: bool = True,
) -> Iterator[SearchBar]:
    """Show the progress of the calls of `operations` for the `with` block; see `SearchBar`."""
    columns: list[ProgressColumn] = [TextColumn("{task.fields[note]}", markup=False)]
    if console.width >= _WIDE:  # otherwise the text needs the whole line
        columns = [TextColumn("{task.description}"), BarColumn(), *columns]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield SearchBar(progress, console, operations, doing, budget=budget, limit=limit, measures=measures)
