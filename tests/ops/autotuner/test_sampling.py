# SPDX-License-Identifier: Apache-2.0
"""Sampling: the candidates of each round, the winner, and the evidence for it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ejkernel.ops.autotuner.measure.paired import PairedSampling
from ejkernel.ops.autotuner.measure.sampling import Sample, Sampling, SamplingPlan, Work, is_disturbed
from ejkernel.ops.autotuner.tasks.run import RoundsTeller
from ejkernel.ops.autotuner.trials.events import RoundsFinished
from ejkernel.ops.core.types import ConfigKey

SECONDS = st.floats(1e-6, 10.0)
PLANS = st.builds(
    SamplingPlan,
    rounds=st.integers(1, 8),
    discard=st.integers(0, 2),
    keep=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 6)), max_size=3).map(tuple),
    hopeless=st.lists(st.tuples(st.integers(1, 8), st.floats(1, 4)), max_size=3).map(tuple),
    trim=st.floats(0, 0.5),
    median_share=st.floats(0, 1),
)


@st.composite
def samplings(draw):
    """A plan, and as many samples of each candidate as it may ask for."""
    plan = draw(PLANS)
    length = plan.rounds + plan.discard
    return plan, draw(st.lists(st.lists(SECONDS, min_size=length, max_size=length), min_size=1, max_size=8))


def run(plan, table, incumbents=(0,)):
    """Return a finished sampling, and the candidates of each round, not in the round's order."""
    sampling, rounds = Sampling(len(table), plan=plan, incumbents=incumbents), []
    while indices := sampling.next_round():
        for index in indices:
            sampling.note(index, table[index][len(rounds)])
        rounds.append(sorted(indices))
    return sampling, rounds


# --- properties ---


@given(samplings(), st.data())
def test_incumbents_run_in_every_round(case, data):
    plan, table = case
    incumbents = data.draw(st.sets(st.integers(0, len(table) - 1)))
    _, rounds = run(plan, table, incumbents)
    assert all(incumbents <= set(indices) for indices in rounds)


@given(samplings())
def test_no_candidate_is_sampled_beyond_the_plan(case):
    plan, table = case
    sampling, rounds = run(plan, table)
    assert len(rounds) <= plan.rounds + plan.discard
    assert all(len(samples) <= plan.rounds for samples in sampling.samples)


@given(samplings())
def test_every_candidate_has_a_counted_sample(case):
    sampling, _ = run(*case)
    assert all(sampling.samples)


@given(samplings())
def test_dropped_candidates_do_not_return(case):
    _, rounds = run(*case)
    assert all(set(after) <= set(before) for before, after in itertools.pairwise(rounds))


@given(samplings())
def test_equal_samples_give_equal_decisions(case):
    (one, rounds), (other, same) = run(*case), run(*case)
    assert (rounds, one.ranking(), one.samples) == (same, other.ranking(), other.samples)


@given(samplings())
def test_the_ranking_has_every_candidate_once(case):
    plan, table = case
    assert sorted(run(plan, table)[0].ranking()) == list(range(len(table)))


@pytest.mark.slow
@given(samplings(), st.data())
def test_a_candidate_twice_as_slow_in_every_sample_never_wins(case, data):
    plan, table = case
    assume(len(table) > 1)
    fast, slow = data.draw(st.permutations(range(len(table))))[:2]
    table[slow] = [2 * seconds for seconds in table[fast]]
    ranking = run(plan, table)[0].ranking()
    assert ranking.index(fast) < ranking.index(slow)


@pytest.mark.slow
@given(samplings())
def test_the_unit_of_time_does_not_matter(case):
    plan, table = case
    scaled = [[seconds * 1024 for seconds in samples] for samples in table]
    (one, rounds), (other, same) = run(plan, table), run(plan, scaled)
    assert (rounds, one.ranking()) == (same, other.ranking())


@pytest.mark.slow
@given(samplings())
def test_a_restarted_race_is_a_new_race(case):
    plan, table = case
    sampling, rounds = run(plan, table)
    sampling.restart()
    again = []
    while indices := sampling.next_round():
        for index in indices:
            sampling.note(index, table[index][len(again)])
        again.append(sorted(indices))
    assert rounds == again


# --- examples ---


def test_the_first_sample_does_not_count():
    sampling, _ = run(SamplingPlan(rounds=2, hopeless=()), [[9.0, 1.0, 1.0], [0.1, 2.0, 2.0]])
    assert (sampling.samples, sampling.ranking()) == ([(1.0, 1.0), (2.0, 2.0)], [0, 1])


def test_only_so_many_stay_as_the_plan_says():
    plan = SamplingPlan(rounds=4, discard=0, keep=((1, 3), (3, 1)), hopeless=())
    _, rounds = run(plan, [[float(5 - i)] * 4 for i in range(5)])
    assert rounds == [[0, 1, 2, 3, 4], [0, 2, 3, 4], [0, 2, 3, 4], [0, 4]]


