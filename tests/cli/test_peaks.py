# SPDX-License-Identifier: Apache-2.0
"""The peaks of devices, and rooflines below them."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from tests.cli.searches import Reported, call, found

from ejkernel.cli import peaks, report, roofline
from ejkernel.cli.peaks import Peak, peak_of
from ejkernel.cli.report_data import CallReport, Throughput
from ejkernel.ops import Cost, Kernel
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.utils.fingerprint import device_fingerprint, fingerprint_of

H200 = peak_of("gpu:nvidia_h200", "bfloat16")


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("gpu", "NVIDIA H200"),
        ("gpu", "NVIDIA H100 80GB HBM3"),
        ("gpu", "NVIDIA A100-SXM4-80GB"),
        ("tpu", "TPU v5 lite"),
    ],
)
def test_the_names_of_devices_are_those_that_jax_reports(kind, chip):
    assert peak_of(fingerprint_of(kind, chip), "bfloat16") is not None


def test_every_peak_names_its_source():
    assert all(chip.source and chip.gbytes > 0 and min(chip.tflops.values()) > 0 for chip in peaks._CHIPS.values())


def test_an_unknown_device_or_dtype_has_no_peak():
    assert peak_of("gpu:unheard_of", "bfloat16") is None
    assert peak_of("gpu:nvidia_h200", "complex64") is None


def test_a_call_is_limited_by_memory_below_the_ridge():
    assert (H200.limit(100), H200.limit(300)) == ("memory", "compute")
    assert H200.attainable(100) == 480
    assert H200.attainable(300) == 989


def test_the_main_dtype_is_that_of_the_largest_array():
    kernel = type("Any", (Kernel,), {"run": lambda self, *args, cfg: args[0]})("main_dtype")
    shapes = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((64, 8), jnp.bfloat16)
    assert peaks.main_dtype(Invocation(kernel=kernel, args=shapes)) == "bfloat16"


def test_a_peak_is_measured_once_and_only_for_this_device(monkeypatch):
    times = iter([2.0, 4.0])  # milliseconds of the product and of the copy

    monkeypatch.setattr(peaks, "_least", lambda function, *args: next(times))
    monkeypatch.setattr(peaks, "_measured", functools.cache(peaks._measured.__wrapped__))
    measured = functools.partial(peak_of, measure=True)
    found = measured(device_fingerprint(), "float32")
    assert math.isclose(found.tflops, 2 * 1024**3 / 2e-3 * 1e-12)
    assert math.isclose(found.gbytes, 2 * 4 * 2**24 / 4e-3 * 1e-9)
    assert "measured here" in found.source
    assert measured(device_fingerprint(), "float32") is found
    assert measured("gpu:nvidia_h200", "bfloat16") == H200
    assert measured(device_fingerprint(), "int32") is None


def reached(name, tflops, intensity):
    return Throughput(name=name, tflops=tflops, gbytes=tflops / intensity * 1e3, intensity=intensity)


def a_call(intensity, before, after, peak=H200):
    key = dict.fromkeys(("op", "device", "call", "arguments", "config", "result"), "x")
    throughput = (reached("with the heuristic", before, intensity), reached("tuned", after, intensity))
    return CallReport(**key, throughput=throughput, peak=peak)


def test_dots_are_placed_on_the_axes_of_their_roofline():
    (found,) = roofline.rooflines_of([a_call(10, 1, 10), a_call(100, 10, 100)])
    first, second = found.dots
    assert found.x_at(first.intensity) < found.x_at(second.intensity)
    assert found.y_at(first.before_tflops) > found.y_at(first.tflops)  # the vertical axis of a picture points down
    assert first.tflops == second.before_tflops
    assert [label for _, label in found.x_ticks] == ["10", "100", "1000"]
    assert [label for _, label in found.y_ticks] == ["1", "10", "100", "1000"]


def test_the_roof_bends_at_the_ridge():
    (found,) = roofline.rooflines_of([a_call(10, 1, 10)])
    assert found.corners[-1] == (1000.0, 989)
    ridge = 989e3 / 4800
    assert math.isclose(found.corners[1][0], ridge)
    assert math.isclose(found.corners[0][1], found.corners[0][0] * 4.8)


def test_devices_and_dtypes_have_rooflines_of_their_own():
    other = Peak(dtype="float32", tflops=10, gbytes=100, source="a test")
    calls = [a_call(10, 1, 10), a_call(10, 1, 5, other), a_call(10, 1, 5, None)]
    assert [[dot.number for dot in each.dots] for each in roofline.rooflines_of(calls)] == [[1], [2]]


def test_a_call_without_floating_point_operations_has_no_dot():
    assert roofline.rooflines_of([a_call(1, 0, 0)]) == []


@pytest.mark.parametrize(("value", "text"), [(0.04074, "0.0407"), (3.35, "3.35"), (989, "989"), (3350, "3,350")])
def test_a_rate_has_three_digits(value, text):
    assert peaks.rate(value) == text


class Wrong(Reported):
    """Its cost is no `Cost`, or raises."""

    wrong = None

    def cost(self, inv):
        return self.wrong or {}["missing"]


@pytest.mark.parametrize("wrong", [None, 1e6, (1e6, 2e6), Cost(flops=math.nan, bytes=0)])
def test_a_wrong_cost_is_an_unknown_one(caplog, monkeypatch, wrong):
    data = found(call(kernel=Wrong("wrong_cost")))
    monkeypatch.setattr(Wrong, "wrong", wrong)
    assert peaks.cost_of(data.inv) is None
    assert "TFLOP/s" not in report.candidates(data)  # printed after the search, which must not be lost
    assert "the work of wrong_cost@v0 is unknown: cost r" in caplog.text
