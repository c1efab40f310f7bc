# SPDX-License-Identifier: Apache-2.0
"""Our Hopper kernels on calls drawn at random, simulated: features, parameters and extreme values meet."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import on_device
from tests.kernels.attention_cases import Case, reference_with_gradients

from ejkernel import compat
from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE, Rules, arguments_of, describe
from ejkernel.kernels.flash_attention.mosaic_gpu import implementation
from ejkernel.kernels.flash_attention.mosaic_gpu.alone_support import is_alone
from ejkernel.kernels.flash_attention.mosaic_gpu.implementation import MosaicGpu
from ejkernel.kernels.flash_attention.mosaic_gpu.parts import what_hides

pytestmark = pytest.mark.slow

SEEDS = range(96)
QUICK = (3, 15, 34, 43)  # of the cheapest: each dtype, and both kinds of kernels in both directions
ARRAYS = ("query", "key", "value", "bias", "sinks")
TOLERANCE = {"bfloat16": 0.02, "float16": 4e-3, "float32": 4e-3}  # of the largest element
RUNS = ("forward", "backward", "forward_of_single", "backward_in_slices")


class Simulated(MosaicGpu):
    """The implementation, simulated on a CPU."""

    def attend(self, operands, rules, params):
        """See `MosaicGpu`."""
        with simulation():
            return super().attend(operands, rules, params)

    def differentiate(self, operands, residuals, dout, rules, params):
        """See `MosaicGpu`."""
        with simulation():
            return super().differentiate(operands, residuals, dout, rules, params)


def simulation():
    """Return a context in which the implementation runs its kernels on a CPU."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    interpret = plgpu.InterpretGPUParams()
    runs = {name: functools.partial(getattr(implementation, name), interpret=interpret) for name in RUNS}
    return mock.patch.multiple(implementation, **runs)


# Random calls.


def drawn(seed):
    """Return the rules and operands of a random call."""
    rng = np.random.default_rng(seed)
    dtype = rng.choice(["bfloat16", "float16", "float32"])
    case = drawn_case(rng, wide=seed % 12 == 11, few=seed % 12 == 5)
    operands = case.operands(str(dtype), seed)
    if dtype == "float32":  # digits that float16 has: the kernels round the others
        rounded = (x.astype(jnp.float16).astype(jnp.float32) for x in operands[:3])
        operands = operands._replace(**dict(zip(ARRAYS, rounded, strict=False)))
    if case.bias is not None:
        operands = operands._replace(bias=with_extremes(operands.bias, rng))
    if case.mask is not None:
        whole = rng.random((*case.mask[:3], 1)) < rng.choice([0.5, 1.0])
        operands = operands._replace(attention_mask=operands.attention_mask & whole)
    if case.head_dim <= 256:
        operands = with_query_lengths(operands, rng)
    return case.rules, with_sinks(with_key_lengths(operands, rng), rng)


def drawn_case(rng, *, wide, few):
    """Return the sizes and features of a call; `few`: queries, of heads that share many keys."""
    batch, groups, share = (int(rng.integers(1, 3)) for _ in range(3))
    queries, keys = (int(rng.integers(1, 150)) for _ in range(2))
    dim, value_dim = (8 * int(rng.integers(1, 17)) for _ in range(2))
    heads, dim = groups * share, 264 if wide else dim
    if few:
        return Case(batch=1, queries=3, keys=1040, heads=2, groups=1, head_dim=dim, value_dim=value_dim)
    right, left = rng.choice([None, 0, 3]), rng.choice([None, None, 17, 200])
    cap = rng.choice([None, None, 0.5, 5.0, 1000.0])
    biases = (None, None, (1, heads, queries, keys), (batch, 1, 1, keys), (batch, heads, queries, 1))
    masks = (None, None, (batch, 1, 1, keys), (1, 1, queries, keys), (1, heads, queries, 1))
    return Case(
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        groups=groups,
        head_dim=dim,
        value_dim=value_dim if wide or rng.random() < 0.3 else dim,
        bias=None if wide else biases[rng.integers(5)],
        bias_dtype=str(rng.choice(["bfloat16", "float32"])),
        mask=None if wide else masks[rng.integers(5)],
        segments=not wide and bool(rng.random() < 0.2),
        rules=Rules(
            scale=float(rng.choice([0.3, 1.0, 1e-3])),
            left=left,
            right=right,
            soft_cap=None if wide else cap,
            cap_after_bias=bool(rng.random() < 0.5),
            dropout_rate=0.5 if not wide and rng.random() < 0.1 else 0.0,
        ),
    )


