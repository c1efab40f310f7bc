# SPDX-License-Identifier: Apache-2.0
"""Hopper's kernels of short sequences: simulated on a CPU, lowered for CUDA, and the calls that they refuse."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device
from tests.kernels.attention_cases import Case, by_reference, reference_with_gradients

from ejkernel import compat
from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE, Operands, Rules, describe
from ejkernel.kernels.flash_attention.mosaic_gpu import alone_support
from ejkernel.kernels.flash_attention.mosaic_gpu.implementation import MosaicGpu
from ejkernel.kernels.flash_attention.mosaic_gpu.params import BackwardParams, ForwardParams

PLACE = {"platform": "gpu", "fingerprint": "gpu:nvidia_h200"}
SHORT = Case(batch=3, queries=24, keys=24, heads=2, groups=2, head_dim=32, value_dim=32)
CASES = {
    "full": SHORT,
    "causal": dataclasses.replace(SHORT, rules=Rules(scale=0.3, right=0)),
    "window": dataclasses.replace(SHORT, queries=64, keys=64, rules=Rules(scale=0.3, left=7, right=2)),
    "soft cap": dataclasses.replace(SHORT, rules=Rules(scale=0.3, soft_cap=1.5)),
    "odd": dataclasses.replace(SHORT, queries=13, keys=37, head_dim=40, value_dim=72),
    "two slabs": dataclasses.replace(SHORT, batch=2, queries=128, keys=128, rules=Rules(scale=0.3, right=0)),
    "two odd slabs": dataclasses.replace(SHORT, queries=77, keys=101, value_dim=96),
    "two slabs of keys": dataclasses.replace(SHORT, queries=16, keys=77),
    "two slabs of queries": dataclasses.replace(SHORT, queries=120, keys=30),
    "first queries see nothing": dataclasses.replace(SHORT, queries=20, keys=9, rules=Rules(scale=0.3, right=0)),
}


@pytest.fixture
def interpret(monkeypatch):
    """The simulation, where the kernels can be imported; teams compute several heads, and not all as many."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from jax.experimental.pallas import mosaic_gpu

    monkeypatch.setattr(alone_support, "MULTIPROCESSORS", 2)
    return mosaic_gpu.InterpretGPUParams(detect_races=True)


def run(operands, rules, interpret, warpgroups=2, stages=1):
    """Return output, log-sum-exp and gradients, and a cotangent."""
    rng = np.random.default_rng(1)
    shape = (*operands.query.shape[:3], operands.value.shape[3])
    dout = on_device(rng.standard_normal(shape), operands.query.dtype)
    return program_of(rules, interpret, warpgroups, stages)(operands, dout), dout


@functools.cache
def program_of(rules, interpret, warpgroups, stages):
    """Return the simulated kernels, compiled once for all operands of the same types."""
    from ejkernel.kernels.flash_attention.mosaic_gpu.alone_launch import backward_alone, forward_alone

    forward = ForwardParams(alone=True, kv_block=64, warpgroups=warpgroups, stages=stages)
    backward = BackwardParams(form="alone", warpgroups=warpgroups, q_stages=stages)

    def both(operands, dout):
        found = forward_alone(operands, rules, forward, interpret=interpret)
        gradients = backward_alone(operands, dout, rules, backward, interpret=interpret)
        assert all(x.dtype == operands.query.dtype for x in gradients[:3])
        return (*found, *gradients[: 3 if operands.bias is None else 4])

    return jax.jit(both)


def expected_of(operands, rules, dout):
    names = ("query", "key", "value", *["bias"] * (operands.bias is not None))
    found, gradients = reference_with_gradients(operands, rules, dout, names)
    return *found, *gradients


