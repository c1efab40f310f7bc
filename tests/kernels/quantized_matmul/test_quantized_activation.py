# SPDX-License-Identifier: Apache-2.0
"""Activations of 8-bit products, in 8 bits or wide: the kernel for Hopper, simulated on a CPU, and arguments."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import on_device

from ejkernel.kernels.quantized_matmul.grouped.activation import quantized_grouped_activation
from ejkernel.kernels.quantized_matmul.mosaic_gpu import launch
from ejkernel.kernels.quantized_matmul.mosaic_gpu.activation import MosaicGpuActivation
from ejkernel.kernels.quantized_matmul.mosaic_gpu.plan import MosaicGpuParams
from ejkernel.kernels.quantized_matmul.quantized import Quantized
from ejkernel.modules import grouped_matmul, quantize, quantized_matmul
from ejkernel.ops import ArgumentError, UnsupportedError

E4M3 = "float8_e4m3fn"
SQUARES = {"block": 128, "axis": (-2, -1)}


def operands(m, n, k, groups, *, blocks=False, dtype=E4M3, gated=True):
    """Return quantised rows, matrices, and the gate's if there is one."""
    rng = np.random.default_rng(0)
    shapes = (m, k), *[(groups, n, k)] * (1 + gated)
    x, *matrices = (on_device(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    rows = jax.jit(lambda x: quantize(x, dtype=dtype, **({"block": 128} if blocks else {})))(x)
    own = jax.jit(lambda w: quantize(w, dtype=dtype, **(SQUARES if blocks else {})))
    return rows, *(own(w) for w in matrices)


def described(x, w, *gate, sizes, factors=None, quantize=E4M3, **options):
    """Return the canonical arguments, the options and the call."""
    args, options = quantized_grouped_activation.prepare(
        *(x.values, w.values, jnp.asarray(sizes, jnp.int32), x.scale, w.scale),
        (gate[0].values, gate[0].scale) if gate else None,
        factors,
        quantize=quantize,
        lhs_block=x.block,
        rhs_block=w.block,
        transpose_rhs=True,
        **options,
    )
    del options["implementation"]
    return args, options, quantized_grouped_activation.describe(*args, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "sizes", "made", "options", "races"),
    [
        ((140, 200, 256), (0, 3, 130, 1), {}, {"activation": "silu"}, False),
        ((140, 136, 384), (0, 3, 130, 1), {"blocks": True}, {"activation": "gelu"}, False),
        ((140, 200, 128), (70, 60), {"gated": False}, {"activation": "relu2", "quantize": "float8_e5m2"}, False),
        ((24, 72, 128), (3, 9), {"dtype": "int8"}, {}, False),
        # Whole tiles: rows that two tiles share are written twice, with the same bits.
        ((192, 72, 256), (128, 50), {"blocks": True}, {"activation": "silu"}, True),
    ],
    ids=["gated", "blocks", "no gate", "int8, no activation", "races"],
)
def test_simulated_activations_match_the_reference(mosaic, shape, sizes, made, options, races):
    args, options, call = described(*operands(*shape, len(sizes), **made), sizes=sizes, **options)
    params, interpret = MosaicGpuActivation().heuristic(call), mosaic.InterpretGPUParams(detect_races=races)
    found = jax.jit(lambda *args: launch.grouped_activation(call, args, params, interpret=interpret))(*args)
    expected = jax.jit(lambda *args: quantized_grouped_activation.reference(*args, **options))(*args)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    # A number halfway between two others may be rounded to either.
    assert found[0].dtype == call.values
    ours, theirs = (np.asarray(values[0]).astype(np.float32) for values in (found, expected))
    assert np.mean(ours != theirs) < 1e-3
    assert not np.any(ours[sum(sizes) :])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "sizes", "made", "options", "factored", "races"),
    [
        pytest.param(
            (140, 200, 256), (0, 3, 130, 1), {}, {"activation": "silu"}, False, False, marks=pytest.mark.whole
        ),  # the other cases have all of it
        ((140, 136, 384), (0, 3, 130, 1), {"blocks": True}, {"preferred_element_type": "float32"}, True, False),
        ((140, 200, 128), (70, 60), {"gated": False}, {"activation": "gelu"}, True, False),
        ((192, 72, 256), (128, 50), {"blocks": True, "gated": False}, {"activation": "relu2"}, True, True),
        ((192, 72, 256), (128, 50), {}, {"activation": "silu"}, True, True),
    ],
    ids=["gated", "blocks, gated, factors", "factors", "races of blocks", "races"],
)
def test_simulated_wide_activations_match_the_reference(mosaic, shape, sizes, made, options, factored, races):
    factors = jnp.linspace(-1, 2, shape[0]) if factored else None
    given = operands(*shape, len(sizes), **made)
    args, options, call = described(*given, sizes=sizes, factors=factors, quantize=None, **options)
    params, interpret = MosaicGpuActivation().heuristic(call), mosaic.InterpretGPUParams(detect_races=races)
    [found] = jax.jit(lambda *args: launch.grouped_activation(call, args, params, interpret=interpret))(*args)
    expected = jax.jit(lambda *args: quantized_grouped_activation.reference(*args, **options))(*args)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(*(np.asarray(each, np.float32) for each in (found, expected)), rtol=0.01, atol=0.01)
    assert not np.any(np.asarray(found, np.float32)[sum(sizes) :])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        ({}, {"quantize": "int8"}, "quantize is int8"),
        ({"blocks": True, "thin": True}, {}, r"blocks \(1, 128\)"),
        ({"wide": True}, {"quantize": "float8_e4m3fn"}, "needs 8-bit rows"),
    ],
)
def test_calls_that_the_kernel_does_not_run_are_refused_with_an_alternative(monkeypatch, made, options, message):
    from ejkernel.kernels import _hopper

    monkeypatch.setattr(_hopper, "unavailable", lambda *_: None)
    thin, wide = (made.pop(name, False) for name in ("thin", "wide"))
    x, w, gate = operands(16, 128, 256, 1, **made)
    if thin:
        w, gate = (quantize(each.dequantize(), block=128) for each in (w, gate))
    call = described(x, w, gate, sizes=(16,), **options)[2]
    if wide:
        call = dataclasses.replace(call, dtype="bfloat16", lhs_block=None)
    assert message.replace("\\", "") in (MosaicGpuActivation().unsupported(call) or "")


