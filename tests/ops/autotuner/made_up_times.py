# SPDX-License-Identifier: Apache-2.0
"""Races with made-up times, so that nothing depends on a clock."""

from __future__ import annotations

import dataclasses
import itertools

import jax

from ejkernel.ops.autotuner.measure.measurement import measurements_of
from ejkernel.ops.autotuner.measure.sampling import CLOCK, Sample, mean_sample


def interleaved_with(time_of):
    """Return a stand-in for `measuring.interleaved`.

    `time_of(config)` is seconds, a `Sample` with its processor time, or a tuple of those, which the samples take in
    turn, one `Sampling` after the other; with several cases, it is also called with the case.
    """
    sequences = {}

    def sample(*key):
        found = time_of(*key)
        if isinstance(found, tuple):
            found = next(sequences.setdefault(str(key), itertools.cycle(found)))
        return found if isinstance(found, Sample) else Sample(found)

    def interleaved(functions, *, cases, sampling, on_error, **_):
        configs = [runners[0].function.candidate.config for runners in functions]
        for index, runners in enumerate(functions):
            try:
                jax.block_until_ready([runner() for runner in runners])
            except Exception as error:  # noqa: BLE001 - the candidate's
                sampling.fail(index)
                on_error(index, error)
        while indices := sampling.next_round():
            for index in indices:
                keys = [(configs[index], case) for case in cases] or [(configs[index],)]
                taken = mean_sample([sample(*key) for key in keys], [case.weight for case in cases])
                sampling.note(index, taken.seconds, taken.work, taken.cases)
        witness, _ = sampling.judged
        return measurements_of(sampling, cases, "wall" if witness == CLOCK else witness)

    return interleaved


@dataclasses.dataclass
class ByCase:
    """Times by configuration and case, for `interleaved_with`; for other cases, by configuration only."""

    seconds: dict

    def __call__(self, config, case=None):
        own = self.seconds[config]
        return own if case is None or not isinstance(own, dict) else own[case.name]
