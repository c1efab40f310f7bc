# SPDX-License-Identifier: Apache-2.0
"""8-bit numbers over meshes: blocks stay whole, layers train, and results do not depend on the sharding."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device

from ejkernel.modules import (
    Quantized,
    grouped_matmul,
    quantize,
    quantize_both,
    quantized_dense,
    quantized_grouped_dense,
    quantized_matmul,
)
from ejkernel.ops import ArgumentError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")]
KINDS = [AxisType.Auto, AxisType.Explicit]


def normal(*shape, seed=0, dtype=jnp.bfloat16):
    return on_device(np.random.default_rng(seed).standard_normal(shape), dtype)


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)


def placed(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def near(actual, expected, tolerance):
    assert actual.shape == expected.shape
    actual, expected = (np.asarray(each, np.float32) for each in (actual, expected))
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("columns", [128, 512, 640])
def test_activations_in_8_bits_are_split_by_whole_blocks(columns):
    mesh = jax.make_mesh((8,), ("b",), axis_types=(AxisType.Auto,))
    x8, w = quantize(normal(16, 256)), quantize(normal(columns, 256, seed=1))
    run = lambda x8, w8: quantized_matmul(x8, w8, gate=w8, activation="silu", transpose_w=True, quantize="int8")  # noqa: E731
    w8 = Quantized(placed(mesh, w.values, "b"), placed(mesh, w.scale, "b"), w.block)
    near(jax.jit(run)(x8, w8).dequantize(), run(x8, w).dequantize(), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("square", [False, True])
def test_rows_and_columns_in_8_bits_are_split_by_whole_blocks(kind, square):
    mesh, x = mesh_of(kind), normal(512, 1024)
    for spec in (("a", None), (None, "b"), ("b", "a")):
        found = jax.jit(lambda x: quantize_both(x, square=square))(placed(mesh, x, *spec))
        for array, own in zip(found, (spec, spec[::-1]), strict=True):  # no device has the whole array
            assert array.values.sharding.is_equivalent_to(NamedSharding(mesh, P(*own)), 2)
        for actual, expected in zip(
            jax.tree.leaves(found), jax.tree.leaves(quantize_both(x, square=square)), strict=True
        ):
            near(actual, expected, 0.0)


@pytest.mark.parametrize("spec", [("a", None), (None, "b"), ("a", "b")])
@pytest.mark.parametrize(
    "options", [{"block": 128, "axis": (0, 1)}, {"block": 64}, {"axis": 0}, {"axis": None}], ids=str
)
@pytest.mark.parametrize("entered", [False, True], ids=["", "set_mesh"])
def test_quantize_takes_arrays_over_explicit_axes(spec, options, entered):
    w, mesh = normal(512, 1024), mesh_of(AxisType.Explicit)
    expected = quantize(w, **options)
    with jax.set_mesh(mesh) if entered else contextlib.nullcontext():
        found = quantize(placed(mesh, w, *spec), **options)
        wide = found.dequantize()
    near(found.values, expected.values, 0.0)
    near(wide, expected.dequantize(), 0.0)


def test_quantize_refuses_explicit_shards_that_cut_a_block():
    x = placed(mesh_of(AxisType.Explicit), normal(8, 1024), None, "b")
    with pytest.raises(
        ArgumentError, match="over 'b' into shards of 256, and blocks have 96: a shard must begin and end with a block"
    ):
        quantize(x, block=96)


def test_matmuls_refuse_explicit_shards_that_cut_a_block():
    """The last block is shorter, so the scales of all blocks are on each device."""
    mesh, x, w = mesh_of(AxisType.Explicit), quantize(normal(8, 1024), block=96), quantize(normal(16, 1024, seed=1))
    x8 = Quantized(placed(mesh, x.values, None, "b"), placed(mesh, x.scale), x.block)
    stacked = jax.tree.map(lambda array: jnp.stack([array, array]), w)
    refused = r"over 'b', but here it cannot be split: .* a shard must begin and end with a block"
    with pytest.raises(ArgumentError, match=refused):
        quantized_matmul(x8, w, transpose_w=True)
    with pytest.raises(ArgumentError, match=refused):
        grouped_matmul(x8, stacked, jnp.asarray([3, 5]), transpose_rhs=True)


@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_rows_in_16_bits_split_by_rows_and_columns(kind):
    x, factors, mesh = normal(16, 256, dtype=jnp.float32), normal(16, seed=3), mesh_of(kind)
    w, gate = (quantize(normal(256, 256, seed=seed), block=64, axis=(0, 1)) for seed in (1, 2))

    def loss(x, w, gate, factors):
        out = quantized_matmul(x, w, activation="silu", gate=gate, row_scale=factors, transpose_w=True)
        return jnp.sin(out).sum()

    run = jax.jit(jax.value_and_grad(loss, (0, 3)))
    matrices = [Quantized(*(placed(mesh, each, "b") for each in (a.values, a.scale)), a.block) for a in (w, gate)]
    found = run(placed(mesh, x, "a"), *matrices, placed(mesh, factors, "a"))
    for actual, expected in zip(jax.tree.leaves(found), jax.tree.leaves(run(x, w, gate, factors)), strict=True):
        near(actual, expected, 0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_experts_stay_on_their_devices(kind):
    x, factors, mesh = normal(16, 256, dtype=jnp.float32), normal(16, seed=3), mesh_of(kind)
    w, gate = (quantize(normal(4, 256, 256, seed=seed), block=64, axis=(1, 2)) for seed in (1, 2))
    sizes = jnp.asarray([5, 0, 9, 1], jnp.int32)

    def loss(x, w, gate, factors):
        how = {"activation": "silu", "gate": gate, "row_scale": factors, "transpose_rhs": True}
        return jnp.sin(grouped_matmul(x, w, sizes, **how)).sum()

    run = jax.jit(jax.value_and_grad(loss, (0, 3)))
    args = (x, *(jax.tree.map(lambda a: placed(mesh, a, "b"), each) for each in (w, gate)), factors)
    assert "all-gather" not in run.lower(*args).compile().as_text()
    for actual, expected in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(run(x, w, gate, factors)), strict=True):
        near(actual, expected, 0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("groups", [0, 2])
def test_layers_train_with_sharded_rows_and_matrices(kind, block, groups):
    mesh, x, target = mesh_of(kind), normal(512, 256), normal(512, 128, seed=2)
    w = normal(groups, 256, 128, seed=1) if groups else normal(256, 128, seed=1)
    sizes = jnp.asarray([200, 300], jnp.int32)

    def loss(x, w):
        layer = quantized_grouped_dense(x, w, sizes, block=block) if groups else quantized_dense(x, w, block=block)
        return (layer * target).astype(jnp.float32).sum()

    # Columns in groups need all rows.
    rows, matrix = ((None, "a"), (None, "a")) if groups else (("b", None), ("a", None))
    found = jax.jit(jax.grad(loss, (0, 1)))(placed(mesh, x, *rows), placed(mesh, w, *matrix))
    for actual, expected in zip(found, jax.jit(jax.grad(loss, (0, 1)))(x, w), strict=True):
        near(actual, expected, 0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [None, 128])
def test_layers_train_inside_shard_map_with_the_same_matrix_on_all_devices(kind, block):
    mesh, x, w = mesh_of(kind), normal(256, 256), normal(256, 128, seed=1)

    def loss(x, w):
        return jnp.square(quantized_dense(x, w, block=block).astype(jnp.float32)).sum()

    def gradients(x, w):
        return jax.grad(lambda x, w: jax.lax.psum(loss(x, w), "a"), (0, 1))(x, w)

    specs = {"in_specs": (P("a"), P()), "out_specs": (P("a"), P())}
    found = jax.jit(jax.shard_map(gradients, mesh=mesh, **specs))(placed(mesh, x, "a"), placed(mesh, w))
    for actual, expected in zip(found, jax.jit(jax.grad(loss, (0, 1)))(x, w), strict=True):
        near(actual, expected, 0.08)  # a column's scale is that of a shard's rows
