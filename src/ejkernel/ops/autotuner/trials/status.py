# SPDX-License-Identifier: Apache-2.0
"""What may become of a candidate, and of its race against the heuristic."""

from __future__ import annotations

import enum
from typing import Final


class Status(enum.StrEnum):
    """What became of a candidate; the values are what logs, bundles and tables show.

    Attributes:
        READY: Compiled and checked; while the search goes on, and in bundles.
        MEASURED: It has times.
        FAILED: It raised.
        WRONG: Its results differ from the reference's.
        SAME: It is the program of another candidate.
        PRUNED: It was not run, because its program spills many registers.
        CRASHED: Its process ended, had to be ended, or was left alone.
        SKIPPED: There was no time for it.
        LEFT: It must be compiled where it runs; in bundles alone.
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
REJECTED: Final = FAULTY | {Status.PRUNED}  # another attempt would come to the same


class CameOut(enum.StrEnum):
    """What came out of a candidate's race against the heuristic.

    Attributes:
        WINS: The candidate does.
        STAYS: The heuristic does.
        UNDECIDED: The evidence was too little.
    """

    WINS = "wins"
    STAYS = "stays"
    UNDECIDED = "undecided"

    @property
    def in_words(self) -> str:
        """What a line for people says."""
        return _IN_WORDS[self]


_IN_WORDS: Final = {
    CameOut.WINS: "it wins",
    CameOut.STAYS: "the heuristic stays",
    CameOut.UNDECIDED: "too little to tell",
}
