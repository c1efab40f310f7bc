# SPDX-License-Identifier: Apache-2.0
"""`ejkernel cache push`, `pull`, `diff` and `merge`, as they are typed."""

from __future__ import annotations

import json

import pytest
from tests.cli.searches import found, save
from tests.ops.config.shared.stores import entry, folder, rows, tuned_together

from ejkernel.cli import main, sharing
from ejkernel.ops import PersistentCache
from ejkernel.ops.autotuner.store.measurements import KEPT, LOG, MeasurementStore
from ejkernel.ops.config.persistent import fault_of
from ejkernel.ops.config.shared import exchange
from ejkernel.ops.config.shared.exchange import FolderPlace


@pytest.fixture
def url(tmp_path):
    pytest.importorskip("fsspec", reason="fsspec is an extra, and is not installed")
    return f"file://{tmp_path}/team"


@pytest.fixture
def mine(tmp_path):
    FolderPlace(tmp_path / "mine").put([entry(1, 1, speedup=1.2), entry(2, 2)])
    return tmp_path / "mine"


@pytest.fixture
def theirs(tmp_path):
    FolderPlace(tmp_path / "theirs").put([entry(1, 11, speedup=1.6), entry(2, 12, speedup=1.501), entry(3, 13)])
    return tmp_path / "theirs"


def run(capsys, *arguments, cache=None):
    status = main(["cache", *arguments, *([] if cache is None else ["--cache", str(cache)])])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_one_machine_pushes_and_another_pulls(capsys, url, mine, theirs):
    status, out, _ = run(capsys, "push", url, cache=mine)
    assert (status, out) == (
        0,
        f"{url}: 2 entries added, 0 replaced by better entries; 0 better entries kept, 0 identical\n",
    )
    assert "1 entry added, 2 replaced" in run(capsys, "push", url, cache=theirs)[1]
    assert "1 entry would be added, 2 would be replaced" in run(capsys, "pull", url, "--dry-run", cache=mine)[1]
    assert len(PersistentCache(mine).keys()) == 2
    assert "1 entry added, 2 replaced by better entries" in run(capsys, "pull", url, cache=mine)[1]
    assert PersistentCache(mine).get(entry(1).key) == {"rows": 11}
    assert run(capsys, "diff", url, cache=mine) == (
        0,
        "",
        f"left is {mine}, right is {url}: 0 differences: "
        "0 only left, 0 only right, 0 in both but different, 3 identical\n",
    )


@pytest.mark.parametrize("command", ["pull", "diff", "merge", "prune"])
def test_a_shared_cache_that_does_not_exist_is_an_error(capsys, url, mine, command):
    status, out, err = run(capsys, command, url, cache=mine)
    assert (status, out) == (1, "")
    assert f"{url} cannot be read: it does not exist, or nothing was ever saved there; check the URL." in err


@pytest.mark.filterwarnings("default::ejkernel.ops.errors.CacheWarning")
def test_the_folder_of_a_shared_cache_is_named_by_its_url(capsys, url, mine, theirs, tmp_path):
    run(capsys, "push", url, cache=mine)
    text = f"{tmp_path}/team is a shared cache; name it by its URL, {url}, e.g. in EJKERNEL_CACHE_LAYERS"
    assert text in run(capsys, "merge", f"{tmp_path}/team", cache=theirs)[2]
    assert [fault_of(tmp_path / "team", variable) for variable in ("", "EJKERNEL_CACHE_DIR")] == [text, text]


def test_push_merges_when_asked(capsys, url, mine, theirs, tmp_path):
    run(capsys, "push", url, cache=mine)
    assert "1 pack fewer" in run(capsys, "push", url, "--merge", cache=theirs)[2]
    assert len(list((tmp_path / "team").iterdir())) == 1


