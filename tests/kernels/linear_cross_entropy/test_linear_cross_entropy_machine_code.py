# SPDX-License-Identifier: Apache-2.0
"""What ptxas reports about the loss's kernels; needs JAX's plugin for CUDA and the compiler, but no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernels import compiler

pytestmark = pytest.mark.slow


def test_no_kernel_spills_registers():
    compiled = compiler.printed_for(Path(__file__).parent / "compiled_for_hopper.py")
    assert len(compiled) == 7
    assert compiler.spilling(compiled) == []
    assert sum("linear_cross_entropy_product" in report for report in compiled.values()) == 3
    # Chunks of rows add to the weight's gradient in place.
    assert sum("linear_cross_entropy_sum" in report for report in compiled.values()) == 2
