# SPDX-License-Identifier: Apache-2.0
"""Packs: lookups, and detection of damage."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.config.shared.stores import KEY, entry, pack

from ejkernel.ops.config._files import UnusableError
from ejkernel.ops.config.shared import packs
from ejkernel.ops.config.shared.copies import LocalCopy
from ejkernel.ops.config.shared.packs import (
    Pack,
    check,
    is_name,
    line_of,
    packed,
    read_line,
    salvaged,
    token_of,
    verify,
)

NUMBERS = st.sets(st.integers(0, 10**6), min_size=1, max_size=30)


def in_file(folder, *entries):
    name, raw = pack(*entries)
    (folder / name).write_bytes(raw)
    return Pack(folder / name)


def test_an_entry_comes_back_from_its_line():
    stored = entry(7, note="é\n")
    assert read_line(line_of(stored)) == stored


def test_every_entry_of_a_large_pack_is_found_and_nothing_else(tmp_path):
    kept = {number: entry(number, note="x" * (number * 37 % 3000)) for number in range(0, 400, 2)}
    found = in_file(tmp_path, *kept.values())
    for number in range(400):
        key = KEY._replace(call=f"{number:016x}")
        assert list(map(read_line, found.find(token_of(key)))) == ([kept[number]] if number in kept else [])
    assert len(list(found.walk())) == found.lines == len(kept)


@pytest.mark.parametrize("count", [1, 2, 3, 30])
def test_entries_of_one_key_alone_are_all_found(tmp_path, count):
    found = in_file(tmp_path, *(entry(1, rows) for rows in range(count))).find(token_of(entry(1).key))
    assert sorted(read_line(line).config["rows"] for line in found) == list(range(count))


def test_unevenly_distributed_digests_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "token_of", lambda key: "00" + key.call[-6:].rjust(30, "0"))
    kept = [entry(number, note="x" * 900) for number in range(0, 300, 3)]
    found = in_file(tmp_path, *kept, entry(0xFFFFFF))
    for stored in kept:
        assert list(map(read_line, found.find(packs.token_of(stored.key)))) == [stored]
    assert found.find(packs.token_of(entry(1).key)) == []


def test_all_entries_of_one_key_are_found(tmp_path):
    variants = [entry(1, rows, note="x" * 5000) for rows in range(9)]
    found = in_file(tmp_path, entry(0), *variants, entry(2)).find(token_of(variants[0].key))
    assert sorted(read_line(line).config["rows"] for line in found) == list(range(9))


@given(NUMBERS)
def test_entries_in_any_order_make_the_same_pack(numbers):
    entries = [entry(number) for number in numbers]
    assert pack(*entries) == pack(*reversed(entries), *entries)


def test_many_entries_become_several_packs(monkeypatch):
    monkeypatch.setattr(packs, "_FULL", 4000)
    made = list(packed(line_of(entry(number)) for number in range(30)))
    assert len(made) > 2
    for name, raw in made:
        check(name, raw)
    assert sum(raw.count(b"\n") - 2 for _, raw in made) == 30


NAME, RAW = pack(*(entry(number) for number in range(3)))


@given(st.integers(0, len(RAW) - 1), st.integers(1, 255))
def test_a_changed_byte_is_detected(position, change):
    damaged = bytearray(RAW)
    damaged[position] ^= change
    with pytest.raises(UnusableError, match="digest"):
        check(NAME, bytes(damaged))


@settings(max_examples=60)
@given(st.integers(0, len(RAW) - 1), st.integers(0, 255), st.booleans())
@pytest.mark.filterwarnings("ignore:ignoring cache entry")
def test_a_damaged_copy_has_the_right_answer_or_none(tmp_path_factory, position, change, cut):
    folder = tmp_path_factory.mktemp("copy")
    damaged = bytearray(RAW)
    damaged[position] ^= change
    (folder / NAME).write_bytes(RAW[:position] if cut else bytes(damaged))
    copy = LocalCopy(folder)
    assert copy.find(entry(1).key) in ([], [entry(1)])
    assert all(found in map(entry, range(3)) for found in copy.entries())


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "no entries"),
        (sorted(map(line_of, map(entry, range(4))), reverse=True), "not sorted"),
        ([b"x" * 10 + b"\n"], "form of an entry"),
        ([line_of(entry()).replace(b'"rows":64', b'"rows":65')], "digest"),
    ],
)
def test_a_pack_with_the_right_name_may_have_wrong_content(lines, reason):
    raw = b"".join(packs.written(lines)) if lines else b"\n"
    with pytest.raises(UnusableError, match=reason):
        check(packs._digest(raw) + packs.SUFFIX, raw)


def test_a_pack_that_speaks_for_others_is_refused():
    raw = b"".join(packs.written([line_of(entry())], [NAME]))
    with pytest.raises(UnusableError, match="other packs"):
        check(packs._digest(raw) + packs.SUFFIX, raw)


def test_a_pack_of_a_newer_form_is_refused(monkeypatch):
    monkeypatch.setattr(packs, "SCHEMA", 9)
    name, raw = pack(entry())
    monkeypatch.undo()
    with pytest.raises(UnusableError, match="newer ejkernel: schema 9"):
        check(name, raw)


def test_a_line_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(packs, "_LONGEST", 10_000)
    name, raw = pack(entry(note="x" * 50_000))
    with pytest.raises(UnusableError, match="more than 10000 bytes"):
        check(name, raw)


def test_verify_reads_all_of_a_pack(tmp_path):
    (tmp_path / NAME).write_bytes(RAW)
    verify(tmp_path / NAME)
    (tmp_path / NAME).write_bytes(RAW.replace(b'"rows":64', b'"rows":65'))
    with pytest.raises(UnusableError, match="digest"):
        verify(tmp_path / NAME)


@pytest.mark.parametrize("name", ["../0.pack", "0" * 32, "0" * 31 + ".pack", "A" * 32 + ".pack", "0" * 32 + ".pack\n"])
def test_no_other_file_is_taken_for_a_pack(name):
    assert not is_name(name)
    assert is_name("0" * 32 + ".pack")


@given(st.integers(0, 3000), st.binary(max_size=40), st.integers(0, 40))
def test_salvaged_lines_of_a_damaged_pack_are_undamaged(position, garbage, cut):
    lines = [line_of(entry(number)) for number in range(3)]
    _, raw = pack(*map(entry, range(3)))
    damaged = raw[:position] + garbage + raw[position + cut :]
    assert set(salvaged(damaged)) <= set(lines)
    assert set(salvaged(raw)) == set(lines)


def test_a_pack_cut_off_after_it_was_opened_has_no_entries(tmp_path):
    name, raw = pack(*map(entry, range(9)))
    (tmp_path / name).write_bytes(raw)
    found = Pack(tmp_path / name)
    (tmp_path / name).write_bytes(raw[:40])
    assert found.find(token_of(entry(1).key)) == []
