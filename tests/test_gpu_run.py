# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu_run`: steps in separate processes; a failing step does not affect the others."""

from __future__ import annotations

import importlib.util

import pytest
from benchmarks import gpu_run
from benchmarks.gpu_run import Step


def test_a_failing_step_is_reported_and_the_next_begins(monkeypatch, tmp_path, capsys):
    steps = {
        "first one": Step(("-c", "raise SystemExit('too bad')"), 1),
        "second": Step(("-c", "import os, sys; print(os.environ['SAID'], sys.argv[1])", "{out}"), 1, {"SAID": "yes"}),
    }
    monkeypatch.setattr(gpu_run, "STEPS", steps)
    assert gpu_run.main(["--out", str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("first one: status 1")
    assert second.startswith("second: ok")
    assert "too bad" in (tmp_path / "first_one.txt").read_text()
    assert f"yes {tmp_path}" in (tmp_path / "second.txt").read_text()


def test_steps_that_cannot_begin_in_time_are_reported(tmp_path, capsys):
    assert gpu_run.main(["--out", str(tmp_path), "--minutes", "0", "tests"]) == 1
    assert capsys.readouterr().out == "tests: did not begin\n"


def test_a_step_at_its_limit_is_ended(tmp_path):
    assert gpu_run.run("late", Step(("-c", "input()"), 0), tmp_path) == "ended after 0 minutes"


def test_unknown_steps_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_run.main(["--out", str(tmp_path), "test"])
    assert "no step test; there are tests, layer mixtral" in capsys.readouterr().err


def test_compiled_spaces_are_measured_by_their_folders_names(tmp_path):
    (tmp_path / "grouped_matmul_64_groups").mkdir()
    (step,) = gpu_run.record_steps(tmp_path).values()
    assert step.arguments[:3] == ("-m", "benchmarks.record", "measure")
    assert "grouped_matmul_64_groups" in step.arguments


@pytest.mark.parametrize("name", gpu_run.STEPS)
def test_the_files_of_each_step_exist(name):
    first, second, *others = gpu_run.STEPS[name].arguments
    assert importlib.util.find_spec(second) if first == "-m" else (gpu_run.ROOT / first).exists()
    assert all((gpu_run.ROOT / argument).exists() for argument in others if argument.startswith("tests/"))
