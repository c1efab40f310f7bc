# SPDX-License-Identifier: Apache-2.0
"""Few rows in 16 bits by 8-bit matrices, with groups and epilogues: the kernel for Hopper, simulated on a CPU."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import on_device

from ejkernel import compat
from ejkernel.kernels import _hopper
from ejkernel.kernels._hopper.tile_shapes import OVERHEAD
from ejkernel.kernels.quantized_matmul.grouped.activation import quantized_grouped_activation
from ejkernel.kernels.quantized_matmul.grouped.operation import quantized_grouped_matmul
from ejkernel.kernels.quantized_matmul.mosaic_gpu import few_rows_plan as plans
from ejkernel.kernels.quantized_matmul.mosaic_gpu import launch
from ejkernel.kernels.quantized_matmul.mosaic_gpu.activation import MosaicGpuActivation
from ejkernel.kernels.quantized_matmul.mosaic_gpu.implementation import MosaicGpuGrouped
from ejkernel.kernels.quantized_matmul.mosaic_gpu.plan import MosaicGpuParams
from ejkernel.modules import quantize

pytestmark = pytest.mark.slow

E4M3 = "float8_e4m3fn"


def described(shape, sizes, dtypes, *, gated=False, factored=False, groups=None, **options):
    """Return operation, implementation, canonical arguments, options and the call; rows of no group are NaN."""
    (m, n, k), rng = shape, np.random.default_rng(0)
    matrices = rng.standard_normal((1 + gated, groups or len(sizes), n, k)).astype(np.float32)
    own = jax.jit(lambda w: quantize(w, dtype=dtypes[1]))
    w, *gate = (own(matrix) for matrix in matrices)
    x = on_device(rng.standard_normal((m, k)), dtypes[0]).at[sum(sizes) :].set(jnp.nan)
    args = (x, w.values, jnp.asarray(sizes, jnp.int32), None, w.scale)
    factors = jnp.linspace(-1, 2, m) if factored else None
    how = {"rhs_block": w.block, "transpose_rhs": True} | options
    if gated or "activation" in options:
        operation, implementation = quantized_grouped_activation, MosaicGpuActivation()
        args = (*args, (gate[0].values, gate[0].scale) if gated else None, factors)
    else:
        operation, implementation, args = quantized_grouped_matmul, MosaicGpuGrouped(), (*args, factors)
    args, how = operation.prepare(*args, **how)
    del how["implementation"]
    return operation, implementation, args, how, operation.describe(*args, **how)


ONE, NARROW = {"block_n": 128, "stages": 2}, {"block_n": 64, "stages": 2}
GATED = {"gated": True, "activation": "silu", "factored": True}
SIMULATED = {
    "gated": ((20, 300, 256), (17,), ("bfloat16", "int8"), GATED, ONE),
    "gated, splits": ((33, 60, 1100), (30,), ("float16", "int8"), GATED, NARROW),
    "factors": ((20, 300, 256), (20,), ("bfloat16", E4M3), {"factored": True}, ONE),
    "groups": ((100, 130, 130), (70, 0, 3), ("bfloat16", "int8"), {}, ONE),
    "groups, gated": ((60, 200, 256), (5, 0, 13, 30), ("bfloat16", E4M3), GATED, ONE),
    "groups, float32": (
        (40, 130, 256),
        (5, 0, 13, 20),
        ("bfloat16", "int8"),
        GATED | {"preferred_element_type": "float32"},
        ONE,
    ),
    "groups, relu2": ((40, 72, 128), (1, 30), ("float16", "float8_e5m2"), {"activation": "relu2"}, NARROW),
    "some of the groups": (
        (60, 72, 256),
        (5, 7, 13, 30),
        ("bfloat16", "int8"),
        {"first_group": 1, "groups": 2, "factored": True},
        ONE,
    ),
}


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_epilogues_and_groups_match_the_reference(mosaic, name):
    compare(mosaic, *SIMULATED[name])


@pytest.mark.parametrize("name", ["gated", "groups, gated"])
def test_simulated_kernels_have_no_races(mosaic, name):
    compare(mosaic, *SIMULATED[name], races=True)


def test_sizes_of_64_bits_are_clipped_before_they_are_narrowed():
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    _, _, args, _, call = described((20, 64, 128), (5, 15), ("bfloat16", "int8"))
    params = MosaicGpuParams(block_m=64, **NARROW)
    with jax.enable_x64(True):
        args = (*args[:2], jax.ShapeDtypeStruct((2,), "int64"), *args[3:5])
        # JAX warns of numbers that it truncates, and a warning is an error.
        assert jax.eval_shape(lambda *args: launch.grouped_product(call, args, params), *args).shape == (20, 64)


def compare(mosaic, shape, sizes, dtypes, options, params, *, races=False):
    operation, implementation, args, how, call = described(shape, sizes, dtypes, **options)
    params, interpret = MosaicGpuParams(block_m=64, **params), mosaic.InterpretGPUParams(detect_races=races)
    assert implementation.params_fault(call, params) is None
    run = launch.grouped_activation if operation is quantized_grouped_activation else launch.grouped_product
    [found] = jax.tree.leaves(jax.jit(lambda *args: run(call, args, params, interpret=interpret))(*args))
    expected = jax.jit(lambda *args: operation.reference(*args, **how))(*args)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(*(np.asarray(each, np.float32) for each in (found, expected)), rtol=0.01, atol=0.01)


def test_heuristics_and_spaces_hold_valid_parameters():
    for sizes in ((64,), (64,) * 4, (4,) * 16):
        for options in ({}, GATED):
            shape = (sum(sizes), 640, 256)
            _, implementation, _, _, call = described(shape, sizes, ("bfloat16", "int8"), **options)
            space = list(implementation.space(call))
            assert implementation.heuristic(call) in space
            assert all(implementation.params_fault(call, params) is None for params in space)
            # A gate's products have their own consumers.
            assert (MosaicGpuParams(block_m=64, block_n=256, stages=2) in space) == (not options)


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [640, 20_000])
def test_shared_memory_is_counted(groups, dtype, columns):
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from jax.experimental.pallas import mosaic_gpu

    from ejkernel.kernels._hopper.backend import backend_for
    from ejkernel.kernels.quantized_matmul.mosaic_gpu.few_rows import WideRowsKernel

    options = GATED | {"preferred_element_type": dtype}
    _, implementation, _, _, call = described((64, 8, 1024), (8,) * groups, ("bfloat16", "int8"), **options)
    call = dataclasses.replace(call, columns=columns)
    for params in implementation.space(call):
        plan = plans.few_rows_plan(call, params)
        types = WideRowsKernel(plan, backend_for(mosaic_gpu.InterpretGPUParams())).memory_types()
        buffers = [types.x, types.w, types.out, *([] if types.gate is None else [types.gate])]
        used = sum(math.prod(each.shape) * jnp.dtype(each.dtype).itemsize for each in buffers)
        assert used == plan.shared_bytes() - OVERHEAD


def test_calls_that_the_kernel_does_not_run_are_refused_with_an_alternative(monkeypatch):
    monkeypatch.setattr(_hopper, "unavailable", lambda *_: None)
    shape, dtypes = (70, 40, 128), ("bfloat16", "int8")
    _, implementation, _, _, call = described(shape, (70,), dtypes)
    assert "up to 64 rows of 16 bits for each matrix" in implementation.unsupported(call)
    _, implementation, _, _, call = described(shape, (60, 10), dtypes)
    assert implementation.unsupported(call) is None
    assert "block_m must be 64" in implementation.params_fault(call, MosaicGpuParams())
