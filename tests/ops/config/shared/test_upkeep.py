# SPDX-License-Identifier: Apache-2.0
"""Repairing damaged shared caches, in the store or in the copy, and pruning them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.ops.config.shared.stores import FakeStore, entry, pack, rows

from ejkernel.ops.config.shared import exchange, upkeep
from ejkernel.ops.config.shared import layer as layers
from ejkernel.ops.config.shared.copies import MOST_PACKS
from ejkernel.ops.config.shared.exchange import SharedPlace
from ejkernel.ops.config.shared.packs import SCHEMA, check
from ejkernel.ops.config.shared.stores import UnreachableError
from ejkernel.ops.errors import CacheWarning


@pytest.fixture
def place(tmp_path, store):
    """Make the place as a machine of that name sees it."""
    return lambda name="mine": SharedPlace("fake://team", tmp_path / name)


def flipped(raw, position=0.5, bit=1):
    at = min(int(len(raw) * position), len(raw) - 1)
    return raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :]


DAMAGES = {
    "flipped": flipped,
    "cut off": lambda raw: raw[: len(raw) // 2],
    "empty": lambda raw: b"",
    "another's": lambda raw: b"x" * len(raw),
}
each_damage = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())


def damage_one(store, damage):
    name = min(store.objects)
    store.objects[name] = damage(store.objects[name])


def all_are_whole(store):
    for name, raw in store.objects.items():
        check(name, raw)
    return True


@each_damage
@pytest.mark.parametrize("count", [2, MOST_PACKS + 2], ids=["as it was fetched", "merged in the copy"])
def test_a_damaged_object_is_repaired_from_an_undamaged_copy(store, place, damage, count):
    for number in range(count):
        place("author").put([entry(number, number)])
    mine = place()
    damage_one(store, damage)
    assert upkeep.mend(mine) == 1
    assert all_are_whole(store)
    assert rows(place("third")) == list(range(count))
    assert upkeep.mend(mine) == 0


def test_without_an_undamaged_copy_a_damaged_object_stays(store, place):
    author = place("author")
    author.put([entry(1, 1)])
    damage_one(store, flipped)
    with pytest.warns(CacheWarning, match="1 pack of entries cannot be used"):
        mine = place()
    before = dict(store.objects)
    assert upkeep.mend(mine) == 0
    assert store.objects == before
    assert upkeep.mend(author) == 1
    assert rows(place()) == [1]


@each_damage
@pytest.mark.parametrize("count", [2, MOST_PACKS + 2], ids=["as it was fetched", "merged in the copy"])
def test_a_damaged_copy_is_fetched_again(store, place, damage, count, recwarn):
    for number in range(count):
        place("author").put([entry(number, number)])
    file = place().copy.packs()[0].path
    file.write_bytes(damage(file.read_bytes()))
    again = place()
    assert again.fetched == (count if count > MOST_PACKS else 1)
    assert rows(again) == list(range(count))
    assert place().fetched == 0
    again.copy.verify()
    assert again.copy.whole_packs() == again.copy.packs()


@given(st.floats(0, 1), st.sampled_from([1 << bit for bit in range(8)]))
@hypothesis_settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore::ejkernel.ops.errors.CacheWarning")
def test_a_copy_with_any_flipped_byte_is_repaired(tmp_path_factory, position, bit):
    store, folder = FakeStore(pack(entry(1, 1), entry(2, 2))), tmp_path_factory.mktemp("copy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "Store", store)
        (held,) = SharedPlace("fake://team", folder).copy.packs()
        held.path.write_bytes(flipped(held.path.read_bytes(), position, bit))
        again = SharedPlace("fake://team", folder)
    assert (again.fetched, rows(again)) == (1, [1, 2])


def test_a_lookup_that_meets_damage_has_it_fetched_with_the_next_look(store, place):
    place("author").put([entry(1, 1), entry(2, 2)])
    mine = place()
    (held,) = mine.copy.packs()
    held.path.write_bytes(held.path.read_bytes().replace(b'"rows":1', b'"rows":7'))
    with pytest.warns(CacheWarning, match="digest does not match"):
        assert mine.find(entry(1).key) == []
    assert mine.find(entry(2).key) == [entry(2, 2)]
    assert mine.refresh() == 1
    assert mine.find(entry(1).key) == [entry(1, 1)]


def test_undamaged_entries_stay_in_the_copy_if_the_store_is_damaged_too(store, place):
    place("author").put([entry(1, 1), entry(2, 2)])
    (held,) = place().copy.packs()
    held.path.write_bytes(held.path.read_bytes().replace(b'"rows":1', b'"rows":7'))
    damage_one(store, flipped)
    with pytest.warns(CacheWarning, match="1 pack of entries cannot be used"):
        again = place()
    with pytest.warns(CacheWarning, match="digest does not match"):
        assert rows(again) == [2]


# --- pruning ---


def test_pruning_removes_unwanted_and_worse_entries(store, place):
    author = place("author")
    author.put([entry(1, 1, speedup=1.1), entry(2, 2), entry(3, 3, jax="0.0.1")])
    author.put([entry(1, 11, speedup=1.9)])
    found = upkeep.prune(place(), lambda stored: stored.provenance["jax"] == "0.0.1", dry_run=True)
    assert (found.entries, found.packs, len(store.objects)) == (2, 1, 2)
    assert upkeep.prune(place(), lambda stored: stored.provenance["jax"] == "0.0.1") == found
    assert rows(place("third")) == [2, 11]
    assert upkeep.prune(place(), lambda stored: False) == upkeep.Pruned(entries=0, packs=0)


def test_pruning_all_leaves_an_empty_place(store, place):
    place().put([entry(1, 1)])
    assert upkeep.prune(place(), lambda stored: True).entries == 1
    assert store.objects == {}


def test_pruning_keeps_concurrent_pushes(store, place):
    place("author").put([entry(1, 1, jax="0.0.1"), entry(2, 2)])
    write = store.write

    def write_after_another(name, raw):
        store.write = write
        place("author").put([entry(3, 3, jax="0.0.1")])
        write(name, raw)

    mine = place()
    store.write = write_after_another
    upkeep.prune(mine, lambda stored: stored.provenance["jax"] == "0.0.1")
    assert rows(place("third")) == [2, 3]


def test_concurrent_prune_and_merge_lose_no_wanted_entry(store, place):
    for number in range(4):
        place("author").put([entry(number, number), entry(number + 10, 99, jax="0.0.1")])
    slow, quick = place("slow"), place("quick")
    sizes = store.sizes

    def sizes_then_merge(*most):
        listed = sizes(*most)
        store.sizes = sizes
        upkeep.merge(quick)
        quick.put([entry(7, 7)])
        return listed

    store.sizes = sizes_then_merge
    upkeep.prune(slow, lambda stored: stored.provenance["jax"] == "0.0.1")
    assert {0, 1, 2, 3, 7} <= set(rows(place("third")))
    upkeep.prune(place("third"), lambda stored: stored.provenance["jax"] == "0.0.1")
    assert rows(place("fourth")) == [0, 1, 2, 3, 7]


@pytest.mark.filterwarnings("ignore::ejkernel.ops.errors.CacheWarning")
def test_undamaged_entries_of_an_unreadable_object_stay(store, place):
    place("author").put([entry(number, number) for number in range(5)])
    damage_one(store, flipped)
    mine = place()
    assert upkeep.prune(mine, lambda stored: False).damaged == 0
    assert len(store.objects) == 1
    found = upkeep.prune(mine, lambda stored: False, unreadable=True)
    assert (found.damaged, found.entries, found.packs) == (1, 0, 0)
    assert all_are_whole(store)
    assert len(rows(place("third"))) == 4


@pytest.mark.filterwarnings("ignore::ejkernel.ops.errors.CacheWarning")
def test_an_object_with_only_undamaged_entries_is_rewritten_under_its_name(store, place):
    place("author").put([entry(number, number) for number in range(5)])
    before = dict(store.objects)
    damage_one(store, lambda raw: flipped(raw, 0.999))
    mine = place()
    found = upkeep.prune(mine, lambda stored: False, unreadable=True)
    assert (found.damaged, found.entries, found.packs) == (1, 0, 0)
    assert store.objects == before
    assert len(rows(place("third"))) == 5


@pytest.mark.filterwarnings("ignore::ejkernel.ops.errors.CacheWarning")
def test_an_object_of_a_later_schema_is_not_removed(store, place, monkeypatch):
    monkeypatch.setattr("ejkernel.ops.config.shared.packs.SCHEMA", SCHEMA + 1)
    later = pack(entry(1, 1))
    monkeypatch.undo()
    monkeypatch.setattr(exchange, "Store", store)
    store.objects.update([later])
    mine = place()
    mine.put([entry(2, 2)])
    upkeep.mend(mine)
    upkeep.prune(mine, lambda stored: True, unreadable=True)
    assert store.objects == dict([later])


@pytest.mark.filterwarnings("ignore::ejkernel.ops.errors.CacheWarning")
def test_a_damaged_object_repaired_by_another_machine_stays(store, place):
    name, raw = pack(entry(1, 1))
    store.objects[name] = raw[:-9]
    mine = place()
    read = store.raw

    def raw_then_whole(asked):
        found = read(asked)
        store.objects[name] = raw
        return found

    store.raw = raw_then_whole
    upkeep.prune(mine, lambda stored: False, unreadable=True)
    store.raw = read
    assert rows(place("third")) == [1]


def test_prune_reduces_a_store_too_large_for_programs(store, tmp_path, monkeypatch):
    store.objects.update(pack(entry(number, number)) for number in range(5))
    monkeypatch.setattr(layers, "MOST", 4)
    monkeypatch.setattr(layers, "_MOST", 10)
    with pytest.raises(UnreachableError, match="too many"):
        SharedPlace("fake://team", tmp_path / "mine")
    assert upkeep.merge(SharedPlace("fake://team", tmp_path / "mine", bounded=False)) == 4
    with pytest.raises(OSError, match="larger than 10 bytes; run `ejkernel cache prune URL` to merge them"):
        SharedPlace("fake://team", tmp_path / "theirs")
    assert rows(SharedPlace("fake://team", tmp_path / "theirs", bounded=False)) == [0, 1, 2, 3, 4]
