# SPDX-License-Identifier: Apache-2.0
"""Measuring with a fake clock: the number of calls of each function, and the measuring thread."""

from __future__ import annotations

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.autotuner.measure import measurement, timers
from ejkernel.ops.autotuner.measure.measurement import (
    Measurement,
    Runner,
    benchmark,
    on_measuring_thread,
    sets_for_cold,
)
from ejkernel.ops.autotuner.measure.sampling import Sampling, SamplingPlan
from ejkernel.ops.autotuner.measure.timers import Timer, TimerError, wall_sample
from ejkernel.ops.config.cache import overlay_cache
from ejkernel.ops.core.context import current_scope, is_measuring
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.registry import recording

X = np.ones(4, np.float32)


class FakeTime:
    """A clock, and functions that take time on it."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def __call__(self):
        return self.now

    def takes(self, name, seconds):
        def function():
            self.log.append(name)
            self.now += seconds

        return function


@pytest.fixture
def clock(monkeypatch):
    clock = FakeTime()
    monkeypatch.setattr(timers, "_CLOCK", clock)
    return clock


def interleaved(functions, **options):
    """Measure functions with a single case."""
    return measurement.interleaved([[function] for function in functions], **options)


# --- measurements ---


def test_a_measurement_has_a_median():
    assert Measurement(samples=(3.0, 1.0, 2.0)).median == 2.0


def test_a_measurement_has_a_relative_spread():
    assert Measurement(samples=(1.0, 2.0, 3.0, 4.0, 5.0)).spread == pytest.approx(1.0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_samples_have_no_spread(count):
    assert Measurement(samples=(1.0, 9.0, 5.0)[:count]).spread == 0.0


# --- runners ---


def test_a_runner_takes_its_sets_of_arguments_in_turn():
    seen = []
    runner = Runner(seen.append, [(1,), (2,), (3,)])
    for _ in range(5):
        runner()
    assert seen == [1, 2, 3, 1, 2]


@pytest.mark.parametrize(("size", "sets"), [(100, 3), (150, 2), (299, 2), (1, 300), (1000, 2), (0, 1)])
def test_sets_are_cold_when_they_are_three_times_the_cache(monkeypatch, size, sets):
    monkeypatch.setattr(measurement, "_CACHE_BYTES", 100)
    assert sets_for_cold(size) == sets


# --- rounds ---


def test_functions_are_measured_in_turns(clock):
    interleaved([clock.takes("a", 1.0), clock.takes("b", 2.0)], rounds=2, warmup=2)
    assert clock.log[:8] == ["a", "a", "b", "b", "a", "b", "a", "b"]
    assert sorted(clock.log[8:]) == ["a", "b"]  # in any order


def test_each_function_has_its_samples(clock):
    got = interleaved([clock.takes("a", 1.0), clock.takes("b", 2.0)], rounds=3)
    assert [each.samples for each in got] == [(1.0,) * 3, (2.0,) * 3]


def test_the_first_sample_does_not_count(clock):
    durations = iter([1.0, 1.0, 9.0, 2.0, 3.0])
    function = lambda: setattr(clock, "now", clock.now + next(durations))  # noqa: E731
    (got,) = interleaved([function], rounds=2)
    assert got.samples == (2.0, 3.0)


def test_a_sampling_chooses_the_functions_of_each_round(clock):
    sampling = Sampling(3, plan=SamplingPlan(rounds=5, hopeless=((2, 1.5),)))
    got = interleaved([clock.takes("a", 1.0), clock.takes("b", 2.0), clock.takes("c", 0.9)], sampling=sampling)
    assert [len(each.samples) for each in got] == [5, 2, 5]
    assert sampling.ranking() == [2, 0, 1]


def test_nothing_to_measure_gives_no_measurement():
    assert interleaved([], rounds=3) == []


# --- functions that fail, and timers that do ---


def fails_at(clock, call):
    """A function that raises in call `number`, counted from 0."""
    calls = itertools.count()

    def function():
        clock.now += 1.0
        if next(calls) == call:
            raise ZeroDivisionError("on the device")

    return function


@pytest.mark.parametrize(("call", "samples"), [(0, 0), (2, 0), (4, 1), (5, 2)])
def test_a_function_that_fails_leaves_the_race_and_is_reported(clock, call, samples):
    errors = []
    got = interleaved(
        [fails_at(clock, call), clock.takes("b", 1.0)],
        rounds=5,
        on_error=lambda index, error: errors.append((index, str(error))),
    )
    assert errors == [(0, "on the device")]
    assert [len(each.samples) for each in got] == [samples, 5]


def test_a_failure_is_the_callers_where_it_did_not_ask_for_it(clock):
    with pytest.raises(ZeroDivisionError):
        interleaved([fails_at(clock, 4)], rounds=5)


class Device:
    """A timer that tells twice the clock's seconds, up to a number of samples."""

    def __init__(self, most):
        self.left = most

    def sample(self, function, calls):
        self.left -= 1
        if self.left < 0:
            raise TimerError("another profiler")
        return 2 * wall_sample(function, calls)


