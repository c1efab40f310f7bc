# SPDX-License-Identifier: Apache-2.0
"""The statuses of candidates, and the results of their comparison with the heuristic."""

from __future__ import annotations

import enum
from typing import Final


class Status(enum.StrEnum):
    """The result of one candidate; logs, bundles and tables show these values.

    Attributes:
        READY: Compiled and checked, but not measured yet; during a search, and in bundles.
        MEASURED: It has times.
        FAILED: It raised an exception.
        WRONG: Its results differ from the reference results.
        SAME: It compiles to the program of another candidate.
        PRUNED: It was not run because its program spills many registers.
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


class CameOut(enum.StrEnum):
    """The result of comparing a candidate with the heuristic.

    Attributes:
        WINS: The candidate wins.
        STAYS: The heuristic stays.
        UNDECIDED: The evidence was insufficient.
    """

    WINS = "wins"
    STAYS = "stays"
    UNDECIDED = "undecided"

    @property
    def in_words(self) -> str:
        """The result as text."""
        return _IN_WORDS[self]


_IN_WORDS: Final = {
    CameOut.WINS: "it wins",
    CameOut.STAYS: "the heuristic stays",
    CameOut.UNDECIDED: "too little to tell",
}
