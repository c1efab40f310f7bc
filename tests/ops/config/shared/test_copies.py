# SPDX-License-Identifier: Apache-2.0
"""The copy of a shared cache: the best entry answers, and packs are merged without losing any."""

from __future__ import annotations

import dataclasses
import os

import pytest
from tests.ops.config.shared.stores import entry, pack

from ejkernel.ops.config._files import UnusableError
from ejkernel.ops.config.shared.copies import MOST_PACKS, LocalCopy
from ejkernel.ops.errors import CacheWarning


def added(copy, *entries):
    name, raw = pack(*entries)
    copy.add(name, raw)
    return name


@pytest.fixture
def copy(tmp_path):
    return LocalCopy(tmp_path / "copy")


def test_a_missing_folder_is_empty(copy):
    assert (copy.find(entry().key), list(copy.entries()), copy.packs()) == ([], [], [])
    copy.merge()
    assert not copy.folder.exists()


def test_the_better_one_of_a_class_answers(copy):
    added(copy, entry(rows=1, speedup=1.1))
    added(copy, entry(rows=2, speedup=1.3))
    added(copy, entry(rows=3, speedup=1.2))
    assert [found.config for found in copy.find(entry().key)] == [{"rows": 2}]
    assert [found.config for found in copy.entries()] == [{"rows": 2}]


def test_an_entry_of_the_current_versions_ranks_before_a_faster_one_of_other_versions(copy):
    added(copy, entry(rows=1, speedup=9.0, jax="0.0.1"), entry(rows=2, speedup=1.1, days=30))
    assert [found.config["rows"] for found in copy.find(entry().key)] == [2, 1]


def test_merging_packs_does_not_change_answers(copy):
    for number in range(MOST_PACKS + 2):
        added(copy, entry(number), entry(100, rows=number, speedup=1.0 + number), entry(200, jax=f"0.{number}"))
    before, names = list(copy.entries()), frozenset().union(*(one.names for one in copy.packs()))
    copy.merge()
    (merged,) = copy.packs()
    assert list(copy.entries()) == before
    assert (merged.names, len(os.listdir(copy.folder))) == (names, 1)
    assert len(copy.find(entry(200).key)) == MOST_PACKS + 2  # one per class
    copy.merge(0)
    assert [one.names for one in copy.packs()] == [names]


def test_packs_added_or_merged_by_another_process_are_seen(copy):
    for number in range(MOST_PACKS + 1):
        added(copy, entry(number))
    other = LocalCopy(copy.folder)
    assert other.find(entry(0).key)
    copy.merge()
    assert other.find(entry(0).key) == [entry(0)]
    added(copy, entry(99))
    assert other.find(entry(99).key) == [entry(99)]


def test_packs_added_within_a_clock_tick_are_seen(copy):
    added(copy, entry(0))
    changed = copy.folder.stat()
    other = LocalCopy(copy.folder)
    assert other.find(entry(1).key) == []
    added(copy, entry(1))
    os.utime(copy.folder, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    assert other.find(entry(1).key) == [entry(1)]


def test_a_pack_merged_after_listing_is_read_at_its_new_place(copy, monkeypatch):
    for number in range(MOST_PACKS + 1):
        added(copy, entry(number))
    copy.packs()
    listed = os.listdir

    def then_merged(folder):
        names = listed(folder)
        monkeypatch.setattr(os, "listdir", listed)
        copy.merge()
        return names

    monkeypatch.setattr(os, "listdir", then_merged)
    assert LocalCopy(copy.folder).find(entry(0).key) == [entry(0)]


def test_a_merge_that_loses_its_sources_changes_nothing(copy, monkeypatch):
    for number in range(MOST_PACKS + 1):
        added(copy, entry(number))
    slow, sources = LocalCopy(copy.folder), copy.packs()
    monkeypatch.setattr(slow, "packs", lambda: sources)
    copy.merge()
    with pytest.raises(FileNotFoundError):
        slow.merge()
    assert len(list(LocalCopy(copy.folder).entries())) == MOST_PACKS + 1


def test_a_damaged_pack_is_not_merged(copy):
    names = [added(copy, entry(number)) for number in range(MOST_PACKS + 1)]
    file = copy.folder / names[0]
    file.write_bytes(file.read_bytes().replace(b'"rows":64', b'"rows":65'))
    with pytest.raises(UnusableError, match="digest"):
        copy.merge()
    assert sorted(os.listdir(copy.folder)) == sorted(names)


def test_an_unusable_pack_is_one_warning_and_the_others_answer(copy):
    good, bad = added(copy, entry(1)), added(copy, entry(2))
    file = copy.folder / bad
    file.write_bytes(file.read_bytes()[:-5])
    (copy.folder / "stranger.txt").write_text("x")
    os.mkfifo(copy.folder / ("0" * 32 + ".pack"))
    fresh = LocalCopy(copy.folder)
    with pytest.warns(CacheWarning) as caught:
        assert fresh.find(entry(1).key) == [entry(1)]
    assert sorted("cut off" in str(w.message) for w in caught) == [False, True]
    assert fresh.find(entry(2).key) == []
    assert good in {name for one in fresh.packs() for name in one.names}


def test_entries_of_one_operation_are_listed_separately(copy):
    other = dataclasses.replace(entry(2), key=entry(2).key._replace(op="mätmul@v1"))
    added(copy, entry(1), other)
    assert list(copy.entries("mätmul")) == [other]
    assert list(copy.entries("matmul")) == [entry(1)]
    assert list(copy.entries("mat")) == []
