# SPDX-License-Identifier: Apache-2.0
"""The last lines of `ejkernel tune`: the result of each call, counted once, and how to continue."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.autotuner.trials.status import SearchState
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.core.examples import guessed_integers
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.formatting import arguments, counted

_KINDS: Final = {
    "faster": "faster than the heuristic",
    "kept": "with the heuristic kept",
    "undecided": "undecided (heuristic kept)",
    "stays": "with the configuration saved earlier",
    "not saved": "tuned, but not saved",
    "not finished": "not finished",
    "failed": "failed",
    "not started": "not started",
}
_SHOWN: Final = 6  # calls not started
_LEAST: Final = 10.0  # seconds of a budget worth suggesting


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOutcome:
    """The results of one run of the command.

    Attributes:
        calls: The calls to tune.
        searches: Their searches; failed ones may be missing.
        has_entry: Whether a call has a saved configuration now.
        is_tuned: Whether it has one of a finished search, so that another run skips it without `--force`.
        store: The cache.
        seconds: Duration of all searches.
        budget: Seconds for each search.
        time: Seconds for all calls.
        not_started: The calls left when the time for all calls was over.
    """

    calls: Sequence[Invocation[Any, Any]]
    searches: Sequence[AutotuneData]
    has_entry: Callable[[Invocation[Any, Any]], bool]
    is_tuned: Callable[[Invocation[Any, Any]], bool]
    store: PersistentCache
    seconds: float
    budget: float | None = None
    time: float | None = None
    not_started: Sequence[Invocation[Any, Any]] = ()

    def lines(self) -> list[str]:
        """Return the summary: counts, reasons of unfinished searches, and how to continue."""
        lines = (self._counts(), *self._reasons(), self.store.how_to_import, self._how_to_go_on())
        return [printable(line) for line in lines if line]

    def _kinds(self) -> dict[str, list[Invocation[Any, Any]]]:
        """Return the calls by their kind of result; each call has one."""
        found, own = collections.defaultdict(list), {search.key: search for search in self.searches}
        left = {inv.key for inv in self.not_started}
        for inv in self.calls:
            kind = "not started" if inv.key in left else _kind(own.get(inv.key))
            found[kind].append(inv)
        return found

    @property
    def failed(self) -> int:
        """The number of searches that failed, or lose their results when the command ends."""
        kinds = self._kinds()
        return len(kinds.get("failed", ())) + len(kinds.get("not saved", ()))

    def _counts(self) -> str:
        kinds = self._kinds()
        parts = [f"{len(kinds[kind])} {words}" for kind, words in _KINDS.items() if kind in kinds]
        saved = [search for search in self.searches if not search.not_saved]
        where = f"saved in {self.store.path}" if saved else "none saved yet"
        if not saved and all(map(self.has_entry, self.calls)):
            where = "the saved configurations stay; --force tunes again"
        return f"{counted(len(self.calls), 'call')} in {self.seconds:.1f} s: {', '.join(parts)}; {where}"

    def _open(self, *, tuned: bool = False) -> list[AutotuneData]:
        """Return the unfinished searches that another run continues, or those of `tuned` calls, which it skips."""
        found = [search for search in self.searches if search.progress.state == SearchState.PARTIAL]
        return [search for search in found if self.is_tuned(search.inv) == tuned]

    @property
    def _can_continue(self) -> int:
        """The number of searches that another run continues or starts; with an entry, only `--force` starts one."""
        return len(self._open()) + sum(not self.has_entry(inv) for inv in self.not_started)

    @property
    def _lacks_references(self) -> bool:
        return any(search.lacks_reference for search in self.searches)

    def _reasons(self) -> Iterator[str]:
        for search in self.searches:
            if search.why and search.progress.state in (SearchState.PARTIAL, SearchState.UNDECIDED):
                yield f"{_name(search.inv)}: {search.progress.in_words}: {search.why}"
        whole = [search for search in self.searches if search.progress.state == SearchState.COMPLETE]
        alone = dict.fromkeys(_name(search.inv) for search in whole if len(search.outcomes) == 1)
        if alone:
            yield f"Nothing to compare with the heuristic, because the space has nothing else: {'; '.join(alone)}"
        if self._lacks_references:
            # The warnings name the calls: a search does not know if its worker was ended.
            again = f" --force {self._more(self.searches)} gives it more time."
            yield (
                "Some candidates were compared with the heuristic's results, because the reference took too long to "
                f"compile for the budget; the warnings above name the calls.{'' if self._can_continue else again}"
            )
        for search in self.searches:
            if guessed := integers_in_words(search.inv):
                yield f"{_name(search.inv)}: {guessed}"
        for search in self.searches:
            if search.is_only_here:
                yield f"{_name(search.inv)}: not saved: {search.not_saved}"
        yield from self._without_search()

    def _without_search(self) -> Iterator[str]:
        """Yield the calls not started, and those with a failed search."""
        if self.not_started:
            names = [_name(inv) for inv in self.not_started[:_SHOWN]]
            others = len(self.not_started) - len(names)
            more = f"; and {counted(others, 'other')}" if others else ""
            yield f"not started, because the time was over: {'; '.join(names)}{more}"
        failed = self._kinds().get("failed", [])
        if failed:
            which = "its search" if len(failed) == 1 else "their searches"
            yield (
                f"{counted(len(failed), 'call')} failed ({'; '.join(map(_name, failed))}): the warnings above say why. "
                f"Running the command again repeats {which} from the start."
            )

    def _how_to_go_on(self) -> str:
        found, number = self._open(), self._can_continue
        without = sum(not self.has_entry(inv) for inv in self.calls)
        parts = []
        if number:
            which = "search" if number == 1 else "searches"
            helps = found and (self.budget is not None or self._lacks_references)
            more = f", with {self._more(found)} for more time" if helps else ""
            parts.append(f"{number} {which} can continue: run the command again{more}.")
        if skipped := self._open(tuned=True):
            keep = "call keeps" if len(skipped) == 1 else "calls keep"
            again = f"--force {self._more(skipped)} searches again from the start"
            parts.append(f"{len(skipped)} {keep} the configuration saved earlier; {again}.")
        if without:
            have = "call has" if without == 1 else "calls have"
            parts.append(f"{without} {have} no saved configuration yet, so EJKERNEL_ON_MISS=error raises.")
        return " ".join(parts)

    def _more(self, searches: Sequence[AutotuneData]) -> str:
        """Return the option for more time."""
        if self.time is not None:
            return f"--time {doubled(self.time)} (seconds for all calls)"
        return f"--budget {doubled(self.budget, *(search.seconds for search in searches))} (seconds for each call)"


def doubled(*seconds: float | None) -> int:
    """Return twice the longest of some times, at least 20 s and rounded up to ten seconds: a budget worth a new try."""
    return 10 * math.ceil(2 * max(_LEAST, *(each or 0.0 for each in seconds)) / 10)


def integers_in_words(inv: Invocation[Any, Any]) -> str:
    """Return a sentence about integer arrays with values guessed for the measurement; empty without any."""
    found = guessed_integers(inv)
    return found and (
        f"the values of {found} were random zeros and ones. If they affect the time, give the kernel example_inputs."
    )


def _kind(search: AutotuneData | None) -> str:
    if search is None or search.progress.state == SearchState.FAILED:
        return "failed"
    if search.is_only_here:
        return "not saved"
    if not search.is_kept:
        return "stays" if search.not_saved else "faster"
    if search.progress.state == SearchState.PARTIAL:
        return "not finished"
    if search.not_saved:
        return "stays"
    return "undecided" if search.progress.state == SearchState.UNDECIDED else "kept"


def _name(inv: Invocation[Any, Any]) -> str:
    return f"{inv.op_id_v} {arguments(inv.description)}"