def test_the_hopeless_leave_at_once():
    plan = SamplingPlan(rounds=3, discard=0, keep=(), hopeless=((1, 3.0), (2, 1.5)))
    _, rounds = run(plan, [[1.0] * 3, [2.0] * 3, [4.0] * 3, [1.4] * 3])
    assert rounds == [[0, 1, 2, 3], [0, 1, 3], [0, 3]]


def test_one_fast_sample_keeps_a_candidate_in():
    plan = SamplingPlan(rounds=3, discard=0, keep=(), hopeless=((2, 1.5),))
    _, rounds = run(plan, [[1.0] * 3, [9.0, 1.2, 9.0]])
    assert rounds == [[0, 1]] * 3


def test_an_incumbent_alone_needs_no_further_rounds():
    _, rounds = run(SamplingPlan(), [[1.0] * 16, [9.0] * 16])
    assert len(rounds) == 1 + 6


def test_an_incumbent_is_not_ranked_above_those_that_lost_later():
    plan = SamplingPlan(rounds=3, discard=0, keep=((1, 2), (2, 1)), hopeless=())
    sampling, _ = run(plan, [[9.0] * 3, [1.0] * 3, [2.0] * 3])
    assert sampling.ranking() == [1, 2, 0]


def test_equal_candidates_are_ranked_in_their_order():
    assert run(SamplingPlan(), [[1.0] * 16] * 4)[0].ranking() == [0, 1, 2, 3]


def test_a_sampling_without_candidates_is_over():
    sampling = Sampling(0)
    assert (sampling.next_round(), sampling.ranking()) == ([], [])


def test_the_rest_of_a_round_is_still_to_be_noted():
    sampling = Sampling(3)
    sampling.note(sampling.next_round()[1], 1.0)
    assert sampling.next_round() == [0, 2]


def orders(count, rounds=15):
    """Return the order of each round of equally fast candidates."""
    sampling, found = Sampling(count, plan=SamplingPlan.fixed(rounds)), []
    while indices := sampling.next_round():
        found.append(indices)
        for index in indices:
            sampling.note(index, 1.0)
    return found


def test_the_incumbent_is_the_first_to_have_a_sample():
    assert orders(5)[:2] == [[0, 1, 2, 3, 4]] * 2  # one that does not count, and one that does


def test_a_round_keeps_its_order_and_rounds_differ():
    sampling = Sampling(6, plan=SamplingPlan.fixed(9))
    for _ in range(2):
        for index in sampling.next_round():
            sampling.note(index, 1.0)
    first, *others = sampling.next_round()
    sampling.note(first, 1.0)
    assert sampling.next_round() == others
    assert len({tuple(order) for order in orders(6)}) > 10


def test_a_candidate_that_empties_the_cache_does_not_decide_which_other_is_slow():
    sampling, last = Sampling(4, plan=SamplingPlan(hopeless=(), keep=())), 3
    while indices := sampling.next_round():
        for index in indices:
            sampling.note(index, 9.0 if index == 3 else [1.0, 1.01, 1.02][index] * (1.7 if last == 3 else 1.0))
            last = index
    assert sampling.ranking() == [0, 1, 2, 3]


def test_a_failing_incumbent_is_dropped():
    sampling = Sampling(2)
    sampling.next_round()
    sampling.fail(0)
    assert (sampling.next_round(), sampling.running, sampling.ranking()) == ([1], [1], [])


def test_failed_candidates_are_not_ranked():
    sampling, _ = run(SamplingPlan(), [[1.0] * 16, [1.1] * 16])
    sampling.fail(0)
    assert sampling.ranking() == [1]


def test_a_candidate_dropped_by_the_caller_is_ranked_by_its_samples():
    sampling = Sampling(3, plan=SamplingPlan.fixed(2, discard=0), incumbents=())
    for index in sampling.next_round():
        sampling.note(index, [1.0, 2.0, 3.0][index])
    sampling.drop(0)
    for index in sampling.next_round():
        sampling.note(index, 5.0)
    assert sampling.ranking() == [1, 2, 0]


@pytest.mark.parametrize(
    ("share", "trim", "samples", "figure"),
    [
        (1.0, 0.0, [1.0, 2.0, 9.0], 2.0),
        (1.0, 0.0, [1.0, 2.0, 4.0, 9.0], 3.0),
        (0.0, 0.0, [1.0, 2.0, 9.0], 4.0),
        (0.5, 0.0, [1.0, 2.0, 9.0], 3.0),
        (0.0, 0.2, [1.0, 2.0, 9.0], 2.0),
        (0.0, 0.25, [0.0, 1.0, 2.0, 3.0, 9.0, 9.0, 4.0, 5.0], 3.5),
        (0.0, 0.5, [7.0], 7.0),
    ],
)
def test_candidates_are_ranked_between_the_median_and_a_trimmed_mean(share, trim, samples, figure):
    assert SamplingPlan(trim=trim, median_share=share).center(samples) == figure


