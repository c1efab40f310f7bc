# SPDX-License-Identifier: Apache-2.0
"""The row norms' estimate of vector memory, beside the figures of Google's compiler (libtpu 0.0.48.1)."""

from __future__ import annotations

import pytest

from ejkernel.kernels._row_norms.pallas import PallasParams, memory
from ejkernel.kernels.layer_norm.operation import LayerNormCall


@pytest.mark.parametrize(
    ("dim", "dtype", "backward", "block_rows", "taken"),
    [
        (100, "float32", True, 1024, 9_207_808),
        (100, "float32", True, 128, 909_312),
        (100, "float32", False, 1024, 6_856_704),
        (20_000, "bfloat16", True, 16, 10_301_440),
    ],
)
def test_a_kernel_takes_no_more_than_the_estimate(dim, dtype, backward, block_rows, taken):
    call = LayerNormCall(rows=16_384, dim=dim, dtype=dtype, eps=1e-6, residual=True, platform="tpu", backward=backward)
    need = memory(call, PallasParams(block_rows=block_rows))
    assert need.least <= taken <= need.most <= 1.7 * taken
