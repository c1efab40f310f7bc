# SPDX-License-Identifier: Apache-2.0
"""Searches of declared spaces: proposals, compiled programs, and winners."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from tests.ops.autotuner.made_up_times import interleaved_with
from tests.ops.sample_kernels import told_apart

from ejkernel.ops import AutotunePolicy, ConfigSpace, Invocation, Kernel
from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.process.watch import Cancellation, Watch
from ejkernel.ops.autotuner.tasks.run import TuningRun
from ejkernel.ops.autotuner.tasks.task import TuningTask
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.errors import ConfigError, TuningError

pytestmark = pytest.mark.slow

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


class Rounded(Double):
    def config_space(self, inv):
        axes = {"rows": self.sizes, "columns": self.sizes}
        return ConfigSpace(axes, build=lambda point: Tile(point["rows"] // 2 + 1, point["columns"] // 2 + 1))


def seconds(tile):
    """A bowl with its bottom at 8 x 5."""
    return 1.0 + 0.05 * (tile.rows - 8) ** 2 + 0.05 * (tile.columns - 5) ** 2


@pytest.fixture
def races(monkeypatch):
    """Make up the times of all candidates; gives the list of `(rounds, configurations)` of every race."""
    seen = []

    measure = interleaved_with(seconds)

    def interleaved(functions, *, sampling, **options):
        seen.append((sampling.plan.rounds, [runner.function.candidate.config for (runner,) in functions]))
        return measure(functions, sampling=sampling, **options)

    monkeypatch.setattr(timing, "interleaved", interleaved)
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


@pytest.mark.parametrize("kernel", [Double, Rounded], ids=["", "points share configurations"])
def test_no_candidate_is_measured_twice_before_the_final_race(races, kernel):
    tuned = search(kernel("double"), max_candidates=40)
    assert len({outcome.config for outcome in tuned.outcomes}) == len(tuned.outcomes) == 40
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


# --- a search that goes on where another attempt ended ---


def measured(tile, spilled=None):
    relative = seconds(tile) / seconds(Tile(1, 1))
    measurement = Measurement(samples=(seconds(tile),) * 2, method="made up", relative=relative)
    return Outcome(config=tile, status="measured", measurement=measurement, spilled=spilled)


class Requested(Cancellation):
    """A cancellation requested by a function."""

    def __init__(self, stop):
        super().__init__()
        self._stop = stop

    @property
    def is_requested(self):
        return self._stop()


class Abandoned(Watch):
    def is_abandoned(self):
        return True


def go_on(known, stop=lambda: False, watch=None, **task):
    kernel = Double("double")
    inv = dataclasses.replace(Invocation(kernel=kernel, args=(X,)).abstract(), kernel=kernel)
    task.setdefault("policy", AutotunePolicy(max_candidates=30))
    task = TuningTask(inv=inv, known=tuple(known), rounds=ROUNDS, **task)
    return TuningRun(task, watch=watch or Watch(), cancellation=Requested(stop)).run()


def test_the_heuristic_is_measured_again_beside_known_times(races):
    tuned = go_on([measured(Tile(1, 1)), measured(Tile(8, 5))])
    assert tuned.config == Tile(8, 5)
    assert tuned.confidence > 0.9
    assert all(race[0] == Tile(1, 1) for _, race in races)


def test_known_candidates_are_measured_again_only_as_finalists(races):
    go_on([measured(tile) for tile in (Tile(8, 5), Tile(12, 12), Tile(8, 6))])
    in_races = [race for _, race in races]
    assert not any(Tile(12, 12) in race for race in in_races)
    assert [Tile(8, 5) in race for race in in_races].index(True) >= len(in_races) - 2  # the finalists', and the duel


def test_ctrl_c_at_the_start_of_another_attempt_keeps_known_times(races):
    tuned = go_on([measured(Tile(1, 1)), measured(Tile(8, 5)), measured(Tile(7, 4))], stop=lambda: True)
    assert tuned.interrupted
    assert tuned.config == Tile(8, 5)


def test_the_time_of_earlier_attempts_counts(races):
    tuned = go_on([], policy=AutotunePolicy(max_candidates=30, budget_s=60.0), spent=100.0)
    assert [outcome.config for outcome in tuned.outcomes] == [Tile(1, 1)]
    assert tuned.seconds > 100.0


def test_an_abandoned_search_ends_at_once(races):
    with pytest.raises(TuningError, match="none of 1 candidate could be measured"):
        go_on([], watch=Abandoned())
    assert races == []


def test_an_interrupted_search_has_the_best_so_far(races):
    seen = []

    def stop():
        seen.append(len(races))
        return len(races) > 2

    tuned = go_on([], stop=stop)
    assert tuned.interrupted
    assert len(tuned.outcomes) < tuned.planned == 30
    sampled = {tile for _, race in races for tile in race}
    assert seconds(tuned.config) == min(map(seconds, sampled))


def test_configurations_that_cannot_be_had_are_this_call_s_error():
    class Broken(Double):
        def config_space(self, inv):
            raise RuntimeError("no space left")

    with pytest.raises(
        TuningError, match="Broken: its configurations cannot be determined: config_space raised RuntimeErr"
    ):
        search(Broken("Broken"))
