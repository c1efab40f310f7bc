# SPDX-License-Identifier: Apache-2.0
"""Every implementation of attention against the float32 reference: one suite; a new one joins by being registered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel import compat
from ejkernel.kernels.flash_attention import IMPLEMENTATIONS, load
from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE, Rules, describe
from ejkernel.kernels.flash_attention.reference import attention
from ejkernel.ops import BwdParams, FwdParams, device_fingerprint
from tests.kernels.attention_cases import CASES, CAUSAL, Case, fake_cudnn_backward, fake_cudnn_forward

TOLERANCE = {"float32": 3e-5, "float16": 5e-3, "bfloat16": 4e-2, "float64": 1e-12}
# Smaller than the lengths, of different sizes, and no divisors of them: every way to have a rest.
FWD, BWD = FwdParams(q_blocksize=16, kv_blocksize=32), BwdParams(q_blocksize=32, kv_blocksize=20)


@pytest.fixture(params=[*IMPLEMENTATIONS, "cudnn, simulated"])
def implementation(request, monkeypatch):
    """An implementation's name; what needs a GPU is skipped without one."""
    if request.param == "cudnn, simulated":
        monkeypatch.setattr(compat, "cudnn_attention_forward", fake_cudnn_forward)
        monkeypatch.setattr(compat, "cudnn_attention_backward", fake_cudnn_backward)
        return "cudnn"
    if request.param != "xla":
        request.getfixturevalue("gpu")
    return request.param


def supported(implementation, operands, rules, *, backward=False):
    """Return the implementation's module, or skip with its reason."""
    on_gpu = jax.default_backend() == "gpu"
    place = {"platform": "gpu", "fingerprint": device_fingerprint()} if on_gpu else {}
    module = load(implementation)
    if reason := module.unsupported_reason(describe(operands, rules, backward=backward, **place)):
        pytest.skip(reason)
    return module


def dtypes_of(implementation):
    return ("float32", "bfloat16") if implementation == "xla" else ("bfloat16", "float16")


def assert_close(expected, actual, dtype):
    scale = max(1.0, float(np.max(np.abs(np.asarray(expected, np.float64)))))
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol=0, atol=TOLERANCE[dtype] * scale
    )


def reference_gradients(operands, rules, dout):
    def out(*arrays):
        return attention(operands._replace(**dict(zip(("query", "key", "value", "bias"), arrays, strict=False))), rules)[0]

    arrays = [x for x in operands[:4] if x is not None]
    return jax.jit(lambda *arrays: jax.vjp(out, *arrays)[1](dout.astype(jnp.float32)))(*arrays)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("name", CASES)
def test_forward_matches_reference(implementation, name):
    case = CASES[name]
    dtype = dtypes_of(implementation)[0]
    operands = case.operands(dtype)
    module = supported(implementation, operands, case.rules)
    out, lse = jax.jit(functools.partial(module.forward, rules=case.rules, params=FWD))(operands)
    expected, expected_lse = jax.jit(functools.partial(attention, rules=case.rules))(operands)
    assert (jnp.dtype(dtype), jnp.float32) == (out.dtype, lse.dtype)
    assert_close(expected, out, dtype)
    seen = np.asarray(expected_lse) < EMPTY_ROW_LSE
    np.testing.assert_array_equal(np.asarray(lse)[~seen], np.float32(EMPTY_ROW_LSE))
    assert_close(np.asarray(expected_lse)[seen], np.asarray(lse)[seen], dtype)


@pytest.mark.parametrize("name", CASES)
def test_gradients_match_reference(implementation, name):
    case = CASES[name]
    dtype = dtypes_of(implementation)[0]
    operands = case.operands(dtype)
    module = supported(implementation, operands, case.rules, backward=True)
    out, lse = jax.jit(functools.partial(attention, rules=case.rules))(operands)
    residuals = (out.astype(dtype), lse)
    dout = jnp.asarray(np.random.default_rng(1).standard_normal(out.shape), dtype)
    found = jax.jit(functools.partial(module.backward, rules=case.rules, params=BWD))(operands, residuals, dout)
    found = [gradient for gradient in found if gradient is not None]
    for given, expected in zip(found, reference_gradients(operands, case.rules, dout), strict=True):
        assert given.dtype == jnp.dtype(dtype)
        assert_close(expected, given, dtype)


@pytest.mark.parametrize("name", ["causal", "key padding"])
def test_second_dtype_matches_reference(implementation, name):
    case = CASES[name]
    dtype = dtypes_of(implementation)[1]
    operands = case.operands(dtype)
    module = supported(implementation, operands, case.rules, backward=True)
    out, lse = jax.jit(functools.partial(module.forward, rules=case.rules, params=FWD))(operands)
    found = jax.jit(functools.partial(module.backward, rules=case.rules, params=BWD))(operands, (out, lse), out)
    assert_close(attention(operands, case.rules)[0], out, dtype)
    for given, expected in zip(found[:3], reference_gradients(operands, case.rules, out), strict=True):
        assert_close(expected, given, dtype)


