# SPDX-License-Identifier: Apache-2.0
"""Our Hopper kernels on calls drawn at random, simulated: features meet that no other test combines."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.attention_cases import Case

from ejkernel import compat
from ejkernel.kernels.flash_attention.common import Rules, arguments_of, describe
from ejkernel.kernels.flash_attention.mosaic_gpu.implementation import MosaicGpu
from ejkernel.kernels.flash_attention.reference import attention

pytestmark = pytest.mark.slow

FEW = 4
ARRAYS = ("query", "key", "value", "bias", "sinks")


class Simulated(MosaicGpu):
    """The implementation, simulated on a CPU."""

    def attend(self, operands, rules, params):
        """See `MosaicGpu`."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from ejkernel.kernels.flash_attention.mosaic_gpu.launch import forward

        return forward(operands, rules, params, interpret=plgpu.InterpretGPUParams())

    def differentiate(self, operands, residuals, dout, rules, params):
        """See `MosaicGpu`."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from ejkernel.kernels.flash_attention.mosaic_gpu.launch import backward

        return backward(operands, residuals, dout, rules, params, interpret=plgpu.InterpretGPUParams())


def drawn(seed):
    """Return the rules and operands of a random call; keys past the lengths hold large numbers."""
    rng = np.random.default_rng(seed)
    batch, groups, share = (int(rng.integers(1, 3)) for _ in range(3))
    queries, keys = (int(rng.integers(1, 150)) for _ in range(2))
    dim, value_dim = (8 * int(rng.integers(1, 13)) for _ in range(2))
    heads = groups * share
    right = rng.choice([None, 0, 3])
    left = rng.choice([None, None, 17])
    cap = rng.choice([None, None, 2.0])
    biases = (None, None, (1, heads, queries, keys), (batch, 1, 1, keys))
    masks = (None, None, (batch, 1, 1, keys), (1, 1, queries, keys))
    case = Case(
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        groups=groups,
        head_dim=dim,
        value_dim=value_dim if rng.random() < 0.3 else dim,
        bias=biases[rng.integers(4)],
        mask=masks[rng.integers(4)],
        segments=bool(rng.random() < 0.25),
        rules=Rules(scale=0.3, left=left, right=right, soft_cap=cap),
    )
    operands = case.operands("bfloat16", seed)
    if rng.random() < 0.4:
        lengths = jnp.asarray(rng.integers(0, queries + 1, batch), jnp.int32)
        operands = operands._replace(query_lengths=lengths)
    if rng.random() < 0.4:
        lengths = jnp.asarray(rng.integers(0, keys + 1, batch), jnp.int32)
        past = (jnp.arange(keys)[None] >= lengths[:, None])[:, :, None, None]
        more = {name: jnp.where(past, 1e4, getattr(operands, name)) for name in ("key", "value")}
        operands = operands._replace(key_lengths=lengths, **more)
    if rng.random() < 0.4:
        operands = operands._replace(sinks=jnp.asarray(rng.standard_normal(heads), jnp.float32))
    return case.rules, operands


@pytest.mark.parametrize("seed", [*range(FEW), *(pytest.param(i, marks=pytest.mark.whole) for i in range(FEW, 48))])
def test_output_and_gradients_of_a_random_call(seed):
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    rules, operands = drawn(seed)
    call = describe(operands, rules, platform="gpu", fingerprint="gpu:nvidia_h200")
    backward = dataclasses.replace(call, backward=True)
    kernels = Simulated()
    if reason := kernels.unsupported(call) or kernels.unsupported(backward):
        pytest.skip(reason)
    names = [name for name in ARRAYS if getattr(operands, name) is not None]
    (wanted, pull), arguments = reference(operands, rules, names), arguments_of(operands)
    dout = jnp.asarray(np.random.default_rng(seed).standard_normal(wanted.shape), jnp.bfloat16)
    # On two cores the simulation of three consumers does not finish.
    params = kernels.heuristic(call)
    params = dataclasses.replace(params, warpgroups=min(params.warpgroups, 2))

    def run(dout, *args):
        out, lse = kernels.forward(call, *args, params=params)
        found = kernels.backward(backward, lse, out, (dout,), *args, params=kernels.heuristic(backward))
        of = dict(zip(("query", "key", "value", "bias"), found, strict=False)) | {"sinks": (*found, *[None] * 8)[7]}
        return out, [of[name] for name in names]

    out, gradients = jax.jit(run)(dout, *arguments)
    assert_close("output", out, wanted)
    for name, ours, theirs in zip(names, gradients, pull(dout.astype(jnp.float32)), strict=True):
        assert_close(name, ours, theirs)


def reference(operands, rules, names):
    """Return the output of the float32 reference, and its pullback to the arrays of these names."""

    def function(*arrays):
        return attention(operands._replace(**dict(zip(names, arrays, strict=True))), rules)[0]

    return jax.vjp(function, *(getattr(operands, name).astype(jnp.float32) for name in names))


def assert_close(name, actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    atol = 0.02 * max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=name)
