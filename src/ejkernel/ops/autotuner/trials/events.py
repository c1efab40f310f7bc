# SPDX-License-Identifier: Apache-2.0
"""What happens while kernels are tuned, as typed events for whoever wants to count, show or log it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ejkernel.ops.autotuner.trials.candidates import config_id
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import TuningWarning
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.printable import printable_lines
from ejkernel.ops.utils.validation import check_argument


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a search.

    Attributes:
        key: The call that is tuned.
    """

    key: ConfigKey


@dataclasses.dataclass(frozen=True, slots=True)
class SearchStarted(Event):
    """A search began.

    Attributes:
        candidates: How many candidates it looks at, at most.
        first: The candidate that the others are compared with: the heuristic's, where there is one.
    """

    candidates: int
    first: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateFinished(Event):
    """A candidate was compiled and checked, or failed; its times come later, and it may yet fail while it is timed.

    Attributes:
        outcome: What is known of it by now.
    """

    outcome: Outcome


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerRestarted(Event):
    """A worker process died, or was ended because it did nothing for too long; a new one goes on.

    Attributes:
        reason: How it ended, and what it was doing.
    """

    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable_lines(self.reason))


@dataclasses.dataclass(frozen=True, slots=True)
class SearchFinished(Event):
    """A search ended.

    Attributes:
        data: What it found.
    """

    data: AutotuneData


Listener = Callable[[Event], object]

_listeners: list[Listener] = []
_lock = threading.Lock()


@contextlib.contextmanager
def on_event(listener: Listener) -> Iterator[None]:
    """Call `listener` with every `Event` of every search, in any thread, inside the `with` block.

    What the listener raises does not reach the search; it is a `TuningWarning`.
    """
    check_argument(callable(listener), "listener", "a function of an event", listener)
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


class Counter:
    """A listener that counts the candidates of searches which are done.

    Args:
        tell: Called with the call, how many of its candidates are compiled and checked, and how many there are: each
            number once.
    """

    def __init__(self, tell: Callable[[ConfigKey, int, int], object]) -> None:
        self._tell = tell
        self._totals: dict[ConfigKey, int] = {}
        self._done: dict[ConfigKey, set[Any]] = {}
        self._told: dict[ConfigKey, int] = {}

    def __call__(self, event: Event) -> None:
        """Take note of what happened."""
        if isinstance(event, SearchStarted):
            self._totals[event.key] = event.candidates
        elif isinstance(event, CandidateFinished):
            # A set, since an attempt that replaces another may tell of a candidate again.
            self._done.setdefault(event.key, set()).add(config_id(event.outcome.config))
        total = self._totals.get(event.key)
        if total is None:
            return
        is_over = isinstance(event, SearchFinished)  # be it that time was up before all had their turn
        done = total if is_over else min(total, len(self._done.get(event.key, ())))
        if done != self._told.get(event.key):
            self._told[event.key] = done
            self._tell(event.key, done, total)


def emit(event: Event) -> None:
    """Tell all listeners."""
    with _lock:
        # Called without the lock, for a listener may tune, or add another.
        listeners = list(_listeners)
    for listener in listeners:
        try:
            listener(event)
        except Exception as error:  # noqa: BLE001 - a search does not end because somebody looks on
            text = f"a listener failed on {type(event).__name__}: {error_text(error)}"
            warn(text, TuningWarning)
