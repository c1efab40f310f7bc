# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of our grouped products: without a GPU, where JAX's plugin for CUDA and the compiler are there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.kernels import compiler

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def compiled(request):
    """What was printed for each compiled kernel, by its name."""
    number = 20 if request.config.getoption("--whole-spaces") else 1
    return compiler.printed_for(FOLDER / "compiled_for_hopper.py", str(number))


def test_nothing_is_spilled(compiled):
    assert len(compiled) >= 7
    assert compiler.spilling(compiled) == []


def test_no_product_waits_for_another(compiled):
    """Ptxas says so (C7510 and others) where it cannot let products run one behind the other."""
    assert [name for name, text in compiled.items() if re.search(r"C75(0\d|1[0-8])", text)] == []


def test_no_number_is_moved_to_uniform_registers_between_products(compiled, tmp_path):
    """It costs 7 %: a stage's number that is kept in ordinary registers."""
    if compiler.tool("nvdisasm") is None:
        pytest.skip("needs nvdisasm")
    for name, text in compiled.items():
        ptx, code = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
        ptx.write_text(re.search(r"^\s*\.version.*?(?=^ptxas|\Z)", text, re.M | re.S)[0])
        subprocess.run([compiler.tool("ptxas"), "-arch=sm_90a", "-O3", str(ptx), "-o", str(code)], check=True)
        listing = subprocess.run(
            [compiler.tool("nvdisasm"), "-c", str(code)], capture_output=True, text=True, check=True
        ).stdout
        gaps = re.split(r"\bHGMMA\b", listing)[1:-1]
        assert len(gaps) >= 2
        inside = [gap for gap in gaps if gap.count("\n") < 20]  # longer ones lie between loops
        assert [name, []] == [name, [gap for gap in inside if "R2UR" in gap]]
