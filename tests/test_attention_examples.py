# SPDX-License-Identifier: Apache-2.0
"""`examples/gemma` and `examples/triangle_attention`: the replaced attention computes the same, in less memory."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
INDEX = (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [("gemma", ["--seq", "512"]), ("triangle_attention", ["--residues", "96"])],
    ids=["gemma", "triangle attention"],
)
def test_the_replaced_attention_computes_the_same_in_less_memory(monkeypatch, capsys, name, size):
    if name == "gemma":
        pytest.importorskip("flax")
    file = EXAMPLES / name / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [file.name, *size])
    runpy.run_path(str(file), run_name="__main__")  # exits if the results differ
    before, after = (int(part.split()[0]) for part in capsys.readouterr().out.split("arrays: ")[1].split(", "))
    assert after <= 0.8 * before


def test_the_index_lists_every_example_and_shows_how_to_run_it():
    folders = sorted(place.name for place in EXAMPLES.iterdir() if place.is_dir() and any(place.glob("*.py")))
    assert sorted(re.findall(r"^\| \[(\w+)\]\(\1\)", INDEX, re.M)) == folders
    shown = re.findall(r"`python (examples/[^\s`]+)", INDEX)
    assert all((EXAMPLES.parent / file).is_file() for file in shown)
    assert sorted({Path(file).parent.name for file in shown}) == folders