def assert_alike(found, expected, error=0.02):
    for one, other in zip(found, expected, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        other = np.where(other == -np.inf, EMPTY_ROW_LSE, other)
        np.testing.assert_allclose(
            one, other, rtol=1.5 * error, atol=error * max(1, np.abs(other[other > -1e30]).max())
        )


# Of these, each feature is also part of another case.
REPEATED = ("full", "causal")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.whole] * (n in REPEATED)) for n in CASES])
def test_heads_are_right(interpret, name):
    """Each team of consumers computes more than one head."""
    case = CASES[name]
    operands = case.operands("bfloat16")
    found, dout = run(operands, case.rules, interpret)
    assert_alike(found, expected_of(operands, case.rules, dout))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"key_lengths": jnp.asarray([13, -(2**31), 99])},
        {"sinks": on_device([0.5, -np.inf], "float32")},
        {"sinks": jnp.asarray([4.0, -1.0]), "key_lengths": jnp.asarray([0, 24, 1])},
        {"attention_mask": jnp.asarray(np.random.default_rng(0).random((3, 2, 1, 24)) < 0.5).at[1].set(False)},
        {"attention_mask": (jnp.arange(24) % 3 > 0)[None, None, None]},
    ],
)
def test_hidden_keys_and_sinks(interpret, more):
    operands = SHORT.operands("bfloat16")._replace(**more)
    found, dout = run(operands, SHORT.rules, interpret)
    assert_alike(found, expected_of(operands, SHORT.rules, dout))


@pytest.mark.slow
@pytest.mark.parametrize("bias", [(1, 2, 24, 37), (1, 1, 1, 37), (3, 1, 24, 1), (3, 2, 24, 37)])
def test_bias(interpret, bias):
    """The gradient of a shared bias is a sum over examples, in blocks that have one head each."""
    case = dataclasses.replace(SHORT, keys=37, bias=bias, mask=(3, 1, 24, 37), rules=Rules(scale=0.3, soft_cap=3.0))
    operands = case.operands("bfloat16")
    operands = operands._replace(bias=operands.bias.at[..., :2].set(-jnp.inf) if bias[3] > 1 else operands.bias)
    found, dout = run(operands, case.rules, interpret)
    assert_alike(found, expected_of(operands, case.rules, dout))


@pytest.mark.slow
def test_examples_of_vmap_share_a_bias(interpret):
    """In the folded batch each example has the bias, and the gradient of each is a sum over its own batch."""
    from ejkernel.kernels.flash_attention.mosaic_gpu.alone_launch import backward_alone

    case = dataclasses.replace(SHORT, batch=4, bias=(1, 2, 24, 24))
    operands, params = case.operands("bfloat16"), BackwardParams(form="alone", q_stages=1)

    def pull(query, dout, operands=operands):
        own = operands._replace(query=query, key=query, value=query)
        return backward_alone(own, dout, case.rules, params, interpret=interpret)[3]

    query, dout = (x.reshape(2, 2, *x.shape[1:]) for x in (operands.query, operands.key))
    found = jax.vmap(pull)(query, dout)
    for number in range(2):
        np.testing.assert_allclose(found[number], pull(query[number], dout[number]), rtol=0.03, atol=0.02)


TOGETHER = {
    "eight": ({"heads": 8, "groups": 8, "queries": 5, "keys": 8}, {"rules": Rules(scale=0.3, right=0)}),
    "four": ({"heads": 8, "groups": 2, "queries": 13, "keys": 9}, {"bias": (1, 8, 13, 9), "mask": (3, 1, 13, 9)}),
    "two": ({"heads": 6, "groups": 6, "queries": 20, "keys": 30}, {"bias": (3, 1, 1, 30), "mask": (1, 6, 1, 30)}),
    "one key head": ({"heads": 8, "groups": 1, "queries": 6, "keys": 30}, {"rules": Rules(scale=0.3, right=2)}),
    "four of a key head": ({"heads": 8, "groups": 2, "queries": 5, "keys": 42}, {"bias": (1, 8, 5, 42)}),
    "four of two key heads": ({"heads": 12, "groups": 2, "queries": 13, "keys": 15}, {"mask": (3, 1, 1, 15)}),
    "one query": ({"heads": 8, "groups": 2, "queries": 1, "keys": 9}, {"bias": (1, 8, 1, 9), "mask": (3, 1, 1, 9)}),
    "own masks": ({"heads": 8, "groups": 2, "queries": 6, "keys": 14}, {"mask": (1, 8, 1, 14)}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(["eight", "four", "two"], ["bfloat16", "float32"]),
        ("one key head", "float32"),
        ("four of a key head", "bfloat16"),
        ("four of two key heads", "float32"),
        ("own masks", "float32"),
        ("one query", "bfloat16"),
    ],
)
def test_heads_share_a_matrix_of_scores(interpret, name, dtype):
    """Each head sees its own keys; lengths, masks, biases and sinks are those of the head."""
    sizes, more = TOGETHER[name]
    case = dataclasses.replace(SHORT, **sizes, **more)
    operands = case.operands(dtype)
    keys, heads = sizes["keys"], sizes["heads"]
    operands = operands._replace(key_lengths=jnp.asarray([keys, 0, 3]), sinks=jnp.linspace(-1.0, 2.0, heads))
    found, dout = run(operands, case.rules, interpret)
    assert_alike(found, expected_of(operands, case.rules, dout), 0.02 if dtype == "bfloat16" else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(50, 50, 64), (5, 5, 128), (16, 60, 40)])
