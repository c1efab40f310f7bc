# SPDX-License-Identifier: Apache-2.0
"""Float32 operands of our Hopper kernels: the digits that float16 keeps, and the range that it does not have."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import on_device
from tests.kernels.attention_cases import CAUSAL, Case, reference_with_gradients
from tests.kernels.flash_attention.test_mosaic_backward import FUSED, SPLIT

from ejkernel import compat
from ejkernel.kernels._numbers import exponents
from ejkernel.kernels.flash_attention.common import Rules, describe
from ejkernel.kernels.flash_attention.mosaic_gpu.implementation import MosaicGpu
from ejkernel.kernels.flash_attention.mosaic_gpu.params import ForwardParams
from ejkernel.kernels.flash_attention.mosaic_gpu.ranges import exponents_of
from ejkernel.kernels.flash_attention.mosaic_gpu.single import LEAST_SCALE

DIGITS = 2e-3  # of the largest element; float16 has a precision of 5e-4
SMALL = Case(batch=2, queries=64, keys=64, heads=2, groups=1, head_dim=64, value_dim=64, rules=CAUSAL)


@pytest.fixture(autouse=True)
def mosaic():
    """Skip where the kernels cannot be imported."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)


def programs(rules, params):
    """Return the simulated forward and backward, which compile once for all operands of the same shapes."""
    from ejkernel.kernels.flash_attention.mosaic_gpu import single

    return compiled(rules, params, single._FEW)


