# SPDX-License-Identifier: Apache-2.0
"""Samples of large matrices have every value of every parameter."""

from __future__ import annotations

import itertools
import types

import pytest
from tests import selection
from tests.selection import covering


def items_of(cases, folder="kernels", marks=("slow",), **mark):
    """Return the items of a test with these parameters, as pytest collects them."""
    found = {name: types.SimpleNamespace(kwargs=mark if name == "sampled" else {}) for name in marks}
    path = selection.SAMPLED[0].parent / folder / "test_it.py"
    return [
        types.SimpleNamespace(
            nodeid=f"test_it[{number}]",
            path=path,
            callspec=types.SimpleNamespace(params=case),
            get_closest_marker=found.get,
        )
        for number, case in enumerate(cases)
    ]


CASES = [{"mode": mode, "name": name, "sizes": {}} for mode in "abc" for name in "xyz"]
CASES = [case | {"sizes": CASES[0]["sizes"]} for case in CASES]


def test_a_sample_has_each_value_of_each_parameter():
    items = items_of(CASES)
    kept = [item.callspec.params for item in selection.sampled(items)]
    assert sorted(case["mode"] for case in kept) == ["a", "b", "c"]
    assert sorted(case["name"] for case in kept) == ["x", "y", "z"]
    assert [item.callspec.params for item in selection.sampled(items)] == kept


@pytest.mark.parametrize(
    ("folder", "marks", "kept"), [("ops", ("slow",), 9), ("kernels", (), 9), ("ops", ("sampled",), 3)]
)
def test_only_slow_tests_of_kernels_and_marked_ones_are_sampled(folder, marks, kept):
    assert len([*selection.sampled(items_of(CASES, folder, marks))]) == kept


def test_pairs_may_be_covered():
    cases = [dict(zip("abc", case, strict=True)) for case in itertools.product(range(3), repeat=3)]
    items = items_of(cases, "ops", ("sampled",), by=lambda a, b, c: {("a", a, b), ("b", b, c)})
    kept = [item.callspec.params.values() for item in selection.sampled(items)]
    assert len(kept) == 9
    assert {(a, b) for a, b, _ in kept} == {(b, c) for _, b, c in kept} == {*itertools.product(range(3), repeat=2)}


def test_a_case_that_does_not_run_leaves_its_values_to_others():
    cases = [{1, 2}, {1}, {2}, {3}]
    assert covering(cases) == [0, 3]
    assert covering(cases, lambda index: index not in {0, 3}) == [1, 2]


def test_cases_marked_whole_are_left_out_of_samples():
    items = [*items_of(CASES[:3]), *items_of(CASES[3:], marks=("slow", "whole"))]
    kept = [item.callspec.params for item in selection.sampled(items)]
    assert kept
    assert all(case in CASES[:3] for case in kept)
