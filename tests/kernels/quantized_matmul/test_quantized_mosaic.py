# SPDX-License-Identifier: Apache-2.0
"""Our products of 8-bit operands for Hopper: simulated on a CPU, and refused where not run."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel import compat
from ejkernel.kernels.grouped_matmul.mosaic_gpu import plan as grouped_plan
from ejkernel.kernels.quantized_matmul.common import QuantizedMatmulCall
from ejkernel.kernels.quantized_matmul.mosaic_gpu import few_rows_plan as few_plans
from ejkernel.kernels.quantized_matmul.mosaic_gpu import launch
from ejkernel.kernels.quantized_matmul.mosaic_gpu import plan as plans
from ejkernel.kernels.quantized_matmul.mosaic_gpu.implementation import MosaicGpu
from ejkernel.kernels.quantized_matmul.mosaic_gpu.plan import MosaicGpuParams
from ejkernel.kernels.quantized_matmul.operation import quantized_matmul
from ejkernel.kernels.quantized_matmul.quantized import Quantized, quantize
from ejkernel.modules import QuantizedMatmulConfig
from ejkernel.ops import ConfigError

pytestmark = pytest.mark.slow

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
CALL = QuantizedMatmulCall(
    rows=4096,
    inner=1024,
    columns=2048,
    x_dtype=E4M3,
    w_dtype=E4M3,
    out_dtype="bfloat16",
    x_block=(1, None),
    w_block=(1, None),
    transpose_w=True,
    platform="gpu",
    device_fingerprint="gpu:nvidia_h200",
)


def operands(shape, dtypes, *, positive=False, axis=-1, block=None):
    m, n, k = shape
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(size, np.float32) for size in ((m, k), (n, k))]
    arrays = [np.abs(a) if positive else a for a in arrays]

    def made(arrays):
        return [
            a.astype(dtype) if "float16" in dtype else quantize(a, dtype=dtype, axis=axis, block=block)
            for a, dtype in zip(arrays, dtypes, strict=True)
        ]

    return jax.jit(made)(arrays)


def error(mosaic, x, w, params, *, races=False, **options):
    """Return the kernel's error relative to the float32 product."""
    values, scale, block = (x.values, x.scale, x.block) if isinstance(x, Quantized) else (x, None, None)
    args, options = quantized_matmul.prepare(
        values, w.values, scale, w.scale, x_block=block, w_block=w.block, transpose_w=True, **options
    )
    options.pop("implementation")
    call = quantized_matmul.describe(*args, **options)
    assert MosaicGpu().params_fault(call, params) is None
    found = program(call, params, mosaic.InterpretGPUParams(detect_races=races))(*args)
    assert found.dtype == call.out_dtype
    return float(distance(found, x, w))


@jax.jit
def distance(found, x, w):
    """Return the norm of the error relative to the norm of the float32 product."""
    wide = x.dequantize() if isinstance(x, Quantized) else x.astype(jnp.float32)
    expected = jnp.matmul(wide, w.dequantize().T, precision="highest")
    return jnp.linalg.norm(found.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)


@functools.cache
def program(call, params, interpret):
    """Return the simulated kernel of a call, compiled once for all operands."""
    return jax.jit(lambda *args: launch.product(call, args, params, interpret=interpret))


