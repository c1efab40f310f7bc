# SPDX-License-Identifier: Apache-2.0
"""Observers of the current step of a search, for failure attribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Watch(Protocol):
    """Receives the current step of a search, in case the step ends this process."""

    def compiling(self, configs: Sequence[Any]) -> None:
        """Report the candidates being compiled in threads."""

    def begin(self, doing: str, configs: Sequence[Any], allowed: float) -> None:
        """Report a step of the device, and the seconds allowed without a sign of life."""

    def running(self, index: int) -> None:
        """Report the call of the candidate at `index` of the last `begin`; a sign of life."""

    def damage(self) -> int:
        """Return how often shared state of the process was found damaged and repaired."""

    def is_abandoned(self) -> bool:
        """Return whether the caller has given up the search.

        A search that waits for compilations polls this. Each poll is a sign of life, as compiling threads show none.
        """


class Unwatched:
    """Ignores all reports."""

    def compiling(self, configs: Sequence[object]) -> None:
        """See `Watch`."""

    def begin(self, doing: str, configs: Sequence[object], allowed: float) -> None:
        """See `Watch`."""

    def running(self, index: int) -> None:
        """See `Watch`."""

    def damage(self) -> int:
        """See `Watch`."""
        return 0

    def is_abandoned(self) -> bool:
        """See `Watch`."""
        return False
