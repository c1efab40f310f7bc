# SPDX-License-Identifier: Apache-2.0
"""Arguments of `flash_attention` beside query, key, value and masks, each against the formula, with its gradient."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import on_device, ones

from ejkernel.kernels.flash_attention._xla_blocks import default_blocks
from ejkernel.kernels.flash_attention.common import Operands, Rules, describe, kept
from ejkernel.modules import FlashAttention, FlashAttentionConfig, flash_attention
from ejkernel.ops import ArgumentError, ArgumentWarning, BwdParams, FwdParams, Invocation, UnsupportedError

pytestmark = pytest.mark.slow

KERNEL = FlashAttention()
LENGTH, HEADS = 24, 4
CFG = FlashAttentionConfig(fwd=FwdParams(q_blocksize=8, kv_blocksize=16), bwd=BwdParams(q_blocksize=16, kv_blocksize=8))
KEY = jax.random.key(3)
BIAS = on_device(np.linspace(-3, 3, LENGTH * LENGTH), "float32").reshape(LENGTH, LENGTH)
SINKS = jnp.linspace(-1, 2, HEADS)


def make(*batch, dtype="float32"):
    rng = np.random.default_rng(0)
    return [on_device(rng.standard_normal((*batch, LENGTH, heads, 8)), dtype) for heads in (HEADS, 2, 2)]


def compute(function, *args):
    """Return the compiled function's result, compiled without optimisation, which takes most of the time."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return jax.jit(function).lower(*args).compile(compiler_options=options)(*args)


def by_formula(query, key, value, bias=None, sinks=None, *, lengths=(None, None), dropout_key=None, **options):
    arrays, options = KERNEL.prepare(
        query, key, value, bias, None, None, lengths, sinks, dropout_key, causal=True, **options
    )
    return KERNEL.reference(*arrays, **options)


def by_module(query, key, value, bias=None, sinks=None, *, lengths=(None, None), **options):
    more = {"query_lengths": lengths[0], "key_lengths": lengths[1], "bias": bias, "sinks": sinks}
    return flash_attention(query, key, value, causal=True, cfg=CFG, **more, **options)


def with_gradients(function, options, *arrays):
    def total(*arrays):
        found = jax.tree.leaves(function(*arrays, **options))
        return sum(jnp.where(jnp.isfinite(x), jnp.sin(x), 0).sum() for x in found), found

    return jax.grad(total, tuple(range(len(arrays))), has_aux=True)(*arrays)


def assert_same(expected, actual, tolerance=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance), expected, actual)


