# SPDX-License-Identifier: Apache-2.0
"""Tuning apart from running: lowered programs, recorded calls and functions; and the configurations of the next run."""

from __future__ import annotations

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests import forked
from tests.ops.found import found as searched

from ejkernel import ops
from ejkernel.ops import (
    AutotunePolicy,
    Autotuner,
    ConfigKey,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    policy_override,
)
from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.autotuner.trials.events import CandidateFinished, SearchStarted, emit
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.config.entries import space_digest
from ejkernel.ops.errors import ArgumentError, OfflineWarning, TuningError, TuningWarning
from ejkernel.ops.execution.discovery import discover
from ejkernel.ops.execution.offline import tune_invocations, tune_together
from ejkernel.ops.registry import clear_invocations, get_invocations, record_invocation, recording

X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Square(Kernel[int, jax.Array]):
    def run(self, x, *, cfg):
        return x * x

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return [1, 2]


class Cube(Square):
    def run(self, x, *, cfg):
        return x * x * x


class FakeTuner:
    """Finds 7 for every call, and records the calls; for operations in `fails` it raises."""

    def __init__(self, fails=()):
        self.fails, self.asked = fails, []

    def tune(self, inv, kernel, **options):
        self.asked.append(inv)
        if inv.op_id in self.fails:
            raise TuningError(f"{inv.op_id}: nothing compiles")
        emit(SearchStarted(inv.key, 1, 7))
        emit(CandidateFinished(inv.key, Outcome(config=7, status="ready")))
        return searched(inv, 7)


@pytest.fixture
def kernel():
    return Square()


@pytest.fixture
def chain(tmp_path):
    return ConfigSelectorChain(persistent=PersistentCache(tmp_path / "mine", shipped=False), tuner=FakeTuner())


def loss_of(executor, *kernels):
    def loss(x):
        for kernel in kernels:
            x = executor(kernel, x)
        return x.sum()

    return loss


def asked(chain):
    return [inv.op_id for inv in chain.tuner.asked]


# --- lowered programs ---


def test_forward_and_backward_of_a_program_are_tuned(chain, executor, kernel):
    with recording():
        lowered = jax.jit(jax.value_and_grad(loss_of(executor, kernel))).lower(X)
    result = ops.autotune_lowered(chain, lowered)
    assert [(entry.op_id_v, entry.cfg) for entry in result.entries] == [("Square@v0", 7), ("Square.bwd@v0", 7)]


def test_forwards_are_tuned_before_their_backward_calls(chain, executor, kernel):
    with recording():
        lowered = jax.jit(jax.value_and_grad(loss_of(executor, kernel, Cube()))).lower(X)
    ops.autotune_lowered(chain, lowered)
    assert asked(chain) == ["Square", "Cube", "Cube.bwd", "Square.bwd"]


def test_equal_calls_are_tuned_once(chain, executor, kernel):
    with recording():
        lowered = jax.jit(lambda x: executor(kernel, x) + executor(kernel, x + 1)).lower(X)
    ops.autotune_lowered(chain, lowered)
    assert asked(chain) == ["Square"]


def test_the_text_of_a_program_is_enough(chain, executor, kernel):
    with recording():
        text = jax.jit(loss_of(executor, kernel)).lower(X).as_text()
    assert len(ops.autotune_lowered(chain, text)) == 1


def test_labels_under_another_prefix_are_found(chain, kernel):
    with recording():
        lowered = jax.jit(loss_of(Executor(chain, stamp_prefix="mine"), kernel)).lower(X)
    assert len(ops.autotune_lowered(chain, lowered)) == 1


def test_unrecorded_calls_are_a_warning_that_explains_recording(chain, executor, kernel):
    lowered = jax.jit(loss_of(executor, kernel)).lower(X)
    (label,) = ops.find_labels_in_lowered(lowered)
    text = (
        rf"1 of 1 labelled calls were not recorded, so they are not tuned \({label}\); "
        ".* EJKERNEL_OPS_RECORD=1 or inside"
    )
    with pytest.warns(OfflineWarning, match=text):
        assert len(ops.autotune_lowered(chain, lowered)) == 0


