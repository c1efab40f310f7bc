# SPDX-License-Identifier: Apache-2.0
"""Pushing, pulling and merging entries between folders and stores."""

from __future__ import annotations

import os
import sys

import pytest
from tests.ops.config.shared.stores import entry, folder, pack, rows

from ejkernel.ops.config._files import UnusableError
from ejkernel.ops.config.entries import text_of
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.shared import upkeep
from ejkernel.ops.config.shared.exchange import FolderPlace, SharedPlace, place_of, plan
from ejkernel.ops.config.shared.stores import Store
from ejkernel.ops.errors import CacheWarning, ConfigError


def actions(found):
    return {step.theirs.config["rows"]: step.action for step in found.steps}


def test_an_emptied_place_receives_everything_again(tmp_path, store, shared):
    ours = folder(tmp_path / "a", entry(1), entry(2))
    shared.put(plan([ours], shared).entries)
    store.objects.clear()
    again = SharedPlace("fake://team", tmp_path / "mine")
    assert rows(again) == []
    again.put(plan([ours], again).entries)
    assert len(store.objects) == 1
    assert rows(again) == rows(ours)


def test_a_put_entry_has_the_file_that_the_cache_would_write(tmp_path):
    place = folder(tmp_path, entry(1))
    assert PersistentCache(tmp_path, shipped=False).load(entry(1).key).config == {"rows": 64}
    (file,) = tmp_path.rglob("*.json")
    assert file.read_text() == text_of(entry(1))
    assert rows(place) == [64]


def test_a_folder_keeps_the_better_of_two(tmp_path):
    ours = folder(tmp_path / "a", entry(1, 1, speedup=1.1), entry(2, 2, speedup=1.4), entry(3, 3))
    theirs = folder(tmp_path / "b", entry(1, 11, speedup=1.3), entry(2, 12, speedup=1.2), entry(3, 3), entry(4, 14))
    found = plan([theirs], ours)
    assert actions(found) == {11: "replaced", 12: "kept", 3: "same", 14: "added"}
    assert rows(ours) == [1, 2, 3]  # a plan changes nothing
    ours.put(found.entries)
    assert rows(ours) == [2, 3, 11, 14]
    assert plan([theirs], ours).entries == ()


def test_the_best_of_several_sources_is_taken(tmp_path):
    sources = [folder(tmp_path / str(n), entry(1, n, speedup=1.0 + n % 3)) for n in range(1, 5)]
    target = FolderPlace(tmp_path / "target")
    found = plan(sources, target)
    assert [put.config["rows"] for put in found.entries] == [2]


def test_an_entry_that_cannot_be_used_is_replaced_with_a_warning(tmp_path):
    ours, theirs = folder(tmp_path / "a", entry(1)), folder(tmp_path / "b", entry(1))
    (file,) = (tmp_path / "a").rglob("*.json")
    file.write_text("{}")
    with pytest.warns(CacheWarning, match="ignoring cache entry"):
        assert actions(plan([theirs], ours)) == {64: "added"}


def test_pushed_entries_are_pulled(tmp_path, store, shared):
    mine = folder(tmp_path / "mine", *(entry(number, number) for number in range(5)))
    shared.put(plan([mine], shared).entries)
    assert plan([mine], shared).entries == ()
    assert len(store.objects) == 1
    other = SharedPlace("fake://team", tmp_path / "theirs")
    ours = FolderPlace(tmp_path / "theirs")
    ours.put(plan([other], ours).entries)
    assert rows(ours) == rows(mine)
    assert other.fetched == 1


def test_a_shared_cache_keeps_the_best_of_each_class(tmp_path, shared):
    old, new = entry(1, 1, jax="0.0.1", speedup=9.0), entry(1, 2)
    shared.put([old])
    assert actions(plan([folder(tmp_path / "mine", new)], shared)) == {2: "added"}
    shared.put([new])
    assert actions(plan([folder(tmp_path / "b", entry(1, 3, speedup=1.2))], shared)) == {3: "kept"}
    assert actions(plan([folder(tmp_path / "c", entry(1, 4, speedup=1.8))], shared)) == {4: "replaced"}
    assert rows(shared) == [1, 2]


def test_entries_pushed_during_a_merge_stay(tmp_path, store, shared):
    other = SharedPlace("fake://team", tmp_path / "theirs")
    shared.put([entry(1, 1)])
    other.put([entry(1, 2, speedup=1.9), entry(2, 3)])
    assert rows(SharedPlace("fake://team", tmp_path / "third")) == [2, 3]
    assert len(store.objects) == 2


def test_merging_loses_no_concurrent_push(tmp_path, store, shared):
    for number in range(6):
        shared.put([entry(number, number)])
    late = pack(entry(9, 9))
    read = store.read

    def read_and_push(name):
        store.objects.update([late])
        return read(name)

    store.read = read_and_push
    other = SharedPlace("fake://team", tmp_path / "theirs")
    assert upkeep.merge(other) > 0
    store.read = read
    assert rows(SharedPlace("fake://team", tmp_path / "third")) == [0, 1, 2, 3, 4, 5, 9]
    assert upkeep.merge(SharedPlace("fake://team", tmp_path / "fourth")) == len(store.objects)
    assert len(store.objects) == 1


