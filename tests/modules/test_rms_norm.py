# SPDX-License-Identifier: Apache-2.0
"""`rms_norm`: right in one pass and in blocks, under every transformation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from tests.arrays import on_device, ones

from ejkernel.kernels.rms_norm import xla
from ejkernel.kernels.rms_norm.operation import normalize
from ejkernel.kernels.rms_norm.xla import XlaParams
from ejkernel.modules import RmsNorm, RmsNormConfig, quantize, rms_norm
from ejkernel.ops import ArgumentError, Autotuner, ConfigError, Invocation, UnsupportedError, recording

pytestmark = pytest.mark.slow

KERNEL = RmsNorm()
ONE_PASS = RmsNormConfig(fwd=XlaParams(), bwd=XlaParams())
BLOCKS = RmsNormConfig(fwd=XlaParams(block_rows=4), bwd=XlaParams(block_rows=5))
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


def make(shape=(3, 6, 16), dtype="float32", weight_dtype="float32"):
    rng = np.random.default_rng(0)
    x = on_device(rng.standard_normal(shape), dtype)
    return x, on_device(1 + rng.standard_normal(shape[-1]), weight_dtype)


def assert_close(expected, actual, dtype="float32"):
    def compare(expected, actual):
        expected, actual = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[dtype] * max(1, np.abs(expected).max()))

    jax.tree.map(compare, expected, actual)


@pytest.mark.parametrize("cfg", [ONE_PASS, BLOCKS], ids=["one pass", "blocks"])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [("float32", "float32"), ("bfloat16", "float32"), ("float16",) * 2])
def test_output_and_gradients_match_reference(cfg, dtype, weight_dtype):
    x, weight = make(dtype=dtype, weight_dtype=weight_dtype)
    out, pull = jax.vjp(lambda x, w: rms_norm(x, w, cfg=cfg), x, weight)
    expected, expected_pull = jax.vjp(jax.jit(lambda x, w: normalize(x, w, 1e-6)), x, weight)
    assert (x.dtype, x.shape) == (out.dtype, out.shape)
    assert_close(expected, out, dtype)
    dout = jnp.cos(out)
    gradients = pull(dout)
    assert (x.dtype, weight.dtype) == tuple(g.dtype for g in gradients)
    assert_close(expected_pull(dout.astype(expected.dtype)), gradients, dtype)


@settings(max_examples=6, derandomize=True)
@given(rows=st.integers(1, 20), dim=st.integers(1, 9), block=st.none() | st.integers(1, 25))
def test_any_shape_and_block_matches_reference(rows, dim, block):
    x, weight = make((rows, dim))

    def run(x, weight):
        call, params = KERNEL.describe(x, weight), XlaParams(block_rows=block)
        out, scale = xla.Xla().forward(call, x, weight, params=params)
        return out, xla.Xla().backward(call, scale, out, (jnp.cos(out),), x, weight, params=params)

    def by_formula(x, weight):
        out, pull = jax.vjp(lambda x, w: normalize(x, w, 1e-6), x, weight)
        return out, pull(jnp.cos(out))

    assert_close(jax.jit(by_formula)(x, weight), jax.jit(run)(x, weight))


def test_eps_keeps_rows_of_zeros_finite():
    x, weight = make()
    out, gradient = jax.value_and_grad(lambda x: rms_norm(x, weight).sum())(x * 0)
    assert np.isfinite(out)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("cfg", [ONE_PASS, BLOCKS], ids=["one pass", "blocks"])
def test_derivatives_of_both_modes_and_second_order(cfg):
    x, weight = make((6, 3))
    function = jax.jit(lambda x, w: rms_norm(x, w, cfg=cfg))
    check_grads(function, (x, weight), order=2, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("cfg", [ONE_PASS, BLOCKS], ids=["one pass", "blocks"])
def test_vmap_checkpoint_and_scan_agree_with_the_formula(cfg):
    x, weight = make()

    def loss(norm):
        def step(x, _):
            return jax.checkpoint(jax.vmap(norm, (0, None)))(x, weight), None

        return lambda x: jnp.sin(jax.lax.scan(step, x, None, length=2)[0]).sum()

    expected = jax.jit(jax.value_and_grad(loss(lambda x, w: normalize(x, w, 1e-6))))(x)
    assert_close(expected, jax.value_and_grad(loss(lambda x, w: rms_norm(x, w, cfg=cfg)))(x))


@pytest.mark.parametrize("cfg", [ONE_PASS, BLOCKS], ids=["one pass", "blocks"])
def test_a_replicated_weights_gradient_is_summed_under_shard_map(cfg):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    x, weight = make((32, 8))
    specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
    mapped = jax.shard_map(lambda x, w: rms_norm(x, w, cfg=cfg), mesh=mesh, **specs)
    expected = jax.jit(jax.grad(lambda x, w: jnp.sin(normalize(x, w, 1e-6)).sum(), (0, 1)))(x, weight)
    assert_close(expected, jax.jit(jax.grad(lambda x, w: jnp.sin(mapped(x, w)).sum(), (0, 1)))(x, weight))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": [1.0]}, "x must be a floating-point array .* got list"),
        ({"x": ones((2, 16), "int32")}, "x must be a floating-point array .* got dtype int32"),
        ({"weight": jnp.ones(3)}, r"weight must be a vector of the length of x's last axis; got shapes \(3,\) and"),
        ({"residual": ones((2, 8))}, r"residual must have x's shape and dtype, \(3, 6, 16\), .*; got \(2, 8\)"),
        ({"residual": 1.0}, "residual must have x's shape and dtype, .*; got float"),
        ({"eps": -1.0}, "eps must be a number >= 0, got -1.0"),
        ({"weight_offset": 10**400}, "weight_offset must be a number, and 0 if weight is None, got 1000"),
        ({"implementation": "cudnn"}, "implementation must be one of mosaic_gpu, xla, pallas, or None; got 'cudnn'"),
    ],
)
def test_a_wrong_argument_is_named(changes, words):
    x, weight = make()
    with pytest.raises(ArgumentError, match=words):
        rms_norm(**{"x": x, "weight": weight} | changes)


@pytest.mark.parametrize("axis", [-1, 1, (0, -1)])
def test_a_residual_is_added_before_and_the_sum_returned(axis):
    x, _ = make(dtype="bfloat16")
    residual = jnp.flip(x, axis=0)
    out, total = rms_norm(x, residual=residual, axis=axis)
    assert_close(x + residual, total, "bfloat16")
    assert_close(rms_norm(x + residual, axis=axis), out, "bfloat16")


def test_block_rows_are_positive():
    with pytest.raises(ConfigError, match="block_rows must be a positive integer or None, got 0"):
        XlaParams(block_rows=0)


def invocation(rows, dim, device, dtype="float32"):
    struct, weight = jax.ShapeDtypeStruct((rows, dim), dtype), jax.ShapeDtypeStruct((dim,), dtype)
    args, options = KERNEL.prepare(struct, weight)
    return Invocation(kernel=KERNEL, args=args, kwargs=options, device=device)


def forward_in(block_rows):
    return RmsNormConfig(fwd=XlaParams(block_rows=block_rows))


def test_blocks_are_for_large_narrow_rows_on_a_cpu():
    assert KERNEL.heuristic_cfg(invocation(512, 1024, "cpu:x", "bfloat16")) == forward_in(None)
    assert KERNEL.heuristic_cfg(invocation(65536, 4096, "gpu:x", "bfloat16")) == forward_in(None)
    assert KERNEL.heuristic_cfg(invocation(65536, 4096, "cpu:x")) == forward_in(None)
    assert KERNEL.heuristic_cfg(invocation(65536, 4096, "cpu:x", "bfloat16")) == forward_in(128)


def test_a_large_gradient_on_a_cpu_runs_in_blocks():
    seen = []

    class Spy(RmsNorm):
        def heuristic_cfg(self, inv):
            seen.append((inv.direction, super().heuristic_cfg(inv)))
            return seen[-1][1]

    spy, struct = Spy(), jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    jax.jit(jax.grad(lambda x: spy(x, x[0]).sum())).trace(struct).lower(lowering_platforms=("cpu",))
    assert ("bwd", RmsNormConfig(bwd=XlaParams(block_rows=128))) in seen


def test_candidates_are_distinct_and_smaller_than_the_rows():
    candidates = KERNEL.config_space(invocation(1000, 4096, "cpu:x"))
    assert candidates[0] == forward_in(None)
    assert 4 <= len(candidates) == len(set(candidates))
    assert all(1 <= c.fwd.block_rows < 1000 for c in candidates[1:])


@pytest.mark.parametrize("results", [(0, 1), (0,), (1,)], ids=str)
def test_a_weight_may_differ_between_the_devices_of_a_shard_map_that_share_the_rows(results):
    """The sum of the rows is one for all devices, so its cotangent counts once in their gradient."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x, weight = make()
    weights = jnp.stack([weight, 2 * weight, weight / 2, -weight])

    def loss(x, residual, weight):
        found = rms_norm(x, weight, residual=residual)
        return sum((found[index] ** 3).sum() for index in results)

    def whole(x, residual, weights):
        return sum(loss(x, residual, weight) for weight in weights)

    def local(x, residual, weights):
        return jax.lax.psum(loss(x, residual, weights[0]), "data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    expected, found = (jax.jit(jax.grad(f, (0, 1, 2)))(x, x + 1, weights) for f in (whole, mapped))
    for wanted, gradient in zip(expected, found, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-4 * float(jnp.abs(wanted).max()) + 1e-6)


# --- cost ---


def test_the_cost_counts_each_byte_read_and_written_once():
    cost = KERNEL.cost(Invocation(kernel=KERNEL, args=make((8, 16), dtype="bfloat16")))
    assert (cost.flops, cost.bytes) == (4 * 8 * 16, 2 * 8 * 16 * 2 + 16 * 4)


def test_under_vmap_a_shared_weight_is_read_once():
    x, weight = make((3, 8, 16))
    with recording() as calls:
        jax.jit(jax.vmap(rms_norm, in_axes=(0, None))).lower(x, weight)
    assert KERNEL.cost(calls[0]).bytes == 2 * x.nbytes + weight.nbytes


def test_only_the_forward_has_a_cost():
    with recording() as calls:
        jax.jit(jax.grad(lambda x, weight: rms_norm(x, weight).sum())).lower(*make())
    assert {call.direction: KERNEL.cost(call) is None for call in calls} == {"fwd": False, "bwd": True}


# --- weights and axes ---


@pytest.mark.parametrize("cfg", [ONE_PASS, BLOCKS], ids=["one pass", "blocks"])
def test_without_a_weight_rows_have_a_mean_square_of_one(cfg):
    x, _ = make()
    assert_close(jax.jit(lambda x: normalize(x, None, 1e-6))(x), rms_norm(x, cfg=cfg))
    expected = jax.jit(jax.grad(lambda x: jnp.sin(normalize(x, None, 1e-6)).sum()))(x)
    assert_close(expected, jax.grad(lambda x: jnp.sin(rms_norm(x, cfg=cfg)).sum())(x))


@pytest.mark.parametrize("cfg", [ONE_PASS, BLOCKS], ids=["one pass", "blocks"])
def test_an_offset_is_added_to_the_weight(cfg):
    x, weight = make()

    def total(norm):
        return lambda x, w: jnp.sin(norm(x, w)).sum()

    expected = jax.jit(jax.value_and_grad(total(lambda x, w: normalize(x, w + 1, 1e-6)), (0, 1)))(x, weight)
    ours = total(lambda x, w: rms_norm(x, w, weight_offset=1, cfg=cfg))
    assert_close(expected, jax.value_and_grad(ours, (0, 1))(x, weight))
    assert_close(KERNEL.reference(x, weight, eps=1e-6, weight_offset=1.0), rms_norm(x, weight, weight_offset=1))


@pytest.mark.parametrize("axis", [0, 1, (1, 2), (-1, 0)])
def test_other_axes_are_normalised(axis):
    x, _ = make((3, 6, 4))
    axes = (axis,) if isinstance(axis, int) else axis
    weight = jnp.arange(1.0, 1 + np.prod([x.shape[a] for a in axes])).reshape([x.shape[a] for a in axes])
    mean = (x**2).mean(axes, keepdims=True)
    factor = jnp.einsum("ab->" + ("ab" if axes == (1, 2) else "ba"), weight) if len(axes) == 2 else weight
    shape = [x.shape[a] if a in {b % 3 for b in axes} else 1 for a in range(3)]
    assert_close(x / jnp.sqrt(mean + 1e-6) * factor.reshape(shape), rms_norm(x, weight, axis=axis))


def test_its_gradient_is_checked_along_others_than_its_own_rows():
    """Along a row itself the normalised row does not change."""
    args, options = KERNEL.prepare(make()[0])
    tuned = Autotuner(rounds=2, warmup=1).tune(Invocation(kernel=KERNEL, args=args, kwargs=options), KERNEL)
    assert not tuned.rule_fault


def test_arguments_without_effect_are_not_in_the_key():
    x, weight = make()
    assert KERNEL.prepare(x, weight, weight_offset=0) == KERNEL.prepare(x, weight)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"axis": 3}, "axis must be an axis of x, which has 3, or several; got 3"),
        ({"axis": np.array([0, 1])}, r"axis must be an axis of x, which has 3, or several; got an array int64\[2\]"),
        ({"axis": (0, -3)}, r"axis must name each axis once; got \(0, -3\)"),
        ({"axis": (0, 1)}, r"weight must have the shape of x's axes \(0, 1\), \(3, 6\); got \(16,\)"),
        ({"weight_offset": "1"}, "weight_offset must be a number"),
        ({"weight": None, "weight_offset": 1}, "weight_offset must be .* 0 if weight is None"),
    ],
)
def test_a_wrong_axis_or_offset_is_named(changes, words):
    x, weight = make()
    with pytest.raises(ArgumentError, match=words):
        rms_norm(**{"x": x, "weight": weight} | changes)


