# SPDX-License-Identifier: Apache-2.0
"""The environment: defaults, accepted spellings, and errors that name the variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from ejkernel import settings
from ejkernel.ops.errors import ConfigError, SettingsWarning
from ejkernel.settings import Settings


def test_an_empty_environment_gives_the_defaults():
    got = Settings({})
    assert (got.on_miss, got.record, got.stamp) == ("heuristic", False, "hash")
    assert got.cache_dir == Path("~/.cache/ejkernel/configs").expanduser()


FIELDS = {  # dependents of each variable
    "EJKERNEL_AUTOTUNE": ("on_miss",),
    "EJKERNEL_BATCHES": ("batches",),
    "EJKERNEL_CACHE_DIR": ("cache_dir",),
    "EJKERNEL_CACHE_LAYERS": ("cache_layers",),
    "EJKERNEL_CACHE_PROTOCOLS": ("cache_protocols",),
    "EJKERNEL_NOTE_MISSES": ("note_misses",),
    "EJKERNEL_ON_MISS": ("on_miss",),
    "EJKERNEL_OPS_RECORD": ("record",),
    "EJKERNEL_OPS_STAMP": ("stamp",),
    "EJKERNEL_STALE": ("stale",),
}
ALL = sorted({field for fields in FIELDS.values() for field in fields})


def values(env, *but):
    return [getattr(Settings(env), field) for field in ALL if field not in but]


@pytest.mark.parametrize("name", FIELDS)
def test_an_empty_variable_means_its_default(name):
    assert values({name: " "}) == values({})


def test_all_variables_are_tested_here():
    assert sorted(FIELDS) == sorted(name for name in settings._READ if name.startswith("EJKERNEL_"))


@pytest.mark.parametrize("name", FIELDS)
def test_a_bad_variable_is_an_error_only_when_it_is_read(name):
    env = {name: "s3://banana,,"}
    for field in FIELDS[name]:
        with pytest.raises(ConfigError, match=f"{name} must .*banana"):
            getattr(Settings(env), field)
    assert values(env, *FIELDS[name]) == values({}, *FIELDS[name])


@pytest.mark.parametrize(
    ("raw", "layers"), [("/a", ("/a",)), (" /a , s3://b/c ", ("/a", "s3://b/c")), ("/a,/a/b", ("/a", "/a/b"))]
)
def test_layers_have_commas_between_them(raw, layers):
    assert Settings({"EJKERNEL_CACHE_LAYERS": raw}).cache_layers == layers


@pytest.mark.parametrize("raw", [",", "/a,", ",/a", "/a,,/b", "/a, ,/b"])
@pytest.mark.parametrize("name", ["EJKERNEL_CACHE_LAYERS", "EJKERNEL_STALE"])
def test_nothing_beside_a_comma_is_an_error(name, raw):
    with pytest.raises(ConfigError, match=f"{name} must not have empty items; got"):
        values({name: raw.replace("/a", "jax=use").replace("/b", "driver=use") if "STALE" in name else raw})


def test_a_repeated_layer_is_an_error():
    with pytest.raises(ConfigError, match="EJKERNEL_CACHE_LAYERS must list each item once, but lists '/a' twice"):
        _ = Settings({"EJKERNEL_CACHE_LAYERS": "/a,/b, /a"}).cache_layers


@pytest.mark.parametrize("raw", ["1", "true", "TRUE", "Yes", " on "])
@pytest.mark.parametrize(
    ("name", "field", "on"),
    [
        ("EJKERNEL_AUTOTUNE", "on_miss", "tune"),
        ("EJKERNEL_OPS_RECORD", "record", True),
        ("EJKERNEL_NOTE_MISSES", "note_misses", True),
    ],
)
def test_a_flag_is_on(name, field, on, raw):
    got = getattr(Settings({name: raw}), field)
    assert (type(got), got) == (type(on), on)


@pytest.mark.parametrize("raw", ["0", "false", "No", "OFF"])
def test_a_flag_is_off(raw):
    assert Settings({"EJKERNEL_AUTOTUNE": raw}).on_miss == "heuristic"


@pytest.mark.parametrize("name", ["EJKERNEL_AUTOTUNE", "EJKERNEL_OPS_RECORD"])
def test_a_bad_flag_is_an_error_with_its_name_and_value(name):
    with pytest.raises(ConfigError, match=f"{name} must be one of 1, true, .* got 'perhaps'"):
        values({name: "Perhaps"})


@pytest.mark.parametrize(("raw", "stamp"), [("hash", "hash"), ("JSON", "json"), ("none", "none")])
def test_a_stamp_is_chosen(raw, stamp):
    assert Settings({"EJKERNEL_OPS_STAMP": raw}).stamp == stamp


@pytest.mark.parametrize(
    ("raw", "on_miss"), [("", "heuristic"), ("heuristic", "heuristic"), ("Tune", "tune"), ("error", "error")]
)
def test_what_happens_on_a_miss_is_chosen(raw, on_miss):
    assert Settings({"EJKERNEL_ON_MISS": raw}).on_miss == on_miss


def test_a_bad_answer_to_a_miss_is_an_error_with_the_choices():
    with pytest.raises(ConfigError, match=r"EJKERNEL_ON_MISS must be one of heuristic, tune, error; got 'panic'"):
        values({"EJKERNEL_ON_MISS": "panic"})


@pytest.mark.parametrize("asked", ["error", "heuristic"])
def test_two_variables_that_contradict_each_other_are_an_error(asked):
    with pytest.raises(ConfigError, match=f"EJKERNEL_ON_MISS={asked} and EJKERNEL_AUTOTUNE=1 contradict"):
        values({"EJKERNEL_ON_MISS": asked, "EJKERNEL_AUTOTUNE": "1"})


def test_two_variables_that_agree_are_fine():
    assert Settings({"EJKERNEL_ON_MISS": "tune", "EJKERNEL_AUTOTUNE": "1"}).on_miss == "tune"


def test_a_bad_stamp_is_an_error_with_the_choices():
    with pytest.raises(ConfigError, match=r"EJKERNEL_OPS_STAMP must be one of hash, json, none; got 'md5'"):
        values({"EJKERNEL_OPS_STAMP": "md5"})


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
    assert Settings(env).cache_dir == Path(expected).expanduser()


def test_a_cache_folder_in_an_unknown_home_is_an_error():
    with pytest.raises(ConfigError, match="EJKERNEL_CACHE_DIR: cannot find the home folder in '~no-such-user/x'"):
        _ = Settings({"EJKERNEL_CACHE_DIR": "~no-such-user/x"}).cache_dir


def test_current_settings_are_read_again(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "1")
    before = settings.current().on_miss
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "0")
    assert (before, settings.current().on_miss) == ("tune", "heuristic")


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


@pytest.fixture
def untold(monkeypatch):
    monkeypatch.setattr(settings, "_reported", set())
    settings._of.cache_clear()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("EJKERNEL_CACHEDIR", "did you mean EJKERNEL_CACHE_DIR?"),
        ("EJKERNEL_ONMISS", "did you mean EJKERNEL_ON_MISS?"),
        ("ejkernel_stale", "did you mean EJKERNEL_STALE?"),
        ("EJKERNEL_ZZZ", "the variables are EJKERNEL_AUTOTUNE, EJKERNEL_BATCHES"),
    ],
)
def test_a_misspelt_variable_is_one_warning_with_the_nearest_name(monkeypatch, untold, name, advice):
    monkeypatch.setenv(name, "1")
    with pytest.warns(SettingsWarning) as caught:
        settings.current()
    monkeypatch.setenv("EJKERNEL_ON_MISS", "error")
    settings.current()  # a second warning would be an error
    (warning,) = caught
    assert f"the environment variable {name} has no effect" in str(warning.message)
    assert advice in str(warning.message)
    assert (warning.filename, warning.lineno) == ("<environment>", 0)


def test_a_worker_leaves_unknown_variables_to_its_parent(monkeypatch, untold):
    monkeypatch.setenv("EJKERNEL_CACHEDIR", "1")
    settings.suppress_unknown_variable_warnings()
    settings.current()


def test_variables_of_other_programs_are_ignored(monkeypatch, untold):
    monkeypatch.setenv("EASYDEL_EJKERNEL", "1")
    settings.current()


@pytest.mark.parametrize(("before", "after"), [(None, "2"), ("1", "2"), ("0", "0"), ("3", "3")])
def test_a_worker_hides_the_warnings_of_xla_unless_the_user_chose_a_log_level(monkeypatch, before, after):
    monkeypatch.setattr(settings.os, "environ", {} if before is None else {"TF_CPP_MIN_LOG_LEVEL": before})
    settings.share_device({})
    assert settings.os.environ["TF_CPP_MIN_LOG_LEVEL"] == after
