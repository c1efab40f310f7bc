# SPDX-License-Identifier: Apache-2.0
"""`grouped_matmul` with quantised operands: splits over a mesh, foreign numbers, and rejected arguments."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device, ones

from ejkernel.modules import QuantizedGroupedMatmul, grouped_matmul, quantize
from ejkernel.ops import ArgumentError, Invocation, UnsupportedError

SIZES = jnp.array([3, 0, 6, 5])
WIDE = ones((16, 256)), ones((4, 128, 256))


def normal(*shape, seed=0):
    return on_device(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def operands(kind):
    lhs, rhs = normal(16, 256), normal(4, 128, 256, seed=1)
    if kind == "blocks":
        return quantize(lhs, block=128), quantize(rhs, block=(64, 128), axis=(1, 2))
    return quantize(lhs), quantize(rhs)


def plain(lhs, rhs, **options):
    return grouped_matmul(lhs.dequantize(), rhs.dequantize(), SIZES, transpose_rhs=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [("m", None, None, "k"), (None, "g", "m", None), ("m", "g", None, None)])
@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_calls_over_a_mesh_split_by_rows_groups_columns_and_k(spec, kind):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((2, 2, 2), ("m", "g", "k"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    rows, groups, columns, inner = spec
    lhs, rhs = operands(kind)
    of_lhs, of_rhs = (rows, inner), (groups, columns, inner)

    def placed(array, axes):
        put = lambda a: jax.device_put(a, NamedSharding(mesh, P(*axes)))  # noqa: E731
        of_scale = [axis if size > 1 else None for axis, size in zip(axes, array.scale.shape, strict=True)]
        scale = jax.device_put(array.scale, NamedSharding(mesh, P(*of_scale)))
        return type(array)(put(array.values), scale, array.block)

    run = jax.jit(lambda l, r, s: grouped_matmul(l, r, s, transpose_rhs=True, preferred_element_type="float32"))  # noqa: E741
    found = run(placed(lhs, of_lhs), placed(rhs, of_rhs), SIZES)
    np.testing.assert_allclose(found, plain(lhs, rhs), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_rows_outside_all_groups_and_other_groups_have_no_effect():
    lhs, rhs = normal(16, 256).at[3].set(jnp.nan), normal(4, 128, 256, seed=1)
    lhs = lhs.at[14:].set(jnp.inf)  # rows 14 and 15 belong to no group
    found = grouped_matmul(quantize(lhs), quantize(rhs), SIZES, transpose_rhs=True)
    assert jnp.isnan(found[3]).all()
    assert jnp.isfinite(found[jnp.array([0, 1, 2, *range(4, 16)])]).all()
    assert (found[14:] == 0).all()


@pytest.mark.slow
def test_a_qwix_array_and_factors_of_rows():
    lhs, rhs = operands("rows")
    array = types.SimpleNamespace(qvalue=rhs.values, scale=rhs.scale, zero_point=None)
    factors = normal(16)
    found = grouped_matmul(lhs, array, SIZES, row_scale=factors, transpose_rhs=True, preferred_element_type="float32")
    np.testing.assert_allclose(found, plain(lhs, rhs, row_scale=factors), rtol=1e-4, atol=1e-4)

    def total(product, factors):
        return jnp.sin(product(factors)).sum()

    ours = lambda f: grouped_matmul(  # noqa: E731
        lhs, rhs, SIZES, row_scale=f, transpose_rhs=True, preferred_element_type="float32"
    )
    gradients = [jax.grad(lambda f, p=p: total(p, f))(factors) for p in (ours, lambda f: plain(lhs, rhs, row_scale=f))]
    np.testing.assert_allclose(*gradients, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: {"activation": "tanh"}, "activation must be one of .* got 'tanh'"),
        (lambda: {"gate": jnp.ones((4, 128, 256))}, "gate must be Quantized like rhs, in blocks"),
        (lambda: {"precision": "highest"}, "precision must be None"),
        (
            lambda: {"lhs": jnp.ones((16, 256), "float8_e4m3fn")},
            "or in float8_e4m3fn, float8_e5m2, int8 inside Quantized|must be Quantized",
        ),
        (lambda: {"accumulation": "slow"}, "accumulation must be one of exact, fast"),
        (lambda: {"transpose_rhs": False}, "lhs and rhs must have one k"),
        (lambda: {"lhs": quantize(jnp.ones((2, 16, 256)))}, r"lhs must be \[m, k\]"),
        (
            lambda: {"lhs": jnp.ones((16, 256)), "rhs": jnp.ones((4, 128, 256)), "accumulation": "fast"},
            "for quantised operands",
        ),
    ],
)
def test_rejected_arguments_are_named(change, message):
    lhs, rhs = operands("rows")
    given = {"lhs": lhs, "rhs": rhs, "group_sizes": SIZES, "transpose_rhs": True} | change()
    with pytest.raises(ArgumentError, match=message):
        grouped_matmul(**given)


@pytest.mark.slow
def test_a_gate_may_be_stacked_where_the_matrices_are_not():
    lhs, rhs = operands("rows")
    apart = [quantize(matrix.dequantize()) for matrix in (jax.tree.map(lambda a, i=i: a[i], rhs) for i in range(4))]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *apart)
    assert stacked.block != rhs.block
    runs = [
        grouped_matmul(lhs, w, SIZES, gate=gate, transpose_rhs=True) for w, gate in ((rhs, stacked), (stacked, rhs))
    ]
    np.testing.assert_array_equal(*runs)


def test_differentiating_a_quantised_operand_raises():
    with pytest.raises(UnsupportedError, match="quantize has no gradient"):
        jax.grad(lambda w: grouped_matmul(normal(16, 256), quantize(w), SIZES, transpose_rhs=True).sum())(
            normal(4, 128, 256)
        )


@pytest.mark.slow
def test_examples_are_quantised_as_the_call_is():
    lhs, rhs = operands("blocks")
    operation = QuantizedGroupedMatmul()
    args = (lhs.values, rhs.values, SIZES, lhs.scale, rhs.scale)
    args, options = operation.prepare(*args, lhs_block=lhs.block, rhs_block=rhs.block, transpose_rhs=True)
    inv = Invocation(kernel=operation, args=args, kwargs=options, device="cpu:some")
    for drawn, _ in operation.example_draws(inv, np.random.default_rng(0)).values():
        assert [(x.shape, x.dtype) for x in drawn] == [(x.shape, x.dtype) for x in args]
        assert (drawn[3] > 0).all()
        assert int(drawn[2].sum()) == 16
