# SPDX-License-Identifier: Apache-2.0
"""Gradients by our Hopper kernels where sinks change the log-sum-exp."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.attention_cases import CAUSAL, Case, reference_with_gradients
from tests.kernels.flash_attention.test_mosaic_backward import FUSED, SPLIT
from tests.kernels.flash_attention.test_mosaic_random import Simulated

from ejkernel import compat
from ejkernel.kernels.flash_attention.common import arguments_of, describe


@pytest.mark.slow
@pytest.mark.parametrize("params", [FUSED, SPLIT], ids=["fused", "split"])
def test_queries_past_the_lengths_have_no_gradient(params):
    """With a sink, their log-sum-exp is no longer that of a row without keys; they may be any finite numbers."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    case = Case(batch=2, queries=64, keys=64, heads=2, groups=1, head_dim=64, value_dim=64, rules=CAUSAL)
    operands = case.operands("bfloat16")
    operands = operands._replace(query_lengths=jnp.asarray([40, 0], jnp.int32), sinks=jnp.asarray([0.5, -1.0]))
    operands = operands._replace(query=operands.query.at[0, 40:].set(1e30).at[1].set(-1e30))
    dout = jnp.ones(operands.query.shape, jnp.bfloat16)
    (out, lse), expected = reference_with_gradients(operands, CAUSAL, dout, ("query", "key", "value"))
    backward = functools.partial(Simulated().backward, describe(operands, CAUSAL, backward=True), params=params)
    found = jax.jit(lambda *args: backward(lse, out, (dout,), *args))(*arguments_of(operands))
    for ours, theirs in zip(found[:3], expected, strict=True):
        np.testing.assert_allclose(np.float32(ours), theirs, atol=0.03 * np.abs(theirs).max())