ARGUMENTS = {
    "lengths": ((), {"lengths": (on_device([20, 24], "int32"), on_device([0, 9], "int32"))}),
    "sinks": ((None, SINKS), {}),
    "a sink of minus infinity": (
        (None, SINKS.at[0].set(-jnp.inf)),
        {"lengths": (None, jnp.array([0, 9])), "return_lse": True},
    ),
    "sinks where rows have no key": ((None, SINKS), {"lengths": (None, jnp.array([0, 9])), "return_lse": True}),
    "log-sum-exp": ((), {"return_lse": True, "lengths": (None, jnp.array([0, 24]))}),
    "soft cap after the bias": ((BIAS,), {"logits_soft_cap": 2.0, "soft_cap_after_bias": True}),
    "dropout": ((), {"dropout_rate": 0.3, "dropout_key": KEY}),
    "all": (
        (BIAS, SINKS),
        {
            "lengths": (jnp.array([20, 24]), jnp.array([5, 9])),
            "return_lse": True,
            "logits_soft_cap": 2.0,
            "soft_cap_after_bias": True,
            "dropout_rate": 0.3,
            "dropout_key": KEY,
            "precision": "highest",
            "deterministic": True,
        },
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_output_and_gradients_are_the_formulas(name):
    more, options = ARGUMENTS[name]
    arrays = [*make(2), *more]
    given = [x for x in arrays if x is not None]

    def run(function, *given):
        remaining = iter(given)
        filled = [None if x is None else next(remaining) for x in arrays]
        return function(*filled, **options)

    expected, actual = (
        compute(functools.partial(with_gradients, functools.partial(run, function), {}), *given)
        for function in (by_formula, by_module)
    )
    assert_same(expected, actual)


def test_tangents_are_the_formulas():
    arrays = (*make(2), None, SINKS)
    options = {"dropout_rate": 0.3, "dropout_key": KEY, "lengths": (None, jnp.array([0, 9])), "return_lse": True}

    def tangents(function, *given):
        def run(*given):
            return function(*given[:3], None, given[3], **options)

        return [jnp.where(jnp.isfinite(x), x, 0) for x in jax.jvp(run, given, given)[1]]

    given = [x for x in arrays if x is not None]
    expected, actual = (compute(functools.partial(tangents, f), *given) for f in (by_formula, by_module))
    assert_same(expected, actual)


def test_a_minus_infinity_in_a_bias_hides_a_key_also_before_the_cap():
    bias = jnp.where(jnp.arange(LENGTH) < 5, 0, -jnp.inf)
    options = {"logits_soft_cap": 2.0, "soft_cap_after_bias": True}
    query, key, value = make(2)
    expected = flash_attention(query, key[:, :5], value[:, :5], logits_soft_cap=2.0, cfg=CFG)
    assert_same(expected, flash_attention(query, key, value, bias=bias, cfg=CFG, **options))


def test_the_log_sum_exp_of_two_halves_is_that_of_the_whole():
    query, key, value = make(2)
    whole, lse = flash_attention(query, key, value, return_lse=True)
    halves = [flash_attention(query, key[:, s], value[:, s], return_lse=True) for s in (slice(9), slice(9, None))]
    assert_same(lse, jnp.logaddexp(halves[0][1], halves[1][1]))
    shares = [jnp.exp(part - lse).transpose(0, 2, 1)[..., None] for _, part in halves]
    assert_same(whole, sum(share * out for share, (out, _) in zip(shares, halves, strict=True)))


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=["none", "two"])
def test_there_may_be_any_number_of_batch_axes(batch):
    query, key, value = make(*batch)
    count = int(np.prod(batch))
    mask = jnp.ones((*batch, LENGTH), bool).at[..., 17:].set(False)
    options = {
        "bias": BIAS,
        "attention_mask": mask,
        "segment_ids": jnp.zeros((*batch, LENGTH), int).at[..., 9:].set(1),
        "key_lengths": jnp.full(batch, 15),
        "return_lse": True,
    }
    flat = {"attention_mask", "segment_ids", "key_lengths"}
    one = {n: x.reshape(count, *x.shape[len(batch) :]) if n in flat else x for n, x in options.items()}
    out, lse = flash_attention(query, key, value, **options)
    expected = flash_attention(*(x.reshape(count, *x.shape[len(batch) :]) for x in (query, key, value)), **one)
    assert (out.shape, lse.shape) == ((*batch, LENGTH, HEADS, 8), (*batch, HEADS, LENGTH))
    assert_same(expected, (out.reshape(expected[0].shape), lse.reshape(expected[1].shape)))


def test_a_bias_may_have_some_of_the_batch_axes():
    query, key, value = make(2, 3)
    bias = jnp.arange(3.0)[:, None, None, None] * BIAS
    found = flash_attention(query, key, value, bias=bias)
    assert_same(flash_attention(query[:, 1], key[:, 1], value[:, 1], bias=BIAS), found[:, 1])


# --- dropout ---


def test_a_rate_of_weights_is_dropped_and_neighbours_do_not_know_of_each_other():
    rules = Rules(scale=1.0, dropout_rate=0.25)
    words = jax.random.key_data(KEY)
    keep = np.asarray(kept(words, jnp.arange(8).reshape(2, 4), jnp.arange(128), jnp.arange(128), rules), float)
    assert abs(keep.mean() - 0.75) < 0.005
    for axis in range(4):
        first, second = (
            np.take(keep, range(*ends), axis) for ends in ((0, keep.shape[axis] - 1), (1, keep.shape[axis]))
        )
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02


def test_a_slice_of_the_mask_equals_that_slice():
    rules = Rules(scale=1.0, dropout_rate=0.5)
    words, rows = jax.random.key_data(KEY), jnp.arange(6)
    whole = kept(words, rows, jnp.arange(40), jnp.arange(50), rules)
    part = kept(words, rows[2:4], jnp.arange(7, 40), jnp.arange(11, 30), rules)
    np.testing.assert_array_equal(whole[2:4, 7:40, 11:30], part)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_another_key_drops_others(impl):
    query, key, value = make(2)
    first = jax.random.key(4, impl=impl)
    keys = [first, jax.random.key(5, impl=impl), jax.random.fold_in(first, 7), *jax.random.split(first)]
    outs = [flash_attention(query, key, value, dropout_rate=0.5, dropout_key=k) for k in (*keys, first)]
    assert not any(np.allclose(a, b) for a, b in itertools.combinations(outs[:-1], 2))
    np.testing.assert_array_equal(outs[0], outs[-1])
    old = flash_attention(query, key, value, dropout_rate=0.5, dropout_key=jax.random.key_data(first))
    np.testing.assert_array_equal(outs[0], old)


def test_no_rate_drops_none():
    query, key, value = make(2)
    none = flash_attention(query, key, value, dropout_rate=0, dropout_key=KEY)
    np.testing.assert_array_equal(flash_attention(query, key, value), none)


# --- checkpoint ---


def forwards(policy):
    def loss(x):
        return jnp.sin(flash_attention(jnp.sin(x), x, x, causal=True)).sum()

    struct = jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32)
    text = jax.jit(jax.value_and_grad(jax.checkpoint(loss, policy=policy))).lower(struct).as_text()
    return text.count("#flash_attention@v0")


