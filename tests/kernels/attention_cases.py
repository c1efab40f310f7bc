# SPDX-License-Identifier: Apache-2.0
"""Attention under test: a call for each feature, a row for each implementation, a stand-in for cuDNN."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from tests.arrays import on_device
from tests.kernels.conformance import Backend, Subject, assert_close

from ejkernel import compat
from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE, AttentionCall, Operands, Rules, operands_of
from ejkernel.kernels.flash_attention.reference import attention
from ejkernel.modules import FlashAttention
from ejkernel.ops import BwdParams, FwdParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes and features of one call; `bias` and `mask` are shapes.

    With `exact`, queries and keys are multiples of 1/256: every order of summation has the same logits.
    """

    batch: int = 2
    queries: int = 48
    keys: int = 48
    heads: int = 4
    groups: int = 2
    head_dim: int = 16
    value_dim: int = 16
    bias: tuple[int, ...] | None = None
    bias_dtype: str | None = None
    mask: tuple[int, ...] | None = None
    segments: bool = False
    exact: bool = False
    rules: Rules = dataclasses.field(default_factory=lambda: Rules(scale=0.3))

    def types(self, dtype="float32"):
        """Return the operands' types; values of large cases would take most of the time of a test."""

        def like(*shape, dtype=dtype):
            return jax.ShapeDtypeStruct(shape, dtype)

        return Operands(
            like(self.batch, self.queries, self.heads, self.head_dim),
            like(self.batch, self.keys, self.groups, self.head_dim),
            like(self.batch, self.keys, self.groups, self.value_dim),
            None if self.bias is None else like(*self.bias, dtype=self.bias_dtype or dtype),
            None if self.mask is None else like(*self.mask, dtype=jnp.bool_),
            like(self.batch, self.queries, dtype=jnp.int32) if self.segments else None,
            like(self.batch, self.keys, dtype=jnp.int32) if self.segments else None,
            dropout_key=like(2, dtype=jnp.uint32) if self.rules.dropout_rate else None,
        )

    def operands(self, dtype="float32", seed=0):
        types, rng = self.types(dtype), np.random.default_rng(seed)

        def normal(like, exact=False):
            found = rng.standard_normal(like.shape)
            return on_device(np.round(found * 256) / 256 if exact else found, like.dtype)

        mask = None
        if self.mask is not None:
            mask = rng.random(self.mask) < 0.6
            mask[0, 0, 0] = False  # the first rows see nothing
            mask = jnp.asarray(mask)
        segments = (None, None)
        if self.segments:
            both = (types.query_segments, types.key_segments)
            segments = [on_device(np.sort(rng.integers(0, 3, like.shape)), like.dtype) for like in both]
        return Operands(
            normal(types.query, exact=self.exact),
            normal(types.key, exact=self.exact),
            normal(types.value),
            None if types.bias is None else normal(types.bias),
            mask,
            *segments,
            dropout_key=on_device([7, 9], jnp.uint32) if self.rules.dropout_rate else None,
        )

    def call(self, dtype="float32"):
        """Return the arguments of the operation."""
        operands = self.operands(dtype)
        segments = None if not self.segments else (operands.query_segments, operands.key_segments)
        return (*operands[:5], segments, None, None, operands.dropout_key), options_of(self.rules)


# Compiled in one piece: call by call, the reference takes longer than the check.
by_reference = jax.jit(attention, static_argnums=1)


@functools.partial(jax.jit, static_argnums=(1, 3))
def reference_with_gradients(operands, rules, dout, names=("query", "key", "value")):
    """Return output and log-sum-exp, and the gradients of the operands of these names, in float32."""

    def function(*arrays):
        return attention(operands._replace(**dict(zip(names, arrays, strict=True))), rules)

    found, pull = jax.vjp(function, *[getattr(operands, name).astype(jnp.float32) for name in names])
    return found, pull((dout.astype(jnp.float32), jnp.zeros_like(found[1])))


def options_of(rules):
    """Return the options of the operation that mean these rules."""
    return {
        "causal": rules.right == 0,
        "softmax_scale": rules.scale,
        "sliding_window": (rules.left, rules.right),
        "logits_soft_cap": rules.soft_cap,
        "soft_cap_after_bias": rules.cap_after_bias,
        "dropout_rate": rules.dropout_rate,
    }


