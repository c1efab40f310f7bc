# SPDX-License-Identifier: Apache-2.0
"""`ejkernel report`: the page, parsed without a browser."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import sys

import jax
import numpy as np
import pytest
from tests.cli.searches import HOSTILE, SCRIPT, Page, Reported, Tile, call, failed, found, measured, save

from ejkernel.cli import main, report_data, report_page
from ejkernel.ops import PersistentCache
from ejkernel.ops.autotuner.measure.paired import compare
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.trials.challenge import Challenge
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.autotuner.trials.view import Failures, Row
from ejkernel.ops.config.entries import StepNote

pytest.importorskip("jinja2", reason="jinja2 is an extra, and is not installed")


def reported(folder, tmp_path):
    output = tmp_path / "out.html"
    assert main(["report", "--cache", str(folder), "--output", str(output)]) == 0
    return output.read_text(encoding="utf-8")


@pytest.fixture
def page(tmp_path):
    return Page(reported(save(tmp_path / "configs", found()), tmp_path))


def test_it_shows_both_times_of_a_call_and_its_source(page, tmp_path):
    assert "4.0 us with the heuristic, 2.0 us tuned" in page.text
    assert "2.00x" in page.text
    assert f"saved in {tmp_path / 'configs'}" in page.text
    assert f"jax {jax.__version__}" in page.text


def test_a_kept_call_has_no_tuned_time_and_names_break_before_their_version(tmp_path):
    data = found()
    html = reported(save(tmp_path / "configs", dataclasses.replace(data, config=data.heuristic.config)), tmp_path)
    assert re.search(r'data-l="Tuned"[^>]*>-</td>', html)
    assert "4.0 us with the heuristic, which is kept" in html
    assert "reported<wbr>@v0</a>" in html


def test_it_shows_every_program_with_its_spread_on_one_axis(page):
    dots = [float(attrs["cx"].rstrip("%")) for attrs in page.all("circle") if "%" in attrs["cx"]]
    assert dots == sorted(dots)
    assert len(dots) == 3
    assert len(page.all("rect")) == 3 + 2  # the bars of the confirmation run
    assert "Time axis from 1.9 us to 4.0 us" in [attrs.get("aria-label") for attrs in page.all("svg")]


def test_it_shows_the_confirmation_run_and_the_best_so_far(page):
    assert (
        "2.00x ± 0.0 % in the median round, which decides (threshold 1.02x). Faster in 10 of 10 rounds, slower in 0"
        in page.text
    )
    label = "Best time by number of measurements: 4.0 us after 1, 3.0 us after 2, 2.0 us after 3, of 3"
    assert label in [attrs.get("aria-label") for attrs in page.all("div")]
    assert {"d": "M0 4H300V42H600V96H600"} in page.all("path")


def test_a_candidate_that_memory_ruled_out_is_shown_beside_the_fastest_one_that_takes_no_more(tmp_path):
    samples, peaks = {1: 4.0, 2: 3.9, 3: 3.97, 4: 3.98}, {1: 10 << 20, 2: 30 << 20, 3: 40 << 20, 4: 10 << 20}
    outcomes = tuple(
        dataclasses.replace(measured(Tile(n), *[time] * 20), peak_bytes=peaks[n]) for n, time in samples.items()
    )
    outcomes = tuple(
        dataclasses.replace(one, measurement=dataclasses.replace(one.measurement, method="wall")) for one in outcomes
    )
    challenge = Challenge(Tile(2), compare([3.9e-6] * 20, [4e-6] * 20, more_bytes=20 << 20), is_confirmation=True)
    data = AutotuneData(inv=call(), config=outcomes[0].config, outcomes=outcomes, seconds=1.0, challenge=challenge)
    text = Page(reported(save(tmp_path / "configs", data), tmp_path)).text
    assert "Result: too little for 20.0 MiB more memory, so the heuristic is kept." in text
    assert "takes no more memory: order=row rows=4, 100% of the heuristic's time in the run of all candidates" in text


def test_it_shows_the_throughput_of_a_kernel_with_a_cost(page):
    assert "Throughput with the heuristic 1 TFLOP/s, 500 GB/s, at 2 FLOP per byte" in page.text
    assert "Throughput tuned 2 TFLOP/s, 1e+03 GB/s" in page.text


def test_reasons_that_differ_in_numbers_form_one_group(tmp_path, capsys):
    save(tmp_path / "configs", found())
    assert main(["report", "--cache", str(tmp_path / "configs"), "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    assert [(group["status"], len(group["configs"])) for group in data["failures"]] == [("failed", 2), ("crashed", 1)]
    assert [row["group"] for row in data["rows"] if row["status"] != "measured"] == [1, 1, 2]
    assert data["speedup"] == 2.0


def test_hostile_names_and_reasons_stay_text(tmp_path):
    folder = save(tmp_path / "configs", found(), entry=False)
    (found_call,) = report_data.calls_of(PersistentCache(folder, shipped=False))
    names = {name: f"{name} {HOSTILE}" for name in ("op", "device", "call", "arguments", "config", "search", "time")}
    hostile = dataclasses.replace(found_call, source=HOSTILE, versions={SCRIPT: SCRIPT}, notes=(SCRIPT,), **names)
    page = Page(report_page.page([hostile], HOSTILE))
    assert len(page.all("script")) == 1
    assert "alert" not in page.script
    assert len(page.all("table")) == 3
    assert all(name in page.text for name in names.values())
    assert f"needs 300 bytes {HOSTILE}" in page.text
    assert f"order={SCRIPT} rows=4" in page.text


def test_the_browser_runs_only_the_script_of_the_template(page):
    (policy,) = [attrs["content"] for attrs in page.all("meta") if "http-equiv" in attrs]
    digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not [attrs for _, attrs in page.tags if "src" in attrs or not attrs.get("href", "#").startswith("#")]


def test_headers_have_a_scope_and_every_link_a_target(page):
    assert all("scope" in attrs for attrs in page.all("th"))
    names = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(names) == len(set(names))
    used = [attrs["href"][1:] for attrs in page.all("a")] + [
        attrs["aria-labelledby"] for _, attrs in page.tags if "aria-labelledby" in attrs
    ]
    assert set(used) <= set(names)
    assert page.all("html") == [{"lang": "en"}]


def test_every_cell_of_a_row_has_a_column(tmp_path):
    html = reported(save(tmp_path / "configs", found()), tmp_path)
    for table in re.findall(r"<table.*?</table>", html, re.DOTALL):
        rows = [len(re.findall(r"<t[dh][ >]", row)) for row in table.split("<tr")[1:]]
        assert set(rows) == {rows[0]}


def test_an_entry_without_its_search_is_a_row(tmp_path):
    folder = save(tmp_path / "configs", found())
    next(folder.rglob("*.jsonl")).unlink()
    page = Page(reported(folder, tmp_path))
    assert "the file of its search is not here" in page.text
    assert "4.0 us with the heuristic, 2.0 us" in page.text


def test_the_search_behind_the_saved_configuration_is_shown(tmp_path):
    folder = save(tmp_path / "configs", found())
    newer = dataclasses.replace(found(), outcomes=found().outcomes[:1], challenge=None)
    save(folder, dataclasses.replace(newer, config=newer.outcomes[0].config), entry=False)
    (shown,) = report_data.calls_of(PersistentCache(folder, shipped=False))
    assert shown.speedup == 2.0
    assert (
        "the cache has 1 other search of this call; `ejkernel report --against previous` compares the newest two"
        in shown.notes
    )


@pytest.mark.parametrize("speedup", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_speedup_in_a_file_is_left_out_of_the_headline(speedup):
    calls = [reported_call(speedup=speedup, before_us=1.0), reported_call(speedup=2.0, before_us=1.0)]
    text = Page(report_page.page(calls)).text
    assert "1 call together: 2.00x (the sum" in text
    assert "(1 faster than the heuristic, 0 with the heuristic, 1 left out)" in text


def reported_call(**fields):
    key = {"op": "a", "device": "b", "call": "c", "arguments": "", "config": "", "result": ""}
    return report_data.CallReport(**key, **fields)


def test_calls_count_in_the_headline_by_their_time_in_a_run():
    calls = [
        reported_call(speedup=2.0, before_us=10.0, times=9),
        reported_call(speedup=1.0, before_us=10.0, after_us=10.0),
    ]
    assert "2 calls together: 1.82x" in Page(report_page.page(calls)).text


def test_the_headline_has_the_newest_step_of_each_program():
    def step(target, after, time):
        return StepNote(
            target=target, before_us=1e4, after_us=after, speedup=1e4 / after, low=1, high=1, rounds=9, time=time
        )

    steps = [step("train:step", 5e3, "2026-02"), step("train:step", 8e3, "2026-01"), step("<b>:other", 1e4, "2026-01")]
    calls = [reported_call(step=each) for each in steps]
    text = Page(report_page.page(calls)).text
    assert "step of train:step: 10.0 ms -> 5.00 ms, 2.00x" in text
    assert "8.00 ms" not in text
    assert "step of <b>:other: 10.0 ms -> 10.0 ms, 1.00x" in text
    assert "together" not in text
    calls[1] = dataclasses.replace(calls[1], device="other")
    text = Page(report_page.page(calls)).text
    assert "step of train:step on other: 10.0 ms -> 8.00 ms" in text


def test_programs_and_shares_of_their_steps_have_columns(tmp_path):
    folder = tmp_path / "configs"
    times = {"before_us": 200.0, "after_us": 100.0, "speedup": 2, "low": 1, "high": 1, "rounds": 9}
    note = StepNote(target="train:step", mapping="each step maps 36 MiB anew", **times)
    store = MeasurementStore(PersistentCache(folder, shipped=False))
    for program, rows, notes in (("train:step", 8, [note]), ("other:step", 16, [])):
        data = found(call(rows))
        store.program, store.times = program, {data.key: 12}
        store.save(data)
        figures = data.summary_data()
        for each in notes:
            figures = each.added_to(figures)
        store.cache.put(data.key, data.config, call=data.inv.description, measured=figures)
    html = reported(folder, tmp_path)
    assert re.findall(r'data-l="Program" class="mono">(.*?)</td>', html) == ["other:<wbr>step", "train:<wbr>step"]
    assert re.findall(r'data-l="Of step".*?>(.*?)</td>', html) == ["-", "24 %"]
    assert "other programs slowed" not in html
    busy = [dataclasses.replace(one, share=1.2) for one in report_data.calls_of(store.cache)]
    assert "More than 100 %: the step does some of the call" in report_page.page(busy)
    assert '<p class="soft">each step maps 36 MiB anew</p>' in html


def test_a_search_without_a_result_says_why(tmp_path):
    outcomes = (failed(Tile(1), "no such instruction"), failed(Tile(2), ""))
    why = "nothing was measured"
    data = AutotuneData(inv=call(), config=outcomes[0].config, outcomes=outcomes, seconds=1.0, not_saved=why)
    page = Page(reported(save(tmp_path / "configs", data, entry=False), tmp_path))
    assert f"not saved: {why}" in page.text
    assert "no such instruction" in page.text
    assert "no reason recorded" in page.text
    assert [attrs["data-kind"] for attrs in page.all("tr") if "data-kind" in attrs] == ["open"]


def test_many_reasons_share_the_last_group(tmp_path):
    outcomes = (measured(Tile(0), 1.0), *(failed(Tile(n), "no" + "o" * n) for n in range(1, 20)))
    data = AutotuneData(inv=call(), config=outcomes[0].config, outcomes=outcomes, seconds=1.0)
    page = Page(reported(save(tmp_path / "configs", data), tmp_path))
    assert "11 other reasons" in page.text
    assert "failed (9)" in page.text


def test_a_cost_that_raises_does_not_cost_the_report(tmp_path, caplog):
    class Broken(Reported):
        def cost(self, inv):
            raise RuntimeError("no idea")

    kernel = Broken("broken_cost")
    page = Page(reported(save(tmp_path / "configs", found(call(kernel=kernel))), tmp_path))
    assert "Throughput" not in page.text
    assert "no idea" in caplog.text


def test_an_empty_cache_writes_no_page(tmp_path, capsys):
    folder = tmp_path / "configs"
    folder.mkdir()
    assert main(["report", "--cache", str(folder), "--output", str(tmp_path / "out.html")]) == 1
    assert "No saved configurations" in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()


def test_without_jinja2_the_error_names_the_extra(tmp_path, capsys, monkeypatch):
    folder = save(tmp_path / "configs", found())
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["report", "--cache", str(folder), "--output", str(tmp_path / "out.html")]) == 1
    assert "pip install 'jinja2>=3.1'" in capsys.readouterr().err


def test_a_search_of_a_hundred_candidates_takes_at_most_25_kilobytes():
    rng = np.random.default_rng(0)

    def program(n):
        if n % 5 == 4:
            return Row(name=f"block_k={n} block_q=128 num_stages=3 warps=8", mark="", status="failed", group=n)
        low, time, high = sorted(rng.lognormal(5, 1, 3))
        return Row(
            name=f"block_k={n} block_q=128 num_stages=3 warps=8",
            mark="",
            status="measured",
            time_us=round(time, 4),
            low_us=low,
            high_us=high,
            samples=25,
            compile_s=1.234,
        )

    failures = tuple(
        Failures(status="failed", reason=f"{n}{'x' * 400}", configs=("block_k=64 block_q=128",) * 10) for n in range(8)
    )
    calls = [
        report_data.CallReport(
            op="flash_attention@v1",
            device="gpu:nvidia_h200",
            call=f"{n:064x}",
            arguments="bf16[4,4096,16,128] x3, causal=True",
            config="block_k=64 block_q=128 num_stages=3 warps=8",
            result="1.50x",
            before_us=3.0,
            after_us=2.0,
            speedup=1.5,
            search="complete",
            rows=tuple(map(program, range(100))),
            failures=failures,
            best=tuple((n + 1, 100.0 - n) for n in range(20)),
            measured=80,
        )
        for n in range(10)
    ]
    assert len(report_page.page(calls).encode()) <= 10 * 25_000  # so 200 searches take at most 5 MB


def test_a_roofline_shows_what_the_device_can_do(page):
    # 4 MFLOP and 2 MB in 2 us, below 4,800 GB/s
    assert (
        "Throughput tuned 2 TFLOP/s, 1e+03 GB/s, at 2 FLOP per byte: 21% of the roofline, limited by memory"
        in page.text
    )
    assert "float32: 494 TFLOP/s and 4,800 GB/s (NVIDIA H200 data sheet, without sparsity)" in page.text
    labels = [attrs["aria-label"] for attrs in page.all("a") if "aria-label" in attrs]
    assert labels == ["reported@v0 f32[16,8]: 2 TFLOP/s, 21% of the roofline, limited by memory, 2.00x"]


@pytest.mark.parametrize("module", ["costs_of_the_report", "./costs_of_the_report.py"])
def test_a_module_of_kernels_has_a_name_or_a_path(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "costs_of_the_report", raising=False)
    (tmp_path / "costs_of_the_report.py").write_text("")
    folder = save(tmp_path / "configs", found())
    assert main(["report", "--cache", str(folder), "--output", "out.html", "--import", module]) == 0
    assert "costs_of_the_report" in sys.modules


def test_without_a_peak_there_is_no_roofline(tmp_path):
    inv = dataclasses.replace(call(), device="gpu:unheard_of")
    page = Page(reported(save(tmp_path / "configs", found(inv)), tmp_path))
    assert "Rooflines" not in page.text
    assert "Throughput tuned 2 TFLOP/s" in page.text


def test_a_page_is_not_written_to_a_folder(tmp_path, capsys):
    assert main(["report", "--output", str(tmp_path)]) == 2
    assert "is a folder; name a file, or use --format svg or png." in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--output", "out.json"], ["--format", "svg"]])
def test_json_is_not_written_to_a_file(capsys, options):
    assert main(["report", "--json", *options]) == 2
    assert "--json prints the data and writes no file" in capsys.readouterr().err


def test_only_the_calls_of_a_device_are_shown(tmp_path, capsys):
    for device in ("gpu:a100", "gpu:h100"):
        save(tmp_path / "configs", found(dataclasses.replace(call(), device=device)))
    assert main(["report", "--cache", str(tmp_path / "configs"), "--device", "a100", "--json"]) == 0
    assert [each["device"] for each in json.loads(capsys.readouterr().out)] == ["gpu:a100"]
    assert main(["report", "--cache", str(tmp_path / "configs"), "--device", "b200"]) == 1
    assert "for a device with 'b200' in its name" in capsys.readouterr().err


def test_it_shows_how_often_a_run_makes_a_call_if_tune_knew(tmp_path, capsys):
    folder, data = tmp_path / "configs", found()
    assert 'data-l="Times"' not in reported(save(folder, data), tmp_path)
    store = MeasurementStore(folder)
    store.times = {data.key: 12}
    store.save(data)
    html = reported(folder, tmp_path)
    assert re.search(r'data-l="Times" class="n" data-v="12">12</td>', html)
    assert "12 times in a run of the tuned program" in html
    store.program = "train:<b>"
    store.save(data)
    assert "12 times in a run of train:&lt;b&gt;" in reported(folder, tmp_path)
    capsys.readouterr()
    assert main(["report", "--cache", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["times"] == 12
    assert main(["report", "--cache", str(folder), "--against", "previous", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calls"][0]["times"] == 12
    output = tmp_path / "both.html"
    assert main(["report", "--cache", str(folder), "--against", "previous", "--output", str(output)]) == 0
    assert 'data-l="Times" class="n" data-v="12">12</td>' in output.read_text(encoding="utf-8")
