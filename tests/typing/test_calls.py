# SPDX-License-Identifier: Apache-2.0
"""Pyright, as editors run it, refuses the wrong calls of `calls.py`, and no others; `make lint` runs mypy on them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CALLS = HERE / "calls.py"
WRONG = [
    number
    for number, line in enumerate(CALLS.read_text(encoding="utf-8").splitlines(), 1)
    if line.endswith("  # wrong")
]


def run(*command):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=HERE.parents[1], check=False, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: it found errors
    return done.stdout


@pytest.mark.slow
def test_pyright_refuses_only_the_wrong_calls():
    pytest.importorskip("pyright", reason="the extra `lint` has it")
    # The wheel contains pyright, and its extra `nodejs` contains Node: nothing is downloaded.
    found = json.loads(run("pyright", "--outputjson", "--project", str(HERE), "--pythonpath", sys.executable))
    problems = {(problem["range"]["start"]["line"] + 1, problem["message"]) for problem in found["generalDiagnostics"]}
    assert sorted({line for line, _ in problems}) == WRONG, problems
    assert found["summary"]["filesAnalyzed"] == 1
