# SPDX-License-Identifier: Apache-2.0
"""Our grouped products for Hopper: simulated on a CPU, lowered for CUDA without a GPU, and refused where not run."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tests.kernels.grouped_matmul import by_numpy

from ejkernel import compat
from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall
from ejkernel.kernels.grouped_matmul.mosaic_gpu import launch, plan
from ejkernel.kernels.grouped_matmul.mosaic_gpu.implementation import MosaicGpu, MosaicGpuWgrad
from ejkernel.kernels.grouped_matmul.mosaic_gpu.plan import ProductParams, WgradParams
from ejkernel.kernels.grouped_matmul.operation import grouped_matmul, grouped_matmul_wgrad
from ejkernel.modules import GroupedMatmulConfig, GroupedMatmulWgradConfig
from ejkernel.ops import ConfigError

pytestmark = pytest.mark.slow

K, N = 104, 200  # no multiples of a tile
SMALL = {"block_n": 128, "stages": 2, "panel": 2}
CALL = GroupedMatmulCall(
    rows=8192,
    groups=8,
    inner=4096,
    columns=4096,
    dtype="bfloat16",
    out_dtype="bfloat16",
    platform="gpu",
    device_fingerprint="gpu:nvidia_h200",
)


@pytest.fixture
def mosaic():
    """The module of the kernels, where it can be imported."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


@pytest.fixture
def few_multiprocessors(monkeypatch):
    """Launch two thread blocks, so that each computes several tiles."""
    monkeypatch.setattr(plan, "MULTIPROCESSORS", 2)


def simulated(mosaic, operation, arrays, params, *, races=False, **options):
    """Return a function of the sizes of groups that runs a kernel, simulated and compiled once."""
    run = launch.product if operation is grouped_matmul else launch.weights_gradient
    call = operation.describe(*arrays, jax.ShapeDtypeStruct((4,), jnp.int32), **options)
    interpret = mosaic.InterpretGPUParams(detect_races=races)
    found = jax.jit(lambda sizes, *arrays: run(call, (*arrays, sizes), params, interpret=interpret))
    return lambda sizes, *own: found(jnp.asarray(sizes, jnp.int32), *(own or arrays))


@pytest.mark.parametrize("shortest", [0, 1000], ids=["short tiles", "whole tiles"])
@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["as it is", "transposed"])
@pytest.mark.usefixtures("few_multiprocessors")
def test_a_product_is_right_for_hostile_sizes_with_garbage_behind_the_groups(
    mosaic, transpose_rhs, shortest, monkeypatch
):
    monkeypatch.setattr(plan, "ROWS_WITH_SHORT_TILES", shortest)
    lhs = by_numpy.normal(by_numpy.ROWS, K)
    rhs = by_numpy.normal(4, *((N, K) if transpose_rhs else (K, N)), seed=1)
    run = simulated(mosaic, grouped_matmul, (lhs, rhs), ProductParams(**SMALL), transpose_rhs=transpose_rhs)
    for sizes in list(by_numpy.HOSTILE.values())[:: 4 if transpose_rhs else 1]:
        expected = by_numpy.product(lhs, rhs, sizes, transpose_rhs=transpose_rhs)
        by_numpy.assert_near(expected, run(sizes, by_numpy.with_nan_behind(lhs, sizes), rhs))


@pytest.mark.usefixtures("few_multiprocessors")
def test_a_weights_gradient_is_right_for_hostile_sizes_with_garbage_behind_the_groups(mosaic):
    lhs, rhs = by_numpy.normal(by_numpy.ROWS, K), by_numpy.normal(by_numpy.ROWS, N, seed=1)
    run = simulated(mosaic, grouped_matmul_wgrad, (lhs, rhs), WgradParams(**SMALL, largest_first=True, snake=True))
    for sizes in by_numpy.HOSTILE.values():
        own = (by_numpy.with_nan_behind(x, sizes) for x in (lhs, rhs))
        by_numpy.assert_near(by_numpy.weights_gradient(lhs, rhs, sizes), run(sizes, *own))


