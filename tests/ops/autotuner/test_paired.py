# SPDX-License-Identifier: Apache-2.0
"""Paired comparisons: the winner, the clock that decides, and the number of rounds."""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops.autotuner.measure.paired import PairedSampling, compare, judge
from ejkernel.ops.autotuner.measure.sampling import Sample, Work

SECONDS = st.floats(1e-6, 10.0)
NOISE = (1.0, 9.0, 1.1, 5.0, 1.0, 7.0, 1.2, 6.0, 1.0, 8.0)  # times that a call takes longer for others' sake


# --- comparison ---


def test_a_challenger_faster_in_every_round_wins():
    verdict = compare([1.0] * 8, [2.0] * 8)
    assert (verdict.wins, verdict.speedup, verdict.confidence, verdict.pairs) == (True, 2.0, 1 - 1 / 256, 8)


@pytest.mark.parametrize(("share", "wins"), [(0.97, True), (0.98, False), (1.0, False)])
def test_two_per_cent_are_a_tie(share, wins):
    assert compare([share] * 10, [1.0] * 10).wins is wins


@pytest.mark.parametrize(("ahead", "wins"), [(7, True), (6, False), (4, False), (0, False)])
def test_a_challenger_must_be_ahead_in_more_rounds_than_chance_gives(ahead, wins):
    assert compare([0.5] * ahead + [1.5] * (8 - ahead), [1.0] * 8).wins is wins


def test_drift_that_hits_both_does_not_matter():
    drift = [1.0, 2.0, 4.0, 2.0, 1.0, 3.0]
    assert compare([0.9 * t for t in drift], drift).speedup == pytest.approx(1 / 0.9)


def test_a_few_rounds_are_never_enough():
    assert [compare([0.1] * n, [1.0] * n).wins for n in range(7)] == [False] * 5 + [True] * 2


def test_without_pairs_the_incumbent_stays():
    verdict = compare([], [1.0])
    assert (verdict.wins, verdict.speedup, verdict.confidence, verdict.pairs) == (False, 1.0, 0.0, 0)


@given(st.lists(st.tuples(SECONDS, SECONDS)))
def test_of_two_only_one_can_beat_the_other(pairs):
    mine, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    assert not (compare(mine, theirs).wins and compare(theirs, mine).wins)


@given(st.lists(SECONDS))
def test_a_candidate_does_not_beat_itself(samples):
    verdict = compare(samples, samples)
    assert (verdict.wins, verdict.confidence) == (False, 0.0)


@pytest.mark.parametrize(
    ("shares", "settled"),
    [
        ([1.0] * 5, True),
        ([1.0] * 4, False),  # too few to be sure of anything
        ([0.99] * 8, True),  # a tie
        ([2.0] * 8, True),
        ([0.9, 1.1] * 4, False),
        ([0.9, 1.1] * 4 + [1.0] * 8, True),
    ],
)
def test_an_incumbent_that_stays_is_certain_to_lose_little(shares, settled):
    verdict = compare(shares, [1.0] * len(shares))
    assert (verdict.wins, verdict.settled) == (False, settled)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1))
def test_nothing_is_settled_that_the_medians_contradict(pairs):
    verdict = compare([a for a, _ in pairs], [b for _, b in pairs])
    if verdict.wins:
        assert verdict.challenger < verdict.incumbent
    elif verdict.settled:
        assert verdict.challenger > 0.97 * verdict.incumbent


def test_medians_settle_nothing_if_one_round_moves_them_apart():
    verdict = compare([1.0] * 5 + [10.0] * 4, [1.0] * 4 + [10.0] * 5)
    assert (verdict.wins, verdict.settled) == (False, False)


# Shares of 120 rounds on a noisy machine, whose middle half is between 0.87 and 1.14.
NOISY = [math.exp(statistics.NormalDist(sigma=0.2).inv_cdf((index + 0.5) / 120)) for index in range(120)]


def test_after_the_last_round_two_equals_are_a_tie():
    before = compare(NOISY, [1.0] * 120, confidence=0.999)
    assert (before.settled, before.doubt) == (False, "it may take up to 7% less time")
    verdict = compare(NOISY, [1.0] * 120, confidence=0.999, is_last=True)
    assert (verdict.wins, verdict.settled, verdict.is_tie) == (False, True, True)
    assert verdict.in_words == "1.00x (0.95 to 1.05)"


@pytest.mark.parametrize(("factor", "settled"), [(0.9, False), (0.94, False), (0.97, False), (1.3, True)])
def test_after_the_last_round_a_difference_is_no_tie(factor, settled):
    verdict = compare([factor * share for share in NOISY], [1.0] * 120, confidence=0.999999, is_last=True)
    assert (verdict.wins, verdict.settled, verdict.is_tie) == (False, settled, False)


