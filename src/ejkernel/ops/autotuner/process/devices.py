# SPDX-License-Identifier: Apache-2.0
"""Work done side by side: over several devices of a machine, each with a worker process of its own, or by others."""

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

_LOOK = 0.2  # seconds between two looks at whether Ctrl-C came: a signal may wake another thread


def spread(work: Callable[[T], R], items: Sequence[T], *, devices: int, fingerprint: str) -> list[R | BaseException]:
    """Return what `work` returns or raises for each item, in threads whose `shared_worker` has a device each.

    Ctrl-C asks the workers for the end of their searches, no other item is begun, and then it is raised; a second one
    ends the workers at once.

    Args:
        work: What to do with an item.
        items: What there is to do.
        devices: How many devices to use: the first of those that this process may see.
        fingerprint: What the devices must be. Fewer of them than asked for are a `TuningWarning`.

    Raises:
        TuningError: there is none.
        KeyboardInterrupt: Ctrl-C.
    """
    team = _Team(work, items, fingerprint)
    slots = [WorkerSlot(settings.only_gpu(number)) for number in range(min(devices, len(items)))]
    with worker_session():
        close_first()  # whoever found the calls has a device, or all of them
        _have_done(team, [_DeviceMember(team, slot) for slot in slots], slots)
    if team.waiting:
        raise TuningError(f"there is no {fingerprint} to measure on: {'; '.join(team.absent)}")
    if team.absent:
        text = f"{len(team.absent)} of {len(slots)} devices could not be used: {'; '.join(team.absent)}"
        warn(text, TuningWarning)
    return [team.results[index] for index in range(len(items))]


def side_by_side(work: Callable[[T], R], items: Sequence[T], *, most: int) -> list[R | BaseException]:
    """Return what `work` returns or raises for each item, in threads that wait for others to do it.

    Ctrl-C requests the end of what `this_slot().cancellation` says in each thread, no other item is begun, and then it
    is raised; a second one closes the slots.

    Args:
        work: What to do with an item.
        items: What there is to do.
        most: How many threads there are at most.
    """
    team = _Team(work, items, "")
    slots = [WorkerSlot() for _ in range(min(most, len(items)))]
    _have_done(team, [_Member(team, slot) for slot in slots], slots)
    return [team.results[index] for index in range(len(items))]


def _have_done(team: _Team[T, R], members: Sequence[_Member[T, R]], slots: Sequence[WorkerSlot]) -> None:
    pool = concurrent.futures.ThreadPoolExecutor(len(members), thread_name_prefix="ejkernel-device")
    at_work = [pool.submit(in_callers_context(member)) for member in members]
    pool.shutdown(wait=False)  # it takes nothing else
    _wait_for(at_work, team, slots)


class _Team(Generic[T, R]):
    """Who shares the work.

    Attributes:
        work: What to do with an item.
        fingerprint: What its devices must be.
        waiting: Items that nobody has taken, with their positions.
        results: What came out, by position.
        absent: Why members do not take part.
    """

    def __init__(self, work: Callable[[T], R], items: Sequence[T], fingerprint: str) -> None:
        self.work = work
        self.fingerprint = fingerprint
        self.waiting = collections.deque(enumerate(items))
        self.results: dict[int, R | BaseException] = {}
        self.absent: list[str] = []


class _Member(Generic[T, R]):
    """Takes items, one after the other, in a thread that has a slot."""

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
                # A call is one device's, because times of two are not comparable.
                index, item = team.waiting.popleft()
            except IndexError:
                return
            try:
                team.results[index] = team.work(item)
            except BaseException as error:  # noqa: BLE001 - whoever asked for the results decides
                team.results[index] = error


class _DeviceMember(_Member[T, R]):
    """Takes items to the worker of its slot, if that has the right device."""

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
            self._team.absent.append(f"it is {there}, not {self._team.fingerprint}")


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
