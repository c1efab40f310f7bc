# SPDX-License-Identifier: Apache-2.0
"""`examples/mixture_of_experts`: a layer of experts, in three libraries, matches JAX's products."""

import importlib
import subprocess
import sys
from pathlib import Path

import jax
import pytest

RUN = Path(__file__).resolve().parents[1] / "examples" / "mixture_of_experts" / "run.py"


@pytest.mark.slow
@pytest.mark.parametrize(("library", "needs"), [("plain", "jax"), ("equinox", "equinox"), ("nnx", "flax")])
def test_a_layer_of_experts_matches_jax_s_products(library, needs):
    pytest.importorskip(needs)
    command = [sys.executable, str(RUN), "--library", library, "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "losses agree" in done.stdout


@pytest.fixture
def example(monkeypatch):
    """The example as a module, removed after the test."""
    monkeypatch.syspath_prepend(str(RUN.parent))
    yield importlib.import_module("run")
    for name in ("run", "layer", "plain_model"):
        sys.modules.pop(name, None)


def test_a_contender_out_of_memory_is_left_out_with_the_reason(example, monkeypatch):
    def too_large(parameters, x):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 TiB.\nMore.")

    def kept(parameters, x):
        return x * parameters

    one = jax.numpy.ones(())
    monkeypatch.setattr(example, "models", lambda *_: {"ejkernel": (kept, one), "ragged_dot": (too_large, one)})
    result = example.train("plain", example.Size(), steps=2, contenders=("ejkernel", "ragged_dot"))
    assert result["ragged_dot"] == {"failed": "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 TiB."}
    assert len(result["ejkernel"]["losses"]) == 3
    assert "left out: RESOURCE_EXHAUSTED" in list(example.lines(result))[1]
    assert example.disagreement(result, 1e-4) is None


def test_differing_losses_are_reported(example):
    result = {"ejkernel": {"losses": [1.0, 2.0]}, "ragged_dot": {"losses": [1.0, 2.1]}, "dense": {"losses": [5.0, 4.0]}}
    assert "losses disagree" in example.disagreement(result, 1e-2)
    assert example.disagreement(result, 1e-1) is None
