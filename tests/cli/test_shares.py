# SPDX-License-Identifier: Apache-2.0
"""Shares of a time for all calls: no time is left unused while a search is open, and none is used beyond it."""

from __future__ import annotations

import dataclasses

import pytest
from tests.cli.searches import call, found

from ejkernel.cli import shares
from ejkernel.cli.files import Found
from ejkernel.cli.sources import TuneOptions
from ejkernel.cli.step_check import StepCheck
from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.autotuner.trials.result import AutotuningResult
from ejkernel.ops.config.policy import policy_override
from ejkernel.ops.core.kernel import kernel_of
from ejkernel.ops.core.types import Cost

CALLS = [call(rows) for rows in (8, 16, 24)]
SETS = [[SharedCall(inv=inv)] for inv in CALLS]
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

    def run(self, seconds, *, resume=True, spare=lambda: 0.0):
        return shares.tune_in_time(seconds, None, SETS, {"resume": resume}, spare, clock=lambda: self.now)


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


def test_a_short_time_is_not_divided_into_shares_for_the_heuristic_alone(monkeypatch):
    searches = Searches(monkeypatch, [[("complete", 30)], [("complete", 20)], []])
    _, not_started = searches.run(54)
    assert searches.seen == [(0, 30, True), (1, 24, True)]
    assert not_started == SETS[2:]


def test_searches_use_the_time_of_the_step_while_it_has_nothing_to_compare(monkeypatch):
    searches = Searches(monkeypatch, [[("partial", 30), ("complete", 20)], [("partial", 10)], [("complete", 10)]])
    _, not_started = searches.run(40, resume=False, spare=lambda: 0.0 if searches.now > 50 else 30.0)
    assert not_started == SETS[2:]
    assert searches.seen == [(0, 30, False), (1, 10, False), (0, 30, True)]


def test_a_set_without_a_search_starts_in_the_time_left_by_the_others(monkeypatch):
    searches = Searches(monkeypatch, [[("complete", 30)], [("complete", 8)], [("complete", 10)]])
    _, not_started = searches.run(40, resume=False, spare=lambda: 30.0)
    assert searches.seen[2:] == [(2, 32, False)]
    assert not not_started


def test_calls_that_take_the_most_time_of_a_run_come_first(monkeypatch):
    times = {CALLS[1].key: 2, CALLS[2].key: 3}  # each has the same cost
    assert shares.most_first(SETS, times) == SETS[::-1]
    monkeypatch.setattr(shares, "weight", lambda calls: 0.1 if calls is SETS[2] else 1.0)
    assert shares.most_first(SETS, times) == [SETS[1], SETS[0], SETS[2]]


@pytest.mark.parametrize(
    "costs",
    [
        dict.fromkeys((8, 16, 24)),
        {8: Cost(flops=1e6, bytes=0), 16: Cost(flops=2e6, bytes=0), 24: Cost(flops=3e6, bytes=0)},
        {},
        {8: 3e6, 16: (2e6, 0), 24: "1e6"},
        {8: Cost(flops=1e6, bytes=None), 16: Cost(flops=float("nan"), bytes=0), 24: Cost(flops=1e6, bytes=-1)},
    ],
    ids=["none", "declared", "raises", "of a wrong type", "of wrong values"],
)
def test_a_call_takes_as_long_as_its_cost_or_its_inputs_say(monkeypatch, costs):
    def cost(inv):
        return costs[inv.args[0].shape[0]]  # raises KeyError without costs

    monkeypatch.setattr(kernel_of(CALLS[0]), "cost", cost)
    assert shares.most_first(SETS, {}) == SETS[::-1]


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
    found = Found(name="train:step", calls=())
    check = StepCheck(options=TuneOptions(time=time), program=None, found=found, saved=None, earlier={})
    assert check.share == part