# --- in 8 bits ---


def test_rows_in_8_bits_are_those_of_the_float32_output():
    x, weight = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 3, 200), (200,)]))
    found = rms_norm(x, weight, quantize="float8_e4m3fn")
    expected = quantize(rms_norm(x, weight), block=128)
    assert found.block == expected.block
    np.testing.assert_allclose(found.dequantize(), expected.dequantize(), rtol=0.07)
    out, total = rms_norm(x, weight, residual=x, quantize="int8", eps=0.1, axis=2)
    np.testing.assert_array_equal(total, 2 * x)
    np.testing.assert_allclose(out.dequantize(), rms_norm(2 * x, weight, eps=0.1), atol=0.03)
    with pytest.raises(ArgumentError, match="last axis of x with quantize, got 0"):
        rms_norm(x, weight, quantize="int8", axis=0)
    with pytest.raises(ArgumentError, match="quantize must be one of"):
        rms_norm(x, weight, quantize="int4")
    with pytest.raises(UnsupportedError, match="its result is quantised"):
        jax.grad(lambda x: rms_norm(x, quantize="int8").scale.sum())(x)


def test_several_axes_of_no_rows_give_no_rows():
    assert rms_norm(jnp.ones((0, 4, 8)), jnp.ones((4, 8)), axis=(1, 2)).shape == (0, 4, 8)