def call_of(case, **more):
    """Return a benchmark's case as a call for a Hopper GPU."""
    (heads, groups), (dim, value_dim) = case.heads, case.dims
    return AttentionCall(
        query=(case.batch, case.seq, heads, dim),
        key=(case.batch, case.keys, groups, dim),
        value=(case.batch, case.keys, groups, value_dim),
        dtype=case.dtype,
        key_lengths=case.lengths,
        rules=Rules(scale=1.0, right=0 if case.causal else None),
        platform="gpu",
        **more,
    )


CAUSAL = Rules(scale=0.3, right=0)
CASES = {
    "plain": Case(groups=4),
    "causal": Case(queries=140, keys=140, rules=CAUSAL),  # longer than the sequences that Hopper kernels compute alone
    "causal, keys before": Case(queries=20, rules=CAUSAL),
    "causal, rows without keys": Case(keys=20, rules=CAUSAL),
    "one query": Case(queries=1, rules=CAUSAL),
    # On Hopper, heads count as queries; the forward divides keys into parts, and the gradient queries.
    "few queries": Case(queries=3, keys=1024),
    "few keys": Case(queries=512, keys=20),
    "other value dim": Case(value_dim=8),
    "full bias": Case(bias=(2, 4, 48, 48), groups=1),
    "bias per head": Case(bias=(1, 4, 48, 48), rules=CAUSAL),
    "bias per key": Case(bias=(2, 1, 1, 48)),
    "bias per query": Case(bias=(1, 1, 48, 1)),
    "key padding": Case(groups=4, mask=(2, 1, 1, 48)),
    "causal mask and bias": Case(mask=(2, 1, 48, 48), bias=(1, 4, 48, 48), rules=CAUSAL),
    "segments": Case(segments=True),
    "window": Case(rules=Rules(scale=0.3, left=7, right=5)),
    "causal window": Case(rules=Rules(scale=0.3, left=7, right=0)),
    "soft cap": Case(queries=70, groups=4, rules=Rules(scale=0.3, soft_cap=2.0)),
    "soft cap after the bias": Case(
        bias=(1, 4, 48, 48), mask=(2, 1, 48, 48), rules=Rules(scale=0.3, soft_cap=2.0, cap_after_bias=True)
    ),
    "dropout": Case(rules=Rules(scale=0.3, right=0, dropout_rate=0.3)),
    # The backward computes logits again; rounded differently, they would be hundreds away from the log-sum-exp.
    "large logits": Case(exact=True, rules=Rules(scale=2.0**30, right=0)),
    "all at once": Case(
        queries=33,
        keys=41,
        bias=(1, 4, 33, 41),
        mask=(2, 1, 33, 41),
        segments=True,
        rules=Rules(scale=0.3, left=17, right=0, soft_cap=2.0),
    ),
}


def fake_cudnn_forward(query, key, value, bias, *, scale, causal, window, with_lse=True):
    """Imitate cuDNN: the first query at the first key, and hidden keys merely far below."""
    logits = _fake_logits(query, key, bias, scale, causal, window)
    top = logits.max(axis=-1)
    weights = jnp.exp(logits - top[..., None])
    lse = top + jnp.log(weights.sum(axis=-1))
    out = jnp.einsum("bhqk,bkhd->bqhd", weights / weights.sum(axis=-1, keepdims=True), _repeat(value, query))
    return (out.astype(query.dtype), lse) if with_lse else (out.astype(query.dtype),)


def fake_cudnn_backward(operands, residuals, dout, *, scale, causal, window, bias_gradient):
    """Return gradients as cuDNN does, from the log-sum-exp; the bias's is summed where the bias was broadcast."""
    query, key, value, bias = operands
    out, lse = residuals
    groups = key.shape[2]
    weights = jnp.exp(_fake_logits(query, key, bias, scale, causal, window) - lse[..., None])
    dout = dout.astype(jnp.float32)
    dweights = jnp.einsum("bqhd,bkhd->bhqk", dout, _repeat(value, query))
    dlogits = weights * (dweights - jnp.einsum("bqhd,bqhd->bhq", dout, out.astype(jnp.float32))[..., None])
    dquery = jnp.einsum("bhqk,bkhd->bqhd", dlogits, _repeat(key, query)) * scale
    dkey = jnp.einsum("bhqk,bqhd->bkhd", dlogits, query.astype(jnp.float32)) * scale
    dvalue = jnp.einsum("bhqk,bqhd->bkhd", weights, dout)
    grouped = [x.reshape(*x.shape[:2], groups, -1, x.shape[-1]).sum(axis=3) for x in (dkey, dvalue)]
    found = [x.astype(query.dtype) for x in (dquery, *grouped)]
    if bias_gradient:
        axes = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
        found.append(dlogits.sum(axis=axes, keepdims=True).astype(bias.dtype))
    return tuple(found)


