# SPDX-License-Identifier: Apache-2.0
"""The machine code of our products of 8-bit operands; needs JAX's CUDA plugin and the compiler, but no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.kernels import compiler

pytestmark = pytest.mark.slow


def test_nothing_is_spilled_and_no_product_waits_for_another(request):
    number = 20 if request.config.getoption("--whole") else 1
    compiled = compiler.printed_for(Path(__file__).parent / "compiled_for_hopper.py", str(number))
    assert len(compiled) >= 3
    # An activation's epilogue spills some addresses, outside its main loop.
    assert [name for name in compiler.spilling(compiled) if not name.startswith("activation")] == []
    # Ptxas says so where it cannot let products run one behind the other.
    assert [name for name, text in compiled.items() if re.search(r"C75(0\d|1[0-8])", text)] == []
