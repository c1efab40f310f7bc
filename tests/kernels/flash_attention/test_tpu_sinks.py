# SPDX-License-Identifier: Apache-2.0
"""Attention sinks beside the kernels for TPUs, interpreted: extreme sinks, also of rows without keys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.attention_cases import CAUSAL, Case, interpret_pallas, interpret_splash

from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE, arguments_of, describe
from ejkernel.kernels.flash_attention.reference import attention
from ejkernel.modules import FlashAttention

pytestmark = pytest.mark.slow

# -inf is no sink, as almost is the lowest number, which lies below the logits of hidden keys in these kernels.
SINKS = [-np.inf, float(np.finfo(np.float32).min), -1e4, 1e4]


@pytest.mark.parametrize("name", ["pallas_tpu", "splash"])
def test_extreme_sinks_match_the_reference(monkeypatch, name):
    interpret_splash(monkeypatch)
    interpret_pallas(monkeypatch)
    operands = Case(batch=1, queries=40, keys=20, rules=CAUSAL).operands()
    operands = operands._replace(sinks=jnp.asarray(SINKS))
    call = describe(operands, CAUSAL, platform="tpu", fingerprint="tpu:tpu_v5", return_lse=True)
    backward, implementation = dataclasses.replace(call, backward=True), FlashAttention.implementations[name]

    def wanted(*arrays):
        out, lse = attention(operands._replace(**dict(zip(names, arrays, strict=True))), CAUSAL)
        return out, jnp.where(lse == EMPTY_ROW_LSE, -jnp.inf, lse)

    names = ("query", "key", "value", "sinks")
    expected, pull = jax.vjp(wanted, *(getattr(operands, each) for each in names))
    dout, dlse = jnp.cos(expected[0]), jnp.where(jnp.isfinite(expected[1]), 0.5, 0)

    @jax.jit
    def run(*args):
        params = implementation.heuristic(call), implementation.heuristic(backward)
        out, lse = implementation.forward(call, *args, params=params[0])
        found = implementation.backward(backward, lse, out, (dout, dlse), *args, params=params[1])
        return out, [*found[:3], found[7]]

    found, gradients = run(*arguments_of(operands))
    for want, got in zip((*expected, *pull((dout, dlse))), (*found, *gradients), strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5)
