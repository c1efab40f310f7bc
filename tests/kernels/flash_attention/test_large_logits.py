# SPDX-License-Identifier: Apache-2.0
"""Logits of 1e9 and more: finite and right wherever `jax.nn.dot_product_attention` is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import compat
from ejkernel.kernels.flash_attention.common import AttentionCall, Rules
from ejkernel.modules import FlashAttention, FlashAttentionConfig, flash_attention
from ejkernel.ops import BwdParams, FwdParams
from ejkernel.ops.errors import ArgumentWarning

pytestmark = pytest.mark.slow

CFG = FlashAttentionConfig(
    fwd=FwdParams(q_blocksize=16, kv_blocksize=16), bwd=BwdParams(q_blocksize=8, kv_blocksize=32)
)
_rng = np.random.default_rng(0)
QUERY, KEY, VALUE, DOUT = (_rng.standard_normal((1, 32, 2, 8)).astype(np.float32) for _ in range(4))
BIAS = _rng.standard_normal((1, 2, 32, 32)).astype(np.float32)

# By name: query, key, bias and scale. Of a row of equal logits, each key has its share.
LARGE = {
    "scale 1e9": (QUERY, KEY, None, 1e9),
    "scale 1e30": (QUERY, KEY, None, 1e30),
    "query and key": (QUERY * 1e7, KEY * 1e7, None, 0.3),
    "bias": (QUERY, KEY, BIAS * 1e9, 0.3),
    "the same bias everywhere": (QUERY, KEY, np.full_like(BIAS, -1e9), 0.3),
    "equal logits": (QUERY, np.ones_like(KEY), None, 1e9),
}


def with_gradients(function, query, key, bias):
    """Return the output and the gradients of value and bias, and of query and key unless these are sums of noise."""
    arrays = [jnp.asarray(x) for x in (query, key, VALUE, bias) if x is not None]
    out, pull = jax.vjp(function, *arrays)
    dquery, dkey, *others = pull(jnp.asarray(DOUT))
    return out, others, (dquery, dkey)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_values_and_gradients_are_those_of_plain_jax(name, causal):
    *operands, scale = LARGE[name]

    def ours(query, key, value, bias=None):
        return flash_attention(query, key, value, bias=bias, causal=causal, softmax_scale=scale, cfg=CFG)

    def plain(query, key, value, bias=None):
        return jax.nn.dot_product_attention(query, key, value, bias=bias, is_causal=causal, scale=scale)

    with jax.default_matmul_precision("highest"):
        *expected, expected_noisy = with_gradients(plain, *operands)
        *found, noisy = with_gradients(ours, *operands)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, atol=2e-5), expected, found)
    for wanted, got in zip(expected_noisy, noisy, strict=True):
        # Rounding of the weights' gradients, times the scale, is what is left of sums that cancel.
        size = (
            1e-6 * scale * np.abs(operands[1]).max() if name == "equal logits" else 2e-5 * max(1, np.abs(wanted).max())
        )
        np.testing.assert_allclose(got, wanted, atol=size, rtol=1e-6)


def test_a_sink_has_its_share_beside_large_logits():
    """A sink as large as the logits takes part in the softmax, also of the gradient."""
    query, key = jnp.ones((1, 4, 1, 8)), jnp.ones((1, 4, 1, 8))
    value, dout = (jnp.asarray(x[:, :4, :1]) for x in (VALUE, DOUT))

    def ours(value, sinks):
        return flash_attention(query, key, value, sinks=sinks, softmax_scale=2048.0 / 8, cfg=CFG)

    def plain(value, sinks):
        logits = jnp.concatenate([jnp.full((4, 4), 2048.0), jnp.broadcast_to(sinks, (4, 1))], axis=1)
        return (jax.nn.softmax(logits)[:, :4] @ value[0, :, 0])[None, :, None]

    arrays = value, jnp.asarray([2049.0])
    expected, found = (jax.vjp(function, *arrays)[1](dout) for function in (plain, ours))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, atol=2e-3), expected, found)


@pytest.mark.parametrize("sink", [-1e4, 1e4, -1e30, float(np.finfo(np.float32).min)])
def test_rows_without_keys_have_zero_gradients_beside_a_far_sink(sink):
    """Their log-sum-exp is the sink; if it is large, another pass looks for the rows' exact maximum."""
    query, key, value, dout = (jnp.asarray(x[:, :, :1]) for x in (QUERY, KEY, VALUE, DOUT))
    operands = (query, key[:, :20], value[:, :20])  # the first 12 queries see no key

    def ours(query, key, value, sinks):
        return flash_attention(query, key, value, causal=True, sinks=sinks, cfg=CFG)

    with pytest.warns(ArgumentWarning, match="the first 12 queries see no key"):
        out, pull = jax.vjp(jax.jit(ours), *operands, jnp.asarray([sink]))
    if sink < 0:
        alone, expected = jax.vjp(
            lambda *arrays: jax.nn.dot_product_attention(*arrays, is_causal=True), operands[0][:, 12:], *operands[1:]
        )
        np.testing.assert_allclose(out[:, 12:], alone, atol=1e-5)
        expected = expected(dout[:, 12:])
    else:
        expected = jax.tree.map(jnp.zeros_like, (query[:, 12:], *operands[1:]))
    dquery, *others, dsinks = pull(dout)
    for wanted, got in zip(expected, (dquery[:, 12:], *others), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    for zero in (out[:, :12], dquery[:, :12], dsinks):
        np.testing.assert_array_equal(zero, 0)


def test_a_bias_of_the_lowest_float_has_a_gradient_beside_sinks():
    """It hides no key of a row whose keys all have it, if the row's sink is no logit."""
    operands = [jnp.asarray(x[:, :8]) for x in (QUERY, KEY, VALUE)]
    bias = jnp.zeros((1, 1, 8, 8), jnp.float32).at[:, :, 3].set(np.finfo(np.float32).min)
    sinks = jnp.full(QUERY.shape[2], -jnp.inf)

    def loss(function, **more):
        return lambda *arrays: jnp.sin(function(*arrays, bias=bias, **more)).sum()

    expected = jax.grad(loss(jax.nn.dot_product_attention), (0, 1, 2))(*operands)
    found = jax.grad(loss(flash_attention, sinks=sinks), (0, 1, 2))(*operands)
    for wanted, got in zip(expected, found, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_the_derivatives_of_a_gradient_are_those_of_plain_jax():
    key, value = jnp.asarray(KEY[:, :4, :1]), jnp.asarray(VALUE[:, :4, :1])
    bias = jnp.asarray(BIAS[:, :1, :4, :4]) + 4096.0  # a row's softmax does not depend on it

    def loss(function):
        return lambda query: jnp.sin(function(query, key, value, bias=bias)).sum()

    expected, found = (
        jax.jvp(jax.grad(loss(function)), (query,), (key,))[1]
        for function in (jax.nn.dot_product_attention, flash_attention)
        for query in [jnp.asarray(QUERY[:, :4, :1])]
    )
    np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.mark.parametrize("name", ["mosaic_gpu", "cudnn"])
def test_kernels_that_would_be_inexact_refuse_a_large_scale(name):
    if name == "mosaic_gpu" and (reason := compat.kernels.mosaic_gpu_reason()):
        pytest.skip(reason)
    shape = (1, 256, 2, 64)
    call = AttentionCall(query=shape, key=shape, value=shape, dtype="bfloat16", rules=Rules(scale=1e9))
    assert "softmax_scale is 1e+09" in FlashAttention.implementations.unsupported(name, call)