def test_conflicts_are_shown(capsys, mine, theirs):
    status, out, err = run(capsys, "merge", str(theirs), cache=mine)
    assert status == 0
    assert "rows=12" in out
    assert "rows=11" not in out
    assert "1 conflict: neither configuration is known to be better" in err
    PersistentCache(mine).put(entry(3).key, {"rows": 99})
    found = json.loads(run(capsys, "merge", str(theirs), "--json", cache=mine)[1])
    assert (found["added"], found["kept"], found["same"]) == (0, 1, 2)
    (conflict,) = found["conflicts"]
    assert (conflict["ours"], conflict["stays"], conflict["why"]) == ({"rows": 99}, "ours", "ours was set by hand")


def test_merge_takes_the_searches_of_a_folder_along_once(capsys, mine, tmp_path):
    theirs = tmp_path / "theirs"
    save(theirs, found())
    assert "1 search would be added" in run(capsys, "merge", str(theirs), "--dry-run", cache=mine)[1]
    assert not list(mine.rglob(f"*{LOG}"))
    assert "; 1 search added\n" in run(capsys, "merge", str(theirs), cache=mine)[1]
    assert json.loads(run(capsys, "merge", str(theirs), "--json", cache=mine)[1])["searches"] == 0
    assert main(["show", "--log", "reported", "--cache", str(mine)]) == 0
    assert "2.00x the heuristic's speed" in capsys.readouterr().out


def test_merge_creates_its_folder(capsys, theirs, tmp_path):
    assert run(capsys, "merge", str(theirs), cache=tmp_path / "new")[0] == 0
    assert len(PersistentCache(tmp_path / "new").keys()) == 3


def test_merge_keeps_the_newest_searches_of_a_call(capsys, tmp_path):
    for name in ("mine", "theirs"):
        store = MeasurementStore(tmp_path / name)
        for _ in range(KEPT - 2):
            store.save(found())
    names = sorted({log.name for log in tmp_path.rglob(f"*{LOG}")})
    run(capsys, "merge", str(tmp_path / "theirs"), cache=tmp_path / "mine")
    assert sorted(log.name for log in (tmp_path / "mine").rglob(f"*{LOG}")) == names[-KEPT:]


def test_diff_lists_differences_and_the_better_entry(capsys, mine, theirs):
    status, out, err = run(capsys, "diff", str(theirs), cache=mine)
    assert status == 1
    assert "3 differences: 0 only left, 1 only right, 2 in both but different, 0 identical" in err
    assert [line.split()[-2:] for line in out.splitlines()[1:] if "rows=13" in line] == [["-", "rows=13"]]
    assert "right    left has 1.20x the heuristic's speed, right 1.60x" in out
    assert "unknown" in out
    found = json.loads(run(capsys, "diff", str(mine), str(theirs), "--json")[1])
    assert (len(found["only_left"]), len(found["only_right"]), len(found["differing"])) == (1, 0, 2)


def test_pull_without_a_url_brings_the_copies_up_to_date(capsys, url, theirs, tmp_path, monkeypatch):
    run(capsys, "push", url, cache=theirs)
    monkeypatch.setenv("EJKERNEL_CACHE_LAYERS", url)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "third"))
    assert run(capsys, "pull") == (0, f"{url}: 1 pack fetched; 3 entries here\n", "")
    assert json.loads(run(capsys, "pull", "--json")[1]) == [{"url": url, "fetched": 0, "entries": 3}]
    assert PersistentCache().get(entry(3).key) == {"rows": 13}
    PersistentCache().put(entry(5).key, {"rows": 5})
    assert f"{url}: 1 entry added" in run(capsys, "push")[1]
    status, out, _ = run(capsys, "verify")
    assert (status, out) == (0, f"{tmp_path / 'third'}: 1 entry, 0 searches, 0 notes, 2 packs; all files are usable\n")


