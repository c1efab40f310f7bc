# SPDX-License-Identifier: Apache-2.0
"""`examples/eight_bit_training`: FP8 trains as bfloat16 does, and a recipe that does not is reported."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[1] / "examples" / "eight_bit_training" / "eight_bit_training.py"

pytestmark = pytest.mark.slow


@pytest.mark.whole
def test_the_loss_curves_of_fp8_and_bfloat16_agree():
    command = [sys.executable, str(RUN), "--steps", "120", "--seeds", "2", "--tokens", "64", "--width", "32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the curves agree" in done.stdout


@pytest.fixture
def example(monkeypatch):
    """The example with two of its recipes."""
    spec = importlib.util.spec_from_file_location("eight_bit_training", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RECIPES", ("bfloat16", "current scaling"))
    return module


def test_scaled_fp8_trains_like_bfloat16(example, capsys):
    assert example.main(["--steps", "60", "--seeds", "2", "--tokens", "64", "--width", "32"]) == 0
    assert "the curves agree" in capsys.readouterr().out


def test_a_recipe_that_trains_worse_is_reported(example, monkeypatch, capsys):
    plain = example.quantized_dense
    monkeypatch.setattr(example, "quantized_dense", lambda x, w, **options: plain(x, w, **options) * 0.3)
    assert example.main(["--steps", "60", "--seeds", "2", "--tokens", "64", "--width", "32"]) == 1
    assert "the curves disagree" in capsys.readouterr().out