def test_calls_recorded_for_another_platform_are_a_warning_with_its_name(chain, executor, kernel):
    with recording():
        lowered = jax.jit(loss_of(executor, kernel)).trace(X).lower(lowering_platforms=("tpu",))
    text = r"1 of 1 labelled calls were not recorded for cpu:.*, only for tpu:unknown, so they are not tuned"
    with pytest.warns(OfflineWarning, match=text):
        assert len(ops.autotune_lowered(chain, lowered)) == 0


def test_recorded_calls_are_tuned_even_if_others_were_not_recorded(chain, executor, kernel):
    lowered = jax.jit(loss_of(executor, kernel, Cube())).lower(X)
    record_invocation(kernel, Invocation(kernel=kernel, args=(X,)))
    with pytest.warns(OfflineWarning, match="1 of 2 labelled calls were not recorded"):
        ops.autotune_lowered(chain, lowered)
    assert asked(chain) == ["Square"]


def test_a_warning_names_three_labels_at_most(chain, executor, kernel):
    calls = [np.ones(size, np.float32) for size in range(1, 6)]
    lowered = jax.jit(lambda xs: [executor(kernel, x) for x in xs]).lower(calls)
    with pytest.warns(OfflineWarning, match=r"5 of 5 labelled calls .*, \.\.\.\)") as caught:
        ops.autotune_lowered(chain, lowered)
    assert str(caught[0].message).count("ejkernel_ops#") == 3


def test_a_warning_points_at_the_caller(chain, executor, kernel):
    lowered = jax.jit(loss_of(executor, kernel)).lower(X)
    with pytest.warns(OfflineWarning) as caught:
        ops.autotune_lowered(chain, lowered)
    assert caught[0].filename == __file__


def test_a_program_without_calls_has_an_empty_result(chain):
    assert len(ops.autotune_lowered(chain, jax.jit(jnp.sin).lower(X))) == 0


def test_a_decorated_function_is_no_call_to_tune(chain):
    lowered = jax.jit(ops.label("my_function")(jnp.sin)).lower(X)
    assert len(ops.autotune_lowered(chain, lowered)) == 0


def test_a_label_in_a_text_names_only_calls_recorded_here(chain):
    text = '"ejkernel_ops#os.system@v0:0123456789abcdef" = 1'
    with pytest.warns(OfflineWarning, match="1 of 1"):
        assert len(ops.autotune_lowered(chain, text)) == 0


def test_results_are_kept_in_memory_and_written(chain, executor, kernel):
    with recording():
        lowered = jax.jit(loss_of(executor, kernel)).lower(X)
    ops.autotune_lowered(chain, lowered)
    key = Invocation(kernel=kernel, args=(X,)).key
    stored = chain.persistent.load(key)
    assert (chain.cache.remembered(key).source, stored.config) == ("autotune", 7)
    space = space_digest(kernel, Invocation(kernel=kernel, args=(X,)))
    assert (stored.measured["candidates"], stored.measured["space"]) == (1, space)


def test_results_are_not_written_without_persistence(chain, executor, kernel):
    chain.persist_autotune = False
    with recording():
        lowered = jax.jit(loss_of(executor, kernel)).lower(X)
    ops.autotune_lowered(chain, lowered)
    assert chain.persistent.keys() == []


def test_a_call_that_cannot_be_tuned_is_a_warning_and_has_no_entry(chain, executor, kernel):
    chain.tuner = FakeTuner(fails=("Square",))
    with recording():
        lowered = jax.jit(loss_of(executor, kernel, Cube())).lower(X)
    with pytest.warns(TuningWarning, match="Square: nothing compiles"):
        result = ops.autotune_lowered(chain, lowered)
    assert [entry.op_id_v for entry in result.entries] == ["Cube@v0"]


def test_the_result_applies_to_compiled_functions(executor, chain):
    class Telling(Square):
        """A result tells its configuration."""

        def run(self, x, *, cfg):
            return x * cfg

    function = jax.jit(loss_of(executor, Telling()))
    before = function(X)
    with recording():
        lowered = function.lower(X)
    result = ops.autotune_lowered(chain, lowered)
    with result:
        inside = function(X)
    assert (before, inside, function(X)) == (X.sum(), 7 * X.sum(), X.sum())


