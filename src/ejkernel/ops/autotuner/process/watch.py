# SPDX-License-Identifier: Apache-2.0
"""Who must know what a search is at, in case its process or its thread does not survive it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Watch(Protocol):
    """Whoever must know what is under way, in case this process does not survive it."""

    def compiling(self, configs: Sequence[Any]) -> None:
        """Say which candidates are being compiled now, in threads."""

    def begin(self, doing: str, configs: Sequence[Any], allowed: float) -> None:
        """Say what the device works on, and for how many seconds at most without a sign of life."""

    def running(self, index: int) -> None:
        """Say that the candidate at `index` of those that `begin` named last is called now; a sign of life."""

    def damage(self) -> int:
        """Return how often something was found damaged, and mended, that others need too."""

    def is_abandoned(self) -> bool:
        """Return whether nobody waits for the search any more.

        Whoever waits for compilations asks again and again; that is a sign of life, for threads that compile show none.
        """


class Unwatched:
    """Nobody watches."""

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