def test_a_damaged_copy_damages_nothing_in_the_store(store, shared):
    shared.put([entry(1, 1)])
    shared.put([entry(2, 2)])
    before = dict(store.objects)
    file = shared.copy.packs()[0].path
    file.write_bytes(file.read_bytes().replace(b'"rows":', b'"rowz":'))
    with pytest.raises(UnusableError, match="digest"):
        upkeep.merge(shared)
    assert store.objects == before


def test_merging_merged_packs_changes_nothing(store, shared):
    shared.put([entry(1)])
    before = dict(store.objects)
    assert upkeep.merge(shared) == 0
    assert store.objects == before


def test_two_that_merge_at_once_lose_nothing(tmp_path, store, shared):
    for number in range(4):
        shared.put([entry(number, number)])
    slow, quick = (SharedPlace("fake://team", tmp_path / name) for name in ("slow", "quick"))
    sizes = store.sizes

    def sizes_then_merge(*most):
        listed = sizes(*most)
        store.sizes = sizes
        upkeep.merge(quick)
        quick.put([entry(7, 7)])
        upkeep.merge(quick)
        return listed

    store.sizes = sizes_then_merge
    upkeep.merge(slow)
    assert rows(SharedPlace("fake://team", tmp_path / "third")) == [0, 1, 2, 3, 7]


def test_a_place_must_be_a_folder_or_a_url(tmp_path):
    with pytest.raises(ConfigError, match=r"the folder .*nowhere does not exist; pass a folder or a URL"):
        place_of(str(tmp_path / "nowhere"), tmp_path)


# --- over fsspec ---


@pytest.fixture
def url(request, tmp_path):
    pytest.importorskip("fsspec", reason="fsspec is an extra, and is not installed")
    return {"memory": f"memory://{tmp_path.name}/team", "file": f"file://{tmp_path}/team"}[request.param]


both = pytest.mark.parametrize("url", ["memory", "file"], indirect=True)


@both
def test_entries_go_through_a_store(tmp_path, url):
    mine = SharedPlace(url, tmp_path / "mine", may_be_new=True)
    mine.put([entry(1, 1), entry(2, 2)])
    other = SharedPlace(url, tmp_path / "theirs")
    assert (other.fetched, rows(other)) == (1, [1, 2])
    other.put([entry(3, 3)])
    mine.put([entry(4, 4)])
    assert upkeep.merge(other) == 2
    assert rows(SharedPlace(url, tmp_path / "third")) == [1, 2, 3, 4]
    mine.refresh()
    assert rows(mine) == [1, 2, 3, 4]


@both
def test_a_layer_by_url_answers_from_its_copy(tmp_path, url):
    SharedPlace(url, tmp_path / "theirs", may_be_new=True).put([entry(1, 1)])
    cache = PersistentCache(tmp_path / "mine", layers=[url], shipped=False)
    assert cache.get(entry(1).key) is None
    cache.refresh_if_due()
    assert cache.get(entry(1).key) == {"rows": 1}
    assert PersistentCache(tmp_path / "mine", layers=[url], shipped=False).get(entry(1).key) == {"rows": 1}


@both
def test_a_store_says_whether_the_place_is_there(url):
    store = Store(url)
    assert (store.sizes(), store.is_there) == ({}, False)
    name, raw = pack(entry(1))
    store.write(name, raw)
    assert (len(store.sizes()), store.is_there) == (1, True)


@both
def test_an_object_without_content_is_damaged_and_is_written_again(tmp_path, url):
    mine = SharedPlace(url, tmp_path / "mine", may_be_new=True)
    mine.put([entry(1, 1)])
    (name,) = mine.store.sizes()
    mine.store.write(name, b"")
    with pytest.warns(CacheWarning, match="1 pack of entries cannot be used"):
        SharedPlace(url, tmp_path / "theirs")
    assert upkeep.mend(mine) == 1
    assert rows(SharedPlace(url, tmp_path / "theirs")) == [1]


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_a_file_is_no_place(tmp_path, url):
    (tmp_path / "team").write_text("")
    with pytest.raises(ConfigError, match="cannot be read: it does not exist"):
        SharedPlace(url, tmp_path / "mine")


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_a_folder_without_packs_is_there(tmp_path, url):
    (tmp_path / "team").mkdir()
    assert rows(SharedPlace(url, tmp_path / "mine")) == []


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_partly_written_files_are_skipped(tmp_path, url):
    SharedPlace(url, tmp_path / "theirs", may_be_new=True).put([entry(1, 1)])
    name, raw = pack(entry(2, 2))
    (tmp_path / "team" / name).write_bytes(raw[:-9])
    os.mkfifo(tmp_path / "team" / ("f" * 32 + ".pack"))
    os.symlink("/dev/zero", tmp_path / "team" / ("e" * 32 + ".pack"))
    with pytest.warns(CacheWarning, match=r"1 pack of entries cannot be used, e.g. .*digest does not match"):
        found = SharedPlace(url, tmp_path / "mine")
    assert rows(found) == [1]


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_store_that_cannot_be_reached_is_one_kind_of_error(tmp_path, url, monkeypatch):
    import fsspec.implementations.memory as memory

    def fails(*_args, **_kwargs):
        raise TimeoutError("no network")

    monkeypatch.setattr(memory.MemoryFileSystem, "ls", fails)
    with pytest.raises(OSError, match="cannot be listed: TimeoutError: no network"):
        SharedPlace(url, tmp_path)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match="s3a://bucket needs s3fs: pip install s3fs"):
        SharedPlace("s3a://bucket", tmp_path)
