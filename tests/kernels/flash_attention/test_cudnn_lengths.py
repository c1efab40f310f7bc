# SPDX-License-Identifier: Apache-2.0
"""Lengths and packed segments by cuDNN: its layouts imitated and lowered here, without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import on_device
from tests.kernels.attention_cases import fake_cudnn_backward, fake_cudnn_forward

from ejkernel import compat
from ejkernel.kernels.flash_attention import cudnn, cudnn_packed
from ejkernel.kernels.flash_attention.common import (
    EMPTY_ROW_LSE,
    AttentionCall,
    Operands,
    Rules,
    arguments_of,
    describe,
)
from ejkernel.kernels.flash_attention.cudnn_packed import PackedParams
from ejkernel.kernels.flash_attention.reference import attention
from ejkernel.modules import FlashAttention
from ejkernel.ops import ConfigError

pytestmark = pytest.mark.slow

CAUSAL, FULL = Rules(scale=0.3, right=0), Rules(scale=0.3)
ONE_RUN_EACH = [[0] * 7 + [1] * 13 + [2] * 4, [5] * 24, [9] * 3 + [4] * 20 + [6]]
LENGTH = 24


def make(batch=3, dtype="bfloat16", **arrays):
    rng = np.random.default_rng(0)
    shapes = [(batch, LENGTH, heads, 8) for heads in (4, 2, 2)]
    return Operands(*(on_device(rng.standard_normal(shape), dtype) for shape in shapes), **arrays)


def segmented(ids, key_ids=None):
    ids = jnp.asarray(ids, jnp.int32)
    return make(len(ids), query_segments=ids, key_segments=ids if key_ids is None else jnp.asarray(key_ids, jnp.int32))


def hidden(lengths, query, key):
    """Return what hides what these lengths hide, as a bias, and which positions there are, `[batch, length]`."""
    batch, length = query.shape[:2]
    positions = jnp.arange(length)
    if lengths.offsets is None:
        own, others = (positions[None] < lens[:, None] for lens in (lengths.queries, lengths.keys))
        visible = own[:, :, None] & others[:, None]
    else:
        starts = jnp.where(lengths.offsets < 0, length, lengths.offsets)
        ids = (starts[:, :, None] <= positions).sum(axis=1)
        own = others = jnp.ones((batch, length), bool)
        visible = ids[:, :, None] == ids[:, None]
    return jnp.where(visible, 0, -1e30).astype(query.dtype)[:, None], own, others


def places(lengths, length):
    """Return, for each of all segments, its row and positions; positions behind its end are `length`."""
    flat = lengths.queries.reshape(-1)
    (found,) = jnp.nonzero(flat >= 0, size=flat.size, fill_value=flat.size)
    lens = jnp.take(flat, found, fill_value=0)
    rows = jnp.minimum(found // lengths.queries.shape[1], lengths.queries.shape[0] - 1)
    starts = jnp.take(lengths.offsets[:, :-1].reshape(-1), found, fill_value=0)
    inside = jnp.arange(length)[None] < lens[:, None]
    return rows[:, None], jnp.where(inside, starts[:, None] + jnp.arange(length)[None], length)


def fake_forward(query, key, value, bias, *, lengths=None, **static):
    if lengths is None:
        return fake_cudnn_forward(query, key, value, bias, **static)
    bias, own, _ = hidden(lengths, query, key)
    out, lse = fake_cudnn_forward(query, key, value, bias, **static)
    if lengths.offsets is None:
        return jnp.where(own[:, :, None, None], out, jnp.nan), jnp.where(own[:, None], lse, jnp.nan)
    rows, positions = places(lengths, query.shape[1])
    return out, lse.transpose(0, 2, 1).at[rows, positions].get(mode="fill", fill_value=jnp.nan).transpose(0, 2, 1)


def fake_backward(operands, residuals, dout, *, lengths=None, **static):
    if lengths is None:
        return fake_cudnn_backward(operands, residuals, dout, **static)
    query, key, value, _ = operands
    out, lse = residuals
    bias, own, others = hidden(lengths, query, key)
    if lengths.offsets is not None:
        rows, positions = places(lengths, query.shape[1])
        empty = jnp.full((query.shape[0], query.shape[1], query.shape[2]), jnp.nan)
        lse = empty.at[rows, positions].set(lse.transpose(0, 2, 1), mode="drop").transpose(0, 2, 1)
    dout, lse = jnp.where(own[:, :, None, None], dout, 0), jnp.where(own[:, None], lse, EMPTY_ROW_LSE)
    found = fake_cudnn_backward((query, key, value, bias), (out, lse), dout, **static)[:3]
    sides = zip(found, (own, others, others), strict=True)
    return tuple(jnp.where(side[:, :, None, None], x, jnp.nan) for x, side in sides)


@pytest.fixture
def simulated(monkeypatch):
    """Imitate cuDNN, anywhere: what is behind a length is undefined."""
    monkeypatch.setattr(compat.kernels, "cudnn_attention_forward", fake_forward)
    monkeypatch.setattr(compat.kernels, "cudnn_attention_backward", fake_backward)


def compute(function, *args):
    """Return the compiled function's result, compiled without optimizing, for that is what takes the time."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return jax.jit(function).lower(*args).compile(compiler_options=options)(*args)