def test_rows_without_keys_give_zeros_and_zero_gradients(implementation):
    case = CASES["key padding"]
    operands = case.operands("bfloat16")
    operands = operands._replace(attention_mask=operands.attention_mask.at[0].set(False))
    module = supported(implementation, operands, case.rules, backward=True)
    out, lse = jax.jit(functools.partial(module.forward, rules=case.rules, params=FWD))(operands)
    found = module.backward(operands, (out, lse), jnp.ones_like(out), case.rules, BWD)
    for array in (out, *found[:3]):
        np.testing.assert_array_equal(np.asarray(array[0], np.float32), 0)
        assert np.isfinite(np.asarray(array, np.float32)).all()


def test_minus_infinity_in_a_bias_hides_a_key(implementation):
    case = CASES["bias per key"]
    operands = case.operands("bfloat16")
    mask = jnp.arange(48) < 30
    masked = operands._replace(attention_mask=mask[None, None, None])
    biased = operands._replace(bias=jnp.where(mask, operands.bias, -jnp.inf))
    module = supported(implementation, biased, case.rules)
    expected, lse = module.forward(masked, case.rules, FWD)
    actual, same_lse = module.forward(biased, case.rules, FWD)
    assert_close(expected, actual, "bfloat16")
    assert_close(lse, same_lse, "bfloat16")


@pytest.mark.parametrize("name", ["causal", "bias per head", "full bias"])
@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, 0, None), (1, None, None, 2), (None, 0, None, 0)])
def test_a_batched_call_is_the_stack_of_its_examples(implementation, name, axes):
    case = CASES[name]
    operands = case.operands("bfloat16")
    module = supported(implementation, operands, case.rules, backward=True)

    def run(*arrays):
        call = operands._replace(**dict(zip(("query", "key", "value", "bias"), arrays, strict=True)))
        out, lse = module.forward(call, case.rules, FWD)
        return out, lse, module.backward(call, (out, lse), jnp.cos(out), case.rules, BWD)

    axes = [None if x is None else axis for x, axis in zip(operands[:4], axes, strict=True)]
    batched = [x if axis is None else jnp.stack([x, x[::-1]], axis) for x, axis in zip(operands[:4], axes, strict=True)]
    found = jax.jit(jax.vmap(run, in_axes=axes))(*batched)
    for index in range(2):
        example = [x if axis is None else jnp.take(x, index, axis) for x, axis in zip(batched, axes, strict=True)]
        expected = jax.jit(run)(*example)
        jax.tree.map(lambda a, b, i=index: assert_close(a, b[i], "bfloat16"), expected, found)


def test_tangents_match_reference(implementation):
    """Forward mode goes through every implementation, also where only `xla` knows the tangents."""
    case = CASES["causal mask and bias"]
    operands = case.operands("bfloat16")
    module = supported(implementation, operands, case.rules)
    wide = [x.astype(jnp.float32) for x in operands[:4]]

    def tangents(function, arrays):
        def of(*arrays):
            return function(operands._replace(query=arrays[0], key=arrays[1], value=arrays[2], bias=arrays[3]))[0]

        return jax.jvp(of, arrays, arrays)[1]

    expected = tangents(functools.partial(attention, rules=case.rules), wide)
    actual = tangents(lambda x: module.forward(x, case.rules, FWD), list(operands[:4]))
    assert_close(expected, actual, "bfloat16")


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    q_block=st.integers(1, 50),
    kv_block=st.integers(1, 50),
    left=st.none() | st.integers(0, 20),
    right=st.none() | st.integers(0, 20),
)
def test_any_lengths_and_blocks_match_reference(queries, keys, q_block, kv_block, left, right):
    rules = Rules(scale=0.3, left=left, right=right)
    operands = Case(batch=1, queries=queries, keys=keys, heads=2, head_dim=4, value_dim=4).operands()
    fwd, bwd = (cls(q_blocksize=q_block, kv_blocksize=kv_block) for cls in (FwdParams, BwdParams))

    def run(operands):
        out, lse = load("xla").forward(operands, rules, fwd)
        return out, load("xla").backward(operands, (out, lse), jnp.cos(out), rules, bwd)[:3]

    out, gradients = jax.jit(run)(operands)
    assert_close(attention(operands, rules)[0], out, "float32")
    for expected, actual in zip(reference_gradients(operands, rules, jnp.cos(out)), gradients, strict=True):
        assert_close(expected, actual, "float32")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(bias=st.tuples(*(st.sampled_from([1, n]) for n in (2, 4, 9, 13))))
def test_a_bias_of_any_broadcast_shape_has_a_gradient_of_its_shape(bias):
    operands = Case(queries=9, keys=13, bias=bias).operands()
    out, lse = attention(operands, CAUSAL)
    params = BwdParams(q_blocksize=4, kv_blocksize=5)
    found = jax.jit(functools.partial(load("xla").backward, rules=CAUSAL, params=params))(operands, (out, lse), out)
    expected = reference_gradients(operands, CAUSAL, out)[3]
    assert bias == found[3].shape
    assert_close(expected, found[3], "float32")


def test_float64_is_summed_in_float64():
    with jax.enable_x64(True):
        case = CASES["all at once"]
        operands = case.operands("float64")
        out, lse = load("xla").forward(operands, case.rules, FWD)
        expected, expected_lse = attention(operands, case.rules)
        assert {jnp.dtype("float64")} == {out.dtype, lse.dtype}
        assert_close(expected, out, "float64")
        assert_close(expected_lse, lse, "float64")
