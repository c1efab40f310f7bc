# SPDX-License-Identifier: Apache-2.0
"""Parallel searches: on several devices of one machine, each with its own worker process, or on an executor."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ejkernel import settings
from ejkernel.ops.autotuner.process.threads import in_callers_context
from ejkernel.ops.autotuner.process.worker import WorkerSlot, close_first, in_slot, shared_worker, worker_session
from ejkernel.ops.errors import TuningError, TuningWarning
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.messages.warn import warn

T = TypeVar("T")
R = TypeVar("R")

_LOOK = 0.2  # seconds between checks for Ctrl-C: a signal may wake another thread


def spread(work: Callable[[T], R], items: Sequence[T], *, devices: int, fingerprint: str) -> list[R | BaseException]:
    """Return the result or exception of `work` for each item; each thread has its own device and `shared_worker`.

    Ctrl-C ends the running searches early, starts no other item, and is raised afterwards. A second Ctrl-C ends the
    workers at once.

    Args:
        work: Processes one item.
        items: The items.
        devices: Number of devices, taken from the start of this process's visible devices.
        fingerprint: The required device fingerprint. Fewer matching devices than requested cause a `TuningWarning`.

    Raises:
        TuningError: No device matches.
        KeyboardInterrupt: Ctrl-C.
    """
    team = _Team(work, items, fingerprint)
    slots = [WorkerSlot(settings.only_gpu(number)) for number in range(min(devices, len(items)))]
    with worker_session():
        close_first()  # the worker that traced the calls holds one device or all
        _have_done(team, [_DeviceMember(team, slot) for slot in slots], slots)
    if team.waiting:
        raise TuningError(f"no device {fingerprint} to measure on: {'; '.join(team.absent)}")
    if team.absent:
        text = f"{len(team.absent)} of {len(slots)} devices are not usable: {'; '.join(team.absent)}"
        warn(text, TuningWarning)
    return [team.results[index] for index in range(len(items))]


def in_parallel(work: Callable[[T], R], items: Sequence[T], *, most: int) -> list[R | BaseException]:
    """Return the result or exception of `work` for each item, from threads that only wait, e.g. for an executor.

    Ctrl-C requests `this_slot().cancellation` of each thread, starts no other item, and is raised afterwards. A second
    Ctrl-C closes the slots.

    Args:
        work: Processes one item.
        items: The items.
        most: Maximum number of threads.
    """
    team = _Team(work, items, "")
    slots = [WorkerSlot() for _ in range(min(most, len(items)))]
    _have_done(team, [_Member(team, slot) for slot in slots], slots)
    return [team.results[index] for index in range(len(items))]


def _have_done(team: _Team[T, R], members: Sequence[_Member[T, R]], slots: Sequence[WorkerSlot]) -> None:
    pool = concurrent.futures.ThreadPoolExecutor(len(members), thread_name_prefix="ejkernel-device")
    at_work = [pool.submit(in_callers_context(member)) for member in members]
    pool.shutdown(wait=False)  # accepts no more work
    _wait_for(at_work, team, slots)


class _Team(Generic[T, R]):
    """Work shared by several threads.

    Attributes:
        work: Processes one item.
        fingerprint: The required device fingerprint.
        waiting: Items not yet taken, with their positions.
        results: Results and exceptions by position.
        absent: Reasons why members do not take part.
    """

    def __init__(self, work: Callable[[T], R], items: Sequence[T], fingerprint: str) -> None:
        self.work = work
        self.fingerprint = fingerprint
        self.waiting = collections.deque(enumerate(items))
        self.results: dict[int, R | BaseException] = {}
        self.absent: list[str] = []


class _Member(Generic[T, R]):
    """Processes items one after the other in a thread with its own slot."""

    def __init__(self, team: _Team[T, R], slot: WorkerSlot) -> None:
        self._team = team
        self._slot = slot

    def __call__(self) -> None:
        with in_slot(self._slot):
            self._begin()

    def _begin(self) -> None:
        self._take()

    def _take(self) -> None:
        team = self._team
        while True:
            try:
                # One device measures the whole item: times of two devices are not comparable.
                index, item = team.waiting.popleft()
            except IndexError:
                return
            try:
                team.results[index] = team.work(item)
            except BaseException as error:  # noqa: BLE001 - the caller decides
                team.results[index] = error


class _DeviceMember(_Member[T, R]):
    """Processes items on the worker of its slot, if the worker has the required device."""

    def _begin(self) -> None:
        try:
            with shared_worker() as worker:
                there = worker.call(device_fingerprint)
        except (TuningError, KeyboardInterrupt) as error:
            self._team.absent.append(str(error))
            return
        if there == self._team.fingerprint:
            self._take()
        else:
            self._team.absent.append(f"found {there}, not {self._team.fingerprint}")


def _wait_for(
    members: Sequence[concurrent.futures.Future[None]], team: _Team[T, R], slots: Sequence[WorkerSlot]
) -> None:
    try:
        _look_at(members)
    except KeyboardInterrupt:
        team.waiting.clear()
        for slot in slots:
            slot.cancellation.request()
        try:
            _look_at(members)
        except KeyboardInterrupt:
            for slot in slots:
                slot.abandon()
            raise
        raise


def _look_at(members: Sequence[concurrent.futures.Future[None]]) -> None:
    while concurrent.futures.wait(members, timeout=_LOOK).not_done:
        pass
    for member in members:
        member.result()