def test_float32_operands_of_any_magnitude(interpret, sizes):
    """Powers of two, one for each head and operand, keep the digits of float16."""
    queries, keys, dim = sizes
    case = dataclasses.replace(SHORT, queries=queries, keys=keys, head_dim=dim, value_dim=dim)
    operands, scale = case.operands("float32"), jnp.asarray([1, 1e-12, 3e12], jnp.float32)[:, None, None, None]
    wide = operands._replace(query=operands.query * 1e9, key=operands.key * 1e-9, value=operands.value * scale)
    (out, lse, *gradients), dout = run(wide, case.rules, interpret, warpgroups=1)
    expected = expected_of(operands, case.rules, dout)
    factors = (scale * 1e-9, scale * 1e9, 1)
    gradients = [found / factor for found, factor in zip(gradients, factors, strict=True)]
    assert_alike([out / scale, lse, *gradients], expected, 2e-3)


@pytest.mark.slow
def test_two_consumers_convert_a_head(interpret):
    """Each converts a slab of each operand, by a factor for both slabs."""
    from ejkernel.kernels.flash_attention.mosaic_gpu.alone_launch import forward_alone

    case = dataclasses.replace(SHORT, queries=70, keys=100, head_dim=40, value_dim=40, rules=Rules(scale=0.3, left=40))
    operands = case.operands("float32")._replace(key_lengths=jnp.asarray([0, 66, 100]))
    wide = operands._replace(query=operands.query * 1e9, key=(operands.key * 1e-9).at[1, 66:].set(1e30))
    params = ForwardParams(alone=True, kv_block=64, stages=1)
    assert alone_support.alone_plan(describe(wide, case.rules), params).single
    found = forward_alone(wide._replace(value=operands.value * 1e-9), case.rules, params, interpret=interpret)
    out, lse = by_reference(operands, case.rules)
    assert_alike([found[0] / 1e-9, found[1]], [out, lse], 2e-3)


