# SPDX-License-Identifier: Apache-2.0
"""The simulation of 8-bit products."""

from __future__ import annotations

import pytest

from ejkernel import compat
from ejkernel.kernels.grouped_matmul.mosaic_gpu import plan as grouped_plan
from ejkernel.kernels.quantized_matmul.mosaic_gpu import few_rows_plan


@pytest.fixture
def mosaic(request, monkeypatch):
    """The module of the kernels, where it can be imported; a launch has two thread blocks, or `MULTIPROCESSORS`."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from jax.experimental.pallas import mosaic_gpu

    for plan in (grouped_plan, few_rows_plan):
        monkeypatch.setattr(plan, "MULTIPROCESSORS", getattr(request.module, "MULTIPROCESSORS", 2))
    return mosaic_gpu
