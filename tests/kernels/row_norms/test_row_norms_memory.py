# SPDX-License-Identifier: Apache-2.0
"""The row norms' estimate of vector memory, beside the figures of Google's compiler (libtpu 0.0.48.1)."""

from __future__ import annotations

import pytest

from ejkernel.kernels._row_norms.pallas import PallasParams, memory
from ejkernel.kernels.layer_norm.operation import LayerNormCall
from ejkernel.kernels.rms_norm.operation import RmsNormCall

V4, V5E, V5P, V6E = "tpu:tpu_v4", "tpu:tpu_v5_lite", "tpu:tpu_v5", "tpu:tpu_v6_lite"
LAYER, RMS = LayerNormCall, RmsNormCall


@pytest.mark.parametrize(
    ("made", "chip", "shape", "dtype", "backward", "residual", "block_rows", "taken"),
    [
        (LAYER, V5E, (16_384, 100), "float32", True, True, 1024, 6_300_160),
        (LAYER, V5E, (16_384, 100), "float32", False, True, 1024, 6_292_480),
        (RMS, V5P, (65_536, 4096), "bfloat16", True, False, 128, 6_819_840),
        (LAYER, V6E, (65_536, 4096), "bfloat16", False, False, 128, 4_489_216),
        (RMS, V4, (65_536, 8192), "bfloat16", True, True, 32, 5_017_600),
        (RMS, V5E, (65_536, 3000), "bfloat16", False, False, 128, 3_375_104),
        (RMS, V6E, (8, 768), "float32", False, False, 8, 56_320),  # a single block has one buffer of each window
    ],
)
def test_a_kernel_takes_no_more_than_the_estimate(made, chip, shape, dtype, backward, residual, block_rows, taken):
    (rows, dim), place = shape, {"platform": "tpu", "device_fingerprint": chip}
    call = made(rows=rows, dim=dim, dtype=dtype, eps=1e-6, residual=residual, backward=backward, **place)
    need = memory(call, PallasParams(block_rows=block_rows))
    assert need.least <= taken <= need.most <= 1.1 * taken
