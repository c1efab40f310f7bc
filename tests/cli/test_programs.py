# SPDX-License-Identifier: Apache-2.0
"""`ejkernel tune` of files, by processes that never saw the program."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from tests import forked

from ejkernel.cli import main
from ejkernel.cli.files import calls_in_file
from ejkernel.cli.programs import load_program, located, with_cache
from ejkernel.ops.errors import ArgumentError

pytestmark = pytest.mark.slow

KERNELS = '''
import dataclasses
import jax
import jax.numpy as jnp
from ejkernel.ops import Kernel, nameable


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 1


@dataclasses.dataclass(frozen=True)
class Options:
    scale: float = 2.0


@nameable
def swish(x):
    return x * jax.nn.sigmoid(x)


class Affine(Kernel[Config, jax.Array]):
    """A product and an activation, with residuals."""

    def run(self, x, w, *, activation, options=Options(), cfg):
        return self.fwd_with_residuals(x, w, activation=activation, options=options, cfg=cfg)[0]

    def fwd_with_residuals(self, x, w, *, activation, options=Options(), cfg):
        y = (x @ w).reshape(cfg.rows, -1).reshape(x.shape[0], w.shape[1])
        return activation(y) * options.scale, y

    def vjp(self, residuals, out, cotangents, x, w, *, activation, options=Options(), cfg):
        rule = jax.vjp(lambda x, w: activation(x @ w) * options.scale, x, w)[1]
        return rule(cotangents[0])

    def heuristic_cfg(self, inv):
        return Config(1)

    def config_space(self, inv):
        return [Config(2), Config(4)]


affine = Affine("affine")
'''

PROGRAM = """
import sys
import jax
import jax.numpy as jnp
from jax import export
from my_kernels import Options, affine, swish
from ejkernel.modules import rms_norm


def loss(x, w, scale):
    y = jax.vmap(lambda row: affine(row, w, activation=swish, options=Options(3.0)))(x)
    return (rms_norm(y, scale) ** 2).sum()


def program():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 8, 4), (4, 16), (16,))]
    return jax.jit(jax.grad(loss, (0, 1))), shapes


if __name__ == "__main__":
    fn, shapes = program()
    lowered = fn.lower(*shapes)
    open("program.mlir", "w").write(lowered.as_text())
    open("program.hlo", "w").write(lowered.as_text(dialect="hlo"))
    open("program.bin", "wb").write(export.export(fn)(*shapes).serialize())
