# SPDX-License-Identifier: Apache-2.0
"""`examples/wrapped_kernels`: kernels that JAX ships, as operations."""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Invocation, autotune, overlay_cache
from ejkernel.ops.core.kernel import candidates_of
from ejkernel.ops.execution.discovery import discover

FILE = Path(__file__).parents[1] / "examples" / "wrapped_kernels" / "kernels.py"


@pytest.fixture(scope="module")
def kernels():
    spec = importlib.util.spec_from_file_location("wrapped_kernels", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def splash(kernels):
    pytest.importorskip("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel")
    return kernels.splash


@pytest.fixture
def gmm(kernels):
    pytest.importorskip("jax.experimental.pallas.ops.tpu.megablox.ops")
    return kernels.gmm


@pytest.fixture
def hopper(kernels, monkeypatch):
    """The Hopper kernel, which queries the CUDA version even for lowering."""
    try:
        module = kernels._hopper()
    except ImportError as error:
        pytest.skip(f"JAX's Hopper attention cannot be imported: {error}")
    fake = types.SimpleNamespace(cuda_runtime_get_version=lambda: 12091)
    monkeypatch.setattr(module, "cuda_versions", fake)
    return kernels.hopper_attention


def lowered(function, args, platform):
    return function.trace(*args).lower(lowering_platforms=(platform,)).as_text()


def groups(rows, sizes):
    rng = np.random.default_rng(0)
    lhs, rhs = rng.standard_normal((rows, 128), np.float32), rng.standard_normal((len(sizes), 128, 128), np.float32)
    return jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes, jnp.int32)


@pytest.mark.slow
def test_the_grouped_product_and_its_gradients_are_those_of_plain_jax(kernels, gmm):
    lhs, rhs, sizes = groups(256, [100, 0, 156])
    np.testing.assert_allclose(gmm(lhs, rhs, sizes), kernels.plain_gmm(lhs, rhs, sizes), rtol=1e-3, atol=1e-3)
    grads, wanted = (
        jax.jit(jax.grad(lambda lhs, rhs, f=f: jnp.sum(f(lhs, rhs, sizes) ** 2), (0, 1)))(lhs, rhs)
        for f in (gmm, kernels.plain_gmm)
    )
    for found, want in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-2, atol=0.1)


def test_group_sizes_to_measure_with_add_up_to_the_rows(gmm):
    inv = Invocation(kernel=gmm, args=groups(256, [256, 0, 0]))
    for seed in range(3):
        args, _ = gmm.example_inputs(inv, np.random.default_rng(seed))
        assert int(args[2].sum()) == 256


@pytest.mark.slow
def test_the_grouped_product_is_tuned_on_such_groups(gmm):
    best = autotune(gmm, *groups(256, [256, 0, 0]), configs=[{"tiling": (256, 128, 128)}], num_iters=2, num_warmup=0)
    assert list(best) == ["tiling"]


def test_splash_tunes_forward_and_backward_over_separate_blocks(kernels, splash):
    step, args = kernels.splash_step()
    calls = {inv.direction: inv for inv in discover(step, *args)}
    forward, backward = (list(candidates_of(splash, calls[direction])) for direction in ("fwd", "bwd"))
    assert {config["block_q_dkv"] for config in forward} == {128}
    assert {config["block_q"] for config in backward} == {128}
    assert len(backward) == 9


@pytest.mark.slow
def test_splash_s_backward_may_have_other_blocks_than_the_forward_that_it_follows(kernels, splash):
    q, k, v = (0.1 * jax.random.normal(jax.random.key(seed), (1, 256, 128)) for seed in range(3))
    step = kernels._gradient(splash, 3)
    plain = step(q, k, v)
    backward = next(inv.key for inv in discover(step, q, k, v) if inv.direction == "bwd")
    config = {"block_q": 128, "block_kv": 128, "block_q_dkv": 256, "block_kv_dkv": 256}
    with overlay_cache({backward: config}):
        other = step(q, k, v)
    for found, want in zip(other, plain, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("step", "calls"), [("splash_step", 2), ("grouped_step", 3)])
def test_a_gradient_runs_the_forward_once_on_a_tpu(request, monkeypatch, kernels, step, calls):
    request.getfixturevalue("splash" if step == "splash_step" else "gmm")
    monkeypatch.setattr(kernels, "INTERPRET", False)
    function, args = getattr(kernels, step)()
    # the forward, and one kernel in splash's backward, two in that of the grouped product
    assert lowered(function, args, "tpu").count("custom_call @tpu_custom_call") == calls


@pytest.mark.slow
def test_a_gradient_runs_the_forward_once_on_hopper(kernels, hopper):
    function, args = kernels.hopper_step()
    # forward, then dk and dv, then dq
    assert lowered(function, args, "cuda").count("custom_call @mosaic_gpu_v2") == 3


def test_the_hopper_kernel_s_own_dataclass_is_its_configuration(kernels, hopper):
    q = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.float16)
    inv = Invocation(kernel=hopper, args=(q, q, q), device="gpu:nvidia_h200")
    assert {config.block_q_dq for config in candidates_of(hopper, inv)} == {64}
    assert len(list(candidates_of(hopper, inv))) == 12
