# SPDX-License-Identifier: Apache-2.0
"""How far a search came: complete, partial (n of m), or failed; every command reports it in these words."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping
from typing import Any, Final

from ejkernel.ops.autotuner.trials.status import Status


class SearchState(enum.StrEnum):
    """How far a search came; the values are what files and commands show.

    Attributes:
        COMPLETE: Every candidate was measured or rejected, and the best one was compared with the heuristic.
        PARTIAL: The budget, Ctrl-C or a lost worker ended it earlier. The next run goes on with the rest.
        FAILED: Nothing was measured.
    """

    COMPLETE = "complete"
    PARTIAL = "partial"
    FAILED = "failed"


_OPEN: Final = frozenset({Status.SKIPPED, Status.READY, Status.LEFT})  # not measured, and not rejected either


@dataclasses.dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far a search came.

    Attributes:
        state: In a word.
        done: Candidates that were measured or rejected.
        candidates: Candidates that the search is about.
    """

    state: SearchState
    done: int
    candidates: int

    @classmethod
    def of(cls, statuses: Collection[Status | str], *, planned: int = 0, unconfirmed: bool = False) -> SearchProgress:
        """Return the progress of a search.

        Args:
            statuses: The status of each candidate that the search knows of.
            planned: How many candidates it is about; those that it knows of, if they are more.
            unconfirmed: Whether it ended before its best candidate was compared with the heuristic.
        """
        done, candidates = sum(status not in _OPEN for status in statuses), max(planned, len(statuses))
        if Status.MEASURED not in statuses:
            state = SearchState.FAILED
        else:
            state = SearchState.PARTIAL if done < candidates or unconfirmed else SearchState.COMPLETE
        return cls(state, done, candidates)

    @classmethod
    def stored_in(cls, measured: Mapping[str, Any] | None) -> SearchProgress | None:
        """Return the progress that a cache entry tells of; `None` if no search led to the entry."""
        if not measured or "candidates" not in measured:
            return None
        stored = measured.get("search")
        if isinstance(stored, dict) and stored.get("state") in list(SearchState):
            return cls(SearchState(stored["state"]), _count(stored.get("done")), _count(stored.get("candidates")))
        # Entries of earlier versions have no state.
        candidates, skipped = _count(measured.get("candidates")), _count(measured.get("skipped"))
        is_whole = not skipped and measured.get("interrupted") is not True
        return cls(SearchState.COMPLETE if is_whole else SearchState.PARTIAL, max(0, candidates - skipped), candidates)

    @property
    def in_words(self) -> str:
        """The state, for people: `complete`, `partial (3 of 12)` or `failed`."""
        return f"{self.state} ({self._counted})" if self.state == SearchState.PARTIAL else str(self.state)

    @property
    def not_finished(self) -> str:
        """What stands in place of a result where there is none yet: `not finished (3 of 12)`."""
        return f"not finished ({self._counted})"

    @property
    def _counted(self) -> str:
        text = f"{self.done} of {self.candidates}"
        return text if self.done < self.candidates else f"{text}, the best one is not confirmed"

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"state": self.state.value, "done": self.done, "candidates": self.candidates}


def _count(value: object) -> int:
    """Return a number of candidates; an entry says whatever its file says."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