@pytest.mark.slow
def test_a_refusal_has_the_names_of_arguments_of_both_functions_that_have_epilogues(monkeypatch):
    from ejkernel.kernels import _hopper

    monkeypatch.setattr(_hopper, "unavailable", lambda *_: None)
    x, w, _ = operands(16, 128, 256, 1)
    of_rows = Quantized(w.values[0].T, w.scale[0].T, (None, 1))
    with pytest.raises(UnsupportedError, match=r"rhs \(w\) is \[k, n\]; .* with transpose_rhs \(transpose_w\)=True"):
        quantized_matmul(x, of_rows, activation="silu", implementation="mosaic_gpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"block_n": 256}, "block_n one of"),
        ({"block_n": 128, "stages": 3, "out_slots": 2}, "out_slots must divide 1"),
        ({"block_n": 128, "out_slots": 1, "stages": 12}, "shared memory"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(params, message):
    call = described(*operands(16, 128, 256, 1), sizes=(16,))[2]
    assert message in MosaicGpuActivation().params_fault(call, MosaicGpuParams(**params))


@pytest.mark.slow
def test_the_dense_activation_is_that_of_one_group():
    x, w, gate = operands(6, 40, 256, 1, blocks=True)
    sizes = jnp.asarray([6], jnp.int32)
    expected = grouped_matmul(x, w, sizes, activation="silu", gate=gate, transpose_rhs=True, quantize=E4M3)
    rows = Quantized(x.values.reshape(2, 3, -1), x.scale.reshape(2, 3, -1), (1, 1, 128))
    matrices = [Quantized(each.values[0], each.scale[0], each.block[1:]) for each in (w, gate)]
    how = {"activation": "silu", "transpose_w": True, "quantize": E4M3}
    found = quantized_matmul(rows, matrices[0], gate=matrices[1], **how)
    assert found.values.shape == (2, 3, 40)
    assert found.block == (1, 1, 128)
    np.testing.assert_array_equal(found.dequantize().reshape(6, 40), expected.dequantize())
    by_arrays = quantized_matmul(rows.values.reshape(6, -1), matrices[0], x_scale=x.scale, gate=matrices[1], **how)
    np.testing.assert_array_equal(by_arrays.dequantize(), expected.dequantize())
    wide = [np.asarray(x.dequantize()) @ np.asarray(each.dequantize())[0].T for each in (w, gate)]
    wanted = wide[0] / (1 + np.exp(-wide[0])) * wide[1]
    assert np.linalg.norm(expected.dequantize() - wanted) < 0.03 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_wide_activations_follow_the_plain_ones():
    x, w, gate = operands(6, 40, 256, 2)
    sizes, factors = jnp.asarray([2, 3], jnp.int32), jnp.linspace(1, 2, 6)
    how = {"activation": "gelu", "gate": gate, "row_scale": factors, "transpose_rhs": True}
    found = grouped_matmul(x, w, sizes, **how)
    how["gate"] = gate.dequantize()
    expected = grouped_matmul(x.dequantize(), w.dequantize(), sizes, **how)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=0.01, atol=0.02)
    matrices = [Quantized(each.values[1], each.scale[1], each.block[1:]) for each in (w, gate)]
    rows = jax.tree.map(lambda a: a[2:5].reshape(1, 3, -1), x)
    dense = quantized_matmul(
        Quantized(rows.values, rows.scale, x.block), matrices[0], gate=matrices[1], activation="gelu", transpose_w=True
    )
    np.testing.assert_allclose(dense[0] * factors[2:5, None], found[2:5], rtol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True], ids=["no gate", "gated"])