def test_a_policy_that_saves_the_residuals_by_name_computes_one_forward():
    save = jax.checkpoint_policies.save_only_these_names
    assert forwards(None) == 2
    assert forwards(save("flash_attention.out")) == 2
    assert forwards(save("flash_attention.out", "flash_attention.residuals")) == 1


# --- choice of the implementation ---


def invocation(device="gpu:nvidia_h200", **options):
    struct = jax.ShapeDtypeStruct((4, 512, 16, 128), jnp.bfloat16)
    args, options = KERNEL.prepare(struct, struct, struct, **options)
    return Invocation(kernel=KERNEL, args=args, kwargs=options, device=device)


def test_arguments_without_effect_are_not_in_the_key():
    plain = invocation()
    same = {"return_lse": False, "deterministic": np.bool_(False), "precision": None, "dropout_rate": 0.0}
    assert plain.call_key == invocation(**same, soft_cap_after_bias=True).call_key
    keys = [invocation(**o).call_key for o in ({"return_lse": True}, {"precision": "high"}, {"deterministic": True})]
    assert len({plain.call_key, *keys}) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rules": Rules(scale=1.0, dropout_rate=0.1)}, "dropout_rate: not available with implementation='cudnn'; use"),
        (
            {"return_lse": True, "backward": True},
            "return_lse: not available with the gradient of implementation='cudnn'",
        ),
        ({"deterministic": True, "backward": True}, "deterministic .* XLA_FLAGS=--xla_gpu_deterministic_ops=true"),
    ],
)
def test_cudnn_refuses_unsupported_calls(changes, words):
    call = dataclasses.replace(KERNEL.call_of(invocation(causal=True)), **changes)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(KERNEL.implementations.unsupported("cudnn", call))


def test_cudnn_runs_supported_calls():
    assert KERNEL.able(invocation(causal=True, return_lse=True, precision="highest", deterministic=True))[0] == "cudnn"


def test_xlas_own_flag_makes_calls_deterministic(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_foo=3 --xla_gpu_deterministic_ops=true")
    inv = invocation(causal=True)
    assert inv.kwargs["deterministic"]
    assert KERNEL.implementations.unsupported("cudnn", dataclasses.replace(KERNEL.call_of(inv), backward=True)) is None


def test_examples_of_lengths_are_never_empty():
    struct, lens = jax.ShapeDtypeStruct((9, 16, 2, 8), jnp.float32), jax.ShapeDtypeStruct((9,), jnp.int32)
    args, options = KERNEL.prepare(struct, struct, struct, None, None, None, (None, lens))
    made, _ = KERNEL.example_inputs(Invocation(kernel=KERNEL, args=args, kwargs=options), np.random.default_rng(0))
    assert made[6][0] is None
    assert ((made[6][1] >= 1) & (made[6][1] <= 16)).all()


def test_xla_attends_in_one_block_on_a_gpu_if_all_scores_are_small():
    def blocks(batch, **rules):
        operands = Operands(*(jax.ShapeDtypeStruct((batch, 2048, 16, 128), jnp.bfloat16) for _ in range(3)))
        return default_blocks(describe(operands, Rules(scale=1.0, **rules), platform="gpu"))

    assert blocks(1, right=0) == (2048, 2048)
    assert max(blocks(1, left=512, right=0)) <= 1024


@pytest.mark.parametrize(
    ("left", "right", "forward"),
    [(None, 0, (512, 1024)), (48, 0, (64, 64)), (48, 48, (128, 64)), (128, 0, (128, 64)), (2000, 0, (512, 1024))],
)
def test_blocks_follow_the_window(left, right, forward):
    operands = Operands(*(jnp.zeros((1, 2048, 1, 8)) for _ in range(3)))
    assert default_blocks(describe(operands, Rules(scale=1.0, left=left, right=right), platform="cpu")) == forward


QUERY, KEYS, VALUE = make(2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query_lengths": jnp.ones(2)}, r"query_lengths must be an integer array \[batch\] = \(2,\); got float32"),
        ({"key_lengths": ones((2, 1), "int32")}, "key_lengths must be an integer array"),
        ({"sinks": ones(3)}, r"sinks must be a floating-point array \[heads\] = \(4,\); got float32\[3\]"),
        ({"dropout_rate": 1.0, "dropout_key": KEY}, "dropout_rate must be a number from 0 to 1, 1 excluded, got 1.0"),
        ({"dropout_rate": 0.5}, "dropout_key must be given with dropout_rate, got None"),
        ({"dropout_rate": 0.5, "dropout_key": 3}, "dropout_key must be a key of jax.random, got int"),
        ({"dropout_rate": 0.5, "dropout_key": jax.random.split(KEY)}, "dropout_key must be one key"),
        ({"precision": "best"}, "precision must be one of default, high, highest, .* got 'best'"),
        ({"return_lse": 1}, "return_lse must be True or False, got 1"),
        ({"deterministic": None}, "deterministic must be True or False, got None"),
        ({"soft_cap_after_bias": "yes"}, "soft_cap_after_bias must be True or False"),
        ({"query": QUERY[None]}, r"key must have query's batch axes, \(1, 2\), and three more; got \(2, 24, 2, 8\)"),
        (
            {"query": QUERY[0], "key": KEYS[0], "value": VALUE[0], "bias": ones((2, 4, 24, 24))},
            "bias must be broadcastable to",
        ),
    ],
)
def test_a_wrong_argument_is_named(changes, words):
    with pytest.raises(ArgumentError, match=words):
        flash_attention(**{"query": QUERY, "key": KEYS, "value": VALUE} | changes)