SIMULATED = {
    "promoted in two parts": ((200, 200, 512), (E4M3, E4M3), {"block_n": 256, "stages": 3}, {}),
    "an odd number of steps": ((40, 72, 384), (E4M3, E5M2), {"block_n": 192, "out_slots": 3, "stages": 3}, {}),
    "ragged n and k": ((40, 77, 150), (E4M3, E4M3), {"block_n": 64, "stages": 2, "out_slots": 1}, {}),
    "one step": ((130, 264, 128), (E5M2, E5M2), {"block_n": 128, "stages": 2}, {}),
    "fast": ((300, 264, 256), (E5M2, E4M3), {"block_n": 128}, {"accumulation": "fast"}),
    "high tiles, float32": (
        (300, 72, 256),
        (E4M3, E4M3),
        {"block_m": 256, "block_n": 64, "out_slots": 1},
        {"preferred_element_type": "float32"},
    ),
    "few rows": ((20, 450, 300), (E4M3, E4M3), {"block_m": 64, "block_n": 160, "stages": 3}, {}),
    "few rows, fast": ((64, 72, 256), (E5M2, E4M3), {"block_m": 64, "block_n": 32}, {"accumulation": "fast"}),
    "few rows, int8": ((7, 200, 384), ("int8", "int8"), {"block_m": 64, "block_n": 96, "stages": 2}, {}),
    "few wide rows, int8": ((33, 300, 130), ("bfloat16", "int8"), {"block_m": 64, "block_n": 128}, {}),
    "few wide rows, e4m3": ((20, 200, 300), ("bfloat16", E4M3), {"block_m": 64, "block_n": 64, "stages": 2}, {}),
    "few wide rows, float32": (
        (20, 200, 300),
        ("bfloat16", "int8"),
        {"block_m": 64, "block_n": 64, "stages": 2},
        {"preferred_element_type": "float32"},
    ),
    "few wide rows, splits": ((20, 60, 1100), ("float16", "int8"), {"block_m": 64, "block_n": 64, "stages": 3}, {}),
    "few wide rows, e5m2": ((64, 500, 256), ("float16", E5M2), {"block_m": 64, "block_n": 256, "stages": 3}, {}),
    "int8, float16": (
        (130, 264, 256),
        ("int8", "int8"),
        {"block_n": 256, "stages": 3},
        {"preferred_element_type": "float16"},
    ),
}


# Of these, each feature is also part of another case.
REPEATED = ("fast", "few wide rows, e4m3", "few wide rows, float32")


@pytest.mark.parametrize("positive", [False, True], ids=["mean zero", "positive"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.whole] * (n in REPEATED)) for n in SIMULATED])
def test_simulated_products_match_the_float32_product(mosaic, name, positive):
    shape, dtypes, params, options = SIMULATED[name]
    x, w = operands(shape, dtypes, positive=positive)
    allowed = {"float32": 1e-5, "float16": 1e-3}.get(options.get("preferred_element_type"), 3e-3)
    assert error(mosaic, x, w, MosaicGpuParams(**params), **options) < allowed


@pytest.mark.parametrize(
    ("shape", "params"),
    [
        ((200, 264, 512), {"block_n": 192, "out_slots": 3, "stages": 3}),
        ((37, 72, 128), {"block_n": 64, "out_slots": 1, "stages": 2}),
        # Splits of blocks have such tiles, too.
        pytest.param((130, 136, 256), {"block_n": 128, "stages": 2}, marks=pytest.mark.whole),
    ],
)
def test_simulated_blocks_match_the_float32_product(mosaic, shape, params):
    x, w = operands(shape, (E4M3, E5M2), positive=True, block=128)
    axes = -1 if shape[0] < 64 else (0, 1)  # 1x128 blocks of both operands, or 128x128 of the second
    w = quantize(w.dequantize() * jnp.exp(jnp.arange(shape[1]) % 5)[:, None], block=128, axis=axes)
    assert error(mosaic, x, w, MosaicGpuParams(**params), preferred_element_type="float32") < 1e-5


@settings(deadline=None, max_examples=3)
@given(m=st.integers(1, 300), n=st.integers(1, 34), k=st.integers(1, 4), whole=st.booleans())
def test_any_number_of_rows_and_columns_is_simulated_right(m, n, k, whole):
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from jax.experimental.pallas import mosaic_gpu

    x, w = operands((m, 8 * n, 128 * k), (E4M3, E4M3), axis=None if whole else -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_plan, "MULTIPROCESSORS", 2)
        params = MosaicGpuParams(block_n=128, stages=2, panel=2)
        assert error(mosaic_gpu, x, w, params, preferred_element_type="float32") < 1e-5


