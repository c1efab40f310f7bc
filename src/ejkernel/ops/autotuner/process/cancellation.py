# SPDX-License-Identifier: Apache-2.0
"""How a search is asked for its end."""

from __future__ import annotations

import threading


class Cancellation:
    """Asks a search to end as soon as it can, with the best so far; any thread may, and a handler of signals.

    A search looks at it where it can stop. What must not go on at all is left or ended instead (see `Watch`, `Worker`).

    Args:
        within: What asks for the end of this search among others, such as of all on one device.
    """

    def __init__(self, within: Cancellation | None = None) -> None:
        self._within = within
        self._requested = threading.Event()

    def request(self) -> None:
        """Ask for the end."""
        self._requested.set()

    @property
    def is_requested(self) -> bool:
        """Whether somebody has asked for it."""
        return self._requested.is_set() or (self._within is not None and self._within.is_requested)
