# SPDX-License-Identifier: Apache-2.0
"""JAX's own grouped product for Hopper, as we call it: simulated on a CPU, and refused where it does not run."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from tests.kernels.grouped_matmul import by_numpy

from ejkernel import compat
from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall
from ejkernel.kernels.grouped_matmul.jax_mgpu import JaxMgpu, JaxMgpuParams
from ejkernel.ops import ConfigError

pytestmark = pytest.mark.slow

CALL = GroupedMatmulCall(
    rows=by_numpy.ROWS,
    groups=4,
    inner=128,
    columns=128,
    dtype="bfloat16",
    out_dtype="bfloat16",
    platform="gpu",
    device_fingerprint="gpu:nvidia_h200",
)


def test_a_product_is_right_for_hostile_sizes_with_garbage_behind_the_groups(monkeypatch):
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from jax.experimental.pallas import mosaic_gpu

    interpret = mosaic_gpu.InterpretGPUParams()
    monkeypatch.setattr(mosaic_gpu, "kernel", functools.partial(mosaic_gpu.kernel, interpret=interpret))
    lhs, rhs = by_numpy.normal(by_numpy.ROWS, 128), by_numpy.normal(4, 128, 128, seed=1)
    params = JaxMgpuParams(block_m=64, block_n=64, stages=2)
    run = jax.jit(lambda *args: JaxMgpu().forward(CALL, *args, params=params)[0])
    for sizes in by_numpy.HOSTILE.values():
        found = run(by_numpy.with_nan_behind(lhs, sizes), rhs, jnp.asarray(sizes, jnp.int32))
        by_numpy.assert_near(by_numpy.product(lhs, rhs, sizes), found)
    own, part = slice(1, 3), dataclasses.replace(CALL, groups=2, all_groups=4)
    run = jax.jit(lambda *args: JaxMgpu().forward(part, *args, params=params)[0])
    for sizes in list(by_numpy.HOSTILE.values())[::3]:
        found = run(by_numpy.with_nan_outside(lhs, sizes, own), rhs[own], (jnp.asarray(sizes), jnp.int32(1)))
        by_numpy.assert_near(by_numpy.product(lhs, by_numpy.only(own, rhs), sizes), found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"platform": "cpu", "device_fingerprint": "cpu:some"}, "implementation='jax_mgpu' needs a Hopper GPU"),
        ({"out_dtype": "float32"}, "got bfloat16 to float32"),
        ({"inner": 100}, "multiples of 64"),
        ({"groups": 300}, "1 to 256 groups, got 300"),
    ],
)
def test_calls_that_it_does_not_run_are_refused_with_the_reason(monkeypatch, changes, words):
    monkeypatch.setattr(compat.kernels, "mosaic_gpu_reason", lambda: None)
    assert JaxMgpu().unsupported(CALL) is None
    assert re.search(words, JaxMgpu().unsupported(dataclasses.replace(CALL, **changes)))


def test_parameters_are_checked():
    with pytest.raises(ConfigError, match="block_m must be 64, 128 or 192, got 96"):
        JaxMgpuParams(block_m=96)
    with pytest.raises(ConfigError, match="stages must be from 1 to 8, got 0"):
        JaxMgpuParams(stages=0)
    assert "shared memory" in JaxMgpu().params_fault(CALL, JaxMgpuParams(block_m=192, stages=8))
    assert all(JaxMgpu().params_fault(CALL, params) is None for params in JaxMgpu().space(CALL))