def test_a_damaged_copy_is_found_and_removed(capsys, url, theirs, tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "third"))
    run(capsys, "push", url, cache=theirs)
    run(capsys, "pull", url)
    (pack,) = (tmp_path / "third").glob(".layers/*/*.pack")
    pack.write_bytes(pack.read_bytes().replace(b'"rows":13', b'"rows":14'))
    status, out, _ = run(capsys, "verify")
    assert status == 1
    assert "digest" in out
    assert "1 pack removed" in run(capsys, "prune", "--unreadable")[1]
    assert "0 entries added" in run(capsys, "pull", url)[1]
    assert run(capsys, "verify")[0] == 0
    assert "3 entries, 0 searches, 0 notes, 1 pack removed" in run(capsys, "clear", "--yes")[1]
    assert not (tmp_path / "third" / ".layers").exists()


def test_pull_fetches_damaged_packs_again(capsys, url, theirs, tmp_path, monkeypatch):
    run(capsys, "push", url, cache=theirs)
    monkeypatch.setenv("EJKERNEL_CACHE_LAYERS", url)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "third"))
    run(capsys, "pull")
    (pack,) = (tmp_path / "third").glob(".layers/*/*.pack")
    whole = pack.read_bytes()
    pack.write_bytes(whole.replace(b'"rows":13', b'"rows":14'))
    assert run(capsys, "verify")[0] == 1
    assert run(capsys, "pull") == (0, f"{url}: 1 pack fetched; 3 entries here\n", "")
    assert (run(capsys, "verify")[0], pack.read_bytes()) == (0, whole)


def test_one_place_that_cannot_be_read_keeps_no_other_from_being_pulled(capsys, url, theirs, tmp_path, monkeypatch):
    run(capsys, "push", url, cache=theirs)
    monkeypatch.setenv("EJKERNEL_CACHE_LAYERS", f"nosuchkind://x,{url}")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "third"))
    status, out, err = run(capsys, "pull")
    assert (status, out) == (1, f"{url}: 1 pack fetched; 3 entries here\n")
    assert "nosuchkind" in err


def test_push_repairs_damaged_packs(capsys, url, mine, tmp_path):
    run(capsys, "push", url, cache=mine)
    (pack,) = (tmp_path / "team").iterdir()
    whole = pack.read_bytes()
    pack.write_bytes(whole.replace(b'"rows":1', b'"rows":7'))
    assert f"{url}: 1 damaged pack repaired" in run(capsys, "push", url, cache=mine)[2]
    assert pack.read_bytes() == whole
    assert "damaged" not in run(capsys, "push", url, cache=mine)[2]


@pytest.mark.filterwarnings("default::ejkernel.ops.errors.CacheWarning")
def test_a_shared_cache_is_pruned(capsys, url, mine, theirs, tmp_path):
    FolderPlace(mine).put([entry(9, 9, jax="0.0.1"), entry(8, 8, days=90)])
    run(capsys, "push", url, cache=mine)
    run(capsys, "push", url, cache=theirs)
    asked = ("prune", url, "--not-for-this-jax", "--cache", str(theirs))
    assert run(capsys, *asked, "--dry-run")[1] == f"{url}: 3 entries would be removed; 1 pack fewer\n"
    assert json.loads(run(capsys, *asked, "--json")[1]) == {
        "url": url,
        "dry_run": False,
        "entries": 3,
        "packs": 1,
        "damaged": 0,
    }
    assert run(capsys, "prune", url, cache=theirs)[1] == f"{url}: 0 entries removed; 0 packs fewer\n"
    (pack,) = (tmp_path / "team").iterdir()
    pack.write_bytes(pack.read_bytes()[:-5])
    (tmp_path / "third").mkdir()
    status, out, err = run(capsys, "prune", url, "--unreadable", "--older-than", "30d", cache=tmp_path / "third")
    assert (status, out) == (0, f"{url}: 1 entry removed, 1 pack damaged; 0 packs fewer\n")
    assert "1 pack of entries cannot be used" in err
    assert "3 entries added" in run(capsys, "pull", url, cache=tmp_path / "third")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("push",), "set EJKERNEL_CACHE_LAYERS"),
        (("push", "no url"), "'no url' is not a URL"),
        (("push", "/tmp/team"), "pass a URL such as file:///tmp/team."),
        (("pull",), "set EJKERNEL_CACHE_LAYERS"),
        (("prune", "no url"), "'no url' is not a URL"),
        (("diff", "/nowhere/at/all"), "the folder /nowhere/at/all does not exist"),
        (("merge", "/nowhere/at/all"), "does not exist"),
        (("push", "nosuchkind://x"), "nosuchkind"),
    ],
)
def test_wrong_arguments_are_errors_with_advice(capsys, arguments, message):
    pytest.importorskip("fsspec", reason="fsspec is an extra, and is not installed")
    status, _, err = run(capsys, *arguments)
    assert status == 1
    assert message in err