def test_a_search_that_saves_nothing_gives_the_configuration_saved_before(tmp_path, kernel):
    chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path / "mine", shipped=False))
    calls = [Invocation(kernel=kernel, args=(X,)), Invocation(kernel=Cube(), args=(X,))]
    chain.persistent.put(calls[0].key, 2)
    with policy_override(chain, budget_s=1e-6):
        result = tune_invocations(chain, calls)
    assert [search.not_saved[:12] for search in result.searches] == ["not finished"] * 2
    assert [(entry.call_key, entry.cfg) for entry in result.entries] == [(calls[0].call_key, 2)]
    assert "not finished (1 of 2)" in str(result)
    assert ops.AutotuningResult.loads(result.dumps()) == result


# --- recorded calls ---


def test_all_recorded_calls_are_tuned(chain, executor, kernel):
    with recording():
        executor(kernel, X)
        executor(Cube(), X)
    assert [entry.op_id_v for entry in ops.autotune_recorded(selector=chain).entries] == ["Square@v0", "Cube@v0"]


@pytest.mark.parametrize("part", [lambda found: found, lambda found: found[ops.device_fingerprint()]])
def test_invocations_may_be_those_of_all_devices_or_of_this(chain, executor, kernel, part):
    with recording():
        executor(kernel, X)
    found = part(get_invocations())
    clear_invocations()
    assert len(ops.autotune_recorded(found, chain)) == 1


def test_invocations_may_be_plain_tuples(chain, kernel):
    inv = Invocation(kernel=kernel, args=(X,))
    found = {ops.device_fingerprint(): {inv.op_id_v: {inv.call_key: (kernel, (X,), {})}}}
    assert [entry.call_key for entry in ops.autotune_recorded(found, chain).entries] == [inv.call_key]


def test_invocations_of_other_devices_are_a_warning(chain):
    with pytest.warns(OfflineWarning, match=r"no calls were recorded on 'cpu:.*', only on gpu:other; nothing is tuned"):
        assert len(ops.autotune_recorded({"gpu:other": {}}, chain)) == 0


def test_nothing_recorded_gives_an_empty_result(chain):
    assert len(ops.autotune_recorded(selector=chain)) == 0


def test_the_default_executors_chain_is_tuned_if_none_is_given(chain, executor, kernel):
    ops.set_default_executor(executor)
    with recording():
        kernel(X)
    ops.autotune_recorded()
    assert chain.cache.get(Invocation(kernel=kernel, args=(X,)).key) == 7


def test_a_function_without_calls_is_a_warning():
    with pytest.warns(OfflineWarning, match="made no call of an operation; there is nothing to tune"):
        assert ops.autotune(jnp.sin, jnp.ones(3)).entries == ()


def test_mistakes_in_a_call_of_autotune_are_named():
    step, x = lambda x: x, jnp.ones((2, 3))
    with pytest.raises(
        ArgumentError, match=r"the first argument must be .* autotune\(step, w, x\), got an array float32\[2, 3\]\."
    ):
        ops.autotune(step(x))
    for target in (step, Square("square")):
        with pytest.raises(
            ops.CallError, match=r"has no argument `budget`: limit the time of tuning with `with policy_override\(bud"
        ):
            ops.autotune(target, x, budget=5)


def test_only_a_chain_can_be_tuned():
    class Always:
        def choose(self, inv, kernel):
            return 1

    ops.set_default_executor(Executor(Always()))
    with pytest.raises(ArgumentError, match="selector must be a ConfigSelectorChain or an executor with one"):
        ops.autotune_recorded()


# --- functions ---


def test_a_functions_calls_are_discovered_without_running_it(kernel):
    found = discover(
        jax.value_and_grad(loss_of(ops.default_executor(), kernel)), jax.ShapeDtypeStruct((2, 3), "float32")
    )
    assert [inv.op_id for inv in found] == ["Square", "Square.bwd"]


def test_a_jitted_function_is_discovered_directly(kernel):
    function = jax.jit(lambda x, power: kernel(x) ** power, static_argnums=1)
    assert [inv.op_id for inv in discover(function, X, 2)] == ["Square"]


def test_a_function_may_return_what_jax_cannot(kernel):
    for packed in (lambda y: ("text", y, print), lambda y: {"y": types.SimpleNamespace(y=y), "none": None}):
        assert len(discover(lambda x, packed=packed: packed(kernel(x)), X)) == 1


