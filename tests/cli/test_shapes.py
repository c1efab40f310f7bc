# SPDX-License-Identifier: Apache-2.0
"""`ejkernel tune --shapes`: the format of the file, and the tuning of its calls."""

import json
import sys
from pathlib import Path

import pytest
from tests.ops.autotuner.made_up_times import interleaved_with

import ejkernel.modules  # noqa: F401 - makes the kernels that lines name
from ejkernel.cli import main
from ejkernel.cli.shapes import calls_of_shapes
from ejkernel.ops import Kernel
from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.config.estimates import EstimatedRow, EstimateFiles, Estimates
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.execution import targeted

NORM = '{"kernel": "rms_norm", "args": ["f32[%s,64]", "f32[64]"]%s}'


def found(tmp_path, *lines):
    file = tmp_path / "shapes.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return calls_of_shapes(file)


@pytest.fixture
def plain_sum():
    """A kernel that says nothing of its arguments but in the parameters of `run`."""

    class Sum(Kernel):
        def run(self, x, *, cfg):
            return x.sum()

        def heuristic_cfg(self, inv):
            return 1

    return Sum("plain_sum")


def test_calls_of_a_kernel_are_a_set_and_weights_are_one(tmp_path):
    both = found(
        tmp_path, NORM % (8, ""), "", NORM % (16, ', "weight": 2.5'), NORM.replace("f32", "bfloat16") % (8, "")
    )
    (norms,) = both.sets
    assert [call.weight for call in norms] == [1.0, 2.5, 1.0]
    assert [str(call.inv.args[0].dtype) for call in norms] == ["float32", "float32", "bfloat16"]
    assert [inv.args[0].shape for inv in both.calls] == [(8, 64), (16, 64), (8, 64)]


def test_sets_are_by_kernel_and_by_name(tmp_path):
    attention = '{"kernel": "flash_attention@v0", "args": ["f16[1,8,2,16]", "f16[1,8,2,16]", "f16[1,8,2,16]"]}'
    sets = found(tmp_path, NORM % (8, ""), attention, NORM % (16, ', "set": "wide"'), NORM % (32, "")).sets
    assert [[call.inv.args[0].shape[0] for call in calls] for calls in sets] == [[8, 32], [1], [16]]


def test_a_repeated_call_counts_twice(tmp_path):
    ((call,),) = found(tmp_path, NORM % (8, ""), NORM % (8, ', "weight": 3')).sets
    assert call.weight == 4.0


