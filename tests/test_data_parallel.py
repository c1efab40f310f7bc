# SPDX-License-Identifier: Apache-2.0
"""`examples/data_parallel`: training steps over a mesh, in two libraries, match plain JAX."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[1] / "examples" / "data_parallel" / "run.py"


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), [(4, 1), (2, 2)])
@pytest.mark.parametrize(("library", "needs"), [("equinox", "equinox"), ("nnx", "flax")])
def test_a_step_over_a_mesh_matches_plain_jax(library, needs, data, model):
    pytest.importorskip(needs)
    size = ["--data", str(data), "--model", str(model), "--steps", "3"]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(RUN), "--library", library, *size],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "losses agree" in done.stdout


_PROGRAM = """
import runpy, sys, jax
jax.config.update("jax_num_cpu_devices", 4)
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
