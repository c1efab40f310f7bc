# SPDX-License-Identifier: Apache-2.0
"""Reports of ptxas about our kernels; needs JAX's CUDA plugin and the compiler, but no GPU."""

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


def tool(name):
    """Return the path of one of CUDA's tools, from the search path or from NVIDIA's packages."""
    beside = [Path(folder) / "nvidia" for folder in sys.path]
    packaged = [path for folder in beside if folder.is_dir() for path in sorted(folder.glob(f"*/bin/{name}"))]
    return shutil.which(name) or (str(packaged[0]) if packaged else None)


def printed_for(script, *arguments):
    """Return the compiler's report for each kernel that a script compiles, by name; skip if a tool is missing."""
    if reason := compat.mosaic_gpu_reason():
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