def with_gradients(implementation, rules, params):
    def run(operands):
        out, lse = implementation.attend(operands, rules, *params)
        return out, lse, implementation.differentiate(operands, (out, lse), jnp.cos(out), rules, *params)[:3]

    return run


def by_reference(rules):
    def run(operands):
        (out, lse), pull = jax.vjp(lambda *a: attention(Operands(*a, *operands[3:]), rules), *operands[:3])
        dout = jnp.cos(out.astype(operands.query.dtype)).astype(out.dtype)
        return out, lse, pull((dout, jnp.zeros_like(lse)))

    return run


def assert_same(expected, actual):
    def compare(expected, actual):
        expected, actual = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=6e-2)

    jax.tree.map(compare, expected, actual)


@pytest.mark.parametrize("rules", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("which", ["query_lengths", "key_lengths", "both"])
def test_lengths_hide_what_is_behind_them(simulated, rules, which):
    lengths = {"query_lengths": jnp.array([5, 24, 0], jnp.int32), "key_lengths": jnp.array([0, 9, 24], jnp.int32)}
    operands = make(**(lengths if which == "both" else {which: lengths[which]}))
    assert_same(compute(by_reference(rules), operands), compute(with_gradients(cudnn.Cudnn(), rules, ()), operands))


PACKED = {
    "one run each": (ONE_RUN_EACH, None, True),
    "as many as fit": ([list(np.arange(24) // 6)] * 2, None, True),
    "too many": ([list(np.arange(24) // 4)] * 2, None, False),
    "a segment in two runs": ([[0] * 8 + [1] * 8 + [0] * 8], None, False),
    "other ids of keys": ([[0] * 12 + [1] * 12], [[0] * 10 + [1] * 14], False),
}


@pytest.mark.parametrize(("name", "rules"), [("one run each", FULL), *((name, CAUSAL) for name in PACKED)])
def test_segments_are_right_whether_they_can_be_packed_or_not(simulated, monkeypatch, name, rules):
    ids, key_ids, packs = PACKED[name]
    plain = []
    monkeypatch.setattr(cudnn_packed.xla.Xla, "attend", _noting(plain, cudnn_packed.xla.Xla.attend))
    operands = segmented(ids, key_ids)
    params = PackedParams(segments=(2, 4) if name == "one run each" else (4,))
    if packs:
        expected, run = by_reference(rules), with_gradients(cudnn_packed.CudnnPacked(), rules, (params,))
    else:
        run = functools.partial(cudnn_packed.CudnnPacked().attend, rules=rules, params=params)
        expected = functools.partial(attention, rules=rules)
    assert_same(compute(expected, operands), compute(run, operands))
    assert packs == (not plain)


def test_gradients_include_sinks_where_segments_cannot_be_packed(simulated, monkeypatch):
    """On a GPU, plain JAX computes the softmax of few scores again, which would be one without the sinks."""
    monkeypatch.setattr(compat.programs, "target_kind", lambda: "gpu")
    operands = segmented(PACKED["too many"][0])._replace(sinks=jnp.asarray([3.0, 2.0, 4.0, 1.0]))
    implementation, params = cudnn_packed.CudnnPacked(), PackedParams(segments=(4,))
    call = describe(operands, CAUSAL, platform="gpu", backward=True)

    def run(operands):
        args = arguments_of(operands)
        out, lse = implementation.forward(call, *args, params=params)
        return out, lse, implementation.backward(call, lse, out, (jnp.cos(out),), *args, params=params)[:3]

    assert_same(compute(by_reference(CAUSAL), operands), compute(run, operands))


def _noting(calls, function):
    def noted(*args):
        out, lse = function(*args)
        jax.debug.callback(lambda _: calls.append(1), lse[0, 0, 0])
        return out, lse

    return noted


def test_a_batched_call_packs_all_examples_together(simulated):
    examples = [segmented(ids) for ids in (ONE_RUN_EACH, ONE_RUN_EACH[::-1])]
    run = with_gradients(cudnn_packed.CudnnPacked(), CAUSAL, (PackedParams(segments=(4,)),))
    found = compute(jax.vmap(run), jax.tree.map(lambda *x: jnp.stack(x), *examples))
    for index, example in enumerate(examples):
        assert_same(compute(by_reference(CAUSAL), example), jax.tree.map(lambda x, i=index: x[i], found))


def lowered(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_lengths_ask_for_a_padding_mask():
    operands = make(key_lengths=jnp.array([3, 4, 5], jnp.int32))
    text = lowered(with_gradients(cudnn.Cudnn(), CAUSAL, ()), operands)
    assert re.findall(r"__cudnn\$\w+", text) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert text.count("PADDING_CAUSAL") == 2


def test_there_is_a_kernel_for_each_number_of_segments():
    text = lowered(
        with_gradients(cudnn_packed.CudnnPacked(), FULL, (PackedParams(segments=(4, 8, 64)),)), segmented(ONE_RUN_EACH)
    )
    for call in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert re.findall(rf"@{re.escape(call)}\(.*max_seg_per_batch\\22: (\d+)", text) == ["4", "8"]


FINE = AttentionCall(
    query=(2, 64, 4, 64),
    key=(2, 64, 2, 64),
    value=(2, 64, 2, 64),
    dtype="bfloat16",
    rules=CAUSAL,
    segments=True,
    platform="gpu",
    device_fingerprint="gpu:nvidia_h200",
)
IMPLEMENTATIONS = FlashAttention.implementations


@pytest.mark.parametrize("changes", [{}, {"backward": True}, {"rules": FULL}, {"platform": None}])
def test_packed_segments_run(changes):
    assert IMPLEMENTATIONS.unsupported("cudnn_packed", dataclasses.replace(FINE, **changes)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"segments": False}, "needs segment_ids, and the call has none"),
        ({"bias": (1, 1, 64, 64)}, "segment_ids .* beside bias"),
        ({"rules": Rules(scale=1.0, left=3, right=0)}, "sliding_window"),
        ({"rules": Rules(scale=1.0, soft_cap=3.0)}, "logits_soft_cap"),
        ({"query": (2, 32, 4, 64)}, "length 32 and key 64"),
        ({"device_fingerprint": "gpu:nvidia_a100_sxm4_80gb"}, r"Hopper \(H100\) or later, .* for gpu:nvidia_a100"),
        (
            {"platform": "cpu", "device_fingerprint": "cpu:x", "dtype": "float32", "segments": False},
            r"'cudnn_packed' needs an NVIDIA GPU, Hopper \(H100\) or later, and this call is for cpu:x",
        ),
        ({"dtype": "float32"}, "dtype float32"),
        ({"key_lengths": True}, "key_lengths: not available with implementation='cudnn_packed'; use 'xla'"),
        ({"deterministic": True, "backward": True}, "deterministic .* XLA_FLAGS"),
    ],
)
def test_refusal_names_the_argument(changes, words):
    reason = IMPLEMENTATIONS.unsupported("cudnn_packed", dataclasses.replace(FINE, **changes))
    assert re.search(words, reason), reason


def test_numbers_of_segments_rise():
    with pytest.raises(ConfigError, match=r"segments must be rising integers from 2 on, got \(8, 8\)"):
        PackedParams(segments=(8, 8))
