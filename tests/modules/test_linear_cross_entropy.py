# SPDX-License-Identifier: Apache-2.0
"""`linear_cross_entropy` and `token_log_probs`: equal to plain JAX, with no product too many."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.arrays import on_device, ones

from ejkernel.kernels.linear_cross_entropy.xla import XlaParams
from ejkernel.modules import (
    LinearCrossEntropy,
    LinearCrossEntropyConfig,
    LinearCrossEntropyGradients,
    LinearCrossEntropyGradientsConfig,
    RmsNormConfig,
    linear_cross_entropy,
    token_log_probs,
)
from ejkernel.ops import ArgumentError, ConfigError, Invocation
from ejkernel.ops.errors import CallError, KernelWarning

pytestmark = pytest.mark.slow

STATISTICS, GRADIENTS = LinearCrossEntropy(), LinearCrossEntropyGradients()
ROWS = LinearCrossEntropyGradientsConfig(fwd=XlaParams(chunk=4))
COLUMNS = LinearCrossEntropyGradientsConfig(fwd=XlaParams(form="vocabulary", chunk=10))
EVERYTHING = {"label_smoothing": 0.1, "z_loss": 0.01, "logits_soft_cap": 3.0, "logits_scale": 0.7}


def make(batch=(2, 5), inner=8, columns=37, dtype="float32", scale=1.0):
    """Return hidden states, weight, labels with an ignored one, and weights of tokens."""
    rng = np.random.default_rng(0)
    x = on_device(rng.standard_normal((*batch, inner)) * scale, dtype)
    weight = on_device(rng.standard_normal((inner, columns)), dtype)
    labels = rng.integers(0, columns, batch)
    labels.flat[1:2] = -100
    return x, weight, jnp.asarray(labels), on_device(rng.random(batch), jnp.float32)


@functools.partial(jax.jit, static_argnames=("reduction", *EVERYTHING))
def plain(x, weight, labels, factors, reduction="mean", bias=None, **options):
    """Return the loss by the formula in float32."""
    given = {"label_smoothing": 0.0, "z_loss": 0.0, "logits_soft_cap": None, "logits_scale": 1.0} | options
    s = jnp.matmul(x.astype(jnp.float32), weight.astype(jnp.float32), precision="highest")
    s = (s if bias is None else s + bias) * given["logits_scale"]
    cap, smooth = given["logits_soft_cap"], given["label_smoothing"]
    s = s if cap is None else cap * jnp.tanh(s / cap)
    lse = jax.nn.logsumexp(s, axis=-1)
    at = jnp.take_along_axis(s, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    losses = lse - (1 - smooth) * at - smooth * s.mean(-1) + given["z_loss"] * lse**2
    factors = jnp.where(labels == -100, 0, factors)
    losses = losses * factors
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / factors.sum()}[reduction]


def close(expected, actual, rtol=1e-5):
    def compare(expected, actual):
        expected, actual = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * max(1, np.abs(expected).max(initial=0)))

    jax.tree.map(compare, expected, actual)


def error(expected, actual):
    """Return the norm of the difference over the norm."""
    expected, actual = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


# --- numbers ---


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_all_gradients_are_those_of_plain_jax(reduction):
    x, weight, labels, factors = make()
    factors = factors.at[1, 2].set(0)  # the derivative with respect to it is still the token's loss
    bias = jnp.linspace(-1, 1, 37)

    def ours(x, weight, factors, bias):
        options = EVERYTHING | {"reduction": reduction, "transpose_weight": True}
        return linear_cross_entropy(x, weight.T, labels, token_weights=factors, bias=bias, **options)

    def theirs(x, weight, factors, bias):
        return plain(x, weight, labels, factors, reduction, bias, **EVERYTHING)

    expected, expected_pull = jax.vjp(theirs, x, weight, factors, bias)
    actual, pull = jax.vjp(jax.jit(ours), x, weight, factors, bias)
    close(expected, actual)
    # With "none", a different cotangent for each token: gradients made in the forward would be wrong.
    close(expected_pull(jnp.cos(expected)), pull(jnp.cos(expected)))


@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs_and_entropy_have_gradients_for_any_cotangent(entropy):
    x, weight, labels, factors = make()

    def theirs(x, weight):
        logits = 30 * jnp.tanh(x @ weight / 30) / 0.7
        logs = jax.nn.log_softmax(logits, axis=-1)
        out = jnp.take_along_axis(logs, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        out = jnp.where(labels == -100, 0, out)
        return (out, -(jnp.exp(logs) * logs).sum(-1)) if entropy else out

    def ours(x, weight):
        return token_log_probs(x, weight, labels, temperature=0.7, logits_soft_cap=30, return_entropy=entropy)

    expected, expected_pull = jax.vjp(jax.jit(theirs), x, weight)
    actual, pull = jax.vjp(jax.jit(ours), x, weight)
    close(expected, actual, 1e-4)
    cotangents = jax.tree.map(lambda y: jnp.cos(y) * factors, expected)
    close(expected_pull(cotangents), pull(cotangents), 1e-4)


def test_returned_log_sum_exp_has_a_gradient_and_accuracy_counts_hits():
    x, weight, labels, factors = make()
    labels = jnp.where(labels == -100, labels, (x @ weight).argmax(-1)).at[0, 0].set(0)

    def ours(x):
        kwargs = {"token_weights": factors, "return_lse": True, "return_accuracy": True}
        loss, lse, accuracy = linear_cross_entropy(x, weight, labels, **kwargs)
        return loss + (lse**2).mean(), accuracy

    def theirs(x):
        return plain(x, weight, labels, factors) + (jax.nn.logsumexp(x @ weight, axis=-1) ** 2).mean()

    (value, accuracy), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(x)
    close(jax.value_and_grad(theirs)(x), (value, gradient))
    counted = jnp.where(labels == -100, 0, factors)
    close(1 - counted[0, 0] / counted.sum(), accuracy)
    hits = linear_cross_entropy(x, weight, labels, reduction="none", return_accuracy=True)[1]
    assert [0, 0, *[1] * 8] == hits.reshape(-1).tolist()


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_label_without_a_column_is_no_hit_whatever_the_sign_of_the_logits(sign):
    x, weight, labels = jnp.ones((3, 2)), sign * jnp.ones((2, 4)), jnp.array([0, 4, -1])
    for reduction, expected in (("none", [1, 0, 0]), ("mean", 1 / 3)):
        found = linear_cross_entropy(x, weight, labels, reduction=reduction, return_accuracy=True)[1]
        np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("cfg", [ROWS, COLUMNS], ids=["rows", "vocabulary"])
def test_bfloat16_is_as_exact_as_its_operands(cfg):
    x, weight, labels, _ = make((96,), 64, 512, "bfloat16", scale=0.3)
    cfg = LinearCrossEntropyGradientsConfig(fwd=cfg.fwd and XlaParams(form=cfg.fwd.form, chunk=48))
    ones = jnp.ones(labels.shape)
    wide = [array.astype(jnp.float32) for array in (x, weight)]
    expected = jax.value_and_grad(lambda x, w: plain(x, w, labels, ones), (0, 1))(*wide)
    ours = jax.jit(jax.value_and_grad(lambda x, w: linear_cross_entropy(x, w, labels, cfg=cfg), (0, 1)))(x, weight)
    assert error(expected[0], ours[0]) < 1e-5
    assert all(error(wanted, found) < 4e-3 for wanted, found in zip(expected[1], ours[1], strict=True))
    assert {jnp.dtype("bfloat16")} == {found.dtype for found in ours[1]}


def test_gradients_in_float16_do_not_underflow():
    x, weight, labels, _ = make((64,), 16, 4096, "float16", scale=0.05)
    factors = jnp.full(labels.shape, 1e-5)  # a mean over many tokens, times probabilities of 1 / 4096
    wide = [array.astype(jnp.float32) for array in (x, weight)]
    expected = jax.grad(lambda x, w: plain(x, w, labels, factors, "sum") * 1e5, (0, 1))(*wide)

    def ours(x, weight):
        return linear_cross_entropy(x, weight, labels, token_weights=factors * 1e3, reduction="sum")

    for wanted, found in zip(expected, jax.jit(jax.grad(ours, (0, 1)))(x, weight), strict=True):
        assert error(wanted, np.asarray(found, np.float32) * 1e2) < 4e-3


@settings(max_examples=3, derandomize=True, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 12), chunk=st.integers(1, 13), by_rows=st.booleans())
def test_any_shape_and_chunk_matches_plain_jax(rows, columns, chunk, by_rows):
    x, weight, labels, _ = make((rows,), 3, columns)
    labels = jnp.maximum(labels, 0)
    params = XlaParams(form="rows" if by_rows else "vocabulary", chunk=chunk)
    cfg = LinearCrossEntropyGradientsConfig(fwd=params)
    each = (
        lambda x, w: plain(x, w, labels, jnp.ones(rows)),
        lambda x, w: linear_cross_entropy(x, w, labels, cfg=cfg),
    )
    close(*(jax.jit(jax.value_and_grad(loss, (0, 1)))(x, weight) for loss in each))


def test_large_logits_padded_columns_and_one_token_stay_finite():
    x, weight, _, _ = make((1,), 4, 256_000)
    x, bias = x * 1e4 / jnp.abs(x @ weight).max(), jnp.zeros(256_000).at[-500:].set(-jnp.inf)
    labels = jnp.asarray([7])

    def ours(x, weight, bias):
        options = {"label_smoothing": 0.1, "logits_soft_cap": 2e4}
        return linear_cross_entropy(x, weight, labels, bias=bias, **options)

    seen = weight[:, :-500]
    smooth = {"label_smoothing": 0.1, "logits_soft_cap": 2e4}
    expected = jax.value_and_grad(lambda x, w: plain(x, w, labels, jnp.ones(1), **smooth), (0, 1))(x, seen)
    value, (dx, dweight, dbias) = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(x, weight, bias)
    close(expected, (value, (dx, dweight[:, :-500])), 1e-4)
    assert not dweight[:, -500:].any()
    assert not dbias[-500:].any()


def test_no_counted_token_gives_zero_and_no_token_gives_empty_results():
    x, weight, labels, factors = make()
    both = jax.value_and_grad(linear_cross_entropy, (0, 1))
    for value in (jax.jit(both)(x, weight, jnp.full_like(labels, -100)), both(x[:0], weight, labels[:0])):
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(value))
    zero = jax.jit(linear_cross_entropy)(x, weight, labels, token_weights=factors * 0)
    assert zero == 0
    assert linear_cross_entropy(x[:0], weight, labels[:0], reduction="none").shape == (0, 5)
    gradient = jax.grad(lambda x: linear_cross_entropy(x, weight, labels[:0], reduction="none").sum())(x[:0])
    assert gradient.shape == (0, 5, 8)


@pytest.mark.parametrize("label", [37, -1])
def test_label_that_is_no_column_makes_loss_and_gradient_nan(label):
    x, weight, labels, _ = make()
    labels = labels.at[0, 0].set(label)
    value, gradient = jax.value_and_grad(linear_cross_entropy, 1)(x, weight, labels)
    assert np.isnan(value)
    assert np.isnan(gradient).all()
    assert [True, *[False] * 9] == np.isnan(token_log_probs(x, weight, labels)).reshape(-1).tolist()
    labels = jnp.where(labels == -100, 0, labels)
    assert np.isfinite(linear_cross_entropy(x, weight, labels, ignore_index=label))


@pytest.mark.parametrize("wide", [False, True])
def test_labels_of_more_than_32_bits_are_not_taken_for_others(wide):
    x, weight, labels, _ = make()
    beyond = np.asarray(labels, np.int64)
    beyond[0, :2] = 2**32 + 1, 2**32 - 100  # their lower halves are a column and the ignored index
    with jax.enable_x64(wide):
        found = token_log_probs(x, weight, jnp.asarray(beyond) if wide else beyond)
    assert [True, True, *[False] * 8] == np.isnan(found).reshape(-1).tolist()
    assert np.isfinite(linear_cross_entropy(x, weight, jnp.maximum(labels, 0), ignore_index=-(2**40)))


def test_forward_mode_and_second_derivatives():
    x, weight, labels, factors = make()
    both = (linear_cross_entropy, lambda x, w, labels: plain(x, w, labels, jnp.ones_like(factors)))
    tangents = [
        jax.jvp(lambda x, w, f=f: f(x, w, labels), (x, weight), (weight[:, :10].T.reshape(x.shape), weight))
        for f in both
    ]
    close(tangents[1], tangents[0])
    second = [jax.jit(jax.hessian(lambda x, f=f: f(x, weight, labels)))(x) for f in both]
    close(second[1], second[0])


def test_forward_over_reverse_includes_tokens_of_weight_zero():
    x, weight, labels, factors = make()
    factors = factors.at[1, 2].set(0)

    def mixed(loss):
        def both(x, factors):
            return jax.jvp(jax.grad(loss), (x,), (jnp.ones_like(x),))[1], jax.jacfwd(jax.jacfwd(loss, 1), 0)(x, factors)

        return jax.jit(both)(x, factors)

    def ours(x, factors=factors):
        return linear_cross_entropy(x, weight, labels, token_weights=factors, reduction="sum")

    def theirs(x, factors=factors):
        return plain(x, weight, labels, factors, "sum")

    close(mixed(theirs), mixed(ours), 1e-4)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_float64_with_a_bias_is_exact(reduction):
    with jax.enable_x64(True):
        x, weight, labels, factors = (array.astype(jnp.float64) for array in make())
        labels, bias = labels.astype(jnp.int32), jnp.linspace(-1.0, 1.0, 37)
        options = {"reduction": reduction, "label_smoothing": 0.1}
        actual = linear_cross_entropy(x, weight, labels, token_weights=factors, bias=bias, **options)

        @jax.jit
        def formula(x, weight, labels, factors, bias):
            s = x @ weight + bias
            losses = jax.nn.logsumexp(s, axis=-1) - 0.9 * jnp.take_along_axis(s, labels[..., None], -1)[..., 0]
            losses = jnp.where(labels == -100, 0, factors * (losses - 0.1 * s.mean(-1)))
            return losses if reduction == "none" else losses.sum() / jnp.where(labels == -100, 0, factors).sum()

        close(formula(x, weight, labels, factors, bias), actual, 1e-13)


def test_narrow_labels_and_boolean_weights_are_taken():
    x, weight, labels, _ = make(columns=200)
    labels = jnp.maximum(labels, 0)
    weights = labels > 50
    expected = plain(x, weight, labels, weights.astype(jnp.float32))
    close(expected, linear_cross_entropy(x, weight, labels.astype(jnp.uint8), token_weights=weights))
    close(expected, linear_cross_entropy(np.asarray(x), np.asarray(weight), np.asarray(labels), token_weights=weights))


# --- products ---

TOKENS, INNER, VOCABULARY = 64, 32, 256


def products(function, *args, wrt=(0, 1)):
    """Return the floating-point work of the gradients of a program, in products of the sizes above."""
    program = jax.jit(jax.value_and_grad(function, wrt) if wrt else function).lower(*args).compile()
    text = program.as_text()
    loops = [line for line in text.splitlines() if " while(" in line]
    work = program.cost_analysis()["flops"] / (2 * TOKENS * INNER * VOCABULARY)
    return work, len(loops)


def loss(x, weight, **options):
    cfg = LinearCrossEntropyGradientsConfig(fwd=XlaParams())
    return linear_cross_entropy(x, weight, jnp.zeros(x.shape[:-1], jnp.int32), cfg=cfg, **options)


def per_token(x, weight):
    cfg = LinearCrossEntropyConfig(fwd=XlaParams(), bwd=XlaParams())
    return linear_cross_entropy(x, weight, jnp.zeros(x.shape[:-1], jnp.int32), cfg=cfg, reduction="none")


def weighted(x, weight):
    return loss(x, weight, token_weights=jnp.cos(x[:, 0]), label_smoothing=0.1, z_loss=1e-3)


def micro_batches(x, weight):
    """Return the sum of losses of four micro-batches, and gradients made inside the loop."""

    def step(carry, x):
        value, gradients = jax.value_and_grad(loss, (0, 1))(x, weight)
        return carry + gradients[1], (value, gradients[0])

    return jax.lax.scan(step, jnp.zeros_like(weight), x.reshape(4, -1, INNER))


SAVED = jax.checkpoint_policies.save_only_these_names("linear_cross_entropy.residuals")
PROGRAMS = {
    "forward": (loss, (), 1),
    "both gradients": (loss, (0, 1), 3),
    "gradient of x": (loss, (0,), 2),
    "gradient of weight": (loss, (1,), 2),
    "token weights with a gradient": (weighted, (0, 1), 3),
    "with lse and accuracy": (lambda x, w: loss(x, w, return_lse=True, return_accuracy=True)[0], (0, 1), 3),
    "scaled and jitted": (jax.jit(lambda x, w: 2 * loss(jnp.tanh(x), w)), (0, 1), 3),
    # Four; the XLA of some versions merges the logits of both passes.
    "checkpoint": (jax.checkpoint(loss), (0, 1), (3, 4)),
    "checkpoint that saves": (jax.checkpoint(loss, policy=SAVED), (0, 1), 3),
    "vmap": (lambda x, w: jax.vmap(loss, (0, None))(x.reshape(2, -1, INNER), w).sum(), (0, 1), 3),
    # Four and three; with a single chunk XLA merges the logits of forward and backward.
    "per token": (lambda x, w: per_token(x, w).sum(), (0, 1), 3),
    "per token, gradient of x": (lambda x, w: per_token(x, w).sum(), (0,), 2),
    "per token, checkpoint": (jax.checkpoint(lambda x, w: per_token(x, w).sum()), (0, 1), (3, 4)),
    "per token, forward": (per_token, (), 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_product_is_computed_twice_or_in_vain(name):
    function, wrt, expected = PROGRAMS[name]
    work, loops = products(function, jnp.ones((TOKENS, INNER)), jnp.ones((INNER, VOCABULARY)), wrt=wrt)
    allowed = expected if isinstance(expected, tuple) else (expected,)
    assert any(work == pytest.approx(count, abs=0.3) for count in allowed), work
    assert loops == 0


CHUNKED = {
    "mean": (lambda x, w: linear_cross_entropy(x, w, ZEROS, cfg=ROWS), [1, 2, 2, 3]),
    "none": (lambda x, w: linear_cross_entropy(x, w, ZEROS, reduction="none", cfg=EACH).sum(), [1, 3, 3, 4]),
}
ZEROS = np.zeros(TOKENS, np.int32)
EACH = LinearCrossEntropyConfig(fwd=XlaParams(chunk=16), bwd=XlaParams(chunk=16))


@pytest.mark.parametrize("reduction", CHUNKED)
def test_loops_over_chunks_have_no_product_too_many(reduction):
    function, expected = CHUNKED[reduction]
    x, weight, found = jnp.ones((TOKENS, INNER)), jnp.ones((INNER, VOCABULARY)), []
    for wrt in ((), (0,), (1,), (0, 1)):
        program = jax.jit(jax.value_and_grad(function, wrt) if wrt else function).lower(x, weight).compile()
        found.append(len(re.findall(r"\bdot\(", program.as_text())))
    assert expected == found


def test_scan_over_micro_batches_runs_three_products_per_step():
    x, weight = jnp.ones((TOKENS, INNER)), jnp.ones((INNER, VOCABULARY))
    program = jax.jit(micro_batches).lower(x, weight).compile()
    # XLA counts a loop's body once.
    assert pytest.approx(program.cost_analysis()["flops"] / (2 * TOKENS * INNER * VOCABULARY), abs=0.15) == 3 / 4


# --- configurations ---


def invocation(kernel, tokens, **options):
    shapes = [((tokens, 512), "bfloat16"), ((512, 32768), "bfloat16"), ((tokens,), "int32"), ((tokens,), "float32")]
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes[: 3 + (kernel is GRADIENTS)]]
    args, options = kernel.prepare(*args, **options)
    return Invocation(kernel=kernel, args=args, kwargs=options, device="gpu:nvidia_h200")


@pytest.mark.parametrize("kernel", [STATISTICS, GRADIENTS], ids=lambda kernel: kernel.op_id)
def test_memory_limit_bounds_heuristic_and_space(kernel):
    limit = 40 << 20
    inv = invocation(kernel, 8192, memory_limit=limit)
    call = kernel.call_of(inv)
    configs = [kernel.heuristic_cfg(inv), *kernel.config_space(inv)]
    assert configs
    assert all(kernel.implementations[c.implementation].temporaries(call, c.fwd) <= limit for c in configs)
    assert len(configs) < len(list(kernel.config_space(invocation(kernel, 8192))))


def test_call_without_all_of_the_vocabulary_has_the_key_of_its_shard():
    alone, shard = invocation(GRADIENTS, 64), invocation(GRADIENTS, 64, vocab_axis="model")
    assert alone.call_key == shard.call_key
    args, options = alone.args, alone.kwargs
    reshaped = [jnp.zeros((x.shape[0] // 4, 4, *x.shape[1:]), x.dtype) if i != 1 else x for i, x in enumerate(args)]
    flat = [jnp.zeros((1, *x.shape), x.dtype) if i != 1 else x for i, x in enumerate(args)]
    keys = [Invocation(kernel=GRADIENTS, args=tuple(a), kwargs=options).call_key for a in (reshaped, flat)]
    assert keys[0] == keys[1]


# --- messages ---


class Parameter:
    """A parameter of a model, as those of Flax NNX."""

    def __jax_array__(self):
        return jnp.ones((8, 7))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": [1.0]}, r"x must be a floating-point array \[\*batch, d\], got list"),
        (
            {"weight": ones((2, 5), "int32"), "labels": ones((8, 7))},
            r"weight and labels are in each other's place; the order is \(x, weight, labels\)",
        ),
        ({"weight": Parameter()}, r"weight must be .*, got Parameter; pass its array, e.g. head.kernel\[...\]"),
        ({"x": ones((2, 5, 8), "int32")}, "x must be a floating-point array .* got dtype int32; cast it"),
        ({"weight": ones((8, 37), "bfloat16")}, "x and weight must have one dtype, got float32 and bfloat16"),
        ({"weight": ones((37, 8))}, r"d = 8, .* got shape \(37, 8\); pass transpose_weight=True"),
        ({"weight": ones(8)}, r"weight must be \[d, V\], got shape \(8,\); reshape it"),
        ({"weight": ones((8, 0))}, "weight must have a column of logits at least"),
        ({"labels": ones((2, 5))}, "labels must be an array of integers .* got dtype float32; cast them"),
        ({"labels": ones((2, 5, 37))}, "got dtype float32; pass labels.argmax"),
        ({"labels": ones((2, 4), "int32")}, r"labels must have the shape of x .* \(2, 5\), got \(2, 4\)"),
        ({"bias": ones(36)}, r"bias must be \[V\] = \(37,\), got shape \(36,\)"),
        ({"token_weights": ones(5)}, r"token_weights must have the shape .* got \(5,\); broadcast them"),
        ({"token_weights": "all"}, "token_weights must be an array of numbers or booleans .* got str"),
        ({"reduction": "average"}, "reduction must be one of mean, sum, none; got 'average'"),
        ({"reduction": "means"}, "got 'means'; did you mean 'mean'"),
        ({"ignore_index": 1.5}, "ignore_index must be an integer or None, got 1.5"),
        ({"label_smoothing": 2}, "label_smoothing must be a number from 0 to 1, got 2"),
        ({"z_loss": -1.0}, "z_loss must be a number from 0 to .*, got -1.0"),
        ({"logits_soft_cap": 0}, "logits_soft_cap must be a positive number or None, got 0"),
        ({"accumulation_dtype": "int8"}, "accumulation_dtype must be a floating-point dtype, got int8"),
        ({"memory_limit": 0}, "memory_limit must be a number of bytes >= 1, or None, got 0"),
        ({"vocab_axis": 3}, "vocab_axis must be the name of a mesh axis, several names, or None, got 3"),
        ({"vocab_axis": "model"}, "must be a mesh axis of an enclosing jax.shard_map, or several, got 'model';"),
        ({"precision": "exact"}, "precision must be one of default, high, highest"),
        ({"return_lse": 1}, "return_lse must be True or False, got 1"),
        ({"implementation": "cudnn"}, "implementation must be one of .*xla"),
    ],
)
def test_wrong_argument_raises_with_its_name(changes, words):
    x, weight, labels, _ = make()
    args = {"x": x, "weight": weight, "labels": labels} | changes
    with pytest.raises(ArgumentError, match=words):
        linear_cross_entropy(**args)


def test_other_wrong_calls_say_what_to_do():
    x, weight, labels, _ = make()
    with pytest.raises(ConfigError, match=r"cfg must be a LinearCrossEntropyConfig or .*, got RmsNormConfig"):
        linear_cross_entropy(x, weight, labels, cfg=RmsNormConfig())
    with pytest.raises(ArgumentError, match="temperature must be a positive number or None, got 0"):
        token_log_probs(x, weight, labels, temperature=0)
    with pytest.raises(CallError, match="use `z_loss=`"):
        linear_cross_entropy(x, weight, labels, logsumexp_weight=1e-4)
    with pytest.raises(CallError, match="has no z_loss; use linear_cross_entropy"):
        token_log_probs(x, weight, labels, z_loss=1e-4)
    with pytest.raises(ConfigError, match="form must be 'rows' or 'vocabulary', got 'columns'"):
        XlaParams(form="columns")


def test_a_memory_limit_below_every_configuration_is_a_warning_with_the_bytes_needed():
    with pytest.warns(KernelWarning, match=r"memory_limit=10 is less than every configuration needs.* at least 256\."):
        linear_cross_entropy(jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.zeros(4, int), memory_limit=10)


def test_tangents_of_the_log_sum_exp_are_finite_though_xla_computes_logits_twice():
    rng = np.random.default_rng(0)
    x, weight, bias = (on_device(rng.standard_normal(shape), jnp.float32) for shape in ((64, 1), (1, 7), (7,)))

    def lse(x):
        return linear_cross_entropy(x, weight, jnp.zeros(64, jnp.int32), bias=bias, logits_scale=0.5, return_lse=True)[
            1
        ]

    expected = jax.nn.softmax(0.5 * (x @ weight + bias)) @ (0.5 * weight[0])
    np.testing.assert_allclose(jax.jvp(lse, (x,), (jnp.ones_like(x),))[1], expected, rtol=1e-5)
