# SPDX-License-Identifier: Apache-2.0
"""Parallel compilation of candidates in threads, with a deadline that adapts to observed compile times."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from ejkernel.ops.autotuner.process.threads import raise_in
from ejkernel.ops.errors import CandidateError
from ejkernel.ops.utils.fingerprint import cores

T = TypeVar("T")

_AT_EXIT = 30.0  # seconds that the exit of the process waits for compilations
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_POLL = 0.05  # seconds between checks of the deadlines and of `stop`


class GivenUpError(CandidateError):
    """A compilation exceeded its deadline and was abandoned.

    Attributes:
        for_budget: Whether a larger budget would have allowed more time; then the candidate is skipped, not failed.
    """

    for_budget: bool = False


class AdaptiveTimeout:
    """A deadline that adapts to observed durations: long at first, then a multiple of their 90th percentile.

    Any fixed deadline is too short for one kernel and too long for another.

    Args:
        first: Seconds allowed before the first observation.
        least: Minimum of the allowed seconds.
        factor: Allowed multiple of the 90th percentile.
    """

    def __init__(self, *, first: float, least: float, factor: float = 5.0) -> None:
        self.first = first
        self.least = least
        self.factor = factor
        self._seen: list[float] = []

    def note(self, seconds: float) -> None:
        """Add an observed duration."""
        self._seen.append(seconds)

    @property
    def seconds(self) -> float:
        """The currently allowed seconds."""
        if not self._seen:
            return self.first
        return max(self.least, self.factor * float(np.quantile(self._seen, 0.9)))

    def within(self, left: float) -> float:
        """Return the allowed seconds if `left` seconds remain for all jobs.

        A job gets at most half of them, which leaves time for the others, but always twice the longest observed
        duration. Before the first observation the remaining time has no effect.
        """
        if not self._seen:
            return self.seconds
        return min(self.seconds, max(left / 2, 2 * max(self._seen)))


@dataclasses.dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A finished job.

    Attributes:
        index: Its position among the jobs.
        result: Its result.
        error: Its exception, without the traceback, which would keep its arrays alive.
        seconds: Its duration.
    """

    index: int
    result: T | None
    error: BaseException | None
    seconds: float


class CompileThreads(Generic[T]):
    """Runs jobs in daemon threads and abandons those beyond their deadline, as threads cannot be stopped.

    Args:
        jobs: The functions to run.
        width: Number of parallel jobs; the number of cores by default.
        timeout: Deadline of each job; learns from successful jobs.
        left: Returns the seconds that remain for all jobs.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        jobs: Sequence[Callable[[], T]],
        *,
        width: int | None = None,
        timeout: AdaptiveTimeout,
        left: Callable[[], float] = lambda: math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._waiting = collections.deque(enumerate(jobs))
        self._width = width or default_width()
        self._timeout = timeout
        self._left = left
        self._clock = clock
        self._running: dict[int, float] = {}  # start times of the jobs, without abandoned ones
        self._ended: queue.SimpleQueue[Done[T]] = queue.SimpleQueue()
        self._fill()

    def results(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Done[T]]:
        """Yield jobs as they end. Once `stop()` is true, start no more jobs and abandon the running ones."""
        while (self._running or self._waiting) and not stop():
            try:
                done = self._ended.get(timeout=_POLL)
            except queue.Empty:
                yield from self._given_up()
                continue
            if self._running.pop(done.index, None) is None:
                continue  # abandoned earlier
            if done.error is None:
                self._timeout.note(done.seconds)
            self._fill()
            yield done

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._width:
            index, job = self._waiting.popleft()
            start = self._running[index] = self._clock()
            # Threads suffice, because XLA releases the interpreter lock. Daemons, because a stuck thread can only be
            # abandoned.
            thread = threading.Thread(target=self._work, args=(index, job, start), name="ejkernel-compile", daemon=True)
            _threads.add(thread)
            thread.start()

    def _work(self, index: int, job: Callable[[], T], start: float) -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = job()
        # Including `KeyboardInterrupt`: Ctrl-C reaches only the main thread, so this comes from the candidate.
        except BaseException as raised:  # noqa: BLE001 - the caller decides
            error = raised.with_traceback(None)
        self._ended.put(Done(index, result, error, self._clock() - start))

    def _given_up(self) -> Iterator[Done[Any]]:
        allowed, now = self._timeout.within(self._left()), self._clock()
        for index in [index for index, start in self._running.items() if now - start > allowed]:
            seconds = now - self._running.pop(index)
            self._fill()
            error = GivenUpError(f"compilation abandoned after {seconds:.1f} s (allowed: {allowed:.1f} s)")
            error.for_budget = allowed < self._timeout.seconds
            yield Done(index, None, error, seconds)


def result_within(
    seconds: float, job: Callable[[], T], stop: Callable[[], bool] = lambda: False
) -> tuple[T | None, bool]:
    """Return `(result, True)` of a job, or abandon it after `seconds` or on `stop` and return `(None, False)`."""
    threads = CompileThreads([job], width=1, timeout=AdaptiveTimeout(first=seconds, least=seconds))
    for done in threads.results(stop):
        if isinstance(done.error, GivenUpError):
            break
        if done.error is not None:
            raise done.error
        return done.result, True
    return None, False


def _wait_at_exit() -> None:
    """Wait for abandoned compilations: the interpreter must not exit while they are in C++."""
    end = time.monotonic() + _AT_EXIT
    raise_in(thread.ident for thread in list(_threads) if thread.is_alive())
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))


atexit.register(_wait_at_exit)


def default_width() -> int:
    """Return the default number of parallel compilations: the number of cores available to this process."""
    return len(cores())
