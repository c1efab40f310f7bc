# SPDX-License-Identifier: Apache-2.0
"""Candidates measured on several draws of inputs, or on several calls, and ranked by the geometric mean."""

from __future__ import annotations

import math
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.autotuner.made_up_times import ByCase, interleaved_with
from tests.ops.sample_kernels import told_apart

from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.measure.measurement import interleaved
from ejkernel.ops.autotuner.measure.sampling import (
    PROCESSOR,
    Case,
    Sample,
    Work,
    geometric_mean,
    mean_sample,
    seconds_on,
)
from ejkernel.ops.autotuner.store.log import lines_of, load
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config._files import UnusableError
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.examples import example_sets, saver
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.errors import KernelError, TuningError
from ejkernel.ops.execution.explain import explain_call
from ejkernel.ops.execution.offline import tune_together

X = jax.ShapeDtypeStruct((16,), jnp.float32)
SIZE = jax.ShapeDtypeStruct((1,), jnp.int32)
SEVERAL = pytest.mark.slow


class Scaled(Kernel[int, jax.Array]):
    """`x * size`, on sizes that its author says matter; `faults` by configuration and size."""

    def __init__(self, faults=None, space=(1, 2, 3)):
        super().__init__("scaled")
        self.faults, self.space = faults or {}, space

    def run(self, x, size, *, cfg):
        for (config, wrong), fault in self.faults.items():
            if config == cfg:
                x = x + jnp.where(size[0] == wrong, fault, 0.0)
        return told_apart(x * size.astype(x.dtype), cfg)

    def reference(self, x, size):
        return x * size.astype(x.dtype)

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return list(self.space)

    def example_inputs(self, inv, rng):
        return self.example_draws(inv, rng)["few"]

    def example_draws(self, inv, rng):
        x = rng.standard_normal(inv.args[0].shape).astype(np.float32)
        return {name: ((x, np.full(1, size, np.int32)), {}) for name, size in (("few", 3), ("many", 300))}


class Plain(Kernel[int, jax.Array]):
    """`x + x`; its space has the divisors of the length."""

    def run(self, x, *, cfg):
        return told_apart(x + x, cfg)

    def reference(self, x):
        return x + x

    def heuristic_cfg(self, inv):
        return 4

    def config_space(self, inv):
        return [n for n in (2, 4, 8, 3) if inv.args[0].shape[0] % n == 0]


@pytest.fixture
def times(monkeypatch):
    """`times({config: {case's name: seconds}})` makes up the times of the candidates that reach the sampling."""
    return lambda seconds: monkeypatch.setattr(timing, "interleaved", interleaved_with(ByCase(seconds)))


def on_draws(kernel, **options):
    return Autotuner().tune(Invocation(kernel=kernel, args=(X, SIZE)), kernel, **options)


def inputs_of(inv):
    return example_sets(inv, np.random.default_rng(0), saver(inv.node, Choice(config=1)))


def of_length(*lengths, kernel):
    return [Invocation(kernel=kernel, args=(jax.ShapeDtypeStruct((n,), jnp.float32),)) for n in lengths]


def together(kernel, lengths, weights=None, **options):
    first, *others = of_length(*lengths, kernel=kernel)
    weight, *rest = weights or [1.0] * len(lengths)
    shared = [SharedCall(inv=inv, weight=own) for inv, own in zip(others, rest, strict=True)]
    return Autotuner().tune(first, kernel, weight=weight, others=shared, **options)


def statuses(tuned):
    return {outcome.config: (str(outcome.status), outcome.reason) for outcome in tuned.outcomes}


# --- means ---


@given(st.lists(st.tuples(st.floats(1e-9, 1e3), st.floats(0.01, 10)), min_size=1, max_size=6), st.floats(0.1, 10))
@settings(max_examples=50)
def test_the_mean_lies_between_the_values_and_scales_with_them(pairs, factor):
    mean = geometric_mean(pairs)
    values = [value for value, _ in pairs]
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    assert math.isclose(geometric_mean([(value * factor, weight) for value, weight in pairs]), mean * factor)


def test_a_mean_of_one_sample_is_that_sample():
    sample = Sample(2.0, Work(1.0, 3.0))
    assert mean_sample([sample], [0.5]) is sample


def test_a_mean_has_processor_time_if_all_its_samples_have():
    one, two = Sample(1.0, Work(1.0, 2.0)), Sample(4.0, Work(4.0, 8.0))
    mean = mean_sample([one, two], [1.0, 1.0])
    assert mean.seconds == pytest.approx(2.0)
    assert mean.work is not None
    assert (mean.work.busiest, mean.work.total) == pytest.approx((2.0, 4.0))
    assert mean.cases == (one, two)
    assert mean_sample([one, Sample(4.0)], [1.0, 1.0]).work is None


