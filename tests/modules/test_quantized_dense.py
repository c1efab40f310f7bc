# SPDX-License-Identifier: Apache-2.0
"""Layers with 8-bit products: gradients, delayed scaling, groups, and rejected arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device

from ejkernel.modules import (
    DelayedScaling,
    Quantized,
    grouped_matmul,
    grouped_matmul_wgrad,
    quantize,
    quantize_both,
    quantized_dense,
    quantized_grouped_dense,
)
from ejkernel.ops import ArgumentError, UnsupportedError

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def normal(*shape, seed=0, dtype=jnp.float32):
    return on_device(np.random.default_rng(seed).standard_normal(shape), dtype)


def relative(actual, expected):
    return float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "gradient_dtype", "tolerance"), [(E4M3, E5M2, 0.08), ("int8", "int8", 0.015)])
def test_a_trained_layer_follows_the_gradients_of_the_plain_one(dtype, gradient_dtype, tolerance):
    x, w, target = normal(3, 8, 64), normal(64, 32, seed=1), normal(3, 8, 32, seed=2)
    layer = lambda x, w: quantized_dense(x, w, dtype=dtype, gradient_dtype=gradient_dtype)  # noqa: E731

    def gradients(layer, x, w):
        return jax.grad(lambda x, w: jnp.square(layer(x, w) - target).mean(), (0, 1))(x, w)

    for actual, expected in zip(gradients(layer, x, w), gradients(jnp.matmul, x, w), strict=True):
        assert actual.dtype == expected.dtype
        assert relative(actual, expected) < tolerance
    expected = quantize(x, dtype=dtype).dequantize() @ quantize(w, dtype=dtype, axis=0).dequantize()
    assert relative(layer(x, w), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["current", "blocks", "delayed", "groups"])
def test_a_second_derivative_says_what_to_do(kind):
    x, w = normal(4, 128), normal(128, 32, seed=1)
    options = {"blocks": {"block": 128}, "delayed": {"scaling": DelayedScaling.start()}}.get(kind, {})

    def loss(x):
        if kind == "groups":
            return jnp.square(quantized_grouped_dense(x, w[None], jnp.asarray([4]))).sum()
        return jnp.square(quantized_dense(x, w, **options)).sum()

    def penalty(x, inner):
        return jnp.square(jax.grad(loss)(inner(x))).sum() + loss(x)

    with pytest.raises(UnsupportedError, match=r"no second derivative, .* Use x @ w or grouped_matmul .*stop_gradient"):
        jax.grad(penalty)(x, lambda x: x)
    np.testing.assert_array_equal(jax.grad(penalty)(x, jax.lax.stop_gradient), jax.grad(loss)(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["current", "blocks", "delayed", "groups"])
def test_a_tangent_says_what_to_do(kind):
    x, w = normal(4, 128), normal(128, 32, seed=1)
    options = {"blocks": {"block": 128}, "delayed": {"scaling": DelayedScaling.start()}}.get(kind, {})

    def layer(x):
        if kind == "groups":
            return quantized_grouped_dense(x, w[None], jnp.asarray([4]))
        return quantized_dense(x, w, **options)

    for push in (
        lambda: jax.jvp(layer, (x,), (x,)),
        lambda: jax.jit(lambda x: jax.jvp(layer, (x,), (x,)))(x),
        lambda: jax.vmap(lambda t: jax.jvp(layer, (x,), (t,)))(x[None]),
        lambda: jax.vmap(lambda x: jax.jvp(jax.jit(layer), (x,), (x,)))(x[None]),
        lambda: jax.jacfwd(jax.jit(layer))(x),
    ):
        with pytest.raises(UnsupportedError, match=r"no tangents .*Use jax.grad, .* or x @ w or grouped_matmul"):
            push()
    expected = jax.grad(lambda x: jnp.square(layer(x)).sum())(x)
    for form in (layer, jax.jit(layer), jax.checkpoint(layer)):
        found = jax.grad(lambda x, form=form: jnp.square(jax.vmap(form)(x)).sum())(x[None])[0]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_a_trained_layer_with_blocks_follows_the_gradients_of_the_plain_one():
    x, w, target = normal(3, 8, 200), normal(200, 32, seed=1), normal(3, 8, 32, seed=2)
    x = x.at[0, 0, 0].set(1e4)  # an outlier, which would leave the other numbers of its row few digits in e5m2

    def gradients(layer):
        return jax.jit(jax.grad(lambda x, w: (layer(x, w) * target).sum(), (0, 1)))(x.astype(jnp.bfloat16), w)

    blocks = lambda x, w: quantized_dense(x, w, block=128)  # noqa: E731
    for actual, expected in zip(gradients(blocks), gradients(lambda x, w: x @ w), strict=True):
        assert actual.dtype == expected.dtype
        assert relative(actual.astype(jnp.float32), expected.astype(jnp.float32)) < 0.08
    squares = quantize(w, block=128, axis=(0, 1)).dequantize()
    assert relative(blocks(x, w), quantize(x, block=128).dequantize() @ squares) < 1e-5


@pytest.mark.slow
def test_a_trained_layer_learns():
    x, wanted, w = normal(64, 32), normal(32, 16, seed=1), jnp.zeros((32, 16))
    step = jax.jit(lambda w: w - 0.1 * jax.grad(lambda w: jnp.square(quantized_dense(x, w) - x @ wanted).sum() / 64)(w))
    for _ in range(150):
        w = step(w)
    assert jnp.linalg.norm(w - wanted) < 0.05 * jnp.linalg.norm(wanted)


# --- delayed scaling ---


def steps(x, w, target, count, **options):
    """Return the losses, gradients and histories of steps on rows that grow."""

    @jax.jit
    def step(x, w, scaling):
        loss = lambda x, w, scaling: jnp.square(quantized_dense(x, w, scaling=scaling, **options) - target).mean()  # noqa: E731
        return jax.value_and_grad(loss, (0, 1, 2))(x, w, scaling)

    scaling, found = DelayedScaling.start(3), []
    for number in range(count):
        loss, (dx, dw, scaling) = step(x * 2.0**number, w, scaling)
        found.append((loss, dx, dw, scaling))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("gradient_dtype", [E5M2, E4M3])
def test_the_gradient_of_a_history_is_the_next_history(gradient_dtype):
    x, w, target = normal(3, 8, 64), normal(64, 32, seed=1), normal(3, 8, 32, seed=2)
    found = steps(x, w, target, 5, gradient_dtype=gradient_dtype)
    largest = float(jnp.abs(x).max())
    last = found[-1][3]
    np.testing.assert_allclose(last.x, largest * np.array([16, 8, 4]), rtol=1e-6)
    np.testing.assert_allclose(last.w, jnp.abs(w).max(), rtol=1e-6)
    assert (last.gradient > 0).all()
    first = jax.grad(lambda x, w: jnp.square(x @ w - target).mean(), (0, 1))(x, w)
    # The first step scales by its own magnitudes.
    assert all(relative(a, b) < 0.1 for a, b in zip(found[0][1:3], first, strict=True))


@pytest.mark.slow
def test_numbers_beyond_the_history_are_clipped_and_infinity_stays_visible():
    x, w = jnp.ones((4, 16)), jnp.ones((16, 8))
    known = DelayedScaling(*(jnp.full(2, 1.0) for _ in range(3)))
    np.testing.assert_array_equal(quantized_dense(x * 3, w, scaling=known), quantized_dense(x, w, scaling=known))
    layer = lambda x, scaling: quantized_dense(x, w, scaling=scaling).sum()  # noqa: E731
    spoilt = x.at[1, 2].set(jnp.inf)
    out, following = jax.value_and_grad(layer, 1)(spoilt, known)
    assert jnp.isnan(out)
    np.testing.assert_array_equal(following.x, [0.0, 1.0])  # later steps scale by finite numbers


@pytest.mark.slow
def test_devices_of_a_shard_map_share_a_replicated_history():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": (P("data"), P(), P()), "out_specs": P("data")}
    w = normal(64, 32, seed=1)
    x = normal(2, 8, 64) * jnp.array([1.0, 4.0])[:, None, None]

    def run(layer):
        def two_steps(x):
            loss = lambda w, scaling: jnp.square(layer(x, w, scaling)).mean()  # noqa: E731
            scaling = jax.grad(loss, 1)(w, DelayedScaling.start(2))
            return layer(x, w, scaling), jax.grad(loss, (0, 1))(w, scaling)

        return jax.jit(jax.vmap(two_steps))(jnp.stack([x, x[::-1] * 0.5]))

    layer = lambda x, w, scaling: quantized_dense(x, w, scaling=scaling)  # noqa: E731
    expected, found = run(layer), run(jax.shard_map(layer, mesh=mesh, **specs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5), expected, found)


@pytest.mark.slow
def test_histories_of_layers_are_scanned_like_their_parameters():
    x, w = normal(8, 16), normal(3, 16, 16, seed=1)
    start = jax.tree.map(lambda a: jnp.stack([a] * 3), DelayedScaling.start(2))

    def loss(w, scaling):
        return jax.lax.scan(lambda h, p: (jnp.tanh(quantized_dense(h, p[0], scaling=p[1])), None), x, (w, scaling))[
            0
        ].sum()

    following = jax.grad(loss, 1)(w, start)
    np.testing.assert_allclose(following.w[:, 0], jnp.abs(w).max((1, 2)), rtol=1e-6)
    assert (following.x[:, 0] > 0).all()
    assert (following.gradient[:, 0] > 0).all()


# --- groups ---


@pytest.mark.slow
def test_a_trained_layer_of_groups_follows_the_gradients_of_the_plain_one():
    lhs, rhs, sizes = normal(24, 64), normal(3, 64, 32, seed=1), jnp.array([11, 0, 9])
    target = normal(24, 32, seed=2)

    def gradients(layer):
        return jax.grad(lambda lhs, rhs: jnp.square(layer(lhs, rhs, sizes) - target).mean(), (0, 1))(lhs, rhs)

    for actual, expected in zip(gradients(quantized_grouped_dense), gradients(grouped_matmul), strict=True):
        assert relative(actual, expected) < 0.08
    found = quantized_grouped_dense(lhs, rhs, sizes)
    expected = grouped_matmul(quantize(lhs).dequantize(), quantize(rhs, axis=1).dequantize(), sizes)
    assert relative(found, expected) < 1e-5
    with pytest.raises(ArgumentError, match="of the same dtype"):
        quantized_grouped_dense(lhs, rhs.astype("bfloat16"), sizes)


@pytest.mark.slow
def test_a_trained_layer_of_groups_with_blocks_has_three_products_in_8_bits():
    lhs, rhs, sizes = normal(200, 144), normal(3, 144, 64, seed=1), jnp.array([70, 0, 127])
    lhs = lhs.at[0, 0].set(1e4).at[199].set(jnp.nan)  # an outlier, and a row of no group
    target = normal(200, 64, seed=2)

    def gradients(layer):
        loss = lambda lhs, rhs: (layer(lhs, rhs, sizes) * target).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)

    blocks = lambda *args: quantized_grouped_dense(*args, block=128)  # noqa: E731
    for actual, expected in zip(gradients(blocks), gradients(grouped_matmul), strict=True):
        assert relative(actual, expected) < 0.08
    with pytest.raises(ArgumentError, match="block must be 128 or None"):
        quantized_grouped_dense(lhs, rhs, sizes, block=64)


@pytest.mark.slow
def test_the_gradient_of_matrices_takes_columns_in_groups():
    lhs, dout, sizes = normal(40, 24), normal(40, 16, seed=1), jnp.array([11, 0, 9])
    columns, gradients = (quantize_both(x, sizes)[1] for x in (lhs, dout))
    assert columns.shape == (24, 128 * 4)
    found = grouped_matmul_wgrad(columns, gradients, sizes, preferred_element_type="float32")
    assert relative(found, grouped_matmul_wgrad(lhs, dout, sizes)) < 0.08
    some = grouped_matmul_wgrad(columns, gradients, sizes, first_group=1, groups=2)
    np.testing.assert_allclose(some, found[1:], rtol=1e-2)
    squares = quantize_both(dout, sizes, square=True)[1]
    assert relative(grouped_matmul_wgrad(columns, squares, sizes, preferred_element_type="float32"), found) < 0.08
    for given, message in (
        ((lhs, gradients), "lhs must have blocks"),
        ((quantize(lhs.T), gradients), r"got blocks \(1, None\)"),
        ((squares, gradients), r"lhs must have blocks \(1, 128\)"),
        ((columns, quantize_both(dout)[1]), "with whole blocks of 128"),
    ):
        with pytest.raises(ArgumentError, match=message):
            grouped_matmul_wgrad(*given, sizes)
    with pytest.raises(UnsupportedError, match="has no gradient"):
        jax.grad(
            lambda scale: grouped_matmul_wgrad(Quantized(columns.values, scale, columns.block), gradients, sizes).sum()
        )(columns.scale)


# --- rejected arguments ---


@pytest.mark.slow
def test_rejected_arguments_of_a_trained_layer_are_named():
    for change, message in (
        ({"gradient_dtype": "bfloat16"}, "gradient_dtype must be one of"),
        ({"w": normal(2, 16, 4)}, "w a matrix"),
        ({"w": normal(8, 4)}, r"w a matrix \[k, n\]; got .*\[8, 4\]"),
        ({"x": jnp.ones((4, 16), "int32")}, r"x must be in bfloat16, float16, float32; got int32\[4, 16\]"),
        ({"w": jnp.ones((16, 4), "int8")}, r"w must be in bfloat16, float16, float32; got int8\[16, 4\]"),
        ({"implementation": "cudnn"}, "implementation must be one of"),
        ({"block": 64}, "block must be 128 or None"),
        ({"scaling": 16}, "scaling must be DelayedScaling or None, got 16"),
        (
            {"scaling": DelayedScaling(0.0, 0.0, 0.0)},
            "scaling.x must be a float32 vector of one or more steps, got float",
        ),
        ({"scaling": jax.tree.map(jnp.bfloat16, DelayedScaling.start())}, r"scaling.x must be .* got bfloat16\[16\]"),
        (
            {"scaling": DelayedScaling(jnp.ones(2), jnp.ones((2, 2)), jnp.ones(2))},
            r"scaling.w must be .*, got float32\[2, 2\]; use DelayedScaling.start\(\), and scan or index",
        ),
        (
            {"scaling": DelayedScaling(jnp.ones(2), jnp.ones(2), jnp.ones(0))},
            r"scaling.gradient must be .* float32\[0\]",
        ),
        ({"scaling": DelayedScaling.start(), "dtype": "int8"}, "must be float8_e4m3fn or float8_e5m2 with scaling"),
    ):
        call = {"x": normal(4, 16), "w": normal(16, 4)} | change
        with pytest.raises(ArgumentError, match=message):
            quantized_dense(call.pop("x"), call.pop("w"), **call)


@pytest.mark.parametrize("sizes", [None, "4", jnp.ones(2), jnp.ones((2, 1), jnp.int32), jnp.ones(3, jnp.int32)])
def test_rejected_sizes_of_groups_are_named(sizes):
    with pytest.raises(ArgumentError, match="group_sizes must be"):
        quantized_grouped_dense(normal(4, 16), normal(2, 16, 4), sizes)


@pytest.mark.parametrize("block", [None, 128])
def test_matrices_of_groups_with_another_k_are_named(block):
    with pytest.raises(ArgumentError, match=r"same k; got float32\[4, 16\] and float32\[2, 8, 4\]"):
        quantized_grouped_dense(normal(4, 16), normal(2, 8, 4), jnp.asarray([1, 3]), block=block)


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize(("rows", "inner"), [((0,), 32), ((2, 0), 32), ((3,), 0)])
def test_a_layer_without_rows_or_columns_has_gradients_of_zero(block, rows, inner):
    x, w = jnp.ones((*rows, inner)), jnp.ones((inner, 24))
    out, pull = jax.vjp(lambda x, w: quantized_dense(x, w, block=block), x, w)
    dx, dw = pull(jnp.ones_like(out))
    assert (out.shape, dx.shape, dw.shape) == ((*rows, 24), x.shape, w.shape)
    assert not out.any()
    assert not dw.any()
