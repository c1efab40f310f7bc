# SPDX-License-Identifier: Apache-2.0
"""The `ejkernel` command, as a person types it."""

import json
import os
import re
import subprocess
import sys

import pytest
from tests.ops.execution.made_up_times import interleaved_with

from ejkernel.cli import main
from ejkernel.ops.execution import bench, task, tuning

PROGRAM = '''
import dataclasses
import jax
import jax.numpy as jnp
from ejkernel.ops import Kernel


@dataclasses.dataclass(frozen=True)
class Config:
    repeats: int = 8


class Product(Kernel[Config, jax.Array]):
    """A product that takes longer the more repeats it is told, or is wrong, or fails."""

    def run(self, a, b, *, cfg):
        if cfg.repeats < 0:
            raise RuntimeError("this candidate fails")
        for _ in range(cfg.repeats):
            b = b + 1e-30 * jnp.sin(b @ b)
        return a @ b * (2 if cfg.repeats == 0 else 1)

    def heuristic_cfg(self, inv):
        return Config(8)

    def config_space(self, inv):
        return [Config(n) for n in (1, 0, -1)]


product = Product("product")


def step():
    shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    return jax.grad(lambda a, b: jnp.sum(product(a, b) ** 2)), (shape, shape)


needs_two = lambda a, b: None
number = 3


def raises():
    raise KeyError("no such thing")


def nothing():
    return jnp.sin, (jnp.ones(3),)


def forgetful():
    return jnp.sin
'''


def time_of(config):
    """Stand in for a clock."""
    return float(config.repeats)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A module `program` in the working directory, and nowhere else."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(bench, "interleaved", interleaved_with(time_of))
    yield tmp_path
    sys.modules.pop("program", None)


