# SPDX-License-Identifier: Apache-2.0
"""What cuDNN is asked for, and what it is asked: decided and lowered here, without a GPU."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest
from tests.kernels.attention_cases import CASES, CAUSAL

from ejkernel.kernels.flash_attention import cudnn, xla
from ejkernel.kernels.flash_attention.common import AttentionCall, Rules
from ejkernel.modules import flash_attention
from ejkernel.ops import BwdParams, FwdParams, NoParams

FINE = AttentionCall(
    query=(2, 64, 4, 64),
    key=(2, 64, 2, 64),
    value=(2, 64, 2, 64),
    dtype="bfloat16",
    rules=CAUSAL,
    platform="gpu",
    device_fingerprint="gpu:nvidia_h200",
)


def rules(**changes):
    return {"rules": Rules(scale=0.3, **changes)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float16"},
        {"rules": Rules(scale=1.0)},
        {"rules": Rules(scale=1.0, left=8, right=0)},
        {"query": (2, 64, 4, 256), "key": (2, 64, 4, 256), "value": (2, 64, 4, 256)},
        {"query": (2, 1, 4, 64)},
        {"attention_mask": (2, 1, 1, 64), "bias": (1, 4, 64, 64), "backward": True},
        {"platform": None, "device_fingerprint": ""},
    ],
)
def test_runs_what_it_can(changes):
    assert cudnn.unsupported_reason(dataclasses.replace(FINE, **changes)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"platform": "cpu", "device_fingerprint": "cpu:x"},
            r"NVIDIA GPU, Ampere \(A100\) or later, .* for cpu:x",
        ),
        ({"device_fingerprint": "gpu:amd_instinct_mi300x"}, "needs an NVIDIA GPU"),
        (
            {"device_fingerprint": "gpu:tesla_v100_sxm2_16gb"},
            r"Ampere \(A100\) or later, .* for gpu:tesla_v100",
        ),
        ({"partitioned": True}, "jax.shard_map"),
        ({"dtype": "float32"}, "dtype float32, .* bfloat16 and float16"),
        ({"value": (2, 64, 2, 32)}, "value has head_dim 32"),
        ({"query": (2, 64, 4, 60), "value": (2, 64, 2, 60)}, "head_dim 60, .* multiples of 8"),
        (
            {"query": (2, 64, 4, 256), "value": (2, 64, 2, 256), "device_fingerprint": "gpu:nvidia_a100_sxm4_80gb"},
            "up to 128 on gpu:nvidia_a100",
        ),
        ({"segments": True}, "segment_ids"),
        (rules(soft_cap=3.0), "logits_soft_cap"),
        (rules(left=3, right=3), "sliding_window .* \\(left, 0\\)"),
        (rules(left=3), "sliding_window"),
        (rules(left=3, right=0) | {"bias": (1, 1, 64, 64)}, "sliding_window .* beside bias"),
        ({"query": (2, 32, 4, 64)}, "length 32 and key 64"),
        ({"query": (2, 63, 4, 64), "key": (2, 63, 2, 64), "backward": True}, "even .* gradient, got 63"),
        ({"query": (2, 63, 4, 64), "key": (2, 63, 2, 64), "bias": (1, 1, 63, 63)}, "even .* bias"),
    ],
)
def test_refusal_names_the_argument_and_the_way_out(changes, words):
    reason = cudnn.unsupported_reason(dataclasses.replace(FINE, **changes))
    assert re.search(words, reason), reason
    assert "'xla'" in reason


def lowered(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def backend_config(text, call):
    """Return the configuration of the one custom call of that name."""
    (found,) = re.findall(rf'@{re.escape(call)}\(.*?backend_config = "(.*?)", ', text)
    return json.loads(found.replace(r"\22", '"'))["cudnn_fmha_backend_config"]


def arguments(name):
    operands = CASES[name].operands("bfloat16")
    return operands, CASES[name].rules


def test_forward_asks_for_a_causal_kernel():
    operands, causal = arguments("causal")
    config = backend_config(lowered(lambda x: cudnn.Cudnn().attend(x, causal), operands), "__cudnn$fmhaSoftmax")
    assert (config["mask_type"], config["fmha_scale"], config["sliding_window_length"]) == ("CAUSAL", 0.3, 0)


def results_of(text):
    """Return the types of what the one call of cuDNN returns."""
    (found,) = re.findall(r"@__cudnn\$\w+\(.*?\) -> \((.*?)\)", text)
    return re.findall(r"tensor<([^>]*)>", found)


@pytest.mark.parametrize(
    ("name", "options", "has_lse"),
    [("causal", {}, False), ("causal", {"return_lse": True}, True), ("bias per head", {}, True)],
)
def test_log_sum_exp_is_written_where_something_needs_it(name, options, has_lse):
    operands, rules = arguments(name)

    def attend(query, key, value, bias):
        return flash_attention(query, key, value, bias=bias, causal=rules.right == 0, implementation="cudnn", **options)

    results = results_of(lowered(attend, *operands[:4]))
    assert any(result.endswith("xf32") for result in results) is has_lse


def test_a_window_counts_the_query_itself():
    operands, window = arguments("causal window")
    config = backend_config(lowered(lambda x: cudnn.Cudnn().attend(x, window), operands), "__cudnn$fmhaSoftmax")
    assert config["sliding_window_length"] == 8


def test_backward_takes_the_residuals_of_any_forward():
    operands, causal = arguments("bias per head")

    def gradients(operands):
        residuals = xla.Xla().attend(operands, causal, FwdParams())
        return cudnn.Cudnn().differentiate(operands, residuals, residuals[0], causal)

    text = lowered(gradients, operands)
    assert backend_config(text, "__cudnn$fmhaScaleBiasSoftmaxBackward")["mask_type"] == "CAUSAL"
    assert "fmhaSoftmax(" not in text


@pytest.mark.slow
def test_a_mask_alone_has_no_gradient():
    operands, plain = arguments("key padding")
    residuals = jax.jit(lambda x: xla.Xla().attend(x, plain, FwdParams()))(operands)
    text = lowered(lambda x: cudnn.Cudnn().differentiate(x, residuals, residuals[0], plain)[:3], operands)
    results = re.search(r"fmhaScaleBiasSoftmaxBackward.*-> \((.*)\)", text).group(1)
    assert results.count("tensor<") == 4  # three gradients and the workspace


def test_types_are_those_of_xla():
    operands, plain = arguments("causal mask and bias")

    def types(found, fwd, bwd):
        residuals = jax.eval_shape(lambda x: found.attend(x, plain, fwd), operands)
        gradients = jax.eval_shape(lambda x, r: found.differentiate(x, r, r[0], plain, bwd), operands, residuals)
        return jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype)), (residuals, gradients))

    assert types(xla.Xla(), FwdParams(), BwdParams()) == types(cudnn.Cudnn(), NoParams(), NoParams())
