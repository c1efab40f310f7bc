# SPDX-License-Identifier: Apache-2.0
"""Timers: the wall clock, with a made-up clock; CUPTI and the profiler, with made-up devices."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
import types

import jax
import jax.numpy as jnp
import pytest

from ejkernel import compat
from ejkernel.ops.autotuner.measure import timers
from ejkernel.ops.autotuner.measure.sampling import Work
from ejkernel.ops.autotuner.measure.timers import (
    HOST,
    Timer,
    TimerError,
    calls_per_sample,
    choose_timer,
    cupti_sample,
    device_seconds,
    profiler_sample,
    thread_seconds,
    wall_sample,
    work_between,
)


@pytest.fixture
def takes(monkeypatch):
    """`takes(1.0, 2.0)`: a function with calls of these seconds; the last one repeats."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(timers, "_CLOCK", lambda: clock.now)

    def setup(*seconds):
        left = list(seconds)

        def function():
            clock.now += left.pop(0) if len(left) > 1 else left[0]

        return function

    return setup


def plane(name, **lines):
    """A plane of a trace: `line=[nanoseconds, ...]`."""
    return types.SimpleNamespace(
        name=name,
        lines=[
            types.SimpleNamespace(
                name=line.replace("_", " "), events=[types.SimpleNamespace(duration_ns=ns) for ns in durations]
            )
            for line, durations in lines.items()
        ],
    )


# --- the wall clock ---


def test_a_sample_is_the_mean_of_its_calls(takes):
    assert wall_sample(takes(0.5), 4) == 0.5


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, 1), (1e-3, 2), (1e-5, 200), (1e-9, 1000), (0.0, 1000)])
def test_a_sample_has_as_many_calls_as_make_the_clock_negligible(takes, seconds, calls):
    assert calls_per_sample(takes(seconds), 3) == calls


def test_the_first_call_does_not_decide_how_many_make_a_sample(takes):
    assert calls_per_sample(takes(9.0, 1e-3), 2) == 2


def test_on_a_busy_machine_the_work_says_how_many_calls_make_a_sample(takes):
    spent = itertools.count(0.0, 1e-3)
    threads = lambda: {"1": next(spent) / 2, "2": 0.0}  # noqa: E731 - half a millisecond from one answer to the next
    assert calls_per_sample(takes(0.03), 3, Timer("wall", wall_sample, threads=threads)) == 4


def test_a_call_that_waits_makes_few_calls_a_sample_though_it_works_little(takes):
    assert calls_per_sample(takes(1.0), 3, Timer("wall", wall_sample, threads=lambda: {"1": 0.0})) == 1


def test_each_call_on_a_host_is_waited_for(takes, monkeypatch):
    waited = []
    monkeypatch.setattr(timers.jax, "block_until_ready", waited.append)
    assert choose_timer([]) is HOST
    HOST.sample(takes(0.5), 3)
    assert len(waited) == 3


def test_one_disturbed_call_does_not_change_a_host_s_sample(takes):
    assert HOST.sample(takes(0.5, 9.0, 0.5), 3) == 0.5


def test_short_calls_on_a_host_make_samples_far_below_a_time_slice(takes):
    quiet = dataclasses.replace(HOST, threads=dict)
    assert calls_per_sample(takes(1e-4), 3, quiet) == 5


# --- processor time ---


def test_the_work_of_a_call_is_that_of_the_busiest_thread_and_of_all():
    before, after = {"1": 1.0, "2": 5.0}, {"1": 3.0, "2": 6.0, "new": 1.0}
    assert work_between(before, after, 2) == Work(busiest=1.0, total=2.0)


def test_without_support_of_the_system_work_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(timers, "_THREADS", str(tmp_path / "nowhere"))
    assert thread_seconds() == {}
    assert work_between({}, {}, 1) is None


def test_a_thread_that_has_just_ended_is_left_out(monkeypatch, tmp_path):
    (tmp_path / "4194305").mkdir()  # no thread has so large a number
    monkeypatch.setattr(timers, "_THREADS", str(tmp_path))
    assert set(thread_seconds()) <= {str(threading.get_native_id())}


def test_the_work_of_a_call_is_without_the_reading_of_the_clocks(monkeypatch):
    monkeypatch.setattr(timers.time, "thread_time", itertools.count(1.0).__next__)  # each reading takes a second
    first, second = ({str(threading.get_native_id()): 0.0} | thread_seconds() for _ in range(2))
    assert work_between(first, second, 1).busiest == pytest.approx(1.0)  # from the end of the first to the second


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system does not tell threads' times")
def test_a_thread_that_works_is_the_busiest():
    before, start = thread_seconds(), time.thread_time()
    while time.thread_time() - start < 0.01:
        pass
    work = work_between(before, thread_seconds(), 1)
    assert work.total >= work.busiest >= 0.01


# --- CUPTI ---


def test_cupti_measures_the_seconds_of_one_call(monkeypatch):
    monkeypatch.setattr(compat.executables, "cupti_seconds", lambda work: work() and 6.0)
    assert cupti_sample(lambda: 1, 3) == 2.0


def test_silent_cupti_is_an_error(monkeypatch):
    monkeypatch.setattr(compat.executables, "cupti_seconds", lambda work: None)
    with pytest.raises(TimerError, match="CUPTI reported no kernel"):
        cupti_sample(lambda: None, 1)


# --- the profiler ---


def test_a_trace_has_only_the_time_of_programs():
    trace = [
        plane("/host:CPU", XLA_Modules=[9e9]),
        plane("/device:TPU:0", Steps=[8e9], XLA_Modules=[1e9, 2e9], XLA_Ops=[5e8, 5e8]),
    ]
    assert device_seconds(trace) == pytest.approx(3.0)


def test_the_busiest_device_counts():
    trace = [plane("/device:TPU:0", XLA_Modules=[1e9]), plane("/device:TPU:1", XLA_Modules=[1e9, 1e9])]
    assert device_seconds(trace) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "trace", [[], [plane("/host:CPU", XLA_Modules=[1e9])], [plane("/device:TPU:0", Steps=[1e9])]], ids=len
)
def test_a_trace_without_programs_has_no_time(trace):
    assert device_seconds(trace) is None


def test_the_profiler_measures_the_seconds_of_one_call(monkeypatch):
    calls = []

    def profiled(work):
        work()
        return [plane("/device:TPU:0", XLA_Modules=[1e6] * len(calls))]

    monkeypatch.setattr(compat.executables, "profiled_planes", profiled)
    assert profiler_sample(lambda: calls.append(1), 4) == pytest.approx(1e-3)
    assert len(calls) == 4


def test_a_trace_works_even_without_device_times():
    function, x = jax.jit(jnp.sin), jnp.ones(3)
    assert all(isinstance(found.name, str) for found in compat.executables.profiled_planes(lambda: function(x)))
    with pytest.raises(TimerError, match="no events on a line 'XLA Modules'"):
        profiler_sample(lambda: function(x), 2)


def test_a_trace_inside_a_trace_is_an_error(tmp_path):
    with jax.profiler.trace(tmp_path), pytest.raises(TimerError, match="profiler cannot be had"):
        profiler_sample(lambda: None, 1)


# --- choice ---


def test_devices_without_their_own_timer_use_the_wall_clock():
    assert choose_timer([lambda: None]).method == "wall"
