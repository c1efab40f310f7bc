# SPDX-License-Identifier: Apache-2.0
"""Plain JAX and the interpreted kernels for TPUs on random calls with extreme values: sinks, lengths, caps, masks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.attention_cases import Case, interpret_pallas, interpret_splash

from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE, Rules, arguments_of, describe
from ejkernel.kernels.flash_attention.reference import attention
from ejkernel.modules import FlashAttention
from ejkernel.ops import BwdParams, FwdParams

pytestmark = pytest.mark.slow

ARRAYS = ("query", "key", "value", "bias", "sinks")
SINKS = (-np.inf, float(np.finfo(np.float32).min), -1e30, -1e4, -100.0, 0.0, 100.0, 1e4)
FEW = {"xla": 2, "pallas_tpu": 1, "splash": 1}
BLOCKS = (16, 20, 64, None)


def drawn(rng, name):
    """Return the rules and operands of a random call."""
    batch, groups, share = (int(rng.integers(1, 4)) for _ in range(3))
    queries, keys = (int(rng.integers(1, 140)) for _ in range(2))
    heads, (dim, value_dim) = groups * share, rng.integers(1, 70, 2).tolist()
    shapes = (None, (1, heads, queries, keys), (batch, 1, 1, keys), (1, 1, queries, 1))
    cap = rng.choice([None, None, 0.5, 1000.0])
    case = Case(
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        groups=groups,
        head_dim=dim,
        value_dim=value_dim,
        bias=shapes[rng.integers(4)] if name == "xla" else None,
        mask=shapes[rng.integers(4)] if name == "xla" else None,
        segments=bool(rng.random() < 0.3),
        rules=Rules(
            scale=float(rng.choice([1e-30, 0.1, 3 * dim**-0.5])),
            left=rng.choice([None, None, 0, 17, 1000]),
            right=rng.choice([None, 0, 0, 3, 1000]),
            soft_cap=cap,
            cap_after_bias=cap is not None and bool(rng.random() < 0.5),
        ),
    )
    operands = case.operands(seed=int(rng.integers(1 << 30)))
    if case.bias is not None and rng.random() < 0.5:  # rows and single keys
        hidden = (rng.random((*case.bias[:3], 1)) < 0.3) | (rng.random(case.bias) < 0.2)
        operands = operands._replace(bias=jnp.where(hidden, -jnp.inf, operands.bias))
    if rng.random() < 0.5:
        operands = operands._replace(sinks=jnp.asarray(rng.choice(SINKS, heads), jnp.float32))
    operands = with_lengths(operands, rng)
    return case.rules, operands


def with_lengths(operands, rng):
    """Return operands with lengths of queries, keys, both or none; some are 0, negative, or beyond the arrays."""
    for side, arrays in (("query", ("query",)), ("key", ("key", "value"))):
        if rng.random() < 0.5:
            continue
        count = getattr(operands, side).shape[1]
        lengths = rng.integers(0, count + 1, operands.query.shape[0])
        lengths[0] = rng.choice([lengths[0], 0, -5, count + 100])
        past = (np.arange(count)[None] >= lengths[:, None])[:, :, None, None]
        large = {name: jnp.where(past, 1e4, getattr(operands, name)) for name in arrays}
        operands = operands._replace(**{f"{side}_lengths": jnp.asarray(lengths, jnp.int32)}, **large)
    return operands


def reference(operands, rules, names):
    """Return a function of cotangents to output, log-sum-exp, and the gradients of the arrays of these names."""

    def function(*arrays):
        out, lse = attention(operands._replace(**dict(zip(names, arrays, strict=True))), rules)
        return out, jnp.where(lse == EMPTY_ROW_LSE, -jnp.inf, lse)

    def run(dout, dlse):
        (out, lse), pull = jax.vjp(function, *(getattr(operands, name) for name in names))
        return out, lse, pull((dout, jnp.where(lse > -jnp.inf, dlse, 0)))

    return jax.jit(run)


def params_of(implementation, call, rng):
    if implementation.name == "xla":
        kind = BwdParams if call.backward else FwdParams
        return kind(q_blocksize=BLOCKS[rng.integers(4)], kv_blocksize=BLOCKS[rng.integers(4)])
    space = implementation.space(call)
    return space[rng.integers(len(space))]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[pytest.mark.whole] * (seed >= 2 + few))
        for name, few in FEW.items()
        for seed in range(2, 26)
    ],
)
def test_output_and_gradients_of_a_random_call(monkeypatch, name, seed):
    interpret_splash(monkeypatch)
    interpret_pallas(monkeypatch)
    rng = np.random.default_rng(seed)
    rules, operands = drawn(rng, name)
    place = {} if name == "xla" else {"platform": "tpu", "fingerprint": "tpu:tpu_v5"}
    call = describe(operands, rules, return_lse=True, **place)
    backward, implementation = dataclasses.replace(call, backward=True), FlashAttention.implementations[name]
    params = params_of(implementation, call, rng), params_of(implementation, backward, rng)
    names = [each for each in ARRAYS if getattr(operands, each) is not None]
    shapes = [(*operands.query.shape[:3], operands.value.shape[3]), [operands.query.shape[at] for at in (0, 2, 1)]]
    dout, dlse = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    wanted, wanted_lse, expected = reference(operands, rules, names)(dout, dlse)

    @jax.jit
    def run(dout, dlse, *args):
        out, lse = implementation.forward(call, *args, params=params[0])
        found = implementation.backward(backward, lse, out, (dout, dlse), *args, params=params[1])
        of = dict(zip(("query", "key", "value", "bias"), found, strict=False)) | {"sinks": (*found, *[None] * 8)[7]}
        return *out, [of[each] for each in names]

    with jax.default_matmul_precision("highest"):
        out, lse, gradients = run(dout, dlse, *arguments_of(operands))
    assert_close("output", out, wanted)
    assert_close("log-sum-exp", lse, wanted_lse)
    for each, ours, theirs in zip(names, gradients, expected, strict=True):
        assert_close(each, ours, theirs)


def assert_close(name, actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    atol = 3e-4 * max(1e-20, np.abs(expected[np.isfinite(expected)]).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=name)
