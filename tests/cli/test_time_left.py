# SPDX-License-Identifier: Apache-2.0
"""The estimated time left of several searches."""

from __future__ import annotations

import pytest

from ejkernel.cli.time_left import TimeLeft
from ejkernel.ops import ConfigKey, RoundsFinished

KEYS = [ConfigKey("cpu", op, f"{number:016}") for number, op in enumerate(("op@v0", "op@v0", "op.bwd@v0", "op.bwd@v0"))]


class Seconds:
    now = 0.0

    def __call__(self):
        return self.now


def searches(count=4, more=(), **options):
    clock = Seconds()
    return clock, TimeLeft([*(key.op for key in KEYS[:count]), *more], clock=clock, **options)


def of_rounds(left):
    return left.searches[KEYS[0]].rounds.in_words()


def rounds(clock, left, key, seconds, *, candidates, planned=10, confirms=False):
    """Sample all rounds of a measurement, each in `seconds`."""
    for done in range(planned + 1):
        left.sample(RoundsFinished(key, candidates, done, planned, confirms))
        clock.now += seconds * (done < planned)


def test_a_compiled_search_is_not_over():
    clock, left = searches()
    left.step(KEYS[0], 0.0)
    clock.now = 9.0
    left.step(KEYS[0], 1.0)
    assert (left.of_all(), left.total()) == (None, "")
    clock.now = 30.0
    left.finish(KEYS[0])
    assert left.total() == ", about 90 s left"


def test_a_cheap_call_does_not_stand_for_all_others():
    clock, left = searches(budget=25.0)
    left.step(KEYS[0], 0.0)
    clock.now = 5.0
    left.finish(KEYS[0])
    assert left.total() == ", about 45 s left"  # three calls of 15 s, the mean of 5 s and the budget


def test_searches_on_a_busier_machine_count():
    clock, left = searches()
    for key, clock.now in zip(KEYS[:2], (0.0, 10.0), strict=True):
        left.step(key, 0.0)
        clock.now += 10.0 if key is KEYS[0] else 50.0
        left.finish(key)
    assert left.total() == ", about 60 s left"
    left.step(KEYS[2], 0.5)
    clock.now += 10.0
    assert left.total() == ", about 50 s left"


def test_searches_that_run_together_share_the_time():
    clock, left = searches()
    for key in KEYS[:2]:
        left.step(key, 0.0)
    clock.now = 20.0
    left.finish(KEYS[0])
    left.finish(KEYS[1])
    assert left.total() == ", about 20 s left"


@pytest.mark.parametrize(
    ("share", "budget", "words"),
    [
        (0.0, None, ""),
        (0.1, None, ""),
        (0.5, None, ", about 9 s left to compile"),
        (0.5, 25.0, ", about 88 s left (25 s per call, plus compiling and warming up)"),
    ],
)
def test_before_a_search_has_ended_the_budget_is_known_or_the_time_to_compile(share, budget, words):
    clock, left = searches(budget=budget)
    left.step(KEYS[0], 0.0)
    clock.now = 9.0
    left.step(KEYS[0], share)
    assert left.total() == words


def test_the_first_call_does_not_stand_for_all():
    clock, left = searches()
    left.step(KEYS[0], 1.0)
    clock.now = 4.0
    left.sample(RoundsFinished(KEYS[0], 2, 0, 10, False))
    clock.now = 8.0
    left.sample(RoundsFinished(KEYS[0], 2, 5, 10, False))
    assert (left.of_all(), left.total(), left.searches[KEYS[0]].rounds.left()) == (None, "", 4.0)


def test_a_search_that_its_budget_ended_is_over():
    clock, left = searches(2, budget=10.0)
    left.step(KEYS[0], 0.5)
    clock.now = 12.0
    left.finish(KEYS[0])
    left.step(KEYS[0], 1.0)  # its other candidates are skipped
    left.step(KEYS[1], 0.0)
    assert left.total() == ", about 11 s left"  # not shared by two