@pytest.mark.slow
def test_the_largest_float32_values(interpret):
    """Their factor is smaller than that of any smaller number, but a normal number too."""
    from ejkernel.kernels.flash_attention.mosaic_gpu.alone_launch import forward_alone

    operands, factor = SHORT.operands("float32"), jnp.asarray([1.0, 2.0**122, 2.0**125], jnp.float32)
    wide = operands._replace(value=operands.value * factor[:, None, None, None])
    params = ForwardParams(alone=True, kv_block=64, warpgroups=1, stages=1)
    out, _ = forward_alone(wide, SHORT.rules, params, interpret=interpret)
    expected, _ = by_reference(operands, SHORT.rules)
    np.testing.assert_allclose(out / factor[:, None, None, None], expected, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_numbers_that_are_not_finite_change_no_factor(interpret):
    """Hidden keys set no factor either."""
    operands, rules = SHORT.operands("float32"), SHORT.rules
    hidden = operands._replace(key_lengths=jnp.asarray([20, 24, 24]), key=operands.key.at[0, 20:].set(1e30))
    wrong = hidden._replace(query=hidden.query.at[1, 3].set(jnp.inf), value=hidden.value.at[2, 5].set(jnp.nan))
    (expected, *_), _ = run(operands._replace(key_lengths=hidden.key_lengths), rules, interpret)
    (found, *_), _ = run(wrong, rules, interpret)
    np.testing.assert_allclose(found[:1], expected[:1], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found[1, 4:], expected[1, 4:], rtol=1e-3, atol=1e-3)
    assert jnp.isnan(found[1, 3]).all()


@pytest.mark.slow
def test_the_lowest_float_is_a_number(interpret):
    """As a bias of all keys it leaves their mean, and as a sink it takes the whole weight of a row without keys."""
    lowest = float(np.finfo(np.float32).min)
    case = dataclasses.replace(SHORT, queries=9, keys=5, rules=Rules(scale=0.3, right=0))
    case = dataclasses.replace(case, bias=(1, 2, 9, 5), bias_dtype="float32")
    operands = case.operands("bfloat16")._replace(sinks=jnp.asarray([-jnp.inf, lowest]))
    operands = operands._replace(bias=operands.bias.at[:, :, 6].set(lowest))
    found, dout = run(operands, case.rules, interpret)
    expected = expected_of(operands, case.rules, dout)
    assert_alike([found[0], *found[2:]], [expected[0], *expected[2:]])
    assert (found[1][:, 0, :4] == EMPTY_ROW_LSE).all()
    np.testing.assert_allclose(found[1][:, 1, :4], lowest, rtol=1e-6)
    np.testing.assert_allclose(found[1][:, :, 6], lowest, rtol=1e-6)


@pytest.mark.slow
def test_weights_far_below_a_sink_keep_their_digits(interpret):
    """The numerators are relative to the largest key, not to the sink: float16 ends at 6e-8, and rounds 1e-6 to 6 %."""
    case = dataclasses.replace(SHORT, rules=Rules(scale=0.05))
    operands = case.operands("float16")._replace(sinks=jnp.asarray([14.0, -jnp.inf]))
    (out, *_), _ = run(operands._replace(value=operands.value * 1000), case.rules, interpret)
    expected, _ = by_reference(operands._replace(value=operands.value.astype("float32") * 1000), case.rules)
    error = jnp.linalg.norm((out - expected)[:, :, 0]) / jnp.linalg.norm(expected[:, :, 0])
    assert error < 3e-3


@pytest.mark.slow
def test_heads_share_keys(interpret):
    case = dataclasses.replace(SHORT, heads=6, rules=Rules(scale=0.3, right=0))
    operands = case.operands("bfloat16")
    found, dout = run(operands, case.rules, interpret, warpgroups=3, stages=2)
    assert_alike(found, expected_of(operands, case.rules, dout))


@pytest.mark.slow
@pytest.mark.parametrize("raised", [None, 8])
def test_float16_gradients_keep_their_digits(interpret, raised):
    """Without `raised`, the first example's scores have gradients beyond 65,504, and only it gets a factor."""
    from ejkernel.kernels.flash_attention.mosaic_gpu.alone_launch import backward_alone

    operands = SHORT.operands("float16")
    if raised is None:
        operands = operands._replace(query=operands.query * 0.05, key=operands.key * 0.02, value=operands.value * 600)
    sizes = jnp.asarray([1000, 1, 1] if raised is None else [0.1, 0.1, 0.1], "float16")
    dout = on_device(np.random.default_rng(1).standard_normal(operands.query.shape), "float16")
    dout = dout * sizes[:, None, None, None]
    params = BackwardParams(form="alone", warpgroups=2, q_stages=1)
    run = functools.partial(backward_alone, rules=SHORT.rules, params=params, raised=raised, interpret=interpret)
    found = jax.jit(run)(operands, dout)[:3]
    for one, other in zip(found, expected_of(operands, SHORT.rules, dout)[2:], strict=True):
        norms = jnp.linalg.norm((one - other).reshape(3, -1), axis=1) / jnp.linalg.norm(other.reshape(3, -1), axis=1)
        assert norms.max() < 2e-3


@pytest.mark.slow
def test_examples_of_vmap_have_their_own_sinks(interpret):
    """The sinks of one example would change the weights of others."""
    from ejkernel.kernels.flash_attention.mosaic_gpu.alone_launch import forward_alone

    operands = dataclasses.replace(SHORT, batch=1).operands("bfloat16")
    params = ForwardParams(alone=True, kv_block=64, stages=1)
    sinks = jnp.asarray([[0.5, -jnp.inf], [4.0, 1.0]])

    def attend(own):
        return forward_alone(operands._replace(sinks=own), SHORT.rules, params, interpret=interpret)[0]

    found = jax.jit(jax.vmap(attend))(sinks)
    for own, out in zip(sinks, found, strict=True):
        expected, _ = by_reference(operands._replace(sinks=own), SHORT.rules)
        np.testing.assert_allclose(out.astype("float32"), expected.astype("float32"), rtol=0.02, atol=0.02)


def test_examples_of_vmap_fit_into_shared_memory(interpret):
    """With them heads are many, so that several would be a bundle, which takes more memory than the call's heads."""
    del interpret
    from ejkernel.kernels.flash_attention.mosaic_gpu.alone_launch import forward_alone

    case = dataclasses.replace(SHORT, batch=1, queries=16, keys=16, head_dim=128, value_dim=128)
    params = next(alone_support.alone_space(call_of(case)))
    x = jax.ShapeDtypeStruct((3, *case.types("bfloat16").query.shape), "bfloat16")

    def attend(*arrays):
        return forward_alone(Operands(*arrays), case.rules, params)

    traced = jax.jit(jax.vmap(attend)).trace(x, x, x)
    assert "attention_forward_alone" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
def test_slices_of_heads_have_their_sinks(interpret, monkeypatch):
    """The gradient computes the softmax again; a float32 gradient may be computed in slices of heads."""
    from ejkernel.kernels.flash_attention.mosaic_gpu import slices

    monkeypatch.setattr(slices, "MOST_ROWS", 2 * SHORT.queries)
    case = dataclasses.replace(SHORT, heads=4, groups=1)
    operands = case.operands("float32")._replace(sinks=jnp.asarray([3.0, 0.0, 1.0, -jnp.inf]))
    out, lse = by_reference(operands, case.rules)
    dout = on_device(np.random.default_rng(1).standard_normal(out.shape), "float32")
    params = BackwardParams(form="alone", warpgroups=2, q_stages=1)
    run = functools.partial(slices.backward_in_slices, rules=case.rules, params=params, interpret=interpret)
    found = jax.jit(run)(operands, (out, lse), dout)
    for one, other in zip(found[:3], expected_of(operands, case.rules, dout)[2:], strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-3, atol=5e-3)


def call_of(case, *, backward=False, dtype="bfloat16", rules=None):
    return describe(case.types(dtype), rules or case.rules, **PLACE, backward=backward)


SMALL = {"batch": 64, "heads": 12, "groups": 12, "head_dim": 64, "value_dim": 64}
LONG = SMALL | {"queries": 100, "keys": 100}
WIDE = LONG | {"head_dim": 128, "value_dim": 128}


@pytest.mark.parametrize(
    ("sizes", "forward", "backward"),
    [
        (SMALL, True, True),
        (SMALL | {"groups": 4}, True, True),
        (LONG, True, True),
        (LONG | {"batch": 1}, False, True),
        (LONG | {"groups": 4}, False, True),
        (WIDE, False, True),
        (WIDE | {"batch": 1}, False, False),
        (WIDE | {"groups": 4}, False, False),
        (WIDE | {"queries": 64}, True, False),
        (SMALL | {"queries": 1}, True, True),
        (SMALL | {"queries": 1, "groups": 4}, False, True),
        (SMALL | {"bias": (1, 8, 16, 16)}, True, True),
        (LONG | {"bias": (1, 8, 100, 100)}, False, False),
        (LONG | {"mask": (64, 1, 100, 100)}, False, True),
        (LONG | {"mask": (64, 1, 1, 100)}, True, True),
    ],
)
def test_heads_are_computed_alone_where_that_was_faster(sizes, forward, backward):
    case = dataclasses.replace(SHORT, **sizes)
    assert MosaicGpu().heuristic(call_of(case)).alone is forward
    assert (MosaicGpu().heuristic(call_of(case, backward=True)).form == "alone") is backward
    if forward:
        assert MosaicGpu().preference(call_of(case)) == 1


def test_examples_of_vmap_count_as_heads():
    """They are folded into the batch."""
    one, many = (call_of(dataclasses.replace(SHORT, **LONG | {"batch": batch})) for batch in (1, 64))
    assert MosaicGpu().heuristic(many).alone
    assert not MosaicGpu().heuristic(one).alone
    assert MosaicGpu().heuristic(dataclasses.replace(one, examples=64)).alone


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"queries": 100, "keys": 128, "head_dim": 128}, {"keys": 9, "value_dim": 8}])
def test_the_space_has_parameters_of_both_kinds(sizes, backward):
    call = call_of(dataclasses.replace(SHORT, **sizes), backward=backward)
    space = list(MosaicGpu().space(call))
    assert MosaicGpu().heuristic(call) in space
    assert {alone_support.is_alone(params) for params in space} == {False, True}
    assert [MosaicGpu().params_fault(call, params) for params in space] == [None] * len(space)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"queries": 129}, "at most 128 queries and keys, got 129 and 24"),
        ({"value_dim": 136}, "at most 128 columns, got 32 and 136"),
        (
            {"bias": (1, 2, 24, 24), "rules": Rules(scale=0.3, soft_cap=5.0, cap_after_bias=True)},
            "does not support a bias below a soft cap",
        ),
        ({"segments": True}, "does not support segment ids"),
        ({"rules": Rules(scale=0.3, dropout_rate=0.5)}, "does not support dropout"),
    ],
)
def test_other_calls_are_refused(case, message):
    case = dataclasses.replace(SHORT, **case)
    for backward in (False, True):
        params = BackwardParams(form="alone") if backward else ForwardParams(alone=True, kv_block=64)
        assert message in MosaicGpu().params_fault(call_of(case, backward=backward), params)
        assert not list(alone_support.alone_space(call_of(case, backward=backward)))


