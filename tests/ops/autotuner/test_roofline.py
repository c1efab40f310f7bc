# SPDX-License-Identifier: Apache-2.0
"""What times mean: shares of peaks, and figures that cannot be true."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops import Cost
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.roofline import roofline, suspiciously_fast

COST = Cost(flops=4e12, bytes=1e9)
TIMES = st.lists(st.floats(1e-6, 1.0), max_size=40)


def measured(cache="warm"):
    return Measurement(samples=(1.0, 2.0, 9.0), cache=cache)


def test_a_call_reaches_its_work_over_its_median():
    got = roofline(measured(), COST)
    assert (got.tflops, got.gbytes) == (pytest.approx(2.0), pytest.approx(0.5))
    assert (got.flops_share, got.bytes_share, got.bound) == (None, None, 0.0)


def test_shares_are_of_the_peaks_that_are_given():
    got = roofline(measured(), COST, peak_flops=8e12, peak_bandwidth=1e9)
    assert (got.flops_share, got.bytes_share) == (pytest.approx(0.25), pytest.approx(0.5))


@pytest.mark.parametrize(("cache", "bound"), [("warm", 0.5), ("cold", 1.0)])
def test_only_cold_caches_bound_the_time_by_memory(cache, bound):
    assert roofline(measured(cache), COST, peak_flops=8e12, peak_bandwidth=1e9).bound == bound


@pytest.mark.parametrize(
    ("seconds", "suspects"),
    [
        ([], []),
        ([1.0], []),
        ([1.0, 2.0], [0]),
        ([1.0, 1.9], []),
        ([3.0, 0.1, 2.9, 3.1], [1]),
        ([3.0, 0.1, 2.9, 3.1, 0.11, 3.2, 3.3, 3.4], [1, 4]),  # a quarter of all may be wrong in the same way
        ([1.0, 1.1, 1.2, 9.0], []),  # slow ones make nobody suspicious
    ],
)
def test_candidates_far_ahead_of_the_others_are_suspicious(seconds, suspects):
    assert suspiciously_fast(seconds) == suspects


def test_what_is_faster_than_the_device_can_be_is_suspicious():
    assert suspiciously_fast([1.0, 1.1, 1.2, 1.3], bound=1.15) == [0, 1]


@given(TIMES, st.floats(0, 1))
def test_the_slowest_is_suspicious_only_by_the_bound(seconds, bound):
    found = suspiciously_fast(seconds, bound=bound)
    assert all(seconds[i] < max(seconds) or seconds[i] < bound for i in found)


@given(TIMES)
def test_without_a_bound_a_quarter_at_most_is_suspicious(seconds):
    assert len(suspiciously_fast(seconds)) <= max(1, len(seconds) // 4)