@pytest.fixture
def device(monkeypatch):
    def setup(most):
        monkeypatch.setattr(timers, "_BY_PLATFORM", {"cpu": Timer("device", Device(most).sample)})

    return setup


def test_a_device_with_a_working_timer_is_used(clock, device):
    device(99)
    got = interleaved([clock.takes("a", 1.0), clock.takes("b", 2.0)], rounds=2)
    assert [(m.samples, m.method) for m in got] == [((2.0,) * 2, "device"), ((4.0,) * 2, "device")]


@pytest.mark.parametrize("most", [0, 1])
def test_a_device_that_does_not_tell_of_all_is_not_asked(clock, device, most, caplog):
    device(most)
    got = interleaved([clock.takes("a", 1.0), clock.takes("b", 2.0)], rounds=2)
    assert [(m.samples, m.method) for m in got] == [((1.0,) * 2, "wall"), ((2.0,) * 2, "wall")]
    assert not caplog.records


@pytest.mark.parametrize("most", [2, 3, 5, 7])
def test_without_device_times_all_are_measured_again_by_the_wall_clock(clock, device, most, caplog):
    device(most)
    got = interleaved([clock.takes("a", 1.0), clock.takes("b", 2.0)], rounds=3)
    assert [(m.samples, m.method) for m in got] == [((1.0,) * 3, "wall"), ((2.0,) * 3, "wall")]
    assert [record.getMessage() for record in caplog.records] == [
        "measuring anew, all by the wall clock: another profiler"
    ]


def test_failed_functions_stay_out_when_measuring_starts_again(clock, device):
    device(5)  # two to see whether it works; then the first function fails in the second of two rounds
    errors = []
    got = interleaved(
        [fails_at(clock, 4), clock.takes("b", 1.0)], rounds=3, on_error=lambda index, error: errors.append(index)
    )
    assert errors == [0]
    assert [(m.samples, m.method) for m in got] == [((), "wall"), ((1.0,) * 3, "wall")]


# --- processor time ---


def test_on_a_busy_machine_samples_are_cpu_time(clock, monkeypatch):
    spent = itertools.count(0.0, 0.5)  # the CPU seconds of the only thread: half a second between two reads
    monkeypatch.setattr(timers, "_BY_PLATFORM", {"cpu": Timer("wall", wall_sample, threads=lambda: {"1": next(spent)})})
    held_up = itertools.cycle([0.5, 4.0])
    (got,) = interleaved([lambda: setattr(clock, "now", clock.now + next(held_up))], rounds=4)
    assert (got.method, got.samples) == ("processor", (0.5,) * 4)


