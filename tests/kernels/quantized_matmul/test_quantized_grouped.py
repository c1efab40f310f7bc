# SPDX-License-Identifier: Apache-2.0
"""Our grouped products of 8-bit operands for Hopper: simulated on a CPU, and refused where not run."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.grouped_matmul.mosaic_gpu.plan import WgradParams
from ejkernel.kernels.quantized_matmul.grouped.operation import quantized_grouped_matmul
from ejkernel.kernels.quantized_matmul.grouped.wgrad import quantized_grouped_wgrad
from ejkernel.kernels.quantized_matmul.mosaic_gpu import gradient, launch
from ejkernel.kernels.quantized_matmul.mosaic_gpu import plan as plans
from ejkernel.kernels.quantized_matmul.mosaic_gpu.gradient import MosaicGpuGroupedWgrad
from ejkernel.kernels.quantized_matmul.mosaic_gpu.implementation import MosaicGpuGrouped
from ejkernel.kernels.quantized_matmul.mosaic_gpu.plan import MosaicGpuParams
from ejkernel.kernels.quantized_matmul.quantized import Quantized, quantize
from ejkernel.kernels.quantized_matmul.quantizing.xla import quantized_blocks

pytestmark = pytest.mark.slow

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SIZES = (0, 70, 3, 131)
quantized_once = jax.jit(quantized_blocks, static_argnames=("dtype", "transposed", "square"))


def operands(shape, sizes, dtypes, *, blocks=False):
    """Return quantised operands; numbers outside all groups are NaN."""
    (m, n, k), rng = shape, np.random.default_rng(0)
    lhs, rhs = np.abs(rng.standard_normal((m, k), np.float32)), rng.standard_normal((len(sizes), n, k), np.float32) + 1
    lhs[sum(sizes) :] = np.nan
    rhs *= 2.0 ** (np.arange(n) // 64 % 5)[:, None]

    @jax.jit
    def made(lhs, rhs):
        if not blocks:
            return quantize(lhs, dtype=dtypes[0]), quantize(rhs, dtype=dtypes[1])
        return quantize(lhs, dtype=dtypes[0], block=128), quantize(rhs, dtype=dtypes[1], block=128, axis=(1, 2))

    return made(lhs, rhs)


def described(lhs: Quantized, rhs: Quantized, sizes, row_scale=None, **options):
    args, options = quantized_grouped_matmul.prepare(
        *(lhs.values, rhs.values, jnp.asarray(sizes, jnp.int32), lhs.scale, rhs.scale, row_scale),
        lhs_block=lhs.block,
        rhs_block=rhs.block,
        transpose_rhs=True,
        preferred_element_type="float32",
        **options,
    )
    options.pop("implementation")
    return args, options


def error(mosaic, args, options, params, *, races=False):
    """Return the largest error of the kernel, relative to the largest number of the result."""
    call = quantized_grouped_matmul.describe(*args, **options)
    assert MosaicGpuGrouped().params_fault(call, params) is None
    interpret = mosaic.InterpretGPUParams(detect_races=races)
    found = jax.jit(lambda *args: launch.grouped_product(call, args, params, interpret=interpret))(*args)
    expected = jax.jit(lambda *args: quantized_grouped_matmul.reference(*args, **options))(*args)
    assert found.shape == expected.shape
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


SIMULATED = {
    "promoted in two parts": ((210, 72, 384), (E4M3, E4M3), {"block_n": 256, "stages": 3}, {}),
    "ragged n and k": ((204, 77, 150), (E5M2, E4M3), {"block_n": 64, "stages": 2, "out_slots": 1}, {}),
    "int8, fewer rows than a tile": ((24, 64, 128), ("int8", "int8"), {"block_n": 128, "stages": 2}, {}),
    "blocks, ragged n and k": (
        (205, 205, 150),
        (E4M3, E5M2),
        {"block_n": 192, "out_slots": 3, "stages": 3},
        {"blocks": True},
    ),
}


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_groups_match_the_float32_product(mosaic, name):
    shape, dtypes, params, more = SIMULATED[name]
    sizes = (0, 3, 1, 9) if shape[0] < 64 else SIZES
    args, options = described(*operands(shape, sizes, dtypes, **more), sizes)
    assert error(mosaic, args, options, MosaicGpuParams(**params)) < 1e-5


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
def test_the_last_rows_of_a_group_are_a_short_tile(mosaic, monkeypatch, blocks):
    monkeypatch.setattr(plans, "ROWS_WITH_SHORT_TILES", range(1, 1024))
    args, options = described(*operands((210, 72, 128), SIZES, (E4M3, E4M3), blocks=blocks), SIZES)
    assert error(mosaic, args, options, MosaicGpuParams(block_n=64, stages=2, out_slots=1)) < 1e-5


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
def test_some_of_the_groups_with_factors_of_rows_are_simulated_right(mosaic, blocks):
    lhs, rhs = operands((210, 72, 128), SIZES, (E4M3, E4M3), blocks=blocks)
    rhs = jax.tree.map(lambda array: array[1:4], rhs)
    factors = jnp.linspace(-1, 1, 210).at[-1].set(jnp.nan)
    args, options = described(lhs, rhs, SIZES, factors, first_group=1)
    assert error(mosaic, args, options, MosaicGpuParams(block_n=64, stages=2, out_slots=1)) < 1e-5


@pytest.mark.parametrize(
    ("sizes", "params", "races", "options"),
    [
        pytest.param(SIZES, {"block_n": 192, "stages": 3}, False, {}, marks=pytest.mark.whole),
        (SIZES, {"block_n": 192, "stages": 3}, False, {"square": True}),
        ((128, 0, 40), {"block_n": 64, "stages": 2, "out_slots": 1, "largest_first": True, "snake": True}, True, {}),
        # Instructions for 32 rows are skipped in the last block of a group.
        ((9, 1, 31, 161, 0, 32, 33, 96, 128, 7), {"block_n": 64, "stages": 2}, False, {"first_group": 1, "groups": 8}),
    ],
)
def test_simulated_gradients_of_groups_match_the_float32_sums(mosaic, sizes, params, races, options):
    square = options.get("square", False)
    rng, own = np.random.default_rng(0), jnp.asarray(sizes, jnp.int32)
    rows = sum(sizes) + 6
    x, dout = (rng.standard_normal((rows, size), np.float32) + 1 for size in (140, 600 if square else 200))
    x[sum(sizes) :] = np.nan  # rows of no group
    kinds = (jnp.asarray(x), E4M3, False), (jnp.asarray(dout), E5M2, square)
    made = [quantized_once(each, own, dtype=name, transposed=True, square=by)[2:] for each, name, by in kinds]
    args = (made[0][0], made[1][0], own, made[0][1], made[1][1])
    options = {"preferred_element_type": "bfloat16" if races else "float32", **options}
    args, options = quantized_grouped_wgrad.prepare(*args, **options)
    options.pop("implementation")
    call = quantized_grouped_wgrad.describe(*args, **options)
    chosen = WgradParams(**params)
    assert MosaicGpuGroupedWgrad().params_fault(call, chosen) is None
    interpret = mosaic.InterpretGPUParams(detect_races=races)
    found = jax.jit(lambda *args: gradient.weights_gradient(call, args, chosen, interpret=interpret))(*args)
    expected = jax.jit(lambda *args: quantized_grouped_wgrad.reference(*args, **options))(*args)
    assert found.shape == expected.shape
    found, expected = (np.asarray(each, np.float32) for each in (found, expected))
    assert np.abs(found - expected).max() < (1e-2 if races else 1e-5) * np.abs(expected).max()


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
def test_simulated_groups_have_no_races(mosaic, blocks):
    # Whole tiles: rows that two tiles share are written twice, with the same bits.
    args, options = described(*operands((256, 72, 256), (128, 0, 64), (E4M3, E4M3), blocks=blocks), (128, 0, 64))
    assert error(mosaic, args, options, MosaicGpuParams(block_n=64, stages=2), races=True) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bfloat16", "lhs_block": None, "rows": 1000}, "lhs is bfloat16 and rhs is float8_e4m3fn"),
        ({"transpose_rhs": False}, "pass [n, k] with transpose_rhs=True"),
        ({"groups": 5000}, "1 to 4096 groups"),
        ({"lhs_block": (1, 128), "rhs_block": (None, 128, 128)}, "belong to one group"),
    ],
)
def test_calls_that_the_kernel_does_not_run_are_refused_with_an_alternative(mosaic, change, message):
    args, options = described(*operands((210, 72, 128), SIZES, (E4M3, E4M3)), SIZES)
    call = quantized_grouped_matmul.describe(*args, **options)
    call = dataclasses.replace(call, platform="gpu", device_fingerprint="gpu:nvidia_h200")
    assert MosaicGpuGrouped().unsupported(call) is None
    reason = MosaicGpuGrouped().unsupported(dataclasses.replace(call, **change))
    assert message in reason
    assert "'xla'" in reason
