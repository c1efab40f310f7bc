# SPDX-License-Identifier: Apache-2.0
"""`ejkernel doctor`: its text for a bug report."""

from __future__ import annotations

import errno
import json
import os

import jax
import pytest

from ejkernel import settings
from ejkernel.cli import main


@pytest.fixture(autouse=True)
def existing_cache():
    """Create the cache folder: a missing folder that is named by a variable is a problem."""
    os.mkdir(os.environ["EJKERNEL_CACHE_DIR"])


@pytest.fixture
def doctor(capsys):
    def run():
        status = main(["doctor", "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_it_names_versions_devices_and_implementations(doctor):
    status, found = doctor()
    assert status == 0
    assert found["versions"]["jax"] == jax.__version__
    assert [device["id"] for device in found["devices"]] == [device.id for device in jax.local_devices()]
    assert {"operation": "flash_attention", "implementation": "xla", "runs_here": True, "reason": None} in found[
        "implementations"
    ]
    assert found["problems"] == []


def test_a_setting_that_cannot_be_read_is_a_problem(doctor, monkeypatch):
    monkeypatch.setenv("EJKERNEL_STALE", "sometimes")
    status, found = doctor()
    assert status == 1
    assert "EJKERNEL_STALE must be one of" in found["problems"][0]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("EJKERNEL_AUTOTUNE", "2"),
        ("EJKERNEL_BATCHES", "s3://bucket/batches.jsonl"),
        ("EJKERNEL_CACHE_PROTOCOLS", "a,,b"),
        ("EJKERNEL_NOTE_MISSES", "perhaps"),
        ("EJKERNEL_ON_MISS", "ask"),
        ("EJKERNEL_OPS_RECORD", "2"),
        ("EJKERNEL_OPS_STAMP", "xml"),
    ],
)
def test_every_variable_is_checked(doctor, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    status, found = doctor()
    assert status == 1
    assert f"{variable} must " in found["problems"][0]


def test_an_unusable_file_is_a_problem(doctor):
    place = settings.current().cache_dir / "gpu-some" / "older-v0"
    place.mkdir(parents=True)
    (place / "0123-01234567.json").write_text("{")
    status, found = doctor()
    assert status == 1
    assert "unusable file" in found["problems"][0]


def test_a_missing_layer_is_a_problem_and_credentials_stay_private(doctor, monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_LAYERS", f"{tmp_path / 'none'},s3://me:secret@bucket/configs")
    status, found = doctor()
    assert status == 1
    assert found["problems"] == [f"there is no folder {tmp_path / 'none'}, named by EJKERNEL_CACHE_LAYERS"]
    assert "secret" not in json.dumps(found)


@pytest.mark.parametrize("name", ["file/configs", "file"])
def test_a_folder_that_cannot_be_written_is_a_problem(doctor, monkeypatch, tmp_path, name):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / name))
    status, found = doctor()
    assert status == 1
    assert f"{tmp_path / name} cannot be written: " in found["problems"][0]


def test_a_missing_folder_is_a_problem_if_a_variable_names_it_and_is_not_created(doctor, monkeypatch, tmp_path):
    folder = tmp_path / "new" / "configs"
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(folder))
    says = f"there is no folder {folder}, named by EJKERNEL_CACHE_DIR; the first save creates it"
    assert (1, [says]) == (lambda status, found: (status, found["problems"]))(*doctor())
    monkeypatch.delenv("EJKERNEL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    status, found = doctor()
    assert (status, found["caches"][0]["state"]) == (0, "does not exist; the first save creates it")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("variable", ["EJKERNEL_CACHE_DIR", "EJKERNEL_CACHE_LAYERS"])
def test_the_folder_above_a_cache_is_a_problem(doctor, monkeypatch, tmp_path, variable):
    (tmp_path / "copy" / "configs" / "cpu-some").mkdir(parents=True)
    monkeypatch.setenv(variable, str(tmp_path / "copy"))
    status, found = doctor()
    assert (status, len(found["problems"])) == (1, 1)
    assert found["problems"][0].endswith(f"has some: set {variable}={tmp_path / 'copy' / 'configs'}")


def test_a_full_disk_is_a_problem_although_it_takes_an_empty_file(doctor, monkeypatch):
    def write_file(file, text, **_):
        if text:
            raise OSError(errno.ENOSPC, "No space left on device")
        file.touch()

    monkeypatch.setattr("ejkernel.ops.config.persistent.write_file", write_file)
    status, found = doctor()
    assert status == 1
    assert "No space left on device" in found["problems"][0]


def test_it_prints_tables(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("0 problems\n\nversions")
    assert " no\n" not in printed
