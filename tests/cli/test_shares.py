# SPDX-License-Identifier: Apache-2.0
"""Shares of a time for all calls: no time is left unused while a search is open, and none is used beyond it."""

from __future__ import annotations

import dataclasses

import pytest
from tests.cli.searches import call, found

from ejkernel.cli import shares
from ejkernel.cli.step_check import step_seconds
from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.autotuner.trials.result import AutotuningResult
from ejkernel.ops.config.policy import policy_override

CALLS = [call(rows) for rows in (8, 16, 24)]
DEVICE = CALLS[0].device_fingerprint


class Searches:
    """Stands for `tune_together`: each search takes some seconds of a clock and has a planned result."""

    def __init__(self, monkeypatch, plans):
        self.now, self.seen, self._plans = 0.0, [], [list(plan) for plan in plans]
        monkeypatch.setattr(shares, "tune_together", self.tune)
        monkeypatch.setattr(shares, "weight", lambda calls: 1.0)
        monkeypatch.setattr(shares, "policy_override", self.policy)

    def policy(self, *, budget_s):
        self._budget = budget_s
        return policy_override(budget_s=budget_s)

    def tune(self, chain, sets, *, resume):
        [[shared]] = sets
        number = CALLS.index(shared.inv)
        state, seconds = self._plans[number].pop(0)
        self.now += seconds
        self.seen.append((number, self._budget, resume))
        if state == "failed":
            return AutotuningResult(DEVICE, ())
        data = found(shared.inv)
        planned = 9 if state == "partial" else data.planned
        data = dataclasses.replace(data, seconds=seconds, planned=planned, undecided=state == "undecided")
        return AutotuningResult(DEVICE, (), (data,))

    def run(self, seconds, *, resume=True):
        todo = [[SharedCall(inv=inv)] for inv in CALLS]
        return shares.tune_in_time(seconds, None, todo, {"resume": resume}, clock=lambda: self.now)


def test_open_searches_share_the_time_left(monkeypatch):
    plans = [("partial", 10), ("complete", 40)], [("complete", 10)], [("undecided", 20), ("complete", 20)]
    searches = Searches(monkeypatch, plans)
    result, not_started = searches.run(120, resume=False)
    assert not not_started
    # Equal shares of the time left. Then a search that was not finished goes on, and an undecided one starts again.
    assert searches.seen == [(0, 40, False), (1, 55, False), (2, 100, False), (0, 40, True), (2, 40, True)]
    assert [search.progress.state for search in result.searches] == ["complete"] * 3


@pytest.mark.parametrize(("seconds", "again"), [(30, True), (50, False)])
def test_an_undecided_search_is_repeated_only_if_its_time_suffices(monkeypatch, seconds, again):
    searches = Searches(monkeypatch, [[("complete", 5)], [("complete", 5)], [("undecided", seconds), ("complete", 30)]])
    result, _ = searches.run(80)
    assert (2 in [number for number, *_ in searches.seen[3:]]) is again
    assert result.searches[-1].progress.state == ("complete" if again else "undecided")


def test_a_repeated_search_that_fails_leaves_the_result_of_the_first(monkeypatch):
    searches = Searches(monkeypatch, [[("complete", 5)], [("complete", 5)], [("partial", 5), ("failed", 5)]])
    result, not_started = searches.run(60)
    assert not not_started
    assert [search.inv for search in result.searches] == CALLS


def test_no_search_starts_after_the_end(monkeypatch):
    searches = Searches(monkeypatch, [[("partial", 20)], [("complete", 20)], []])
    _, not_started = searches.run(42)
    assert ([shared.inv for [shared] in not_started], len(searches.seen)) == (CALLS[2:], 2)


def test_a_lone_candidate_is_measured_in_a_little_time(monkeypatch):
    searches = Searches(monkeypatch, [[("complete", 38)], [], [("complete", 1)]])
    monkeypatch.setattr(shares, "weight", lambda calls: 0.1 if calls[0].inv is CALLS[2] else 1.0)
    _, not_started = searches.run(42)
    assert [shared.inv for [shared] in not_started] == [CALLS[1]]


@pytest.mark.parametrize(("time", "part"), [(20, 10), (60, 30), (100, 30), (150, 30), (300, 60)])
def test_the_step_gets_a_fifth_of_the_time_and_at_least_half_a_minute_or_half_of_it(time, part):
    assert step_seconds(time) == part
