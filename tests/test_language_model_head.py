# SPDX-License-Identifier: Apache-2.0
"""`examples/language_model_head`: the loss without logits is the loss with them, in two libraries."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "language_model_head"


@pytest.mark.slow
@pytest.mark.parametrize(("library", "needs"), [("equinox", "equinox"), ("nnx", "flax")])
def test_model_learns_the_same_without_logits_in_memory(monkeypatch, capsys, library, needs):
    pytest.importorskip(needs)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, f"{library}_model", raising=False)
    sizes = ["--vocabulary", "4096", "--width", "16", "--tokens", "1024"]
    monkeypatch.setattr(sys, "argv", ["run.py", "--library", library, *sizes])
    runpy.run_path(str(FOLDER / "run.py"), run_name="__main__")  # exits if the losses differ
    monkeypatch.delitem(sys.modules, f"{library}_model")
    before, after = (int(part.split()[0]) for part in capsys.readouterr().out.split("arrays: ")[1].split(", "))
    assert after <= 0.4 * before
