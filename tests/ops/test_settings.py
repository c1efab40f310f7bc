# SPDX-License-Identifier: Apache-2.0
"""The environment: defaults, accepted spellings, and errors that name the variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from ejkernel import settings
from ejkernel.ops.errors import ConfigError
from ejkernel.settings import Settings


def test_an_empty_environment_gives_the_defaults():
    got = Settings.from_env({})
    assert (got.autotune, got.record, got.stamp) == (False, False, "hash")
    assert got.cache_dir == Path("~/.cache/ejkernel/configs").expanduser()


@pytest.mark.parametrize(
    "name",
    [
        "EJKERNEL_AUTOTUNE",
        "EJKERNEL_CACHE_DIR",
        "EJKERNEL_NOTE_MISSES",
        "EJKERNEL_ON_MISS",
        "EJKERNEL_OPS_RECORD",
        "EJKERNEL_OPS_STAMP",
    ],
)
def test_an_empty_variable_means_its_default(name):
    assert Settings.from_env({name: " "}) == Settings.from_env({})


@pytest.mark.parametrize("raw", ["1", "true", "TRUE", "Yes", " on "])
@pytest.mark.parametrize(
    ("name", "field"),
    [("EJKERNEL_AUTOTUNE", "autotune"), ("EJKERNEL_OPS_RECORD", "record"), ("EJKERNEL_NOTE_MISSES", "note_misses")],
)
def test_a_flag_is_on(name, field, raw):
    assert getattr(Settings.from_env({name: raw}), field) is True


@pytest.mark.parametrize("raw", ["0", "false", "No", "OFF"])
def test_a_flag_is_off(raw):
    assert Settings.from_env({"EJKERNEL_AUTOTUNE": raw}).autotune is False


@pytest.mark.parametrize("name", ["EJKERNEL_AUTOTUNE", "EJKERNEL_OPS_RECORD"])
def test_a_bad_flag_is_an_error_with_its_name_and_value(name):
    with pytest.raises(ConfigError, match=f"{name} must be one of 1, true, .* got 'perhaps'"):
        Settings.from_env({name: "Perhaps"})


@pytest.mark.parametrize(("raw", "stamp"), [("hash", "hash"), ("JSON", "json"), ("none", "none")])
def test_a_stamp_is_chosen(raw, stamp):
    assert Settings.from_env({"EJKERNEL_OPS_STAMP": raw}).stamp == stamp


@pytest.mark.parametrize(
    ("raw", "autotune", "heuristic"),
    [("", False, True), ("heuristic", False, True), ("Tune", True, True), ("error", False, False)],
)
def test_what_happens_on_a_miss_is_chosen(raw, autotune, heuristic):
    got = Settings.from_env({"EJKERNEL_ON_MISS": raw})
    assert (got.autotune, got.heuristic) == (autotune, heuristic)


def test_a_bad_answer_to_a_miss_is_an_error_with_the_choices():
    with pytest.raises(ConfigError, match=r"EJKERNEL_ON_MISS must be one of heuristic, tune, error; got 'panic'"):
        Settings.from_env({"EJKERNEL_ON_MISS": "panic"})


@pytest.mark.parametrize("asked", ["error", "heuristic"])
def test_two_variables_that_contradict_each_other_are_an_error(asked):
    with pytest.raises(ConfigError, match=f"EJKERNEL_ON_MISS={asked} and EJKERNEL_AUTOTUNE=1 contradict"):
        Settings.from_env({"EJKERNEL_ON_MISS": asked, "EJKERNEL_AUTOTUNE": "1"})


def test_two_variables_that_agree_are_fine():
    assert Settings.from_env({"EJKERNEL_ON_MISS": "tune", "EJKERNEL_AUTOTUNE": "1"}).autotune


def test_a_bad_stamp_is_an_error_with_the_choices():
    with pytest.raises(ConfigError, match=r"EJKERNEL_OPS_STAMP must be one of hash, json, none; got 'md5'"):
        Settings.from_env({"EJKERNEL_OPS_STAMP": "md5"})


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"EJKERNEL_CACHE_DIR": "/mnt/configs"}, "/mnt/configs"),
        ({"EJKERNEL_CACHE_DIR": "~/configs"}, "~/configs"),
        ({"XDG_CACHE_HOME": "/mnt/cache"}, "/mnt/cache/ejkernel/configs"),
        ({"EJKERNEL_CACHE_DIR": "/mnt/configs", "XDG_CACHE_HOME": "/mnt/cache"}, "/mnt/configs"),
    ],
)
def test_the_cache_folder_is_chosen(env, expected):
    assert Settings.from_env(env).cache_dir == Path(expected).expanduser()


def test_current_settings_are_read_anew(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "1")
    before = settings.current().autotune
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "0")
    assert (before, settings.current().autotune) == (True, False)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", False),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_foo=1 --xla_gpu_exclude_nondeterministic_ops=true", True),
        ("--xla_gpu_deterministic_ops=false", False),
    ],
)
def test_xlas_flag_for_results_that_repeat_is_read(flags, said):
    assert settings.deterministic_ops({"XLA_FLAGS": flags}) == said
