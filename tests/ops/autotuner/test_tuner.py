# SPDX-License-Identifier: Apache-2.0
"""Searches: the status of every candidate, the winner, and budgets; times are made up, so no clock matters."""

from __future__ import annotations

import dataclasses
import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops import faulty_kernels
from tests.ops.autotuner.made_up_times import interleaved_with
from tests.ops.sample_kernels import Searched, told_apart

from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.measure.sampling import Sample, Work
from ejkernel.ops.autotuner.tasks.decisions import Decider
from ejkernel.ops.autotuner.trials.events import SearchFinished, on_event
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.errors import TuningError, TuningWarning
from ejkernel.ops.utils import fingerprint

pytestmark = pytest.mark.slow

X = np.linspace(0.0, 1.0, 16, dtype=np.float32)


@pytest.fixture
def race(monkeypatch):
    """`race({config: seconds, ...})` makes up the times of the candidates that reach the race, in their order."""

    def setup(costs):
        def time_of(config):
            return costs[config["block"] if isinstance(config, dict) else config]

        monkeypatch.setattr(timing, "interleaved", interleaved_with(time_of))

    return setup


def tune(kernel, *args, policy=None, **options):
    return Autotuner().tune(Invocation(kernel=kernel, args=args or (X,)), kernel, policy=policy, **options)


def keys_in(chain):
    return [entry[0] for entry in chain.cache.items()]


def statuses(tuned):
    return {outcome.config: (outcome.status, outcome.reason) for outcome in tuned.outcomes}


# --- winners ---


@pytest.mark.parametrize(
    ("costs", "winner"),
    [
        ({1: 2.0, 2: 1.0, 3: 3.0}, 2),
        ({1: 2.0, 2: 1.5, 3: 1.0}, 3),
        ({1: 1.0, 2: 2.0, 3: 3.0}, 1),
        ({1: 1.0, 2: 0.99, 3: 1.0}, 1),  # nearer than noise: the heuristic stays
        ({1: 1.0, 2: 0.97, 3: 1.0}, 2),
        ({1: 2.0, 2: 1.0, 3: 1.0}, 2),  # a tie: the first wins
        ({1: 1.0, 2: (0.1, 1.7), 3: 2.0}, 1),  # faster in half of the rounds
        ({1: 1.0, 2: 4.0, 3: 0.5}, 3),  # one that is dropped early
    ],
)
def test_the_winner_beats_the_heuristic(race, costs, winner):
    race(costs)
    assert tune(Searched()).config == winner


def test_a_search_describes_its_measurements(race):
    race({1: 2.0, 2: 1.0, 3: 4.0})
    tuned = tune(Searched())
    assert (tuned.speedup, tuned.winner.config, tuned.heuristic.config) == (2.0, 2, 1)
    assert [outcome.status for outcome in tuned.outcomes] == ["measured"] * 3


def test_a_summary_is_plain_data_with_the_failures(race):
    def broken(x):
        raise ValueError("does not fit")

    race({1: 2.0, 2: 1.0})
    summary = tune(Searched(faults={3: broken})).summary_data()
    assert summary["winner"] == {"median_us": 1e6, "spread": 0.0, "samples": 15, "method": "wall"}
    assert (summary["speedup"], summary["candidates"]) == (2.0, 3)
    assert summary["failures"] == [{"config": 3, "status": "failed", "reason": "ValueError: does not fit"}]


def test_candidates_are_measured_once_each_and_the_heuristic_first(race):
    race({1: 1.0, 3: 1.0, 2: 1.0})
    assert [outcome.config for outcome in tune(Searched(space=(3, 1, 3, 2, 2))).outcomes] == [1, 3, 2]


def test_given_candidates_replace_the_config_space(race):
    race({1: 2.0, 7: 1.0})
    assert tune(Searched(), candidates=[7]).config == 7


def test_the_heuristic_is_measured_even_where_the_space_does_not_hold_it(race):
    race({1: 1.0, 2: 2.0})
    assert tune(Searched(space=(2,))).config == 1


def test_a_kernel_without_a_heuristic_is_tuned(race):
    class Spaceless(Kernel[int, jax.Array]):
        def run(self, x, *, cfg):
            return told_apart(x + x, cfg)

    race({5: 2.0, 6: 1.0})
    assert tune(Spaceless(), candidates=[5, 6]).config == 6


