# SPDX-License-Identifier: Apache-2.0
"""Measuring: with a made-up clock, what is called how often; and the thread that it happens on."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.config.cache import overlay_cache
from ejkernel.ops.core.context import current_scope
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.execution import measuring
from ejkernel.ops.execution.measuring import Measurement, apart, benchmark, calls_per_sample, interleaved, sample
from ejkernel.ops.registry import recording
from ejkernel.ops.utils import services

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
    monkeypatch.setattr(measuring, "_CLOCK", clock)
    return clock


# --- measurements ---


def test_a_measurement_has_a_median():
    assert Measurement(samples=(3.0, 1.0, 2.0)).median == 2.0


def test_a_measurement_has_a_relative_spread():
    assert Measurement(samples=(1.0, 2.0, 3.0, 4.0, 5.0)).spread == pytest.approx(1.0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_samples_have_no_spread(count):
    assert Measurement(samples=(1.0, 9.0, 5.0)[:count]).spread == 0.0


# --- sampling ---


def test_a_sample_is_the_mean_of_its_calls(clock):
    assert sample(clock.takes("f", 0.5), 4) == 0.5


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, 1), (1e-3, 2), (1e-5, 200), (1e-9, 1000), (0.0, 1000)])
def test_a_sample_has_as_many_calls_as_make_the_clock_negligible(clock, seconds, calls):
    assert calls_per_sample(clock.takes("f", seconds), warmup=3) == calls


def test_the_first_call_does_not_decide_how_many_make_a_sample(clock):
    cold = iter([9.0, 1e-3])
    assert calls_per_sample(lambda: setattr(clock, "now", clock.now + next(cold)), warmup=2) == 2


def test_functions_are_measured_in_turns(clock):
    interleaved([clock.takes("a", 1.0), clock.takes("b", 2.0)], rounds=3, warmup=2)
    assert clock.log == ["a", "a", "b", "b", "a", "b", "a", "b", "a", "b"]


def test_each_function_has_its_samples(clock):
    got = interleaved([clock.takes("a", 1.0), clock.takes("b", 2.0)], rounds=3)
    assert [measurement.samples for measurement in got] == [(1.0,) * 3, (2.0,) * 3]


def test_a_function_that_is_not_worth_it_is_dropped(clock):
    keep = lambda samples: [True, False]  # noqa: E731
    got = interleaved([clock.takes("a", 1.0), clock.takes("b", 2.0)], rounds=3, keep=keep)
    assert [len(measurement.samples) for measurement in got] == [3, 1]


def test_a_function_that_was_dropped_does_not_come_back(clock):
    answers = iter([[True, False], [True, True], [True, True]])
    got = interleaved([clock.takes("a", 1.0), clock.takes("b", 2.0)], rounds=3, keep=lambda samples: next(answers))
    assert [len(measurement.samples) for measurement in got] == [3, 1]


def test_no_round_begins_after_the_deadline(clock):
    got = interleaved([clock.takes("a", 1.0), clock.takes("b", 1.0)], rounds=9, deadline=7.5)
    assert [len(measurement.samples) for measurement in got] == [2, 2]


def test_every_function_has_a_sample_however_late_it_is(clock):
    got = interleaved([clock.takes("a", 1.0), clock.takes("b", 1.0)], rounds=9, deadline=0.0)
    assert [len(measurement.samples) for measurement in got] == [1, 1]


def test_nothing_to_measure_gives_no_measurement():
    assert interleaved([], rounds=3) == []


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
    assert apart(threading.current_thread) is not threading.current_thread()


def test_work_for_one_device_is_done_on_one_thread():
    assert apart(threading.current_thread) is apart(threading.current_thread)


def test_work_for_another_device_is_done_on_another_thread():
    with jax.default_device(jax.devices()[-1]):
        other = apart(threading.current_thread)
    assert other is not apart(threading.current_thread)


def test_work_inside_work_has_a_thread_of_its_own():
    outer, inner = apart(lambda: (threading.current_thread(), apart(threading.current_thread)))
    assert outer is not inner


def test_work_inside_a_trace_inside_work_meets_no_tracer():
    @jax.jit
    def function(x):
        assert not isinstance(apart(lambda: jnp.ones(3) + 1), jax.core.Tracer)
        return x

    apart(lambda: function(X))


def test_a_thread_knows_whether_it_measures():
    seen = [services.is_measuring(), *apart(lambda: (services.is_measuring(), apart(services.is_measuring)))]
    assert [*seen, services.is_measuring()] == [False, True, True, False]


def test_an_error_of_the_work_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        apart(lambda: 1 / 0)


def test_the_thread_serves_again_after_an_error():
    with pytest.raises(ZeroDivisionError):
        apart(lambda: 1 / 0)
    assert apart(lambda: (services.is_measuring(), 1)) == (True, 1)


def test_precision_and_64_bit_mode_and_device_hold_there():
    def state():
        return jax.config.jax_default_matmul_precision, jax.config.jax_enable_x64, jnp.ones(()).devices()

    device = jax.devices()[2]
    with jax.default_matmul_precision("float32"), jax.enable_x64(True), jax.default_device(device):
        assert apart(state) == ("float32", True, {device})


def test_overlays_hold_there():
    with overlay_cache({("cpu:some", "op@v0", "0" * 16): 1}):
        assert apart(current_scope).layers == current_scope().layers


def test_recording_does_not_hold_there():
    with recording():
        assert (apart(current_scope).recording, bool(current_scope().recording)) == ((), True)


def test_a_mesh_does_not_hold_there():
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        assert len(apart(lambda: jnp.ones(8)).devices()) == 1
