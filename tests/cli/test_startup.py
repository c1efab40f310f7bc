# SPDX-License-Identifier: Apache-2.0
"""Commands that answer without JAX, since importing it takes most of a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click.shell_completion
import pytest

from ejkernel.cli import main

# In one process: a command that imports JAX would affect all later ones.
PROBE = """
import sys
from ejkernel.cli import main
for line in sys.stdin.read().splitlines():
    arguments = line.split()
    status = main(arguments)
    assert "jax" not in sys.modules, arguments
    assert "rich" not in sys.modules, arguments
    print("status of", *arguments, "is", status)
"""

QUICK = {
    "--help": 0,
    "-h": 0,
    "--version": 0,
    "tune --help": 0,
    "bench --help": 0,
    "explain --help": 0,
    "show --help": 0,
    "report --help": 0,
    "list --help": 0,
    "cache --help": 0,
    "cache prune --help": 0,
    "cache path": 0,
    "cache path --json": 0,
    "tune": 2,
    "bench": 2,
    "absent": 2,
    "cache prune": 2,
}


def test_help_the_version_the_folder_and_wrong_usage_do_without_jax(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        input="\n".join(QUICK),
        env=os.environ | {"EJKERNEL_CACHE_DIR": str(tmp_path / "some where")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line, status in QUICK.items():
        assert f"status of {line} is {status}\n" in done.stdout
    assert f"\n{tmp_path / 'some where'}\n" in done.stdout


def test_help_names_every_command_and_status(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.partition("Commands:\n")[2].splitlines()] == [
        "tune",
        "bench",
        "explain",
        "show",
        "report",
        "list",
        "doctor",
        "cache",
    ]
    assert "1 on failure (also for an unknown or malformed operation" in " ".join(out.split())


@pytest.mark.parametrize("group", [[], ["cache"]], ids=["ejkernel", "ejkernel cache"])
def test_descriptions_of_commands_fit_80_columns(capsys, monkeypatch, group):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*group, "--help"]) == 0
    lines = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    assert all(line.endswith(".") and not line.endswith("..") for line in lines)


@pytest.mark.parametrize("module", ["ejkernel", "ejkernel.cli"])
def test_the_package_runs_as_the_command(module):
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ejkernel, version ")


def test_a_variable_that_cannot_be_read_is_an_error_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "s3://perhaps")
    assert main(["cache", "path"]) == 1
    assert capsys.readouterr().err.startswith("ejkernel: error: EJKERNEL_CACHE_DIR must be a folder")


def test_a_reader_that_goes_away_is_no_traceback(tmp_path):
    command = f"{sys.executable} -m ejkernel cache path | true"
    environment = os.environ | {"EJKERNEL_CACHE_DIR": str(tmp_path / ("long" * 20_000))}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("place", "status", "said"),
    [("/dev/full", 1, "ejkernel: error: [Errno 28] No space left on device\n"), ("&-", 0, "")],
    ids=["full disk", "closed"],
)
def test_output_that_cannot_be_written_is_no_traceback(tmp_path, place, status, said):
    command = f"{sys.executable} -m ejkernel cache path >{place}"
    environment = os.environ | {"EJKERNEL_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, said)


def test_a_removed_working_directory_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert main(["explain", "program:step"]) == 1
    assert "ejkernel: error: the working directory was removed; change to another one.\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ejkernel tu", "tune"),
        ("ejkernel cache pr", "prune"),
        ("ejkernel tune --bud", "--budget"),
        ("ejkernel bench --op rm", "rms_norm"),
        ("ejkernel explain --target nvidia_h2", "nvidia_h200"),
    ],
)
def test_a_shell_completes_commands_options_and_names(monkeypatch, capsys, words, completed):
    monkeypatch.setenv("_EJKERNEL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with pytest.raises(SystemExit, match="0"):
        main([])
    assert capsys.readouterr().out == f"plain,{completed}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_line_for_a_shell_prints_its_completion(monkeypatch, capsys, shell):
    monkeypatch.setenv("_EJKERNEL_COMPLETE", f"{shell}_source")
    monkeypatch.setattr(click.shell_completion.BashComplete, "_check_version", lambda self: None)  # starts a bash
    with pytest.raises(SystemExit, match="0"):
        main([])
    assert f"_EJKERNEL_COMPLETE={shell}_complete" in capsys.readouterr().out
    guide = Path(__file__).parents[2] / "docs" / "tuning.md"
    assert f"_EJKERNEL_COMPLETE={shell}_source ejkernel" in guide.read_text(encoding="utf-8")