@pytest.mark.parametrize("wide", ["lhs", "rhs"])
def test_one_operand_without_scales_has_a_gradient(wide, gated):
    x, w, gate = operands(6, 40, 128, 2)
    sizes, factors = jnp.asarray([2, 3], jnp.int32), jnp.linspace(1, 2, 6)
    rows, matrices = x.dequantize(), (w.dequantize(), gate.dequantize())
    given = (rows, factors) if wide == "lhs" else (matrices, factors)

    def ours(own, factors):
        lhs, (rhs, other) = (own, (w, gate)) if wide == "lhs" else (x, own)
        return one(lhs, rhs, other, factors)

    def plain(own, factors):
        lhs, (rhs, other) = (own, matrices) if wide == "lhs" else (rows, own)
        return one(lhs, rhs, other, factors)

    def one(lhs, rhs, other, factors):
        options = {"activation": "silu", "gate": other if gated else None, "row_scale": factors, "transpose_rhs": True}
        return grouped_matmul(lhs, rhs, sizes, **options)

    def with_gradients(run):
        both = jax.jit(lambda *a: (run(*a), jax.grad(lambda *a: jnp.sin(run(*a)).sum(), (0, 1))(*a)))
        return jax.tree.leaves(both(*given))

    for found, expected in zip(with_gradients(ours), with_gradients(plain), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, atol=1e-4 * float(jnp.abs(expected).max()), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"activation": "silu"}, {"row_scale": jnp.full(6, 3.0)}], ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "groups"])
@pytest.mark.parametrize("wide", ["lhs", "rhs"])
def test_gradients_beyond_the_range_of_float16_are_scaled_into_it(wide, grouped, options):
    x, w = operands(6, 40, 128, 2, gated=False)
    x, w = (Quantized(each.values, 1e-3 * each.scale, each.block) for each in (x, w))
    w = w if grouped else Quantized(w.values[0], w.scale[0], w.block[1:])
    own, other, dout = *((x, w) if wide == "lhs" else (w, x)), jnp.full((6, 40), 2e5)

    def gradient(other, dtype):
        def run(own):
            lhs, rhs = (own, other) if wide == "lhs" else (other, own)
            how = options | {"preferred_element_type": "float32"}
            if grouped:
                return grouped_matmul(lhs, rhs, jnp.asarray([2, 3]), transpose_rhs=True, **how)
            return quantized_matmul(lhs, rhs, transpose_w=True, **how)

        return jax.jit(lambda own: jax.vjp(run, own.dequantize().astype(dtype))[1](dout)[0])(own)

    found, expected = gradient(other, "float16"), gradient(other, "float32")
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=2e-3 * float(jnp.abs(expected).max()))


