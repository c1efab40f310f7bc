# SPDX-License-Identifier: Apache-2.0
"""The programs of `benchmarks`: separate processes, runs on a GPU, tables and bounds."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re

import numpy as np
import pytest
from benchmarks import attention_choice, attention_drawn, attention_near, gpu_run, grouped_bounds, untuned
from benchmarks.apart import AnsweringProcess, run_apart
from benchmarks.attention_cases import case_named, words_of
from benchmarks.gpu_run import Step
from benchmarks.grouped_bounds import Rates, bound, tile_rows
from benchmarks.grouped_matmul import Shape
from benchmarks.norms_tpu import bytes_in_hbm

from ejkernel import compat
from ejkernel.kernels.flash_attention.operation import flash_attention as operation
from ejkernel.ops.autotuner.compile.targets import Target

# --- measurements in a separate process ---


def test_a_process_returns_its_lines():
    lines, reason = run_apart("platform", seconds=60.0)
    assert len(lines) == 1
    assert not reason


def test_a_failing_process_is_its_last_message():
    lines, reason = run_apart("json.tool", "/absent", seconds=60.0)
    assert not lines
    assert "/absent" in reason


def test_a_process_that_does_not_end_is_the_time_limit():
    assert run_apart("json.tool", seconds=0.0) == ([], "it took more than 0 s")


# --- gpu_run: a failing step does not affect the others ---


def test_a_failing_step_is_reported_and_the_next_begins(monkeypatch, tmp_path, capsys):
    steps = {
        "first one": Step(("-c", "raise SystemExit('too bad')"), 1),
        "second": Step(("-c", "import os, sys; print(os.environ['SAID'], sys.argv[1])", "{out}"), 1, {"SAID": "yes"}),
    }
    monkeypatch.setattr(gpu_run, "STEPS", steps)
    assert gpu_run.main(["--out", str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("first one: status 1")
    assert second.startswith("second: ok")
    assert "too bad" in (tmp_path / "first_one.txt").read_text()
    assert f"yes {tmp_path}" in (tmp_path / "second.txt").read_text()


def test_steps_that_cannot_begin_in_time_are_reported(tmp_path, capsys):
    assert gpu_run.main(["--out", str(tmp_path), "--minutes", "0", "tests"]) == 1
    assert capsys.readouterr().out == "tests: did not begin\n"


def test_a_step_at_its_limit_is_ended(tmp_path):
    assert gpu_run.run("late", Step(("-c", "input()"), 0), tmp_path) == "ended after 0 minutes"


def test_unknown_steps_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_run.main(["--out", str(tmp_path), "test"])
    assert "no step test; there are tests, layer mixtral" in capsys.readouterr().err


def test_compiled_spaces_are_measured_by_their_folders_names(tmp_path):
    (tmp_path / "grouped_matmul_64_groups").mkdir()
    (step,) = gpu_run.record_steps(tmp_path).values()
    assert step.arguments[:3] == ("-m", "benchmarks.record", "measure")
    assert "grouped_matmul_64_groups" in step.arguments


@pytest.mark.parametrize("name", gpu_run.STEPS)
def test_the_files_of_each_step_exist(name):
    first, second, *others = gpu_run.STEPS[name].arguments
    assert importlib.util.find_spec(second) if first == "-m" else (gpu_run.ROOT / first).exists()
    assert all((gpu_run.ROOT / argument).exists() for argument in others if argument.startswith("tests/"))


# --- attention_drawn: tables of measured cases ---


def case(ours, **others):
    times = {"untuned": ours, **{name.replace("_", " "): time for name, time in others.items()}}
    return {"us": times, "ratios": {"untuned": min(others.values()) / ours} if others else {}}


def test_cases_of_all_files_have_a_line_and_later_files_replace_earlier_ones(tmp_path, capsys):
    forward = {"5-0 causal": case(100.0, tokamax=90.0), "5-1 full": case(2000.0)}
    runs = [
        {"forward": forward, "forward and backward": {"5-0 causal": case(50.0, tokamax=90.0)}},
        {"forward": {"5-0 causal": case(80.0, tokamax=90.0) | {"us": {"untuned": 80.0, "jax.nn cudnn": 90.04}}}},
    ]
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(run))
    assert attention_drawn.main([str(file) for file in files]) == 0
    printed = capsys.readouterr().out
    assert "| forward | 1 | 1.12 | 1.12 | 0 |" in printed
    assert "| forward and backward | 1 | 1.80 | 1.80 | 0 |" in printed
    assert "| causal | 80.0 | 90.0 (cuDNN) | 1.13 | 50.0 | 90.0 (Tokamax) | 1.80 |" in printed
    assert "| full | 2,000 | - |  |  | - |  |" in printed


def test_lost_cases_are_counted(tmp_path):
    found = {"forward": {"5-0 a": case(100.0, tokamax=97.0), "5-1 b": case(100.0, tokamax=98.5)}}
    assert "| forward | 2 | 0.98 | 0.97 | 1 |" in list(attention_drawn.summary(found))


# --- grouped_bounds: the most that a grouped product reaches of a dense product's speed ---


def test_the_last_tile_of_a_group_counts_as_a_whole_or_half_a_tile():
    sizes = np.asarray([0, 1, 64, 65, 128, 129])
    assert tile_rows(sizes, 128, 128) == 128 * (0 + 1 + 1 + 1 + 1 + 2)
    assert tile_rows(sizes, 128, 64) == 64 * (0 + 1 + 1 + 2 + 2 + 3)


def test_few_rows_are_limited_by_the_matrices_and_many_by_their_tiles():
    rates = Rates(dense=100.0, copy=50.0)
    few = bound(Shape(m=4, k=8, n=8, groups=2), np.asarray([4, 0]), rates, height=4, last=4)
    # One matrix is read, 64 numbers, and four rows of 8 + 8; the products are 4 * 2 * 64 operations.
    assert few.memory == pytest.approx(2 * (64 + 64) / 50)
    assert few.products == few.dense == pytest.approx(5.12)
    assert few.of_dense == pytest.approx(1.0)  # the memory's 5.12 s are as long
    slow = bound(Shape(m=4, k=8, n=8, groups=2), np.asarray([2, 2]), Rates(dense=1e9, copy=1.0), height=4, last=2)
    assert slow.of_dense == pytest.approx(slow.dense / slow.memory)
    many = bound(Shape(m=100, k=8, n=8, groups=1), np.asarray([100]), Rates(dense=1.0, copy=1e9), height=64, last=64)
    assert many.of_dense == pytest.approx(100 / 128)


def test_the_table_has_a_line_for_each_shape(capsys):
    assert grouped_bounds.main(["--shapes", "128 groups", "128 groups, 16,384 rows"]) == 0
    *_, many, few = capsys.readouterr().out.splitlines()
    assert many.startswith("| 128 groups | 1,024 | 0.9")
    assert many.endswith("| tiles |")
    assert few.startswith("| 128 groups, 16,384 rows | 128 | 0.6")
    assert few.endswith("| memory |")
    assert grouped_bounds.main(["--shapes", "128 groups", "--copy", "0.001"]) == 0
    assert "memory" in capsys.readouterr().out


# --- processes that answer questions ---


@pytest.mark.parametrize(
    ("seconds", "how"),
    [(60.0, "ended with 1"), (0.0, "took more than 0 s")],
    ids=["it crashes", "it takes too long"],
)
def test_the_error_tells_a_crash_from_the_time_limit_and_has_the_memory(seconds, how):
    process = AnsweringProcess("no_such_module", "--answer", {}, seconds, "the simulator")
    error = process("a question")["error"]
    assert re.fullmatch(rf"the simulator {how}, and used up to \d+\.\d GiB", error)


# --- attention_choice: rows of the data can be measured again ---


def test_the_words_of_a_row_name_its_case():
    cases = [attention_choice.case_of(row) for row in attention_choice.load()["calls"]]
    assert [case_named(words_of(case)) for case in cases] == cases


def test_rows_measured_again_take_the_places_of_the_old_ones():
    own = {"direction": "fwd", "sizes": [1, 512, 512, 8, 8, 64], "us": {"mosaic_gpu": 2.0, "cudnn": 1.0}}
    rows = [own, own | {"right": 0}]
    other = own | {"direction": "bwd", "device": "NVIDIA H100"}
    again = [own | {"right": 0, "us": {"mosaic_gpu": 1.0, "cudnn": 2.0}}, own | {"us": {"cudnn": 1.0}}, other]
    found = {"environment": {"device": "NVIDIA H100; some CPU"}, "calls": again}
    assert attention_choice.updated(rows, found) == [own, again[0] | {"device": "NVIDIA H100"}, other]


def test_launches_with_changed_parameters_are_timed_in_their_direction():
    changes = ["fwd kv_block=96 stages=3", "bwd q_block=128"]
    entries = attention_choice.entries_of({"causal B4 T4096 H8/8 D128": ("bwd",)}, changes)
    assert [(entry.direction, entry.contender) for entry in entries] == [
        (direction, name) for direction in ("fwd", "bwd") for name in ("mosaic_gpu", "cudnn", "mosaic_gpu")
    ]
    assert [entries[i].params and entries[i].params.stages for i in (0, 2)] == [None, 3]
    assert attention_choice.title_of(entries[2]).startswith("mosaic_gpu kv_block=96 stages=3 ")
    assert attention_choice.title_of(entries[5]) == "mosaic_gpu q_block=128"


# --- attention_near: candidates near the heuristic ---


@pytest.mark.slow
def test_a_draw_is_tuned_from_the_heuristic_by_different_changes():
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    with Target.named("nvidia_h200").entered():
        entries = dict(attention_near.entries_of("causal B1 T4096 H16/4 D128", 4))
        found = [(entry.direction, entry.contender) for entry in entries]
        assert found == [("fwd", "mosaic_gpu")] * 5 + [("fwd", "cudnn")] + [("bwd", "mosaic_gpu")] * 5 + [
            ("bwd", "cudnn")
        ]
        (forward, inv), (gradient, of_gradient) = [list(entries.items())[i] for i in (0, 6)]
        assert operation.heuristic_cfg(inv).fwd == forward.params
        assert operation.heuristic_cfg(of_gradient).bwd == gradient.params
    assert len({one.params.form for one in entries if one.contender == "mosaic_gpu" and one.direction == "bwd"}) == 2


# --- untuned: the heuristic beside nearby configurations ---


@pytest.mark.slow
def test_all_combinations_of_the_axes_of_a_given_product_are_tried():
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    inv = dataclasses.replace(untuned.given("blocks,205,13312,512"), device="gpu:nvidia_h200")
    first, *others = untuned.candidates_of(inv, 0, ["block_n", "splits", "pages"])
    assert first == inv.kernel.heuristic_cfg(inv)
    launches = [config.fwd for config in (first, *others) if config.implementation == "mosaic_gpu"]
    pairs = [(launch.block_n, launch.splits) for launch in launches]
    assert sorted(pairs) == [(block_n, splits) for block_n in (64, 128, 192) for splits in (1, 2, 4, 8)]
    assert "xla" in {config.implementation for config in others}


# --- norms_tpu: the arrays of a kernel in HBM ---

SCHEDULED = """\
ENTRY %main (x: bf16[16,128]) -> bf16[16,128] {
  %x = bf16[16,128]{1,0:T(8,128)(2,1)} parameter(0)
  %copy = bf16[16,128]{1,0:T(8,128)(2,1)S(1)} copy(%x)
  %both = (bf16[16,128]{1,0:T(8,128)(2,1)}, f32[16]{0:T(128)S(1)}) fusion(%copy, %x), kind=kLoop
  ROOT %out = bf16[16,128]{1,0:T(8,128)(2,1)} get-tuple-element(%both), index=0
}
"""


def test_arrays_in_vector_memory_do_not_count_as_reads_and_writes():
    found = dict(bytes_in_hbm(SCHEDULED))
    assert found["copy"] == 16 * 128 * 2
    assert found["both"] == 2 * 16 * 128 * 2
