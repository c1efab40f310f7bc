# SPDX-License-Identifier: Apache-2.0
"""The machine code of our kernels, as ptxas reports it; needs JAX's CUDA plugin and the compiler, but no GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ejkernel import compat

pytestmark = pytest.mark.slow


def tool(name):
    """Return the path of one of CUDA's tools, from the search path or from NVIDIA's packages."""
    beside = [Path(folder) / "nvidia" for folder in sys.path]
    packaged = [path for folder in beside if folder.is_dir() for path in sorted(folder.glob(f"*/bin/{name}"))]
    return shutil.which(name) or (str(packaged[0]) if packaged else None)


def printed_for(script, *arguments):
    """Return the compiler's report for each kernel that a script compiles, by name; skip if a tool is missing."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    if importlib.util.find_spec("jax_cuda13_plugin") is None or tool("ptxas") is None:
        pytest.skip("needs jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc and nvidia-nvvm")
    switches = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_PLATFORMS": "cpu"}
    switches |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=os.environ | switches, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    parts = re.split(r"^compiling (.*)$", done.stdout, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def spilling(compiled):
    """Return the names of kernels that spill registers, or have no report."""
    said = {name: re.findall(r"(\d+) bytes spill (?:stores|loads)", text) for name, text in compiled.items()}
    return [name for name, spilled in said.items() if set(spilled) != {"0"}]


# --- grouped products ---


@pytest.fixture(scope="module")
def grouped(request):
    """The compiler's report for each kernel, by name."""
    number = 20 if request.config.getoption("--whole") else 1
    return printed_for(Path(__file__).parent / "grouped_matmul" / "compiled_for_hopper.py", str(number))


def test_no_grouped_product_spills(grouped):
    assert len(grouped) >= 7
    assert spilling(grouped) == []


def test_no_grouped_product_waits_for_another(grouped):
    """Ptxas says so (C7510 and others) where it cannot let products run one behind the other."""
    assert [name for name, text in grouped.items() if re.search(r"C75(0\d|1[0-8])", text)] == []


def test_no_number_is_moved_to_uniform_registers_between_products(grouped, tmp_path):
    """A move costs 7 %, e.g. for a stage number in ordinary registers."""
    if tool("nvdisasm") is None:
        pytest.skip("needs nvdisasm")
    for name, text in grouped.items():
        ptx, code = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
        ptx.write_text(re.search(r"^\s*\.version.*?(?=^ptxas|\Z)", text, re.M | re.S)[0])
        subprocess.run([tool("ptxas"), "-arch=sm_90a", "-O3", str(ptx), "-o", str(code)], check=True)
        listing = subprocess.run([tool("nvdisasm"), "-c", str(code)], capture_output=True, text=True, check=True).stdout
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


# --- the loss ---


def test_no_kernel_of_the_loss_spills():
    compiled = printed_for(Path(__file__).parent / "linear_cross_entropy" / "compiled_for_hopper.py")
    assert len(compiled) == 12
    assert spilling(compiled) == []
    assert sum("linear_cross_entropy_product" in report for report in compiled.values()) == 6
    # Chunks of rows add to the weight's gradient in place.
    assert sum("linear_cross_entropy_sum" in report for report in compiled.values()) == 4


# --- paged attention ---


MIXED = ["mixed", "mixed, all options, head_dim 64", "mixed, int8"]
MIXED += ["few tokens, head_dim 256", "mixed, head_dim 256", "mixed, all options, head_dim 256"]
MIXED += ["mixed, head_dim 96", "mixed, head_dim 80", "mixed, head_dim 192"]
SPILLED = re.compile(r"Function properties for (\w+)_mosaic_gpu_kernel\n.* (\d+) bytes spill stores")

USED = re.compile(r"Function properties for paged_attention_mosaic_gpu_kernel\n.*\n.*Used (\d+) registers")
TWO_BLOCKS = 65_536 // (2 * 256)  # registers of a thread, if two blocks of threads share a multiprocessor

PREFILL, LATENT = "paged_attention_prefill", "latent_attention"
WIDE_WITH_ALL = "mixed, all options, head_dim 256"


def test_no_kernel_spills_registers_except_prefill_and_latent_and_two_blocks_of_decode_share_a_multiprocessor():
    compiled = printed_for(Path(__file__).parent / "paged_attention" / "compiled_for_hopper.py")
    assert len(compiled) == 23
    spilled = {name: dict(SPILLED.findall(text)) for name, text in compiled.items()}
    assert [name for name, kernels in spilled.items() if PREFILL in kernels] == ["few tokens", *MIXED]
    for name, kernels in spilled.items():
        if name.startswith("latent"):  # between items, outside of the loop over keys
            assert int(kernels.pop(LATENT)) <= 64
            assert kernels == {f"{LATENT}_sums": "0"}
            continue
        assert "paged_attention" in kernels
        assert int(kernels.pop(PREFILL, 0)) <= (64 if name == WIDE_WITH_ALL else 32)
        assert set(kernels.values()) == {"0"}
    registers = {name: int(USED.findall(text)[0]) for name, text in compiled.items() if not name.startswith("latent")}
    alone = {"decode, 64 heads per KV head", "few tokens", "few tokens, head_dim 256", "decode, head_dim 256, int8"}
    assert {name for name, used in registers.items() if used > TWO_BLOCKS} <= alone


# --- products of 8-bit operands ---


def test_no_product_of_8_bit_numbers_spills_and_none_waits_for_another(request):
    number = 20 if request.config.getoption("--whole") else 1
    compiled = printed_for(Path(__file__).parent / "quantized_matmul" / "compiled_for_hopper.py", str(number))
    assert len(compiled) >= 3
    assert spilling(compiled) == []
    # Ptxas says so where it cannot let products run one behind the other.
    assert [name for name, text in compiled.items() if re.search(r"C75(0\d|1[0-8])", text)] == []


# --- normalisations of short rows, whose registers are estimated from shapes ---


def test_no_normalisation_of_short_rows_spills():
    compiled = printed_for(Path(__file__).parent / "row_norms" / "compiled_for_hopper.py")
    assert len(compiled) == 16
    assert spilling(compiled) == []