def test_keywords_have_their_json_values(tmp_path):
    line = json.dumps({
        "kernel": "flash_attention", "args": ["bf16[1,8,2,16]"] * 3, "kwargs": {"causal": True, "implementation": "xla"}
    })  # fmt: skip
    (inv,) = found(tmp_path, line).calls
    assert inv.kwargs["causal"] is True
    assert inv.kwargs["implementation"] == "xla"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: .*JSON"),
        ("[1]", r"line 2: a call must be a JSON object, e.g. .*; got \[1\]"),
        ('{"kernel": "rms_norm"}', "line 2: 'args' is missing; a call has kernel and args"),
        (NORM % (8, ', "wieght": 2'), "line 2: unknown field 'wieght'"),
        (NORM % (8, ', "weight": 0'), "line 2: weight must be a positive number up to 1e.100, got 0"),
        (NORM % (8, f', "weight": {10**400}'), "line 2: weight must be a positive number up to 1e.100, got 1000"),
        (NORM % (8, ', "weight": "2"'), "line 2: weight must be a positive number up to 1e.100, got '2'"),
        (NORM % (8, ', "kwargs": []'), r"line 2: kwargs must be an object, got \[\]"),
        (NORM % (8, ', "set": 1'), "line 2: set must be a string, got 1"),
        (
            '{"kernel": "rms_norn", "args": []}',
            "line 2: there is no kernel 'rms_norn'; did you mean 'rms_norm'\\? Kernels: .*rms_norm@v0",
        ),
        (NORM % ("8]", ""), "line 2: "),
        (NORM.replace("f32", "f33") % (8, ""), r"line 2: 'f33\[8,64\]' has an unknown dtype"),
        ('{"kernel": "rms_norm", "args": ["f32[8,64]", "f32[32]"]}', "line 2: weight must"),
        ('{"kernel": "rms_norm", "args": []}', "line 2: "),
        ('{"kernel": "rms_norm", "args": ["bf16(8,64)"]}', r"line 2: 'bf16\(8,64\)' must have its sizes in square"),
        ('{"kernel": "rms_norm", "args": ["f32[8"]}', r"line 2: 'f32\[8' has no closing bracket"),
        ('{"kernel": "rms_norm", "args": ["f32[8,,4]"]}', r"line 2: 'f32\[8,,4\]' must have numbers as sizes"),
        ('{"kernel": "rms_norm", "args": ["f32[-1]"]}', r"line 2: 'f32\[-1\]' must have numbers as sizes"),
        (NORM % (8, ', "kwargs": {"cfg": 1}'), "line 2: kwargs contain cfg"),
        ('{"kernel": "plain_sum", "args": []}', "line 2: .*missing a required argument: 'x'"),
        (
            '{"kernel": "plain_sum", "args": ["f32[8]"], "kwargs": {"y": 1}}',
            "line 2: plain_sum has no argument `y`",
        ),
    ],
)
def test_an_invalid_line_is_an_error_with_its_number(tmp_path, plain_sum, line, message):
    with pytest.raises(ArgumentError, match=message):
        found(tmp_path, NORM % (8, ""), line)


def test_a_byte_order_mark_is_skipped(tmp_path):
    assert len(found(tmp_path, "\ufeff" + NORM % (8, "")).calls) == 1


def test_an_empty_file_and_a_missing_file_are_errors(tmp_path):
    with pytest.raises(ArgumentError, match=r"has no calls; write one call per line, e\.g\."):
        found(tmp_path, "")
    with pytest.raises(ArgumentError, match="cannot be read: "):
        calls_of_shapes(tmp_path / "none")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero")
def test_a_file_that_has_no_end_is_an_error():
    with pytest.raises(ArgumentError, match="is larger than the limit of 16777216 bytes"):
        calls_of_shapes(Path("/dev/zero"))


PROGRAM = """
import jax
import jax.numpy as jnp
from ejkernel.ops import tune


@tune(space={"rows": [1, 2, 4]})
def scaled_by_file(x, *, rows=1):
    return (x.reshape(rows, -1) * 2).reshape(x.shape)
"""
SECONDS = {1: {16: 2.0, 48: 2.0}, 2: {16: 1.0, 48: 3.0}, 4: {16: 3.0, 48: 1.0}}