def test_push_needs_a_name_if_several_layers_are_set(capsys, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_LAYERS", "memory://a,memory://b")
    assert "has 2 URLs; pass one of them" in run(capsys, "push")[2]


def test_a_folder_that_cannot_be_made_is_an_error(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    status, _, err = run(capsys, "merge", str(tmp_path))
    assert status == 1
    assert "Not a directory" in err


# --- concurrent processes ---


@pytest.mark.parametrize("words", [("merge",), ("pull",)])
def test_a_better_concurrent_put_is_not_replaced(capsys, url, mine, theirs, monkeypatch, words):
    run(capsys, "push", url, cache=theirs)
    judge, late = exchange.judge, []

    def put_concurrently(ours, other):
        if other.key == entry(1).key and not late:
            late.append(FolderPlace(mine).put([entry(1, 99, speedup=1.9)]))
        return judge(ours, other)

    monkeypatch.setattr(exchange, "judge", put_concurrently)
    source = str(theirs) if words == ("merge",) else url
    status, out, _ = run(capsys, *words, source, cache=mine)
    assert (status, "1 entry added, 1 replaced by better entries; 1 better entries kept" in out) == (0, True)
    assert rows(FolderPlace(mine)) == [12, 13, 99]


def test_a_call_that_another_process_saves_meanwhile_is_skipped_even_if_ours_is_better(
    capsys, mine, theirs, monkeypatch
):
    judge = exchange.judge

    def put_concurrently(ours, other):
        if other.key == entry(1).key:
            FolderPlace(mine).put([entry(1, 50, speedup=1.0)])
        return judge(ours, other)

    monkeypatch.setattr(exchange, "judge", put_concurrently)
    out = run(capsys, "merge", str(theirs), cache=mine)[1]
    assert "1 entry added, 1 replaced by better entries; 1 better entries kept" in out
    assert rows(FolderPlace(mine))[-1] == 50


def test_calls_tuned_together_are_pulled_together_or_not_at_all(tmp_path, monkeypatch):
    target = folder(tmp_path / "mine", entry(1, 1, speedup=1.1))
    source = folder(tmp_path / "theirs", *tuned_together(1, 2, rows=11, speedup=1.6))
    found = exchange.plan([source], target)
    assert len(found.entries) == 2
    folder(tmp_path / "mine", entry(2, 99, speedup=1.9))
    assert target.put(found.entries, found.rivals) == list(found.entries)
    assert rows(target) == [1, 99]


@pytest.mark.parametrize("error", [OSError("no network"), OSError(28, "No space left on device")])
def test_an_error_of_network_or_disk_leaves_the_output_open(capfd, mine, monkeypatch, error):
    def unreachable(*_):
        raise error

    monkeypatch.setattr(sharing, "place_of", unreachable)
    status, _, err = run(capfd, "diff", "memory://team", cache=mine)
    print("still here")
    assert (status, err, capfd.readouterr().out) == (1, f"ejkernel: error: {error}\n", "still here\n")
