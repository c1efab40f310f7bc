# SPDX-License-Identifier: Apache-2.0
"""Typed events of tuning: subscribe with `on_event` to count, show or log them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

from ejkernel.ops.autotuner.trials.candidates import config_id
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import TuningWarning
from ejkernel.ops.utils.error_text import error_text, printable_lines
from ejkernel.ops.utils.messages.names import check_argument
from ejkernel.ops.utils.messages.warn import warn


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """The base of all events of a search.

    Attributes:
        key: The key of the tuned call.
    """

    key: ConfigKey


@dataclasses.dataclass(frozen=True, slots=True)
class SearchStarted(Event):
    """A search began.

    Attributes:
        candidates: The largest number of candidates that it tries.
        first: The candidate that all others are compared with: the heuristic, if the kernel has one.
    """

    candidates: int
    first: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateFinished(Event):
    """A candidate was compiled and checked, or failed.

    A candidate that is measured has two such events: with status `ready` once it is compiled and checked, and with
    its times or the failure later.

    Attributes:
        outcome: Its outcome so far.
    """

    outcome: Outcome


@dataclasses.dataclass(frozen=True, slots=True)
class RoundsFinished(Event):
    """Rounds of a measurement were sampled; sent about twice a second.

    Attributes:
        candidates: The number of candidates in the measurement.
        done: Rounds so far.
        planned: Rounds of the measurement; the confirmation run may double them, up to eight times the first plan.
        is_confirmation: Whether this is the confirmation run.
    """

    candidates: int
    done: int
    planned: int
    is_confirmation: bool


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerRestarted(Event):
    """A worker process died, or was ended after a long silence; a new worker continues.

    Attributes:
        reason: How it ended, and during which step.
    """

    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable_lines(self.reason))


@dataclasses.dataclass(frozen=True, slots=True)
class SearchFinished(Event):
    """A search ended.

    Attributes:
        data: Its result. A search that fails, because no configuration ran, has no such event: it raises.
    """

    data: AutotuneData


Listener = Callable[[Event], object]

_listeners: list[Listener] = []


@contextlib.contextmanager
def on_event(listener: Listener) -> Iterator[None]:
    """Call `listener` with every `Event` of every search, in any thread, inside the `with` block.

    Exceptions of the listener become a `TuningWarning` and do not reach the search.
    """
    check_argument(callable(listener), "listener", "a function of an event", listener)
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Counter:
    """A listener that counts finished candidates.

    Args:
        tell: Called with the key, the number of candidates compiled and checked so far, and the total. It is called
            once for each new count.
        keys: The calls whose searches count; other searches were started by candidates.
    """

    def __init__(self, tell: Callable[[ConfigKey, int, int], object], keys: Collection[ConfigKey]) -> None:
        self._tell, self._keys = tell, keys
        self._totals: dict[ConfigKey, int] = {}
        self._done: dict[ConfigKey, set[Any]] = {}
        self._reported: dict[ConfigKey, int] = {}

    def __call__(self, event: Event) -> None:
        """Count an event."""
        if isinstance(event, SearchStarted):
            self._totals[event.key] = event.candidates
        elif isinstance(event, CandidateFinished):
            # A set: a second attempt reports candidates of the first again.
            self._done.setdefault(event.key, set()).add(config_id(event.outcome.config))
        total = self._totals.get(event.key)
        if total is None or event.key not in self._keys:
            return
        is_over = isinstance(event, SearchFinished)  # also when the budget ended before all candidates ran
        done = total if is_over else min(total, len(self._done.get(event.key, ())))
        if done != self._reported.get(event.key):
            self._reported[event.key] = done
            self._tell(event.key, done, total)


def emit(event: Event) -> None:
    """Pass an event to all listeners."""
    for listener in tuple(_listeners):  # a copy: meanwhile, listeners and other threads may add or remove some
        try:
            listener(event)
        except Exception as error:  # noqa: BLE001 - a failing listener must not end the search
            text = f"a listener failed on {type(event).__name__}: {error_text(error)}"
            warn(text, TuningWarning)
