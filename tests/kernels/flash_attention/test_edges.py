# SPDX-License-Identifier: Apache-2.0
"""Every implementation of attention at the edges: rows that see nothing, infinities, odd blocks, shared batch axes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.attention_cases import CASES, CAUSAL, SUBJECT, Case, simulate_cudnn
from tests.kernels.conformance import assert_close, compute

from ejkernel.kernels.flash_attention.common import Rules, describe
from ejkernel.kernels.flash_attention.reference import attention
from ejkernel.modules import FlashAttention
from ejkernel.ops import BwdParams, FwdParams, device_fingerprint

pytestmark = pytest.mark.slow

IMPLEMENTATIONS = FlashAttention.implementations
# Smaller than the lengths, of different sizes, and no divisors of them: every way to have a rest.
FWD, BWD = FwdParams(q_blocksize=16, kv_blocksize=32), BwdParams(q_blocksize=32, kv_blocksize=20)


@pytest.fixture(params=[*IMPLEMENTATIONS, "cudnn, simulated"])
def implementation(request, monkeypatch):
    """An implementation's name; what needs a GPU is skipped without one."""
    if request.param == "cudnn, simulated":
        simulate_cudnn(monkeypatch)
        return "cudnn"
    if request.param != "xla":
        request.getfixturevalue("gpu")
    return request.param


def supported(implementation, operands, rules, *, backward=False):
    """Return the implementation, or skip with its reason."""
    on_gpu = jax.default_backend() == "gpu"
    place = {"platform": "gpu", "fingerprint": device_fingerprint()} if on_gpu else {}
    module = IMPLEMENTATIONS[implementation]
    if reason := module.unsupported(describe(operands, rules, backward=backward, **place)):
        pytest.skip(reason)
    return module


close = functools.partial(assert_close, dataclasses.replace(SUBJECT, tolerance=SUBJECT.tolerance | {"float64": 1e-12}))


def dtypes_of(implementation):
    return ("float32", "bfloat16") if implementation == "xla" else ("bfloat16", "float16")


def params_for(module, operands, rules, *, backward=False):
    """Return awkward blocks, or what another implementation would take."""
    if module.name == "xla":
        return BWD if backward else FWD
    return module.heuristic(describe(operands, rules, backward=backward))


def with_gradients(module, rules, fwd=None, bwd=None):
    """Return a function from operands to output, log-sum-exp and gradients for a cotangent of `cos(out)`."""

    def run(operands):
        out, lse = module.attend(operands, rules, fwd or params_for(module, operands, rules))
        dout, params = jnp.cos(out), bwd or params_for(module, operands, rules, backward=True)
        found = module.differentiate(operands, (out, lse), dout, rules, params)
        return out, lse, [gradient for gradient in found if gradient is not None]

    return run


def reference_with_gradients(rules, dtype):
    """Return the same by the reference, with the output rounded as an implementation's is."""

    def run(operands):
        names = [name for name in ("query", "key", "value", "bias") if getattr(operands, name) is not None]

        def function(*arrays):
            return attention(operands._replace(**dict(zip(names, arrays, strict=True))), rules)

        (out, lse), pull = jax.vjp(function, *(getattr(operands, name) for name in names))
        dout = jnp.cos(out.astype(dtype)).astype(out.dtype)
        return out, lse, list(pull((dout, jnp.zeros_like(lse))))

    return run


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def test_lone_query_matches_reference(implementation):
    """Decoding: one query, which causal attention hides nothing from; its gradient is not every implementation's."""
    case = CASES["one query"]
    operands = case.operands("bfloat16")
    module = supported(implementation, operands, case.rules)
    out, lse = compute(lambda x: module.attend(x, case.rules, params_for(module, x, case.rules)), operands)
    expected, expected_lse = compute(functools.partial(attention, rules=case.rules), operands)
    close(expected, out, "bfloat16")
    close(expected_lse, lse, "bfloat16")