def run(capsys, *arguments):
    status = main(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_program_is_tuned_forward_and_backward_and_saved(program, capsys):
    status, out, err = run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    assert status == 0
    assert "2 distinct calls, 1 forward and 1 derived" in err
    assert "product.bwd" in out
    assert "repeats=1" in out
    assert "1 wrong, 1 failed" in out
    assert "2 of 2 calls tuned" in err
    assert len(list((program / "saved").rglob("*.json"))) == 2


def test_what_was_tuned_before_is_not_tuned_again_unless_forced(program, capsys):
    run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    _, out, err = run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    assert "2 of them were tuned before" in err
    assert "Nothing to tune" in out
    _, out, _ = run(capsys, "tune", "--in-process", "program:step", "--cache", "saved", "--force")
    assert "product.bwd" in out


def test_a_search_that_ran_out_of_time_is_done_again_when_there_is_more(program, capsys):
    arguments = ("tune", "--in-process", "program:step", "--cache", "saved")
    run(capsys, *arguments, "--budget", "0.000001")
    _, _, err = run(capsys, *arguments, "--budget", "0.000001")
    assert "2 of them were tuned before" in err
    _, out, err = run(capsys, *arguments, "--budget", "600")
    assert "2 of 2 calls tuned" in err
    assert "repeats=1" in out


@pytest.mark.filterwarnings("default")
def test_a_program_none_of_whose_calls_can_be_tuned_is_a_failure(program, capsys):
    (program / "broken.py").write_text(PROGRAM.replace("def config_space(self, inv):", BREAKING))
    status, out, err = run(capsys, "tune", "--in-process", "broken:step")
    assert status == 1
    assert "its configurations cannot be had: config_space raised RuntimeError: no space left" in err
    assert "no call could be tuned" in err
    assert out == ""
    del sys.modules["broken"]


BREAKING = """def config_space(self, inv):
        raise RuntimeError("no space left")

    def other_space(self, inv):"""


def test_the_result_is_json_on_request(program, capsys):
    _, out, _ = run(capsys, "tune", "--in-process", "program:step", "--json")
    entries = json.loads(out)["entries"]
    assert [entry["op"] for entry in entries] == ["product@v0", "product.bwd@v0"]
    assert all(entry["config"] == {"repeats": 1} for entry in entries)
    assert {failure["status"] for failure in entries[0]["measured"]["failures"]} == {"wrong", "failed"}


def test_verbose_tells_the_fate_of_every_candidate(program, capsys):
    _, out, _ = run(capsys, "tune", "--in-process", "program:step", "--verbose")
    assert "RuntimeError: this candidate fails" in out
    assert re.search(r"repeats=\d +wrong .* result 0 differs from the reference", out)
    assert re.search(r"^\* +repeats=1 +measured", out, re.M)


def test_a_dry_run_lists_the_calls_and_measures_nothing(program, capsys):
    status, out, _ = run(capsys, "tune", "--in-process", "program:step", "--dry-run", "--cache", "saved")
    assert status == 0
    assert "product.bwd@v0" in out
    assert "f32[128,128] x2" in out
    assert not (program / "saved").exists()
    _, out, _ = run(capsys, "tune", "--in-process", "program:step", "--dry-run", "--json")
    assert [call["op"] for call in json.loads(out)] == ["product@v0", "product.bwd@v0"]


def test_a_program_without_calls_is_no_failure(program, capsys):
    status, out, err = run(capsys, "tune", "--in-process", "program:nothing")
    assert status == 0
    assert "0 distinct calls" in err
    assert "Nothing to tune" in out
    assert run(capsys, "tune", "--in-process", "program:nothing", "--dry-run")[1] == "Nothing to tune.\n"


@pytest.mark.filterwarnings("default")
def test_a_text_that_names_no_call_is_a_warning(program, capsys):
    (program / "empty.mlir").write_text("module {}")
    _, _, err = run(capsys, "tune", "--in-process", "empty.mlir")
    assert "no kernel call is named in empty.mlir" in err


def test_what_was_found_before_an_interrupt_is_shown_and_saved(program, capsys, monkeypatch):
    calls = []

    def interrupt_the_second(*args, **kwargs):
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return task.TuningRun(*args, **kwargs)

    monkeypatch.setattr(tuning, "TuningRun", interrupt_the_second)
    status, _, err = run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    assert status == 130
    assert re.search(r"product .* 8.00x", err)
    assert "stopped" in err
    assert len(list((program / "saved").rglob("*.json"))) == 1


def test_the_tuned_program_uses_what_was_saved_in_a_fresh_process(program, capsys):
    run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    ask = (
        "import jax.numpy as jnp, program; from ejkernel.ops import default_executor\n"
        "why = default_executor().explain(program.product, jnp.ones((128, 128)), jnp.ones((128, 128)))\n"
        "print(why.source, why.config.repeats)"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask],
        env=os.environ | {"EJKERNEL_CACHE_DIR": str(program / "saved"), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["persistent", "1"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("program", "must be MODULE:FUNCTION or a file that exists, got 'program'"),
        ("absent:step", "there is no module 'absent'"),
        ("program:absent", "module 'program' has no 'absent'"),
        ("program:forgetful", "must return (callable, args)"),
        ("program:number", "program:number must be a function, got 3"),
        ("program:needs_two", "program:needs_two must take no arguments, but it needs a, b"),
        ("program.py:step", "there is no module 'program.py' here"),
        ("program.py:step", "did you mean program:"),
        ("program.py", "program.py is a Python file; give MODULE:FUNCTION, such as program:program"),
        ("program:raises", "calling program:raises raised KeyError: 'no such thing'"),
    ],
)
def test_a_bad_target_is_a_clear_error(program, capsys, target, message):
    status, _, err = run(capsys, "tune", "--in-process", target)
    assert status == 1
    assert message in err


def test_an_error_of_the_program_shows_its_own_frames_alone(program, capsys):
    _, _, err = run(capsys, "tune", "--in-process", "program:raises")
    assert 'raise KeyError("no such thing")' in err
    assert "ejkernel/cli" not in err


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_tuned(program, capsys):
    (program / "file").write_text("")
    status, _, err = run(capsys, "tune", "--in-process", "program:step", "--cache", "file/cache")
    assert status == 1
    assert "cannot be written" in err
    assert "--cache" in err
    assert "tuning" not in err


def test_wrong_usage_is_status_2(capsys):
    status, _, err = run(capsys, "tune")
    assert status == 2
    assert "MODULE:FUNCTION" in err


def test_show_lists_what_was_saved_with_its_speed_up(program, capsys):
    run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    status, out, _ = run(capsys, "show", "--cache", "saved")
    assert status == 0
    assert "product.bwd@v0" in out
    assert "repeats=1" in out
    _, out, _ = run(capsys, "show", "--cache", "saved", "--json")
    assert {entry["config"]["repeats"] for entry in json.loads(out)} == {1}


def test_show_says_what_the_arguments_of_a_call_were(program, capsys):
    run(capsys, "tune", "program:step", "--cache", "saved")
    _, out, _ = run(capsys, "show", "--cache", "saved")
    assert "arguments" in out
    assert "f32[128,128] x2" in out


def test_show_log_prints_the_fate_of_every_candidate_of_the_last_search(program, capsys):
    run(capsys, "tune", "program:step", "--cache", "saved")
    run(capsys, "tune", "program:step", "--cache", "saved", "--force")
    status, out, _ = run(capsys, "show", "--cache", "saved", "--log", "product.bwd")
    assert status == 0
    assert out.count("product.bwd@v0") == 1
    assert "this candidate fails" in out
    key = out.partition("call ")[2][:16]
    assert run(capsys, "show", "--cache", "saved", "--log", key[:6])[1] == out
    _, out, _ = run(capsys, "show", "--cache", "saved", "--log", key, "--json")
    (search,) = json.loads(out)
    assert [outcome["config"]["repeats"] for outcome in search["outcomes"]] == [8, 1, 0, -1]
    assert {outcome["status"] for outcome in search["outcomes"]} >= {"measured", "failed"}


def test_show_log_of_what_was_not_searched_for_is_an_error(program, capsys):
    run(capsys, "tune", "program:step", "--cache", "saved")
    status, out, err = run(capsys, "show", "--cache", "saved", "--log", "nothing")
    assert (status, out) == (1, "")
    assert "'nothing'" in err


def test_show_of_an_empty_folder_says_so(tmp_path, capsys):
    _, out, _ = run(capsys, "show", "--cache", str(tmp_path / "empty"))
    assert "Nothing is saved" in out