@pytest.mark.parametrize(
    "own", [slice(1, 3), pytest.param(slice(3, 4), marks=pytest.mark.whole)], ids=["in the middle", "the last"]
)
@pytest.mark.usefixtures("few_multiprocessors")
def test_a_range_of_groups_is_right_for_hostile_sizes_with_garbage_in_other_groups(mosaic, own):
    lhs, rhs = by_numpy.normal(by_numpy.ROWS, K), by_numpy.normal(4, K, N, seed=1)
    dout, first = by_numpy.normal(by_numpy.ROWS, N, seed=2), jnp.int32(own.start)
    groups = (jax.ShapeDtypeStruct((4,), jnp.int32), first)
    call = grouped_matmul.describe(lhs, rhs[own], groups)
    sums_call = grouped_matmul_wgrad.describe(lhs, dout, groups, groups=own.stop - own.start)
    interpret = mosaic.InterpretGPUParams()

    @jax.jit
    def run(sizes, lhs, dout):
        out = launch.product(call, (lhs, rhs[own], (sizes, first)), ProductParams(**SMALL), interpret=interpret)
        params = WgradParams(**SMALL, largest_first=True)
        return out, launch.weights_gradient(sums_call, (lhs, dout, (sizes, first)), params, interpret=interpret)

    for sizes in list(by_numpy.HOSTILE.values())[::2]:
        out, sums = run(jnp.asarray(sizes), *(by_numpy.with_nan_outside(x, sizes, own) for x in (lhs, dout)))
        by_numpy.assert_near(by_numpy.product(lhs, by_numpy.only(own, rhs), sizes), out)
        by_numpy.assert_near(by_numpy.weights_gradient(lhs, dout, sizes)[own], sums)


@pytest.mark.usefixtures("few_multiprocessors")
def test_groups_out_of_range_are_empty(mosaic):
    sizes = jnp.asarray(by_numpy.HOSTILE["uneven"], jnp.int32)
    lhs, rhs = by_numpy.normal(by_numpy.ROWS, K), by_numpy.normal(4, K, N, seed=1)
    call = grouped_matmul.describe(lhs, rhs[:2], (sizes, jnp.int32(0)))
    options = {"params": ProductParams(**SMALL), "interpret": mosaic.InterpretGPUParams()}
    run = jax.jit(lambda *arrays: launch.product(call, arrays, **options))
    for first, there in ((-1, [None, 0]), (3, [3, None]), (9, [None, None])):
        padded = jnp.stack([jnp.full_like(rhs[0], jnp.nan) if g is None else rhs[g] for g in there])
        own = [g for g in there if g is not None]
        kept = by_numpy.only(slice(own[0], own[0] + 1) if own else slice(0, 0), rhs)
        out, expected = run(lhs, padded, (sizes, jnp.int32(first))), by_numpy.product(lhs, kept, sizes)
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2e-2, atol=0.3)


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, which multiplies for the interpreter
@pytest.mark.usefixtures("few_multiprocessors")
def test_nothing_of_one_group_reaches_another(mosaic):
    """Rows and matrices of one group are NaN, and its neighbours begin and end in the middle of a step."""
    sizes, other_rows = (70, 43, 60, 127), slice(70, 113)
    lhs, rhs = by_numpy.normal(by_numpy.ROWS, K), by_numpy.normal(4, K, N, seed=1)
    run = simulated(mosaic, grouped_matmul, (lhs, rhs), ProductParams(**SMALL))
    found = np.asarray(run(sizes, lhs.at[other_rows].set(jnp.nan), rhs.at[1].set(jnp.nan)), np.float32)
    assert np.isnan(found[other_rows]).all()
    by_numpy.assert_near(by_numpy.product(lhs, rhs, sizes)[113:], found[113:])
    by_numpy.assert_near(by_numpy.product(lhs, rhs, sizes)[:70], found[:70])

    dout = by_numpy.normal(by_numpy.ROWS, N, seed=2)
    sums = simulated(mosaic, grouped_matmul_wgrad, (lhs, dout), WgradParams(**SMALL))
    found = np.asarray(sums(sizes, lhs.at[other_rows].set(jnp.nan), dout.at[other_rows].set(jnp.inf)))
    others = np.array([0, 2, 3])
    by_numpy.assert_near(by_numpy.weights_gradient(lhs, dout, sizes)[others], found[others])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"block_n": 64, "out_slots": 1, "stages": 3, "preferred_element_type": "float32"}, marks=pytest.mark.whole
        ),
        {"block_n": 192, "out_slots": 3},
        {"rows": 256},
    ],
    ids=["narrow, to float32", "three pieces", "tall"],
)
@pytest.mark.usefixtures("few_multiprocessors")
def test_other_layouts_compute_the_same_without_races(mosaic, changes):
    """Sizes are such that no rows are computed twice, which the detector would tell."""
    sizes, changes = by_numpy.HOSTILE["uneven"], dict(changes)
    rows, wide = changes.pop("rows", 128), changes.pop("preferred_element_type", None)
    options, params = ({} if wide is None else {"preferred_element_type": wide}), SMALL | changes
    lhs, rhs, dout = by_numpy.normal(300, K), by_numpy.normal(4, K, N, seed=1), by_numpy.normal(300, N, seed=2)
    run = simulated(
        mosaic, grouped_matmul, (lhs, rhs), ProductParams(**params, block_m=rows), races=rows == 128, **options
    )
    by_numpy.assert_near(by_numpy.product(lhs, rhs, sizes), run(sizes), error=1e-6 if wide else 4e-3)
    sums = simulated(
        mosaic, grouped_matmul_wgrad, (lhs, dout), WgradParams(**params, block_k=rows), races=True, **options
    )
    by_numpy.assert_near(by_numpy.weights_gradient(lhs, dout, sizes), sums(sizes), error=1e-6 if wide else 4e-3)


