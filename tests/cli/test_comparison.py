# SPDX-License-Identifier: Apache-2.0
"""`ejkernel report --against`: two sets of searches side by side."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from tests.cli.searches import HOSTILE, SCRIPT, Page, Tile, call, measured, save

from ejkernel.cli import comparison, main, report_data, report_page
from ejkernel.ops import PersistentCache
from ejkernel.ops.autotuner.trials.outcome import AutotuneData

pytest.importorskip("jinja2", reason="jinja2 is an extra, and is not installed")


def timed(*microseconds, rows=16, device="gpu:nvidia_h200", rows_of_winner=1):
    """Return a search whose only candidate has these samples."""
    inv = dataclasses.replace(call(rows), device=device)
    outcome = measured(Tile(rows_of_winner), *microseconds)
    return AutotuneData(inv=inv, config=outcome.config, outcomes=(outcome,), seconds=1.0)


def compared(tmp_path, capsys, *options):
    assert main(["report", "--cache", str(tmp_path / "new"), *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


SLOW, FAST = [4.0] * 5 + [4.1] * 5, [2.0] * 5 + [2.2] * 5


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (SLOW, FAST, "faster"),
        (FAST, SLOW, "slower"),
        ([1.0, 2.0] * 5, [1.1, 1.9] * 5, "undecided"),
        (SLOW, [2.0] * 5, "undecided"),  # five samples give no 95 % interval
    ],
)
def test_a_call_is_undecided_unless_the_intervals_are_apart(tmp_path, capsys, before, after, verdict):
    save(tmp_path / "old", timed(*before))
    save(tmp_path / "new", timed(*after, rows_of_winner=2))
    (found_call,) = compared(tmp_path, capsys, "--against", str(tmp_path / "old"))["calls"]
    assert found_call["verdict"] == verdict


@pytest.mark.parametrize(("jax", "verdict", "says"), [("1", "same configuration", "not compared"), ("2", "slower", "")])
def test_the_same_configuration_is_neither_faster_nor_slower_unless_its_software_changed(jax, verdict, says):
    key = dict.fromkeys(("op", "device", "call", "arguments", "config", "result"), "x")
    sides = [
        report_data.CallReport(**key, after_us=time, after_range=(time, time), versions={"jax": version})
        for time, version in ((1.0, "1"), (2.0, jax))
    ]
    found = comparison.compare(sides[:1], sides[1:], "old", "new")
    assert [each.verdict for each in found.calls] == [verdict]
    assert (found.mean is None) == bool(says)
    assert says in found.in_words


def test_times_by_two_clocks_have_no_ratio(tmp_path, capsys):
    after = timed(*FAST)
    (outcome,) = after.outcomes
    outcome = dataclasses.replace(outcome, measurement=dataclasses.replace(outcome.measurement, method="processor"))
    save(tmp_path / "old", timed(*SLOW))
    save(tmp_path / "new", dataclasses.replace(after, outcomes=(outcome,)))
    data = compared(tmp_path, capsys, "--against", str(tmp_path / "old"))
    (found_call,) = data["calls"]
    assert (found_call["verdict"], found_call["ratio"], data["geometric_mean"]) == ("two clocks", None, None)
    assert (found_call["before"]["clock"], found_call["after"]["clock"]) == ("wall", "processor")


def test_a_ratio_has_the_range_of_opposite_ends(tmp_path, capsys):
    save(tmp_path / "old", timed(*SLOW))
    save(tmp_path / "new", timed(*FAST, rows_of_winner=2))
    data = compared(tmp_path, capsys, "--against", str(tmp_path / "old"))
    ratio = data["calls"][0]["ratio"]
    assert data["calls"][0]["verdict"] == "faster"
    assert [round(ratio[name], 3) for name in ("median", "low", "high")] == [1.929, 1.818, 2.05]
    assert data["geometric_mean"] == ratio["median"]


def test_calls_of_one_side_are_listed(tmp_path, capsys):
    save(tmp_path / "old", timed(*SLOW, rows=16))
    save(tmp_path / "new", timed(*SLOW, rows=32))
    calls = compared(tmp_path, capsys, "--against", str(tmp_path / "old"))["calls"]
    assert [(each["arguments"], each["verdict"]) for each in calls] == [
        ("f32[32,8]", "only after"),
        ("f32[16,8]", "only before"),
    ]


def test_the_newest_search_is_compared_with_the_one_before(tmp_path, capsys):
    save(tmp_path / "new", timed(*SLOW))
    save(tmp_path / "new", timed(*FAST, rows_of_winner=2))
    (found_call,) = compared(tmp_path, capsys, "--against", "previous")["calls"]
    assert (found_call["before"]["after_us"], found_call["after"]["after_us"]) == (4.05, 2.1)
    assert not found_call["same_configuration"]
    assert found_call["before"]["source"] == "saved by this search, but replaced since"
    assert found_call["after"]["source"].startswith(f"saved in {tmp_path / 'new'}")


def test_two_devices_of_one_cache_are_compared(tmp_path, capsys):
    save(tmp_path / "new", timed(*SLOW, device="gpu:a100"))
    save(tmp_path / "new", timed(*FAST, device="gpu:h100"))
    data = compared(tmp_path, capsys, "--device", "h100", "--against-device", "a100")
    assert [(each["before"]["device"], each["after"]["device"]) for each in data["calls"]] == [("gpu:a100", "gpu:h100")]


@pytest.mark.parametrize(("option", "name"), [("--against-device", "b200"), ("--device", "h10")])
def test_a_device_that_no_side_has_is_an_error_with_the_devices(tmp_path, capsys, option, name):
    save(tmp_path / "new", timed(*SLOW, device="gpu:a100"))
    others = ["--device", "gpu"] if option == "--against-device" else ["--against-device", "a100"]
    assert main(["report", "--cache", str(tmp_path / "new"), "--json", option, name, *others]) == 1
    printed = capsys.readouterr()
    assert f"{option} must be part of a device's name, got {name!r}; " in printed.err
    assert printed.err.rstrip().endswith("has gpu:a100.")
    assert not printed.out


def test_calls_of_several_devices_are_paired_by_device(tmp_path, capsys):
    for folder in ("old", "new"):
        for device in ("gpu:a100", "gpu:h100"):
            save(tmp_path / folder, timed(*SLOW, device=device))
    calls = compared(tmp_path, capsys, "--against", str(tmp_path / "old"))["calls"]
    assert sorted(each["after"]["device"] for each in calls) == ["gpu:a100", "gpu:h100"]
    assert all(each["before"]["device"] == each["after"]["device"] for each in calls)


def test_the_same_entry_in_a_copy_is_unchanged(tmp_path, capsys):
    save(tmp_path / "old", timed(*SLOW))
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    (found_call,) = compared(tmp_path, capsys, "--against", str(tmp_path / "old"))["calls"]
    assert found_call["verdict"] == "unchanged"


def test_an_entry_without_its_search_is_undecided(tmp_path, capsys):
    save(tmp_path / "old", timed(*SLOW))
    save(tmp_path / "new", timed(*SLOW, rows_of_winner=2))
    next((tmp_path / "old").rglob("*.jsonl")).unlink()
    (found_call,) = compared(tmp_path, capsys, "--against", str(tmp_path / "old"))["calls"]
    assert found_call["verdict"] == "undecided"
    assert found_call["ratio"]["low"] is None


def test_the_page_shows_both_sides(tmp_path, capsys):
    save(tmp_path / "old", timed(*SLOW))
    save(tmp_path / "new", timed(*FAST, rows_of_winner=2))
    output = tmp_path / "out.html"
    options = ["--cache", str(tmp_path / "new"), "--against", str(tmp_path / "old"), "--output", str(output)]
    assert main(["report", *options]) == 0
    assert "1 call: 1 faster; geometric mean of 1 ratio: 1.93x" in capsys.readouterr().out
    shown = Page(output.read_text(encoding="utf-8"))
    assert "4.0 us (4.0 us to 4.1 us)" in shown.text
    assert "rows=1" in shown.text
    assert "rows=2" in shown.text
    assert [attrs["data-kind"] for attrs in shown.all("tr") if "data-kind" in attrs] == ["faster"]
    cells = [len(row.split("<td")) - 1 for row in output.read_text(encoding="utf-8").split("<tr")[2:]]
    assert cells == [9]


def test_hostile_names_stay_text_in_a_comparison():
    key = dict.fromkeys(("op", "device", "call", "arguments", "config", "result", "search", "time"), HOSTILE)
    hostile = report_data.CallReport(**key, after_us=1.0, versions={SCRIPT: SCRIPT}, source=HOSTILE)
    shown = Page(report_page.comparison_page(comparison.compare([hostile], [hostile], HOSTILE, HOSTILE)))
    assert len(shown.all("script")) == 1
    assert "alert" not in shown.script
    assert HOSTILE in shown.text


@pytest.mark.parametrize("time", [None, 0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_time_in_a_file_gives_no_ratio(time):
    key = dict.fromkeys(("op", "device", "call", "arguments", "config", "result"), "x")
    calls = [report_data.CallReport(**key, after_us=each) for each in (time, 1.0)]
    found_calls = comparison.compare(calls[:1], calls[1:], "old", "new")
    assert [each.verdict for each in found_calls.calls] == ["no time"]
    assert "1 no time" in Page(report_page.comparison_page(found_calls)).text


def test_nothing_on_both_sides_is_an_error(tmp_path, capsys):
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
    options = ["--cache", str(tmp_path / "new"), "--against", str(tmp_path / "old")]
    assert main(["report", *options, "--output", str(tmp_path / "out.html")]) == 1
    assert "No saved configurations" in capsys.readouterr().err


def test_previous_searches_are_of_one_device(tmp_path, capsys):
    assert main(["report", "--against", "previous", "--against-device", "h100"]) == 2
    assert "leave out --against-device" in capsys.readouterr().err


def test_the_newest_searches_are_also_those_without_an_entry(tmp_path):
    save(tmp_path / "new", timed(*SLOW), entry=False)
    store = PersistentCache(tmp_path / "new", shipped=False)
    assert [each.after_us for each in report_data.calls_of(store, newest=0)] == [4.05]
    assert report_data.calls_of(store, newest=1) == []
