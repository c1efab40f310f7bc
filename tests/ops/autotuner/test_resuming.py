# SPDX-License-Identifier: Apache-2.0
"""Which times of a partial search the next search of the same calls starts from."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from tests.ops.sample_kernels import Double

from ejkernel.ops import ConfigSelectorChain, Invocation, PersistentCache
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.sampling import Case
from ejkernel.ops.autotuner.store import measurements
from ejkernel.ops.autotuner.tasks.task import SharedCall, shares_of
from ejkernel.ops.autotuner.trials.candidates import is_in
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.config.cache import ConfigCache

KERNEL = Double("double_resumed")
SHORT, LONG = (
    Invocation(kernel=KERNEL, args=(jax.ShapeDtypeStruct((rows, 8), np.float32),)).abstract() for rows in (16, 48)
)


def outcome(config, calls):
    """A measured candidate with a time for each call."""
    shares = shares_of(calls)
    cases = tuple(Case(call=key, weight=share, samples=(1e-6,)) for key, share in shares.items())
    measurement = Measurement(samples=(1e-6,), cases=cases if len(calls) > 1 else ())
    return Outcome(config=config, status="measured", measurement=measurement)


class Stopping:
    """A tuner that measures two of twelve candidates per search, and keeps the initial candidates."""

    def __init__(self):
        self.started_from = []

    def tune(self, inv, kernel, *, known=(), others=(), weight=1.0, **options):
        self.started_from.append([one.config for one in known])
        calls = [SharedCall(inv=inv, weight=weight), *others]
        outcomes = tuple(outcome(config, calls) for config in (1, 2))
        invs = tuple(call.inv for call in calls) if others else ()
        return AutotuneData(
            inv=inv, calls=invs, config=1, outcomes=outcomes, seconds=1.0, checked=("outputs",), planned=12
        )


def shared(weight=1.0):
    return {"weight": weight, "others": [SharedCall(inv=LONG, weight=3.0)]}


@pytest.fixture
def chain(tmp_path):
    return ConfigSelectorChain(ConfigCache(), PersistentCache(tmp_path, shipped=False), tuner=Stopping())


@pytest.mark.parametrize("options", [{}, shared()], ids=["one call", "calls together"])
def test_the_next_search_starts_from_the_times_of_a_partial_one(chain, options):
    for _ in range(2):
        chain.search(SHORT, KERNEL, **options)
    assert chain.tuner.started_from == [[], [2]]
    (known,) = chain.store.unfinished(SHORT, shares_of([SharedCall(inv=SHORT), *options.get("others", ())]))
    assert known.measurement.median == pytest.approx(1e-6)
    assert len(known.cases) == (2 if options else 0)


@pytest.mark.parametrize(
    ("before", "now"),
    [({}, shared()), (shared(), {}), (shared(), shared(weight=2.0))],
    ids=["alone, then together", "together, then alone", "other weights"],
)
def test_times_of_other_calls_or_weights_are_no_start(chain, before, now):
    chain.search(SHORT, KERNEL, **before)
    chain.search(SHORT, KERNEL, **now)
    assert chain.tuner.started_from == [[], []]


@pytest.mark.parametrize("options", [{}, shared()], ids=["one call", "calls together"])
def test_a_search_that_must_not_resume_measures_everything_again(chain, options):
    chain.search(SHORT, KERNEL, **options)
    chain.search(SHORT, KERNEL, resume=False, **options)
    assert chain.tuner.started_from == [[], []]


def test_times_of_another_version_are_no_start(chain, monkeypatch):
    chain.search(SHORT, KERNEL)
    assert chain.store.unfinished(SHORT) != ()
    here = measurements.provenance
    monkeypatch.setattr(measurements, "provenance", lambda *args: here(*args) | {"jax": "99.0.0"})
    assert chain.store.unfinished(SHORT) == ()


def test_a_list_contains_the_configurations_of_equal_values_and_types():
    assert is_in([{"rows": 1}, {"rows": 2}], {"rows": 2})
    assert not is_in([{"rows": 1}], {"rows": True})
