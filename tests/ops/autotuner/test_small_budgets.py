# SPDX-License-Identifier: Apache-2.0
"""A small budget is for measuring: first the heuristic, then as many candidates as the time allows."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.sample_kernels import told_apart

from ejkernel.ops import AutotunePolicy, Autotuner, Invocation, Kernel
from ejkernel.ops.autotuner.bench import oracle as oracles
from ejkernel.ops.autotuner.bench.gradients import rule_fault
from ejkernel.ops.autotuner.bench.oracle import Oracle
from ejkernel.ops.autotuner.tasks import pool
from ejkernel.ops.errors import TuningWarning


class SlowlyReferenced(Kernel):
    """A kernel with a reference, or its derivative, that blocks in tracing until `goes_on` is set."""

    def __init__(self):
        super().__init__("slowly_referenced")
        self.goes_on = threading.Event()

    def run(self, x, *, cfg):
        return told_apart(x * (3 if cfg == 3 else 2), cfg)

    def reference(self, x):
        self.goes_on.wait()
        return x * 2

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return [1, 2, 3]


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(oracles, "_SHARE", 0.0)
    monkeypatch.setattr(oracles, "_LEAST", 0.01)
    made = SlowlyReferenced()
    yield made
    made.goes_on.set()  # an abandoned compilation ends with the process at the latest


def call(kernel):
    return Invocation(kernel=kernel, args=(jnp.arange(4.0),))


@pytest.mark.slow
def test_candidates_are_measured_and_held_against_the_heuristic(kernel):
    with pytest.warns(TuningWarning, match="so small a budget; candidates are compared with the heuristic's results"):
        data = Autotuner(rounds=2, warmup=0).tune(call(kernel), kernel, policy=AutotunePolicy(budget_s=600))
    assert [outcome.status for outcome in data.outcomes] == ["measured", "measured", "wrong"]
    assert data.rule_fault == ""


def test_a_rule_is_not_held_against_a_reference_that_cannot_be_had(kernel):
    oracle = Oracle(inv=call(kernel), baseline=1, left=lambda: 600.0)
    with pytest.warns(TuningWarning):
        oracle.compute_references()
    assert (oracle.has_reference, rule_fault(oracle)) == (False, "")


def test_a_derivative_of_a_reference_that_takes_too_long_is_the_heuristics_own(kernel):
    kernel.goes_on.set()
    oracle = Oracle(inv=call(kernel), baseline=1)
    oracle.compute_references()
    assert oracle.has_reference
    kernel.goes_on.clear()
    oracle.left = lambda: 600.0
    assert rule_fault(oracle) == ""
    assert not oracle.has_reference


def test_without_a_budget_the_reference_has_all_the_time_it_needs(kernel):
    threading.Timer(0, kernel.goes_on.set).start()
    oracle = Oracle(inv=call(kernel), baseline=1)
    oracle.compute_references()
    assert oracle.has_reference
    np.testing.assert_allclose(oracle.reference_results(oracle.inv.node, oracle.arrays)[0], oracle.arrays[0] * 2)


class SlowlyCompiled(Kernel):
    """A kernel with a heuristic that compiles after the other candidate."""

    def __init__(self):
        super().__init__("slowly_compiled")
        self.never = threading.Event()

    def run(self, x, *, cfg):
        if cfg == 1:
            self.never.wait(1.5)
        return told_apart(x * 2, cfg)

    def reference(self, x):
        return x * 2

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("budget_s", [600, 1.0])
def test_the_heuristic_is_measured_even_if_another_candidate_is_ready_before_it(monkeypatch, budget_s):
    monkeypatch.setattr(pool, "_PREPARING", 0.0)  # measure from the first candidate on
    kernel = SlowlyCompiled()
    data = Autotuner(rounds=2, warmup=0).tune(call(kernel), kernel, policy=AutotunePolicy(budget_s=budget_s))
    assert data.outcomes[0].config == 1
    assert data.outcomes[0].status == "measured"