def test_a_function_that_ran_before_is_discovered(kernel):
    function = jax.jit(loss_of(ops.default_executor(), kernel))
    function(X)
    assert len(discover(function, X)) == 1


def test_batched_calls_are_discovered_as_they_are(kernel):
    (found,) = discover(jax.vmap(loss_of(ops.default_executor(), kernel)), X)
    assert (found.args[0].shape, found.batch_sizes) == ((3,), (2,))


def test_autotune_tunes_every_kernel_of_a_function(chain, executor, kernel):
    ops.set_default_executor(executor)
    result = ops.autotune(jax.value_and_grad(loss_of(executor, kernel, Cube())), X)
    assert {entry.op_id_v for entry in result.entries} == {"Square@v0", "Square.bwd@v0", "Cube@v0", "Cube.bwd@v0"}
    assert len(chain.persistent.keys()) == 4


def test_a_functions_arguments_may_have_the_names_of_our_own(chain, executor, kernel):
    """Labels of a loss are often called `target`."""
    ops.set_default_executor(executor)

    def loss(x, *, target, fn=0):
        return jnp.sum(kernel(x) - target) + fn

    assert len(ops.autotune(loss, X, target=X).entries) == 1
    assert len(executor.explain(loss, X, target=X)) == len(discover(loss, X, target=X, fn=1)) == 1
    assert ops.benchmark(loss, X, target=X, fn=1, num_iters=1) > 0


def test_candidates_are_only_for_kernels():
    with pytest.raises(ArgumentError, match="configs= needs a Kernel; the kernels in a function have their own"):
        ops.autotune(jnp.sin, X, configs=[1])


@pytest.mark.parametrize("options", [{"num_iters": 0}, {"num_warmup": -1}])
def test_autotune_needs_a_positive_number_of_samples(kernel, options):
    with pytest.raises(ArgumentError, match="num_iters must be positive and num_warmup >= 0, got"):
        ops.autotune(kernel, X, **options)


def test_autotune_of_a_kernel_measures_the_given_candidates(kernel, monkeypatch):
    seen = {}

    class Watched(Autotuner):
        def tune(self, inv, kernel, *, candidates, **options):
            seen.update(rounds=self.rounds, warmup=self.warmup, candidates=candidates, args=inv.args)
            return super().tune(inv, kernel, candidates=candidates, **options)

    monkeypatch.setattr("ejkernel.ops.execution.offline.Autotuner", Watched)
    assert ops.autotune(kernel, X, configs=[5], num_warmup=1, num_iters=2) in (1, 5)
    assert (seen["rounds"], seen["warmup"], seen["candidates"], seen["args"][0] is X) == (2, 1, [5], True)


def test_a_tuner_that_returns_something_else_is_an_error(chain, executor, kernel):
    class Bare(Autotuner):
        def tune(self, inv, kernel, **options):
            return super().tune(inv, kernel, **options).config

    chain.tuner = Bare(rounds=1)
    with pytest.raises(TuningError, match=r"Bare\.tune returned int; it must be AutotuneData"):
        chain.search(Invocation(kernel=kernel, args=(X,)), kernel)


def test_autotune_of_a_kernel_prepares_its_arguments(chain, executor):
    class Prepared(Square):
        def prepare(self, x, *, flat=False):
            return (x.reshape(-1) if flat else x,), {}

    kernel = Prepared()
    ops.set_default_executor(executor)
    ops.autotune(kernel, X, flat=True, num_iters=1)
    assert chain.persistent.keys() == [Invocation(kernel=kernel, args=(X.reshape(-1),)).key]


def test_autotune_of_a_kernel_keeps_its_result(chain, executor, kernel):
    ops.set_default_executor(executor)
    best = ops.autotune(kernel, X, num_iters=1)
    key = Invocation(kernel=kernel, args=(X,)).key
    assert (chain.cache.get(key), chain.persistent.get(key)) == (best, best)


# --- reports ---


def test_progress_is_reported_by_call_and_a_failed_search_is_a_warning(chain, kernel):
    chain.tuner, steps = FakeTuner(fails=("Cube",)), []
    calls = [Invocation(kernel=kernel, args=(X,)), Invocation(kernel=Cube(), args=(X,))]
    with pytest.warns(TuningWarning, match="Cube"):
        tune_together(
            chain,
            [[SharedCall(inv=inv)] for inv in calls],
            progress=lambda inv, done, total: steps.append((inv.op_id, done, total)),
        )
    assert steps == [("Square", 0, 1), ("Square", 1, 1)]


