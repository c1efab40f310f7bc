# SPDX-License-Identifier: Apache-2.0
"""`ejkernel cache`: listing, checking and removing the entries of a folder."""

from __future__ import annotations

import datetime
import errno
import importlib
import json
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ejkernel import settings
from ejkernel.cli import folder as commands
from ejkernel.cli import main
from ejkernel.ops import ConfigSelectorChain, Invocation, PersistentCache, tune
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.config import entries
from ejkernel.ops.config._files import version
from ejkernel.ops.config.misses.notes import MissedNotes

NOW = datetime.datetime.now(datetime.UTC)
OLD = NOW - datetime.timedelta(days=40)


@tune(space={"rows": [1, 2]})
def doubled(x, *, rows=1):
    return x * 2 if rows else x


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    where = tmp_path_factory.mktemp("original") / "cache"
    store = PersistentCache(where)
    inv = Invocation(kernel=doubled, args=(jnp.ones(4),))
    ConfigSelectorChain(persistent=store).search(inv, doubled)
    PersistentCache(where, clock=lambda: OLD).put("gpu:some", "older@v0", "0123456789abcdef", {"rows": 3})
    MissedNotes(where).put(Invocation(kernel=doubled, args=(jnp.ones(8),)), "heuristic")
    stranger = where / "node_modules" / "left" / "package.json"
    stranger.parent.mkdir(parents=True)
    stranger.write_text("{}")
    return where


@pytest.fixture
def folder(tmp_path, original):
    """A folder with two entries, a search and a note, one entry older than the rest, and a stranger's file."""
    return Path(shutil.copytree(original, tmp_path / "cache"))


@pytest.fixture
def clean(folder):
    """The folder without the stranger's file."""
    os.remove(folder / "node_modules" / "left" / "package.json")
    return folder


def run(capsys, *arguments, cache=None):
    status = main(["cache", *arguments, *([] if cache is None else ["--cache", str(cache)])])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def written(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def damage(folder):
    (path,) = folder.glob("*/older-v0/*.json")
    path.write_text(path.read_text()[:-20])
    return path


def test_path_is_the_folder_of_the_environment(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "here"))
    assert run(capsys, "path") == (0, f"{tmp_path / 'here'}\n", "")
    assert json.loads(run(capsys, "path", "--json")[1]) == {"exists": False, "path": str(tmp_path / "here")}


@pytest.mark.filterwarnings("default")
def test_list_prints_the_same_as_show(folder, capsys):
    status, out, _ = run(capsys, "list", cache=folder)
    assert status == 0
    assert "doubled@v0" in out
    assert "older@v0" in out
    main(["show", "--cache", str(folder)])
    assert capsys.readouterr().out == out
    assert len(json.loads(run(capsys, "list", "--json", cache=folder)[1])) == 2


@pytest.mark.parametrize("prefix", ["older", "0123"])
def test_show_prints_all_of_an_entry_by_its_operation_or_key(clean, capsys, prefix):
    status, out, _ = run(capsys, "show", prefix, cache=clean)
    assert status == 0
    assert out.startswith("older@v0  0123456789abcdef\n")
    assert "rows=3" in out
    assert f"jax {jax.__version__}" in out
    assert "doubled" not in out
    (entry,) = json.loads(run(capsys, "show", prefix, "--json", cache=clean)[1])
    assert entry["config"] == {"rows": 3}


def test_show_of_a_missing_entry_is_an_error(clean, capsys):
    status, out, err = run(capsys, "show", "nothing", cache=clean)
    assert (status, out) == (1, "")
    assert "starts with 'nothing'" in err


def test_the_table_takes_a_prefix_too_and_a_misspelt_one_has_a_suggestion(clean, capsys):
    assert main(["show", "older", "--cache", str(clean)]) == 0
    table = capsys.readouterr().out
    assert "older@v0" in table
    assert "doubled" not in table
    for arguments in (["doubeld"], ["--log", "doubeld"]):
        assert main(["show", *arguments, "--cache", str(clean)]) == 1
        assert "starts with 'doubeld'; did you mean 'doubled'?" in capsys.readouterr().err


def test_verify_reads_every_file(clean, capsys):
    status, out, _ = run(capsys, "verify", cache=clean)
    assert status == 0
    assert out == f"{clean}: 2 entries, 1 search, 1 note; all files are usable\n"


