# SPDX-License-Identifier: Apache-2.0
"""Correct results: tolerances by dtype, platform and precision, and messages with the place of the error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops.autotuner.measure import correctness
from ejkernel.ops.autotuner.measure.correctness import (
    check_results,
    deviations,
    is_all_finite,
    is_nowhere_finite,
    tolerance,
)
from ejkernel.ops.errors import CandidateError

INF, NAN = float("inf"), float("nan")


def check(result, expected, platform="cpu", precision=None):
    check_results([result], [expected], platform=platform, precision=precision)


def arrays(*values, dtype="float32"):
    return [jnp.asarray(value, dtype) for value in values]


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_fewer_bits_allow_more(platform):
    allowed = [
        tolerance(jnp.dtype(dtype), platform=platform, precision="highest")
        for dtype in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn")
    ]
    assert sorted(allowed) == allowed
    assert sorted(allowed, key=lambda tolerance: tolerance.worst) == allowed
    assert len(set(allowed)) == 5


@pytest.mark.parametrize(
    ("platform", "precision", "is_loose"),
    [
        ("cpu", None, False),
        ("gpu", None, True),
        ("tpu", "default", True),
        ("gpu", "tensorfloat32", True),
        ("gpu", "highest", False),
        ("gpu", "float32", False),
    ],
)
def test_an_accelerator_may_multiply_float32_in_fewer_bits_by_default(platform, precision, is_loose):
    strict = tolerance(jnp.dtype("float32"), platform="cpu", precision=None)
    assert (tolerance(jnp.dtype("float32"), platform=platform, precision=precision) > strict) == is_loose


def test_complex_numbers_have_the_tolerance_of_their_components():
    got = [tolerance(jnp.dtype(dtype), platform="gpu", precision=None) for dtype in ("complex64", "float32")]
    assert got[0] == got[1]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20))
def test_equal_results_are_right(values):
    expected = np.asarray(values, np.float32)
    check(expected.copy(), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_results_that_differ_in_the_last_places_are_right(dtype):
    expected = jnp.linspace(1.0, 2.0, 50).astype(dtype)
    eps = float(jnp.finfo(dtype).eps)
    check((expected * (1 + 2 * eps)).astype(dtype), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64", "float8_e4m3fn"])
def test_one_wrong_value_is_wrong(dtype):
    expected = jnp.linspace(1.0, 2.0, 50).astype(dtype)
    wrong = expected.at[17].set(jnp.asarray(9.0, dtype))
    with pytest.raises(CandidateError, match=r"result 0 differs from the reference: \(?9"):
        check(wrong, expected)


def test_a_small_value_has_the_tolerance_of_larger_values():
    check(*arrays([1e-6, 1.0], [2e-6, 1.0]))


def test_the_message_shows_both_values_the_difference_and_the_tolerance():
    text = r"result 0 differs from the reference: 2 instead of 1 at \[1, 0\], 0.5 relative \(allowed: 0.002\)"
    with pytest.raises(CandidateError, match=text):
        check(*arrays([[1.0], [2.0]], [[1.0], [1.0]]))
    with pytest.raises(CandidateError, match=r"or vice versa: nan instead of 1 at \[1\]$"):
        check(*arrays([9.0, NAN], [1.0, 1.0]))
    with pytest.raises(CandidateError, match=r"in 2 elements: 3 instead of 1 at \[1\]$"):
        check(np.asarray([1, 3, 4]), np.asarray([1, 1, 1]))


def test_a_small_error_everywhere_is_wrong():
    expected = jnp.linspace(1.0, 2.0, 50)
    text = r"result 0 differs from the reference by 0.001 of its root mean square \(allowed: 0.0001\)"
    with pytest.raises(CandidateError, match=text):
        check(expected * 1.001, expected)


def test_a_small_error_in_one_of_many_is_right():
    expected = jnp.ones(1000)
    check(expected.at[7].set(1.002), expected)


def test_zeros_are_right_where_zeros_are_expected():
    check(*arrays([0.0, 0.0], [0.0, 0.0]))


def test_anything_else_is_wrong_where_zeros_are_expected():
    with pytest.raises(CandidateError, match="differs"):
        check(*arrays([1e-9, 0.0], [0.0, 0.0]))


@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_a_special_value_is_right_where_the_reference_has_it(special):
    check(*arrays([special, 1.0], [special, 1.0]))


@pytest.mark.parametrize(("got", "want"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (INF, -INF), (NAN, INF), (1.0, INF)])
def test_a_special_value_elsewhere_is_wrong(got, want):
    with pytest.raises(CandidateError, match="result 0 has NaN or infinity where the reference has none"):
        check(*arrays([got, 1.0], [want, 1.0]))


def test_equal_special_values_are_correct_and_have_no_error():
    got, want = arrays([NAN, INF], [NAN, INF])
    check(got, want)
    (found,) = deviations([got], [want], platform="cpu", precision=None)
    assert found.error == 0


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8"])
def test_integers_must_be_equal(dtype):
    expected, wrong = np.asarray([1, 0, 1, 0], dtype), np.asarray([1, 1, 0, 0], dtype)
    with pytest.raises(CandidateError, match="result 0 differs from the reference in 2 elements"):
        check(wrong, expected)


def test_equal_integers_are_right():
    check(np.arange(4), np.arange(4))


def test_random_keys_must_be_equal():
    check(jax.random.key(1), jax.random.key(1))
    with pytest.raises(CandidateError, match="differs from the reference in 1 elements"):
        check(jax.random.key(1), jax.random.key(2))


def test_shapes_must_be_equal():
    with pytest.raises(CandidateError, match=r"result 0 has shape \(2,\), the reference \(1,\)"):
        check(*arrays([1.0, 1.0], [1.0]))


def test_there_must_be_as_many_results():
    with pytest.raises(CandidateError, match="returns 1 arrays, the reference 2"):
        check_results(arrays(1.0), arrays(1.0, 2.0), platform="cpu", precision=None)


def test_the_message_names_the_result():
    with pytest.raises(CandidateError, match="result 1 differs"):
        check_results(arrays(1.0, 1.0), arrays(1.0, 2.0), platform="cpu", precision=None)


def test_empty_results_are_right():
    check(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int32", "float8_e4m3fn"])
def test_the_host_and_the_device_compare_equally(dtype, monkeypatch):
    expected = jnp.arange(1, 9).astype(dtype)
    results = [expected, expected * 2, expected.at[3].set(0), expected + expected * 0]
    found = []
    for small in (correctness._SMALL, 0):
        monkeypatch.setattr(correctness, "_SMALL", small)
        found.append(list(deviations(results, [expected] * 4, platform="cpu", precision=None)))
    host, device = found
    assert [deviation.reason for deviation in device] == [deviation.reason for deviation in host]
    np.testing.assert_allclose([d.error for d in device], [d.error for d in host], rtol=1e-5)


def test_a_deviation_says_how_far_a_right_result_is_off_too():
    (deviation,) = deviations(*[[value] for value in arrays([1.00001], [1.0])], platform="cpu", precision=None)
    assert deviation == (pytest.approx(1e-5, rel=0.1), 1e-4, "")


def test_a_reference_of_less_precision_allows_more():
    expected = jnp.linspace(1.0, 2.0, 50)
    check(expected, expected.astype(jnp.bfloat16))
    with pytest.raises(CandidateError):
        check(expected, expected.astype(jnp.bfloat16).astype(jnp.float32))


def test_the_message_has_the_given_names():
    with pytest.raises(CandidateError, match=r"^the gradient of w differs from the reference"):
        check_results(arrays(1.0), arrays(2.0), platform="cpu", precision=None, names=["the gradient of w"])


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, correctness._SMALL + 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_finite_elements_are_counted_in_small_and_large_arrays(size, dtype):
    ones, nans = jnp.ones(size, dtype), jnp.full(size, NAN, dtype)
    assert [is_all_finite(array) for array in (ones, ones.at[1].set(NAN), nans)] == [True, False, False]
    assert [is_nowhere_finite(array) for array in (ones, nans.at[1].set(1), nans)] == [False, False, True]


def test_integers_are_finite_and_an_empty_array_has_nothing_that_is_not():
    assert is_all_finite(jnp.ones(4, jnp.int32))
    assert not is_nowhere_finite(jnp.zeros(0, jnp.float32))


@pytest.mark.parametrize("name", ["_compare_on_device", "_differing_on_device"])
def test_indices_into_results_with_more_elements_than_int32_counts_are_small(name):
    huge = jax.ShapeDtypeStruct((256, 7168, 2048), jnp.bfloat16)
    more = (1.0,) if name == "_compare_on_device" else ()
    found = str(jax.make_jaxpr(getattr(correctness, name))(huge, huge, *more))
    assert "argmax" in found
    assert str(256 * 7168 * 2048) not in found  # no axis is as long as this