@pytest.mark.usefixtures("few_multiprocessors")
def test_any_sizes_end_and_are_right(mosaic):
    lhs, rhs, dout = by_numpy.normal(200, 64), by_numpy.normal(4, 64, 64, seed=1), by_numpy.normal(200, 64, seed=2)
    params = {"block_n": 64, "stages": 2, "out_slots": 1, "panel": 1}
    run = simulated(mosaic, grouped_matmul, (lhs, rhs), ProductParams(**params))
    sums = simulated(mosaic, grouped_matmul_wgrad, (lhs, dout), WgradParams(**params))

    @given(st.lists(st.integers(0, 150), min_size=4, max_size=4))
    @settings(max_examples=4)
    def check(sizes):
        by_numpy.assert_near(by_numpy.product(lhs, rhs, sizes), run(sizes))
        by_numpy.assert_near(by_numpy.weights_gradient(lhs, dout, sizes), sums(sizes))

    check()


@pytest.mark.usefixtures("few_multiprocessors")
def test_operands_smaller_than_a_tile_are_padded(mosaic):
    lhs, rhs, dout = by_numpy.normal(5, 3), by_numpy.normal(4, 3, 7, seed=1), by_numpy.normal(5, 7, seed=2)
    sizes, params = (2, 0, 1, 1), {"block_n": 64, "out_slots": 1, "stages": 2}
    run = simulated(mosaic, grouped_matmul, (lhs, rhs), ProductParams(**params))
    by_numpy.assert_near(by_numpy.product(lhs, rhs, sizes), run(sizes))
    sums = simulated(mosaic, grouped_matmul_wgrad, (lhs, dout), WgradParams(**params))
    by_numpy.assert_near(by_numpy.weights_gradient(lhs, dout, sizes), sums(sizes))


# Lowering.


def all_products(lhs, rhs, sizes):
    chosen = GroupedMatmulConfig(implementation="mosaic_gpu")
    return (
        grouped_matmul(lhs, rhs, sizes, cfg=chosen),
        grouped_matmul(lhs, rhs, sizes, transpose_rhs=True, cfg=chosen),
        grouped_matmul_wgrad(lhs, lhs, sizes, cfg=GroupedMatmulWgradConfig(implementation="mosaic_gpu")),
    )