def test_verify_tells_an_empty_default_cache_from_a_missing_one(capsys, monkeypatch, tmp_path):
    for folder, words in (
        (tmp_path, f"{tmp_path}: 0 entries, 0 searches, 0 notes; no files of ejkernel"),
        (tmp_path / "none", f"there is no folder {tmp_path / 'none'}, named by EJKERNEL_CACHE_DIR"),
    ):
        monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(folder))
        main(["cache", "verify"])
        assert capsys.readouterr().out == f"{words}\n"


def test_verify_of_the_folder_above_a_cache_names_the_cache(clean, capsys):
    status, out, _ = run(capsys, "verify", cache=clean.parent)
    assert status == 1
    assert f"has no configurations, but {clean} has some: name {clean}" in out
    assert f"name {clean}." in run(capsys, "prune", "--unreadable", cache=clean.parent)[2]


@pytest.mark.parametrize("pattern", ["*/older-v0/*.json", "*/doubled-v0/*.jsonl", "missed/*/*/*.json"])
def test_verify_says_which_file_cannot_be_used_and_why(clean, capsys, pattern):
    (path,) = clean.glob(pattern)
    path.write_bytes(b"\x1b[31m\xff")
    status, out, _ = run(capsys, "verify", cache=clean)
    assert status == 1
    assert f"{path}: " in out
    assert "UTF-8" in out or "utf-8" in out
    assert "1 unusable file" in out
    assert "\x1b" not in out
    status, out, _ = run(capsys, "verify", "--json", cache=clean)
    found = json.loads(out)
    assert (status, [bad["file"] for bad in found["unusable"]]) == (1, [str(path)])


