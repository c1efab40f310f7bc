# SPDX-License-Identifier: Apache-2.0
"""Searches through declared spaces: what is asked for, what stays compiled, who wins."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from tests.ops.execution.made_up_times import interleaved_with
from tests.ops.sample_kernels import told_apart

from ejkernel.ops import AutotunePolicy, ConfigSpace, Invocation, Kernel
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.execution import bench
from ejkernel.ops.execution.tuning import Autotuner

X = np.linspace(0.0, 1.0, 16, dtype=np.float32)
ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int
    columns: int


class Double(Kernel[Tile, jax.Array]):
    """`x + x`; tiles of 7 rows fail."""

    sizes = range(1, 13)

    def run(self, x, *, cfg):
        if cfg.rows == 7:
            raise ValueError("seven rows do not fit")
        return told_apart(x + x, cfg)

    def heuristic_cfg(self, inv):
        return Tile(1, 1)

    def config_space(self, inv):
        return ConfigSpace({"rows": self.sizes, "columns": self.sizes}, build=Tile)


class SmallDouble(Double):
    sizes = range(1, 4)


def seconds(tile):
    """A bowl with its bottom at 8 x 5."""
    return 1.0 + 0.05 * (tile.rows - 8) ** 2 + 0.05 * (tile.columns - 5) ** 2


@pytest.fixture
def races(monkeypatch):
    """Make up the times of all candidates; gives the list of `(rounds, configurations)` of every race."""
    seen = []

    measure = interleaved_with(seconds)

    def interleaved(functions, *, race, **options):
        seen.append((race.plan.rounds, [function.function.candidate.config for function in functions]))
        return measure(functions, race=race, **options)

    monkeypatch.setattr(bench, "interleaved", interleaved)
    return seen


def search(kernel, **policy):
    inv = Invocation(kernel=kernel, args=(X,))
    return Autotuner(rounds=ROUNDS).tune(inv, kernel, policy=AutotunePolicy(**policy))


def test_a_search_finds_the_bottom_without_measuring_the_whole_space(races):
    tuned = search(Double("double"), max_candidates=60)
    assert seconds(tuned.config) <= 1.1
    assert len(tuned.outcomes) <= 60 < len(Double.sizes) ** 2


def test_the_heuristic_comes_first_and_runs_in_the_final_race(races):
    tuned = search(Double("double"), max_candidates=30)
    assert tuned.outcomes[0].config == Tile(1, 1)
    rounds, finalists = races[-2]
    assert rounds == ROUNDS
    assert finalists[0] == Tile(1, 1)
    assert len(finalists) <= 8


def test_no_candidate_is_measured_twice_before_the_final_race(races):
    search(Double("double"), max_candidates=40)
    screened = [config for _, configs in races[:-2] for config in configs if config != Tile(1, 1)]
    assert len(screened) == len(set(screened))


def test_a_failure_is_an_outcome_and_the_search_goes_on(races):
    tuned = search(Double("double"), max_candidates=60)
    failed = [outcome for outcome in tuned.outcomes if outcome.status == "failed"]
    assert failed
    assert all(outcome.reason == "ValueError: seven rows do not fit" for outcome in failed)


def test_a_small_space_is_measured_whole_in_one_race(races):
    tuned = search(SmallDouble("double"), max_candidates=2)
    assert [len(configs) for _, configs in races] == [9, 2]
    assert tuned.config == Tile(3, 3)


def test_the_same_seed_makes_the_same_search(races):
    first, second = (search(Double("double"), max_candidates=40) for _ in range(2))
    assert [o.config for o in first.outcomes] == [o.config for o in second.outcomes]


def test_a_spent_budget_ends_the_search_with_the_best_so_far(races):
    ticks = iter(range(10_000))
    inv = Invocation(kernel=(kernel := Double("double")), args=(X,))
    tuned = Autotuner(rounds=ROUNDS, clock=lambda: float(next(ticks))).tune(
        inv, kernel, policy=AutotunePolicy(budget_s=30.0)
    )
    assert 1 < len(tuned.outcomes) < 40
    best = min((o for o in tuned.outcomes if o.measurement), key=lambda o: o.measurement.median)
    assert tuned.config == best.config


def test_progress_counts_up_to_the_limit(races):
    seen = []
    kernel = Double("double")
    Autotuner(rounds=ROUNDS).tune(
        Invocation(kernel=kernel, args=(X,)),
        kernel,
        policy=AutotunePolicy(max_candidates=20),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[0] == (0, 20)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_default_heuristic_of_a_space_is_its_first_configuration():
    class NoHeuristic(Kernel[Tile, jax.Array]):
        def run(self, x, *, cfg):
            return x + x

        def config_space(self, inv):
            return ConfigSpace({"rows": [2, 4], "columns": [8]}, build=Tile)

    kernel = NoHeuristic()
    assert kernel.heuristic_cfg(Invocation(kernel=kernel, args=(X,))) == Tile(2, 8)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
def test_a_bad_limit_is_an_error(value):
    with pytest.raises(ConfigError, match="max_candidates must be an int >= 1"):
        AutotunePolicy(max_candidates=value)
