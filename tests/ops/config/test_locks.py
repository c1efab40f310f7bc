# SPDX-License-Identifier: Apache-2.0
"""A cache file is removed only if it has not changed since it was judged, and links inside a cache are not followed."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from tests.ops.config.shared.stores import entry

from ejkernel.ops import PersistentCache
from ejkernel.ops.config import _writing
from ejkernel.ops.config._files import ENTRY, UnusableError, files
from ejkernel.ops.config._writing import LockedError, exclusive, remove_judged, restore_aside, seen, shared
from ejkernel.ops.config.entries import location
from ejkernel.ops.config.misses.notes import MissedNotes
from ejkernel.ops.config.shared.copies import LocalCopy
from ejkernel.ops.config.shared.exchange import FolderPlace
from ejkernel.ops.errors import CacheWarning

KEY = entry().key


@pytest.fixture
def cache(tmp_path):
    made = PersistentCache(tmp_path / "cache", shipped=False)
    made.put(KEY, {"rows": 1})
    return made


@pytest.fixture
def file(cache):
    return cache.path.joinpath(*location(KEY))


# --- removal ---


def test_the_judged_file_is_removed(cache, file):
    assert remove_judged(cache.path, file, seen(cache.path, file))
    assert list(file.parent.iterdir()) == []
    assert remove_judged(cache.path, file, None)  # another process has removed it


def test_a_file_put_since_then_stays(cache, file):
    judged = seen(cache.path, file)
    cache.put(KEY, {"rows": 2})
    assert not remove_judged(cache.path, file, judged)
    assert not remove_judged(cache.path, file, None)
    assert cache.get(KEY) == {"rows": 2}


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("puts", [1, 2])
def test_a_put_between_comparison_and_removal_stays_where_locks_reach_no_other_machine(
    cache, file, monkeypatch, has_links, puts
):
    judged, rename, link = seen(cache.path, file), os.rename, os.link
    monkeypatch.setattr(_writing, "fcntl", None)

    def late(source, target):
        monkeypatch.setattr(_writing.os, "rename", rename)
        cache.put(KEY, {"rows": 2})
        rename(source, target)
        if puts == 2:
            cache.put(KEY, {"rows": 3})

    def no_link(*args, **options):
        if has_links or os.path.exists(file):
            link(*args, **options)
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(_writing.os, "rename", late)
    if not has_links:
        monkeypatch.setattr(_writing.os, "link", no_link)
    assert not remove_judged(cache.path, file, judged)
    assert cache.get(KEY) == {"rows": puts + 1}
    assert os.listdir(file.parent) == [file.name]


def test_files_renamed_aside_by_a_killed_command_are_restored_unless_replaced(cache, file):
    aside = file.with_name(f".{file.name}.123-0123abcd.aside")
    file.rename(aside)
    restore_aside(cache.path, file.parent)
    assert cache.get(KEY) == {"rows": 1}
    file.rename(aside)
    cache.put(KEY, {"rows": 2})
    restore_aside(cache.path, file.parent)
    assert cache.get(KEY) == {"rows": 2}
    assert os.listdir(file.parent) == [file.name]


# --- the lock ---


def test_a_put_waits_for_a_command_and_not_for_another_put(cache):
    done = threading.Event()
    putting = threading.Thread(target=lambda: (cache.put(KEY, {"rows": 2}), done.set()))
    with exclusive(cache.path):
        putting.start()
        assert not done.wait(0.05)
    putting.join()
    with shared(cache.path):
        cache.put(KEY, {"rows": 3})


def test_a_put_that_waits_for_too_long_stays_in_memory_and_a_command_fails(cache, monkeypatch):
    monkeypatch.setattr(_writing, "PATIENCE", 0.0)
    with exclusive(cache.path):
        with pytest.warns(CacheWarning, match="has held the lock"):
            cache.put(KEY, {"rows": 2})
        with pytest.raises(LockedError, match="has held the lock"), exclusive(cache.path):
            pass
    assert (cache.get(KEY), PersistentCache(cache.path).get(KEY)) == ({"rows": 2}, {"rows": 1})


def test_a_file_system_without_locks_is_written_all_the_same(cache, file, monkeypatch):
    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(_writing.fcntl, "flock", flock)
    cache.put(KEY, {"rows": 2})
    assert remove_judged(cache.path, file, seen(cache.path, file))
    assert cache.get(KEY) is None


# --- links ---


@pytest.fixture
def outside(tmp_path, cache):
    """Another cache with an entry of the same key; a folder of this cache links to it."""
    other = PersistentCache(tmp_path / "outside", shipped=False)
    other.put(KEY, {"rows": 7})
    return other


@pytest.fixture(params=["the device's folder", "the operation's folder"])
def linked(request, cache, outside, tmp_path):
    """A cache with a link as the key's folder, into the other cache."""
    made = PersistentCache(tmp_path / "linked", shipped=False)
    device, op, _ = location(KEY)
    parts = (device,) if "device" in request.param else (device, op)
    place = made.path.joinpath(*parts)
    place.parent.mkdir(parents=True)
    place.symlink_to(outside.path.joinpath(*parts))
    return made