def test_a_slower_challenger_is_no_tie_even_if_its_interval_contains_equality():
    verdict = compare([0.99] * 4 + [1.25] * 11, [1.0] * 15)
    assert (verdict.settled, verdict.is_tie, verdict.in_words) == (True, False, "0.80x (0.80 to 1.01)")


@pytest.mark.parametrize(("share", "wins"), [(0.94, True), (0.96, False), (0.99, False)])
def test_a_challenger_that_takes_more_memory_must_be_five_per_cent_faster(share, wins):
    verdict = compare([share] * 10, [1.0] * 10, more_bytes=1)
    assert (verdict.wins, verdict.settled, verdict.is_tie) == (wins, True, False)
    assert verdict.least == pytest.approx(1 / 0.95)


@pytest.mark.parametrize(("rounds", "wins"), [(12, True), (10, False)])
def test_a_challenger_that_takes_more_memory_must_lead_by_so_much_in_most_rounds(rounds, wins):
    shares = [0.85] * rounds + [0.97] * (15 - rounds)
    assert compare(shares, [1.0] * 15).wins
    assert compare(shares, [1.0] * 15, more_bytes=1).wins is wins


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1), st.booleans())
def test_memory_only_takes_wins_away_and_only_below_five_per_cent(pairs, is_last):
    mine, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    usual = compare(mine, theirs, is_last=is_last)
    verdict = compare(mine, theirs, is_last=is_last, more_bytes=1)
    assert verdict.wins <= (usual.wins and verdict.speedup > 1 / 0.95)
    assert verdict.settled >= usual.settled or (usual.wins and not verdict.wins)


# --- witnesses ---


def calls(work, stretches, threads=1):
    """Samples of a call disturbed by others; its busiest of `threads` threads works `work` seconds."""
    return [Sample(work * stretch, Work(work, threads * work)) for stretch in stretches]


def test_on_a_quiet_machine_the_clock_decides_not_cpu_time():
    parallel, serial = ([Sample(seconds, Work(work, total))] * 10 for seconds, work, total in ((1, 1, 4), (2, 2, 2)))
    assert judge(parallel, serial).wins
    waits, works = ([Sample(seconds, Work(work, work))] * 10 for seconds, work in ((3, 1), (2, 2)))
    assert not judge(waits, works).wins
    assert judge(works, waits).judged_by == "clock"


def test_on_a_busy_machine_cpu_time_decides():
    fast, slow = calls(1.0, NOISE), calls(1.5, NOISE[::-1])
    won, lost = judge(fast, slow), judge(slow, fast)
    assert (won.wins, won.settled, won.judged_by) == (True, True, "processor")
    assert (won.challenger, won.incumbent) == (1.0, 1.5)
    assert (lost.wins, lost.settled, lost.judged_by) == (False, True, "processor")


def test_without_cpu_time_a_disturbed_clock_decides_nothing():
    fast, slow = ([Sample(s.seconds) for s in samples] for samples in (calls(1.0, NOISE), calls(1.5, NOISE[::-1])))
    assert not judge(fast, slow).settled
    assert not judge(slow, fast).settled


def test_threads_that_share_the_work_otherwise_settle_nothing():
    parallel, serial = calls(1.0, NOISE, threads=4), calls(1.5, NOISE[::-1])
    verdict = judge(parallel, serial)
    assert not verdict.settled
    assert verdict.doubt == (
        "that is the processor time of its busiest thread; that of all its threads shows 0.38x, "
        "and both must show 1.11x"
    )


def test_a_contradicting_clock_decides_nothing():
    idle, busy = calls(1.0, [10 * stretch for stretch in NOISE]), calls(1.5, NOISE)
    verdict = judge(idle, busy)
    assert (verdict.wins, verdict.settled) == (False, False)
    shown = r"processor time shows that it is faster, but the clock, which other processes disturbed, shows that it is "
    assert re.fullmatch(shown + r"slower \(0.1\dx\)", verdict.doubt)
    verdict = judge(calls(1.5, NOISE), calls(1.5, [10 * stretch for stretch in NOISE]))
    assert not verdict.settled
    assert re.fullmatch(shown.replace("shows", "does not show", 1) + r"faster \(\d+.\d\dx\)", verdict.doubt)


def test_after_the_last_round_the_clock_decides_a_contradiction():
    idle, busy = calls(1.0, [10 * stretch for stretch in NOISE]), calls(1.5, NOISE)
    verdict = judge(idle, busy, is_last=True)
    assert (verdict.wins, verdict.settled, verdict.judged_by) == (False, True, "clock")


def test_after_the_last_round_a_parallel_challenger_wins_by_the_clock_and_its_busiest_thread():
    noise = [1.0, 2.0] * 10
    parallel, serial = calls(1.0, noise, threads=4), calls(1.5, noise)
    assert not judge(parallel, serial).settled
    verdict = judge(parallel, serial, is_last=True)
    assert (verdict.wins, verdict.settled, verdict.judged_by) == (True, True, "clock")