@pytest.mark.parametrize("accumulation", ["exact", pytest.param("fast", marks=pytest.mark.whole)])
def test_simulated_kernel_has_no_races(mosaic, accumulation):
    # Whole tiles: rows that two tiles share are written twice, with the same bits.
    x, w = operands((256, 200, 640), (E4M3, E4M3))
    assert error(mosaic, x, w, MosaicGpuParams(stages=2), races=True, accumulation=accumulation) < 3e-3


@pytest.mark.parametrize(
    ("rows", "axis", "cluster"),
    [(256, (0, 1), 2), (384, (0, 1), 1), (256, -1, 2)],
    ids=["pairs", "alone", "thin pairs"],
)
def test_simulated_blocks_have_no_races(mosaic, rows, axis, cluster):
    # Two accumulators, several tiles for each block of threads, and a number of steps that is no multiple of a copy's.
    shape, params = (rows, 384, 640), MosaicGpuParams(block_n=192, out_slots=3, stages=2)
    x, w = operands(shape, (E4M3, E4M3), block=128)
    w = quantize(w.dequantize(), block=128, axis=axis)
    call = dataclasses.replace(CALL, rows=rows, x_block=x.block, w_block=w.block)
    assert plans.quantized_plan(call, params).cluster == cluster
    assert error(mosaic, x, w, params, races=True, preferred_element_type="float32") < 1e-5


@pytest.mark.parametrize(("dtype", "accumulation"), [(E4M3, "exact"), (E4M3, "fast"), ("bfloat16", "exact")])
@pytest.mark.parametrize("shape", [(24, 200, 640), (24, 60, 1100)], ids=["tiles", "splits"])
def test_simulated_few_rows_have_no_races(mosaic, shape, dtype, accumulation):
    (x, w), params = operands(shape, (dtype, E4M3)), MosaicGpuParams(block_m=64, block_n=64, stages=2)
    assert error(mosaic, x, w, params, races=True, accumulation=accumulation) < 3e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_dtype": "bfloat16", "x_block": None}, "x is bfloat16 and w is float8_e4m3fn"),
        ({"x_dtype": "float32", "w_dtype": "int8", "x_block": None, "rows": 8}, "x is float32 and w is int8"),
        ({"x_dtype": "int8"}, "two float8 or two int8 operands"),
        ({"transpose_w": False}, "pass [n, k] with transpose_w=True"),
        ({"x_block": (1, 64)}, "scales vary along k"),
        (
            {"x_block": (1, 128), "w_block": (128, 128), "x_dtype": "int8", "w_dtype": "int8"},
            "1x128 by 128x128 or 1x128",
        ),
        ({"rows": 0}, "x or w is empty"),
        ({"x_dtype": "int8", "w_dtype": "int8", "inner": 2**18}, "may overflow where k exceeds 131071"),
        ({"device_fingerprint": "gpu:nvidia_b200"}, "needs a Hopper GPU"),
        ({"partitioned": True}, "would gather both operands"),
        ({"rows": 2**31}, "supports at most"),
    ],
)
def test_calls_that_the_kernel_does_not_run_are_refused_with_an_alternative(mosaic, change, message):
    assert MosaicGpu().unsupported(CALL) is None
    reason = MosaicGpu().unsupported(dataclasses.replace(CALL, **change))
    assert message in reason
    assert "'xla'" in reason


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stages": 8}, "bytes of shared memory"),
        ({"out_slots": 3, "stages": 2}, "out_slots must divide 4"),
        ({"block_m": 256, "block_n": 128, "stages": 2}, "registers per thread for sums"),
        ({"block_n": 96}, "a multiple of 64, got (128, 96)"),
        ({"block_m": 64}, "at most 64 rows with a scale each, got 4096"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(params, message):
    assert message in (MosaicGpu().params_fault(CALL, MosaicGpuParams(**params)) or "")


@pytest.mark.parametrize(("rows", "expected"), [(200, 2), (128, 1), (5 * 128, 1), (17 * 128, 2)])
def test_pairs_of_blocks_share_copies_where_few_rows_are_computed_twice(rows, expected):
    call = dataclasses.replace(CALL, rows=rows, x_block=(1, 128), w_block=(128, 128))
    assert plans.quantized_plan(call, MosaicGpuParams(block_n=192)).cluster == expected
    assert plans.quantized_plan(dataclasses.replace(CALL, rows=rows), MosaicGpuParams()).cluster == 1


def test_blocks_take_one_part_of_columns():
    call = dataclasses.replace(CALL, x_block=(1, 128), w_block=(128, 128))
    assert MosaicGpu().unsupported(call) is None or compat.kernels.mosaic_gpu_reason()
    assert MosaicGpu().heuristic(call).block_n <= 192
    assert "block_n of at most 192" in MosaicGpu().params_fault(call, MosaicGpuParams(stages=3))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"block_m": 64, "stages": 12}, "bytes of shared memory"),
        ({"block_m": 64, "block_n": 96, "stages": 2}, "a multiple of 64 for rows of 16 bits, got 96"),
        ({"block_n": 64}, "block_m must be 64 for rows of 16 bits, got 128"),
    ],
)
def test_parameters_that_do_not_fit_few_rows_are_refused(params, message):
    call = dataclasses.replace(CALL, rows=64, x_dtype="bfloat16", x_block=None)
    assert message in (MosaicGpu().params_fault(call, MosaicGpuParams(**params)) or "")


