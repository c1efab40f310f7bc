# SPDX-License-Identifier: Apache-2.0
"""`examples/mixture_of_experts`: a layer of experts, in three libraries, learns what it learns with JAX's products."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[1] / "examples" / "mixture_of_experts" / "run.py"


@pytest.mark.slow
@pytest.mark.parametrize(("library", "needs"), [("plain", "jax"), ("equinox", "equinox"), ("nnx", "flax")])
def test_a_layer_of_experts_learns_what_it_learns_with_the_products_of_jax(library, needs):
    pytest.importorskip(needs)
    command = [sys.executable, str(RUN), "--library", library, "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "losses agree" in done.stdout