X, W, GATE = operands(4, 8, 128, 1)
MATRIX = Quantized(W.values[0], W.scale[0], W.block[1:])
DENSE = MATRIX.dequantize()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantized_matmul(X.dequantize(), DENSE, transpose_w=True, gate=DENSE), "x or w must .* to pass gate="),
        (lambda: quantized_matmul(X, DENSE, transpose_w=True, gate=MATRIX), "gate must be an array like w"),
        (lambda: quantized_matmul(X, DENSE, transpose_w=True, gate=DENSE[:4]), r"gate must .* like w, float32\[8"),
        (lambda: quantized_matmul(X, DENSE, transpose_w=True, gate=W.dequantize()), r"gate must .* got float32\[1, 8"),
        (lambda: quantized_matmul(X.dequantize(), MATRIX, x_scale=X.scale, activation="silu"), "x_scale must be None"),
        (lambda: quantized_matmul(X.dequantize(), MATRIX, activation="silu"), r"x must .*; pass transpose_w=True"),
        (lambda: quantized_matmul(None, MATRIX, row_scale=jnp.ones(4)), "x must be Quantized, .* got NoneType"),
        (lambda: quantized_matmul(X, W, activation="silu"), r"w a matrix; got .*\[1, 8, 128\]"),
        (lambda: quantized_matmul(X, jax.tree.map(lambda _: None, MATRIX), activation="silu"), r"w\.values must"),
        (lambda: grouped(X, GATE, quantize=None, transpose_rhs=False), "; pass transpose_rhs=True"),
        (lambda: quantized_matmul(X, MATRIX, quantize=E4M3, preferred_element_type="float32"), "must be None with"),
        (lambda: quantized_matmul(X.dequantize(), MATRIX, transpose_w=True, quantize=E4M3), "must be in 8 bits"),
        (lambda: quantized_matmul(X, MATRIX, transpose_w=True, gate=jnp.ones((8, 128))), "gate must be Quantized"),
        (
            lambda: quantized_matmul(X, MATRIX, transpose_w=True, gate=quantize(DENSE, dtype="int8")),
            r"gate must be Quantized like w, float8.* with scales .*; got int8",
        ),
        (
            lambda: quantized_matmul(X, MATRIX, transpose_w=True, gate=quantize(DENSE, axis=(0, 1))),
            r"gate must be Quantized like w, .* of blocks .*; got .* of blocks \(None, None\)",
        ),
        (lambda: grouped(X, W, activation="sillu"), "did you mean 'silu'"),
        (lambda: grouped(X, W, quantize="int4"), "quantize must be one of"),
        (lambda: grouped(X, W, row_scale=jnp.ones(4)), "row_scale must be None with quantize"),
        (lambda: grouped(X.dequantize(), W), "must both be Quantized"),
        (lambda: grouped(X, W, gate=jax.tree.map(lambda a: a[:, :4], GATE)), "gate must be Quantized like rhs"),
        (lambda: grouped(X, W, gate=quantize(GATE.dequantize(), axis=(1, 2))), "gate must be Quantized like rhs, in"),
        (lambda: grouped(X, W, quantize=None, gate=GATE, precision="highest"), "precision must be None"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def grouped(x, w, **options):
    return grouped_matmul(x, w, jnp.asarray([4]), **{"transpose_rhs": True, "quantize": E4M3, **options})


def test_a_gradient_is_refused():
    def loss(scale):
        return grouped(Quantized(X.values, scale, X.block), W).scale.sum()

    with pytest.raises(UnsupportedError, match="no gradient"):
        jax.grad(loss)(X.scale)
