# SPDX-License-Identifier: Apache-2.0
"""Parallel searches: on several devices of one machine, each with its own worker process, or on an executor."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from ejkernel import settings
from ejkernel.ops.autotuner.process.threads import in_callers_context
from ejkernel.ops.autotuner.process.worker import (
    Worker,
    WorkerSlot,
    close_first,
    in_slot,
    shared_worker,
    worker_session,
)
from ejkernel.ops.errors import TuningError, TuningWarning
from ejkernel.ops.utils.fingerprint import device_fingerprint, name_of_device
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
    absent: list[str] = []

    def has_device() -> bool:
        try:
            with shared_worker() as worker:
                there = worker.call(device_fingerprint)
        except (TuningError, KeyboardInterrupt) as error:
            absent.append(str(error))
            return False
        if there != fingerprint:
            absent.append(f"found {name_of_device(there)}, not {name_of_device(fingerprint)}")
        return bool(there == fingerprint)

    environs = [settings.only_gpu(number) for number in range(min(devices, len(items)))]
    slots = [WorkerSlot(functools.partial(Worker, environ)) for environ in environs]
    with worker_session():
        close_first()  # the worker that traced the calls holds one device or all
        results = _shared_out(work, items, slots, has_device)
    if len(results) < len(items):
        raise TuningError(f"no device {name_of_device(fingerprint)} to measure on: {'; '.join(absent)}")
    if absent:
        warn(f"{len(absent)} of {len(slots)} devices are not usable: {'; '.join(absent)}", TuningWarning)
    return results


def in_parallel(work: Callable[[T], R], items: Sequence[T], *, most: int) -> list[R | BaseException]:
    """Return the result or exception of `work` for each item, from threads that only wait, e.g. for an executor.

    Ctrl-C requests `this_slot().cancellation` of each thread, starts no other item, and is raised afterwards. A second
    Ctrl-C abandons the slots.

    Args:
        work: Processes one item.
        items: The items.
        most: Maximum number of threads.
    """
    slots = [WorkerSlot(Worker) for _ in range(min(most, len(items)))]
    return _shared_out(work, items, slots, lambda: True)


def _shared_out(
    work: Callable[[T], R], items: Sequence[T], slots: Sequence[WorkerSlot[Worker]], may_work: Callable[[], bool]
) -> list[R | BaseException]:
    """Return the results and exceptions in the order of the items, without items that no thread may work on."""
    waiting = collections.deque(enumerate(items))
    results: dict[int, R | BaseException] = {}

    def take(slot: WorkerSlot[Worker]) -> None:
        with in_slot(slot):
            is_member = may_work()
            while is_member:
                try:
                    # One device measures the whole item: times of two devices are not comparable.
                    index, item = waiting.popleft()
                except IndexError:
                    return
                try:
                    results[index] = work(item)
                except BaseException as error:  # noqa: BLE001 - the caller decides
                    results[index] = error

    pool = concurrent.futures.ThreadPoolExecutor(len(slots), thread_name_prefix="ejkernel-device")
    threads = [pool.submit(in_callers_context(functools.partial(take, slot))) for slot in slots]
    pool.shutdown(wait=False)  # accepts no more work
    try:
        _wait_for(threads)
    except KeyboardInterrupt:
        waiting.clear()
        for slot in slots:
            slot.cancellation.request()
        try:
            _wait_for(threads)
        except KeyboardInterrupt:
            for slot in slots:
                slot.abandon()
            raise
        raise
    return [results[index] for index in sorted(results)]


def _wait_for(threads: Sequence[concurrent.futures.Future[None]]) -> None:
    while concurrent.futures.wait(threads, timeout=_LOOK).not_done:
        pass
    for thread in threads:
        thread.result()
