# SPDX-License-Identifier: Apache-2.0
"""Heads of more than 256 columns in our Hopper kernels, simulated."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import on_device
from tests.kernels.attention_cases import CAUSAL, Case, by_reference, reference_with_gradients
from tests.kernels.flash_attention.test_mosaic_backward import error

from ejkernel import compat
from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE, AttentionCall, Rules, describe
from ejkernel.kernels.flash_attention.mosaic_gpu import launch, wide_support
from ejkernel.kernels.flash_attention.mosaic_gpu.implementation import MosaicGpu
from ejkernel.kernels.flash_attention.mosaic_gpu.params import BackwardParams, ForwardParams

SMALL = Case(batch=1, queries=72, keys=80, heads=2, groups=1, head_dim=264, value_dim=320, rules=CAUSAL)
UNFUSED = BackwardParams(form="unfused", kv_block=128, q_stages=3)


@pytest.fixture(autouse=True)
def mosaic():
    """Skip where the kernels cannot be imported."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)


def simulated(run, *arrays, **options):
    """Return the results of a kernel without races."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    run = functools.partial(run, interpret=plgpu.InterpretGPUParams(detect_races=True), **options)
    return jax.block_until_ready(jax.jit(run)(*arrays))


def call_of(case, **options):
    operands = case.types(options.pop("dtype", "bfloat16"))
    return describe(operands, case.rules, platform="gpu", fingerprint="gpu:nvidia_h200", **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "params"),
    [
        (SMALL, ForwardParams(kv_block=128, stages=3)),  # rows without keys, padding of both lengths
        (dataclasses.replace(SMALL, batch=2, keys=260, rules=Rules(scale=0.1, left=30, right=9)), None),
        (dataclasses.replace(SMALL, queries=140, keys=139, groups=2, head_dim=320, value_dim=64, rules=CAUSAL), None),
    ],
)
def test_the_forward_is_that_of_the_reference(case, params):
    operands = case.operands("bfloat16")
    expected, expected_lse = by_reference(operands, case.rules)
    params = params or wide_support.heuristic(call_of(case))
    out, lse = simulated(launch.forward, operands, rules=case.rules, params=params)
    assert out.dtype == jnp.bfloat16
    assert error(expected, out) < 0.004
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_lengths_of_keys_hide_the_rest():
    case = dataclasses.replace(SMALL, batch=3, rules=Rules(scale=0.1))
    operands = case.operands("float16")._replace(key_lengths=jnp.asarray([0, 33, 99]))
    out, lse = simulated(launch.forward, operands, rules=case.rules, params=ForwardParams(kv_block=128, stages=3))
    assert not out[0].any()
    assert (lse[0] == EMPTY_ROW_LSE).all()
    shorter = operands._replace(key=operands.key[1:2, :33], value=operands.value[1:2, :33], key_lengths=None)
    cut = shorter._replace(query=operands.query[1:2])
    assert error(by_reference(cut, case.rules)[0], out[1:2]) < 0.001


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        dataclasses.replace(SMALL, batch=2, queries=140, keys=260, rules=Rules(scale=0.1, left=30, right=9)),
        dataclasses.replace(SMALL, queries=40, groups=2, head_dim=320, value_dim=64, rules=Rules(scale=0.1)),
    ],
)
def test_the_gradients_are_those_of_the_reference(case):
    operands = case.operands("bfloat16")
    shape = (*operands.query.shape[:3], case.value_dim)
    dout = on_device(np.random.default_rng(1).standard_normal(shape), "bfloat16")
    (out, lse), expected = reference_with_gradients(operands, case.rules, dout)
    residuals = (out.astype("bfloat16"), lse)
    found = simulated(launch.backward, operands, residuals, dout, rules=case.rules, params=UNFUSED)
    assert found[3] is None
    for ours, theirs in zip(found, expected, strict=False):
        assert ours.dtype == jnp.bfloat16
        assert error(theirs, ours) < 0.006


@pytest.mark.slow
def test_a_row_with_nothing_but_a_sink_of_the_lowest_float_spoils_no_gradient():
    """Its log-sum-exp is that float, which any factor would make infinite."""
    case = dataclasses.replace(SMALL, queries=80, keys=72)  # the first queries stand before all keys
    operands = case.operands("bfloat16")
    dout = jnp.ones((*operands.query.shape[:3], case.value_dim), "bfloat16")
    with_sinks = operands._replace(sinks=jnp.asarray([jnp.finfo(jnp.float32).min, 0.5]))
    (out, lse), expected = reference_with_gradients(with_sinks, case.rules, dout)
    residuals = (out.astype("bfloat16"), lse)
    found = simulated(launch.backward, operands, residuals, dout, rules=case.rules, params=UNFUSED)
    for ours, theirs in zip(found, expected, strict=False):
        assert error(theirs, ours) < 0.006


@pytest.mark.slow
def test_examples_are_computed_in_parts_that_fit_in_memory(monkeypatch):
    case = dataclasses.replace(SMALL, batch=4)
    operands = case.operands("bfloat16")
    params = ForwardParams(kv_block=128, stages=3)
    whole = simulated(launch.forward, operands, rules=case.rules, params=params)
    monkeypatch.setattr(wide_support, "_AT_ONCE", 2 * 2 * 2 * 72 * 80)  # the weights of two examples
    assert wide_support.examples_at_once(call_of(case)) == 2
    parts = simulated(launch.forward, operands, rules=case.rules, params=params)
    jax.tree.map(np.testing.assert_array_equal, whole, parts)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": "float16", "backward": True}, "takes bfloat16"),
        ({"dtype": "float32", "backward": True}, "use 'xla'"),
        ({"query": (2, 512, 4, 1032)}, "1024 columns at most"),
        ({"bias": (1, 1, 512, 512)}, "no bias"),
        ({"attention_mask": (1, 1, 512, 512)}, "no attention_mask"),
        ({"segments": True}, "no segment_ids"),
        ({"rules": Rules(scale=0.1, soft_cap=5.0)}, "no logits_soft_cap"),
        ({"rules": Rules(scale=1e9)}, "softmax_scale"),
        ({"query": (1, 1 << 15, 8, 320), "key": (1, 1 << 15, 8, 320)}, "more than 1 GiB"),
    ],
)
def test_other_calls_are_refused(changed, reason):
    shape = (2, 512, 4, 320)
    fields = {"query": shape, "key": shape, "value": shape, "dtype": "bfloat16", "rules": Rules(scale=0.1)}
    call = AttentionCall(**fields, platform="gpu", device_fingerprint="gpu:nvidia_h200")
    assert MosaicGpu().unsupported(call) is None
    assert reason in MosaicGpu().unsupported(dataclasses.replace(call, **changed))


@pytest.mark.parametrize("backward", [False, True])
def test_parameters_are_checked(backward):
    call, kernels = call_of(SMALL, backward=backward), MosaicGpu()
    space = list(kernels.space(call))
    assert kernels.heuristic(call) in space
    assert len(space) == 5
    assert kernels.preference(call) == 1
    assert all(kernels.params_fault(call, params) is None for params in space)
    narrow = call_of(dataclasses.replace(SMALL, queries=200, head_dim=64, value_dim=64), backward=backward)
    other = kernels.heuristic(narrow)
    assert "256 columns" in kernels.params_fault(call, other)
    if backward:
        assert "'unfused'" in kernels.params_fault(narrow, space[0])
        many = dataclasses.replace(UNFUSED, kv_block=256, q_stages=6)
    else:
        many = ForwardParams(kv_block=256, stages=8)
    assert "bytes of shared memory" in kernels.params_fault(call, many)
