# SPDX-License-Identifier: Apache-2.0
"""Our kernel that quantises blocks for Hopper: simulated on a CPU, and refused where not run."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import on_device

from ejkernel.kernels.quantized_matmul.quantizing import mosaic_gpu as launch
from ejkernel.kernels.quantized_matmul.quantizing import plan as plans
from ejkernel.kernels.quantized_matmul.quantizing.common import QuantizeCall
from ejkernel.kernels.quantized_matmul.quantizing.mosaic_gpu import MosaicGpu
from ejkernel.kernels.quantized_matmul.quantizing.operation import quantize_blocks
from ejkernel.kernels.quantized_matmul.quantizing.plan import QuantizeParams
from ejkernel.modules import quantize, quantize_both

pytestmark = pytest.mark.slow

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
CALL = QuantizeCall(
    rows=8192,
    columns=4096,
    dtype="bfloat16",
    values=E4M3,
    transposed=True,
    platform="gpu",
    device_fingerprint="gpu:nvidia_h200",
)


def wide(results):
    """Return the dequantised arrays of a call's results."""
    found = []
    for values, scale in zip(results[::2], results[1::2], strict=True):
        each = np.repeat(scale, 128, -1)[..., : values.shape[-1]]
        if len(each) < len(values):  # squares
            each = np.repeat(each, 128, 0)[: len(values)]
        found.append(np.asarray(values).astype(np.float32) * each)
    return found


def by_reference(*args, **options):
    """Return the reference's results, compiled in one piece."""
    return jax.jit(lambda *args: quantize_blocks.reference(*args, **options))(*args)


@pytest.mark.parametrize(
    ("shape", "dtype", "values", "options", "programs", "races"),
    [
        ((256, 384), "bfloat16", E4M3, {"transposed": True}, 2, True),
        # The conformance suite has float16.
        pytest.param((144, 272), "float16", E5M2, {"transposed": True}, 132, False, marks=pytest.mark.whole),
        ((2, 65, 144), "bfloat16", E4M3, {"transposed": False}, 2, False),
        ((144, 272), "bfloat16", E5M2, {"transposed": True, "square": True}, 2, True),
    ],
)
def test_simulated_kernel_gives_the_numbers_of_plain_jax(
    mosaic, monkeypatch, shape, dtype, values, options, programs, races
):
    monkeypatch.setattr(plans, "MULTIPROCESSORS", programs)
    x = on_device(np.random.default_rng(0).standard_normal(shape), dtype) * 30
    x = x.at[..., 3, :].set(0).at[..., 1, 130].set(jnp.inf)  # the interpreter's maximum ignores NaN
    call = quantize_blocks.describe(x, dtype=values, **options)
    interpret = mosaic.InterpretGPUParams(detect_races=races)
    params = QuantizeParams(tiles=2, blocks=1)
    found = jax.jit(lambda x: launch.quantized(call, (x,), params, interpret=interpret))(x)
    expected = by_reference(x, dtype=values, **options)
    assert [(a.shape, a.dtype) for a in found] == [(a.shape, a.dtype) for a in expected]
    for ours, plain in zip(wide(found), wide(expected), strict=True):
        # A number halfway between two others may be rounded to either.
        np.testing.assert_allclose(ours, plain, rtol=0.26)
        assert np.mean((ours != plain) & ~np.isnan(plain)) < 1e-3


@pytest.mark.parametrize(("sizes", "square"), [((0, 130, 3, 70), False), ((200, 300, 50), False), ((3, 70), True)])
def test_simulated_kernel_begins_a_block_of_columns_with_each_group(mosaic, monkeypatch, sizes, square):
    monkeypatch.setattr(plans, "MULTIPROCESSORS", 2)
    x = on_device(np.random.default_rng(0).standard_normal((210, 144)), "bfloat16") * 30
    args = x.at[0, 7].set(jnp.inf), jnp.asarray(sizes, jnp.int32)
    call = quantize_blocks.describe(*args, dtype=E4M3, transposed=True, square=square)
    interpret = mosaic.InterpretGPUParams()
    found = jax.jit(lambda *args: launch.quantized(call, args, QuantizeParams(), interpret=interpret))(*args)
    expected = by_reference(*args, dtype=E4M3, transposed=True, square=square)
    assert [(a.shape, a.dtype) for a in found] == [(a.shape, a.dtype) for a in expected]
    for ours, plain in zip(wide(found), wide(expected), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=0.26)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": "int8"}, "bfloat16 to int8"),
        ({"dtype": "float32"}, "float32 to float8_e4m3fn"),
        ({"rows": 8200}, "x is 8200 x 4096"),
        ({"columns": 4090, "transposed": False}, "x is 8192 x 4090"),
        ({"rows": 0}, "x is 0 x 4096"),
        ({"device_fingerprint": "gpu:nvidia_b200"}, "needs a Hopper GPU"),
        ({"partitioned": True}, "would gather x"),
        ({"rows": 2**27, "columns": 2**12}, "in int32"),
    ],
)
def test_calls_that_the_kernel_does_not_run_are_refused_with_an_alternative(mosaic, change, message):
    assert MosaicGpu().unsupported(CALL) is None
    assert MosaicGpu().unsupported(dataclasses.replace(CALL, rows=8199, transposed=False)) is None
    reason = MosaicGpu().unsupported(dataclasses.replace(CALL, **change))
    assert message in reason
    assert "'xla'" in reason


def test_the_space_has_the_parameters_that_fit():
    space = MosaicGpu().space(CALL)
    assert space[0] == QuantizeParams()
    assert QuantizeParams(tiles=4, blocks=2) not in space
    assert "bytes of shared memory" in MosaicGpu().params_fault(CALL, QuantizeParams(tiles=4, blocks=2))


@pytest.mark.parametrize("square", [False, True])
def test_both_forms_are_those_of_two_calls(square):
    x = on_device(np.random.default_rng(0).standard_normal((40, 200)), jnp.bfloat16)
    wanted = quantize(x, block=128), quantize(x.T, block=128, axis=(0, 1) if square else -1)
    for found, expected in zip(quantize_both(x, square=square), wanted, strict=True):
        assert found.block == expected.block
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.scale, expected.scale)
