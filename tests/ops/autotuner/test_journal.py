# SPDX-License-Identifier: Apache-2.0
"""Failure attribution after the end of an attempt, and the allowed silence, with a fake clock."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.ops.sample_kernels import Times

from ejkernel.ops.autotuner.bench.oracle import REFERENCE
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.process.watch import Cancellation
from ejkernel.ops.autotuner.tasks.journal import Journal
from ejkernel.ops.autotuner.tasks.task import TuningTask
from ejkernel.ops.autotuner.trials.events import CandidateFinished, SearchStarted
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.errors import TuningError

INV = Invocation(kernel=Times("scale"), args=(np.ones(4, np.float32),)).abstract()
HEURISTIC, A, B = 1, 2, 3


class Search:
    """A search with the heuristic 1 and a clock set by hand."""

    def __init__(self, budget=None, heard=True):
        self.now = 100.0
        task = TuningTask(inv=INV, policy=AutotunePolicy(budget_s=budget))
        self.cancellation = Cancellation()
        self.load = 1.0
        self.journal = Journal(task, clock=lambda: self.now, cancellation=self.cancellation, load=lambda: self.load)
        self.journal.task()
        if heard:
            self.journal.note(SearchStarted(INV.key, 3, HEURISTIC))

    def measured(self, config):
        outcome = Outcome(config=config, status="measured", measurement=Measurement(samples=(1.0,)))
        self.journal.note(CandidateFinished(INV.key, outcome))

    def crashed(self):
        return [outcome.config for outcome in self.journal.task().known if outcome.status == "crashed"]

    def suspects(self):
        return list(self.journal.task().suspects)


# --- blame ---


@pytest.mark.parametrize(
    ("what", "accused", "crashed", "suspects"),
    [
        ("running", [A], [A], []),
        ("compiling", [A], [A], []),
        ("running", [HEURISTIC], [], [HEURISTIC]),  # has a second attempt: winners are compared with it
        ("running", [HEURISTIC, B], [], [HEURISTIC, B]),  # announced last, while another one kept the lock
        ("running", [B, HEURISTIC], [], [B, HEURISTIC]),
        ("compiling", [A, B], [], [A, B]),
        ("running", [A, A], [A], []),  # as running, and as compiled just before
        ("measuring", [A, B], [], [A, B]),  # B was given up, and its thread is there still
        (REFERENCE, [HEURISTIC], [], [HEURISTIC]),  # or the reference was it
        (f"{REFERENCE}'s gradient", [], [], []),
    ],
)
def test_only_a_candidate_running_alone_is_blamed(what, accused, crashed, suspects):
    search = Search()
    search.journal.attribute_crash("it ended", what, accused)
    assert (search.crashed(), search.suspects()) == (crashed, suspects)


def test_the_heuristic_is_out_after_crashing_alone_twice():
    search = Search()
    for _ in range(2):
        search.journal.attribute_crash("it ended", "running", [HEURISTIC])
    assert (search.crashed(), search.suspects()) == ([HEURISTIC], [])


def test_a_suspect_alone_the_next_time_is_blamed_and_the_others_stay_suspects():
    search = Search()
    search.journal.attribute_crash("it ended", "running", [HEURISTIC, B])
    search.journal.attribute_crash("it ended", "compiling", [B])
    assert (search.crashed(), search.suspects()) == ([B], [HEURISTIC])


def test_one_unattributed_end_is_allowed():
    search = Search()
    search.journal.attribute_crash("it ended", REFERENCE, [])
    with pytest.raises(TuningError, match="scale: the search was lost twice while no candidate ran: it ended"):
        search.journal.attribute_crash("it ended", REFERENCE, [])


# --- time ---


def test_without_a_budget_an_attempt_has_the_time_that_it_asks_for():
    search = Search()
    assert search.journal.silence("running", [A], 120.0, is_stuck=True) == 120.0
    assert (search.journal.left(), search.journal.is_over) == (math.inf, False)


def test_a_busy_machine_gets_longer_limits():
    search = Search(budget=20.0)
    search.measured(HEURISTIC)
    search.now += 20.0
    quiet = search.journal.silence("running", [A], 120.0), search.journal.left()
    search.load = 3.0
    assert search.journal.silence("running", [A], 120.0) == 3 * quiet[0]
    assert search.journal.left() == 3 * quiet[1]
    search.load = 0.25  # an idle machine has no shorter ones
    assert (search.journal.silence("running", [A], 120.0), search.journal.left()) == quiet


@pytest.mark.parametrize("what", ["compiling", "loading", "running", "measuring"])
def test_with_a_budget_a_candidate_may_be_silent_for_half_of_the_remaining_time(what):
    search = Search(budget=20.0)
    search.now += 8.0
    assert search.journal.silence(what, [A], 120.0) == 6.0
    assert search.journal.silence(what, [A], 2.0) == 2.0
    search.now += 11.9
    assert search.journal.silence(what, [A], 120.0) == 2.0


def test_naturally_slow_steps_have_all_remaining_time_unless_they_keep_the_lock():
    search = Search(budget=20.0)
    search.measured(HEURISTIC)
    search.now += 8.0
    assert search.journal.silence("confirming", [A], 120.0) == 12.0 + 5.0
    assert search.journal.silence(REFERENCE, [A], 120.0) == 12.0 + 5.0
    assert search.journal.silence(REFERENCE, [A], 120.0, is_stuck=True) == 6.0


def test_the_heuristic_has_its_turn_and_no_more():
    search = Search(budget=4.0)
    assert search.journal.silence("running", [HEURISTIC], 120.0) == 14.0
    search.now += 5.0
    assert not search.journal.is_over
    assert search.journal.left() == 9.0
    search.now += 9.0
    assert search.journal.is_over
    with pytest.raises(TuningError, match="scale: nothing was measured within the budget of 4 s: it hung"):
        search.journal.conclude("it hung")


def test_a_worker_that_starts_slowly_does_not_take_the_heuristic_s_turn():
    search = Search(budget=4.0, heard=False)
    assert search.journal.silence("starting", [], 120.0) == 60.0
    search.now += 25.0
    assert search.journal.left() == math.inf
    search.journal.note(SearchStarted(INV.key, 3, HEURISTIC))
    assert search.journal.left() == 10.0


@pytest.mark.parametrize(("budget", "grace"), [(10.0, 5.0), (600.0, 150.0)])
def test_a_search_with_an_answer_ends_a_small_grace_after_its_budget(budget, grace):
    search = Search(budget=budget)
    search.measured(HEURISTIC)
    search.now += budget
    assert search.journal.left() == grace
    assert not search.journal.is_over
    search.now += 0.1
    assert search.journal.is_over  # no time for another attempt


def test_out_of_time_the_heuristic_stays_and_measurements_are_kept():
    search = Search(budget=10.0)
    for outcome in (
        Outcome(config=A, status="ready"),
        Outcome(config=HEURISTIC, status="measured", measurement=Measurement(samples=(1.0,))),
        Outcome(config=B, status="failed", reason="no"),
    ):
        search.journal.note(CandidateFinished(INV.key, outcome))
    search.now += 16.0
    data = search.journal.conclude("no sign of life while confirming: 2")
    assert (data.config, data.seconds) == (HEURISTIC, 16.0)
    assert [(o.config, o.status) for o in data.outcomes] == [(1, "measured"), (2, "skipped"), (3, "failed")]
    assert data.why == (
        "the budget of 10 s was spent before another candidate could be confirmed (no sign of life while confirming: 2)"
    )


def test_a_nested_search_is_not_mistaken_for_the_candidate_s_own():
    search = Search(budget=10.0)
    other = INV.key._replace(call="0" * 16)
    search.journal.note(SearchStarted(other, 9, 7))
    search.journal.note(CandidateFinished(other, Outcome(config=7, status="failed")))
    assert search.journal.task().known == ()


# --- budgets and Ctrl-C ---


@pytest.mark.parametrize(("allowed", "status"), [(120.0, "skipped"), (2.0, "crashed")])
def test_a_candidate_that_had_too_little_time_because_of_the_budget_is_skipped(allowed, status):
    search = Search(budget=20.0)
    search.journal.silence("running", [A], allowed)
    search.journal.attribute_crash("no sign of life", "running", [A], is_silence=True)
    (outcome,) = search.journal.task().known
    assert (outcome.status, "the budget left it too little time" in outcome.reason) == (status, status == "skipped")


def test_a_candidate_that_ends_its_process_under_a_small_budget_has_crashed():
    search = Search(budget=20.0)
    search.journal.silence("running", [A], 120.0)
    search.journal.attribute_crash("the worker was killed by SIGABRT", "running", [A])
    assert search.crashed() == [A]


@pytest.mark.parametrize("budget", [None, 600.0])
def test_after_ctrl_c_a_search_ends_within_seconds(budget):
    search = Search(budget=budget)
    search.measured(HEURISTIC)
    search.cancellation.request()
    assert 0 < search.journal.left() <= 5.0
    search.now += 5.0
    assert search.journal.left() <= 0
    data = search.journal.conclude("its time was over while running")
    assert (data.config, data.interrupted, data.progress.in_words) == (HEURISTIC, True, "not finished (1 of 3)")


def test_after_ctrl_c_without_a_heuristic_the_search_has_no_result():
    search = Search()
    search.cancellation.request()
    with pytest.raises(KeyboardInterrupt):
        search.journal.conclude("its time was over")


def test_missing_candidates_count_as_not_done():
    search = Search(budget=10.0)
    search.measured(HEURISTIC)
    search.now += 16.0
    data = search.journal.conclude("no sign of life")
    assert len(data.outcomes) == 1
    assert (data.progress.in_words, data.in_a_word) == ("not finished (1 of 3)", "not finished (1 of 3)")
