# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of our grouped products: without a GPU, where JAX's plugin for CUDA and the compiler are there."""

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

FOLDER = Path(__file__).parent


def tool(name):
    """Return the path of one of CUDA's tools, from the search path or from NVIDIA's packages."""
    beside = [Path(folder) / "nvidia" for folder in sys.path]
    packaged = [path for folder in beside if folder.is_dir() for path in sorted(folder.glob(f"*/bin/{name}"))]
    return shutil.which(name) or (str(packaged[0]) if packaged else None)


@pytest.fixture(scope="module")
def compiled(request):
    """What was printed for each compiled kernel, by its name."""
    if reason := compat.mosaic_gpu_reason():
        pytest.skip(reason)
    if importlib.util.find_spec("jax_cuda13_plugin") is None or tool("ptxas") is None:
        pytest.skip("needs jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc and nvidia-nvvm")
    number = 20 if request.config.getoption("--whole-spaces") else 1
    switches = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_PLATFORMS": "cpu"}
    switches |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(FOLDER / "compiled_for_hopper.py"), str(number)]
    done = subprocess.run(command, env=os.environ | switches, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    parts = re.split(r"^compiling (.*)$", done.stdout, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_nothing_is_spilled(compiled):
    spilled = {name: re.findall(r"(\d+) bytes spill (?:stores|loads)", text) for name, text in compiled.items()}
    assert len(spilled) >= 7
    assert {name: ["0", "0"] for name in spilled} == spilled


def test_no_product_waits_for_another(compiled):
    """Ptxas says so (C7510 and others) where it cannot let products run one behind the other."""
    assert [name for name, text in compiled.items() if re.search(r"C75(0\d|1[0-8])", text)] == []


def test_no_number_is_moved_to_uniform_registers_between_products(compiled, tmp_path):
    """It costs 7 %: a stage's number that is kept in ordinary registers."""
    if tool("nvdisasm") is None:
        pytest.skip("needs nvdisasm")
    for name, text in compiled.items():
        ptx, code = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
        ptx.write_text(re.search(r"^\s*\.version.*?(?=^ptxas|\Z)", text, re.M | re.S)[0])
        subprocess.run([tool("ptxas"), "-arch=sm_90a", "-O3", str(ptx), "-o", str(code)], check=True)
        listing = subprocess.run([tool("nvdisasm"), "-c", str(code)], capture_output=True, text=True, check=True).stdout
        gaps = re.split(r"\bHGMMA\b", listing)[1:-1]
        assert len(gaps) >= 2
        inside = [gap for gap in gaps if gap.count("\n") < 20]  # longer ones lie between loops
        assert [name, []] == [name, [gap for gap in inside if "R2UR" in gap]]
