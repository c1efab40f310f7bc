# SPDX-License-Identifier: Apache-2.0
"""The machine code of our grouped products; needs JAX's CUDA plugin and the compiler, but no GPU."""

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
    """The compiler's report for each kernel, by name."""
    number = 20 if request.config.getoption("--whole") else 1
    return compiler.printed_for(FOLDER / "compiled_for_hopper.py", str(number))


def test_nothing_is_spilled(compiled):
    assert len(compiled) >= 7
    assert compiler.spilling(compiled) == []


def test_no_product_waits_for_another(compiled):
    """Ptxas says so (C7510 and others) where it cannot let products run one behind the other."""
    assert [name for name, text in compiled.items() if re.search(r"C75(0\d|1[0-8])", text)] == []


def test_no_number_is_moved_to_uniform_registers_between_products(compiled, tmp_path):
    """A move costs 7 %, e.g. for a stage number in ordinary registers."""
    if compiler.tool("nvdisasm") is None:
        pytest.skip("needs nvdisasm")
    for name, text in compiled.items():
        ptx, code = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
        ptx.write_text(re.search(r"^\s*\.version.*?(?=^ptxas|\Z)", text, re.M | re.S)[0])
        subprocess.run([compiler.tool("ptxas"), "-arch=sm_90a", "-O3", str(ptx), "-o", str(code)], check=True)
        listing = subprocess.run(
            [compiler.tool("nvdisasm"), "-c", str(code)], capture_output=True, text=True, check=True
        ).stdout
        steps = innermost_loops(listing.splitlines(), "HGMMA")
        gaps = [gap for loop in steps for gap in re.split(r"\bHGMMA\b", loop)[1:-1]]
        assert len(gaps) >= 3, name
        assert [name, []] == [name, [gap for gap in gaps if "R2UR" in gap]]


def innermost_loops(lines, instruction):
    """Return the loops that have an instruction, and no loop within that has it; before them it costs nothing."""
    labels = {line.rstrip(":"): index for index, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    jumps = [(index, re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)) for index, line in enumerate(lines)]
    back = [(labels[jump[1]], index) for index, jump in jumps if jump and labels.get(jump[1], index) < index]
    having = [(start, end) for start, end in back if any(instruction in line for line in lines[start:end])]
    inner = [a for a in having if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in having)]
    return ["\n".join(lines[start:end]) for start, end in inner]