def test_a_serial_challenger_that_only_the_disturbed_clock_prefers_stays_undecided():
    noise = [1.0, 2.0] * 10
    serial, parallel = calls(1.5, noise), calls(1.0, [2 * stretch for stretch in noise], threads=4)
    verdict = judge(serial, parallel, is_last=True)
    assert (verdict.wins, verdict.settled) == (False, False)


def test_by_processor_time_more_memory_needs_a_larger_lead():
    fast, slow = calls(0.87, NOISE), calls(1.0, NOISE[::-1])
    assert judge(fast, slow).wins
    verdict = judge(fast, slow, more_bytes=1)
    assert (verdict.wins, verdict.judged_by, round(verdict.least, 2)) == (False, "processor", 1.18)
    assert judge(calls(0.8, NOISE), slow, more_bytes=1).wins


def test_nearly_equal_work_is_not_a_win():
    verdict = judge(calls(0.95, NOISE), calls(1.0, NOISE[::-1]))
    assert (verdict.wins, verdict.settled) == (False, False)
    assert judge(calls(1.0, NOISE), calls(1.0, NOISE[::-1])).settled


# --- paired samplings ---


def held(sampling, incumbent, challenger):
    """Run a paired sampling with one sample function per side; return the order of each round."""
    orders = []
    while indices := sampling.next_round():
        orders.append(indices)
        for index in indices:
            sample = (incumbent, challenger)[index]()
            sampling.note(index, sample.seconds, sample.work)
    return orders


def now_one_and_now_the_other():
    """Two functions; in each round the other one is twice as slow."""
    one, other = itertools.cycle([1.0, 2.0]), itertools.cycle([2.0, 1.0])
    return lambda: Sample(next(one)), lambda: Sample(next(other))


def test_a_paired_race_with_clear_evidence_ends_after_its_first_rounds():
    sampling = PairedSampling(8)
    orders = held(sampling, lambda: Sample(2.0), lambda: Sample(1.0))
    assert orders == [[1, 0], [0, 1]] * 4 + [[1, 0]]  # the first round does not count
    assert (sampling.comparison.wins, sampling.comparison.pairs) == (True, 8)


def test_a_paired_race_continues_while_the_evidence_is_thin():
    rng = random.Random(0)
    sampling = PairedSampling(8)
    held(sampling, lambda: Sample(1.4 * rng.uniform(1, 3)), lambda: Sample(rng.uniform(1, 3)))
    assert (sampling.comparison.wins, sampling.comparison.settled) == (True, True)
    assert 8 < sampling.comparison.pairs < 64


def test_a_paired_race_without_clear_evidence_ends_undecided():
    sampling = PairedSampling(8)
    held(sampling, *now_one_and_now_the_other())
    assert (sampling.comparison.wins, sampling.comparison.settled, sampling.comparison.pairs) == (False, False, 64)


def test_a_paired_race_of_two_equals_ends_with_a_tie():
    rng = random.Random(1)
    sampling = PairedSampling(15)
    held(sampling, lambda: Sample(rng.lognormvariate(0, 0.12)), lambda: Sample(rng.lognormvariate(0, 0.12)))
    verdict = sampling.comparison
    assert (verdict.wins, verdict.settled, verdict.is_tie) == (False, True, True)


def test_a_paired_race_ends_undecided_when_its_time_is_over():
    left = iter([True] * 5 + [False] * 100)
    sampling = PairedSampling(8, may_go_on=lambda: next(left))
    held(sampling, *now_one_and_now_the_other())
    assert not sampling.comparison.settled
    assert 8 < sampling.comparison.pairs < 16


def test_a_paired_race_ends_when_one_side_fails():
    sampling = PairedSampling(8)
    sampling.next_round()
    sampling.fail(1)
    sampling.note(0, 1.0)
    assert (sampling.next_round(), sampling.ranking()) == ([], [])


def on_a_busy_machine(rng, work):
    """A sample of a call on a machine that six of seven times gives others the processor, some slices long."""
    waits = 0.0 if rng.random() < 0.2 else rng.expovariate(1 / 12.0)
    spent = work * rng.uniform(1.0, 1.1)
    return Sample(spent + waits, Work(spent, 1.02 * spent))


@pytest.mark.slow
@pytest.mark.parametrize(("heuristic", "other", "wins"), [(1.5, 1.0, True), (1.0, 1.5, False), (1.0, 1.0, False)])
def test_among_two_on_a_busy_machine_one_in_a_hundred_is_wrong_at_most(heuristic, other, wins):
    wrong = 0
    for seed in range(100):
        rng, sampling = random.Random(seed), PairedSampling(10)
        held(sampling, lambda rng=rng: on_a_busy_machine(rng, heuristic), lambda rng=rng: on_a_busy_machine(rng, other))
        wrong += sampling.comparison.wins != wins
    assert wrong <= 1
