# SPDX-License-Identifier: Apache-2.0
"""Blocks of threads that share the `k` of a tile of a dense 8-bit product: simulated, refused, and chosen."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.quantized_matmul.test_quantized_mosaic import CALL, E4M3, E5M2, error, operands

from ejkernel.kernels.quantized_matmul.grouped.common import QuantizedGroupedMatmulCall
from ejkernel.kernels.quantized_matmul.mosaic_gpu import plan as plans
from ejkernel.kernels.quantized_matmul.mosaic_gpu.implementation import MosaicGpu, MosaicGpuGrouped
from ejkernel.kernels.quantized_matmul.mosaic_gpu.plan import MosaicGpuParams
from ejkernel.kernels.quantized_matmul.mosaic_gpu.splits import added
from ejkernel.kernels.quantized_matmul.quantized import quantize
from ejkernel.ops.utils.storage.serialize import from_plain

pytestmark = pytest.mark.slow

BLOCKS = {"x_block": (1, 128), "w_block": (128, 128)}
THIN = {"x_block": (1, 128), "w_block": (1, 128)}
MULTIPROCESSORS = 6  # or three clusters

SIMULATED = {
    "two rounds": ((200, 200, 700), (E4M3, E4M3), {"block_n": 128, "stages": 3, "splits": 3}, {}),
    "a split ends after k": ((200, 72, 640), (E4M3, E4M3), {"block_n": 128, "stages": 2, "splits": 2}, {}),
    "fewer rows than a tile": (
        (40, 72, 640),
        (E4M3, E5M2),
        {"block_n": 64, "stages": 2, "out_slots": 1, "splits": 2},
        {"accumulation": "fast"},
    ),
    "int8": ((130, 136, 512), ("int8", "int8"), {"block_n": 192, "out_slots": 3, "splits": 4}, {}),
    "a few last rows": (
        (770, 72, 384),
        (E4M3, E4M3),
        {"block_n": 256, "stages": 3, "splits": 3},
        {"preferred_element_type": "float32"},
    ),
    "few rows": ((20, 150, 640), (E4M3, E4M3), {"block_m": 64, "block_n": 96, "stages": 3, "splits": 2}, {}),
    "few rows, int8": ((64, 72, 700), ("int8", "int8"), {"block_m": 64, "block_n": 64, "stages": 3, "splits": 3}, {}),
}


@pytest.mark.parametrize("positive", [False, True], ids=["mean zero", "positive"])
@pytest.mark.parametrize(
    "name",  # the last round of blocks has few rows, too
    [pytest.param(name, marks=[pytest.mark.whole] * (name == "a few last rows")) for name in SIMULATED],
)
def test_simulated_splits_match_the_float32_product(mosaic, name, positive):
    shape, dtypes, params, options = SIMULATED[name]
    x, w = operands(shape, dtypes, positive=positive)
    allowed = 1e-5 if "preferred_element_type" in options else 3e-3
    assert error(mosaic, x, w, MosaicGpuParams(**params), **options) < allowed


@pytest.mark.parametrize(
    ("shape", "axes", "params", "rows_before"),
    [
        ((200, 264, 1400), (0, 1), {"block_n": 192, "out_slots": 3, "stages": 3, "splits": 3}, 0),
        ((300, 72, 1000), -1, {"block_n": 128, "out_slots": 1, "stages": 2, "splits": 2}, 0),
        ((37, 72, 700), -1, {"block_n": 64, "out_slots": 1, "stages": 2, "splits": 2}, 0),
        ((900, 72, 700), (0, 1), {"block_n": 128, "stages": 2, "splits": 2}, 768),
        # Three cases have each feature of it.
        pytest.param((1000, 72, 700), -1, {"block_n": 128, "stages": 2, "splits": 2}, 768, marks=pytest.mark.whole),
    ],
    ids=["pairs", "thin, alone", "fewer rows than a tile", "the last round", "the last round, thin pairs"],
)
def test_simulated_splits_of_blocks_match_the_float32_product(mosaic, shape, axes, params, rows_before):
    x, w = operands(shape, (E4M3, E5M2), positive=True, block=128)
    w = quantize(w.dequantize() * jnp.exp(jnp.arange(shape[1]) % 5)[:, None], block=128, axis=axes)
    call = dataclasses.replace(CALL, rows=shape[0], columns=shape[1], inner=shape[2], x_block=x.block, w_block=w.block)
    plan = plans.quantized_plan(call, MosaicGpuParams(**params))
    assert plans.split_plan(plan, params["splits"]).first_row == rows_before
    assert error(mosaic, x, w, MosaicGpuParams(**params), preferred_element_type="float32") < 1e-5


@pytest.mark.parametrize(
    ("rows", "params"),
    [(256, {"block_n": 128}), (24, {"block_m": 64, "block_n": 64})],
    ids=["tiles", "few rows"],
)
def test_simulated_splits_have_no_races(mosaic, rows, params):
    x, w = operands((rows, 128, 640), (E4M3, E4M3))
    assert error(mosaic, x, w, MosaicGpuParams(**params, stages=2, splits=2), races=True) < 3e-3


def test_simulated_splits_of_blocks_have_no_races(mosaic):
    x, w = operands((256, 264, 700), (E4M3, E4M3), block=128)
    w = quantize(w.dequantize(), block=128, axis=(0, 1))
    params = MosaicGpuParams(block_n=192, out_slots=3, stages=2, splits=2)
    assert error(mosaic, x, w, params, races=True, preferred_element_type="float32") < 1e-5


def test_sums_of_splits_are_added_in_order():
    """XLA keeps the order of single additions; a reduction may have another on each device."""
    sums = np.float32([1e8, 1.0, -1e8, 1.0]).reshape(4, 1, 1)
    assert jax.jit(added)(sums)[0, 0] == ((sums[0] + sums[1]) + sums[2])[0, 0] + sums[3, 0, 0]
    assert "reduce" not in str(jax.make_jaxpr(added)(sums))


@pytest.mark.parametrize(
    ("change", "params", "message"),
    [
        ({"inner": 512}, {"splits": 8, "block_n": 192, "out_slots": 3}, "some of the steps of k, which suffice for 4"),
        (
            {"inner": 512, "rows": 200, **BLOCKS},
            {"splits": 2, "block_n": 128},
            "steps of k, which suffice for 1, got 2",
        ),
        ({"rows": 33 * 128}, {"splits": 2}, "must be 1 where tiles fill rounds of 132 blocks of threads"),
        (
            {"rows": 64, "x_dtype": "bfloat16", "x_block": None},
            {"block_m": 64, "stages": 3, "splits": 2},
            "rows of 16 bits, got 2",
        ),
        ({"rows": 64}, {"block_m": 64, "block_n": 32, "splits": 4}, "of 64 tiles must take at most 132 blocks"),
        ({"rows": 200}, {"splits": 2}, "bytes of shared memory"),
    ],
)
def test_splits_that_a_call_cannot_have_are_refused(change, params, message):
    call = dataclasses.replace(CALL, columns=1024 if change.get("rows") == 33 * 128 else 2048, **change)
    assert message in (MosaicGpu().params_fault(call, MosaicGpuParams(**params)) or "")
    assert MosaicGpu().params_fault(call, MosaicGpuParams(**params | {"splits": 1})) is None


def test_groups_have_no_splits():
    call = QuantizedGroupedMatmulCall(
        rows=4096,
        groups=8,
        inner=1024,
        columns=2048,
        dtype=E4M3,
        rhs_dtype=E4M3,
        out_dtype="bfloat16",
        transpose_rhs=True,
        lhs_block=(1, None),
        rhs_block=(1, 1, None),
    )
    assert MosaicGpuGrouped().params_fault(call, MosaicGpuParams()) is None
    assert "splits must be 1 for groups" in (MosaicGpuGrouped().params_fault(call, MosaicGpuParams(splits=2)) or "")


def test_an_entry_without_splits_is_read_as_one_without_them():
    params = {"block_m": 64, "block_n": 256, "out_slots": 2, "panel": 16, "stages": 4}
    assert from_plain(params, MosaicGpuParams) == MosaicGpuParams(block_m=64, splits=1)


def test_sums_of_splits_have_a_limit():
    call = dataclasses.replace(CALL, rows=200, inner=1 << 14, columns=1 << 20)
    fault = MosaicGpu().params_fault(call, MosaicGpuParams(block_n=64, out_slots=1, splits=64)) or ""
    assert "bytes for sums, and may have 1073741824" in fault


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "blocks", "expected"),
    [
        (205, 13312, 512, BLOCKS, 8),
        (512, 8192, 1024, BLOCKS, 2),
        (16, 16384, 512, {}, 8),
        (25728, 13184, 512, {}, 8),  # six tiles more than three rounds
        (16, 2048, 512, {}, 1),
        (1024, 4096, 1024, {}, 1),
        (4096, 7168, 16384, {}, 1),
    ],
)
def test_long_products_with_few_tiles_are_split(rows, inner, columns, blocks, expected):
    """On one H200, the second takes 16.9 us in two splits, 17.9 in four, and 23.4 in one."""
    call = dataclasses.replace(CALL, rows=rows, inner=inner, columns=columns, **blocks)
    assert MosaicGpu().heuristic(call).splits == expected


@pytest.mark.parametrize("blocks", [{}, BLOCKS, THIN], ids=["rows", "blocks", "thin blocks"])
@pytest.mark.parametrize("rows", [16, 205, 25728])
def test_spaces_have_splits_where_multiprocessors_are_idle(rows, blocks):
    call = dataclasses.replace(CALL, rows=rows, inner=13184, columns=512, **blocks)
    space = list(MosaicGpu().space(call))
    assert blocks == THIN or MosaicGpu().heuristic(call) in space
    assert {params.splits for params in space} == {1, 2, 4, 8}
    assert {MosaicGpu().params_fault(call, params) for params in space} == {None}
    busy = MosaicGpu().space(dataclasses.replace(call, rows=8192, columns=16384))
    assert {params.splits for params in busy} == {1}


@pytest.mark.parametrize("blocks", [BLOCKS, THIN])
@pytest.mark.parametrize(("inner", "splits", "parts"), [(13312, 8, 7), (13312, 4, 4), (700, 2, 2), (8192, 8, 8)])
def test_copies_of_scales_begin_at_multiples_of_16_bytes(blocks, inner, splits, parts):
    """TMA refuses others, with an illegal instruction, which no interpreter shows."""
    call = dataclasses.replace(CALL, rows=205, inner=inner, columns=512, **blocks)
    plan = plans.split_plan(plans.quantized_plan(call, MosaicGpuParams(block_n=64)), splits)
    assert (plan.splits, plan.steps % plans.CHUNK) == (parts, 0)
    assert (parts - 1) * plan.steps < -(-inner // plans.STEP) <= parts * plan.steps


@pytest.mark.parametrize(("rows", "height", "expected"), [(205, 128, 256), (77, 128, 128), (1, 128, 64), (1, 256, 128)])
def test_consumers_store_sums_of_all_their_rows(rows, height, expected):
    call = dataclasses.replace(CALL, rows=rows, columns=512)
    plan = plans.split_plan(plans.quantized_plan(call, MosaicGpuParams(block_m=height, block_n=64)), 2)
    assert plan.own_rows == expected


def test_only_rows_that_whole_rounds_of_tiles_leave_are_split():
    call = dataclasses.replace(CALL, rows=25728, inner=13184, columns=512)
    plan = plans.quantized_plan(call, MosaicGpuParams())
    split = plans.split_plan(plan, 8)
    assert (plan.whole_rows, split.first_row, split.own_rows) == (198 * 128, 198 * 128, 3 * 128)
    assert 4 * split.rows * split.columns == 8 * 384 * 512 * 4  # bytes of the sums
