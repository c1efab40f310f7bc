# SPDX-License-Identifier: Apache-2.0
"""The store of measurements: writing, reading back, and the order of records."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import multiprocessing
import warnings

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.sample_kernels import Tile, Tiled, Times
from tests.ops.sealing import lines_with_digest

from ejkernel.ops import (
    CacheWarning,
    ConfigSelectorChain,
    ConfigSpace,
    Invocation,
    PersistentCache,
)
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.paired import compare
from ejkernel.ops.autotuner.search.strategies import default_strategy
from ejkernel.ops.autotuner.store import measurements as store_module
from ejkernel.ops.autotuner.store.log import SCHEMA, dump, lines_of, load
from ejkernel.ops.autotuner.store.measurements import KEPT, MeasurementStore, dimensions_of, distance
from ejkernel.ops.autotuner.trials.challenge import Challenge
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.config._files import UnusableError, read_file

HERE, THERE, ELSEWHERE = "gpu:nvidia_h200", "gpu:nvidia_a100", "tpu:v5e"
TIME = datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.UTC)


DOUBLE, LISTED = Tiled("double"), Times("listed")


class Clock:
    """A second later each time that it is asked."""

    def __init__(self):
        self.time = TIME

    def __call__(self):
        self.time += datetime.timedelta(seconds=1)
        return self.time


def call(rows=16, device=HERE, kernel=DOUBLE, dtype=np.float32, **kwargs):
    return Invocation(kernel=kernel, args=(jax.ShapeDtypeStruct((rows, 8), dtype),), kwargs=kwargs, device=device)


def measured(config, microseconds, **more):
    return Outcome(
        config=config,
        status=Status.MEASURED,
        measurement=Measurement(samples=tuple(n * 1e-6 for n in microseconds), method="cupti"),
        **more,
    )


def searched(inv, times, winner=0):
    """A search that found these microseconds; `None` is a failure."""
    outcomes = tuple(
        Outcome(config=config, status=Status.FAILED, reason="no") if us is None else measured(config, [us])
        for config, us in times.items()
    )
    return AutotuneData(inv=inv, config=outcomes[winner].config, outcomes=outcomes, seconds=1.5, checked=("outputs",))


def loaded(text):
    return load(lines_of(text.encode()))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "configs"


@pytest.fixture
def cache(folder):
    return PersistentCache(folder, shipped=False, clock=Clock())


@pytest.fixture
def store(cache):
    return MeasurementStore(cache)


def labels(records):
    return [record.label.split()[0] for record in records]


def seconds(record):
    """Microseconds by rows."""
    return {config.rows: None if t is None else round(t * 1e6, 3) for config, t in record.times}


# --- writing ---


def test_a_search_comes_back_as_it_was(store):
    outcomes = (
        measured(Tile(1), [3.0, 3.125], compile_seconds=0.25, peak_bytes=4096),
        measured(Tile(2), [1.5, 1.25, 1.0, 2.0]),
        Outcome(config=Tile(3), status=Status.WRONG, reason="off by \u2028one\x85"),
        Outcome(config=Tile(4), status=Status.SKIPPED, reason="late"),
    )
    inv = call(causal=True)
    store.save(AutotuneData(inv=inv, config=outcomes[1].config, outcomes=outcomes, seconds=2.0))
    (found,) = store.searches()
    assert (found.key, found.call, found.seconds, found.winner_index) == (inv.key, inv.description, 2.0, 1)
    assert found.config_type.endswith("sample_kernels.Tile")
    assert [o.config for o in found.outcomes] == [{"rows": n, "order": "row"} for n in (1, 2, 3, 4)]
    assert [(o.status, o.reason, o.compile_seconds, o.peak_bytes) for o in found.outcomes] == [
        (o.status, o.reason, o.compile_seconds, o.peak_bytes) for o in outcomes
    ]
    assert found.outcomes[0].measurement.samples == pytest.approx((3e-6, 3.125e-6))
    assert found.outcomes[0].measurement.method == "cupti"
    assert found.provenance["device"] == HERE
    assert found.provenance["time"] == "2026-05-01T12:00:01+00:00"


@pytest.mark.slow
@given(
    times=st.dictionaries(
        st.integers(1, 10**6), st.none() | st.floats(1e-3, 1e7, allow_nan=False, exclude_min=True), min_size=1
    )
)
def test_times_keep_five_digits(times):
    inv = call()
    text = dump(searched(inv, {Tile(rows): us for rows, us in times.items()}), {})
    found = seconds_of(loaded(text))
    assert found.keys() == times.keys()
    assert all(us is None if times[n] is None else us == pytest.approx(times[n], rel=6e-5) for n, us in found.items())


def seconds_of(search):
    return {o.config["rows"]: None if o.measurement is None else o.measurement.median * 1e6 for o in search.outcomes}


def test_an_outcome_is_a_line_without_the_fields_that_have_their_defaults(store, folder):
    store.save(searched(call(), {Tile(1): 2.0, Tile(2): 1.0}))
    (file,) = folder.rglob("*.jsonl")
    _, *lines, last = map(json.loads, file.read_text().splitlines())
    assert list(last) == ["sha256"]
    assert lines[0] == {
        "config": {"rows": 1, "order": "row"},
        "status": "measured",
        "reason": "",
        "measurement": {"samples": [2e-6], "method": "cupti"},
    }


def told_of(**more):
    """A search of four candidates, three of them the same program, with the reasons for its result."""
    verdict = compare([1e-6] * 9 + [3e-6], [2e-6] * 10)
    outcomes = (
        measured(Tile(1), [2.0]),
        measured(Tile(2), [1.0]),
        *(Outcome(config=Tile(rows), status=Status.SAME, reason="the same program", twin=Tile(2)) for rows in (3, 4)),
    )
    standing = Challenge(Tile(2), verdict, is_confirmation=True)
    return AutotuneData(
        inv=call(), config=outcomes[0].config, outcomes=outcomes, seconds=1.5, challenge=standing, why="a tie", **more
    )


@pytest.mark.parametrize(
    "flags", [{}, {"undecided": True}, {"interrupted": True}, {"rule_fault": "rule_fault: the gradient of x differs"}]
)
def test_a_log_has_the_reason_for_the_result(flags):
    data = told_of(**flags)
    stored = loaded(dump(data, {}))
    assert stored.challenge.data() == data.challenge.data()
    assert (stored.why, stored.undecided, stored.interrupted) == (data.why, data.undecided, data.interrupted)
    assert stored.rule_fault == data.rule_fault
    assert data.rule_fault in stored.summary()
    lines = stored.summary().splitlines()
    word = "undecided" if data.undecided else "heuristic kept"
    assert lines[2].endswith(f"candidates in 1.5 s; {word}: a tie")
    assert lines[3].startswith(
        "order=row rows=2 in the confirmation run: 1.0 us, the heuristic 2.0 us; 2.00x ± 0.0 % in the median ro"
    )
    assert [line.partition(":")[0] for line in lines[4:-4]] == [*flags, "all candidates"]


def test_candidates_of_one_program_are_one_row_of_a_stored_search():
    table = loaded(dump(told_of(), {})).summary().splitlines()[-4:-1]
    assert "    rows=2 (also order=row rows=3, order=row rows=4)" in table[1]
    assert sum("rows=" in row for row in table) == 2


def test_a_twin_is_the_recorded_candidate_even_if_others_are_equal():
    outcomes = (
        measured({"scale": 1}, [2.0]),
        measured({"scale": 1.0}, [1.0]),
        Outcome(config={"scale": 2}, status=Status.SAME, reason="the same program", twin={"scale": 1.0}),
    )
    data = AutotuneData(inv=call(), config=outcomes[1].config, outcomes=outcomes, seconds=1.5)
    assert type(loaded(dump(data, {})).outcomes[2].twin["scale"]) is float


@pytest.mark.parametrize(
    "change",
    [
        {"wins": "perhaps"},
        {"challenger": -1.0},
        {"incumbent": float("nan")},
        {"pairs": "many"},
        {"pairs": 3},
        {"interval": [2.0, 1.0]},
        {"surprise": 1},
    ],
)
def test_a_comparison_that_makes_no_sense_makes_a_log_unusable(change):
    first, *lines = dump(told_of(), {}).splitlines()
    header = json.loads(first)
    header["challenge"]["comparison"] |= change
    with pytest.raises(UnusableError, match=r"comparison|\.incumbent"):
        loaded(lines_with_digest("\n".join([json.dumps(header), *lines, ""])))


def test_a_long_reason_is_cut():
    outcomes = (measured(Tile(1), [1.0]), Outcome(config=Tile(2), status=Status.FAILED, reason="x" * 10_000))
    text = dump(AutotuneData(inv=call(), config=outcomes[0].config, outcomes=outcomes, seconds=0.0), {})
    assert len(text) < 2_500
    assert loaded(text).outcomes[1].reason.endswith("x...")


def test_configurations_with_different_fields_are_written_whole():
    inv = Invocation(op_id="any", args=(), device=HERE)
    search = AutotuneData(inv=inv, config=None, outcomes=(), seconds=0.0)
    outcomes = (measured({"a": 1}, [1.0]), measured({"b": [2]}, [2.0]))
    found = loaded(dump(dataclasses.replace(search, config=outcomes[0].config, outcomes=outcomes), {}))
    assert [o.config for o in found.outcomes] == [{"a": 1}, {"b": [2]}]


def test_a_search_is_a_file_beside_the_entry_but_not_an_entry(store, cache, folder):
    inv = call()
    cache.put(inv.key, Tile(1))
    store.save(searched(inv, {Tile(1): 2.0}))
    (entry,) = folder.rglob("*.json")
    (log,) = folder.rglob("*.jsonl")
    assert log.parent == entry.parent
    assert log.name.startswith(entry.name.removesuffix(".json") + ".")
    assert cache.keys() == [inv.key]


def test_a_file_of_the_folder_is_read_by_itself(store, folder):
    store.save(searched(call(), {Tile(1): 2.0}))
    (file,) = folder.rglob("*.jsonl")
    assert [store_module.read_search(file)] == list(store.searches())
    assert store_module.read_search(file.with_name("gone")) is None
    file.rename(file.with_name("another.jsonl"))
    with pytest.raises(UnusableError, match="it holds another key"):
        store_module.read_search(file.with_name("another.jsonl"))


def test_no_search_replaces_another(store):
    for us in (1.0, 2.0, 3.0):
        store.save(searched(call(), {Tile(1): us}))
    assert [seconds_of(search)[1] for search in store.searches()] == pytest.approx([3.0, 2.0, 1.0])


def test_of_each_call_the_newest_searches_stay(store):
    store.save(searched(call(rows=4), {Tile(1): 99.0}))
    for us in range(1, KEPT + 3):
        store.save(searched(call(), {Tile(1): float(us)}))
    found = [round(seconds_of(search)[1]) for search in store.searches() if search.key == call().key]
    assert found == list(range(KEPT + 2, 2, -1))
    assert len(list(store.searches())) == KEPT + 1


def test_a_search_written_after_the_clock_went_back_is_the_newest(cache, store):
    for us in range(1, KEPT + 1):
        store.save(searched(call(), {Tile(1): float(us)}))
    cache.clock.time -= datetime.timedelta(days=400)
    for us in (100.0, 200.0):
        store.save(searched(call(), {Tile(1): us}))
        assert seconds_of(next(store.searches()))[1] == pytest.approx(us)
    found = list(store.searches())
    assert [round(seconds_of(search)[1]) for search in found] == [200, 100, *range(KEPT, 2, -1)]
    assert found[0].provenance["time"] < "2026"


@pytest.mark.parametrize("stamp", ["99991231T235959Z", "99999999T999999Z"], ids=["the last second", "no time"])
def test_a_search_survives_files_that_seem_to_be_newer_than_all(store, folder, stamp):
    store.save(searched(call(), {Tile(1): 1.0}))
    (file,) = folder.rglob("*.jsonl")
    stem = file.name.split(".")[0]
    for number in range(KEPT):
        file.with_name(f"{stem}.{stamp}-{number:012x}.jsonl").write_text("")
    store.save(searched(call(), {Tile(1): 2.0}))
    with pytest.warns(CacheWarning):
        assert [round(seconds_of(search)[1]) for search in store.searches()] == [2]
    assert len(list(folder.rglob("*.jsonl"))) == KEPT


def test_another_operation_s_logs_are_not_read(store, monkeypatch):
    for kernel in (DOUBLE, Tiled("other"), Tiled("doubles")):
        store.save(searched(call(kernel=kernel), {Tile(1): 1.0}))
    read = []
    monkeypatch.setattr(store_module, "read_file", lambda place, _: read.append(place) or read_file(place, 1 << 20))
    assert len(store.records(call())) == 1
    (only,) = read
    assert "/double-v0/" in only
    assert len(list(store.searches("other@v0"))) == 1
    assert len(read) == 2


def test_the_entry_of_a_call_is_read_once_for_all_its_searches(store, cache, monkeypatch):
    for microseconds in (1.0, 2.0):
        store.save(searched(call(), {1: microseconds}))
    read, load = [], cache.load
    monkeypatch.setattr(cache, "load", lambda key: read.append(key) or load(key))
    (history,) = store.by_call().values()
    assert [len(history.searches), len(read)] == [2, 1]


def test_a_search_above_the_size_limit_is_not_stored(store, folder, monkeypatch):
    monkeypatch.setattr(store_module, "_LARGEST", 100)
    with pytest.warns(CacheWarning, match=r"the search of double@v0 is not stored: it takes more than 100 bytes"):
        store.save(searched(call(), {Tile(1): 1.0}))
    assert not folder.exists()


def save_one(folder, us):
    MeasurementStore(folder).save(searched(call(), {Tile(1): us}))


@pytest.mark.slow
def test_processes_that_save_at_once_keep_all(folder):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.starmap(save_one, [(folder, 1.0), (folder, 2.0), (folder, 3.0)])
    assert {round(seconds_of(search)[1]) for search in MeasurementStore(folder).searches()} == {1, 2, 3}


def test_without_a_folder_searches_go_to_a_temporary_folder_with_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    cache = PersistentCache(tmp_path / "file", shipped=False, clock=Clock())
    store = MeasurementStore(cache)
    with pytest.warns(CacheWarning, match="cannot be written"):
        store.save(searched(call(), {Tile(1): 1.0}))
    store.save(searched(call(), {Tile(1): 2.0}))
    assert [str(search.path.parents[2]) for search in store.searches()] == [str(cache.kept_in)] * 2
    assert [seconds(record) for record in store.records(call())] == [{1: 2.0}]


# --- unreadable logs ---


def edited(change):
    """A change of the header."""

    def edit(text):
        first, rest = text.split("\n", 1)
        return lines_with_digest(json.dumps(json.loads(first) | change) + "\n" + rest)

    return edit


def replaced(old, new):
    return lambda text: lines_with_digest(text.replace(old, new))


def of_the_form_without_digests(text):
    return text.replace(f'"schema":{SCHEMA}', '"schema":1').partition('{"sha256"')[0]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda text: "not JSON", "edited or cut off"),
        (lambda text: "", "edited or cut off"),
        (lambda text: "[1, 2]\n", "not the log of a search"),
        (of_the_form_without_digests, "an older ejkernel: schema 1"),
        (lambda text: text.replace("[2e-06]", "[2.5]"), "its content was edited or cut off"),
        (edited({"schema": SCHEMA + 1}), "newer ejkernel"),
        (edited({"surprise": 1}), "surprise"),
        (edited({"winner_index": 5}), "its winner is outcome 5 of 1"),
        (edited({"planned": 10**9}), "it has int 1000000000 candidates"),
        (edited({"key": "odd"}), "ConfigKey"),
        (edited({"key": {"device": HERE, "op": "double@v0", "call": "other"}}), "holds another key"),
        (lambda text: text[: text.rindex('"')], "its content was edited or cut off"),
        (lambda text: text + "[]\n", "its content was edited or cut off"),
        (replaced("[2e-06]", "[-2.0]"), "line 2: samples must be between"),
        (replaced("[2e-06]", "[0.0]"), "line 2: samples must be between"),
        (replaced("[2e-06]", "[5e-324]"), "line 2: samples must be between"),
        (replaced("[2e-06]", "[1e300]"), "line 2: samples must be between"),
        (replaced("[2e-06]", f"[{10**4000}]"), r"outcomes\[0\]"),
        (replaced("[2e-06]", "[]"), "line 2: samples must be between"),
        (replaced("[2e-06]", "[null]"), r"outcomes\[0\]"),
        (replaced("[2e-06]", "[NaN]"), "must be finite"),
        (replaced('"measured"', "1"), r"outcomes\[0\]"),
        (replaced('"reason"', '"why"'), r"outcomes\[0\]"),
        (replaced('{"config"', '{"relative":0.5,"config"'), r"outcomes\[0\]"),
    ],
)
def test_a_log_that_cannot_be_used_is_a_warned_skip(store, folder, edit, reason):
    store.save(searched(call(), {Tile(1): 2.0}))
    (file,) = folder.rglob("*.jsonl")
    file.write_text(edit(file.read_text()))
    with pytest.warns(CacheWarning, match=reason):
        assert store.records(call()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(store.searches()) == []


def test_a_configuration_that_the_kernel_no_longer_has_is_skipped_with_a_line_in_the_log(store, caplog):
    inv = call()
    outcomes = (measured({"rows": 1, "order": "row"}, [1.0]), measured({"rows": 2, "order": 0}, [2.0]))
    store.save(AutotuneData(inv=inv, config=outcomes[0].config, outcomes=outcomes, seconds=0.0))
    with caplog.at_level(logging.INFO):
        (record,) = store.records(inv)
    assert seconds(record) == {1: 1.0}
    assert "1 of 2 configurations" in caplog.text


# --- records to start from ---


def test_records_come_from_the_nearest_call_first(store):
    for inv in (
        call(rows=256, device=THERE),
        call(rows=16, device=THERE),
        call(rows=64),
        call(rows=2),
        call(rows=16),
        call(rows=32, device=ELSEWHERE),
    ):
        store.save(searched(inv, {Tile(inv.args[0].shape[0]): 1.0}))
    found = store.records(call(), count=9)
    assert labels(found) == [HERE, THERE, HERE, HERE, ELSEWHERE, THERE]
    assert [record.times[0][0].rows for record in found] == [16, 16, 64, 2, 32, 256]
    assert labels(store.records(call(), count=2)) == [HERE, THERE]


@pytest.mark.parametrize(
    "other",
    [
        call(causal=True),
        call(dtype=np.float16),
        call(kernel=Tiled("other")),
        Invocation(kernel=DOUBLE, args=(jax.ShapeDtypeStruct((16, 8, 1), np.float32),), device=HERE),
        dataclasses.replace(call(), precision="highest"),
    ],
    ids=["static argument", "dtype", "operation", "rank", "precision"],
)
def test_calls_that_differ_in_more_than_dimensions_are_not_similar(store, other):
    store.save(searched(other, {Tile(1): 1.0}))
    assert store.records(call()) == []
    store.save(searched(call(), {Tile(1): 1.0}))
    assert [len(store.records(each)) for each in (call(), other)] == [1, 1]


def test_another_version_of_the_operation_is_another_operation(store):
    class Newer(Tiled):
        version = "1"

    store.save(searched(call(), {Tile(1): 1.0}))
    assert store.records(call(kernel=Newer("double"))) == []


def test_the_size_of_a_batch_is_a_dimension(store):
    batched = [dataclasses.replace(call(), batch_axes=((0,),), batch_sizes=(size,)) for size in (4, 16)]
    store.save(searched(batched[0], {Tile(1): 1.0}))
    assert len(store.records(batched[1])) == 1
    assert store.records(call()) == []


sizes = st.lists(st.integers(0, 2**20), min_size=3, max_size=3).map(tuple)


@given(a=sizes, b=sizes, c=sizes)
def test_distances_are_a_metric(a, b, c):
    assert distance(a, a) == 0.0
    assert distance(a, b) == distance(b, a) >= 0.0
    assert distance(a, c) <= distance(a, b) + distance(b, c) + 1e-9
    assert (distance(a, b) == 0.0) == (a == b)


def test_dimensions_leave_the_key_s_own_parts_in_common():
    common, dimensions = dimensions_of(call(rows=5, causal=True).description)
    assert dimensions == (5, 8)
    assert common == dimensions_of(call(rows=7, causal=True).description)[0]
    assert "float32" in common


def test_records_have_failures_but_no_skipped_candidates(store):
    outcomes = (
        measured(Tile(1), [3.0, 1.0, 2.0]),
        Outcome(config=Tile(2), status=Status.FAILED, reason="no"),
        Outcome(config=Tile(3), status=Status.WRONG, reason="no"),
        Outcome(config=Tile(4), status=Status.SAME, reason="as 1"),
        Outcome(config=Tile(5), status=Status.SKIPPED, reason="late"),
        Outcome(config=Tile(6), status="sulking", reason="a status of later"),
        Outcome(config=Tile(7), status=Status.READY),
    )
    store.save(AutotuneData(inv=call(), config=outcomes[0].config, outcomes=outcomes, seconds=0.0))
    (record,) = store.records(call())
    assert seconds(record) == {1: 2.0, 2: None, 3: None, 6: None}


def test_all_searches_of_a_call_make_one_record_on_the_clock_of_the_newest(store):
    store.save(searched(call(), {Tile(1): 4.0, Tile(2): 8.0, Tile(3): 12.0, Tile(5): 2.0}))
    store.save(searched(call(), {Tile(1): 2.0, Tile(2): 4.0, Tile(4): 1.0, Tile(5): None}))
    (record,) = store.records(call())
    assert seconds(record) == {1: 2.0, 2: 4.0, 3: 6.0, 4: 1.0, 5: None}


def test_layers_are_read_too_and_a_search_in_two_folders_counts_once(store, folder, tmp_path):
    store.save(searched(call(), {Tile(1): 1.0}))
    mine = MeasurementStore(PersistentCache(tmp_path / "mine", layers=[folder, folder], shipped=False))
    assert len(list(mine.searches())) == 1
    assert len(mine.records(call())) == 1


def test_bare_numbers_are_configurations_too(store):
    inv = call(kernel=LISTED)
    store.save(searched(inv, {1: 2.0, 4: 1.0}))
    (record,) = store.records(inv)
    assert record.times == ((1, pytest.approx(2e-6)), (4, pytest.approx(1e-6)))


def test_a_search_tries_a_stored_record_first(store):
    store.save(searched(call(rows=32), {Tile(rows): abs(rows - 37) + 1.0 for rows in range(1, 60)}))
    space = ConfigSpace({"rows": range(1, 60), "order": ["row", "column"]}, build=Tile)
    assert default_strategy(space, seeds=[Tile(1)], records=store.records(call())).ask(1) == [Tile(37)]


# --- in the chain ---


class Tuner:
    """Returns the given times, and keeps the records it receives."""

    def __init__(self, times):
        self.times, self.given = times, []

    def tune(self, inv, kernel, *, records=(), **options):
        self.given.append(list(records))
        return searched(inv, self.times)


def test_a_chain_stores_measurements_and_starts_from_them(cache):
    tuner = Tuner({Tile(1): 2.0, Tile(2): 1.0})
    chain = ConfigSelectorChain(persistent=cache, autotune=True, tuner=tuner)
    assert chain.resolve(call(), DOUBLE).source == "autotune"
    assert chain.resolve(call(rows=32), DOUBLE).source == "autotune"
    assert [[seconds(record) for record in records] for records in tuner.given] == [[], [{1: 2.0, 2: 1.0}]]
    assert len(list(chain.store.searches())) == 2


def test_a_chain_that_must_not_write_stores_nothing(cache, folder):
    chain = ConfigSelectorChain(persistent=cache, autotune=True, tuner=Tuner({Tile(1): 1.0}), persist_autotune=False)
    chain.resolve(call(), DOUBLE)
    assert not folder.exists()


def test_a_chain_without_a_persistent_cache_has_no_store():
    chain = ConfigSelectorChain(autotune=True, tuner=Tuner({Tile(1): 1.0}))
    assert chain.store is None
    assert chain.resolve(call(), DOUBLE).source == "autotune"


def test_a_chain_s_store_follows_its_cache(cache, tmp_path):
    chain = ConfigSelectorChain(persistent=cache)
    assert chain.store is chain.store
    chain.persistent = PersistentCache(tmp_path / "another", shipped=False)
    assert chain.store.cache is chain.persistent


def test_a_search_of_a_new_shape_starts_from_stored_measurements(cache):
    chain = ConfigSelectorChain(persistent=cache)
    small, large = (Invocation(kernel=DOUBLE, args=(np.ones((rows, 8), np.float32),)) for rows in (4, 8))
    data = chain.search(small, DOUBLE, candidates=[Tile(1), Tile(2)])
    (record,) = chain.store.records(large)
    assert [config for config, _ in record.times] == [o.config for o in data.outcomes if o.measurement is not None]
    assert record.times[0][1] == pytest.approx(data.heuristic.measurement.median, rel=1e-4)
    chain.search(large, DOUBLE, candidates=[Tile(1), Tile(2)])
    assert [search.key.call for search in chain.store.searches(large.op_id_v)].count(large.call_key) == 1
