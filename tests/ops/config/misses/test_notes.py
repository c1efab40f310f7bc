# SPDX-License-Identifier: Apache-2.0
"""Calls that nothing was measured for: listed in memory always, noted on disk on request."""

from __future__ import annotations

import dataclasses
import datetime
import json
import warnings

import jax
import jax.numpy as jnp
import pytest
from tests.arrays import ones
from tests.ops.sample_kernels import Times
from tests.ops.sealing import with_digest

from ejkernel.ops import (
    AutotunePolicy,
    CacheWarning,
    ConfigSelectorChain,
    Executor,
    Invocation,
    NoConfigError,
    PersistentCache,
    autotune_recorded,
    default_executor,
    get_invocations,
    missed,
    policy_override,
    set_default_executor,
)
from ejkernel.ops.config._files import UnusableError
from ejkernel.ops.config.misses.notes import MissedNotes

X = ones((8, 4))
TIME = datetime.datetime(2025, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


TIMES = Times("times")


@pytest.fixture
def store(tmp_path):
    return PersistentCache(tmp_path / "cache", shipped=False)


@pytest.fixture
def notes(store):
    return MissedNotes(store.path, clock=lambda: TIME)


def executor(store, **policy):
    return Executor(ConfigSelectorChain(persistent=store, policy=AutotunePolicy(**policy)))


def operations(found):
    return sorted(op for operations in found.values() for op in operations)


# --- in memory ---


def test_a_folder_that_cannot_be_read_has_no_notes(tmp_path):
    """Its name is too long, which fails as a folder without permission does."""
    with pytest.warns(CacheWarning, match="File name too long"):
        assert list(MissedNotes(tmp_path / ("x" * 300)).entries()) == []


def test_calls_answered_by_the_heuristic_are_listed_forward_and_backward(store):
    run = executor(store)
    jax.jit(jax.grad(lambda x: run(TIMES, x).sum())).lower(X)
    assert operations(missed()) == ["times.bwd@v0"]
    run(TIMES, X)
    assert operations(missed()) == ["times.bwd@v0", "times@v0"]


def test_measured_and_given_configurations_are_not_listed(store):
    run = executor(store)
    run.chooser.remember(Invocation(kernel=TIMES, args=(X,)).key, 3)
    run(TIMES, X)
    run(TIMES, X[:2], cfg=2)
    assert missed() == {}


def test_backward_calls_answered_by_the_forward_are_listed(store):
    run = executor(store)
    run.chooser.remember(Invocation(kernel=TIMES, args=(X,)).key, 3)
    jax.jit(jax.grad(lambda x: run(TIMES, x).sum())).lower(X)
    assert operations(missed()) == ["times.bwd@v0"]


def test_asking_for_an_explanation_misses_nothing(store):
    executor(store).explain(TIMES, X)
    assert missed() == {}


def test_the_list_is_in_a_tunable_form(store):
    run = executor(store)
    run(TIMES, X)
    result = autotune_recorded(missed(), run)
    assert [entry.op_id_v for entry in result.entries] == ["times@v0"]
    assert missed() == {}


def test_missed_calls_are_separate_from_recorded_calls(store):
    executor(store)(TIMES, X)
    assert get_invocations() == {}


# --- on disk ---


def test_no_file_is_written_by_default(store):
    executor(store)(TIMES, X)
    assert not store.path.exists()


def test_a_note_holds_the_call_the_time_and_the_tier(store, notes):
    inv = Invocation(kernel=TIMES, args=(X,))
    notes.put(inv, "heuristic")
    (note,) = notes.entries()
    assert note.config_key == inv.key
    assert note.call == inv.description
    assert (note.source, note.processes, note.first, note.last) == ("heuristic", 1, *["2025-01-02T03:04:05+00:00"] * 2)
    assert note.kernel == "tests.ops.sample_kernels.Times"


def test_the_policy_has_misses_noted(store):
    run = executor(store, note_misses=True)
    run(TIMES, X)
    (note,) = MissedNotes(store.path).entries()
    assert (note.config_key.op, note.source) == ("times@v0", "heuristic")


def test_a_policy_override_records_misses_of_earlier_missed_calls(store):
    run = executor(store)
    run(TIMES, X)
    with policy_override(note_misses=True):
        jax.jit(lambda x: run(TIMES, x)).lower(X)
    assert len(list(MissedNotes(store.path).entries())) == 1


def test_the_environment_has_misses_noted(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("EJKERNEL_NOTE_MISSES", "1")
    set_default_executor(None)
    TIMES(X)
    assert len(list(MissedNotes(tmp_path).entries())) == 1


def test_a_process_notes_a_call_once(notes):
    inv = Invocation(kernel=TIMES, args=(X,))
    notes.put(inv, "heuristic")
    file = next(notes.folder.rglob("*.json"))
    file.unlink()
    notes.put(inv, "heuristic")
    assert not file.exists()


def test_other_processes_are_counted(store, notes):
    inv = Invocation(kernel=TIMES, args=(X,))
    notes.put(inv, "heuristic")
    later = TIME + datetime.timedelta(days=1)
    for _ in range(2):
        MissedNotes(store.path, clock=lambda: later).put(inv, "forward")
    (note,) = notes.entries()
    assert (note.processes, note.source) == (3, "forward")
    assert (note.first, note.last) == ("2025-01-02T03:04:05+00:00", "2025-01-03T03:04:05+00:00")


def test_notes_are_no_entries_of_the_cache(store, notes):
    notes.put(Invocation(kernel=TIMES, args=(X,)), "heuristic")
    assert store.keys() == []


def test_tuning_a_call_later_removes_its_note(store):
    run = executor(store, note_misses=True)
    run(TIMES, X)
    autotune_recorded(missed(), run)
    assert list(MissedNotes(store.path).entries()) == []


def test_a_file_of_the_folder_is_read_by_itself(notes):
    notes.put(Invocation(kernel=TIMES, args=(X,)), "heuristic")
    (file,) = notes.files()
    assert [notes.read(file)] == list(notes.entries())
    file.write_text("{")
    with pytest.raises(UnusableError, match="edited or cut off"):
        notes.read(file)
    file.unlink()
    assert notes.read(file) is None


def test_a_note_is_removed(notes):
    inv = Invocation(kernel=TIMES, args=(X,))
    notes.put(inv, "heuristic")
    notes.remove(inv.key)
    notes.remove(inv.key)
    assert list(notes.entries()) == []


def test_a_folder_that_cannot_be_written_is_one_warning(store):
    store.path.parent.joinpath("cache").write_text("a file")
    run = executor(store, note_misses=True)
    with pytest.warns(CacheWarning) as caught:
        run(TIMES, X)
    messages = [str(w.message) for w in caught]
    assert any("is a file, so it has no configurations" in message for message in messages)
    assert sum("cannot write notes of missed calls to" in message for message in messages) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(TIMES, X[:2])


def changed(**fields):
    return lambda text: with_digest(json.loads(text) | fields)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[:-5], "edited or cut off"),
        (changed(schema=3), "schema 3, not 2"),
        (changed(schema=1), "schema 1, not 2"),
        (changed(key={"device": "cpu", "op": "other@v0", "call": "0"}), "another key"),
        (changed(processes="many"), "expected int"),
        (changed(processes=10**4000), "it counts int"),
        (changed(run="me"), "no such field"),
        (lambda text: text.replace('"processes": 1', '"processes": 2'), "its content was edited or cut off"),
        (lambda text: text + " " * (1 << 20), "more than"),
    ],
)
def test_a_note_that_cannot_be_used_is_a_warning_with_the_reason(notes, change, reason):
    notes.put(Invocation(kernel=TIMES, args=(X,)), "heuristic")
    file = next(notes.folder.rglob("*.json"))
    file.write_text(change(file.read_text()))
    with pytest.warns(CacheWarning, match=f"ignoring the note .*{reason}"):
        assert list(notes.entries()) == []