def test_the_gradient_of_a_bias_has_one_slab():
    case = dataclasses.replace(SHORT, keys=65, bias=(1, 2, 24, 65))
    assert MosaicGpu().params_fault(call_of(case), ForwardParams(alone=True, kv_block=64)) is None
    fault = MosaicGpu().params_fault(call_of(case, backward=True), BackwardParams(form="alone"))
    assert "does not support the gradient of a bias beyond 64 tokens" in fault


@pytest.mark.parametrize(
    ("sizes", "together"),
    [((8, 8, 8), 8), ((8, 5, 9), 4), ((6, 8, 8), 2), ((8, 33, 1), 1), ((4, 32, 32), 2), ((7, 4, 4), 1)],
)
def test_as_many_heads_share_a_matrix_as_fit(sizes, together):
    heads, queries, keys = sizes
    case = dataclasses.replace(SHORT, batch=300, heads=heads, groups=heads, queries=queries, keys=keys)
    params = ForwardParams(alone=True, kv_block=64)
    assert alone_support.alone_plan(call_of(case), params).together == together
    few = call_of(dataclasses.replace(case, batch=10))
    assert alone_support.alone_plan(few, params).together == 1


@pytest.mark.parametrize(
    ("heads", "groups", "queries", "keys", "found"),
    [
        (8, 1, 8, 30, (8, 1, 32)),
        (8, 2, 8, 8, (8, 2, 16)),
        (8, 2, 5, 42, (4, 1, 64)),
        (12, 2, 16, 16, (4, 2, 16)),
        (6, 2, 16, 16, (2, 2, 16)),
        (7, 1, 8, 8, (1, 1, 32)),
    ],
)
def test_heads_of_a_bundle_share_the_rows_of_a_key_head(heads, groups, queries, keys, found):
    case = dataclasses.replace(SHORT, batch=300, heads=heads, groups=groups, queries=queries, keys=keys)
    plan = alone_support.alone_plan(call_of(case), ForwardParams(alone=True, kv_block=64))
    assert (plan.together, plan.key_heads, plan.key_tokens) == found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_examples_of_vmap_need_no_more_memory(dtype):
    """They are folded into the batch after the memory was checked, and then heads may share a matrix of scores."""
    for queries, dim, heads in itertools.product((5, 16, 32), (32, 64, 96, 128), (1, 6, 8)):
        case = dataclasses.replace(SHORT, queries=queries, keys=queries, head_dim=dim, value_dim=dim)
        case = dataclasses.replace(case, heads=heads, groups=heads, batch=1)
        for backward in (False, True):
            one = dataclasses.replace(call_of(case, backward=backward), dtype=dtype)
            many = dataclasses.replace(one, query=(999, *one.query[1:]), key=(999, *one.key[1:]))
            many = dataclasses.replace(many, value=(999, *one.value[1:]))
            for params in alone_support.alone_space(one):
                assert alone_support.alone_fault(many, params) is None


