# SPDX-License-Identifier: Apache-2.0
"""The statuses of candidates and of whole searches: one word for each."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping
from typing import Any, Final

from ejkernel.ops.errors import SerializationError
from ejkernel.ops.utils.formatting import ratio
from ejkernel.ops.utils.messages.names import is_count
from ejkernel.ops.utils.storage.serialize import from_plain


class Status(enum.StrEnum):
    """The result of one candidate; logs, bundles and tables show these values.

    Attributes:
        READY: Compiled and checked, but not measured yet; during a search, and in bundles.
        MEASURED: It has times.
        FAILED: It raised an exception.
        WRONG: Its results differ from the reference results.
        SAME: It compiles to the program of another candidate.
        PRUNED: It was not run because its program spills many registers, or because its estimated time is long.
        CRASHED: Its process died or was killed, or its thread was abandoned.
        SKIPPED: The time did not suffice for it.
        LEFT: The machine that runs it must compile it; in bundles only.
    """

    READY = "ready"
    MEASURED = "measured"
    FAILED = "failed"
    WRONG = "wrong"
    SAME = "same"
    PRUNED = "pruned"
    CRASHED = "crashed"
    SKIPPED = "skipped"
    LEFT = "left"


FAULTY: Final = frozenset({Status.FAILED, Status.WRONG, Status.CRASHED})
REJECTED: Final = FAULTY | {Status.PRUNED}  # another attempt would give the same result


class SearchState(enum.StrEnum):
    """State of a search; files and commands show these values.

    Attributes:
        COMPLETE: Every candidate was measured or rejected, and the best was compared with the heuristic.
        UNDECIDED: As complete, but the machine was too noisy to tell which candidate is the fastest.
        PARTIAL: The budget, Ctrl-C or a lost worker ended the search early. The next run continues it.
        FAILED: No candidate was measured.
    """

    COMPLETE = "complete"
    UNDECIDED = "undecided"
    PARTIAL = "partial"
    FAILED = "failed"

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to measure."""
        return self in (SearchState.COMPLETE, SearchState.UNDECIDED)


_OPEN: Final = frozenset({Status.SKIPPED, Status.READY, Status.LEFT})  # neither measured nor rejected


@dataclasses.dataclass(frozen=True, slots=True)
class SearchProgress:
    """Progress of a search.

    Attributes:
        state: Complete, undecided, partial or failed.
        done: Number of candidates measured or rejected.
        candidates: Number of candidates in the search.
    """

    state: SearchState
    done: int
    candidates: int

    @classmethod
    def of(
        cls, statuses: Collection[Status | str], *, planned: int = 0, unconfirmed: bool = False, undecided: bool = False
    ) -> SearchProgress:
        """Return the progress of a search.

        Args:
            statuses: The status of each known candidate.
            planned: Number of candidates in the search; at least the number of known candidates counts.
            unconfirmed: Whether the search ended before the best candidate was compared with the heuristic.
            undecided: Whether the machine was too noisy to tell which candidate is the fastest.
        """
        done, candidates = sum(status not in _OPEN for status in statuses), max(planned, len(statuses))
        if Status.MEASURED not in statuses:
            state = SearchState.FAILED
        elif done < candidates or unconfirmed:
            state = SearchState.PARTIAL
        else:
            state = SearchState.UNDECIDED if undecided else SearchState.COMPLETE
        return cls(state, done, candidates)

    @classmethod
    def stored_in(cls, measured: Mapping[str, Any] | None) -> SearchProgress | None:
        """Return the progress stored in a cache entry; `None` if the entry does not come from a search.

        A search with an invalid state counts as not finished.
        """
        if not measured or "candidates" not in measured:
            return None
        candidates = measured["candidates"] if is_count(measured["candidates"], 1) else 0
        # Some shipped configurations were measured in complete searches that stored no state.
        is_complete = candidates and not any(measured.get(name) for name in ("interrupted", "skipped", "undecided"))
        stateless = cls(SearchState.COMPLETE, candidates, candidates) if is_complete else None
        try:
            found = from_plain(measured["search"], cls) if "search" in measured else stateless
        except SerializationError:
            found = None
        return found if found is not None and found._is_valid else cls(SearchState.PARTIAL, 0, candidates)

    @property
    def _is_valid(self) -> bool:
        return 0 <= self.done <= self.candidates and (self.done == self.candidates or not self.state.is_finished)

    @property
    def in_words(self) -> str:
        """The state as text: `complete`, `undecided`, `not finished (3 of 12)` or `failed`."""
        return self.not_finished if self.state == SearchState.PARTIAL else str(self.state)

    @property
    def without_entry(self) -> str:
        """The state of a search whose call has no saved configuration, and the effect of tuning again, as a clause."""
        match self.state:
            case SearchState.PARTIAL:
                return f"its search is {self.in_words}; tuning again continues it"
            case SearchState.FAILED:
                return "its search failed; tuning again repeats it"
            case _:
                return f"its search is {self.in_words}, but its entry was removed; tuning again repeats it"

    @property
    def not_finished(self) -> str:
        """The text shown while a result is missing: `not finished (3 of 12)`."""
        count = f"{self.done} of {self.candidates}"
        if self.done == self.candidates:
            count += ", the best one is not confirmed"
        return f"not finished ({count})"

    def in_brief(self, speedup: float | None, *, kept: bool) -> str:
        """Return the result: the speed-up, `kept` (the heuristic), `undecided`, `not finished (3 of 12)` or `failed`.

        If a search with a winner ended early or is undecided, the speed-up comes first: `1.50x, not finished (3 of
        12)`.
        """
        if not kept:
            is_open = self.state in (SearchState.PARTIAL, SearchState.UNDECIDED)
            return f"{ratio(speedup)}, {self.in_words}" if is_open else ratio(speedup)
        if self.state == SearchState.PARTIAL:
            return self.not_finished
        return "kept" if self.state == SearchState.COMPLETE else str(self.state)

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"state": self.state.value, "done": self.done, "candidates": self.candidates}


def stored_in_brief(measured: Mapping[str, Any] | None, speedup: float | None) -> str:
    """Return the result of the search in a cache entry, as `SearchProgress.in_brief`; `-` without a search."""
    progress = SearchProgress.stored_in(measured)
    if progress is None or measured is None:
        return ratio(speedup)
    return progress.in_brief(speedup, kept=speedup is not None and is_kept_in(measured))


def is_kept_in(measured: Mapping[str, Any] | None) -> bool:
    """Return whether the measurements in a cache entry are of the heuristic, which its search kept."""
    return measured is not None and measured.get("winner") == measured.get("heuristic")


def stored_in_words(measured: Mapping[str, Any] | None) -> str:
    """Return the progress of the search in a cache entry, as `SearchProgress.in_words`; `-` without a search."""
    progress = SearchProgress.stored_in(measured)
    return "-" if progress is None else progress.in_words