def test_the_time_of_a_call_covers_only_its_own_cases():
    cases = [Case(call="a", samples=(1.0,)), Case(call="a", samples=(4.0,)), Case(call="b", samples=(16.0,))]
    assert seconds_on("a", 4.0, cases) == pytest.approx(2.0)
    assert seconds_on("b", 4.0, cases) == 16.0
    assert seconds_on("a", 4.0, cases[:2]) == 4.0  # the mean itself, of rounds and not of medians
    assert seconds_on("c", 4.0, cases) == 4.0


# --- rounds ---


CASES = [Case(call="k", draw=draw, weight=0.5) for draw in ("few", "many")]


def passes():
    pass


def fails():
    raise ValueError("boom")


def test_every_round_samples_each_candidate_on_each_case():
    found = interleaved([[passes, passes]] * 2, cases=CASES, rounds=4)
    for measurement in found:
        assert len(measurement.samples) == 4
        assert [case.name for case in measurement.cases] == ["few", "many"]
        for mean, *own in zip(measurement.samples, *(case.samples for case in measurement.cases), strict=True):
            if measurement.method != PROCESSOR:
                assert mean == pytest.approx(math.sqrt(own[0] * own[1]))


def test_a_candidate_that_fails_on_one_case_is_out_and_the_error_names_the_case():
    failed = {}
    functions = [[passes, passes], [passes, fails]]
    good, bad = interleaved(functions, cases=CASES, rounds=2, on_error=failed.__setitem__)
    assert len(good.samples) == 2
    assert bad.samples == ()
    assert str(failed[1]) == "on many: ValueError: boom"


# --- draws ---


@SEVERAL
def test_the_winner_is_the_best_over_all_draws_and_not_of_one(times):
    times({1: {"few": 2.0, "many": 2.0}, 2: {"few": 0.5, "many": 6.0}, 3: {"few": 1.5, "many": 1.8}})
    tuned = on_draws(Scaled())
    assert tuned.config == 3
    assert tuned.winner.seconds == pytest.approx(math.sqrt(1.5 * 1.8))
    assert [(case.name, case.median) for case in tuned.winner.cases] == [("few", 1.5), ("many", 1.8)]
    assert tuned.speedup == pytest.approx(2 / math.sqrt(1.5 * 1.8))


@SEVERAL
def test_a_candidate_wrong_on_one_draw_is_out_and_the_reason_names_the_draw(times):
    times({n: {"few": 1.0 / n, "many": 1.0 / n} for n in (1, 2, 3)})
    tuned = on_draws(Scaled(faults={(3, 300): 50.0}))
    assert tuned.config == 2
    status, reason = statuses(tuned)[3]
    assert status == "wrong"
    assert reason.startswith("on many: result 0 differs from the reference")


@SEVERAL
def test_tables_entries_and_logs_have_the_times_of_each_draw(times, tmp_path):
    times({1: {"few": 2.0, "many": 2.0}, 2: {"few": 0.5, "many": 6.0}, 3: {"few": 1.5, "many": 1.8}})
    kernel, store = Scaled(), PersistentCache(tmp_path, shipped=False)
    chain = ConfigSelectorChain(persistent=store)
    inv = Invocation(kernel=kernel, args=(X, SIZE))
    tuned = chain.search(inv, kernel, policy=AutotunePolicy())
    assert "one configuration for 2 draws of inputs, by the geometric mean: few; many" in tuned.summary()
    assert "1500.0 ms | 1800.0 ms" in tuned.summary()
    entry = store.load(inv.key)
    assert entry is not None
    measured = dict(entry.measured or {})
    assert [case["winner_us"] for case in measured["cases"]] == [1.5e6, 1.8e6]
    assert measured["geometric_mean"]["heuristic_us"] == 2e6
    (stored,) = MeasurementStore(store).searches()
    # the log rounds the seconds of the search, which may change their last shown digit
    stored_lines, lines = (re.sub(r" in [\d.]+ s;", ";", each.summary()).splitlines()[2:] for each in (stored, tuned))
    assert stored_lines == lines
    assert dict(stored.record(cfg_type=int).times)[3] == pytest.approx(math.sqrt(1.5 * 1.8), rel=1e-4)
    said = str(explain_call(ConfigSelectorChain(persistent=store), inv, "p"))
    assert "one for few: 1500.0 ms; many: 1800.0 ms; geometric mean" in said