LINE = '{"kernel": "scaled_by_file", "args": ["f32[%d]"], "weight": %d}'
NAMED = ("--shapes", "shapes.jsonl", "--import", "kernels_of_shapes")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a module of a kernel and a file of two of its calls; times are made up."""

    def time_of(config, case):
        return SECONDS[config["rows"]][int(case.arguments.partition("[")[2].partition("]")[0])]

    monkeypatch.setattr(timing, "interleaved", interleaved_with(time_of))
    (tmp_path / "kernels_of_shapes.py").write_text(PROGRAM)
    (tmp_path / "shapes.jsonl").write_text(f"{LINE % (16, 1)}\n{LINE % (48, 3)}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    sys.modules.pop("kernels_of_shapes", None)


@pytest.mark.slow
def test_the_command_saves_one_configuration_for_all_and_knows_it_again(folder, capsys):
    command = ["tune", "--in-process", *NAMED, "--cache", "saved"]
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    entries = json.loads(printed.out)["entries"]
    assert [entry["config"] for entry in entries] == [{"rows": 4}] * 2
    assert [case["weight"] for case in entries[0]["measured"]["cases"]] == [0.25, 0.75]
    assert "2 calls in 1 set, each with one configuration" in printed.err
    assert "2 faster than the heuristic; saved in" in printed.err
    assert main(command) == 0
    assert "2 calls already tuned" in capsys.readouterr().err
    (folder / "shapes.jsonl").write_text(f"{LINE % (16, 1)}\n{LINE % (48, 1)}\n")  # another set: other weights
    assert main([*command, "--dry-run", "--json"]) == 0
    assert [call["tuned"] for call in json.loads(capsys.readouterr().out)] == ["no (tuned alone)", "no (tuned alone)"]
    assert main(["show", "--cache", "saved", "--log", "scaled_by_file"]) == 0
    assert "one configuration for 2 cases of 2 calls, by the geometric mean" in capsys.readouterr().out
    main([*command, "--budget", "0.000001"])
    assert "2 searches can continue: run the command again" in capsys.readouterr().err


@pytest.mark.slow
def test_shared_candidates_of_several_calls_may_be_compiled_elsewhere(folder, capsys):
    assert main(["tune", "--compile-only", *NAMED, "--output", "bundle", "--compile-processes", "0"]) == 0
    printed = capsys.readouterr()
    assert "on the machine with the device: ejkernel tune --from bundle --shapes shapes.jsonl" in printed.err
    assert main(["tune", "--in-process", "--from", "bundle", *NAMED, "--cache", "saved", "--json"]) == 0
    assert [entry["config"] for entry in json.loads(capsys.readouterr().out)["entries"]] == [{"rows": 4}] * 2


@pytest.mark.parametrize(("us", "then"), [(1.0, "measures the fastest first"), (None, "measures all of them")])
def test_the_calls_of_a_file_are_estimated_for_a_target(folder, capsys, monkeypatch, us, then):
    asked = []

    def estimate(calls, target, store, **options):
        asked.extend(inv.args[0].shape for inv in calls)
        row = EstimatedRow(config={"rows": 2}, config_type="json", us=us, cycles=1750.0, is_heuristic=True)
        found = [Estimates.of(inv, "made up", [row]) for inv in calls]
        for each in found:
            store.put(each)
        return found

    monkeypatch.setattr(targeted, "estimate_calls", estimate)
    status = main(["tune", "--estimate", "--target", "tpu_v6e", *NAMED, "--cache", "saved"])
    assert status == (us is None)
    assert asked == [(16,), (48,)]
    err = " ".join(capsys.readouterr().err.split())
    assert "`ejkernel tune --shapes shapes.jsonl` on the device, with this folder as its cache, " + then in err
    assert len(list(EstimateFiles(folder / "saved").files())) == 2


@pytest.mark.parametrize("how", [["--estimate"], ["--compile-only"], ["--compile-only", "--output", "bundle"]])
def test_a_dry_run_for_a_target_lists_the_candidates(folder, capsys, how):
    command = ["tune", *how, "--target", "tpu_v6e", *NAMED, "--dry-run"]
    assert main([*command, "--verbose"]) == 0
    printed = capsys.readouterr()
    first, *configs = printed.out.splitlines()[:3]
    assert first.endswith(": 3 candidates")
    assert configs == ["  rows=1", "  rows=2"]
    doing = "estimated" if "--estimate" in how else "compiled"
    assert f"6 candidates of 2 calls would be {doing} for tpu_v6e" in printed.err
    assert main([*command, "--json"]) == 0
    assert [len(call["candidates"]) for call in json.loads(capsys.readouterr().out)] == [3, 3]
    assert not (folder / "bundle").exists()


@pytest.mark.parametrize("others", [["program:step"], ["--missed"], ["--missed", "--from", "bundle"]])
def test_calls_of_a_file_go_with_no_others(others, capsys):
    assert main(["tune", "--shapes", "shapes.jsonl", *others]) == 2
    assert "pass exactly one of MODULE:FUNCTION, FILE, --missed, --shapes and --from" in capsys.readouterr().err