def test_rows_without_keys_give_zeros_and_zero_gradients(implementation):
    case = CASES["key padding"]
    operands = case.operands(dtypes_of(implementation)[0])
    operands = operands._replace(attention_mask=operands.attention_mask.at[0].set(False))
    module = supported(implementation, operands, case.rules, backward=True)
    out, _, gradients = compute(with_gradients(module, case.rules), operands)
    for array in (out, *gradients):
        np.testing.assert_array_equal(np.asarray(array[0], np.float32), 0)
        assert np.isfinite(np.asarray(array, np.float32)).all()


def test_minus_infinity_in_a_bias_hides_a_key(implementation):
    case = CASES["bias per key"]
    operands = case.operands("bfloat16")
    mask = jnp.asarray(np.outer([True, False], np.arange(48) < 30))[:, None, None]
    masked = operands._replace(attention_mask=mask)
    biased = operands._replace(bias=jnp.where(mask, operands.bias, -jnp.inf))
    module = supported(implementation, biased, case.rules)
    supported(implementation, masked, case.rules)

    def forward(operands):
        return module.attend(operands, case.rules, params_for(module, operands, case.rules))

    expected, lse = compute(forward, masked)
    actual, same_lse = compute(forward, biased)
    close(expected, actual, "bfloat16")
    close(lse, same_lse, "bfloat16")


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("bias per head", (0, 0, 0, 0)),
        ("bias per head", (0, None, 0, None)),
        ("full bias", (1, None, None, 2)),
        ("full bias", (None, 0, None, None)),
    ],
)
def test_a_batched_call_is_the_stack_of_its_examples(implementation, name, axes):
    case, dtype = CASES[name], dtypes_of(implementation)[0]
    operands = case.operands(dtype)
    run = with_gradients(supported(implementation, operands, case.rules, backward=True), case.rules)

    def on_arrays(*arrays):
        return run(operands._replace(query=arrays[0], key=arrays[1], value=arrays[2], bias=arrays[3]))

    batched = [x if axis is None else jnp.stack([x, x[::-1]], axis) for x, axis in zip(operands[:4], axes, strict=True)]
    example = [x if axis is None else jnp.take(x, 1, axis) for x, axis in zip(batched, axes, strict=True)]
    found = compute(jax.vmap(on_arrays, in_axes=axes), *batched)
    expected = compute(on_arrays, *example)
    jax.tree.map(lambda a, b: close(a, b[1], dtype), expected, found)


@settings(max_examples=5, derandomize=True)
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
    out, _, gradients = compute(with_gradients(IMPLEMENTATIONS["xla"], rules, fwd, bwd), operands)
    expected, _, expected_gradients = compute(reference_with_gradients(rules, "float32"), operands)
    jax.tree.map(lambda a, b: close(a, b, "float32"), [expected, expected_gradients], [out, gradients])


@settings(max_examples=3, derandomize=True)
@given(bias=st.tuples(*(st.sampled_from([1, n]) for n in (2, 4, 9, 13))))
def test_a_bias_of_any_broadcast_shape_has_a_gradient_of_its_shape(bias):
    operands = Case(queries=9, keys=13, bias=bias).operands()
    fwd, bwd = FwdParams(q_blocksize=9, kv_blocksize=13), BwdParams(q_blocksize=4, kv_blocksize=5)
    found = compute(with_gradients(IMPLEMENTATIONS["xla"], CAUSAL, fwd, bwd), operands)[2][3]
    assert bias == found.shape
    close(compute(reference_with_gradients(CAUSAL, "float32"), operands)[2][3], found, "float32")


def test_float64_is_summed_in_float64():
    with jax.enable_x64(True):
        case = CASES["all at once"]
        operands = case.operands("float64")
        out, lse = compute(functools.partial(IMPLEMENTATIONS["xla"].attend, rules=case.rules, params=FWD), operands)
        expected, expected_lse = compute(functools.partial(attention, rules=case.rules), operands)
        assert {jnp.dtype("float64")} == {out.dtype, lse.dtype}
        close(expected, out, "float64")
        close(expected_lse, lse, "float64")