"""

RUN = """
import jax.numpy as jnp
from my_program import loss
import jax
jax.grad(loss, (0, 1))(jnp.ones((2, 8, 4)), jnp.ones((4, 16)), jnp.ones(16))
"""


def python(folder, *arguments, **environment):
    """Run Python in another process, in `folder`."""
    return forked.python(folder, *arguments, EJKERNEL_CACHE_DIR=str(folder / "cache"), **environment)


def tune(folder, *arguments, worker=False, **environment):
    """Run `ejkernel tune` in a new process, which does without a worker unless the test is about one."""
    mode = [] if worker else ["--in-process"]
    done = python(folder, "-m", "ejkernel.cli", "tune", *arguments, *mode, **environment)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    """A folder with the kernels, and with texts of a program lowered by another process."""
    folder = tmp_path_factory.mktemp("lowered")
    (folder / "my_kernels.py").write_text(KERNELS)
    (folder / "my_program.py").write_text(PROGRAM)
    done = python(folder, "my_program.py", EJKERNEL_OPS_STAMP="json")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(lowered, tmp_path):
    """A copy of that folder, without the program."""
    for file in lowered.iterdir():
        if file.is_file() and file.name != "my_program.py":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


IMPORTS = ("--import", "my_kernels")
OPERATIONS = ["RmsNorm.bwd@v0", "RmsNorm@v0", "affine.bwd@v0", "affine@v0"]


@pytest.mark.parametrize("file", ["program.mlir", "program.hlo", "program.bin"])
def test_a_fresh_process_lists_the_calls_of_a_file(folder, file):
    status, out, err = tune(folder, file, *IMPORTS, "--dry-run", "--json", worker=file == "program.bin")
    assert status == 0, err
    assert sorted(call["op"].replace("rms_norm", "RmsNorm") for call in json.loads(out)) == OPERATIONS
    assert (
        f"{file}: 4 labels, 4 of them calls that can be tuned here, 0 without a description, 0 not usable here" in err
    )
    assert not (folder / "cache").exists()


def test_the_program_uses_configurations_tuned_by_another_process(folder, lowered):
    status, out, err = tune(folder, "program.mlir", *IMPORTS, "--budget", "20", worker=True)
    assert status == 0, err
    assert "4 calls in " in err
    assert "affine.bwd" in out
    (folder / "my_program.py").write_bytes((lowered / "my_program.py").read_bytes())
    ask = (
        "from my_program import program; from ejkernel.ops import default_executor; fn, shapes = program()\n"
        "print(*[why.source for why in default_executor().explain(fn, *shapes)])"
    )
    done = python(folder, "-c", ask)
    assert done.stdout.split() == ["persistent"] * 4, done.stderr


def test_the_package_s_kernels_are_found_and_unnamed_others_are_a_warning(folder):
    status, out, err = tune(folder, "program.mlir", "--dry-run")
    assert status == 0
    assert "rms_norm.bwd@v0" in out
    assert (
        "there is no kernel 'affine@v0' here; name the module that creates it at its top level (--import MODULE)" in err
    )
    assert "4 labels, 2 of them calls that can be tuned here, 0 without a description, 2 not usable here" in err


def test_a_text_of_keys_alone_says_how_to_lower_it(folder):
    text = (folder / "program.mlir").read_text()
    start, end = text.index("ejkernel_ops#"), text.index("ejkernel_ops#") + 60
    (folder / "bare.mlir").write_text(text[start:end].partition('"')[0])
    status, _, err = tune(folder, "bare.mlir", *IMPORTS)
    assert status == 1
    assert "bare.mlir has no call that can be tuned here; the warnings above say why" in err
    assert "labels without a description of their call: ejkernel_ops#" in err
    assert "EJKERNEL_OPS_STAMP=json" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ML\xefR\x00\x01", "is MLIR bytecode; save the program as text"),
        (b"\x00\x01\x02 nothing", "is neither a program's text nor a readable exported program"),
    ],
)
def test_another_kind_of_file_is_a_clear_error(tmp_path, capsys, content, message):
    (tmp_path / "program.x").write_bytes(content)
    assert main(["tune", str(tmp_path / "program.x")]) == 1
    err = capsys.readouterr().err
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_a_name_that_no_file_can_have_is_a_clear_error(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "a" * 5000, "--dry-run", "--in-process"]) == 1
    assert "ejkernel: error: " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["tune", "~no-such-user/x.py:step"], ["cache", "merge", "~no-such-user/x"]])
def test_an_unknown_home_folder_is_a_clear_error(capsys, words):
    assert main(words) == 1
    assert "the home folder in '~no-such-user/x" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_only_regular_files_are_read_as_programs(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="it is not a regular file"):
        calls_in_file(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="there is no file"):
        calls_in_file(tmp_path / "none")


def test_a_text_imports_nothing_and_runs_nothing(folder):
    (folder / "evil.py").write_text("open('was_here', 'w')\ndef swish(x):\n    open('was_called', 'w')\n")
    text = (folder / "program.mlir").read_text().replace("my_kernels.swish", "evil.swish")
    (folder / "evil.mlir").write_text(text)
    status, _, err = tune(folder, "evil.mlir", *IMPORTS, "--dry-run")
    assert status == 0
    assert "'evil.swish' may not be named here: import its module, and use" in err
    assert "(--import MODULE)" in err
    assert not (folder / "was_here").exists()


def test_an_import_that_fails_shows_the_users_frames(folder):
    (folder / "broken.py").write_text("raise KeyError('here')")
    status, _, err = tune(folder, "program.mlir", "--import", "broken", worker=True)
    assert status == 1
    assert "importing broken raised KeyError" in err


@pytest.mark.parametrize("arguments", [[], ["--missed", "program.mlir"]])
def test_one_of_program_and_missed_is_needed(capsys, arguments):
    assert main(["tune", *arguments]) == 2
    assert "pass exactly one of MODULE:FUNCTION, FILE, --missed, --shapes and --from" in capsys.readouterr().err


# --- missed calls ---


def notes(folder):
    return sorted(path.name for path in (folder / "cache" / "missed").rglob("*.json"))


def test_missed_calls_are_tuned_by_another_process_and_their_notes_removed(folder, lowered):
    (folder / "my_program.py").write_bytes((lowered / "my_program.py").read_bytes())
    done = python(folder, "-c", RUN, EJKERNEL_NOTE_MISSES="1")
    assert done.returncode == 0, done.stderr
    assert len(notes(folder)) == 4
    (folder / "my_program.py").unlink()
    status, out, err = tune(folder, "--missed", *IMPORTS, "--dry-run", "--json")
    assert status == 0, err
    assert len(json.loads(out)) == 4
    assert len(notes(folder)) == 4
    status, _, err = tune(folder, "--missed", "--budget", "20")
    assert "4 notes, 2 of them calls that can be tuned here, 2 not usable here, 0 of other devices" in err
    assert "name the module that creates it at its top level (--import my_kernels)" in err
    assert len(notes(folder)) == 2
    status, _, err = tune(folder, "--missed", "--dry-run")
    assert status == 1
    assert "has no call that can be tuned here" in err
    status, _, err = tune(folder, "--missed", *IMPORTS, "--budget", "20", worker=True)
    assert status == 0, err
    assert notes(folder) == []


def test_without_notes_no_call_is_tuned(capsys):
    assert main(["tune", "--missed"]) == 0
    printed = capsys.readouterr()
    assert "Nothing to tune" in printed.out
    assert "no notes; programs that run with EJKERNEL_NOTE_MISSES=1 write them" in printed.err


def test_a_miss_is_an_error_in_a_process_that_asked_for_it(folder, lowered):
    (folder / "my_program.py").write_bytes((lowered / "my_program.py").read_bytes())
    done = python(folder, "-c", RUN, EJKERNEL_ON_MISS="error")
    assert "NoConfigError: No configuration for 'affine'" in done.stderr
    status, _, err = tune(folder, "my_program:program", "--budget", "20", EJKERNEL_ON_MISS="error")
    assert status == 0, err
    done = python(folder, "-c", RUN, EJKERNEL_ON_MISS="error")
    assert done.returncode == 0, done.stderr


def test_the_text_of_a_program_is_no_program_that_runs(tmp_path, monkeypatch):
    (tmp_path / "step.mlir").write_text("module {}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"step\.mlir is a file, and only `tune` and `explain` take the text"):
        located("step.mlir")


def test_a_class_is_no_program(tmp_path, monkeypatch):
    (tmp_path / "of_class.py").write_text("class Model:\n    def __init__(self, width):\n        pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"Model is a class; name a function without arguments"):
        load_program(located(f"{tmp_path}/of_class.py:Model"))


def test_names_with_spaces_are_quoted_in_the_next_command():
    assert shlex.split(with_cache("my steps/a.py:step", Path("a b"))) == ["my steps/a.py:step", "--cache", "a b"]
