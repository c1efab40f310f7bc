# SPDX-License-Identifier: Apache-2.0
"""Reports of a search to its supervisor, and the supervisor's requests to end it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any


class Instruction(enum.IntEnum):
    """A supervisor's instruction for a search."""

    GO_ON = 0
    END = 1  # with the best so far
    END_AT_ONCE = 2


class Cancellation:
    """Asks a search to end soon with the best so far. Any thread and any signal handler may request it.

    A search checks it wherever it can stop. Steps that cannot stop are abandoned or killed (see `Watch`, `Supervisor`).

    Args:
        within: An enclosing cancellation, e.g. of all searches on one device.
    """

    def __init__(self, within: Cancellation | None = None) -> None:
        self._within = within
        self._own = Instruction.GO_ON

    def request(self, *, at_once: bool = False) -> None:
        """Request the end of the search; with `at_once`, do not wait for its best result."""
        self._own = max(self._own, Instruction.END_AT_ONCE if at_once else Instruction.END)

    @property
    def instruction(self) -> Instruction:
        """The strongest request to this cancellation or to `within`."""
        return self._own if self._within is None else max(self._own, self._within.instruction)

    @property
    def is_requested(self) -> bool:
        """Whether the end of the search is requested."""
        return self.instruction != Instruction.GO_ON


class Watch:
    """Receives the current step of a search, in case the step ends this process; this class ignores all reports."""

    def compiling(self, configs: Sequence[Any]) -> None:
        """Report the candidates being compiled in threads."""

    def begin(self, doing: str, configs: Sequence[Any], allowed: float) -> None:
        """Report a step of the device, and the seconds allowed without a sign of life."""

    def running(self, index: int) -> None:
        """Report the call of the candidate at `index` of the last `begin`; a sign of life."""

    def damage(self) -> int:
        """Return how often shared state of the process was found damaged and repaired."""
        return 0

    def is_abandoned(self) -> bool:
        """Return whether the caller has given up the search.

        A search that waits for compilations polls this. Each poll is a sign of life, as compiling threads show none.
        """
        return False