def launches(function, *args):
    """Return how many kernels of ours a function's program for CUDA has."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("custom_call @mosaic_gpu")


def arguments(groups=8, dtype="int32"):
    shapes = (((1024, 256), "bfloat16"), ((groups, 256, 256), "bfloat16"), ((groups,), dtype))
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@pytest.mark.usefixtures("mosaic")
def test_it_is_lowered_within_shard_map_and_vmap():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    mapped = jax.shard_map(all_products, mesh=mesh, in_specs=(P("x"),) * 3, out_specs=(P("x"),) * 3, check_vma=True)
    assert launches(mapped, *arguments()) == 3
    lhs, rhs, sizes = arguments()
    stacked = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in (lhs, sizes)]
    assert launches(jax.vmap(all_products, in_axes=(0, None, 0)), stacked[0], rhs, stacked[1]) == 3


@pytest.mark.usefixtures("mosaic")
def test_it_is_lowered_with_64_bits_and_under_strict_settings():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert launches(all_products, *arguments(dtype="int64")) == 3


@pytest.mark.usefixtures("mosaic")
def test_tangents_are_products_too():
    def tangents(lhs, rhs, sizes):
        return jax.jvp(lambda lhs, rhs: all_products(lhs, rhs, sizes), (lhs, rhs), (lhs, rhs))[0]

    assert launches(tangents, *arguments()) == 3


# --- refused calls ---


def replaced(**changes):
    fields = {name: getattr(CALL, name) for name in CALL.__dataclass_fields__}
    return GroupedMatmulCall(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"platform": "cpu", "device_fingerprint": "cpu:some"}, "needs a Hopper GPU"),
        ({"device_fingerprint": "gpu:nvidia_a100"}, "needs a Hopper GPU"),
        ({"partitioned": True}, r"jax\.shard_map"),
        ({"dtype": "float32"}, "lhs has dtype float32; 'mosaic_gpu' supports bfloat16 and float16"),
        ({"out_dtype": "float64"}, "preferred_element_type is float64"),
        ({"rows": 0}, "is empty"),
        ({"groups": 5000}, "at most 4096 groups, got 5000"),
    ],
)
def test_calls_that_it_does_not_run_are_refused_with_the_reason(monkeypatch, changes, words):
    monkeypatch.setattr(compat.kernels, "mosaic_gpu_reason", lambda: None)
    reason = MosaicGpu().unsupported(replaced(**changes))
    assert re.search(words, reason)
    assert "'xla'" in reason


def test_a_call_that_it_runs_has_no_reason(monkeypatch):
    monkeypatch.setattr(compat.kernels, "mosaic_gpu_reason", lambda: None)
    assert MosaicGpu().unsupported(CALL) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": 8}, "bytes of shared memory"),
        ({"block_n": 192, "out_slots": 2}, "out_slots must divide 3"),
        ({"block_n": 256, "stages": 2, "rows": 256}, "256 accumulator registers"),
    ],
)
def test_unsupported_parameters_are_reported_before_compiling(changes, words):
    changes = dict(changes)
    rows = changes.pop("rows", 128)
    assert words in MosaicGpu().params_fault(CALL, ProductParams(**changes, block_m=rows))
    assert words in MosaicGpuWgrad().params_fault(CALL, WgradParams(**changes, block_k=rows))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_n": 96}, "block_n must be 64, 128, 192 or 256, got 96"),
        ({"stages": 1}, "stages must be from 2 to 8"),
        ({"out_slots": True}, "out_slots must be from 1 to 4"),
        ({"panel": 0}, "panel must be"),
    ],
)
@pytest.mark.parametrize("params", [ProductParams, WgradParams])
def test_wrong_parameters_are_errors(params, wrong, message):
    with pytest.raises(ConfigError, match=message):
        params(**wrong)


def test_columns_that_tiles_of_192_cover_exactly_take_these():
    widths = [MosaicGpu().heuristic(replaced(columns=n)).block_n for n in (2880, 2048, 4096)]
    assert widths == [192, 256, 256]
    assert MosaicGpuWgrad().heuristic(replaced(columns=2880)).block_n == 256


@pytest.mark.parametrize(
    ("groups", "rows", "inner", "columns", "widths"),
    [
        (8, 512, 4096, 1024, (64, 256)),
        (1, 512, 4096, 4096, (128, 256)),
        (1, 8192, 1024, 1024, (256, 64)),
        (4, 4096, 512, 1024, (256, 128)),
        (128, 127, 4096, 1024, (256, 256)),
        (64, 16, 4096, 1024, (128, 256)),
    ],
)
def test_few_tiles_are_narrow(groups, rows, inner, columns, widths):
    """On one H200, the first takes 20 us, and 37 with tiles of 256 columns; the third's weight gradient 29 and 79."""
    call = replaced(groups=groups, rows=rows, inner=inner, columns=columns)
    assert (MosaicGpu().heuristic(call).block_n, MosaicGpuWgrad().heuristic(call).block_n) == widths


@given(
    st.integers(1, 1 << 20),
    st.integers(1, 512),
    st.integers(1, 8192),
    st.integers(1, 8192),
    st.sampled_from(["bfloat16", "float32"]),
)
@settings(max_examples=60)
def test_the_heuristics_fit_and_so_do_the_spaces(rows, groups, inner, columns, out_dtype):
    call = replaced(rows=rows, groups=groups, inner=inner, columns=columns, out_dtype=out_dtype)
    for heuristic, space, fault in (
        (MosaicGpu().heuristic, MosaicGpu().space, MosaicGpu().params_fault),
        (MosaicGpuWgrad().heuristic, MosaicGpuWgrad().space, MosaicGpuWgrad().params_fault),
    ):
        assert fault(call, heuristic(call)) is None
        drawn = space(call).sample(np.random.default_rng(0), 3)
        assert [None] * len(drawn) == list(map(functools.partial(fault, call), drawn))