@SEVERAL
@pytest.mark.parametrize(
    ("line", "old", "new", "message"),
    [
        (1, "[2.0]", "[-1]", "line 2: samples must be between"),
        (1, '"weight":0.5', '"weight":0', "line 2: weights of cases must be between 0 and 1"),
        (2, '"draw":"few"', '"draw":"some"', "line 3: its cases are not those of the other lines"),
    ],
)
def test_a_log_with_inconsistent_cases_is_unusable(times, tmp_path, line, old, new, message):
    times({n: {"few": 2.0, "many": 2.0} for n in (1, 2, 3)})
    kernel, chain = Scaled(), ConfigSelectorChain(persistent=PersistentCache(tmp_path, shipped=False))
    chain.search(Invocation(kernel=kernel, args=(X, SIZE)), kernel, policy=AutotunePolicy())
    (file,) = tmp_path.rglob("*.jsonl")
    lines = lines_of(file.read_bytes())
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new, 1)
    with pytest.raises(UnusableError, match=message):
        load(lines)


def test_a_search_on_one_set_of_inputs_has_no_cases_in_its_files(times, tmp_path):
    times({2: 1.0, 4: 2.0, 8: 3.0})
    kernel, chain = Plain("plain"), ConfigSelectorChain(persistent=PersistentCache(tmp_path, shipped=False))
    (inv,) = of_length(16, kernel=kernel)
    chain.search(inv, kernel, policy=AutotunePolicy())
    assert all("cases" not in file.read_text() for file in tmp_path.rglob("*.json*"))


def test_arrays_that_draws_share_are_there_once():
    inv = Invocation(kernel=Scaled(), args=(X, SIZE))
    sets = inputs_of(inv)
    assert list(sets) == ["few", "many"]
    assert sets["few"][0] is sets["many"][0]
    assert [int(arrays[1][0]) for arrays in sets.values()] == [3, 300]


def test_draws_of_a_batch_are_stacked_by_name_and_unbatched_arguments_are_shared():
    kernel = Scaled()
    inv = Invocation(kernel=kernel, args=(X, SIZE), batch_axes=((0, None),), batch_sizes=(2,))
    sets = inputs_of(inv)
    assert [arrays[0].shape for arrays in sets.values()] == [(2, 16), (2, 16)]
    assert [int(arrays[1][0]) for arrays in sets.values()] == [3, 300]


def test_draws_of_containers_that_make_their_arrays_stay_apart():
    made = []  # by flattening; the id of a collected array may be that of another draw's

    class Packed:
        def __init__(self, size):
            self.size = size

    def flattened(packed):
        assert all(array() is not None for array in made)
        array = np.full(1, packed.size, np.int32)
        made.append(weakref.ref(array))
        return (array,), None

    jax.tree_util.register_pytree_node(Packed, flattened, lambda _, children: children)

    class Containers(Scaled):
        def example_draws(self, inv, rng):
            x = np.ones(inv.args[0].shape, np.float32)
            return {str(size): ((x, Packed(size)), {}) for size in range(20)}

    sets = inputs_of(Invocation(kernel=Containers(), args=(X, SIZE)))
    assert {name: int(size[0]) for name, (_, size) in sets.items()} == {str(size): size for size in range(20)}
    assert len({id(x) for x, _ in sets.values()}) == 1  # all draws share one host array


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, r"example_draws must return \(args, kwargs\) by name, got \{\}"),
        ([()], r"example_draws must return \(args, kwargs\) by name"),
        ({"a": 1}, r"example_draws: 'a' must return \(args, kwargs\), such as .*, got 1"),
        ({"a": ((np.ones(3, np.float32), np.ones(1, np.int32)), {})}, r"example_draws: 'a' must be arrays of types"),
    ],
)
def test_an_invalid_draw_is_an_error(answer, message):
    class Misfit(Scaled):
        def example_draws(self, inv, rng):
            return answer

    with pytest.raises(KernelError, match=message):
        inputs_of(Invocation(kernel=Misfit(), args=(X, SIZE)))


# --- several calls ---

SHORT, LONG = "f32[16]", "f32[48]"


@SEVERAL
@pytest.mark.parametrize(("weights", "winner"), [((1, 1), 8), ((10, 1), 2), ((1, 10), 8)])
def test_the_winner_is_the_best_over_all_calls_by_their_weights(times, weights, winner):
    times({4: {SHORT: 2.0, LONG: 2.0}, 2: {SHORT: 1.0, LONG: 3.0}, 8: {SHORT: 1.7, LONG: 1.0}})
    assert together(Plain("plain"), (16, 48), weights).config == winner


