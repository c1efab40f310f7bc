# SPDX-License-Identifier: Apache-2.0
"""How long functions take: by the device's own account where it gives one, else by the wall clock."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from ejkernel import compat
from ejkernel.ops.errors import EjkernelError
from ejkernel.ops.utils.fingerprint import default_device, platform_kind

_CLOCK = time.perf_counter
_SAMPLE_SECONDS = 2e-3  # a sample is as many calls as take this long, so that the clock and dispatch do not count
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
    """

    method: str
    sample: Callable[[Callable[[], Any], int], float]
    end: Callable[[], None] = lambda: None


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


WALL = Timer("wall", wall_sample)
CUPTI = Timer("cupti", cupti_sample, compat.detach_cupti)
PROFILER = Timer("profiler", profiler_sample)
_BY_PLATFORM = {"gpu": CUPTI, "tpu": PROFILER}


def choose_timer(functions: Sequence[Callable[[], Any]]) -> Timer:
    """Return how to time `functions`, all alike: by what the device says of itself, if it does so of each of them."""
    timer = _BY_PLATFORM.get(platform_kind(default_device().platform))
    if timer is None:
        return WALL
    try:
        for function in functions:
            timer.sample(function, 1)
    except TimerError:
        timer.end()
        return WALL
    return timer


def calls_per_sample(function: Callable[[], Any], warmup: int) -> int:
    """Return how many calls of `function` make one sample, after `warmup` calls of it (one at least)."""
    once = [wall_sample(function, 1) for _ in range(max(2, warmup))][1:]
    return max(1, min(1000, round(_SAMPLE_SECONDS / max(min(once), 1e-7))))


def _repeated(function: Callable[[], Any], calls: int) -> Callable[[], Any]:
    return lambda: [function() for _ in range(calls)][-1]
