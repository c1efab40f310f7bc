# SPDX-License-Identifier: Apache-2.0
"""The figures that the first pages show are those of the results files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w-])")


def found(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rows_of(page, heading):
    """Return the figures of each row of the tables with this text in their heading, without the first column."""
    text = (ROOT / page).read_text(encoding="utf-8")
    tables = [table for table in re.findall(r"(?:^\|.*\n)+", text, re.M) if heading in table.partition("\n")[0]]
    lines = [line for table in tables for line in table.splitlines()[2:]]
    assert lines, f"{page} has no table with {heading!r}"
    return [[float(figure.replace(",", "")) for figure in FIGURE.findall(line.split("|", 2)[2])] for line in lines]


@pytest.fixture(scope="module")
def measured():
    """The times of each case of attention on a GPU, in microseconds."""
    files = [found("attention_gpu"), found("attention_float32_gpu")]
    return [
        set(map(round, case["us"].values()))
        for file in files
        for direction in ("forward", "forward and backward")
        for case in file[direction].values()
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/operations/flash_attention.md"])
def test_a_row_of_attention_on_a_gpu_is_one_case(page, measured):
    for row in rows_of(page, "cuDNN through `jax.nn`" if page != "docs/operations/flash_attention.md" else "Tokamax"):
        parts = [row] if len(row) <= 3 else [row[: len(row) // 2], row[len(row) // 2 :]]
        assert all(any(case.issuperset(part) for case in measured) for part in parts), (page, row)


def test_a_row_of_attention_on_a_cpu_is_one_case():
    cases = [
        [*case["ms"].values(), *case["temporary_mib"].values()] for case in found("attention_cpu")["rows"].values()
    ]
    for row in rows_of("README.md", "two CPU cores"):
        assert any(row == pytest.approx(case, abs=0.5) for case in cases), row


def test_the_sentences_on_attention_and_experts_are_true():
    tuned = [
        case["ratios"]["tuned"]
        for name in ("forward", "forward and backward")
        for case in found("attention_gpu")[name].values()
    ]
    assert (len(tuned), min(tuned) >= 0.995) == (2 * 34, True)
    exact = [
        case["ratios"]["untuned"]
        for name in ("forward", "forward and backward")
        for case in found("attention_float32_gpu")[name].values()
    ]
    assert [round(ratio, 1) for ratio in (min(exact), max(exact))] == [2.1, 9.5]
    experts = found("mixture_of_experts_gpu")
    assert [round(experts[name]["step_ms"], 1) for name in ("ejkernel", "ragged_dot")] == [23.0, 149.2]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for words in ("all 34 cases", "more than 0.5 % slower", "2.1 to 9.5 times", "takes 23.0 ms, instead of 149.2 ms"):
        assert words in readme
