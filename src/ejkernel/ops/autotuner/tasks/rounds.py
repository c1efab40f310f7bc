# SPDX-License-Identifier: Apache-2.0
"""Reports how far the measurements of a search are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ejkernel.ops.autotuner.measure.paired import PairedSampling
from ejkernel.ops.autotuner.measure.sampling import Sampling
from ejkernel.ops.autotuner.trials.events import Event, RoundsFinished
from ejkernel.ops.core.types import ConfigKey

_PAUSE: Final = 0.5  # least seconds between two events


class RoundsTeller:
    """Sends an event when a measurement begins, and about twice a second from then on.

    Args:
        key: The key of the call.
        tell: Called with the events.
        clock: Source of seconds.
    """

    def __init__(
        self, key: ConfigKey, tell: Callable[[Event], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._key, self._tell, self._clock = key, tell, clock
        self._last: tuple[Sampling, int, float] | None = None

    def __call__(self, sampling: Sampling) -> None:
        """Note that a sample of this sampling was taken, or is about to be."""
        (done, planned), now = sampling.progress, self._clock()
        if self._last is not None and self._last[0] is sampling and (done == self._last[1] or now < self._last[2]):
            return
        self._last = sampling, done, now + _PAUSE
        count, is_confirmation = len(sampling.running), isinstance(sampling, PairedSampling)
        self._tell(RoundsFinished(self._key, count, done, planned, is_confirmation))