@pytest.mark.parametrize(("inner", "columns"), [(28672, 8192), (14336, 4096), (8192, 28672), (5504, 4096)])
def test_few_wide_rows_occupy_most_multiprocessors(inner, columns):
    call = dataclasses.replace(CALL, rows=64, inner=inner, columns=columns, x_dtype="bfloat16", x_block=None)
    plan = few_plans.few_rows_plan(call, MosaicGpu().heuristic(call))
    assert plan.programs >= 112
    assert (plan.splits - 1) * plan.steps < inner // plans.STEP <= plan.splits * plan.steps


@pytest.mark.parametrize(("rows", "width", "stages"), [(16, 256, 4), (16, 192, 6), (16, 128, 9), (64, 256, 4)])
def test_few_wide_rows_hold_at_most_144_kib_of_the_matrix(rows, width, stages):
    columns = {256: 28672, 192: 6144, 128: 4096}[width]
    call = dataclasses.replace(CALL, rows=rows, inner=8192, columns=columns, x_dtype="bfloat16", x_block=None)
    params = MosaicGpu().heuristic(call)
    assert (params.block_n, params.stages) == (width, stages)


def test_parameters_outside_their_ranges_are_refused():
    with pytest.raises(ConfigError, match="block_n must be"):
        QuantizedMatmulConfig(implementation="mosaic_gpu", fwd=MosaicGpuParams(block_n=100))


def test_heuristics_and_spaces_hold_valid_parameters():
    for columns in (8, 64, 200, 1024, 28672):
        blocks = {"x_block": (1, 128), "w_block": (128, 128)}
        integers = {"x_dtype": "int8", "w_dtype": "int8"}
        thin = {"x_block": (1, 128), "w_block": (1, 128)}
        few = [{"rows": 9}, {"rows": 64, "x_dtype": "bfloat16", "x_block": None}]
        for change in ({}, {"fast": True}, integers, {"out_dtype": "float32"}, blocks, thin, *few):
            call = dataclasses.replace(CALL, columns=columns, **change)
            space = MosaicGpu().space(call)
            assert MosaicGpu().params_fault(call, MosaicGpu().heuristic(call)) is None
            assert MosaicGpu().heuristic(call) in list(space)


@pytest.mark.parametrize(
    ("rows", "columns", "width"),
    [(512, 4096, 128), (256, 2048, 64), (1024, 1536, 128), (1024, 4096, 256), (4096, 16384, 256), (512, 2880, 128)],
)
def test_few_tiles_are_narrow(rows, columns, width):
    """On one H200, the second takes 17 us with k = 8,192, and 42 with tiles of 256 columns; the first 16 and 25."""
    call = dataclasses.replace(CALL, rows=rows, columns=columns)
    assert MosaicGpu().heuristic(call).block_n == width