def test_a_named_implementation_without_an_argument_gives_the_reason():
    call = functools.partial(flash_attention, implementation="cudnn", dropout_rate=0.5, dropout_key=KEY)
    with pytest.raises(UnsupportedError, match="dropout_rate: not available with implementation='cudnn'; use 'xla'"):
        jax.eval_shape(call, *make(2, dtype="bfloat16"))


def test_refusals_suggest_implementations_that_run_the_call_on_its_device():
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(UnsupportedError, match=r"needs a Hopper GPU.*; use 'xla'\."):
        flash_attention(q, q, q, implementation="mosaic_gpu")
    with pytest.raises(UnsupportedError, match=r"needs segment_ids, and the call has none\.(\n|$)"):
        flash_attention(q, q, q, implementation="cudnn_packed")


def test_more_queries_than_keys_warn_if_the_call_is_causal():
    long, short = jnp.ones((1, 6, 2, 8)), jnp.ones((1, 4, 2, 8))
    text = "causal=True with 6 queries and 4 keys. .* so the first 2 queries see no key, and their outputs are 0"
    with pytest.warns(ArgumentWarning, match=text):
        out = flash_attention(long, short, short, causal=True)
    assert not out[:, :2].any()
    assert out[:, 2:].all()
    with pytest.warns(ArgumentWarning, match="so the first query sees no key, and its output is 0"):
        jax.eval_shape(lambda q, k: flash_attention(q[0], k[0], k[0], causal=True), long[:, 1:], short)
    for causal, query, key in ((False, long, short), (True, short, long), (True, long, long)):
        flash_attention(query, key, key, causal=causal)


def test_grouped_heads_before_a_short_length_are_named_in_the_warning():
    query, key = jnp.ones((2, 8, 64, 16)), jnp.ones((2, 2, 64, 16))
    with pytest.warns(ArgumentWarning, match=r"If these are heads: .* use jnp.swapaxes\(x, -3, -2\)"):
        jax.eval_shape(functools.partial(flash_attention, causal=True), query, key, key)
    with pytest.warns(ArgumentWarning) as warned:
        jax.eval_shape(functools.partial(flash_attention, causal=True), query, key[:, :, ::2], key[:, :, ::2])
    assert "heads" not in str(warned[0].message)


def test_heads_before_the_length_warn():
    query, key = jax.ShapeDtypeStruct((2, 8, 1024, 64), jnp.float32), jax.ShapeDtypeStruct((2, 8, 256, 64), jnp.float32)
    with pytest.warns(
        ArgumentWarning, match=r"has 1024 heads, and key has 8 tokens. .* need jnp.swapaxes\(x, -3, -2\)"
    ):
        jax.eval_shape(flash_attention, query, key, key)
    for shape in ((2, 1, 128, 64), (2, 1024, 256, 64)):
        jax.eval_shape(flash_attention, *[jax.ShapeDtypeStruct(shape, jnp.float32)] * 3)
