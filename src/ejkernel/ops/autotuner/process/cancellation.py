# SPDX-License-Identifier: Apache-2.0
"""Cancellation of searches."""

from __future__ import annotations

import threading


class Cancellation:
    """Asks a search to end soon with the best so far. Any thread and any signal handler may request it.

    A search checks it wherever it can stop. Steps that cannot stop are abandoned or killed (see `Watch`, `Worker`).

    Args:
        within: An enclosing cancellation, e.g. of all searches on one device.
    """

    def __init__(self, within: Cancellation | None = None) -> None:
        self._within = within
        self._requested = threading.Event()

    def request(self) -> None:
        """Request the end of the search."""
        self._requested.set()

    @property
    def is_requested(self) -> bool:
        """Whether this cancellation or `within` is requested."""
        return self._requested.is_set() or (self._within is not None and self._within.is_requested)
