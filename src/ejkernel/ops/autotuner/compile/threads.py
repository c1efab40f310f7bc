# SPDX-License-Identifier: Apache-2.0
"""Candidates compiled side by side, in threads, with a deadline that learns from the compile times seen."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from ejkernel.ops.autotuner.process.signals import raise_in
from ejkernel.ops.errors import CandidateError

T = TypeVar("T")

_AT_EXIT = 30.0  # seconds that the end of the process waits for compilations
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_POLL = 0.05  # seconds between two looks at the deadlines, and at whether to stop


class GivenUpError(CandidateError):
    """A compilation takes longer than is allowed, and was left alone.

    Attributes:
        for_budget: Whether it would have had more time under a larger budget; then it is skipped, and no failure.
    """

    for_budget: bool = False


class AdaptiveTimeout:
    """How long something may take before it is given up: long at first, then a multiple of what was usual.

    Any fixed time is too short for one kernel and too long for another.

    Args:
        first: Seconds that are allowed while nothing is known.
        least: Seconds that are always allowed.
        factor: How many times the 90th percentile of what was seen is allowed.
    """

    def __init__(self, *, first: float, least: float, factor: float = 5.0) -> None:
        self.first = first
        self.least = least
        self.factor = factor
        self._seen: list[float] = []

    def note(self, seconds: float) -> None:
        """Take note of how long it took once."""
        self._seen.append(seconds)

    @property
    def seconds(self) -> float:
        """What is allowed now."""
        if not self._seen:
            return self.first
        return max(self.least, self.factor * float(np.quantile(self._seen, 0.9)))

    def within(self, left: float) -> float:
        """Return what is allowed where so many seconds are left for everything.

        That is half of them, so that others come to something too; but twice what others took always, and where
        nothing is known of others, nothing says that it is too long.
        """
        if not self._seen:
            return self.seconds
        return min(self.seconds, max(left / 2, 2 * max(self._seen)))

    def is_short(self, left: float) -> bool:
        """Return whether the seconds that are left for everything cut down what is allowed."""
        return self.within(left) < self.seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A job that ended.

    Attributes:
        index: Its place among the jobs.
        result: What it returned.
        error: What it raised, without the traceback, which would keep its arrays alive.
        seconds: How long it took.
    """

    index: int
    result: T | None
    error: BaseException | None
    seconds: float


class CompileThreads(Generic[T]):
    """Runs jobs in daemon threads, and gives up those that take too long; a thread cannot be stopped, so it is left.

    Args:
        jobs: What to run.
        width: How many at a time; the number of cores by default.
        timeout: How long each may take; learns from those that end well.
        left: The seconds that are left for everything.
        on_change: Called with the indices of the jobs under way, before one begins and when one ends, by whichever
            thread; one that was given up is under way until it ends.
        clock: Source of seconds.
    """

    def __init__(
        self,
        jobs: Sequence[Callable[[], T]],
        *,
        width: int | None = None,
        timeout: AdaptiveTimeout,
        left: Callable[[], float] = lambda: math.inf,
        on_change: Callable[[Sequence[int]], None] = lambda running: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._waiting = collections.deque(enumerate(jobs))
        self._width = width or default_width()
        self._timeout = timeout
        self._left = left
        self._on_change = on_change
        self._clock = clock
        self._running: dict[int, float] = {}  # those that are waited for, and since when
        self._under_way: dict[int, None] = {}
        self._lock = threading.Lock()
        self._ended: queue.SimpleQueue[Done[T]] = queue.SimpleQueue()
        self._fill()

    def results(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Done[T]]:
        """Yield jobs as they end; once `stop()` is true no other begins, and those under way are left alone."""
        while (self._running or self._waiting) and not stop():
            try:
                done = self._ended.get(timeout=_POLL)
            except queue.Empty:
                yield from self._given_up()
                continue
            if self._running.pop(done.index, None) is None:
                continue  # it was given up
            if done.error is None:
                self._timeout.note(done.seconds)
            self._fill()
            yield done

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._width:
            index, job = self._waiting.popleft()
            start = self._running[index] = self._clock()
            with self._lock:
                self._under_way[index] = None
                self._on_change(list(self._under_way))  # before it begins: it may end the process
            # Threads do, because XLA lets go of the interpreter's lock. They are daemons, because one that is stuck
            # cannot be stopped, only left.
            thread = threading.Thread(target=self._work, args=(index, job, start), name="ejkernel-compile", daemon=True)
            _threads.add(thread)
            thread.start()

    def _work(self, index: int, job: Callable[[], T], start: float) -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = job()
        # Be it `KeyboardInterrupt`: Ctrl-C comes to the main thread alone, so that a candidate's is its own.
        except BaseException as raised:  # noqa: BLE001 - whoever asks for the result decides
            error = raised.with_traceback(None)
        try:
            with self._lock:
                del self._under_way[index]
                self._on_change(list(self._under_way))
        finally:
            self._ended.put(Done(index, result, error, self._clock() - start))

    def _given_up(self) -> Iterator[Done[Any]]:
        allowed, now = self._timeout.within(self._left()), self._clock()
        for index in [index for index, start in self._running.items() if now - start > allowed]:
            seconds = now - self._running.pop(index)
            self._fill()
            error = GivenUpError(f"compiling was given up after {seconds:.1f} s (allowed: {allowed:.1f} s)")
            error.for_budget = allowed < self._timeout.seconds
            yield Done(index, None, error, seconds)


def result_within(
    seconds: float, job: Callable[[], T], stop: Callable[[], bool] = lambda: False
) -> tuple[T | None, bool]:
    """Return what a job returns, and whether it ended in time; if it does not, or is to stop, it is left alone."""
    threads = CompileThreads([job], width=1, timeout=AdaptiveTimeout(first=seconds, least=seconds))
    for done in threads.results(stop):
        if isinstance(done.error, GivenUpError):
            break
        if done.error is not None:
            raise done.error
        return done.result, True
    return None, False


def _wait_at_exit() -> None:
    """Wait for compilations that were left alone: the interpreter's end would meet them in the middle of C++."""
    end = time.monotonic() + _AT_EXIT
    raise_in(thread.ident for thread in list(_threads) if thread.is_alive())
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))


atexit.register(_wait_at_exit)


def default_width() -> int:
    """Return how many compilations run side by side: one a core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