def test_on_a_quiet_machine_samples_come_from_the_clock(clock, monkeypatch):
    spent = itertools.count(0.0, 0.5)
    monkeypatch.setattr(timers, "_BY_PLATFORM", {"cpu": Timer("wall", wall_sample, threads=lambda: {"1": next(spent)})})
    (got,) = interleaved([clock.takes("a", 2.0)], rounds=4)
    assert (got.method, got.samples) == ("wall", (2.0,) * 4)


# --- benchmark ---


def test_benchmark_gives_the_median_in_milliseconds(clock):
    durations = iter([9.0, 9.0, 0.001, 0.003, 0.002])
    function = lambda: setattr(clock, "now", clock.now + next(durations))  # noqa: E731
    assert benchmark(function, num_warmup=2, num_iters=3) == pytest.approx(2.0)


def test_benchmark_passes_arguments_on():
    seen = []
    benchmark(lambda *args, **kwargs: seen.append((args, kwargs)), 1, num_iters=1, num_warmup=0, b=2)
    assert seen == [((1,), {"b": 2})]


def test_benchmark_waits_for_results():
    assert benchmark(jax.jit(jnp.sin), X, num_iters=2) > 0


@pytest.mark.parametrize("options", [{"num_iters": 0}, {"num_warmup": -1}])
def test_benchmark_needs_a_positive_number_of_calls(options):
    with pytest.raises(ConfigError, match=r"num_iters must be positive and num_warmup >= 0, got"):
        benchmark(lambda: None, **options)


# --- apart ---


def test_work_is_done_on_another_thread():
    assert on_measuring_thread(threading.current_thread) is not threading.current_thread()


def test_work_for_one_device_is_done_on_one_thread():
    assert on_measuring_thread(threading.current_thread) is on_measuring_thread(threading.current_thread)


def test_work_for_another_device_is_done_on_another_thread():
    with jax.default_device(jax.devices()[-1]):
        other = on_measuring_thread(threading.current_thread)
    assert other is not on_measuring_thread(threading.current_thread)


def test_nested_work_has_a_separate_thread():
    outer, inner = on_measuring_thread(
        lambda: (threading.current_thread(), on_measuring_thread(threading.current_thread))
    )
    assert outer is not inner


def test_work_inside_a_trace_inside_work_meets_no_tracer():
    @jax.jit
    def function(x):
        assert not isinstance(on_measuring_thread(lambda: jnp.ones(3) + 1), jax.core.Tracer)
        return x

    on_measuring_thread(lambda: function(X))


def test_a_thread_knows_whether_it_measures():
    seen = [is_measuring(), *on_measuring_thread(lambda: (is_measuring(), on_measuring_thread(is_measuring)))]
    assert [*seen, is_measuring()] == [False, True, True, False]


def test_an_error_of_the_work_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        on_measuring_thread(lambda: 1 / 0)


def test_the_thread_serves_again_after_an_error():
    with pytest.raises(ZeroDivisionError):
        on_measuring_thread(lambda: 1 / 0)
    assert on_measuring_thread(lambda: (is_measuring(), 1)) == (True, 1)


def test_precision_and_64_bit_mode_and_device_hold_there():
    def state():
        return jax.config.jax_default_matmul_precision, jax.config.jax_enable_x64, jnp.ones(()).devices()

    device = jax.devices()[2]
    with jax.default_matmul_precision("float32"), jax.enable_x64(True), jax.default_device(device):
        assert on_measuring_thread(state) == ("float32", True, {device})


def test_overlays_hold_there():
    with overlay_cache({("cpu:some", "op@v0", "0" * 16): 1}):
        assert on_measuring_thread(current_scope).layers == current_scope().layers


def test_recording_does_not_hold_there():
    with recording():
        assert (on_measuring_thread(current_scope).recording, bool(current_scope().recording)) == ((), True)


def test_a_mesh_does_not_hold_there():
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        assert len(on_measuring_thread(lambda: jnp.ones(8)).devices()) == 1