def test_nothing_is_read_or_written_through_a_linked_folder(linked, outside):
    with pytest.warns(CacheWarning, match="this folder is a link"):
        assert linked.get(KEY) is None
    assert list(linked.entries()) == list(files(linked.path, ENTRY)) == []
    with pytest.warns(CacheWarning, match="cannot be written .*this folder is a link"):
        linked.put(KEY, {"rows": 8})
    with pytest.raises(OSError, match="this folder is a link"):
        FolderPlace(linked.path).put([entry(0, 9)])
    linked.remove(KEY)
    with pytest.raises(OSError, match="this folder is a link"):
        remove_judged(linked.path, linked.path.joinpath(*location(KEY)), None)
    assert outside.get(KEY) == {"rows": 7}


def test_a_linked_file_is_not_read_and_is_replaced_itself(cache, file, outside):
    target = outside.path.joinpath(*location(KEY))
    file.unlink()
    file.symlink_to(target)
    with pytest.warns(CacheWarning, match="not a regular file but a link"):
        assert cache.get(KEY) is None
    cache.put(KEY, {"rows": 8})
    assert (cache.get(KEY), outside.get(KEY), file.is_symlink()) == ({"rows": 8}, {"rows": 7}, False)


def test_a_cache_folder_may_be_a_link_itself(cache, tmp_path):
    (tmp_path / "alias").symlink_to(cache.path)
    alias = PersistentCache(tmp_path / "alias", shipped=False)
    alias.put(KEY, {"rows": 2})
    assert cache.get(KEY) == alias.get(KEY) == {"rows": 2}
    assert remove_judged(alias.path, alias.path.joinpath(*location(KEY)), seen(cache.path, file_of(cache)))


def file_of(cache):
    return cache.path.joinpath(*location(KEY))


def test_a_linked_folder_of_notes_is_empty(cache, tmp_path):
    elsewhere = MissedNotes(tmp_path / "elsewhere")
    note = elsewhere.folder.joinpath(*location(KEY))
    note.parent.mkdir(parents=True)
    note.write_text("{}")
    notes = MissedNotes(cache.path)
    notes.folder.symlink_to(elsewhere.folder)
    assert (notes.files(), list(notes.entries())) == ([], [])
    with pytest.warns(CacheWarning, match="this folder is a link"):
        notes.remove(KEY)
    with pytest.raises(UnusableError, match="this folder is a link"):
        notes.read(notes.folder.joinpath(*location(KEY)))
    assert note.exists()


def test_a_linked_copy_of_a_shared_cache_is_empty_and_read_only(cache, tmp_path):
    (tmp_path / "elsewhere" / "team").mkdir(parents=True)
    (cache.path / ".layers").symlink_to(tmp_path / "elsewhere")
    copy = LocalCopy(cache.path / ".layers" / "team", cache.path)
    with pytest.warns(CacheWarning, match="this folder is a link"):
        assert copy.packs() == []
    with pytest.raises(OSError, match="this folder is a link"):
        copy.add("x.pack", b"")
    assert list((tmp_path / "elsewhere" / "team").iterdir()) == []