def test_nothing_to_measure_is_an_error():
    class Empty(Kernel[int, jax.Array]):
        def run(self, x, *, cfg):
            return x

        def config_space(self, inv):
            return []

    with pytest.raises(TuningError, match=r"Empty: there is nothing to measure; config_space\(inv\) returned no conf"):
        tune(Empty())


def test_configurations_without_a_data_form_are_an_error():
    with pytest.raises(TuningError, match="configurations must be plain data, got <object"):
        tune(Searched(space=(object(),)))


def test_configurations_may_be_dictionaries(race):
    class Dictionaries(Kernel[dict, jax.Array]):
        def run(self, x, *, cfg):
            return told_apart(x + x, cfg)

        def config_space(self, inv):
            return [{"block": 1}, {"block": 2}]

    race({1: 2.0, 2: 1.0})
    assert tune(Dictionaries()).config == {"block": 2}


# --- candidates that fail ---


def fails_at_lowering(x):
    raise NotImplementedError("no such tile")


def fails_at_run(x):
    def callback(x):
        raise ValueError("crashed on the device")

    return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


FAULTS = {
    "lowering": (fails_at_lowering, "failed", "NotImplementedError: no such tile"),
    "run": (fails_at_run, "failed", "crashed on the device"),
    "nan": (lambda x: x / 0 * 0, "wrong", "result 0 has NaN or infinity where the reference has none"),
    "values": (lambda x: x + x * 1.001, "wrong", "result 0 differs from the reference"),
    "shape": (lambda x: (x + x)[1:], "wrong", r"result 0 has shape (15,), the reference (16,)"),
    "number": (lambda x: (x + x, x), "wrong", "returns 2 arrays, the reference 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_candidate_that_fails_is_an_outcome_with_its_reason(race, fault):
    function, status, reason = FAULTS[fault]
    race({1: 2.0, 3: 1.0})
    tuned = tune(Searched(faults={2: function}))
    assert tuned.config == 3
    assert statuses(tuned)[2][0] == status
    assert reason in statuses(tuned)[2][1]


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("function", [lambda x: (x + x).astype(jnp.bfloat16), lambda x: (x + x, x)])
@pytest.mark.parametrize("seconds", [1.0, 9.0])
def test_a_candidate_whose_results_have_other_types_is_wrong(race, function, validate, seconds):
    race({1: 2.0, 2: seconds, 3: 1.5})
    tuned = tune(Searched(faults={2: function}), policy=AutotunePolicy(validate=validate))
    assert (tuned.config, statuses(tuned)[2][0]) == (3, "wrong")


def test_a_candidate_that_is_wrong_after_its_confirmation_is_wrong(race, monkeypatch):
    def wrong_later(x):
        return jax.pure_callback(lambda x: x if confirmed else x + x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def confirm_run(*args):
        confirmed.append(1)
        return confirmation_run(*args)

    confirmed, confirmation_run = [], Decider._confirmation_run
    monkeypatch.setattr(Decider, "_confirmation_run", confirm_run)
    race({1: 2.0, 2: 1.0, 3: 1.5})
    tuned = tune(Searched(faults={2: wrong_later}), policy=AutotunePolicy(validate="outputs"))
    assert tuned.config == 3
    assert statuses(tuned)[2][1].startswith("it is not always right: result 0 differs")


def test_a_winner_is_checked_on_as_many_inputs_as_its_search_says(race):
    def remembering(x):
        seen.add(x.tobytes())
        return x + x

    seen = set()
    race({1: 2.0, 2: 1.0, 3: 1.5})
    fault = functools.partial(jax.pure_callback, remembering, jax.ShapeDtypeStruct(X.shape, X.dtype))
    tuned = tune(Searched(faults={2: fault}), policy=AutotunePolicy(validate="outputs"))
    assert tuned.config == 2
    assert tuned.input_sets == len(seen) > 2


def test_a_candidate_has_the_types_of_the_heuristic_not_those_of_the_reference(race):
    class Wide(Searched):
        def reference(self, x):
            return (x + x).astype(jnp.float32)

    race({1: 3.0, 2: 2.0, 3: 1.0})
    tuned = tune(Wide(faults={3: lambda x: (x + x).astype(jnp.float32)}), X.astype(jnp.bfloat16))
    assert (tuned.config, statuses(tuned)[3][1]) == (2, "returns float32[16], the heuristic bfloat16[16]")


def test_a_candidate_that_does_not_compile_is_an_outcome(race, monkeypatch):
    race({1: 2.0, 3: 1.0})
    compile_ = jax.stages.Lowered.compile

    def refuse(lowered, *args, **kwargs):
        if "stablehlo.cosine" in lowered.as_text():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: shared memory")
        return compile_(lowered, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    tuned = tune(Searched(faults={2: jnp.cos}))
    assert statuses(tuned)[2] == ("failed", "JaxRuntimeError: RESOURCE_EXHAUSTED: shared memory")


def test_the_heuristic_may_fail(race):
    class Referenced(Searched):
        def reference(self, x):
            return x + x

    race({2: 2.0, 3: 1.0})
    tuned = tune(Referenced(faults={1: fails_at_lowering}))
    assert (tuned.config, tuned.speedup, tuned.heuristic.status) == (3, None, "failed")


def test_a_heuristic_used_as_reference_must_work():
    with pytest.raises(TuningError, match="the heuristic, used as reference, failed: NotImplementedError"):
        tune(Searched(faults={1: fails_at_lowering}))


def test_a_reference_must_work():
    class Referenced(Searched):
        def reference(self, x):
            raise ValueError("no reference")

    with pytest.raises(TuningError, match="Double: example inputs or the reference failed: ValueError: no reference"):
        tune(Referenced())


def test_a_search_without_survivors_is_an_error_with_the_reasons_and_how_often_each():
    class Referenced(Searched):
        def reference(self, x):
            return x * 7

    text = r"none of 3 candidates could be measured: 2 x result 0 differs .*; 1 x NotImplementedError: no such tile"
    with pytest.raises(TuningError, match=text) as error:
        tune(Referenced(faults={3: fails_at_lowering}))
    assert [str(outcome.status) for outcome in error.value.outcomes] == ["wrong", "wrong", "failed"]


def test_the_log_of_a_failed_search_has_the_reason_of_each_candidate(tmp_path):
    class Referenced(Searched):
        def reference(self, x):
            return x * 7

    chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path, shipped=False))
    kernel = Referenced(faults={3: fails_at_lowering})
    with pytest.raises(TuningError):
        chain.search(Invocation(kernel=kernel, args=(X,)), kernel)
    lines = next(chain.store.searches()).summary().splitlines()
    rows = lines[5:]
    assert "3 candidates in" in lines[2]
    assert [row.split()[:3] for row in rows] == [["h", "1", "wrong"], ["2", "wrong", "-"], ["3", "failed", "-"]]
    assert "no such tile" in rows[-1]


def test_the_policy_can_disable_validation(race):
    race({1: 2.0, 2: 1.0, 3: 3.0})
    tuned = tune(Searched(faults={2: lambda x: x * 9}), policy=AutotunePolicy(validate=False))
    assert tuned.config == 2


def test_a_failed_candidate_keeps_no_traceback_and_no_array(race, collect):
    alive = []

    def fails_with_an_array(x):
        class Held:
            pass

        held = Held()
        alive.append(weakref.ref(held))
        raise ValueError(str(held.__class__.__name__))

    race({1: 1.0, 3: 1.0})
    tuned = tune(Searched(faults={2: fails_with_an_array}))
    collect()
    assert (tuned.outcomes[1].status, [reference() for reference in alive]) == ("failed", [None])


def test_an_error_without_a_text_has_a_reason(race):
    def silent(x):
        raise KeyError

    race({1: 1.0, 3: 1.0})
    assert statuses(tune(Searched(faults={2: silent})))[2][1] == "KeyError: no message"


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")

    __repr__ = __str__


class NotAnException(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt: no message"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit: no message"),
        (NotAnException("odd"), "NotAnException: odd"),
        (Unspeakable(), "Unspeakable: no message, because its __str__ raises ValueError"),
        (
            ExceptionGroup("two", [ValueError("a"), Unspeakable()]),
            "ExceptionGroup: two (2 sub-exceptions): ValueError: a",
        ),
        (BaseExceptionGroup("one", [KeyboardInterrupt()]), "BaseExceptionGroup: one (1 sub-exception): Keyboard"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_exception_while_tracing_fails_only_that_candidate(race, error, reason):
    def raising(x):
        raise error

    race({1: 2.0, 3: 1.0})
    tuned = tune(Searched(faults={2: raising}))
    assert statuses(tuned)[2][0] == "failed"
    assert statuses(tuned)[2][1].startswith(reason)
    assert tuned.config == 3


def test_exceptions_of_a_reference_or_heuristic_do_not_count_as_ctrl_c(race):
    class Broken(Searched):
        def reference(self, x):
            raise KeyboardInterrupt

    race({1: 2.0})
    with pytest.raises(TuningError, match="example inputs or the reference failed: KeyboardInterrupt"):
        tune(Broken())


# --- budgets and progress ---


def tune_until(finished, budget_s=1.0):
    """Tune one candidate at a time, and let the budget be spent when so many are finished."""
    now = [0.0]
    kernel = Searched()

    def progress(done, total):
        now[0] = 9.0 if done >= finished else 0.0

    tuner = Autotuner(clock=lambda: now[0], width=1)
    policy = AutotunePolicy(budget_s=budget_s)
    return tuner.tune(Invocation(kernel=kernel, args=(X,)), kernel, policy=policy, progress=progress)


def test_a_spent_budget_skips_the_remaining_candidates(race):
    race({1: 2.0, 2: 1.0})
    tuned = tune_until(finished=2)
    assert tuned.config == 2
    assert statuses(tuned)[3] == ("skipped", "the budget was spent before its turn")


def test_a_spent_budget_still_measures_the_heuristic(race):
    race({1: 1.0})
    assert tune_until(finished=0).config == 1


def test_a_search_says_how_long_it_took(race):
    race({1: 2.0, 2: 1.0, 3: 1.0})
    kernel = Searched()
    tuned = Autotuner(clock=iter([10.0, 13.5]).__next__).tune(Invocation(kernel=kernel, args=(X,)), kernel)
    assert tuned.seconds == 3.5


def test_progress_counts_candidates(race):
    race({1: 1.0, 2: 1.0, 3: 1.0})
    steps = []
    tune(Searched(), progress=lambda done, total: steps.append((done, total)))
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]


# --- noise ---


class Same(Kernel[int, jax.Array]):
    """Every configuration is the same program."""

    def run(self, x, *, cfg):
        return x + x

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return [2, 3]


def test_candidates_with_equal_programs_are_measured_once(race):
    race({1: 2.0, 2: 1.0, 3: 1.0})
    tuned = tune(Same("same"))
    assert tuned.config == 1
    assert statuses(tuned)[2] == ("same", "the same program as 1")


def races_one_after_the_other(monkeypatch, *races):
    """Give each race separate times."""
    remaining = iter(races)

    def interleaved(functions, **options):
        return interleaved_with(next(remaining).__getitem__)(functions, **options)

    monkeypatch.setattr(timing, "interleaved", interleaved)


def test_a_winner_that_loses_the_second_race_is_not_admitted(monkeypatch):
    races_one_after_the_other(monkeypatch, {1: 2.0, 2: 1.0, 3: 3.0}, {1: 2.0, 2: 2.0})
    assert tune(Searched()).config == 1


def test_the_speed_up_is_that_of_the_second_race(monkeypatch):
    races_one_after_the_other(monkeypatch, {1: 2.0, 2: 0.5, 3: 3.0}, {1: 2.0, 2: 1.0})
    tuned = tune(Searched())
    assert tuned.speedup == 2.0
    assert tuned.confidence > 0.99


def test_a_heuristic_that_stays_is_not_compared_with_confidence(race):
    race({1: 1.0, 2: 2.0, 3: 2.0})
    assert tune(Searched()).confidence is None


def test_a_search_with_only_the_heuristic_left_warns_with_the_first_reason(race):
    def broken(x):
        raise ValueError("does not fit")

    race({1: 1.0})
    with pytest.warns(TuningWarning, match="all 2 candidates beside the heuristic were rejected; the first, 2,"):
        tune(Searched(faults={2: broken, 3: broken}))


def test_each_given_candidate_that_fails_is_named_with_its_reason(race):
    def broken(x):
        raise ValueError("does not fit")

    race({1: 1.0, 2: 2.0})
    with pytest.warns(TuningWarning) as caught:
        tune(Searched(faults={3: broken}), candidates=[2, 3])
    assert "1 of 2 candidates beside the heuristic was rejected: 3, failed: ValueError: does not fit" in str(
        caught[0].message
    )
    race({1: 1.0})
    with pytest.warns(TuningWarning, match=r"all 2 .* were rejected: 2, failed: .*; 3, failed: ValueError: does not"):
        tune(Searched(faults={2: broken, 3: broken}), candidates=[2, 3])
    with pytest.warns(TuningWarning, match="the list of candidates is empty, so only the heuristic was measured"):
        tune(Searched(), candidates=[])


# --- evidence ---

NOISE = (1.0, 9.0, 1.1, 5.0, 1.0, 7.0, 1.2, 6.0, 1.0, 8.0)  # times that a sample takes longer on a busy machine


def held_up(work, noise=NOISE):
    return tuple(Sample(work * stretch, Work(work, work)) for stretch in noise)


@pytest.mark.parametrize(("costs", "winner"), [((1.5, 1.0), 2), ((1.0, 1.5), 1), ((1.0, 1.0), 1)])
def test_on_a_busy_machine_cpu_time_decides_and_is_reported(race, costs, winner):
    race({1: held_up(costs[0]), 2: held_up(costs[1], NOISE[::-1])})
    tuned = tune(Searched(space=(1, 2)))
    assert (tuned.config, tuned.undecided) == (winner, False)
    assert {outcome.measurement.method for outcome in tuned.outcomes} == {"processor"}
    assert tuned.winner.measurement.median == min(outcome.measurement.median for outcome in tuned.outcomes)


def test_a_good_candidate_with_a_slow_first_sample_is_not_lost(race):
    race({1: Sample(3.0, Work(3.0, 3.0)), 2: (Sample(1.0, Work(1.0, 1.0)), *held_up(1.0, (30.0, *(1.0,) * 98)))})
    assert tune(Searched(space=(1, 2))).config == 2


def test_the_data_summary_and_event_show_an_undecided_search(race):
    race({1: (1.0, 2.0, 2.0, 1.0), 2: (2.0, 1.0, 1.0, 2.0)})
    finished = []
    with on_event(lambda event: finished.append(event) if isinstance(event, SearchFinished) else None):
        tuned = tune(Searched(space=(1, 2)))
    assert (tuned.config, tuned.undecided, finished[0].data.undecided) == (1, True, True)
    assert tuned.challenge.came_out == "undecided"
    assert tuned.challenge.comparison.pairs == 8 * 15  # it went on as long as it may
    assert "; undecided: it is open whether 2 is faster: " in tuned.summary()
    assert "undecided: the times vary too much; tune it again (--undecided)" in tuned.summary()
    summary = tuned.summary_data()
    assert (summary["search"]["state"], summary["standing"]["verdict"]) == ("undecided", "undecided")


def test_an_undecided_search_leaves_the_saved_winner(race, tmp_path):
    kernel = Searched(space=(1, 2))
    inv, cache = Invocation(kernel=kernel, args=(X,)), PersistentCache(tmp_path, shipped=False)
    race({1: 2.0, 2: 1.0})
    ConfigSelectorChain(ConfigCache(), cache).search(inv, kernel)
    for persist in (True, False):
        race({1: (1.0, 2.0, 2.0, 1.0), 2: (2.0, 1.0, 1.0, 2.0)})
        chain = ConfigSelectorChain(ConfigCache(), cache, persist_autotune=persist)
        again = chain.search(inv, kernel)
        assert (again.config, again.not_saved) == (1, "undecided, so the saved configuration, 2, stays")
        assert (cache.get(inv.key), chain.choose(inv, kernel)) == (2, 2)
    race({1: 1.0, 2: 2.0})
    ConfigSelectorChain(ConfigCache(), cache).search(inv, kernel)
    assert cache.get(inv.key) == 1  # measured beside the heuristic, and beaten


@dataclasses.dataclass(frozen=True)
class Blocks:
    rows: int = 1


def test_a_winner_that_a_file_cannot_hold_is_not_saved_over_the_saved_configuration(race, tmp_path):
    class Blocked(Kernel[Blocks, jax.Array]):
        def run(self, x, *, cfg):
            return told_apart(x + x, int(cfg.rows))

        def heuristic_cfg(self, inv):
            return Blocks(1)

    kernel, cache = Blocked("blocked"), PersistentCache(tmp_path, shipped=False)
    inv = Invocation(kernel=kernel, args=(X,))
    race({Blocks(1): 3.0, Blocks(2): 2.0, Blocks(4.0): 1.0})
    ConfigSelectorChain(ConfigCache(), cache).search(inv, kernel, candidates=[Blocks(2)])
    again = ConfigSelectorChain(ConfigCache(), cache).search(inv, kernel, candidates=[Blocks(2), Blocks(4.0)])
    assert (again.config, again.in_force, cache.get(inv.key)) == (Blocks(4.0), Blocks(2), Blocks(2))
    assert again.not_saved == "rows=4.0 cannot be read from a file: $.rows: expected int, got float 4.0"


def test_a_kept_heuristic_is_reported_with_its_best_challenger(race):
    race({1: 1.0, 2: 1.1, 3: 2.0})
    tuned = tune(Searched())
    assert (tuned.challenge.challenger, tuned.challenge.came_out, tuned.challenge.is_confirmation) == (
        2,
        "stays",
        False,
    )
    assert (
        "2 in the run of all candidates: 1100.0 ms, the heuristic 1000.0 ms; 0.91x ± 0.0 % in the median round, which "
        "decides (threshold 1.02x); faster in 0 of 15 rounds" in tuned.summary()
    )


def test_a_loser_with_lucky_samples_is_measured_again_beside_the_winner(monkeypatch):
    first = {1: 2.0, 2: (1.0, 0.5), 3: (0.9, 0.4, 0.4, 9.0)}  # 3 has the least median, and the largest mean
    races_one_after_the_other(monkeypatch, first, {1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.0, 3: 4.0}, {1: 2.0, 2: 1.0})
    tuned = tune(Searched())
    medians = {outcome.config: outcome.measurement.median for outcome in tuned.outcomes}
    assert (tuned.config, tuned.undecided) == (2, False)
    assert medians == {1: 2.0, 2: 1.0, 3: 4.0}


def test_a_candidate_that_seems_faster_to_the_end_leaves_the_search_undecided(monkeypatch):
    times = {1: 2.0, 2: 1.0, 3: 3.0}
    races_one_after_the_other(monkeypatch, times, *({1: 2.0, 2: 4.0}, {1: 2.0, 2: 1.0}) * 9)
    tuned = tune(Searched(space=(1, 2)))
    assert tuned.config == 1
    assert tuned.undecided or tuned.heuristic.measurement.median <= tuned.outcomes[1].measurement.median


# --- where ---


@pytest.mark.parametrize("isolate", [False, True])
def test_a_call_for_an_absent_device_is_not_measured_on_another(isolate):
    inv = Invocation(kernel=faulty_kernels.plain, args=(X,), device="gpu:abacus")
    with pytest.raises(TuningError, match="the call is for gpu:abacus, but the default device of this process is cpu:"):
        Autotuner().tune(inv, faulty_kernels.plain, policy=AutotunePolicy(isolate=isolate))


def test_a_call_for_another_device_of_this_process_is_measured_there(monkeypatch):
    here = jax.devices()[0]
    name = fingerprint.device_fingerprint

    def told_apart_by_number(device=None):
        return name(device) + ("" if (device or fingerprint.default_device()) is here else "_other")

    monkeypatch.setattr(fingerprint, "device_fingerprint", told_apart_by_number)
    seen = []

    class Placed(Searched):
        def example_inputs(self, inv, rng):
            seen.append(fingerprint.default_device())
            return (jnp.asarray(X),), {}

    kernel = Placed()
    Autotuner().tune(Invocation(kernel=kernel, args=(X,), device=name() + "_other"), kernel)
    assert seen
    assert here not in seen