# --- what happens on a miss ---


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, (False, True, False)),
        ({"EJKERNEL_ON_MISS": "error"}, (False, False, False)),
        ({"EJKERNEL_ON_MISS": "tune"}, (True, True, False)),
        ({"EJKERNEL_AUTOTUNE": "1", "EJKERNEL_NOTE_MISSES": "1"}, (True, True, True)),
    ],
)
def test_the_environment_is_the_default_executors_policy(monkeypatch, env, expected):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    set_default_executor(None)
    policy = dataclasses.asdict(default_executor().chooser.policy)
    assert tuple(policy[name] for name in ("autotune", "heuristic", "note_misses")) == expected


def test_a_function_is_explained_where_a_miss_is_an_error(monkeypatch):
    monkeypatch.setenv("EJKERNEL_ON_MISS", "error")
    set_default_executor(None)
    (why,) = default_executor().explain(jax.jit(TIMES), X)
    assert why.source is None
    assert why.tiers[-1].note == "the policy does not allow it (heuristic=False)"


def test_a_miss_error_names_the_call_and_is_recorded(monkeypatch):
    monkeypatch.setenv("EJKERNEL_ON_MISS", "error")
    monkeypatch.setenv("EJKERNEL_NOTE_MISSES", "1")
    set_default_executor(None)
    cache = default_executor().chooser.persistent
    other = Invocation(kernel=TIMES, args=(jnp.ones(7),))
    cache.put(other.key, 1, call=other.description)
    says = (
        r"'times' \(f32\[.*\], key \w+ on cpu:.*\)\.\n  Closest tuned call: f32\[7\]\."
        r"\n  To tune it, run `ejkernel tune --missed --import tests\.\S+`\."
    )
    with pytest.raises(NoConfigError, match=says):
        TIMES(X)
    (note,) = MissedNotes(default_executor().chooser.persistent.path).entries()
    assert note.key["op"] == "times@v0"
