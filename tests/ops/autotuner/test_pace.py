# SPDX-License-Identifier: Apache-2.0
"""Candidates of different rounds compare by their ratio to the heuristic in the same rounds, not by seconds."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.paired import PairedComparison, compare
from ejkernel.ops.autotuner.measure.sampling import PROCESSOR
from ejkernel.ops.autotuner.tasks.decisions import Conclusion, Decider, why_it_stays
from ejkernel.ops.autotuner.tasks.pool import Pool
from ejkernel.ops.autotuner.trials.candidates import Candidate
from ejkernel.ops.autotuner.trials.challenge import Challenge
from ejkernel.ops.autotuner.trials.outcome import Outcome, ranked


def measured(config, seconds, heuristic=None, *, method="wall"):
    """Return a candidate with times, beside the heuristic's in the same rounds."""
    beside = () if heuristic is None else (heuristic,) * 5
    measurement = Measurement(samples=(seconds,) * 3, method=method).beside(beside)
    return Candidate(config, measurement=measurement, beside=beside, status="measured", compiled=[len])


def pool_of(*candidates):
    task = SimpleNamespace(inv=SimpleNamespace(key="key"), known=(), rejected=(), suspects=())
    pool = Pool(task, None, None, None, SimpleNamespace(), None)
    pool.tried = list(candidates)
    return pool


QUIET, BUSY = measured("quiet", 2.0, 1.0), measured("busy", 3.0, 6.0)


def test_a_candidate_of_busy_rounds_is_ahead_of_a_slower_one_of_quiet_rounds():
    pool = pool_of(measured("heuristic", 1.0, 1.0), QUIET, BUSY)
    assert [candidate.config for candidate in pool.fastest_first(pool.tried)] == ["busy", "heuristic", "quiet"]
    assert pool.comparable_seconds(BUSY) == pytest.approx(0.5)
    pool.tried[0].measurement = Measurement(samples=(6.0,)).beside((6.0,))  # the heuristic's later rounds
    assert pool.comparable_seconds(QUIET) == pytest.approx(2.0)


def test_a_time_of_an_earlier_attempt_compares_by_the_same_clock_only():
    clock, processor = measured("clock", 0.4), measured("processor", 0.3, method=PROCESSOR)
    pool = pool_of(measured("heuristic", 1.0, 1.0), QUIET, clock, processor)
    assert [candidate.config for candidate in pool.fastest_first(pool.tried[1:])] == ["clock", "quiet", "processor"]


def test_without_times_of_the_heuristic_seconds_decide():
    pool = pool_of(Candidate("heuristic"), QUIET, BUSY)
    assert [candidate.config for candidate in pool.fastest_first(pool.tried)] == ["quiet", "busy"]
    assert pool.comparable_seconds(BUSY) == pytest.approx(3.0)
    assert pool.comparable_seconds(Candidate("not measured")) is None


@pytest.mark.parametrize(("is_over", "prepared"), [(False, ["quiet", "busy"]), (True, ["quiet"])])
def test_only_the_best_candidate_is_compiled_again_after_the_end(monkeypatch, is_over, prepared):
    pool, asked = pool_of(measured("heuristic", 1.0, 1.0)), []
    monkeypatch.setattr(pool, "must_end", lambda: is_over)
    monkeypatch.setattr(pool, "_budget", SimpleNamespace(is_abandoned=lambda: False))
    monkeypatch.setattr(pool, "prepare", lambda candidates, stop=None: asked.extend(c.config for c in candidates))
    pool.prepare_again([dataclasses.replace(candidate, compiled=()) for candidate in (QUIET, BUSY)])
    assert asked == prepared


def test_the_first_look_compares_samples_of_the_same_rounds():
    pool = pool_of(measured("heuristic", 1.0, 1.0), BUSY, measured("recalled", 0.1))
    pool.timing, pool.must_end = SimpleNamespace(oracle=None), lambda: True
    decider = Decider(SimpleNamespace(rounds=8), pool, None)
    assert decider._first_look(BUSY).comparison.speedup == pytest.approx(2.0)
    assert decider._first_look(pool.tried[2]) is None


def test_tables_list_candidates_of_different_rounds_by_their_ratio():
    outcomes = [
        Outcome(config=one.config, status="measured", measurement=one.measurement)
        for one in (measured("heuristic", 1.0, 1.0), QUIET, BUSY, measured("earlier", 0.7))
    ]
    assert [first.config for first, _ in ranked(outcomes)] == ["busy", "earlier", "heuristic", "quiet"]


def test_too_few_samples_of_the_heuristic_give_no_ratio():
    measurement = Measurement(samples=(1.0, 1.0, 1.0))
    assert measurement.beside((2.0, 2.0)).relative is None
    assert measurement.beside((0.0, 0.0, 0.0)).relative is None
    assert measurement.beside((2.0, 2.0, 4.0, 9.0)).relative == 0.5


def test_an_unconfirmed_candidate_has_the_reason_for_the_end_and_the_doubt():
    found = compare([0.84] * 7 + [1.2], [1.0] * 8, confidence=0.999)
    challenge = Challenge("rows=2", found, is_confirmation=True)
    decision = Conclusion(measured("heuristic", 1.0), (), challenge, unconfirmed=True)
    says = why_it_stays(decision, finished=False, others_are_measured=True, ended="the budget was spent")
    assert says.startswith("the budget was spent before rows=2 was confirmed: 1.19x")
    assert "ahead in 7 of 8 rounds so far; the confidence that it is faster is 96.48%" in says


@pytest.mark.parametrize(
    ("heuristic", "others", "why"),
    [
        (Candidate("heuristic", status="skipped"), True, "the search ended before the heuristic was measured"),
        (measured("heuristic", 1.0), False, "the search ended when only the heuristic was measured"),
    ],
)
def test_an_unfinished_search_says_what_it_did_not_measure(heuristic, others, why):
    assert why_it_stays(Conclusion(heuristic, ()), finished=False, others_are_measured=others) == why


@pytest.mark.parametrize(("is_confirmation", "where"), [(True, " in the confirmation run"), (False, "")])
def test_an_undecided_search_says_which_rounds_left_it_open(is_confirmation, where):
    comparison = PairedComparison(
        wins=False, settled=False, speedup=1.25, confidence=0.5, pairs=9, ahead=6, doubt="too few rounds"
    )
    undecided = Conclusion(measured("heuristic", 1.0), (), Challenge("rows=2", comparison, is_confirmation))
    assert why_it_stays(undecided, finished=True, others_are_measured=True) == (
        f"it is open whether rows=2 is faster: 1.25x{where}, ahead in 6 of 9 rounds; too few rounds"
    )
