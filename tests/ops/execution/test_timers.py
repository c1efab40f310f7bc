# SPDX-License-Identifier: Apache-2.0
"""Timers: the wall clock, with a made-up clock; CUPTI and the profiler, with made-up devices."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

from ejkernel import compat
from ejkernel.ops.execution import timers
from ejkernel.ops.execution.timers import (
    TimerError,
    calls_per_sample,
    choose_timer,
    cupti_sample,
    device_seconds,
    profiler_sample,
    wall_sample,
)


@pytest.fixture
def takes(monkeypatch):
    """`takes(1.0, 2.0)`: a function whose calls take these seconds, the last one from then on."""
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


# --- CUPTI ---


def test_cupti_tells_the_seconds_of_one_call(monkeypatch):
    monkeypatch.setattr(compat, "cupti_seconds", lambda work: work() and 6.0)
    assert cupti_sample(lambda: 1, 3) == 2.0


def test_cupti_that_is_silent_is_an_error(monkeypatch):
    monkeypatch.setattr(compat, "cupti_seconds", lambda work: None)
    with pytest.raises(TimerError, match="CUPTI told of no kernel"):
        cupti_sample(lambda: None, 1)


# --- the profiler ---


def test_a_trace_tells_the_time_of_programs_alone():
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
def test_a_trace_without_programs_tells_nothing(trace):
    assert device_seconds(trace) is None


def test_the_profiler_tells_the_seconds_of_one_call(monkeypatch):
    calls = []

    def profiled(work):
        work()
        return [plane("/device:TPU:0", XLA_Modules=[1e6] * len(calls))]

    monkeypatch.setattr(compat, "profiled_planes", profiled)
    assert profiler_sample(lambda: calls.append(1), 4) == pytest.approx(1e-3)
    assert len(calls) == 4


def test_a_trace_is_taken_and_read_even_where_no_device_tells():
    function, x = jax.jit(jnp.sin), jnp.ones(3)
    assert all(isinstance(found.name, str) for found in compat.profiled_planes(lambda: function(x)))
    with pytest.raises(TimerError, match="no events on a line 'XLA Modules'"):
        profiler_sample(lambda: function(x), 2)


def test_a_trace_inside_a_trace_is_an_error(tmp_path):
    with jax.profiler.trace(tmp_path), pytest.raises(TimerError, match="profiler cannot be had"):
        profiler_sample(lambda: None, 1)


# --- choice ---


def test_where_the_device_has_no_account_of_its_own_the_wall_clock_is_read():
    assert choose_timer([lambda: None]).method == "wall"
