# SPDX-License-Identifier: Apache-2.0
"""Races with made-up times, so that nothing depends on a clock."""

from __future__ import annotations

import itertools

import jax

from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.race import CLOCK, Sample


def interleaved_with(time_of):
    """Return a stand-in for `measuring.interleaved`.

    `time_of(config)` is seconds, a `Sample` with its processor time, or a tuple of those, which the samples take in
    turns, one race after the other.
    """
    sequences = {}

    def sample(config):
        found = time_of(config)
        if not isinstance(found, tuple):
            return found
        return next(sequences.setdefault(str(config), itertools.cycle(found)))

    def interleaved(functions, *, race, on_error, **_):
        configs = [function.function.candidate.config for function in functions]
        for index, function in enumerate(functions):
            try:
                jax.block_until_ready(function())
            except Exception as error:  # noqa: BLE001 - the candidate's
                race.fail(index)
                on_error(index, error)
        while indices := race.next_round():
            for index in indices:
                taken = sample(configs[index])
                taken = taken if isinstance(taken, Sample) else Sample(taken)
                race.note(index, taken.seconds, taken.work)
        witness, judged = race.judged
        return [Measurement(samples=samples, method="wall" if witness == CLOCK else witness) for samples in judged]

    return interleaved
