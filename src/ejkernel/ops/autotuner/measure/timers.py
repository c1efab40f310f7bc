# SPDX-License-Identifier: Apache-2.0
"""How long functions take: by the device's own account where it gives one, else by the wall clock."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from ejkernel import compat
from ejkernel.ops.autotuner.measure.race import MOSTLY_WAITS, Work
from ejkernel.ops.errors import EjkernelError
from ejkernel.ops.utils.fingerprint import default_device, platform_kind

_CLOCK = time.perf_counter
_SAMPLE_SECONDS = 2e-3  # a sample is as many calls as take this long, so that the clock and dispatch do not count
_THREADS = "/proc/self/task"  # of Linux: a folder for each thread of this process
_CPUCLOCK_OF_THREAD = 6  # of Linux: with a thread's number, complemented, above it, the clock of its processor time
_PROGRAMS = "XLA Modules"  # the line of a device's plane that has an event for each run of a program


class TimerError(EjkernelError, RuntimeError):
    """The device did not say how long something took."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timer:
    """A way to take the time.

    Attributes:
        method: Its name, which is kept with every figure.
        sample: Returns seconds a call, of so many calls of a function; raises `TimerError` if that cannot be known.
        end: Gives back what the samples took hold of.
        threads: Returns the processor time that each thread of this process has spent, where that is what the calls
            spend and the system tells it; else nothing.
    """

    method: str
    sample: Callable[[Callable[[], Any], int], float]
    end: Callable[[], None] = lambda: None
    threads: Callable[[], Mapping[str, float]] = dict


def now() -> float:
    """Return the clock's time, seconds, as deadlines have it."""
    return _CLOCK()


def wall_sample(function: Callable[[], Any], calls: int) -> float:
    """Return seconds a call, of `calls` calls that are issued back to back and waited for once."""
    start = _CLOCK()
    out = None
    for _ in range(calls):
        out = function()
    jax.block_until_ready(out)
    return (_CLOCK() - start) / calls


def cupti_sample(function: Callable[[], Any], calls: int) -> float:
    """Return the GPU's own seconds a call: those of its kernels, added up.

    Raises:
        TimerError: there is no CUPTI, another profiler has it, or no kernel ran.
    """
    seconds = compat.cupti_seconds(_repeated(function, calls))
    if seconds is None:
        raise TimerError("CUPTI told of no kernel; another profiler may have it, or the function runs none.")
    return seconds / calls


def profiler_sample(function: Callable[[], Any], calls: int) -> float:
    """Return the device's own seconds a call, from a trace of JAX's profiler: those of its programs, added up.

    Raises:
        TimerError: another trace is being taken, or the trace has no program on a device.
    """
    try:
        planes = compat.profiled_planes(_repeated(function, calls))
    except RuntimeError as error:
        raise TimerError(f"JAX's profiler cannot be had: {error}") from error
    seconds = device_seconds(planes)
    if seconds is None:
        raise TimerError(f"the profiler's trace has no events on a line {_PROGRAMS!r} of a device.")
    return seconds / calls


def device_seconds(planes: Iterable[Any]) -> float | None:
    """Return how long programs ran on the busiest device of a trace; `None` if it tells of none."""
    busy = [
        sum(event.duration_ns for line in plane.lines if line.name == _PROGRAMS for event in line.events)
        for plane in planes
        if plane.name.startswith("/device:")
    ]
    return max(busy) * 1e-9 if busy and max(busy) > 0 else None


def thread_seconds() -> dict[str, float]:
    """Return the processor time that each thread of this process has spent; nothing where the system does not tell."""
    try:
        threads = os.listdir(_THREADS)
    except OSError:
        return {}
    spent = {}
    for thread in threads:
        try:
            spent[thread] = time.clock_gettime(~int(thread) << 3 | _CPUCLOCK_OF_THREAD)
        except OSError:  # it has just ended
            continue
    return spent


def work_between(before: Mapping[str, float], after: Mapping[str, float], calls: int) -> Work | None:
    """Return the processor time of a call, of so many between two answers of `Timer.threads`, if those tell it."""
    spent = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
    return Work(max(spent) / calls, sum(spent) / calls) if spent else None


WALL = Timer("wall", wall_sample)
HOST = Timer("wall", wall_sample, threads=thread_seconds)  # for calls whose work the host's own processors do
CUPTI = Timer("cupti", cupti_sample, compat.detach_cupti)
PROFILER = Timer("profiler", profiler_sample)
_BY_PLATFORM = {"cpu": HOST, "gpu": CUPTI, "tpu": PROFILER}


def choose_timer(functions: Sequence[Callable[[], Any]]) -> Timer:
    """Return how to time `functions`, all alike: by what the device says of itself, if it does so of each of them."""
    timer = _BY_PLATFORM.get(platform_kind(default_device().platform))
    # Others may fail to tell, such as when another profiler has the device, which is known once they are tried.
    if timer is None or timer is HOST:
        return timer or WALL
    try:
        for function in functions:
            timer.sample(function, 1)
    except TimerError:
        timer.end()
        return WALL
    return timer


def calls_per_sample(
    function: Callable[[], Any], warmup: int, threads: Callable[[], Mapping[str, float]] = dict
) -> int:
    """Return how many calls of `function` make one sample, after `warmup` calls of it (one at least).

    Where `threads` tells their processor time, that says how long a call takes: on a busy machine the clock would have
    some candidates' samples be of one call and some of many, which are not alike.
    """
    least = math.inf
    # The first call may still load and allocate, so that it does not count.
    for count in range(max(2, warmup)):
        before = threads()
        seconds = wall_sample(function, 1)
        work = work_between(before, threads(), 1)
        if count > 0:
            least = min(least, seconds if work is None else max(work.busiest, seconds / MOSTLY_WAITS))
    return max(1, min(1000, round(_SAMPLE_SECONDS / max(least, 1e-7))))


def _repeated(function: Callable[[], Any], calls: int) -> Callable[[], Any]:
    return lambda: [function() for _ in range(calls)][-1]
