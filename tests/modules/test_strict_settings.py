# SPDX-License-Identifier: Apache-2.0
"""Every module under JAX's strict settings, and in programs for several platforms at once."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import on_device

from ejkernel.kernels.grouped_matmul import xla as grouped_matmul_xla
from ejkernel.kernels.rms_norm.xla import XlaParams
from ejkernel.modules import (
    FlashAttentionConfig,
    GroupedMatmulConfig,
    RmsNormConfig,
    append_to_pages,
    flash_attention,
    grouped_matmul,
    layer_norm,
    paged_attention,
    quantized_grouped_dense,
    rms_norm,
)
from ejkernel.ops import BwdParams, FwdParams

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def strict_64_bits():
    """Both settings together: with 64-bit types, other pairs of dtypes meet."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


SWITCHES = {
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "64 bits": lambda: jax.enable_x64(True),
    "leaks": jax.checking_leaks,
    "checks": lambda: jax.enable_checks(True),
    "dtype promotion in 64 bits": strict_64_bits,
}
BLOCKS = FlashAttentionConfig(
    fwd=FwdParams(q_blocksize=8, kv_blocksize=16), bwd=BwdParams(q_blocksize=16, kv_blocksize=8)
)
TILES = GroupedMatmulConfig(implementation="xla", fwd=grouped_matmul_xla.XlaParams(block_rows=4))
ROWS = RmsNormConfig(fwd=XlaParams(block_rows=4), bwd=XlaParams(block_rows=4))


def normal(*shape, dtype="float32"):
    return on_device(np.random.default_rng(0).standard_normal(shape), dtype)


def attention(dtype):
    """Attention with all that it takes, its options as NumPy's scalars."""
    options = {
        "attention_mask": jnp.ones((2, 24), bool),
        "segment_ids": (jnp.zeros((2, 24), jnp.int32), jnp.zeros((2, 24), jnp.uint8)),
        "query_lengths": np.array([24, 21]),
        "key_lengths": np.array([20, 24]),
        "causal": np.bool_(True),
        "sliding_window": np.int64(9),
        "logits_soft_cap": np.float32(3.0),
        "softmax_scale": np.float64(0.3),
        "dropout_rate": np.float32(0.1),
        "dropout_key": jax.random.key(0),
        "soft_cap_after_bias": np.bool_(True),
        "return_lse": True,
    }

    def run(query, key, value, bias, sinks):
        return flash_attention(query, key, value, bias=bias, sinks=sinks, cfg=BLOCKS, **options)[0]

    return run, [*(normal(2, 24, heads, 8, dtype=dtype) for heads in (4, 2, 2)), normal(4, 24, 24), normal(4)]


def norm(dtype):
    """Normalisation in blocks, of another axis."""
    run = functools.partial(rms_norm, eps=np.float32(1e-6), weight_offset=np.int64(1), axis=np.int64(1), cfg=ROWS)
    return run, [normal(3, 16, 2, dtype=dtype), normal(16)]


def centred_norm(dtype):
    """Normalisation with its mean."""
    return functools.partial(layer_norm, eps=np.float32(1e-6)), [normal(3, 2, 16, dtype=dtype), normal(16), normal(16)]


def grouped(dtype):
    """A product in tiles, wider than its operands."""
    sizes = jnp.array([3, 0, 9, 4])
    options = {"transpose_rhs": np.bool_(False), "preferred_element_type": np.float32, "cfg": TILES}
    run = functools.partial(grouped_matmul, group_sizes=sizes, **options)
    return run, [normal(20, 8, dtype=dtype), normal(4, 8, 6, dtype=dtype)]


def paged(dtype):
    """New tokens in a cache of 8 bits, and their attention, which has no gradient."""
    table, offsets, lengths = jnp.arange(6).reshape(2, 3), jnp.array([0, 1, 4]), jnp.array([5, 9])
    scales = {"k_scale": 0.05, "v_scale": np.array([0.05, 0.1], np.float32)}

    def run(query, key, value, sinks):
        query, key, value, sinks = jax.lax.stop_gradient((query, key, value, sinks))
        pages = append_to_pages(jnp.zeros((6, 4, 2, 2, 8), jnp.int8), key, value, table, offsets, lengths, **scales)
        return paged_attention(query, pages, table, offsets, lengths, sinks=sinks, sliding_window=5, **scales)

    return run, [*(normal(5, heads, 8, dtype=dtype) for heads in (4, 2, 2)), normal(4)]


def blocks(dtype):
    """A layer of experts in 8 bits, whose groups begin blocks of 128."""
    run = functools.partial(quantized_grouped_dense, group_sizes=np.array([3, 0, 2]), block=128)
    return run, [normal(6, 128, dtype=dtype), normal(3, 128, 16, dtype=dtype)]


MODULES = [attention, norm, centred_norm, grouped]


def with_gradients(run, arrays):
    """Return the output and all gradients."""

    def total(*arrays):
        out = run(*arrays)
        return jnp.sin(out.astype("float32")).sum(), out

    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    function = jax.jit(jax.grad(total, tuple(range(len(arrays))), has_aux=True))
    return function.lower(*arrays).compile(compiler_options=options)(*arrays)


@functools.cache
def usual_results(module):
    """Return the output and all gradients without any switch."""
    return with_gradients(*module("bfloat16"))


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("module", [*MODULES, paged, blocks])
def test_a_module_computes_the_same_under_a_strict_setting(module, switch):
    run, arrays = module("bfloat16")
    expected = usual_results(module)
    with SWITCHES[switch]():
        found = with_gradients(run, arrays)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(b, float), np.asarray(a, float), 1e-2),
        *_typed(expected, found),
    )


@pytest.mark.parametrize("transformation", [lambda run: run, jax.jit, lambda run: jax.grad(lambda x: run(x).sum())])
def test_debug_nans_finds_a_nan(transformation):
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        transformation(lambda x: rms_norm(x, eps=0.0))(jnp.zeros((2, 4)))


def _typed(expected, found):
    assert [x.dtype for x in jax.tree.leaves(expected)] == [x.dtype for x in jax.tree.leaves(found)]
    return expected, found


PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_CHECKS = [
    jax.export.DisabledSafetyCheck.custom_call(f"__cudnn$fmhaSoftmax{direction}") for direction in ("", "Backward")
]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("platforms", [PLATFORMS, ("cuda", "rocm")], ids=["all", "GPUs"])
def test_a_program_may_be_exported_for_several_platforms(module, platforms):
    run, arrays = module("bfloat16")
    function = jax.jit(jax.grad(lambda *arrays: run(*arrays).astype("float32").sum()))
    exported = jax.export.export(function, platforms=platforms, disabled_checks=_CHECKS)(*arrays)
    if "cpu" in platforms and jax.default_backend() == "cpu":
        found = jax.export.deserialize(exported.serialize()).call(*arrays)
        np.testing.assert_allclose(np.asarray(found, float), np.asarray(function(*arrays), float), atol=2e-2)


def gradient_for(*platforms):
    struct = jax.ShapeDtypeStruct((1, 16, 2, 64), jnp.bfloat16)
    gradient = jax.grad(lambda x: flash_attention(x, x, x, causal=True).astype("float32").sum())
    return jax.jit(gradient).trace(struct).lower(lowering_platforms=platforms).as_text().count("@__cudnn$")


def test_each_platform_has_its_own_implementation():
    assert gradient_for("cuda") == gradient_for("cpu", "cuda") == gradient_for(*PLATFORMS) == 2
    assert gradient_for("rocm") == gradient_for("cpu", "rocm") == 0