def test_an_operation_does_not_stand_for_another():
    clock, left = searches(2, more=["other"])
    left.step(KEYS[0], 0.0)
    clock.now = 10.0
    left.finish(KEYS[0])
    assert (left.of_all(), left.total()) == (None, "")
    other = ConfigKey("cpu", "other@v0", "5" * 16)
    left.step(other, 0.0)
    clock.now = 13.0
    left.finish(other)
    assert left.total() == ", about 10 s left"


def test_rounds_that_drop_many_candidates_say_little():
    clock, left = searches(1)
    left.step(KEYS[0], 1.0)
    left.sample(RoundsFinished(KEYS[0], 12, 0, 16, False))
    clock.now = 9.0
    left.sample(RoundsFinished(KEYS[0], 12, 3, 16, False))
    assert of_rounds(left) == ""


def test_a_search_that_measured_goes_on_to_its_checks_as_long_as_those_before():
    clock, left = searches(2)
    for key in KEYS[:2]:
        left.step(key, 1.0)
        rounds(clock, left, key, 1.0, candidates=2)
        if key is KEYS[0]:
            clock.now += 30.0
            left.finish(key)
    assert left.total() == ", about 30 s left"


def test_without_measurements_a_compiled_call_is_over():
    clock, left = searches(2, measures=False)
    left.step(KEYS[0], 0.0)
    clock.now = 10.0
    left.step(KEYS[0], 1.0)
    assert left.total() == ", about 10 s left"


def test_without_measurements_a_call_takes_as_long_as_its_candidates():
    """At first as long as those of earlier calls, then of all that have finished."""
    clock, left = searches(2, ["op@v0"], measures=False)
    left.step(KEYS[0], 0.0, 10)
    clock.now = 20.0
    left.step(KEYS[0], 1.0, 10)
    left.step(KEYS[1], 0.0, 50)
    assert left.total() == ", about 160 s left"  # 100 s for 50 candidates, and 60 s for 30, the mean of the calls
    clock.now = 80.0
    left.step(KEYS[1], 0.4, 50)
    assert left.total() == ", about 160 s left"  # 80 s for 30 candidates


def test_without_measurements_the_time_is_known_once_each_direction_has_shown_it():
    """A backward call may take a hundred times as long as its forward call."""
    clock, left = searches(3, measures=False)
    for key in KEYS[:2]:
        left.step(key, 0.0, 5)
        clock.now += 2.0
        left.step(key, 1.0, 5)
        assert left.total() == ""
    left.step(KEYS[2], 0.0, 20)
    clock.now += 90.0
    left.step(KEYS[2], 0.2, 20)
    assert left.total() == ""
    clock.now += 60.0
    left.step(KEYS[2], 0.3, 20)
    assert left.total() == ", about 350 s left"


def test_candidates_dropped_early_shorten_the_rest():
    clock, left = searches()
    left.step(KEYS[0], 1.0)
    left.sample(RoundsFinished(KEYS[0], 8, 0, 10, False))
    assert of_rounds(left) == ""
    clock.now = 16.0
    left.sample(RoundsFinished(KEYS[0], 8, 4, 10, False))  # half a second for each sample
    assert of_rounds(left) == ", about 24 s left, then confirming"
    left.sample(RoundsFinished(KEYS[0], 2, 4, 10, False))
    assert of_rounds(left) == ", about 6 s left, then confirming"


def test_a_confirmation_run_that_began_slowly_is_extrapolated():
    clock, left = searches(1)
    left.step(KEYS[0], 1.0)
    rounds(clock, left, KEYS[0], 1.0, candidates=2)
    left.sample(RoundsFinished(KEYS[0], 2, 0, 10, True))
    clock.now += 8.0
    left.sample(RoundsFinished(KEYS[0], 2, 2, 10, True))
    assert of_rounds(left) == ", about 32 s left"


def test_a_search_that_a_candidate_started_is_none_of_the_calls():
    clock, left = searches(1)
    left.step(KEYS[0], 1.0)
    left.sample(RoundsFinished(KEYS[1], 2, 0, 10, False))
    clock.now = 5.0
    left.finish(KEYS[0])
    assert left.total() == ""