@functools.cache
def compiled(rules, params, few):
    """Return these programs, with the limit `few` that they were compiled with."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from ejkernel.kernels.flash_attention.mosaic_gpu import single

    options = {"rules": rules, "interpret": plgpu.InterpretGPUParams()}
    forward = functools.partial(single.forward_of_single, params=ForwardParams(warpgroups=1), **options)
    return jax.jit(forward), jax.jit(functools.partial(single.backward_of_single, params=params, **options))


def names_of(operands):
    return ("query", "key", "value") if operands.bias is None else ("query", "key", "value", "bias")


def results(operands, rules, dout, params=FUSED):
    """Return output, log-sum-exp and gradients by the simulated kernels, and those of the reference."""
    residuals, expected = reference_with_gradients(operands, rules, dout, names_of(operands))
    forward, backward = programs(rules, params)
    found = backward(operands, residuals, dout)
    return (*forward(operands), *(x for x in found if x is not None)), (*residuals, *expected)


def assert_digits(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == jnp.float32
        largest = np.abs(theirs).max()
        np.testing.assert_allclose(ours / largest, theirs / largest, rtol=0, atol=DIGITS)


def random_cotangent(case):
    shape = (case.batch, case.queries, case.heads, case.value_dim)
    return on_device(np.random.default_rng(1).standard_normal(shape), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("factors", [(1e6, 1e-6, 1e30, 1e-30), (1e-12, 1e12, 1e-30, 1e30)])
def test_operands_outside_the_range_of_float16_keep_their_digits(factors):
    operands, (query, key, value, cotangent) = SMALL.operands(), factors
    operands = operands._replace(query=operands.query * query, key=operands.key * key, value=operands.value * value)
    assert_digits(*results(operands, SMALL.rules, random_cotangent(SMALL) * cotangent))


@pytest.mark.slow
def test_examples_of_different_magnitude_keep_their_digits():
    operands, size = SMALL.operands(), jnp.asarray([1e10, 1e-10])[:, None, None, None]
    operands = operands._replace(value=operands.value * size)
    found, expected = results(operands, SMALL.rules, random_cotangent(SMALL) / size, SPLIT)
    for example in range(2):
        assert_digits(*([x[example] for x in xs] for xs in (found, expected)))


@pytest.mark.slow
@pytest.mark.parametrize("few", [1 << 20, 0], ids=["bounds", "norms"])
def test_gradients_that_are_sums_over_all_rows_stay_in_range(few, monkeypatch):
    from ejkernel.kernels.flash_attention.mosaic_gpu import single

    monkeypatch.setattr(single, "_FEW", few)
    operands, ones = SMALL.operands(), jnp.ones((2, 64, 2, 64))
    # All queries see the first key most, so that its gradients are sums over all rows.
    operands = operands._replace(query=ones, key=jnp.zeros_like(operands.key).at[:, 0].set(0.2))
    assert_digits(*results(operands, SMALL.rules, 6e4 * ones + random_cotangent(SMALL)))


@pytest.mark.slow
@pytest.mark.parametrize("params", [FUSED, SPLIT], ids=["fused", "split"])
def test_weights_below_the_precision_of_float16_keep_their_digits(params):
    operands, dout = SMALL.operands(), random_cotangent(SMALL)
    (out, lse), expected = reference_with_gradients(operands, SMALL.rules, dout, ("query", "key", "value"))
    # The rows see many more keys, with which the output is the same.
    more = (out, lse + 10)
    _, backward = programs(dataclasses.replace(SMALL.rules, partial=True), params)
    assert_digits(backward(operands, more, dout)[:3], [x * np.exp(-10) for x in expected])


@pytest.mark.slow
def test_gradients_of_many_keys_keep_their_digits():
    """Where each row sees many keys, gradients are small, and bounds that read nothing would round them to fewer."""
    case = dataclasses.replace(SMALL, batch=1, queries=8, keys=1024, heads=1, rules=Rules(scale=0.125))
    operands = case.operands()
    operands = operands._replace(query=operands.query * 0.1, key=operands.key * 0.1)
    for found, expected in zip(*results(operands, case.rules, random_cotangent(case)), strict=True):
        assert np.linalg.norm(found - expected) < 7e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("axes", [(1, 2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("shapes", [[(2, 6, 4, 8), (2, 10, 2, 8), (2, 10, 2, 24)], [(3, 1, 1, 7), (3, 5, 1, 11)]])
def test_exponents_of_several_arrays_are_those_of_each(shapes, axes):
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal(shape).astype(np.float32) * 10.0 ** rng.integers(-30, 30) for shape in shapes]
    arrays[0][0, 0, 0, :3] = np.inf, -np.inf, np.nan
    arrays[-1][1] = 0
    arrays.append(np.float16(np.ones(shapes[0])))
    expected = [exponents(x, axes) for x in arrays]
    with jax.numpy_dtype_promotion("strict"):
        exponents_found = exponents_of(arrays, axes)
    for found, one in zip(exponents_found, expected, strict=True):
        np.testing.assert_array_equal(found, one)


@pytest.mark.slow
@pytest.mark.parametrize("filler", [1e30, np.nan])
@pytest.mark.parametrize("lengths", [True, False], ids=["lengths", "mask"])
def test_padding_of_any_value_changes_nothing(filler, lengths):
    case = dataclasses.replace(SMALL, rules=dataclasses.replace(CAUSAL, right=None))
    ends = jnp.asarray([40, 64], jnp.int32)
    counts = jnp.arange(64)[None] < ends[:, None]
    given = {"query_lengths": ends, "key_lengths": ends} if lengths else {"attention_mask": counts[:, None, None]}
    operands, dout = case.operands()._replace(**given), random_cotangent(case)
    names = ("query", "key", "value") if lengths else ("key", "value")
    padded = {name: jnp.where(counts[..., None, None], getattr(operands, name), filler) for name in names}
    expected = results(operands, case.rules, dout)[0]
    if lengths:
        dout = jnp.where(counts[..., None, None], dout, filler)
    forward, backward = programs(case.rules, FUSED)
    padded = operands._replace(**padded)
    found = (*forward(padded), *backward(padded, expected[:2], dout)[:3])
    assert_digits(found, expected)


@pytest.mark.slow
def test_nan_in_one_example_leaves_the_factors_of_others():
    case = dataclasses.replace(SMALL, bias=(1, 2, 64, 64))
    operands, dout = case.operands(), 1e6 * random_cotangent(case)
    operands = operands._replace(value=operands.value * 1e6)
    expected = results(operands, case.rules, dout)[1]
    broken = operands._replace(value=operands.value.at[1].set(jnp.nan))
    forward, backward = programs(case.rules, FUSED)
    residuals = expected[0].at[1].set(jnp.nan), expected[1]
    found = (*forward(broken), *backward(broken, residuals, dout.at[1].set(jnp.nan))[:3])
    assert_digits([x[0] for x in found], [x[0] for x in expected[:5]])


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [1e4, 1e9])
def test_rows_that_see_far_larger_values_elsewhere_keep_their_digits(ratio):
    rules = dataclasses.replace(CAUSAL, right=None, partial=True)
    whole = dataclasses.replace(SMALL, keys=128, rules=rules).operands()
    whole = whole._replace(value=whole.value.at[:, 64:].multiply(ratio))
    dout = random_cotangent(SMALL)
    residuals, expected = reference_with_gradients(whole, rules, dout, ("query", "key", "value"))
    part = whole._replace(key=whole.key[:, :64], value=whole.value[:, :64])
    _, backward = programs(rules, FUSED)
    assert_digits(backward(part, residuals, dout)[1:3], [x[:, :64] for x in expected[1:]])


@pytest.mark.slow
def test_a_bias_of_all_examples_has_a_gradient_of_its_dtype():
    case = dataclasses.replace(SMALL, bias=(1, 2, 64, 64))
    operands, dout = case.operands(), random_cotangent(case)
    found, expected = results(operands, case.rules, dout)
    assert_digits(found, expected)
    narrow = operands._replace(bias=operands.bias.astype(jnp.bfloat16))
    assert jax.eval_shape(programs(case.rules, FUSED)[1], narrow, found[:2], dout)[3].dtype == jnp.bfloat16


def supported(*, queries=1024, rules=SMALL.rules, **fields):
    """Return the reason why a call with float32 operands is refused; `None` if it runs."""
    types = dataclasses.replace(SMALL, queries=queries, keys=queries).types()
    options = {"platform": "gpu", "fingerprint": "gpu:nvidia_h200"}
    return MosaicGpu().unsupported(describe(types, rules, **options, **fields))


@pytest.mark.parametrize("precision", ["highest", "float32", "high", "tensorfloat32"])
def test_a_higher_default_precision_refuses_to_round(precision):
    reason = supported(default_precision=precision)
    assert (reason is None) == (precision == "tensorfloat32")
    assert reason is None or precision in reason


@pytest.mark.slow
def test_gradients_times_the_least_scale_keep_their_digits():
    operands, rules = SMALL.operands(), dataclasses.replace(SMALL.rules, scale=LEAST_SCALE)
    assert_digits(*results(operands, rules, random_cotangent(SMALL)))


def test_a_gradient_times_a_smaller_scale_is_refused():
    """Stored in float16, most of it would be zero."""
    rules = dataclasses.replace(SMALL.rules, scale=1e-6)
    assert "softmax_scale is 1e-06" in supported(rules=rules, backward=True)
    assert supported(rules=rules) is None
    assert supported(rules=dataclasses.replace(rules, scale=LEAST_SCALE), backward=True) is None


@pytest.mark.slow
def test_sums_over_very_many_rows_are_supported():
    assert supported(queries=16384, backward=True) is None
    assert supported(queries=32768, backward=True) is None