def _fake_logits(query, key, bias, scale, causal, window):
    logits = jnp.einsum("bqhd,bkhd->bhqk", query.astype(jnp.float32), _repeat(key, query)) * scale
    if bias is not None:
        assert bias.shape[2:] == logits.shape[2:]
        assert bias.dtype == query.dtype
        logits = logits + bias.astype(jnp.float32)
    behind = jnp.arange(logits.shape[2])[:, None] - jnp.arange(logits.shape[3])[None, :]
    if causal:
        logits = jnp.where(behind >= 0, logits, -1e30)
    if window:
        logits = jnp.where(behind < window, logits, -1e30)
    return logits


def _repeat(x, query):
    return jnp.repeat(x.astype(jnp.float32), query.shape[2] // x.shape[2], axis=2)


def simulate_cudnn(monkeypatch):
    monkeypatch.setattr(compat.kernels, "cudnn_attention_forward", fake_cudnn_forward)
    monkeypatch.setattr(compat.kernels, "cudnn_attention_backward", fake_cudnn_backward)


def interpret_splash(monkeypatch):
    for name in ("splash_forward", "splash_backward"):
        monkeypatch.setattr(compat.splash, name, functools.partial(getattr(compat.splash, name), interpret=True))


def interpret_pallas(monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


def check_log_sum_exp(args, options, residuals, dtype):
    """Compare the log-sum-exp of rows that see a key; of the others it is a fixed number."""
    operands = operands_of(args)
    call = SUBJECT.operation.describe(*args, **options)
    _, expected = by_reference(operands, call.rules)
    seen = np.asarray(expected) < EMPTY_ROW_LSE
    assert residuals.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(residuals)[~seen], np.float32(EMPTY_ROW_LSE))
    assert_close(SUBJECT, np.asarray(expected)[seen], np.asarray(residuals)[seen], dtype)


def in_use(length, *, keys=None, heads=(4, 2), dims=(128, 128), arrays=None, **options):
    """Return a call with shapes of a language model; `arrays` are shapes and dtypes of further arguments."""

    def call(dtype):
        shapes = [(3, length, heads[0], dims[0]), *((3, keys or length, heads[1], dim) for dim in dims)]
        given = {name: jax.ShapeDtypeStruct(shape, own or dtype) for name, (shape, own) in (arrays or {}).items()}
        return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), given | options

    return call


ARRAYS = {"bias": ((1, 6, 205, 307), None), "attention_mask": ((3, 1, 205, 307), "bool")}


SUBJECT = Subject(
    operation=FlashAttention(),
    calls={name: case.call for name, case in CASES.items()},
    briefly=("causal", "bias per head"),
    # Blocks are smaller than the lengths, of different sizes, and no divisors of them: every way to have a rest.
    backends={
        "xla": Backend(params=(FwdParams(q_blocksize=16, kv_blocksize=32), BwdParams(q_blocksize=32, kv_blocksize=20))),
        "mosaic_gpu": Backend(dtypes=("bfloat16", "float16", "float32"), rounded={"float32": "float16"}),
        "cudnn": Backend(dtypes=("bfloat16", "float16"), simulate=simulate_cudnn),
        "cudnn_packed": Backend(dtypes=("bfloat16", "float16")),
        "splash": Backend(dtypes=("float32", "bfloat16"), simulate=interpret_splash),
        "pallas_tpu": Backend(dtypes=("float32", "bfloat16"), simulate=interpret_pallas, tested_apart=True),
    },
    tolerance={"float32": 3e-5, "float16": 5e-3, "bfloat16": 4e-2},
    spaces={"causal, 2048": in_use(2048, causal=True)},
    odd={
        "prime lengths, narrower values": in_use(1879, dims=(200, 136), causal=True),
        "prime lengths, wide heads": in_use(1877, keys=1879, heads=(2, 1), dims=(384, 520), causal=True),
        "decoding": in_use(3, keys=1500, dims=(192, 192)),
        "short": in_use(13, keys=99, heads=(6, 2), dims=(40, 72)),
        "arrays": in_use(205, keys=307, heads=(6, 2), dims=(72, 40), sliding_window=(99, 0), arrays=ARRAYS),
    },
    check_residuals=check_log_sum_exp,
)
