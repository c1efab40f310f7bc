# SPDX-License-Identifier: Apache-2.0
"""Comparing entries: within a class by measurement, and current versions before others."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.config.shared.stores import entry

from ejkernel.ops.config.entries import StepNote
from ejkernel.ops.config.shared.choice import best_of_classes, by_preference, evidence, judge

NOTE = StepNote(target="train:step", before_us=1.0, after_us=1.0, speedup=1.0, low=1.0, high=1.0, rounds=9)


def compared(entry):
    """The entry, after a comparison of a program's step."""
    return dataclasses.replace(entry, measured=NOTE.added_to(entry.measured))


SMALL = st.builds(
    entry,
    rows=st.integers(1, 2),
    speedup=st.sampled_from([1.0, 1.1, 1.105, None, "no number", -1.0, 10**400]),
    days=st.integers(0, 1),
    measured=st.booleans(),
    jax=st.sampled_from(["0.0.1", "0.0.2"]),
)


@pytest.mark.parametrize(
    ("ours", "theirs", "takes", "conflict", "why"),
    [
        (entry(rows=1, speedup=1.2), entry(rows=2, speedup=1.5), True, False, "theirs 1.50x"),
        (entry(rows=1, speedup=1.5), entry(rows=2, speedup=1.2), False, False, "ours has 1.50x"),
        (entry(rows=1, speedup=1.5), entry(rows=2, speedup=1.51), True, True, "theirs 1.51x"),
        (entry(speedup=1.5), entry(speedup=1.51), True, False, "the same configuration"),
        (compared(entry(rows=1, speedup=1.0)), entry(rows=2), False, False, "only ours was compared in the step"),
        (entry(rows=2), compared(entry(rows=1, speedup=1.0)), True, False, "only theirs was compared in the step"),
        (entry(rows=1, measured=False), entry(rows=2), False, True, "ours was set by hand"),
        (entry(rows=1), entry(rows=2, measured=False), False, True, "theirs was set by hand"),
        (entry(measured=False), entry(), False, False, "ours was set by hand"),
        (entry(jax="0.0.1", speedup=9.0), entry(rows=2), True, False, "ours was measured with jax 0.0.1, not"),
        (entry(rows=2), entry(jax="0.0.1", speedup=9.0), False, False, "theirs was measured with jax 0.0.1, not"),
        (entry(jax="0.0.1", days=1), entry(jax="0.0.2"), True, False, "other versions, ours earlier"),
        (entry(jax="0.0.1"), entry(jax="0.0.2", days=1), False, False, "other versions, theirs earlier"),
    ],
)
def test_which_of_two_stays_and_why(ours, theirs, takes, conflict, why):
    verdict = judge(ours, theirs)
    assert (verdict.takes, verdict.is_conflict) == (takes, conflict)
    assert why in verdict.why


@settings(max_examples=30)
@given(st.lists(SMALL, min_size=1, max_size=5))
def test_the_choice_does_not_depend_on_the_order(entries):
    orders = itertools.islice(itertools.permutations(entries), 24)
    assert len({tuple(evidence(found) for found in by_preference(order)) for order in orders}) == 1


@settings(max_examples=30)
@given(st.lists(SMALL, min_size=2, max_size=5), st.integers(1, 4))
def test_choosing_among_the_best_of_each_share_equals_choosing_among_all(entries, cut):
    parts = [*best_of_classes(entries[:cut]), *best_of_classes(entries[cut:])]
    assert by_preference(parts) == by_preference(entries)


def test_an_entry_set_by_hand_answers_only_without_a_measured_entry():
    by_hand = entry(rows=1, measured=False)
    assert by_preference([by_hand, entry(rows=2, jax="0.0.1", days=9)])[0].config == {"rows": 2}
    assert by_preference([by_hand]) == [by_hand]
