# SPDX-License-Identifier: Apache-2.0
"""`ejkernel doctor`: its text for a bug report."""

from __future__ import annotations

import json

import jax
import pytest

from ejkernel import settings
from ejkernel.cli import main


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
    assert len(found["devices"]) == jax.local_device_count()
    assert {"operation": "flash_attention", "implementation": "xla", "runs_here": True, "reason": None} in found[
        "implementations"
    ]
    assert found["problems"] == []


def test_a_setting_that_cannot_be_read_is_a_problem(doctor, monkeypatch):
    monkeypatch.setenv("EJKERNEL_STALE", "sometimes")
    status, found = doctor()
    assert status == 1
    assert "EJKERNEL_STALE must be one of" in found["problems"][0]


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
    assert found["problems"] == [f"{tmp_path / 'none'} does not exist"]
    assert "secret" not in json.dumps(found)


@pytest.mark.parametrize("name", ["file/configs", "file"])
def test_a_folder_that_cannot_be_written_is_a_problem(doctor, monkeypatch, tmp_path, name):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / name))
    status, found = doctor()
    assert status == 1
    assert f"{tmp_path / name} cannot be written: " in found["problems"][0]


def test_a_missing_folder_is_not_created(doctor, monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "new" / "configs"))
    assert doctor()[0] == 0
    assert not any(tmp_path.iterdir())


def test_it_prints_tables(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("0 problems\n\nversions")
    assert " no\n" not in printed
