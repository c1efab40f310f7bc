# SPDX-License-Identifier: Apache-2.0
"""The order of the tiers, the source of an answer, and the answers kept in memory."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import threading
import time
import warnings
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.found import found

from ejkernel.ops.config.cache import ConfigCache, overlay_cache
from ejkernel.ops.config.entries import space_digest
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy, policy_override
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.errors import (
    ConfigError,
    NoConfigError,
    TuningError,
    TuningWarning,
    UnstableKeyWarning,
)
from ejkernel.ops.execution.executor import Executor
from ejkernel.ops.registry import recording

X = np.ones(4, np.float32)
# The answer of each tier, in the order of lookup.
ANSWERS = {"override": 10, "overlay": 20, "memory": 30, "persistent": 40, "autotune": 50, "heuristic": 60}


class Double(Kernel[int, jax.Array]):
    def run(self, x, *, cfg, note=None):
        return x + x

    def heuristic_cfg(self, inv):
        return ANSWERS["heuristic"]


class Bare(Kernel[int, jax.Array]):
    def run(self, x, *, cfg):
        return x + x


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int = 1


class FakeTuner:
    """Returns a given configuration, and counts its calls."""

    def __init__(self, config=ANSWERS["autotune"], error=None):
        self.config, self.error, self.calls = config, error, []

    def tune(self, inv, kernel, **options):
        self.calls.append(inv.key)
        if self.error is not None:
            raise self.error
        return found(inv, self.config)


@pytest.fixture
def kernel():
    return Double()


@pytest.fixture
def disk(tmp_path):
    return PersistentCache(tmp_path / "configs", shipped=False)


@pytest.fixture
def inv(kernel):
    return Invocation(kernel=kernel, args=(X,))


@pytest.fixture
def tuner():
    return FakeTuner()


def resolved(chain, inv):
    found = chain.resolve(inv, inv.kernel)
    return found.config, found.source


# --- order ---


@given(st.sets(st.sampled_from(list(ANSWERS)), min_size=1))
def test_the_first_tier_that_has_an_answer_gives_it_and_is_named(tiers):
    kernel = Double() if "heuristic" in tiers else Bare("Double")
    inv = Invocation(kernel=kernel, args=(X,), override_cfg=ANSWERS["override"] if "override" in tiers else None)
    with tempfile.TemporaryDirectory() as folder:
        disk = PersistentCache(folder, shipped=False)
        chain = ConfigSelectorChain(persistent=disk, autotune="autotune" in tiers, tuner=FakeTuner())
        if "memory" in tiers:
            chain.cache.put(inv.key, ANSWERS["memory"])
        if "persistent" in tiers:
            disk.put(inv.key, ANSWERS["persistent"])
        first = next(tier for tier in ANSWERS if tier in tiers)
        with overlay_cache({inv.key: ANSWERS["overlay"]} if "overlay" in tiers else {}):
            found = chain.resolve(inv, kernel)
    assert (found.config, found.source, found.key) == (ANSWERS[first], first, inv.key)


def test_choosing_is_resolving(kernel, inv):
    assert ConfigSelectorChain().choose(inv, kernel) == ANSWERS["heuristic"]


def test_no_answer_is_an_error_with_the_folders_that_were_searched(tmp_path):
    (tmp_path / "layer").mkdir()
    persistent = PersistentCache(tmp_path / "own", layers=[tmp_path / "layer"])
    with pytest.raises(NoConfigError) as error:
        ConfigSelectorChain(persistent=persistent).resolve(Invocation(kernel=Bare(), args=(X,)), Bare())
    assert f"memory, persistent ({tmp_path / 'own'}, {tmp_path / 'layer'}), shipped, sister" in str(error.value)


def test_no_answer_is_an_error_with_the_tiers_and_the_fix():
    kernel = Bare()
    inv = Invocation(kernel=kernel, args=(X,))
    call = f"No configuration for 'Bare' (f32[4], key {inv.key.call} on {inv.key.device})"
    tiers = "override, overlay, memory, persistent, shipped, sister"
    with pytest.raises(NoConfigError) as error:
        ConfigSelectorChain().resolve(inv, kernel)
    example = "give the kernel a heuristic_cfg, e.g. `def heuristic_cfg(self, inv): return MyConfig(...)`"
    missing = "The kernel has no heuristic_cfg, and no config_space with a configuration for this call"
    advice = f"{missing}: {example}, or pass cfg=..."
    assert str(error.value) == f"{call}.\n  {advice}\n  Tried: {tiers}, heuristic."
    with pytest.raises(NoConfigError) as error:
        ConfigSelectorChain(policy=AutotunePolicy(heuristic=False)).resolve(inv, kernel)
    assert advice not in str(error.value)
    assert "unset EJKERNEL_ON_MISS, or use AutotunePolicy(heuristic=True)" in str(error.value)


def test_without_the_heuristic_a_miss_is_an_error(inv, kernel):
    with pytest.raises(NoConfigError):
        ConfigSelectorChain(policy=AutotunePolicy(heuristic=False)).resolve(inv, kernel)


def test_without_the_heuristic_a_hit_is_an_answer(inv):
    chain = ConfigSelectorChain(policy=AutotunePolicy(heuristic=False))
    chain.cache.put(inv.key, 1)
    assert resolved(chain, inv) == (1, "memory")


def test_autotune_is_short_for_a_policy():
    chain = ConfigSelectorChain(autotune=True, policy=AutotunePolicy(budget_s=1.0))
    assert chain.policy == AutotunePolicy(autotune=True, budget_s=1.0)


@pytest.mark.parametrize("tier", ["override", "overlay", "memory", "persistent"])
def test_nothing_is_tuned_where_an_earlier_tier_answers(kernel, tuner, tier, disk):
    inv = Invocation(kernel=kernel, args=(X,), override_cfg=1 if tier == "override" else None)
    chain = ConfigSelectorChain(persistent=disk, autotune=True, tuner=tuner)
    if tier == "memory":
        chain.cache.put(inv.key, 1)
    if tier == "persistent":
        chain.persistent.put(inv.key, 1)
    with overlay_cache({inv.key: 1} if tier == "overlay" else {}):
        chain.resolve(inv, kernel)
    assert tuner.calls == []


# --- memory ---


def test_a_remembered_answer_keeps_its_source(inv, tuner):
    chain = ConfigSelectorChain(autotune=True, tuner=tuner)
    assert [resolved(chain, inv)[1], resolved(chain, inv)[1]] == ["autotune", "autotune"]


def test_a_call_is_tuned_once(inv, tuner):
    chain = ConfigSelectorChain(autotune=True, tuner=tuner)
    for _ in range(3):
        resolved(chain, inv)
    assert tuner.calls == [inv.key]


def test_disk_entries_are_read_once(inv, disk):
    chain = ConfigSelectorChain(persistent=disk)
    chain.persistent.put(inv.key, 1)
    first = resolved(chain, inv)
    shutil.rmtree(disk.path)
    assert [first, resolved(chain, inv)] == [(1, "persistent")] * 2


def test_a_remembered_heuristic_is_shown_by_the_cache(inv):
    chain = ConfigSelectorChain()
    resolved(chain, inv)
    assert (chain.cache.get(inv.key), chain.cache.remembered(inv.key).source) == (ANSWERS["heuristic"], "heuristic")


def test_a_heuristic_in_memory_does_not_hide_later_disk_entries(inv, disk):
    chain = ConfigSelectorChain(persistent=disk)
    before = resolved(chain, inv)
    chain.persistent.put(inv.key, 1)
    assert (before[1], resolved(chain, inv)) == ("heuristic", (1, "persistent"))


def test_a_remembered_heuristic_does_not_pre_empt_tuning(inv, tuner):
    chain = ConfigSelectorChain(tuner=tuner)
    before = resolved(chain, inv)
    with policy_override(autotune=True):
        after = resolved(chain, inv)
    assert (before[1], after[1]) == ("heuristic", "autotune")


@pytest.mark.parametrize("source", ["heuristic", "override", "overlay"])
def test_unmeasured_configurations_never_go_to_disk(kernel, source, disk):
    inv = Invocation(kernel=kernel, args=(X,), override_cfg=1 if source == "override" else None)
    chain = ConfigSelectorChain(persistent=disk)
    with overlay_cache({inv.key: 1} if source == "overlay" else {}):
        assert resolved(chain, inv)[1] == source
    assert list(disk.entries()) == []


@pytest.mark.parametrize("source", ["override", "overlay"])
def test_temporary_answers_are_not_kept(kernel, source):
    inv = Invocation(kernel=kernel, args=(X,), override_cfg=1 if source == "override" else None)
    chain = ConfigSelectorChain()
    with overlay_cache({inv.key: 1} if source == "overlay" else {}):
        chain.resolve(inv, kernel)
    assert chain.cache.items() == []


# --- tuning on a miss ---


def test_tuned_configurations_go_to_disk_with_their_measurements(inv, kernel, disk, tuner):
    ConfigSelectorChain(persistent=disk, autotune=True, tuner=tuner).resolve(inv, kernel)
    entry = disk.load(inv.key)
    assert (entry.config, entry.call) == (ANSWERS["autotune"], inv.description)
    assert (entry.measured["candidates"], entry.measured["space"]) == (1, space_digest(kernel, inv))


def test_tuned_configurations_stay_in_memory_without_persistence(inv, tuner, disk):
    chain = ConfigSelectorChain(persistent=disk, autotune=True, tuner=tuner, persist_autotune=False)
    resolved(chain, inv)
    assert (list(disk.entries()), chain.cache.items()) == ([], [(inv.key, ANSWERS["autotune"])])


def test_a_search_that_finds_nothing_is_a_warning_and_the_heuristic(inv):
    chain = ConfigSelectorChain(autotune=True, tuner=FakeTuner(error=TuningError("nothing compiles")))
    with pytest.warns(TuningWarning, match="Double: tuning found no configuration, the heuristic is used: nothing com"):
        assert resolved(chain, inv) == (ANSWERS["heuristic"], "heuristic")


def test_an_error_of_the_tuner_itself_is_not_hidden(inv, kernel):
    chain = ConfigSelectorChain(autotune=True, tuner=FakeTuner(error=ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        chain.resolve(inv, kernel)


def test_the_policy_in_force_reaches_the_tuner(inv, kernel):
    seen = []
    tuner = FakeTuner()
    tune = tuner.tune
    tuner.tune = lambda inv, kernel, *, policy, **more: seen.append(policy) or tune(inv, kernel)
    with policy_override(validate=False):
        ConfigSelectorChain(autotune=True, tuner=tuner).resolve(inv, kernel)
    assert seen == [AutotunePolicy(autotune=True, validate=False)]


def test_a_chain_makes_its_tuner_when_it_is_first_asked_for():
    chain = ConfigSelectorChain()
    assert chain.tuner is chain.tuner


def test_a_chains_tuner_can_be_replaced(tuner):
    chain = ConfigSelectorChain()
    chain.tuner = tuner
    assert chain.tuner is tuner


def test_two_threads_tune_one_call_once(inv, kernel, disk):
    tuner, both_asked = FakeTuner(), threading.Barrier(2, timeout=10)
    chain = ConfigSelectorChain(persistent=disk, autotune=True, tuner=tuner)
    miss, missed = disk.found, []

    def missed_by_both(key, cfg_type=None):
        found = list(miss(key, cfg_type))
        if len(missed) < 2:
            missed.append(key)
            both_asked.wait()  # neither thread may have tuned before both have missed
        return found

    disk.found = missed_by_both
    tune = tuner.tune
    tuner.tune = lambda *call, **options: time.sleep(0.02) or tune(*call, **options)  # the other waits
    found = []
    threads = [threading.Thread(target=lambda: found.append(resolved(chain, inv))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tuner.calls, found) == ([inv.key], [(ANSWERS["autotune"], "autotune")] * 2)


def test_a_tuner_may_resolve_the_call_that_it_tunes(inv, kernel):
    class Nested(FakeTuner):
        def tune(self, inv, kernel, **options):
            with policy_override(autotune=False):
                assert resolved(chain, inv)[1] == "heuristic"
            return super().tune(inv, kernel)

    chain = ConfigSelectorChain(autotune=True, tuner=Nested())
    assert resolved(chain, inv)[1] == "autotune"


# --- consulting ---


def test_consulting_names_every_tier_up_to_the_answer(inv, kernel, disk):
    chain = ConfigSelectorChain(persistent=disk)
    chain.persistent.put(inv.key, 1)
    notes = [(consulted.tier, consulted.note) for consulted in chain.consult(inv, kernel)]
    assert notes == [
        ("override", "no cfg= was given"),
        ("overlay", "none in force"),
        ("memory", "nothing remembered"),
        ("persistent", ""),
    ]


def test_consulting_measures_and_remembers_nothing(inv, kernel, tuner):
    chain = ConfigSelectorChain(autotune=True, tuner=tuner)
    notes = {consulted.tier: consulted.note for consulted in chain.consult(inv, kernel)}
    assert (tuner.calls, chain.cache.items()) == ([], [])
    assert notes["autotune"] == "would measure the candidates"


def test_consulting_says_that_a_heuristic_is_remembered(inv, kernel):
    chain = ConfigSelectorChain()
    chain.resolve(inv, kernel)
    notes = {consulted.tier: consulted.note for consulted in chain.consult(inv, kernel)}
    assert notes["memory"] == "only an unmeasured answer, from heuristic"


def test_consulting_says_how_many_overlays_were_asked(inv, kernel):
    with overlay_cache({}), overlay_cache({inv.key._replace(call="0" * 16): 1}):
        notes = {consulted.tier: consulted.note for consulted in ConfigSelectorChain().consult(inv, kernel)}
    assert notes["overlay"] == "not among the entries of 2 overlays"


# --- calls without a key ---


@pytest.fixture
def unstable(kernel):
    return Invocation(kernel=kernel, args=(X,), kwargs={"note": lambda: 0})


def test_a_call_without_a_key_runs_with_the_heuristic_and_one_warning(unstable, tuner, disk):
    chain = ConfigSelectorChain(persistent=disk, autotune=True, tuner=tuner)
    with pytest.warns(UnstableKeyWarning, match="Double: the call cannot be cached or tuned") as caught:
        found = [chain.resolve(unstable, unstable.kernel) for _ in range(3)]
    assert [(f.config, f.source, f.key) for f in found] == [(ANSWERS["heuristic"], "heuristic", None)] * 3
    said = [warning for warning in caught if issubclass(warning.category, UnstableKeyWarning)]
    assert (len(said), tuner.calls, chain.cache.items()) == (1, [], [])


def test_a_call_without_a_key_takes_an_override_silently(kernel):
    inv = Invocation(kernel=kernel, args=(X,), kwargs={"note": lambda: 0}, override_cfg=1)
    assert resolved(ConfigSelectorChain(), inv) == (1, "override")


def test_a_call_without_a_key_is_warned_of_once_a_program(kernel):
    executor = Executor(ConfigSelectorChain())
    function = lambda x: executor(kernel, x, note=lambda: 0)  # noqa: E731
    with pytest.warns(UnstableKeyWarning) as caught:
        jax.jit(jax.value_and_grad(lambda x: function(x).sum()))(X)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, UnstableKeyWarning)]
    assert [text.partition(":")[0] for text in said] == ["Double", "Double.bwd"]


def test_a_call_without_a_key_sees_no_overlay(unstable):
    with warnings.catch_warnings(), overlay_cache({}):
        warnings.simplefilter("ignore", UnstableKeyWarning)
        assert resolved(ConfigSelectorChain(), unstable)[1] == "heuristic"


# --- derived calls ---


@pytest.fixture
def backward(kernel):
    with recording() as seen:
        jax.jit(jax.grad(lambda x: kernel(x).sum())).lower(X)
    return seen[-1]


def test_a_backward_without_a_configuration_takes_the_measured_one_of_its_forward(kernel, inv, backward):
    chain = ConfigSelectorChain()
    chain.cache.put(inv.key, 7)
    assert resolved(chain, backward) == (7, "forward")


@pytest.mark.parametrize("transform", [jax.jacrev, jax.jacfwd, jax.hessian])
def test_the_calls_of_a_jacobian_take_the_measured_configuration_of_their_forward(kernel, inv, transform):
    with recording() as seen:
        jax.jit(transform(kernel)).lower(X)
    chain = ConfigSelectorChain()
    chain.cache.put(inv.key, 7)
    assert resolved(chain, seen[-1]) == (7, "forward")


def test_a_backward_takes_an_overlay_of_its_forward_and_does_not_remember_it(inv, backward):
    chain = ConfigSelectorChain()
    with overlay_cache({inv.key: 7}):
        inside = resolved(chain, backward)
    assert (inside, chain.cache.items()) == ((7, "overlay"), [])


def test_a_backward_does_not_take_its_forwards_heuristic(inv, backward):
    chain = ConfigSelectorChain()
    resolved(chain, inv)
    assert resolved(chain, backward) == (ANSWERS["heuristic"], "heuristic")


def test_a_backward_keeps_its_own_configuration(inv, backward):
    chain = ConfigSelectorChain()
    chain.cache.put(inv.key, 7)
    chain.cache.put(backward.key, 8)
    assert resolved(chain, backward) == (8, "memory")


def test_an_answer_from_a_forward_does_not_prevent_tuning(inv, backward, tuner):
    chain = ConfigSelectorChain(tuner=tuner)
    chain.cache.put(inv.key, 7)
    before = resolved(chain, backward)
    with policy_override(autotune=True):
        assert (before[1], resolved(chain, backward)[1]) == ("forward", "autotune")


def test_asking_for_a_forwards_configuration_tunes_nothing(inv, backward, tuner):
    chain = ConfigSelectorChain(autotune=True, tuner=tuner)
    chain.consult(backward, backward.kernel)
    assert tuner.calls == []


# --- custom choosers ---


def test_a_bare_chooser_is_the_source(kernel, inv):
    class Always:
        def choose(self, inv, kernel):
            return 3

    found = Executor(Always()).resolve(inv)
    assert (found.config, found.source, found.key) == (3, "chooser", inv.key)


def test_a_bare_chooser_is_not_asked_under_an_override(kernel):
    class Never:
        def choose(self, inv, kernel):
            raise AssertionError

    inv = Invocation(kernel=kernel, args=(X,), override_cfg=4)
    assert Executor(Never()).resolve(inv).source == "override"


def test_a_chooser_must_choose():
    with pytest.raises(ConfigError, match=r"chooser must have choose\(inv, kernel\), got <.*; use ConfigSelectorChain"):
        Executor(ConfigCache())


@pytest.mark.parametrize(
    ("declared", "config"),
    [(Any, Tile(2)), (Any, (1, (2,))), (object, Tile(2)), (dict, {"tile": (8, 4)}), (dict, {"tile": [8, 4]})],
    ids=str,
)
def test_a_general_configuration_type_does_not_change_what_is_read(tmp_path, declared, config):
    class General(Kernel[declared, jax.Array]):
        def run(self, x, *, cfg):
            return x + x

        def heuristic_cfg(self, inv):
            return config

    kernel, cache = General(), PersistentCache(tmp_path, shipped=False)
    inv = Invocation(kernel=kernel, args=(X,))
    cache.put(inv.key, config)
    found = ConfigSelectorChain(ConfigCache(), PersistentCache(tmp_path, shipped=False)).resolve(inv, kernel)
    assert (found.config, found.source) == (config, "persistent")
