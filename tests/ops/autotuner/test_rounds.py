# SPDX-License-Identifier: Apache-2.0
"""The progress of a measurement, round by round."""

from __future__ import annotations

from ejkernel.ops.autotuner.measure.paired import PairedSampling
from ejkernel.ops.autotuner.measure.sampling import Sampling, SamplingPlan
from ejkernel.ops.autotuner.tasks.run import RoundsTeller
from ejkernel.ops.autotuner.trials.events import RoundsFinished
from ejkernel.ops.core.types import ConfigKey

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