def test_configurations_without_a_data_form_fail_their_call_alone(chain, kernel):
    class Functions(Square):
        def heuristic_cfg(self, inv):
            return jnp.sin

        def config_space(self, inv):
            return [jnp.sin, jnp.cos]

    chain.tuner = Autotuner(rounds=1)
    calls = [Invocation(kernel=Functions(), args=(X,)), Invocation(kernel=kernel, args=(X,))]
    with pytest.warns(TuningWarning, match="Functions: configurations must be plain data, got <"):
        result = tune_together(chain, [[SharedCall(inv=inv)] for inv in calls])
    assert [search.inv.op_id for search in result.searches] == ["Square"]


def test_a_result_keeps_its_searches(chain, kernel):
    chain.tuner = Autotuner(rounds=1)
    result = tune_invocations(chain, [Invocation(kernel=kernel, args=(X,))])
    assert [len(search.outcomes) for search in result.searches] == [2]


def test_the_policy_in_force_holds_for_the_searches(kernel):
    seen = []

    class Watched(FakeTuner):
        def tune(self, inv, kernel, *, policy, **options):
            seen.append((policy.budget_s, policy.validate))
            return super().tune(inv, kernel)

    chain = ConfigSelectorChain(policy=AutotunePolicy(budget_s=5.0), tuner=Watched())
    with policy_override(validate=False):
        tune_invocations(chain, [Invocation(kernel=kernel, args=(X,))])
    assert seen == [(5.0, False)]


# --- the next process ---

PROGRAM = """
import json, sys
import jax, numpy as np
from tests import forked

from ejkernel import ops

class Telling(ops.Kernel[int, jax.Array]):
    def run(self, x, *, cfg):
        return x * cfg

    def heuristic_cfg(self, inv):
        return 1

class NoTuner:
    def tune(self, *args, **kwargs):
        raise AssertionError("tuned again")

kernel, x = Telling(), np.ones((2, 3), np.float32)
ops.default_executor().chooser.tuner = NoTuner()
value = float(jax.jit(lambda x: kernel(x))(x)[0, 0])
inv = ops.Invocation(kernel=kernel, args=(x,))
print(json.dumps([value, ops.default_executor().explain(kernel, x).source, *inv.key]))
"""


@pytest.mark.slow
def test_the_next_process_starts_tuned_and_tunes_nothing(tmp_path):
    inv = Invocation(op_id="Telling", args=(np.ones((2, 3), np.float32),))
    PersistentCache(tmp_path).put(inv.key, 7)
    done = forked.python(tmp_path, "-c", PROGRAM, EJKERNEL_CACHE_DIR=str(tmp_path), EJKERNEL_AUTOTUNE="1")
    assert done.returncode == 0, done.stderr
    value, source, *key = json.loads(done.stdout)
    assert (value, source, ConfigKey(*key)) == (7.0, "persistent", inv.key)


# --- the result of tuning a kernel ---


def test_a_kernels_tuning_gives_its_configuration_or_a_result_that_prints_and_takes_effect(monkeypatch):
    kernel = Square("square_with_a_result")
    result = ops.autotune_kernel(kernel, X, num_iters=2, num_warmup=0)
    assert isinstance(result, ops.AutotuningResult)
    assert [entry.op_id_v for entry in result.entries] == ["square_with_a_result@v0"]
    assert "square_with_a_result@v0" in str(result)
    folder = ops.default_executor().chooser.persistent.path
    assert str(result).startswith(f"1 configuration for {result.device}, saved in {folder}\n")
    assert str(result | ops.AutotuningResult.loads(result.dumps())).startswith(f"1 configuration for {result.device}\n")
    with result:
        assert ops.default_executor().explain(kernel, X).source == "overlay"
    monkeypatch.setattr("ejkernel.ops.execution.offline.autotune_kernel", lambda *args, **kwargs: result)
    assert ops.autotune(kernel, X) == result.entries[0].cfg


def test_only_a_kernel_is_tuned_as_one():
    with pytest.raises(ArgumentError, match=r"kernel must be a Kernel .*FlashAttention.*got"):
        ops.autotune_kernel(jnp.sin, X)
