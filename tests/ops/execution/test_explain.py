# SPDX-License-Identifier: Apache-2.0
"""Explanations: which key a call has, what every tier said, and which label it carries."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from ejkernel import ops
from ejkernel.ops import ConfigSelectorChain, Executor, Kernel

X = np.arange(8, dtype=np.float32)


class Times(Kernel[int, jax.Array]):
    """`cfg * x`, so that a result tells its configuration."""

    def run(self, x, *, cfg):
        return cfg * x

    def heuristic_cfg(self, inv):
        return 1


class Everything(Kernel[int, Any]):
    def run(self, x, activation=None, *, cfg):
        return activation(x)

    def heuristic_cfg(self, inv):
        return 1


@pytest.fixture
def chain():
    return ConfigSelectorChain()


@pytest.fixture
def executor(chain):
    return Executor(chain)


def test_an_explanation_reads_like_this(executor):
    kernel = Times()
    inv = ops.Invocation(kernel=kernel, args=(X,))
    lines = str(executor.explain(kernel, X)).splitlines()
    assert lines == [
        f"Times@v0  key {inv.call_key} on {inv.device_fingerprint}",
        "  override   - no cfg= was given",
        "  overlay    - none in force",
        "  memory     - nothing remembered",
        "  persistent - the chain has no persistent cache",
        "  autotune   - the policy does not allow it (autotune=False)",
        "  forward    - the call is a forward",
        "  heuristic  1",
        f"  label      ejkernel_ops#Times@v0:{inv.call_key}",
        "  => 1 from heuristic",
    ]


def test_an_explanation_ends_where_there_is_an_answer(executor):
    explanation = executor.explain(Times(), X, cfg=3)
    assert ([tier.tier for tier in explanation.tiers], explanation.config, explanation.source) == (
        ["override"],
        3,
        "override",
    )


def test_explaining_remembers_nothing(executor, chain):
    executor.explain(Times(), X)
    assert len(chain.cache) == 0


def test_an_explanation_says_that_there_is_no_answer(executor):
    class Bare(Kernel[int, jax.Array]):
        def run(self, x, *, cfg):
            return x

    explanation = executor.explain(Bare(), X)
    assert (explanation.config, explanation.source) == (None, None)
    assert str(explanation).splitlines()[-2:] == ["  label      - the call cannot run", "  => no configuration"]


def test_an_explanation_says_why_there_is_no_key(executor):
    explanation = executor.explain(Everything(), X, activation=lambda x: x)
    assert (explanation.key, explanation.label, explanation.label_note) == (None, None, "the call has no key")
    assert "has no name that is the same in every process" in str(explanation).splitlines()[0]


def test_an_explanation_says_that_a_result_is_an_input(executor):
    class Identity(Times):
        def run(self, x, *, cfg):
            return x

    assert "each result of the call is one of its inputs" in executor.explain(Identity(), X).label_note


def test_a_chooser_of_ones_own_is_explained():
    class Always:
        def choose(self, inv, kernel):
            return 3

    explanation = Executor(Always()).explain(Times(), X)
    assert (explanation.source, explanation.config) == ("chooser", 3)