def with_extremes(bias, rng):
    """Return a bias of which some elements, or whole rows, are minus infinity or far below the others."""
    kind, rows = rng.choice(["none", "-inf", "-inf", "-1e4"]), rng.choice([0.0, 0.4])
    if kind == "none":
        return bias
    chosen = (rng.random(bias.shape) < 0.3) | (rng.random((*bias.shape[:3], 1)) < rows)
    return jnp.where(chosen, jnp.asarray(float(kind), bias.dtype), bias)


def with_query_lengths(operands, rng):
    if rng.random() < 0.7:
        return operands
    batch, queries = operands.query.shape[:2]
    return operands._replace(query_lengths=jnp.asarray(rng.integers(0, queries + 1, batch), jnp.int32))


def with_key_lengths(operands, rng):
    """Return operands with lengths of the keys, which are large numbers past these."""
    if rng.random() < 0.6:
        return operands
    batch, keys = operands.key.shape[:2]
    lengths = jnp.asarray(rng.integers(0, keys + 1, batch), jnp.int32)
    past = (jnp.arange(keys)[None] >= lengths[:, None])[:, :, None, None]
    more = {name: jnp.where(past, 1e4, getattr(operands, name)) for name in ("key", "value")}
    return operands._replace(key_lengths=lengths, **more)


def with_sinks(operands, rng):
    """Return operands with sinks, some of them minus infinity, or far from the logits."""
    if rng.random() < 0.5:
        return operands
    heads = operands.query.shape[2]
    extremes = rng.choice([-np.inf, -1e4, 1e4, float(jnp.finfo("float32").min)], heads)
    sinks = np.where(rng.random(heads) < 0.6, extremes, rng.standard_normal(heads))
    return operands._replace(sinks=jnp.asarray(sinks, jnp.float32))


def parameters(kernels, call, rng):
    """Return parameters of the space, half of the time those of the kernels of short sequences, or the heuristic's."""
    # On two cores the simulation of three consumers does not finish.
    space = [params for params in kernels.space(call) if is_alone(params) or params.warpgroups <= 2]
    alone, tiles = ([x for x in space if is_alone(x) is short] for short in (True, False))
    found = [x for x in (alone, tiles) if x]
    params = rng.choice(found[rng.integers(len(found))]) if found else kernels.heuristic(call)
    more = {}
    if not call.backward and not is_alone(params) and rng.random() < 0.3:
        more["overlap"] = False
    if not is_alone(params) and what_hides(call) is None and rng.random() < 0.5:
        more["query_parts" if call.backward else "key_parts"] = int(rng.integers(1, 4))
    other = dataclasses.replace(params, **more)
    return params if kernels.params_fault(call, other) else other


# The test.


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.whole] * (i not in QUICK)) for i in SEEDS])
def test_results_and_gradients_of_a_random_call(seed):
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    rules, operands = drawn(seed)
    call = describe(operands, rules, platform="gpu", fingerprint="gpu:nvidia_h200")
    backward, kernels, rng = dataclasses.replace(call, backward=True), Simulated(), np.random.default_rng(seed)
    if reason := kernels.unsupported(call):
        pytest.skip(reason)
    names = [name for name in ARRAYS if getattr(operands, name) is not None]
    if kernels.unsupported(backward):
        names = []
    arguments, dout = arguments_of(operands), cotangent(operands, seed)
    (wanted, wanted_lse), expected = reference_with_gradients(operands, rules, dout, (*names,))
    params = parameters(kernels, call, rng)
    backward_params = parameters(kernels, backward, rng) if names else None

    def run(dout, *args):
        out, lse = kernels.forward(call, *args, params=params)
        if not names:
            return out, lse, []
        found = kernels.backward(backward, lse, out, (dout,), *args, params=backward_params)
        of = dict(zip(("query", "key", "value", "bias"), found, strict=False)) | {"sinks": (*found, *[None] * 8)[7]}
        return out, lse, [of[name] for name in names]

    out, lse, gradients = jax.jit(run)(dout, *arguments)
    assert_close("output", out, wanted, call.dtype)
    # A sink of the lowest float may count as none: rows without keys differ.
    assert_close("log-sum-exp", *(jnp.where(abs(x) < EMPTY_ROW_LSE, x, 0) for x in (lse, wanted_lse)), call.dtype)
    for name, ours, theirs in zip(names, gradients, expected, strict=True):
        # With a bias that rows share, terms as large as a product of cotangent and value may cancel.
        assert_close(name, ours, theirs, call.dtype, least=call.value[3] ** 0.5 if name == "bias" else 1.0)


def cotangent(operands, seed):
    """Return a random cotangent of the output."""
    shape = (*operands.query.shape[:3], operands.value.shape[3])
    return on_device(np.random.default_rng(seed).standard_normal(shape), operands.query.dtype)


def assert_close(name, actual, expected, dtype="bfloat16", least=1.0):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    atol = TOLERANCE[dtype] * max(least, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=name)