# --- other processes ---


def held_up(*stretches, work=1.0):
    """Samples of a call that works so long and was held up, so that it took as many times as long."""
    return [Sample(stretch * work, Work(work, work)) for stretch in stretches]


@pytest.mark.parametrize(
    ("noted", "disturbed"),
    [
        ([held_up(1.0, 1.1, 1.0, 1.2)], False),
        ([held_up(1.0, 9.0, 1.0, 7.0)], True),
        ([held_up(1.0, 1.0, 1.0, 1.0, 7.0)], False),  # one slow sample
        ([held_up(8.0, 8.0, 9.0, 8.0)], False),  # by all alike
        ([held_up(1.0, 1.0), held_up(2.0, 2.0)], False),  # one waits more than the other, always
        ([held_up(900.0, 500.0, 300.0, 999.0)], False),  # it waits for something else
        ([[Sample(1.0), Sample(9.0)], held_up(1.0, 9.0)], False),  # nobody knows
        ([[], held_up(1.0, 9.0)], True),
        ([], False),
        # Two threads share the work of a sample in another way each time, on a quiet machine.
        ([[Sample(1.0, Work(share, 1.0)) for share in (1.0, 0.5, 0.6, 0.5)]], False),
        ([[Sample(share, Work(share, 1.0)) for share in (1.0, 0.5, 1.0, 1.0)]], False),
        (
            [
                [
                    Sample(seconds, Work(share, 1.0))
                    for seconds, share in ((1.0, 1.0), (4.0, 0.5), (6.0, 0.9), (5.0, 0.5))
                ]
            ],
            True,
        ),
    ],
)
def test_the_clock_counts_as_disturbed_if_it_differs_from_the_work(noted, disturbed):
    assert is_disturbed(noted) is disturbed


def test_one_slow_sample_drops_no_candidate():
    sampling = Sampling(2, plan=SamplingPlan(rounds=3, discard=0))
    for index, sample in zip(sampling.next_round(), [*held_up(1.0, work=2.0), *held_up(30.0)], strict=True):
        sampling.note(index, sample.seconds, sample.work)
    assert sampling.next_round() == [0, 1]


def test_candidates_with_too_much_cpu_time_are_dropped_too():
    sampling = Sampling(3, plan=SamplingPlan(rounds=3, discard=0))
    for index, sample in zip(sampling.next_round(), [*held_up(1.0) * 2, *held_up(1.0, work=4.0)], strict=True):
        sampling.note(index, sample.seconds, sample.work)
    assert sampling.next_round() == [0, 1]


def test_candidates_are_ranked_by_their_work_where_the_clock_is_disturbed():
    sampling = Sampling(2, plan=SamplingPlan.fixed(4, discard=0))
    table = held_up(1.0, 2.0, 1.0, 1.0, work=1.5), held_up(1.0, 9.0, 8.0, 9.0)
    for round_ in range(4):
        for index in sampling.next_round():
            sampling.note(index, table[index][round_].seconds, table[index][round_].work)
    assert sampling.judged == ("processor", [(1.5,) * 4, (1.0,) * 4])
    assert sampling.ranking() == [1, 0]


# --- the progress of a measurement, round by round ---


KEY = ConfigKey("cpu:some", "op@v0", "0" * 16)


def progress_of(sampling, seconds):
    progress = [sampling.progress]
    while indices := sampling.next_round():
        for index in indices:
            sampling.note(index, seconds(index))
        progress.append(sampling.progress)
    return progress


def test_a_sampling_counts_its_rounds():
    progress = progress_of(Sampling(3, plan=SamplingPlan.fixed(4)), lambda index: 1.0 + index)
    assert progress == [(done, 5) for done in range(6)]


def test_a_confirmation_run_plans_its_rounds_until_the_next_look():
    values = iter([1.0, 1.1, 1.0, 0.9] * 100)
    progress = progress_of(PairedSampling(4), lambda index: next(values))
    assert progress[:6] == [(0, 5), (1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    assert progress[6:10] == [(6, 9), (7, 9), (8, 9), (9, 9)]


def test_events_are_sent_at_the_start_and_twice_a_second():
    events, now = [], [0.0]
    tell = RoundsTeller(KEY, events.append, clock=lambda: now[0])
    for sampling in (Sampling(2, plan=SamplingPlan.fixed(9)), PairedSampling(4)):
        for _ in range(6):
            tell(sampling)
            for index in sampling.next_round():
                sampling.note(index, 1.0)
            now[0] += 0.2
    assert events == [
        RoundsFinished(KEY, 2, 0, 10, False),
        RoundsFinished(KEY, 2, 3, 10, False),
        RoundsFinished(KEY, 2, 0, 5, True),
        RoundsFinished(KEY, 2, 3, 5, True),
    ]