def test_partial_keys_have_other_gradients():
    """The kernels compute the softmax again, over the keys that they have."""
    rules = Rules(scale=0.3, partial=True)
    fault = MosaicGpu().params_fault(call_of(SHORT, backward=True, rules=rules), BackwardParams(form="alone"))
    assert "a backward of partial keys" in fault
    assert MosaicGpu().heuristic(call_of(SHORT, rules=rules)).alone


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (ForwardParams(alone=True), "takes warpgroups and stages, and the defaults of all other parameters"),
        (ForwardParams(alone=True, kv_block=64, warpgroups=3), "a multiple of 2 warpgroups for 100 queries, got 3"),
        (ForwardParams(alone=True, kv_block=64, stages=8), "bytes of shared memory"),
    ],
)
def test_other_parameters_are_refused(params, message):
    case = dataclasses.replace(SHORT, queries=100, keys=100, head_dim=128)
    assert message in MosaicGpu().params_fault(call_of(case), params)


STRICT = {"numpy_rank_promotion": "raise", "numpy_dtype_promotion": "strict"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "queries", "heads", "given"),
    [
        ("bfloat16", 50, 2, {"keys": 100, "mask": (4, 2, 1, 100), "rules": Rules(scale=1, right=3)}),
        ("float16", 50, 2, {"keys": 60, "bias": (4, 1, 50, 60), "mask": (4, 1, 50, 60)}),
        ("float32", 16, 4, {"keys": 9, "bias": (4, 4, 16, 9), "rules": Rules(scale=1, soft_cap=2.0, right=3)}),
        ("float32", 50, 2, {"keys": 50, "mask": (4, 1, 1, 50), "head_dim": 64, "value_dim": 64}),
    ],
)
def test_it_is_lowered_inside_shard_map_under_strict_settings(interpret, dtype, queries, heads, given):
    """For CUDA, which builds the whole kernel and checks its layouts; no GPU is needed."""
    del interpret
    from ejkernel.kernels.flash_attention.mosaic_gpu.alone_launch import backward_alone, forward_alone

    case = dataclasses.replace(SHORT, batch=4, queries=queries, heads=heads, groups=heads, **given)
    types = case.types(dtype)
    types = types._replace(
        sinks=jax.ShapeDtypeStruct((heads,), jnp.float32), key_lengths=jax.ShapeDtypeStruct((4,), "int32")
    )
    arrays = {name: x for name, x in types._asdict().items() if x is not None}
    specs = {name: P() if name == "sinks" else P("x") for name in arrays}

    def run(arrays):
        operands = Operands(**arrays)
        out, lse = forward_alone(operands, case.rules, ForwardParams(alone=True, kv_block=64, stages=1))
        gradients = backward_alone(operands, out, case.rules, BackwardParams(form="alone", q_stages=1))
        return out, lse, *(x for x in gradients if x is not None)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=P("x"), check_vma=True)
    with contextlib.ExitStack() as stack:
        for name, setting in (STRICT | {"enable_x64": dtype != "bfloat16"}).items():
            stack.enter_context(getattr(jax, name)(setting))
        text = jax.jit(sharded).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "attention_forward_alone" in text
    assert "attention_backward_alone" in text