@SEVERAL
def test_a_configuration_unsupported_by_one_call_is_refused_with_the_reason(times):
    times({n: {SHORT: 1.0, LONG: 1.0} for n in (2, 4, 8, 3)})
    tuned = together(Plain("plain"), (16, 48))
    assert statuses(tuned)[3] == ("failed", "is not in config_space of f32[16]")


@SEVERAL
def test_why_not_overrides_the_spaces(times):
    class Choosy(Plain):
        def why_not(self, inv, config):
            return "it is odd." if config == 3 and inv.args[0].shape[0] == 48 else ""

        def config_space(self, inv):
            return [2, 4, 8, 3] if inv.args[0].shape[0] == 16 else [4]

    times({n: {SHORT: 1.0 / n, LONG: 1.0 / n} for n in (2, 4, 8, 3)})
    tuned = together(Choosy("choosy"), (16, 48))
    assert tuned.config == 8
    assert statuses(tuned)[3] == ("failed", "does not run for f32[48]: it is odd.")


@SEVERAL
def test_a_search_of_a_large_space_learns_of_refused_proposals():
    class Large(Plain):
        def heuristic_cfg(self, inv):
            return {"tile": 1}

        def run(self, x, *, cfg):
            return told_apart(x + x, cfg["tile"])

        def config_space(self, inv):
            return ConfigSpace(
                {"tile": range(1, 41)}, constraints=lambda tile: inv.args[0].shape[0] % tile == 0 or tile > 24
            )

        def why_not(self, inv, config):
            return "too large" if config["tile"] > 30 else ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "interleaved", interleaved_with(lambda config, case: 100.0 - config["tile"]))
        tuned = together(Large("large"), (16, 48), policy=AutotunePolicy(max_candidates=24))
    refused = {o.config["tile"] for o in tuned.outcomes if o.status == "failed"}
    assert refused <= set(range(31, 41))
    assert tuned.config["tile"] <= 30


def test_no_configuration_for_all_calls_is_an_error_with_the_reason():
    class Apart(Plain):
        def heuristic_cfg(self, inv):
            return 2 if inv.args[0].shape[0] == 16 else 3

        def why_not(self, inv, config):
            return "it is another's." if config != self.heuristic_cfg(inv) else ""

        def config_space(self, inv):
            return [self.heuristic_cfg(inv)]

    message = r"none of 2 configurations runs for all of 2 calls; the first, 2, does not run for f32\[48\]: it is"
    with pytest.raises(TuningError, match=message):
        together(Apart("apart"), (16, 48))


@SEVERAL
def test_the_configuration_is_saved_for_every_call_with_all_calls_it_was_chosen_for(times, tmp_path):
    times({4: {SHORT: 2.0, LONG: 2.0}, 2: {SHORT: 1.0, LONG: 3.0}, 8: {SHORT: 2.5, LONG: 1.0}})
    kernel, store = Plain("plain"), PersistentCache(tmp_path, shipped=False)
    chain = ConfigSelectorChain(persistent=store)
    calls = of_length(16, 48, kernel=kernel)
    sets = [[SharedCall(inv=inv, weight=weight) for inv, weight in zip(calls, (1.0, 3.0), strict=True)]]
    result = tune_together(chain, sets)
    assert [(entry.call_key, entry.cfg) for entry in result.entries] == [(inv.call_key, 8) for inv in calls]
    assert [search.speedup for search in result.searches] == pytest.approx([2 / 2.5, 2 / 1.0])
    fresh = ConfigSelectorChain(persistent=store)
    for inv, own in zip(calls, (2.5e6, 1e6), strict=True):
        assert fresh.resolve(inv, kernel).source == "persistent"
        entry = store.load(inv.key)
        assert entry is not None
        measured = dict(entry.measured or {})
        assert measured["winner"]["median_us"] == own
        assert [(case["arguments"], case["weight"]) for case in measured["cases"]] == [(SHORT, 0.25), (LONG, 0.75)]
        assert entry.provenance["device"] == inv.key.device
    records = {s.key.call: dict(s.record(cfg_type=int).times) for s in MeasurementStore(store).searches()}
    assert [records[inv.call_key][8] for inv in calls] == pytest.approx([2.5, 1.0])


@SEVERAL
def test_a_worker_process_tunes_several_calls_and_returns_each_time():
    kernel = Plain("plain")
    tuned = together(kernel, (16, 48), policy=AutotunePolicy(isolate=True, validate=False))
    assert [inv.call_key for inv in tuned.calls] == [inv.call_key for inv in of_length(16, 48, kernel=kernel)]
    assert [case.arguments for case in tuned.cases] == [SHORT, LONG]
    assert all(case.median for case in tuned.winner.cases)
