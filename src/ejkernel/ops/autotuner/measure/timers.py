# SPDX-License-Identifier: Apache-2.0
"""Timers: the device's own clock if it has one, otherwise the wall clock."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from ejkernel import compat
from ejkernel.ops.autotuner.measure.sampling import MOSTLY_WAITS, Work
from ejkernel.ops.errors import EjkernelError
from ejkernel.ops.utils.fingerprint import default_device, platform_kind

_CLOCK = time.perf_counter
_SAMPLE_SECONDS = 2e-3  # a sample repeats the call for this long, so that clock and dispatch overheads do not count
_HOST_SAMPLE_SECONDS = 5e-4  # far below a time slice of the system, so that other processes seldom interrupt a sample
_THREADS = "/proc/self/task"  # Linux: one folder for each thread of this process
_CPUCLOCK_OF_THREAD = 6  # Linux: low bits of a thread's CPU clock id; the complemented thread id is above them
_READING = threading.local()  # `seconds`: the thread's processor time in `thread_seconds`
_PROGRAMS = "XLA Modules"  # the line of a device's plane with one event per run of a program


class TimerError(EjkernelError, RuntimeError):
    """The device did not report a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timer:
    """A timing method.

    Attributes:
        method: Its name, stored with every time.
        sample: Runs a function several times and returns the seconds per call; raises `TimerError` if unknown.
        end: Releases the resources of the samples.
        seconds: The duration of a sample of short calls.
        threads: Returns the processor time of each thread of this process if the host does the work and the system
            reports it; otherwise an empty dictionary.
    """

    method: str
    sample: Callable[[Callable[[], Any], int], float]
    end: Callable[[], None] = lambda: None
    seconds: float = _SAMPLE_SECONDS
    threads: Callable[[], Mapping[str, float]] = dict


def wall_sample(function: Callable[[], Any], calls: int) -> float:
    """Return the seconds per call of `calls` calls, issued back to back with one wait at the end."""
    start = _CLOCK()
    out = None
    for _ in range(calls):
        out = function()
    jax.block_until_ready(out)
    return (_CLOCK() - start) / calls


def host_sample(function: Callable[[], Any], calls: int) -> float:
    """Return the median seconds of `calls` calls, each waited for, as a program waits for its step.

    On a CPU, calls issued back to back overlap, so that a call on one core seems as fast as a call on all cores. The
    mean over a longer sample would depend on how much processor time other processes leave.
    """
    return statistics.median(wall_sample(function, 1) for _ in range(calls))


def cupti_sample(function: Callable[[], Any], calls: int) -> float:
    """Return the seconds per call that the GPU spent in kernels.

    Raises:
        TimerError: CUPTI is missing, another profiler uses it, or no kernel ran.
    """
    seconds = compat.executables.cupti_seconds(_repeated(function, calls))
    if seconds is None:
        raise TimerError("CUPTI reported no kernel; another profiler may use it, or the function runs none.")
    return seconds / calls


def profiler_sample(function: Callable[[], Any], calls: int) -> float:
    """Return the seconds per call that the device spent in programs, from a trace of JAX's profiler.

    Raises:
        TimerError: Another trace is running, or the trace contains no program on a device.
    """
    try:
        planes = compat.executables.profiled_planes(_repeated(function, calls))
    except RuntimeError as error:
        raise TimerError(f"JAX's profiler cannot be had: {error}") from error
    seconds = device_seconds(planes)
    if seconds is None:
        raise TimerError(f"the profiler's trace has no events on a line {_PROGRAMS!r} of a device.")
    return seconds / calls


def device_seconds(planes: Iterable[Any]) -> float | None:
    """Return the seconds that programs ran on the busiest device of a trace; `None` if the trace contains none."""
    busy = [
        sum(event.duration_ns for line in plane.lines if line.name == _PROGRAMS for event in line.events)
        for plane in planes
        if plane.name.startswith("/device:")
    ]
    return max(busy) * 1e-9 if busy and max(busy) > 0 else None


def thread_seconds() -> dict[str, float]:
    """Return the processor time of each thread of this process; an empty dictionary if unknown.

    The time of the calling thread does not include this function, which takes as long as a short call.
    """
    start = time.thread_time()
    try:
        threads = os.listdir(_THREADS)
    except OSError:
        return {}
    spent = {}
    for thread in threads:
        try:
            spent[thread] = time.clock_gettime(~int(thread) << 3 | _CPUCLOCK_OF_THREAD)
        except OSError:  # the thread has just ended
            continue
    now = time.thread_time()
    _READING.seconds = getattr(_READING, "seconds", 0.0) + now - start
    spent[str(threading.get_native_id())] = now - _READING.seconds
    return spent


def work_between(before: Mapping[str, float], after: Mapping[str, float], calls: int) -> Work | None:
    """Return the processor time per call between two results of `Timer.threads`; `None` if unknown."""
    spent = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
    return Work(max(spent) / calls, sum(spent) / calls) if spent else None


WALL = Timer("wall", wall_sample)
# For calls that run on the host's processors.
HOST = Timer("wall", host_sample, seconds=_HOST_SAMPLE_SECONDS, threads=thread_seconds)
CUPTI = Timer("cupti", cupti_sample, compat.executables.detach_cupti)
PROFILER = Timer("profiler", profiler_sample)
_BY_PLATFORM = {"cpu": HOST, "gpu": CUPTI, "tpu": PROFILER}


def choose_timer(functions: Sequence[Callable[[], Any]]) -> Timer:
    """Return one timer for all `functions`: the device's own if it works for each of them."""
    timer = _BY_PLATFORM.get(platform_kind(default_device().platform))
    # whether a device timer works, e.g. whether another profiler holds the device, is known only by trying
    if timer is None or timer is HOST:
        return timer or WALL
    try:
        for function in functions:
            timer.sample(function, 1)
    except TimerError:
        timer.end()
        return WALL
    return timer


def calls_per_sample(function: Callable[[], Any], warmup: int, timer: Timer = WALL) -> int:
    """Return the number of calls that make one sample of `function`, after `warmup` calls (at least one).

    If the timer knows the processor time of threads, the number follows from it: on a busy machine the wall clock would
    give some candidates samples of one call and others samples of many, which do not compare.
    """
    least = math.inf
    # the first call may still load and allocate, and does not count
    for count in range(max(2, warmup)):
        before = timer.threads()
        seconds = wall_sample(function, 1)
        work = work_between(before, timer.threads(), 1)
        if count > 0:
            least = min(least, seconds if work is None else max(work.busiest, seconds / MOSTLY_WAITS))
    return max(1, min(1000, round(timer.seconds / max(least, 1e-7))))


def _repeated(function: Callable[[], Any], calls: int) -> Callable[[], Any]:
    return lambda: [function() for _ in range(calls)][-1]