def test_verify_reads_the_layers_of_the_default_cache(clean, capsys, monkeypatch, tmp_path):
    (path,) = clean.glob("*/older-v0/*.json")
    path.write_text("{")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "own"))
    layer = clean.rename(tmp_path / "a layer")
    monkeypatch.setenv("EJKERNEL_CACHE_LAYERS", f"{layer},{tmp_path / 'none'}")
    status = main(["cache", "verify"])
    out = capsys.readouterr().out
    assert status == 1
    assert f"`ejkernel cache prune --unreadable --cache '{layer}'` removes" in out
    assert out.endswith(f"there is no folder {tmp_path / 'none'}\n")
    assert main(["cache", "verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["unusable"][0]["file"] == str(layer / path.relative_to(clean))
    (tmp_path / "empty").mkdir()
    assert main(["cache", "verify", "--cache", str(tmp_path / "empty")]) == 0  # a named folder is checked alone


def test_verify_counts_entries_of_other_versions(clean, capsys, monkeypatch):
    monkeypatch.setattr(entries, "version", lambda name: "9.9" if name == "jax" else version(name))
    status, out, _ = run(capsys, "verify", cache=clean)
    assert (status, out.splitlines()[0]) == (0, f"2 entries: measured with jax {jax.__version__}, not 9.9")
    found = json.loads(run(capsys, "verify", "--json", cache=clean)[1])
    assert [stale["differences"] for stale in found["stale"]] == 2 * [
        [{"field": "jax", "stored": jax.__version__, "here": "9.9"}]
    ]
    assert found["unknown"]["space"] == 1  # of an entry set by hand


def test_verify_checks_the_spaces_of_named_kernels(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = (
        "from ejkernel.ops import tune\n@tune(space={'rows': [1, 2]})\ndef spaced(x, *, rows=1):\n    return x * 2\n"
    )
    (tmp_path / "kernels_of_test_cache.py").write_text(source)
    module = importlib.import_module("kernels_of_test_cache")
    store = PersistentCache(tmp_path / "cache")
    inv = Invocation(kernel=module.spaced, args=(jnp.ones(4),))
    ConfigSelectorChain(persistent=store).search(inv, module.spaced)
    arguments = ("verify", "--import", "kernels_of_test_cache")
    assert len(run(capsys, *arguments, cache=store.path)[1].splitlines()) == 1
    monkeypatch.setattr(type(module.spaced), "config_space", lambda self, inv: [{"rows": 1}])
    assert run(capsys, *arguments, cache=store.path)[1].startswith("1 entry: its search space has changed since\n")
    assert len(run(capsys, "verify", cache=store.path)[1].splitlines()) == 1
    by_path = run(capsys, "verify", "--import", "./kernels_of_test_cache.py", cache=store.path)[1]
    assert by_path.startswith("1 entry: its search space has changed since\n")
    assert "spaced@v0" in by_path.splitlines()[1].replace("-v0", "@v0")


def test_verify_names_entries_that_do_not_run_or_keep_an_older_heuristic(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = (
        "from ejkernel.ops import tune\n@tune(space={'rows': [2, 3]})\ndef in_rows(x, *, rows=2):\n"
        "    return x.reshape(rows, -1).sum(1)[:1]\n"
    )
    (tmp_path / "failing_of_test_cache.py").write_text(source)
    module = importlib.import_module("failing_of_test_cache")
    store, kernel = PersistentCache(tmp_path / "cache"), module.in_rows
    inv = Invocation(kernel=kernel, args=(jnp.ones(12),))
    arguments = ("verify", "--import", "failing_of_test_cache")
    kept = {"winner": {"median_us": 1.0}, "heuristic": {"median_us": 1.0}}
    store.put(inv.key, {"rows": 4}, call=inv.description, measured=kept)  # outside the space, but it runs
    assert run(capsys, *arguments, cache=store.path)[1].startswith("1 entry: its heuristic has changed since\n")
    store.put(inv.key, {"rows": 5}, call=inv.description)
    status, out, _ = run(capsys, *arguments, cache=store.path)
    assert (status, "its configuration rows=5 does not run: TypeError: cannot reshape" in out) == (1, True)
    assert "1 unusable file, 1 of calls that `ejkernel tune` tunes again" in out


def test_prune_removes_older_entries(folder, capsys):
    before = written(folder)
    status, out, _ = run(capsys, "prune", "--older-than", "30d", "--dry-run", cache=folder)
    assert (status, out) == (0, f"{folder}: 1 entry, 0 searches, 0 notes would be removed\n")
    assert written(folder) == before
    status, out, _ = run(capsys, "prune", "--older-than", "30d", "--json", cache=folder)
    assert status == 0
    assert [path for path in json.loads(out)["removed"] if "older-v0" in path]
    assert len(written(folder)) == len(before) - 1
    assert "0 entries" in run(capsys, "prune", "--older-than", "30d", cache=folder)[1]
    assert run(capsys, "prune", "--older-than", "0d", cache=folder)[0] == 0
    assert written(folder) == ["package.json"]


def test_prune_removes_entries_of_another_jax(clean, capsys, monkeypatch):
    assert "0 entries, 0 searches, 0 notes" in run(capsys, "prune", "--not-for-this-jax", cache=clean)[1]
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    assert "2 entries, 1 search, 0 notes removed" in run(capsys, "prune", "--not-for-this-jax", cache=clean)[1]
    assert len(written(clean)) == 1


def test_a_failed_search_stays_in_the_list_until_it_is_pruned(clean, capsys):
    call = Invocation(kernel=doubled, args=(jnp.ones(77),))
    data = AutotuneData(inv=call, config=1, outcomes=(Outcome(config=1, status="failed", reason="no"),), seconds=1.0)
    MeasurementStore(clean).save(data)
    assert main(["show", "--cache", str(clean)]) == 0
    printed = capsys.readouterr()
    assert re.search(r"f32\[77\] .* failed ", printed.out)
    assert "a search failed: `show --log` says why; `ejkernel cache prune --failed` removes it" in printed.err
    assert "0 entries" in run(capsys, "prune", "--failed", "--older-than", "30d", cache=clean)[1]
    assert "0 entries, 1 search, 0 notes removed" in run(capsys, "prune", "--failed", cache=clean)[1]
    assert main(["show", "--cache", str(clean)]) == 0
    assert "failed" not in "".join(capsys.readouterr())


def test_prune_combines_all_conditions(clean, capsys):
    assert "0 entries" in run(capsys, "prune", "--older-than", "30d", "--not-for-this-jax", cache=clean)[1]


def test_prune_removes_unusable_entries_on_request_and_keeps_foreign_files(folder, capsys):
    path = damage(folder)
    assert "0 entries" in run(capsys, "prune", "--older-than", "1m", "--not-for-this-jax", cache=folder)[1]
    assert path.exists()
    assert "1 entry, 0 searches, 0 notes removed" in run(capsys, "prune", "--unreadable", cache=folder)[1]
    assert not path.exists()
    assert (folder / "node_modules" / "left" / "package.json").exists()


def test_clear_removes_only_our_own_files(folder, capsys):
    damage(folder)
    (folder / "cpu" / "op").mkdir(parents=True)
    (folder / "cpu" / "op" / ".x.json.1-ab.tmp").write_text("")
    status, out, _ = run(capsys, "clear", "--yes", cache=folder)
    assert status == 0
    assert "2 entries, 1 search, 1 note removed" in out
    assert written(folder) == ["package.json"]
    assert sorted(path.name for path in folder.iterdir()) == ["node_modules"]


class _Terminal:
    def isatty(self):
        return True


@pytest.mark.parametrize(("answer", "status", "left"), [(True, 0, 0), (False, 1, 4)])
def test_clear_asks(clean, capsys, monkeypatch, answer, status, left):
    asked = []
    monkeypatch.setattr("sys.stdin", _Terminal())
    monkeypatch.setattr("click.confirm", lambda text, **_: asked.append(text) or answer)
    assert run(capsys, "clear", cache=clean)[0] == status
    assert asked == [f"Remove 2 entries, 1 search, 1 note from {clean}?"]
    assert len(written(clean)) == left


def test_clear_does_not_ask_without_a_terminal(clean, capsys):
    status, _, err = run(capsys, "clear", cache=clean)
    assert status == 2
    assert "pass --yes" in err
    assert len(written(clean)) == 4


@pytest.mark.parametrize("command", [["show"], ["cache", "list"], ["cache", "verify"], ["cache", "clear", "--yes"]])
def test_a_path_to_a_file_is_an_error(tmp_path, capsys, monkeypatch, command):
    (tmp_path / "file").write_text("")
    assert main([*command, "--cache", str(tmp_path / "file")]) == 2
    assert f"'{tmp_path / 'file'}' is a file" in capsys.readouterr().err
    assert main([*command, "--cache", str(tmp_path / "absent")]) == 1
    assert f"there is no folder {tmp_path / 'absent'}" in capsys.readouterr().err
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file"))
    assert main(command) == 1
    assert "is not a folder" in capsys.readouterr().err


@pytest.fixture
def unlistable(clean, monkeypatch):
    """A folder of the cache that may not be read."""
    closed = str(clean / "gpu-some")
    scandir = os.scandir

    def refusing(path="."):
        if os.fspath(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", closed)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    return closed


@pytest.mark.filterwarnings("ignore:the folder .* cannot be listed:ejkernel.ops.errors.CacheWarning")
def test_an_unlistable_folder_is_reported_and_not_removed(capsys, clean, unlistable):
    status, out, _ = run(capsys, "verify", cache=clean)
    assert status == 1
    assert f"{unlistable}: it cannot be listed: [Errno 13] Permission denied" in out
    assert out.endswith("1 unusable file\n")
    (bad,) = json.loads(run(capsys, "verify", "--json", cache=clean)[1])["unusable"]
    assert (bad["file"], bad["kind"]) == (unlistable, "folder")
    before = written(clean)
    assert run(capsys, "prune", "--unreadable", cache=clean)[0] == 0
    assert written(clean) == before


def test_files_with_foreign_names_are_reported_and_stay(capsys, folder):
    (folder / "gpu-some" / "older-v0" / "0123-01234567.json").write_text("{")
    status, out, _ = run(capsys, "verify", cache=folder)
    assert (status, out.count("\n")) == (1, 3)
    assert "2 unusable files; `ejkernel cache prune --unreadable` removes 1 of them" in out
    assert "1 entry, 0 searches, 0 notes removed" in run(capsys, "prune", "--unreadable", cache=folder)[1]
    status, out, _ = run(capsys, "verify", cache=folder)
    assert (status, out.endswith("1 unusable file\n")) == (1, True)


COMMANDS = ["path", "verify", "list", "prune --older-than 1d", "clear --yes --dry-run", "diff {0} {0}", "merge {0}"]
NEEDED = {name: ["EJKERNEL_CACHE_LAYERS"] for name in ("list", "verify")}  # the others are about one folder


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_variable_that_a_command_does_not_need_is_nothing_to_it(capsys, clean, monkeypatch, command):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(clean))
    for name in settings._READ:
        if name.startswith("EJKERNEL_") and name not in ("EJKERNEL_CACHE_DIR", *NEEDED.get(command, ())):
            monkeypatch.setenv(name, "banana,,")
    status, _, err = run(capsys, *command.format(clean).split())
    assert (status, err.count("error")) == (0, 0)


def test_a_bad_variable_that_a_command_needs_is_an_error_that_names_it(capsys, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_LAYERS", "/a,,")
    status, _, err = run(capsys, "list")
    assert (status, "EJKERNEL_CACHE_LAYERS must" in err) == (1, True)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "s3://team/ejkernel")
    for command in ("path", "verify", "push"):
        status, _, err = run(capsys, command)
        assert (status, "URLs are for EJKERNEL_CACHE_LAYERS" in err) == (1, True)


# --- concurrent processes, and links out of the folder ---


def put_concurrently(monkeypatch, folder, where, name):
    """Put a newer entry under the key of the old one when a function returns true."""
    usual = getattr(where, name)

    def late(*args, **options):
        found = usual(*args, **options)
        if found:
            PersistentCache(folder).put("gpu:some", "older@v0", "0123456789abcdef", {"rows": 4})
        return found

    monkeypatch.setattr(where, name, late)


@pytest.mark.parametrize("words", [("prune", "--older-than", "30d"), ("clear", "--older-than", "30d", "--yes")])
def test_an_entry_put_while_the_command_decides_stays(clean, capsys, monkeypatch, words):
    put_concurrently(monkeypatch, clean, commands.Wanted, "has")
    status, out, err = run(capsys, *words, cache=clean)
    assert (status, "0 entries, 0 searches, 0 notes removed" in out) == (0, True)
    assert "1 file kept: replaced by another process during" in err
    assert PersistentCache(clean).get("gpu:some", "older@v0", "0123456789abcdef") == {"rows": 4}


def test_an_entry_put_while_clear_asks_stays(clean, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", _Terminal())
    monkeypatch.setattr("click.confirm", lambda *_, **__: True)
    put_concurrently(monkeypatch, clean, commands.click, "confirm")
    assert "1 entry, 1 search, 1 note removed" in run(capsys, "clear", cache=clean)[1]
    assert PersistentCache(clean).keys() == [("gpu:some", "older@v0", "0123456789abcdef")]


def test_clear_removes_only_older_entries(clean, capsys):
    assert (
        "1 entry, 0 searches, 0 notes removed" in run(capsys, "clear", "--older-than", "30d", "--yes", cache=clean)[1]
    )
    assert len(written(clean)) == 3


def test_clear_keeps_files_that_another_process_is_writing(clean, capsys):
    mine = clean / "cpu" / "op" / f".x.json.{os.getpid()}-0123abcd.tmp"
    mine.parent.mkdir(parents=True)
    mine.write_text("")
    run(capsys, "clear", "--yes", cache=clean)
    assert written(clean) == [mine.name]


@pytest.mark.parametrize("words", [("clear", "--yes"), ("prune", "--older-than", "1m"), ("prune", "--unreadable")])
def test_nothing_is_removed_through_a_link(folder, tmp_path, capsys, words):
    other = tmp_path / "other"
    other.mkdir()
    for name in os.listdir(folder):
        (other / name).symlink_to(folder / name)
    (other / "device" / "op").mkdir(parents=True)
    (other / "device" / "op" / "x-0123abcd.json").symlink_to(next(folder.glob("*/older-v0/*.json")))
    (other / "device" / "linked").symlink_to(folder / "missed")
    before = written(folder)
    assert run(capsys, *words, cache=other)[0] == 0
    assert written(folder) == before
    assert (other / "missed").is_symlink()


def test_verify_reports_links(folder, tmp_path, capsys):
    (folder / "linked").symlink_to(tmp_path)
    status, out, _ = run(capsys, "verify", cache=folder)
    assert (status, "linked: it is a link, and links inside a cache are not followed" in out) == (1, True)
