# SPDX-License-Identifier: Apache-2.0
"""Float32 operands of our Hopper kernels: the digits that float16 keeps, and the range that it does not have."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.attention_cases import CAUSAL, Case
from tests.kernels.flash_attention.test_mosaic_backward import FUSED, SPLIT, reference_with_gradients

from ejkernel import compat
from ejkernel.kernels.flash_attention.common import Rules, describe
from ejkernel.kernels.flash_attention.mosaic_gpu.implementation import MosaicGpu
from ejkernel.kernels.flash_attention.mosaic_gpu.params import ForwardParams

DIGITS = 2e-3  # of the largest element; float16 has a precision of 5e-4
SMALL = Case(batch=2, queries=64, keys=64, heads=2, groups=1, head_dim=64, value_dim=64, rules=CAUSAL)


@pytest.fixture
def single():
    """The module under test, where it can be imported."""
    if reason := compat.mosaic_gpu_reason():
        pytest.skip(reason)
    from ejkernel.kernels.flash_attention.mosaic_gpu import single

    return single


def interpreter():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


def results(single, operands, rules, dout, params=FUSED):
    """Return output, log-sum-exp and gradients by the simulated kernels, and those of the reference."""
    names = ("query", "key", "value") if operands.bias is None else ("query", "key", "value", "bias")
    interpret = interpreter()
    residuals, expected = reference_with_gradients(operands, rules, dout, names)
    forward = single.forward_of_single(operands, rules, ForwardParams(warpgroups=1), interpret=interpret)
    found = single.backward_of_single(operands, residuals, dout, rules, params, interpret=interpret)
    return (*forward, *(x for x in found if x is not None)), (*residuals, *expected)


def assert_digits(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == jnp.float32
        largest = np.abs(theirs).max()
        np.testing.assert_allclose(ours / largest, theirs / largest, rtol=0, atol=DIGITS)


def random_cotangent(case):
    shape = (case.batch, case.queries, case.heads, case.value_dim)
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("factors", [(1, 1, 1, 1), (1e6, 1e-6, 1e30, 1e-30), (1e-12, 1e12, 1e-30, 1e30)])
def test_operands_outside_the_range_of_float16_keep_their_digits(single, factors):
    operands, (query, key, value, cotangent) = SMALL.operands(), factors
    operands = operands._replace(query=operands.query * query, key=operands.key * key, value=operands.value * value)
    assert_digits(*results(single, operands, SMALL.rules, random_cotangent(SMALL) * cotangent))


@pytest.mark.slow
def test_examples_of_different_magnitude_keep_their_digits(single):
    operands, size = SMALL.operands(), jnp.asarray([1e10, 1e-10])[:, None, None, None]
    operands = operands._replace(value=operands.value * size)
    found, expected = results(single, operands, SMALL.rules, random_cotangent(SMALL) / size, SPLIT)
    for example in range(2):
        assert_digits(*([x[example] for x in xs] for xs in (found, expected)))


@pytest.mark.slow
def test_gradients_that_are_sums_over_all_rows_stay_in_range(single):
    case = dataclasses.replace(SMALL, rules=Rules(scale=0.125))
    operands, ones = case.operands(), jnp.ones((2, 64, 2, 64))
    # All queries see the first key most, so that its gradients are sums over all rows.
    operands = operands._replace(query=ones, key=jnp.zeros_like(operands.key).at[:, 0].set(0.5))
    assert_digits(*results(single, operands, case.rules, 6e4 * ones + random_cotangent(case)))


@pytest.mark.slow
@pytest.mark.parametrize("params", [FUSED, SPLIT], ids=["fused", "split"])
def test_weights_below_the_precision_of_float16_keep_their_digits(single, params):
    operands, dout = SMALL.operands(), random_cotangent(SMALL)
    (out, lse), expected = reference_with_gradients(operands, SMALL.rules, dout, ("query", "key", "value"))
    # As if the rows saw many more keys, with which the output is the same.
    more = (out, lse + 10)
    found = single.backward_of_single(operands, more, dout, SMALL.rules, params, interpret=interpreter())
    assert_digits(found[:3], [x * np.exp(-10) for x in expected])


@pytest.mark.slow
def test_a_bias_of_all_examples_has_a_gradient(single):
    case = dataclasses.replace(SMALL, bias=(1, 2, 64, 64))
    operands = case.operands()
    assert_digits(*results(single, operands, case.rules, random_cotangent(case)))
    narrow = operands._replace(bias=operands.bias.astype(jnp.bfloat16))
    found, _ = results(single, narrow, case.rules, random_cotangent(case))
    assert found[-1].dtype == jnp.bfloat16


def supported(*, queries=1024, **fields):
    """Return the reason why a call with float32 operands is refused; `None` if it runs."""
    types = jax.eval_shape(dataclasses.replace(SMALL, queries=queries, keys=queries).operands)
    options = {"platform": "gpu", "fingerprint": "gpu:nvidia_h200"}
    return MosaicGpu().unsupported(describe(types, SMALL.rules, **options, **fields))


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("precision", ["highest", "float32", "high", "tensorfloat32"])
def test_a_higher_default_precision_refuses_to_round(precision):
    reason = supported(default_precision=precision)
    assert (reason is None) == (precision == "tensorfloat32")
    assert reason is None or precision in reason


@pytest.mark.usefixtures("single")
def test_sums_over_very_many_rows_are_left_to_others():
    assert supported(queries=16384, backward=True) is None
    assert "65536" in supported(queries=32768, backward=True)
    assert supported(queries=32768) is None
