# SPDX-License-Identifier: Apache-2.0
"""The folder of configurations: round trips, layers, processes, damaged files and folders that cannot be written."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import enum
import json
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import warnings
from contextlib import nullcontext as does_not_raise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import forked
from tests.ops.sealing import change_object

from ejkernel import settings
from ejkernel.ops.config import _files, _writing, entries
from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import CacheWarning, ConfigError, SerializationError
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams
from ejkernel.ops.utils.storage.serialize import sealed_object
from ejkernel.ops.utils.values.nameable import nameable

KEY = ConfigKey("gpu:nvidia_h200", "matmul@v1", "0123456789abcdef")
OTHER = KEY._replace(call="fedcba9876543210")
CFG = FwdParams(q_blocksize=64)


class Tile(NamedTuple):
    rows: int
    columns: int = 8


class Backend(enum.Enum):
    XLA = "xla"


@pytest.fixture
def cache(tmp_path):
    return PersistentCache(tmp_path / "cache", shipped=False)


def files(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def only_file(cache):
    (file,) = files(cache.path)
    return file


def edit(file, **changes):
    change_object(file, lambda data: data.update(changes))


# --- put, get and their kin ---


def test_a_configuration_comes_back_as_its_own_type(cache):
    cache.put(KEY, CFG)
    assert cache.get(KEY) == CFG
    assert cache.get(KEY, FwdParams) == CFG
    assert PersistentCache(cache.path, shipped=False).get(KEY, cfg_type=FwdParams) == CFG


def test_a_key_may_be_given_in_parts(cache):
    cache.put(*KEY, CFG)
    assert cache.get(*KEY) == CFG
    assert cache.get(*KEY, FwdParams) == CFG
    assert cache.get(*KEY, cfg_type=FwdParams) == CFG
    assert cache.get(tuple(KEY)) == CFG
    assert cache.load(*KEY) == cache.load(KEY)
    assert cache.remove(*KEY)


@pytest.mark.parametrize(
    "key", [("a", "b", "c"), ConfigKey("", "", ""), ("../../x", "..", "/"), ("é", "\\", '"'), ["a", "b", "c"]]
)
def test_any_three_strings_are_a_key(cache, key):
    cache.put(key, CFG)
    assert cache.get(key) == CFG
    assert key in cache
    assert [tuple(key)] == cache.keys()


@pytest.mark.parametrize("key", ["my key", 7, ("a", "b"), ("a", "b", 1), ConfigKey("a", "b", None), None])
def test_another_key_is_an_error_and_not_in_the_cache(cache, key):
    assert key not in cache
    for wrong in (lambda: cache.put(key, CFG), lambda: cache.get(key), lambda: cache.remove(key)):
        with pytest.raises(ConfigError, match="is a ConfigKey: device, op and call, three str; got"):
            wrong()


PLAIN = [{"a": [1, 2.5, None]}, [1, "b"], (1, (2, "b"), ()), {"a": (1, {"b": ()})}, (), "text", 3, False]


@pytest.mark.parametrize("config", PLAIN)
def test_plain_data_survives_a_round_trip_with_its_tuples_and_lists(cache, config):
    cache.put(KEY, config)
    assert config == cache.get(KEY)
    assert cache.load(KEY).config_type in ("json", "json with lists")


def test_a_named_tuple_comes_back_as_its_own_type(cache):
    cache.put(KEY, Tile(4))
    assert Tile(4) == cache.get(KEY)


def test_an_enum_member_comes_back_with_its_type(cache):
    cache.put(KEY, Backend.XLA)
    assert Backend.XLA is cache.get(KEY, Backend)
    assert Backend.XLA is cache.get(KEY)


@pytest.mark.parametrize("config", [frozenset({1}), np.dtype("float32")], ids=str)
def test_a_configuration_that_plain_data_cannot_express_is_reported_when_it_is_put(cache, config):
    with pytest.warns(CacheWarning, match=rf"get\(\) will not find .*: a {type(config).__name__[:5]}.* is read as"):
        cache.put(KEY, config)


@dataclasses.dataclass(frozen=True)
class Untyped:
    value: Any


@pytest.mark.parametrize("value", [Backend.XLA, Tile(4), Untyped(1), (1, 2), {"a": frozenset({1})}], ids=str)
def test_a_field_read_as_another_kind_of_value_is_reported_when_it_is_put(cache, value):
    with pytest.warns(CacheWarning, match=r"get\(\) will not find .*: \$\.value.* is read as .*; annotate its field"):
        cache.put(KEY, Untyped(value))


def test_a_missing_key_is_a_silent_miss(cache):
    assert cache.get(KEY) is None
    assert cache.load(KEY) is None
    assert KEY not in cache
    assert not cache.remove(KEY)
    assert cache.keys() == []


def test_no_file_is_created_before_the_first_put(cache):
    cache.get(KEY)
    assert not cache.path.exists()


def test_a_second_put_replaces_the_first(cache):
    cache.put(KEY, CFG)
    cache.put(KEY, BwdParams(num_warps=4))
    assert BwdParams(num_warps=4) == cache.get(KEY)
    assert len(files(cache.path)) == 1


def test_a_removed_key_is_gone(cache):
    cache.put(KEY, CFG)
    cache.put(OTHER, CFG)
    assert cache.remove(KEY)
    assert cache.keys() == [OTHER]
    assert not cache.remove(KEY)


def test_entries_yields_each_key_with_its_entry(cache):
    cache.put(KEY, CFG)
    cache.put(OTHER, {"a": 1})
    assert sorted(cache.keys()) == [KEY, OTHER]
    assert {KEY: cache.load(KEY), OTHER: cache.load(OTHER)} == dict(cache.entries())


def test_an_entry_keeps_its_metadata(cache):
    measured = {"winner_ms": 0.5, "heuristic_ms": 0.75, "candidates": 12}
    cache.put(KEY, CFG, call={"args": [[1, 2]]}, measured=measured)
    entry = cache.load(KEY)
    assert isinstance(entry, StoredEntry)
    assert (KEY, {"args": [[1, 2]]}, measured) == (entry.key, entry.call, entry.measured)
    assert entry.config_type == "ejkernel.ops.utils.datacarrier.FwdParams"
    assert entry.config["q_blocksize"] == 64
    assert only_file(cache) == entry.path


def test_an_entry_says_where_it_comes_from(tmp_path):
    noon = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)
    cache = PersistentCache(tmp_path, shipped=False, clock=lambda: noon)
    cache.put(KEY, CFG)
    provenance = cache.load(KEY).provenance
    assert {"device", "driver", "ejkernel", "jax", "jaxlib", "python", "time"} == set(provenance)
    assert (provenance["device"], provenance["time"]) == ("gpu:nvidia_h200", "2026-01-02T12:00:00+00:00")
    assert provenance["jax"][0].isdigit()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("nothing\n", None),
        (None, None),
    ],
)
def test_the_driver_is_read_from_its_own_file(tmp_path, monkeypatch, text, version):
    if text is not None:
        (tmp_path / "version").write_text(text, encoding="utf-8")
    monkeypatch.setattr(_files, "_NVIDIA_VERSION", tmp_path / "version")
    _files._driver.cache_clear()
    cache = PersistentCache(tmp_path / "cache", shipped=False)
    cache.put(KEY, CFG)
    cache.put(KEY._replace(device="cpu:x86"), CFG)
    _files._driver.cache_clear()
    assert version == cache.load(KEY).provenance["driver"]
    assert cache.load(KEY._replace(device="cpu:x86")).provenance["driver"] is None


def test_the_file_is_sorted_indented_json(cache):
    cache.put(KEY, {"b": 1, "a": "é"})
    text = only_file(cache).read_text(encoding="utf-8")
    assert json.dumps(json.loads(text), indent=2, sort_keys=True, ensure_ascii=False) + "\n" == text


@pytest.mark.parametrize("arguments", [(KEY,), (*KEY,), (*KEY, CFG, CFG)])
def test_put_with_another_number_of_arguments_is_an_error(cache, arguments):
    with pytest.raises(TypeError, match=r"put takes \(key, cfg\)"):
        cache.put(*arguments)


def test_get_with_another_number_of_arguments_is_an_error(cache):
    with pytest.raises(TypeError, match=r"get takes \(key\) or \(device, op, call\), got"):
        cache.get()
    with pytest.raises(TypeError, match="cfg_type twice"):
        cache.get(KEY, FwdParams, cfg_type=FwdParams)


def test_parts_of_a_key_must_be_str(cache):
    with pytest.raises(ConfigError, match="device, op and call must be str"):
        cache.get("gpu", "matmul", 3)


def test_none_is_no_configuration(cache):
    with pytest.raises(ConfigError, match="cfg must not be None"):
        cache.put(KEY, None)


@pytest.mark.parametrize("given", [{"cfg": len}, {"cfg": {"a": float("nan")}}, {"cfg": CFG, "call": object()}])
def test_a_value_without_a_json_form_is_an_error_and_leaves_no_file(cache, given):
    with pytest.raises(SerializationError):
        cache.put(KEY, given["cfg"], call=given.get("call"))
    assert not cache.path.exists()


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
configs = st.dictionaries(st.text(), plain | st.lists(plain, max_size=3), max_size=4)
keys = st.builds(ConfigKey, st.text(), st.text(), st.text())


@pytest.mark.slow
@given(st.lists(st.tuples(keys, configs), max_size=5))
def test_the_cache_behaves_as_a_dict(pairs):
    expected = dict(pairs)
    with tempfile.TemporaryDirectory() as folder:
        cache = PersistentCache(Path(folder) / "inside", shipped=False)
        for key, config in pairs:
            cache.put(key, config)
        assert all(expected[key] == cache.get(key) for key, _ in pairs)
        assert set(expected) == set(cache.keys())
        assert len(expected) == len(files(folder))
        assert [file for file in files(folder) if len(file.relative_to(folder).parts) != 4] == []


# --- file names ---


@pytest.mark.parametrize(
    "key",
    [
        ConfigKey("../../x", "..", "a/b"),
        ConfigKey("/etc", "C:\\x", "."),
        ConfigKey("ü" * 5000, "\0", "\n"),
        ConfigKey("a" * 5000, ".hidden", "b" * 5000),
    ],
    ids=lambda key: repr(key)[:30],
)
def test_a_file_name_is_derived_and_never_taken_from_the_key(cache, key):
    cache.put(key, CFG)
    file = only_file(cache)
    parts = file.relative_to(cache.path).parts
    assert len(parts) == 3
    assert all(set(part) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-") and len(part) < 80 for part in parts)
    assert not any(part.startswith(".") for part in parts)
    assert cache.get(key) == CFG


def test_the_usual_key_has_a_readable_file_name(cache):
    cache.put(KEY, CFG)
    parts = only_file(cache).relative_to(cache.path).parts
    assert parts[:2] == ("gpu-nvidia_h200", "matmul-v1")
    assert parts[2].startswith("0123456789abcdef-")


def test_keys_of_one_slug_are_different_entries(cache):
    pair = [ConfigKey("GPU:a", "op", "c/d"), ConfigKey("gpu-a", "op", "c-d")]
    for index, key in enumerate(pair):
        cache.put(key, index)
    assert [cache.get(key) for key in pair] == [0, 1]


# --- layers ---


def test_the_first_folder_that_has_a_key_answers(tmp_path):
    first, second = (PersistentCache(tmp_path / name, shipped=False) for name in "ab")
    first.put(KEY, 1)
    second.put(KEY, 2)
    second.put(OTHER, 3)
    stacked = PersistentCache(tmp_path / "user", layers=[str(first.path), second.path], shipped=False)
    assert [stacked.get(KEY), stacked.get(OTHER)] == [1, 3]
    stacked.put(KEY, 0)
    assert [cache.get(KEY) for cache in (stacked, first, second)] == [0, 1, 2]
    assert {KEY, OTHER} == set(stacked.keys())
    assert dict(stacked.entries())[KEY].config == 0


def test_only_the_first_folder_is_written(tmp_path):
    below = PersistentCache(tmp_path / "below", shipped=False)
    below.put(KEY, 1)
    before = {file: file.read_bytes() for file in files(below.path)}
    stacked = PersistentCache(tmp_path / "user", layers=[below.path], shipped=False)
    stacked.put(KEY, 2)
    assert stacked.remove(KEY)
    assert not stacked.remove(KEY)
    assert stacked.get(KEY) == 1
    assert before == {file: file.read_bytes() for file in files(below.path)}


def test_a_damaged_entry_lets_the_next_folder_answer(tmp_path):
    below = PersistentCache(tmp_path / "below", shipped=False)
    below.put(KEY, 1)
    stacked = PersistentCache(tmp_path / "user", layers=[below.path], shipped=False)
    stacked.put(KEY, 2)
    only_file(stacked).write_text("{", encoding="utf-8")
    with pytest.warns(CacheWarning, match="ignoring cache entry"):
        assert stacked.get(KEY) == 1


def test_an_entry_of_another_type_lets_the_next_folder_answer(tmp_path):
    below = PersistentCache(tmp_path / "below", shipped=False)
    below.put(KEY, CFG)
    stacked = PersistentCache(tmp_path / "user", layers=[below.path], shipped=False)
    stacked.put(KEY, {"gone": 2})
    with pytest.warns(CacheWarning, match="cannot be decoded"):
        assert stacked.get(KEY, FwdParams) == CFG


def test_one_path_is_no_sequence_of_layers(tmp_path):
    with pytest.raises(ConfigError, match="layers must be a sequence of folders"):
        PersistentCache(tmp_path, layers=str(tmp_path))


# --- damaged files ---


def _write(text):
    return lambda file: file.write_bytes(text if isinstance(text, bytes) else text.encode())


def _truncate(file):
    file.write_bytes(file.read_bytes()[:-20])


def _drop(name):
    return lambda file: change_object(file, lambda data: data.pop(name))


def _edit(**changes):
    return lambda file: edit(file, **changes)


def _instead(make):
    def change(file):
        file.unlink()
        make(file)

    return change


def _socket(file):
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(file.parent):  # a path of one may have 100 characters
        bound.bind(file.name)


_to_folder = _instead(Path.mkdir)


DAMAGE = {
    "empty": (_write(""), "edited or cut off"),
    "truncated": (_truncate, "edited or cut off"),
    "bad UTF-8": (_write(b"\xff\xfe{}"), "not UTF-8"),
    "zeros": (_write(b"\0" * 100), "edited or cut off"),
    "a list": (_write("[]"), "not an entry of this cache"),
    "a number": (_write("1"), "not an entry of this cache"),
    "nothing known": (_write("{}"), "not an entry of this cache"),
    "deep": (_write("[" * 100_000), "edited or cut off"),
    "nan": (_edit(config={"a": float("nan")}), r"\$\.config\.a: float must be finite"),
    "future schema": (_edit(schema=3, new_field=1), "a newer ejkernel: schema 3, not 2"),
    "old schema": (_edit(schema=1), "an older ejkernel: schema 1"),
    "the form without digests": (_write('{"schema": 1, "key": {}}'), "an older ejkernel: schema 1"),
    "no digest": (_write('{"schema": 2}'), "its content was edited or cut off"),
    "a byte order mark": (lambda file: file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes()), "edited or cut off"),
    "something after it": (lambda file: file.write_bytes(file.read_bytes() + b"{}"), "edited or cut off"),
    "a space after it": (lambda file: file.write_bytes(file.read_bytes() + b" "), "its content was edited or cut off"),
    "a key twice": (_write(sealed_object('{\n  "schema": 2,\n  "schema": 2\n}')), "an object has the key"),
    "a number of 5,000 digits": (_write(sealed_object(f'{{"schema": {"1" * 5000}\n}}')), "not valid JSON"),
    "half a character": (_write(sealed_object('{"schema": 2, "config": "\\ud800"\n}')), "must be valid Unicode"),
    "an infinity": (_write(sealed_object('{"schema": 2, "config": 1e999\n}')), "must be finite"),
    "levels": (_write(sealed_object('{"schema": 2, "config": ' + "[" * 99 + "]" * 99 + "\n}")), "nested deeper than"),
    "20,000 keys, and one twice": (
        _write(sealed_object("{" + "".join(f'"{n}": 1,' for n in range(20_000)) + '"19999": 2\n}')),
        "the key str '19999' twice",
    ),
    "20,000 wrong fields": (_edit(**{f"field{n}": 1 for n in range(20_000)}), "and more"),
    "too large": (_write(b" " * ((4 << 20) + 1)), "more than 4194304 bytes"),
    "schema of a wrong type": (_edit(schema=True), "not an entry of this cache"),
    "unknown field": (_edit(extra=1), r"\$\.extra: "),
    "missing field": (_drop("config"), r"\$\.config: missing"),
    "measured is a list": (_edit(measured=[1]), r"\$\.measured: "),
    "wrong key": (_edit(key=OTHER._asdict()), "it holds another key: ConfigKey"),
    "odd key": (_edit(key=[1, {"a": 2}]), r"\$\.key: expected an object \(ConfigKey\)"),
    "a folder": (_to_folder, "it is not a regular file"),
    "a pipe": (_instead(os.mkfifo), "it is not a regular file"),
    "a socket": (_instead(_socket), "it cannot be read"),
    "a device": (_instead(lambda file: file.symlink_to("/dev/zero")), "it is not a regular file"),
    "a link to itself": (_instead(lambda file: file.symlink_to(file)), "it cannot be read"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize(
    "read",
    [PersistentCache.get, PersistentCache.load, lambda c, key: dict(c.entries()).get(key)],
    ids=["get", "load", "entries"],
)
def test_a_damaged_entry_is_a_miss_and_one_warning(cache, name, read):
    damage, reason = DAMAGE[name]
    cache.put(KEY, CFG)
    file = only_file(cache)
    damage(file)
    with pytest.warns(CacheWarning, match=reason) as caught:
        assert read(cache, KEY) is None
    assert len(caught) == 1
    assert str(file) in str(caught[0].message)
    assert read(cache, KEY) is None  # a second warning would be an error
    assert KEY not in cache


@pytest.mark.parametrize(
    "config",
    [{"blok": 1}, {"q_blocksize": "64"}, {"q_blocksize": 0}, [], 3],
    ids=["unknown", "type", "value", "list", "int"],
)
@pytest.mark.parametrize("arguments", [(), (FwdParams,)])
def test_a_configuration_that_does_not_decode_is_a_warned_miss(cache, config, arguments):
    cache.put(KEY, CFG)
    edit(only_file(cache), config=config)
    with pytest.warns(CacheWarning, match=r"cannot be decoded: \$"):
        assert cache.get(KEY, *arguments) is None


def test_a_file_of_the_folder_is_read_by_itself(cache):
    cache.put(KEY, CFG)
    file = only_file(cache)
    assert entries.read_entry(file) == cache.load(KEY)
    assert entries.read_entry(file.with_name("gone")) is None
    file.rename(file.with_name("another.json"))
    with pytest.raises(_files.UnusableError, match="it holds another key"):
        entries.read_entry(file.with_name("another.json"))


def test_a_repaired_entry_is_read_again(cache):
    cache.put(KEY, CFG)
    only_file(cache).write_text("", encoding="utf-8")
    with pytest.warns(CacheWarning):
        assert cache.get(KEY) is None
    cache.put(KEY, CFG)
    assert cache.get(KEY) == CFG


def test_other_files_in_the_folder_are_ignored(cache):
    cache.put(KEY, CFG)
    only_file(cache).with_name("notes.txt").write_text("mine", encoding="utf-8")
    (cache.path / "README").write_text("mine", encoding="utf-8")
    assert cache.keys() == [KEY]


@pytest.mark.slow
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_no_content_of_a_file_is_an_exception(content):
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        cache = PersistentCache(folder, shipped=False)
        cache.put(KEY, CFG)
        only_file(cache).write_bytes(content)
        assert cache.get(KEY) is None
        assert cache.keys() == []


# --- the type that an entry names ---


@pytest.mark.parametrize(
    "name",
    [
        "this.Thing",  # a module of the standard library that prints when it is imported
        "os.getcwd",
        "builtins.dict",
        "pathlib.Path",
        "ejkernel.ops.utils.datacarrier.Missing",
        "ejkernel.ops.config.persistent.FwdParams",
        "ejkernel.ops.utils.datacarrier.FwdParams.num_warps",
        "FwdParams",
        "",
        ".",
    ],
)
def test_a_type_that_may_not_be_named_is_a_warned_miss(cache, name):
    cache.put(KEY, CFG)
    cache.load(KEY)  # the decoder's own imports happen at its first use
    edit(only_file(cache), config_type=name)
    before = set(sys.modules)
    with pytest.warns(
        CacheWarning, match=r"is no dataclass, named tuple or enum that files may name here; .*pass cfg_type="
    ):
        assert cache.get(KEY) is None
    assert before == set(sys.modules)
    assert cache.get(KEY, FwdParams) == CFG


def test_a_module_is_not_asked_for_attributes_that_it_makes_up(cache, monkeypatch):
    module = type(sys)("lazy_module")
    module.__getattr__ = lambda name: pytest.fail(f"{name} was asked for")
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    cache.put(KEY, CFG)
    edit(only_file(cache), config_type="lazy_module.Config")
    with pytest.warns(CacheWarning, match="no dataclass"):
        assert cache.get(KEY) is None


def test_a_class_inside_a_function_needs_cfg_type(cache):
    @dataclasses.dataclass
    class Local:
        a: int

    with pytest.warns(CacheWarning, match="pass cfg_type="):
        cache.put(KEY, Local(1))
    with pytest.warns(CacheWarning, match="pass cfg_type="):
        assert cache.get(KEY) is None
    assert Local(1) == cache.get(KEY, Local)


class Outside:
    @dataclasses.dataclass
    class Inside:
        a: int


def test_a_class_inside_a_class_is_found(cache):
    cache.put(KEY, Outside.Inside(1))
    assert Outside.Inside(1) == cache.get(KEY)


# --- folders that cannot be written ---


def test_a_folder_that_cannot_be_written_is_one_warning_and_memory(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    cache = PersistentCache(tmp_path / "file" / "cache", shipped=False)
    with pytest.warns(CacheWarning, match="cannot be written") as caught:
        cache.put(KEY, CFG)
    cache.put(OTHER, {"a": 1})  # a second warning would be an error
    assert len(caught) == 1
    assert [cache.get(KEY), cache.get(OTHER)] == [CFG, {"a": 1}]
    assert cache.keys() == [KEY, OTHER]
    assert cache.load(KEY).path is None
    assert cache.remove(KEY)
    assert KEY not in cache


def test_an_entry_that_cannot_be_written_is_kept_in_a_folder_that_can_be_merged(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    cache = PersistentCache(tmp_path / "file" / "cache", shipped=False)
    with pytest.warns(CacheWarning, match=r"New results are kept in .* `ejkernel cache merge ") as caught:
        cache.put(KEY, CFG)
    cache.put(OTHER, {"a": 1})
    (kept,) = re.findall(r"kept in (\S+);", str(caught[0].message))
    assert kept in cache.how_to_import
    assert PersistentCache(kept, shipped=False).keys() == [KEY, OTHER]


def test_without_any_folder_that_can_be_written_entries_stay_in_the_process(cache, tmp_path, monkeypatch):
    made = tmp_path / "temporary"

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(_writing, "_new_folder", lambda: made.mkdir() or made)
    with pytest.warns(CacheWarning, match="Configurations stay in this process"):
        cache.put(KEY, CFG)
    assert (cache.get(KEY), cache.how_to_import) == (CFG, "")
    assert not made.exists()


def test_entries_in_memory_are_read_as_strictly(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    cache = PersistentCache(tmp_path / "file" / "cache", shipped=False)
    with pytest.warns(CacheWarning, match="cannot be written"):
        cache.put(KEY, {"a": 1})
    with pytest.warns(CacheWarning, match=r"in memory\): its configuration cannot be decoded"):
        assert cache.get(KEY, FwdParams) is None


def test_a_change_of_a_configuration_from_memory_does_not_change_its_entry(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    cache = PersistentCache(tmp_path / "file" / "cache", shipped=False)
    with pytest.warns(CacheWarning, match="cannot be written"):
        cache.put(KEY, {"blocks": [64, 32]}, measured={"cases": [1]})
    cache.get(KEY)["blocks"].append(16)
    cache.load(KEY).measured["cases"].append(2)
    next(cache.entries())[1].config["blocks"].append(16)
    assert (cache.get(KEY), cache.load(KEY).measured) == ({"blocks": [64, 32]}, {"cases": [1]})


@pytest.mark.parametrize("step", ["replace", "write"])
def test_a_write_that_fails_half_way_leaves_nothing_behind(cache, monkeypatch, step):
    cache.put(KEY, 1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if step == "replace":
        monkeypatch.setattr(_files.os, "replace", full)
    else:
        monkeypatch.setattr(Path, "open", full)
    with pytest.warns(CacheWarning, match="No space left on device"):
        cache.put(KEY, 2)
    monkeypatch.undo()
    assert cache.get(KEY) == 2
    assert PersistentCache(cache.path, shipped=False).get(KEY) == 1
    assert len(files(cache.path)) == 1


def test_a_later_write_that_works_takes_over_from_memory(cache, monkeypatch):
    monkeypatch.setattr(_files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("busy")))
    with pytest.warns(CacheWarning, match="busy"):
        cache.put(KEY, 1)
    monkeypatch.undo()
    cache.put(KEY, 2)
    assert 2 == cache.get(KEY) == PersistentCache(cache.path, shipped=False).get(KEY)


def test_a_folder_that_may_not_be_searched_is_one_warning_that_names_it_and_no_entry(cache, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_files.os, "open", refuse)
    monkeypatch.setattr(_files.os, "access", lambda place, _: Path(place) in cache.path.parents)  # root may do anything
    with pytest.warns(CacheWarning, match=f"the cache folder {re.escape(str(cache.path))} may not be read") as caught:
        assert cache.get(KEY) is None
    assert cache.get(OTHER) is None  # a second warning would be an error
    assert ".json" not in str(caught[0].message)
    assert "may not be read" in cache.problem(KEY)


def test_a_folder_that_may_not_be_listed_is_not_called_an_entry(cache, monkeypatch):
    cache.put(KEY, 1)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_files.os, "scandir", refuse)
    with pytest.warns(
        CacheWarning, match=r"the folder .* cannot be listed, so its files are ignored: Permission denied"
    ):
        assert cache.keys() == []


def test_a_folder_without_a_type_that_may_not_be_searched_is_passed_over(cache, monkeypatch):
    cache.put(KEY, 1)
    real = os.scandir

    class Untyped:
        def __init__(self, item):
            self.name, self.path = item.name, item.path

        def __fspath__(self):
            return self.path

        def is_symlink(self):
            raise OSError(116, "Stale file handle")

    monkeypatch.setattr(_files.os, "scandir", lambda folder: contextlib.nullcontext(map(Untyped, real(folder))))
    assert cache.keys() == [KEY]


def test_an_entry_that_cannot_be_removed_is_a_warning(cache, monkeypatch):
    cache.put(KEY, 1)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.warns(CacheWarning, match="cannot be written"):
        assert not cache.remove(KEY)


def test_a_missing_home_is_one_warning_and_memory(monkeypatch):
    def no_home(_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("EJKERNEL_CACHE_DIR", raising=False)
    monkeypatch.setattr(settings, "_of", settings._of.__wrapped__)  # an earlier test may have read the same variables
    monkeypatch.setattr(Path, "expanduser", no_home)
    cache = PersistentCache(shipped=False)
    assert cache.path is None
    assert cache.get(KEY) is None
    with pytest.warns(CacheWarning, match="no home folder is known") as caught:
        cache.put(KEY, CFG)
    cache.put(OTHER, CFG)  # a second warning would be an error
    assert len(caught) == 1
    assert cache.get(KEY) == CFG
    assert cache.remove(KEY)
    assert not cache.remove(KEY)


def test_a_home_that_cannot_be_written_is_one_warning_and_memory(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cache = PersistentCache("~/.cache/ejkernel/configs", layers=["~nobody-of-that-name/x"], shipped=False)
    assert cache.layers == ()
    with pytest.warns(CacheWarning, match="cannot be written"):
        cache.put(KEY, CFG)
    with pytest.warns(CacheWarning, match="there is no folder ~nobody-of-that-name/x"):
        assert cache.get(KEY) == CFG


def test_the_environment_names_the_default_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "named"))
    assert tmp_path / "named" == PersistentCache().path


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    PersistentCache("~/configs", shipped=False).put(KEY, CFG)
    assert PersistentCache(tmp_path / "configs", shipped=False).get(KEY) == CFG


@pytest.mark.skipif(os.name == "nt", reason="no umask")
def test_files_respect_the_umask(cache):
    before = os.umask(0o022)
    try:
        cache.put(KEY, CFG)
    finally:
        os.umask(before)
    assert only_file(cache).stat().st_mode & 0o777 == 0o644


# --- processes ---


@pytest.mark.slow
def test_two_processes_keep_all_entries_readable(cache):
    calls = [(KEY._replace(call=f"{index:016x}"), {"index": index}) for index in range(40)]
    calls += [(OTHER, {"index": index, "padding": "x" * 5000}) for index in range(40)]
    # an executor, not a Pool: a child that cannot start is an error here and a hang there
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(cache.put, *zip(*calls, strict=True)):
            pass
    assert len(cache.keys()) == 41
    assert list(range(40)) == [cache.get(key)["index"] for key, _ in calls[:40]]
    assert len(cache.get(OTHER)["padding"]) == 5000
    assert len(files(cache.path)) == 41


@pytest.mark.slow
def test_writing_an_entry_initialises_no_device(tmp_path):
    probe = (
        "import sys\n"
        "from ejkernel.ops.config.persistent import PersistentCache\n"
        f"PersistentCache({str(tmp_path)!r}).put('gpu:x', 'op', 'call', {{'a': 1}})\n"
        "from jax._src import xla_bridge\n"
        "sys.exit(bool(xla_bridge._backends))\n"
    )
    assert forked.python(tmp_path, "-c", probe).returncode == 0


# --- missing layers ---


def test_a_missing_layer_is_one_warning_with_its_name(tmp_path, recwarn):
    (tmp_path / "a file").write_text("")
    names = [str(tmp_path / "typo"), str(tmp_path / "a file"), "~nobody-of-this-name/x"]
    there = PersistentCache(tmp_path / "there")
    there.put("gpu:some", "op@v0", "0123456789abcdef", {"rows": 3})
    for _ in range(2):
        cache = PersistentCache(tmp_path / "mine", layers=[*names, there.path], shipped=False)
        assert cache.get("gpu:some", "op@v0", "0123456789abcdef") == {"rows": 3}
        assert len(cache.keys()) == 1
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == 3
    assert all(any(f"there is no folder {name}, a layer read after" in text for text in messages) for name in names)


def test_an_empty_layer_is_no_warning_and_nor_is_ones_own_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    assert PersistentCache(tmp_path / "absent", layers=[tmp_path / "empty"]).get("gpu", "op@v0", "0") is None


# --- values that a later get could not read ---


@nameable
@dataclasses.dataclass(frozen=True)
class Marked:
    rows: int = 1


def test_a_put_of_a_class_inside_a_function_warns_at_once(cache):
    @dataclasses.dataclass(frozen=True)
    class Local:
        rows: int = 1

    with pytest.warns(CacheWarning, match=r"get\(\) will not find .*Local.* pass cfg_type=") as caught:
        cache.put(KEY, Local())
    assert [warning.filename for warning in caught] == [__file__]


def test_a_put_of_fields_that_do_not_fit_their_types_warns_at_once(cache):
    with pytest.warns(CacheWarning, match="will not find .*rows"):
        cache.put(KEY, Marked(rows="many"))


@pytest.mark.parametrize("config", [Marked(), {"rows": 2}, 3, Tile(4)])
def test_putting_a_readable_value_does_not_warn(cache, config):
    cache.put(KEY, config)
    assert cache.get(KEY) == config


def test_a_folder_that_is_a_file_is_one_warning_with_its_name(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(file))
    cache = PersistentCache()
    with pytest.warns(
        CacheWarning, match=f"the persistent cache {re.escape(str(file))} is a file.* EJKERNEL_CACHE_DIR"
    ):
        assert cache.get("d", "o", "k") is None
    assert PersistentCache().get("d", "o", "k") is None


def test_a_file_system_may_return_a_few_bytes_at_a_time(cache, monkeypatch):
    cache.put(KEY, CFG)
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, most: read(descriptor, min(most, 7)))
    assert cache.get(KEY, type(CFG)) == CFG


def test_a_file_read_in_pieces_may_have_as_many_bytes_as_allowed(tmp_path, monkeypatch):
    file, read = tmp_path / "file", os.read
    file.write_bytes(b"x" * 20)
    monkeypatch.setattr(os, "read", lambda descriptor, most: read(descriptor, min(most, 7)))
    assert _files.read_file(file, 20) == b"x" * 20
    with pytest.raises(_files.UnusableError, match="more than 19 bytes"):
        _files.read_file(file, 19)


@pytest.mark.parametrize("excess", [-1, 0, 1, 1000])
def test_an_entry_is_refused_beyond_the_limit(monkeypatch, excess):
    entry = entries.new_entry(KEY, {"rows": 1}, None, None, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))
    monkeypatch.setattr(entries, "LARGEST", len(entries.text_of(entry)) - excess)
    expected = pytest.raises(SerializationError, match="must not be larger than") if excess > 0 else does_not_raise()
    with expected:
        entries.text_of(entry)


@pytest.mark.parametrize(("device", "driver"), [("gpu:nvidia_h200", "580.1"), ("cpu:amd", None), ("tpu:v5", None)])
def test_only_gpus_have_a_driver(monkeypatch, device, driver):
    monkeypatch.setattr(_files, "_driver", lambda: "580.1")
    assert _files.driver_of(device) == driver
