# SPDX-License-Identifier: Apache-2.0
"""Splash attention's estimate of vector memory, beside what Google's compiler took (libtpu 0.0.48.1)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.flash_attention import splash
from ejkernel.kernels.flash_attention._splash_memory import vector_memory
from ejkernel.kernels.flash_attention.common import AttentionCall, Operands, Rules
from ejkernel.kernels.flash_attention.splash import Splash, SplashBwdParams, SplashParams, blocks_of

V5E, V5P, V6E, TPU7X = "tpu:tpu_v5_lite", "tpu:tpu_v5", "tpu:tpu_v6_lite", "tpu:tpu7x"


def call_of(chip, dims, *, causal, dtype="bfloat16", backward=False, length=4096):
    sizes = [(16, length, heads, dim) for heads, dim in ((8, dims[0]), (4, dims[0]), (4, dims[1]))]
    return AttentionCall(
        **dict(zip(("query", "key", "value"), sizes, strict=True)),
        platform="tpu",
        device_fingerprint=chip,
        dtype=dtype,
        rules=Rules(scale=0.1, right=0 if causal else None),
        backward=backward,
    )


@pytest.mark.parametrize(
    ("chip", "dims", "causal", "blocks", "taken"),
    [
        (V5E, (256, 256), False, (1024, 2048, 128), 18_354_176),
        (V5E, (256, 256), True, (1024, 1024, 512), 14_323_712),
        (V5E, (256, 256), False, (256, 1024, 512), 5_046_272),
        (V5E, (128, 128), False, (1024, 4096, 256), 14_684_160),
        (V5E, (192, 128), True, (1024, 1024, 512), 11_280_384),
        (V5P, (256, 256), False, (1024, 1024, 256), 14_381_056),
        (V5P, (128, 128), False, (1024, 1024, 256), 8_146_944),
        (V5P, (128, 128), False, (1024, 4096, 256), 16_793_600),
        (V5P, (256, 256), False, (512, 2048, 256), 12_546_048),
        (V6E, (256, 256), False, (1024, 1024, 256), 10_940_416),
        (V5E, (80, 80), True, (512, 512, 512), 4_464_640),
        (V5P, (160, 128), False, (512, 2048, 256), 9_404_416),
        (V6E, (80, 80), True, (512, 1024, 256), 5_193_728),
        (V5E, (256, 256), True, (2048, 2048, 512), 40_726_528),
        (V5E, (256, 256), True, (4096, 4096, 512), 116_076_544),
        (V5E, (256, 256), False, (2048, 4096, 512), 60_858_368),
        (V6E, (128, 128), True, (2048, 4096, 512), 41_193_472),
    ],
)
def test_a_forward_kernel_takes_no_more_than_the_estimate(chip, dims, causal, blocks, taken):
    call = call_of(chip, dims, causal=causal)
    params = SplashParams(**dict(zip(("block_q", "block_kv", "block_kv_compute"), blocks, strict=True)))
    need = vector_memory(call, blocks_of(params))
    assert need.least <= taken <= need.most <= 2 * taken


@pytest.mark.parametrize(
    ("chip", "dims", "causal", "blocks", "taken"),
    [
        (V5E, (128, 128), True, (512, 512, 512), 4_726_784),
        (TPU7X, (256, 256), False, (4096, 4096, 256), 41_172_992),
    ],
)
def test_the_estimate_of_a_common_kernel_is_the_compilers_figure(chip, dims, causal, blocks, taken):
    call = call_of(chip, dims, causal=causal, length=8192)
    params = SplashParams(**dict(zip(("block_q", "block_kv", "block_kv_compute"), blocks, strict=True)))
    assert taken <= vector_memory(call, blocks_of(params)).most <= 1.05 * taken
    assert Splash().doubt(call, params) is None


def test_the_estimate_of_heads_beyond_the_fit_is_not_below_the_compilers():
    call = call_of(V6E, (1024, 1024), causal=True, backward=True, length=2048)
    need = vector_memory(call, blocks_of(Splash().heuristic(call)))
    assert need.least <= 24_752_128 <= need.most <= 1.25 * 24_752_128


def test_one_kernel_with_other_queries_does_not_tell_how_registers_grow():
    call = call_of(V6E, (128, 128), causal=True, dtype="float32")
    need = vector_memory(call, blocks_of(SplashParams(block_q=512, block_kv=1024, block_kv_compute=256)))
    assert 7_237_632 <= need.most <= 1.3 * 7_237_632


def test_large_blocks_that_take_most_of_the_memory_are_left_to_tuning():
    call = call_of(V5E, (256, 256), causal=True)
    large = SplashParams(block_q=4096, block_kv=4096, block_kv_compute=512)  # takes 111 of 128 MiB
    assert Splash().params_fault(call, large) is None
    assert "it may take" in Splash().doubt(call, large)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("dims", "dtype"), [((128, 128), "float32"), ((384, 520), "float32"), ((1024, 1024), "bfloat16")]
)
def test_the_heuristics_blocks_fit_in_vector_memory(dims, dtype, backward):
    call = call_of(V5E, dims, causal=True, dtype=dtype, backward=backward)
    splash = Splash()
    assert splash.unsupported(call) is None
    assert splash.doubt(call, splash.heuristic(call)) is None


def test_heads_of_which_no_block_fits_are_refused():
    reason = Splash().unsupported(call_of(V5E, (2**16, 2**16), causal=True))
    assert "use 'xla'. With the smallest blocks of splash it may take" in reason


@pytest.mark.parametrize("fused", [False, True])
def test_each_kernel_of_a_gradient_is_launched_with_its_own_estimate(monkeypatch, fused):
    passed, launch = [], splash.memory_to_pass
    monkeypatch.setattr(splash, "memory_to_pass", lambda need, arrays: passed.append(need) or launch(need, arrays))
    separate = {"block_q_dq": None, "block_kv_dq": None} if fused else {"block_q_dq": 1024, "block_kv_dq": 2048}
    params = SplashBwdParams(block_q=512, block_kv=1024, block_kv_compute=256, **separate)
    call = call_of(V5P, (128, 128), causal=True, backward=True)
    query, key, value = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (call.query, call.key, call.value))
    rows = jax.ShapeDtypeStruct((16, 8, 4096), jnp.float32)
    run = functools.partial(Splash().differentiate, rules=call.rules, params=params)
    jax.eval_shape(run, Operands(query, key, value), (query, rows), query)
    assert passed == [vector_memory(call, {name: blocks}) for name, blocks in blocks_of(params).items()]
