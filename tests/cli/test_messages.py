# SPDX-License-Identifier: Apache-2.0
"""Messages of commands about wrong options and folders: they say what to do."""

from __future__ import annotations

import io
import re
import sys

import pytest
from tests.cli.searches import found, save

from ejkernel.cli import main, programs
from ejkernel.ops import PersistentCache
from ejkernel.ops.errors import ArgumentError


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("explain step.py --target nvidia_h200", 2, "--target requires MODULE:FUNCTION."),
        ("explain m:step --missed", 2, "pass exactly one of MODULE:FUNCTION, FILE and --missed."),
        ("report --against previous --against-device gpu", 2, "compares searches of one device; leave out"),
        ("report --output {folder}", 2, "is a folder; name a file, or use --format svg or png."),
        ("report {folder}", 2, "; --cache names a folder, and --help lists all options."),
        ("show rms_norm --cache {folder}/none", 1, "`ejkernel cache path` prints the default one."),
        ("cache pull --dry-run", 2, "--dry-run requires a URL."),
        ("cache pull --cache {folder}", 1, "pass a URL, or set EJKERNEL_CACHE_LAYERS to the URLs of shared caches."),
        ("cache clear --cache {folder}", 2, "cannot ask without a terminal; pass --yes, or --dry-run to list the"),
    ],
)
def test_a_wrong_option_or_folder_is_an_error_that_says_what_to_do(
    command, status, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.delenv("EJKERNEL_CACHE_LAYERS", raising=False)
    folder = save(tmp_path / "configs", found())
    assert main(command.format(folder=folder).split()) == status
    error = " ".join(capsys.readouterr().err.split())
    assert message in error


@pytest.mark.parametrize(("below", "what"), [("", "it"), ("/below/it", "file")])
def test_a_file_in_place_of_the_folder_to_write_is_named(below, what, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    place = "it" if what == "it" else str(file)
    assert PersistentCache(f"{file}{below}", shipped=False).why_not_writable() == f"{place} is a file, not a folder"


def test_arguments_of_a_program_that_are_no_tuple_are_named():
    with pytest.raises(
        ArgumentError, match=re.escape("must return the arguments as a tuple, e.g. `return step, (x,)`")
    ):
        programs._check_program("train:step", (print, 3))


@pytest.mark.parametrize("command", ["report", "show rms_norm"])
def test_a_cache_folder_that_is_a_file_is_an_error(command, tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(file))
    assert main(command.split()) == 1
    assert f"{file} is not a folder; choose one with --cache or EJKERNEL_CACHE_DIR." in capsys.readouterr().err


def test_a_warning_that_is_an_error_is_printed_without_a_traceback(tmp_path, capsys):
    folder = save(tmp_path / "configs", found())
    next(folder.rglob("*.json")).write_text("{}")
    assert main(["show", "--cache", str(folder)]) == 1
    assert "ejkernel: error: ignoring cache entry" in capsys.readouterr().err


@pytest.mark.slow
def test_figures_need_a_folder(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is an extra, and is not installed")
    file, folder = tmp_path / "file", save(tmp_path / "configs", found())
    file.write_text("")
    assert main(["report", "--cache", str(folder), "--format", "svg", "--output", str(file)]) == 1
    assert "is not a folder; figures need one: choose it with --output." in capsys.readouterr().err
    place = file / "inside"
    assert main(["report", "--cache", str(folder), "--format", "svg", "--output", str(place)]) == 1
    assert (
        f"{place} cannot be written (Not a directory); choose another folder with --output." in capsys.readouterr().err
    )


def test_a_mesh_of_too_many_devices_names_the_option_and_the_variable(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meshed.py").write_text("import jax\ndef step():\n    return jax.make_mesh((99,), ('data',)), ()\n")
    assert main(["explain", "./meshed.py:step"]) == 1
    assert (
        "pass --mesh-devices N to `ejkernel tune` or `explain`. For other commands, JAX_NUM_CPU"
        in capsys.readouterr().err
    )
