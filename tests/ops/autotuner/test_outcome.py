# SPDX-License-Identifier: Apache-2.0
"""A search as a person reads it."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from ejkernel.cli import report as cli_report
from ejkernel.cli import show
from ejkernel.ops import Invocation
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.paired import compare
from ejkernel.ops.autotuner.trials.challenge import Challenge
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.result import AutotuningResult, Entry
from ejkernel.ops.autotuner.trials.status import SearchProgress, SearchState, Status
from ejkernel.ops.autotuner.trials.view import SearchView, view_of
from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.execution import explain
from ejkernel.ops.notebook import html_of

CALL = Invocation(op_id="double@v1", args=(jax.ShapeDtypeStruct((4, 8), np.float32),), device="gpu:h200")


def measured(rows, *microseconds):
    samples = tuple(n * 1e-6 for n in microseconds)
    return Outcome(config={"rows": rows}, status=Status.MEASURED, measurement=Measurement(samples=samples))


def search(*outcomes, winner):
    return AutotuneData(inv=CALL, config=outcomes[winner].config, outcomes=outcomes, seconds=2.0)


NO_GAIN = Challenge({"rows": 2}, compare([10.0] * 20, [10.0] * 20), is_confirmation=True)


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({}, ["within 2% of the chosen one", "dropped after 1 round", "ranked behind rows=1 in the run of all", ""]),
        (
            {"challenge": NO_GAIN},
            [
                "fastest in the run of all candidates; confirmation run: 1.00x ± 0.0 %: no difference",
                "dropped",
                "ranked behind rows=2 in",
                "",
            ],
        ),
    ],
)
def test_a_row_says_why_a_faster_candidate_lost(fields, reasons):
    outcomes = measured(1, 10, 10), measured(2, 9.9, 9.9), measured(3, 9), measured(4, 9, 9), measured(5, 11, 11)
    found = dataclasses.replace(search(*outcomes, winner=0), **fields)
    assert all(map(str.startswith, map(found.why_not_chosen, outcomes[1:]), reasons))
    rows = {line.split()[0]: line for line in found.summary().splitlines() if "measured " in line}
    assert all(text in rows[f"rows={number}"] for number, text in enumerate(reasons, 2))
    assert [row.why for row in view_of(found)["rows"] if row.why]


@pytest.mark.parametrize(
    ("op", "fields", "says"),
    [
        (
            "double@v1",
            {},
            "all 3 candidates compile to one program, so none is faster; if the kernel is yours, "
            "check that its run uses cfg, and tune it again (--force on the command line)",
        ),
        ("double.bwd@v1", {}, "check that its gradient rule uses cfg"),
        ("double@v1", {"planned": 4}, ""),
    ],
)
def test_candidates_that_are_one_program_are_called_so(op, fields, says):
    twins = [Outcome(config={"rows": n}, status=Status.SAME, twin={"rows": 1}) for n in (2, 3)]
    found = dataclasses.replace(
        search(measured(1, 10, 10), *twins, winner=0), inv=dataclasses.replace(CALL, op_id=op), **fields
    )
    for text in (found.summary(), str(AutotuningResult("gpu:h200", (), (found,)))):
        assert says in text
        assert says or "one program" not in text
    different = search(measured(1, 10, 10), twins[0], measured(3, 10, 10), winner=0)
    assert not different.why_alike


def test_an_unfinished_search_has_chosen_nothing():
    outcomes = measured(1, 10, 10), measured(2, 9.9, 9.9), measured(3, 9, 9)
    found = dataclasses.replace(search(*outcomes, winner=0), planned=9)
    rows = view_of(found)["rows"]
    assert {row.name: (row.mark, row.why) for row in rows} == {
        "rows=1": ("heuristic", ""),
        "rows=2": ("", "not confirmed yet"),
        "rows=3": ("", "not confirmed yet"),
    }
    page = html_of(found)
    assert "used until the search is finished" in page
    assert "kept" not in page.partition("<dl")[2]


def result_of(tuned):
    return AutotuningResult("gpu:h200", (Entry("double@v1", CALL.call_key, tuned.config),), (tuned,))


FAILURE = Outcome(config={"rows": 3}, status=Status.FAILED, reason="out of\n  shared memory")


def test_a_summary_ranks_the_candidates_and_says_why_one_failed():
    text = search(measured(1, 20, 20, 22, 20), FAILURE, measured(2, 10), winner=2).summary()
    assert text.splitlines() == [
        "double@v1  f32[4,8]",
        f"gpu:h200, call {CALL.call_key}",
        "3 candidates in 2.0 s; 2.00x the heuristic's speed",
        "   configuration  status    median   spread  of heuristic  reason",
        "*  rows=2         measured  10.0 us  -       50%",
        "h  rows=1         measured  20.0 us  8%      100%",
        "   rows=3         failed    -        -       -             out of shared memory",
        '* chosen, h heuristic; sorted by "of heuristic", the time relative to the heuristic\'s in the same rounds. '
        "The confirmation run decides and may choose another row.",
    ]


def test_times_by_two_clocks_are_not_compared():
    fast = measured(2, 2, 2, 2, 2)
    by_processor = dataclasses.replace(
        fast, measurement=dataclasses.replace(fast.measurement, samples=(1e-6,) * 4, method="processor")
    )
    found = search(measured(1, 4, 4, 4, 4), by_processor, measured(3, 5, 5, 5, 5), FAILURE, winner=0)
    lines = found.summary().splitlines()
    assert lines[3].startswith("two clocks: ")
    assert [line.split() for line in lines[4:-1]] == [
        ["configuration", "status", "median", "spread", "of", "heuristic", "reason"],
        ["*h", "rows=1", "measured", "4.0", "us", "0%", "100%"],
        ["rows=3", "measured", "5.0", "us", "0%", "125%"],
        ["rows=2", "measured", "(1.0", "us", "cpu)", "0%", "-"],
        ["rows=3", "failed", "-", "-", "-", "out", "of", "shared", "memory"],
    ]
    view = SearchView(**view_of(found))
    assert [row.clock for row in view.rows] == ["", "", "processor", ""]
    assert (view.axis.low, view.best) == (4.0, ((1, 4.0),))


def test_the_best_so_far_is_by_the_ratio_to_the_heuristic_as_in_the_table():
    def beside(config, time, relative):
        one = measured(config, *[time] * 4)
        return dataclasses.replace(one, measurement=dataclasses.replace(one.measurement, relative=relative))

    found = search(beside(1, 4, 1.0), beside(2, 3, 1.1), beside(3, 5, 0.5), winner=2)
    view = SearchView(**view_of(found))
    assert (view.best, view.rows[0].name) == (((1, 4.0), (3, 2.0)), "rows=3")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (search(measured(1, 10), measured(2, 20), winner=0), "heuristic kept"),
        (search(FAILURE, measured(2, 20), winner=1), "the heuristic could not be measured"),
    ],
)
def test_a_summary_describes_the_result(data, says):
    assert data.summary().splitlines()[2].endswith(says)


def test_a_long_reason_is_cut_in_a_table():
    long = dataclasses.replace(FAILURE, reason="x" * 1000)
    assert max(map(len, search(measured(1, 1), long, winner=0).summary().splitlines())) < 200


def test_a_result_prints_a_table_of_speed_ups():
    tuned = search(measured(1, 20), measured(2, 10), winner=1)
    entries = (Entry("double@v1", CALL.call_key, {"rows": 2}), Entry("other@v0", "0" * 16, {"rows": 5}))
    lines = str(AutotuningResult("gpu:h200", entries, (tuned,))).splitlines()
    assert lines[0] == "2 configurations for gpu:h200"
    columns = "operation arguments heuristic tuned speed-up configuration candidates"
    assert lines[1].split() == columns.split()
    assert lines[2].split() == [
        *["double@v1", "f32[4,8]", "20.0", "us", "10.0", "us", "2.00x", "rows=2", "2", "of", "2", "measured"],
    ]
    assert lines[3].split() == ["other@v0", "call", "0" * 16, "-", "-", "-", "rows=5", "-"]


def test_a_result_shows_a_kept_heuristic():
    tuned = search(measured(1, 20), measured(2, 30), winner=0)
    text = str(AutotuningResult("gpu:h200", (Entry("double@v1", CALL.call_key, {"rows": 1}),), (tuned,)))
    assert text.splitlines()[0] == "1 configuration for gpu:h200"
    assert text.endswith("kept      rows=1         2 of 2 measured")


def test_a_result_names_searches_that_are_not_finished():
    tuned = dataclasses.replace(search(measured(1, 20), winner=0), planned=3, not_saved="not finished (1 of 3)")
    result = AutotuningResult("gpu:h200", (), (tuned,))
    title, _, row = str(result).splitlines()
    assert title == "0 configurations for gpu:h200"
    assert re.search(r"not finished \(1 of 3\) +rows=1 +1 of 3 measured$", row)
    assert result.remarks() == []  # the table has a row for it


def test_each_time_of_a_table_has_its_own_unit():
    tuned = search(measured(1, 20_000), measured(2, 10), winner=1)
    assert [line.split()[3:5] for line in tuned.summary().splitlines()[4:-1]] == [["10.0", "us"], ["20.0", "ms"]]
    cells = (*cli_report.searches(AutotuningResult("gpu:h200", (), (tuned,))).split(), *str(result_of(tuned)).split())
    assert (cells.count("us"), cells.count("ms")) == (2, 2)


def test_the_speed_up_is_the_ratio_that_decided():
    won = Challenge({"rows": 2}, compare([2e-6] * 10, [3e-6] * 10), is_confirmation=True)
    tuned = dataclasses.replace(search(measured(1, 20), measured(2, 7), winner=1), challenge=won)
    assert (tuned.speedup, tuned.in_a_word) == (1.5, "1.50x")
    assert tuned.tuned == pytest.approx(20e-6 / 1.5)
    measures = tuned.summary_data()
    entry = StoredEntry(key=CALL.key, config={"rows": 2}, config_type="json", call={}, measured=measures, provenance={})
    assert entry.speedup == 1.5
    early = dataclasses.replace(tuned, planned=4)
    assert early.in_a_word == "1.50x, not finished (2 of 4)"


def test_an_undecided_search_has_one_name_everywhere():
    tuned = dataclasses.replace(search(measured(1, 20), measured(2, 19), winner=0), undecided=True, why="a tie")
    entry = StoredEntry(
        key=CALL.key, config={}, config_type="json", call={}, measured=tuned.summary_data(), provenance={}
    )
    assert (tuned.in_a_word, tuned.progress.in_words) == ("undecided", "undecided")
    assert tuned.summary().splitlines()[2].endswith("; undecided: a tie")
    assert show._cells(entry)[5] == "undecided"
    assert explain._measured(entry).startswith("undecided, ")
    texts = (cli_report.searches(result_of(tuned)), show._in_full(entry), tuned.summary(), explain._measured(entry))
    assert not any(word in text for word in ("1.00x", "complete", "kept:") for text in texts)


OPEN = dataclasses.replace(compare([2.0] * 5, [2.5] * 5), wins=False, settled=False, doubt="5 rounds are few")


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"unconfirmed": True, "not_saved": "not finished (2 of 2, the best one is not confirmed)"}, "not finished"),
        ({"why": "it is open; 5 rounds are few"}, "undecided"),
    ],
)
def test_a_search_that_is_open_has_one_verdict_and_one_reason(changes, verdict):
    fields = {"why": "the time was over", "undecided": True} | changes
    challenge = Challenge({"rows": 2}, OPEN, is_confirmation=True)
    tuned = dataclasses.replace(search(measured(1, 25), measured(2, 20), winner=0), challenge=challenge, **fields)
    text = tuned.summary()
    assert text.count(verdict) >= 3
    assert ("undecided" if verdict == "not finished" else "not finished") not in text
    assert text.count("not confirmed") + text.count("5 rounds are few") == 1 + (verdict == "not finished")
    assert "kept" not in text
    assert tuned.progress.in_words.startswith(verdict)
    assert view_of(tuned)["standing"]["in_words"] == verdict


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"planned": 4}, "not faster"), ({"undecided": True}, "not faster"), ({}, "heuristic kept")],
)
def test_only_a_complete_search_calls_the_heuristic_kept(changes, words):
    lost = Challenge({"rows": 2}, compare([3.0] * 9, [2.0] * 9), is_confirmation=True)
    tuned = dataclasses.replace(search(measured(1, 25), measured(2, 26), winner=0), challenge=lost, **changes)
    assert f"; {words}" in tuned.summary()
    assert ("heuristic kept" in tuned.summary()) == (words == "heuristic kept")


def test_a_winner_of_an_undecided_search_is_called_undecided():
    tuned = dataclasses.replace(search(measured(1, 20), measured(2, 10), winner=1), undecided=True, why="3 is faster")
    assert tuned.in_a_word == "2.00x, undecided"
    won = Challenge({"rows": 2}, compare([1.0] * 9, [2.0] * 9), is_confirmation=True)
    text = dataclasses.replace(tuned, challenge=won).summary()
    assert "; faster than the heuristic" in text
    assert "wins" not in text
    assert tuned.summary().splitlines()[2].endswith("; 2.00x the heuristic's speed, undecided: 3 is faster")


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("partial", "its search is not finished (1 of 3); tuning again continues it"),
        ("failed", "its search failed; tuning again repeats it"),
        ("complete", "its search is complete, but its entry was removed; tuning again repeats it"),
    ],
)
def test_a_call_without_entry_says_what_tuning_again_does(state, says):
    assert SearchProgress(SearchState(state), 1, 3).without_entry == says


def test_an_empty_result_is_one_line():
    assert str(AutotuningResult("gpu:h200", ())) == "0 configurations for gpu:h200"


def test_a_time_by_another_clock_is_in_brackets_and_placed_by_its_ratio():
    other = measured(2, 1, 1, 1, 1)
    other = dataclasses.replace(
        other, measurement=dataclasses.replace(other.measurement, method="processor", relative=1.1)
    )
    found = search(measured(1, 4, 4, 4, 4), other, measured(3, 5, 5, 5, 5), winner=0)
    view = SearchView(**view_of(found))
    assert [(row.name, row.place_us) for row in view.rows] == [("rows=1", 4.0), ("rows=2", 4.4), ("rows=3", 5.0)]
    assert (view.axis.low, view.axis.high) == (4.0, 5.0)
    assert re.search(r"rows=2 +measured +\(1.0 us cpu\) +0% +110%", found.summary())
    row = html_of(found).partition("<td>rows=2<td")[2].partition("<tr")[0]
    assert "<td data-v=4.4>(1.0 us cpu)" in row
    assert "<rect" not in row
    assert "<circle" in row


def test_wall_clock_times_among_processor_times_say_so():
    slow = measured(1, 4, 4)
    by_processor = dataclasses.replace(slow, measurement=dataclasses.replace(slow.measurement, method="processor"))
    text = search(by_processor, measured(2, 5, 5), winner=0).summary()
    assert "5.0 us wall-clock" in text
    assert "4.0 us cpu" in text
    assert "`wall-clock` marks wall-clock time" in text
