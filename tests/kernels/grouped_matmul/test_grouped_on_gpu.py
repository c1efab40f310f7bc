# SPDX-License-Identifier: Apache-2.0
"""Our grouped products on a Hopper GPU: each layout compiled once, and run with all hostile sizes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.grouped_matmul import by_numpy, made_of_products

from ejkernel.kernels.grouped_matmul.mosaic_gpu import launch
from ejkernel.kernels.grouped_matmul.mosaic_gpu.implementation import MosaicGpu, MosaicGpuWgrad
from ejkernel.kernels.grouped_matmul.mosaic_gpu.plan import ProductParams, WgradParams
from ejkernel.kernels.grouped_matmul.operation import grouped_matmul, grouped_matmul_wgrad
from ejkernel.modules import grouped_matmul as product

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROWS, GROUPS, K, N = 3001, 12, 520, 712
SIZES_OF_ALL = (jax.ShapeDtypeStruct((GROUPS,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32))
SHARED = (
    {},
    {"panel": 3, "stages": 3, "out_slots": 4},
    {"block_n": 128, "stages": 6},
    {"block_n": 192, "out_slots": 3},
)


def sizes_of(rng):
    """Return hostile sizes of twelve groups."""
    uneven = rng.integers(0, 500, GROUPS)
    yield uneven * (ROWS - 5) // uneven.sum()
    yield np.eye(GROUPS, dtype=int)[7] * ROWS
    yield np.ones(GROUPS, int)
    yield np.zeros(GROUPS, int)
    yield np.array([0] * 5 + [127, 0, 1, 64, 0, 0, 129])
    yield np.full(GROUPS, 900)
    yield np.array([-3, 70, 0, -9] * 3)
    yield np.full(GROUPS, 250)


def check(run, expected, arrays):
    for sizes in sizes_of(np.random.default_rng(3)):
        args = (*arrays(sizes), jnp.asarray(sizes, jnp.int32))
        found = run(*args)
        by_numpy.assert_near(expected(sizes), found)
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(run(*args), np.float32))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtypes", [("bfloat16", None), ("float16", "float32")], ids=["bfloat16", "float16 to float32"])
@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["as it is", "transposed"])
@pytest.mark.parametrize("params", [*SHARED, {"block_m": 256, "block_n": 128, "stages": 3}], ids=str)
def test_products_are_right_and_repeat(transpose_rhs, params, dtypes):
    lhs = by_numpy.normal(ROWS, K, dtype=dtypes[0])
    rhs = by_numpy.normal(GROUPS, *((N, K) if transpose_rhs else (K, N)), seed=1, dtype=dtypes[0])
    options = {"transpose_rhs": transpose_rhs} | ({"preferred_element_type": dtypes[1]} if dtypes[1] else {})
    call = grouped_matmul.describe(lhs, rhs, jax.ShapeDtypeStruct((GROUPS,), jnp.int32), **options)
    chosen = ProductParams(**params)
    if fault := MosaicGpu().params_fault(call, chosen):
        pytest.skip(fault)
    check(
        jax.jit(lambda *args: launch.product(call, args, chosen)),
        lambda sizes: by_numpy.product(lhs, rhs, sizes, transpose_rhs=transpose_rhs),
        lambda sizes: (by_numpy.with_nan_behind(lhs, sizes), rhs),
    )


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("columns", [1408, 2048 - 64])
def test_odd_groups_leave_the_next_one_alone_where_the_last_tile_is_wider_than_the_columns(columns):
    lhs, rhs = by_numpy.normal(ROWS, K), by_numpy.normal(GROUPS, K, columns, seed=1)
    call = grouped_matmul.describe(lhs, rhs, jax.ShapeDtypeStruct((GROUPS,), jnp.int32))
    chosen = ProductParams(block_n=256)
    check(
        jax.jit(lambda *args: launch.product(call, args, chosen)),
        lambda sizes: by_numpy.product(lhs, rhs, sizes),
        lambda sizes: (by_numpy.with_nan_behind(lhs, sizes), rhs),
    )


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtypes", [("bfloat16", None), ("float16", "float32")], ids=["bfloat16", "float16 to float32"])
@pytest.mark.parametrize(
    "params", [*SHARED, {"block_k": 256, "block_n": 128, "stages": 3}, {"largest_first": True, "snake": True}], ids=str
)
def test_weights_gradients_are_right_and_repeat(params, dtypes):
    lhs, rhs = by_numpy.normal(ROWS, K, dtype=dtypes[0]), by_numpy.normal(ROWS, N, seed=1, dtype=dtypes[0])
    options = {"preferred_element_type": dtypes[1]} if dtypes[1] else {}
    call = grouped_matmul_wgrad.describe(lhs, rhs, jax.ShapeDtypeStruct((GROUPS,), jnp.int32), **options)
    chosen = WgradParams(**params)
    if fault := MosaicGpuWgrad().params_fault(call, chosen):
        pytest.skip(fault)
    check(
        jax.jit(lambda *args: launch.weights_gradient(call, args, chosen)),
        lambda sizes: by_numpy.weights_gradient(lhs, rhs, sizes),
        lambda sizes: tuple(by_numpy.with_nan_behind(x, sizes) for x in (lhs, rhs)),
    )


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("own", [slice(0, 5), slice(5, 8), slice(8, 12)], ids=str)
@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["as it is", "transposed"])
def test_a_range_of_groups_is_right_and_repeats_with_garbage_in_other_groups(transpose_rhs, own):
    lhs = by_numpy.normal(ROWS, K)
    rhs = by_numpy.normal(GROUPS, *((N, K) if transpose_rhs else (K, N)), seed=1)
    call = grouped_matmul.describe(lhs, rhs[own], SIZES_OF_ALL, transpose_rhs=transpose_rhs)
    first, params = jnp.int32(own.start), MosaicGpu().heuristic(call)
    check(
        jax.jit(lambda lhs, rhs, sizes: launch.product(call, (lhs, rhs, (sizes, first)), params)),
        lambda sizes: by_numpy.product(lhs, by_numpy.only(own, rhs), sizes, transpose_rhs=transpose_rhs),
        lambda sizes: (by_numpy.with_nan_outside(lhs, sizes, own), rhs[own]),
    )


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("own", [slice(0, 5), slice(5, 8), slice(8, 12)], ids=str)
def test_weights_gradients_of_some_of_the_groups_are_right_and_repeat(own):
    lhs, rhs = by_numpy.normal(ROWS, K), by_numpy.normal(ROWS, N, seed=1)
    call = grouped_matmul_wgrad.describe(lhs, rhs, SIZES_OF_ALL, groups=own.stop - own.start)
    first, params = jnp.int32(own.start), MosaicGpuWgrad().heuristic(call)
    check(
        jax.jit(lambda lhs, rhs, sizes: launch.weights_gradient(call, (lhs, rhs, (sizes, first)), params)),
        lambda sizes: by_numpy.weights_gradient(lhs, rhs, sizes)[own],
        lambda sizes: tuple(by_numpy.with_nan_outside(x, sizes, own) for x in (lhs, rhs)),
    )


@pytest.mark.usefixtures("gpu")
def test_a_gradient_uses_our_kernels_and_groups_do_not_affect_each_other():
    sizes, other_rows = jnp.asarray([70, 43, 60, 800], jnp.int32), slice(70, 113)
    lhs, rhs = by_numpy.normal(1000, 256), by_numpy.normal(4, 256, 512, seed=1)
    dout = by_numpy.normal(1000, 512, seed=2)

    @jax.jit
    def gradients(lhs, rhs, dout):
        return jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes, implementation="mosaic_gpu"), lhs, rhs)[1](dout)

    poisoned = (lhs.at[other_rows].set(jnp.nan), rhs.at[1].set(jnp.nan), dout.at[other_rows].set(jnp.inf))
    assert gradients.lower(*poisoned).as_text().count("custom_call @mosaic_gpu") == 2
    dlhs, drhs = (np.asarray(x, np.float32) for x in gradients(*poisoned))
    wanted = by_numpy.product(dout, rhs, sizes, transpose_rhs=True)
    by_numpy.assert_near(wanted[:70], dlhs[:70])
    by_numpy.assert_near(wanted[113:], dlhs[113:])
    others = np.array([0, 2, 3])
    by_numpy.assert_near(by_numpy.weights_gradient(lhs, dout, sizes)[others], drhs[others])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({"activation": "silu", "gate": True, "row_scale": True}, {"block_n": 128}),
        ({"activation": "gelu", "gate": True, "transpose_rhs": True}, {"block_n": 64, "out_slots": 1, "stages": 6}),
        ({"activation": "relu2", "row_scale": True, "transpose_rhs": True}, {}),
        ({"gate": True, "preferred_element_type": "float32"}, {"block_m": 256, "block_n": 64, "stages": 3}),
        ({"activation": "relu"}, {"block_n": 192, "out_slots": 3}),
        ({"row_scale": True}, {"panel": 3, "stages": 3, "out_slots": 4}),
    ],
    ids=str,
)
def test_epilogues_are_right_and_repeat(options, params):
    asked = {name: name in options for name in ("gate", "row_scale")}
    options = {name: value for name, value in options.items() if name not in asked}
    transpose_rhs, activation = options.get("transpose_rhs", False), options.get("activation")
    given = made_of_products.operands(ROWS, GROUPS, K, N, transpose_rhs=transpose_rhs, **asked)
    keep = asked["gate"] or activation is not None
    run, call = made_of_products.launched(given, GROUPS, ProductParams(**params), keep=keep, **options)
    assert MosaicGpu().params_fault(call, ProductParams(**params)) is None
    kept = [given[name] for name in ("rhs", "gate") if keep and name in given]
    for sizes in sizes_of(np.random.default_rng(3)):
        out, *products = run(sizes, made_of_products.with_nan_behind(given, sizes))
        how = {"sizes": sizes, "transpose_rhs": transpose_rhs}
        by_numpy.assert_near(by_numpy.product(activation=activation, **how, **given), out)
        for matrices, found in zip(kept, products, strict=True):
            by_numpy.assert_near(by_numpy.product(given["lhs"], matrices, **how), found)
        again = run(sizes, made_of_products.with_nan_behind(given, sizes))[0]
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(again, np.float32))


@pytest.mark.usefixtures("gpu")
def test_epilogues_of_a_range_of_groups_are_zero_in_rows_of_other_groups():
    own = slice(5, 9)
    given = made_of_products.operands(ROWS, GROUPS, K, N, gate=True, row_scale=True)
    part = given | {name: given[name][own] for name in ("rhs", "gate")}
    run, _ = made_of_products.launched(part, GROUPS, ProductParams(block_n=128), activation="silu", first_group=5)
    whole = given | {"rhs": jnp.zeros_like(given["rhs"]).at[own].set(given["rhs"][own])}
    for sizes in sizes_of(np.random.default_rng(3)):
        expected = by_numpy.product(sizes=sizes, activation="silu", **whole)
        by_numpy.assert_near(expected, run(sizes, made_of_products.with_nan_behind(part, sizes))[0])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("activation", ["silu", None])
def test_the_gradient_of_an_epilogue_uses_our_kernels(activation):
    """Rows and factors of one group are NaN, and so are factors past the last."""
    sizes, other_rows, others = jnp.asarray([70, 43, 60, 800], jnp.int32), slice(70, 113), np.array([0, 2, 3])
    given = made_of_products.operands(1000, 4, 256, 512, gate=activation is not None, row_scale=True)
    dout = by_numpy.normal(1000, 512, seed=4)
    poisoned = given | {"lhs": given["lhs"].at[other_rows].set(jnp.nan)}
    poisoned["row_scale"] = given["row_scale"].at[other_rows].set(jnp.nan).at[973:].set(jnp.nan)

    def gradients(implementation, given):
        def run(given):
            return product(group_sizes=sizes, activation=activation, implementation=implementation, **given)

        return jax.vjp(run, given)[1](dout.astype(given["lhs"].dtype))[0]

    ours = jax.jit(functools.partial(gradients, "mosaic_gpu"))
    assert ours.lower(poisoned).as_text().count("custom_call @mosaic_gpu") == (5 if activation else 2)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(functools.partial(gradients, "xla"))({name: x.astype("float32") for name, x in given.items()})
    found = ours(poisoned)
    for name, expected in wanted.items():
        kept = others if expected.shape[0] == 4 else np.r_[:70, 113:1000]
        expected, actual = (np.asarray(x[name], np.float32)[kept] for x in (wanted, found))
        by_numpy.assert_near(expected, actual, error=8e-3)
