# SPDX-License-Identifier: Apache-2.0
"""Entries of other versions: their differences, and the actions of the policy."""

from __future__ import annotations

import dataclasses
import pickle

import jax.numpy as jnp
import pytest
from tests.ops.config.shared.stores import entry
from tests.ops.found import found

from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    ConfigSpace,
    Invocation,
    Kernel,
    PersistentCache,
    default_executor,
    set_default_executor,
)
from ejkernel.ops.config import entries
from ejkernel.ops.config._files import location
from ejkernel.ops.config._writing import write_file
from ejkernel.ops.config.entries import (
    Difference,
    StalePolicy,
    differences,
    measured_with,
    space_digest,
    text_of,
)
from ejkernel.ops.errors import ConfigError, NoConfigError
from ejkernel.settings import Settings


class Spaced(Kernel):
    """A kernel with a given space."""

    def __init__(self, space):
        super().__init__("spaced")
        self.space = space

    def run(self, x, *, cfg):
        return x * 2

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return self.space


KERNEL = Spaced([1, 2, 3])


@pytest.fixture
def inv():
    return Invocation(kernel=KERNEL, args=(jnp.ones(4),))


@pytest.fixture
def cache(tmp_path):
    return PersistentCache(tmp_path, shipped=False)


def save(cache, inv, config=2, *, space=None, **provenance):
    stored = entry(**provenance)
    measured = stored.measured if space is None else {**stored.measured, "space": space}
    stored = dataclasses.replace(stored, key=inv.key, config=config, config_type="json", measured=measured)
    write_file(cache.path.joinpath(*location(inv.key)), text_of(stored))


def resolved(cache, inv, **actions):
    chain = ConfigSelectorChain(persistent=cache, policy=AutotunePolicy(stale=StalePolicy(**actions)))
    found = chain.resolve(inv, KERNEL)
    return found.config, found.source


def test_an_entry_records_its_versions():
    found = measured_with(entry(jax="1", jaxlib="2", driver="3"))
    assert found == {"jax": "1", "jaxlib": "2", "driver": "3", "space": "unknown"}


def test_an_entry_that_does_not_say_is_unknown_and_differs_from_nothing(cache, inv):
    old = dataclasses.replace(entry(), provenance={}, measured=None)
    assert set(measured_with(old).values()) == {"unknown"}
    assert differences(old, "0" * 16) == ()
    save(cache, inv, jax=None, jaxlib=7, driver="")
    assert resolved(cache, inv, jax="refuse", jaxlib="refuse", driver="refuse", space="refuse") == (2, "persistent")


def test_differences_name_the_current_version(monkeypatch):
    monkeypatch.setattr(entries, "driver_of", lambda device: "580.1")
    found = differences(entry(jax="0.0.1", driver="570.2"), None)
    assert {difference.field for difference in found} == {"jax", "driver"}
    assert "measured with driver 570.2, not 580.1" in entries.text_of_differences(found)
    assert str(Difference("space", "a", "b")) == "its search space has changed since"


@pytest.mark.parametrize("field", ["jax", "jaxlib"])
def test_the_policy_determines_the_action(cache, inv, field):
    save(cache, inv, **{field: "0.0.1"})
    assert resolved(cache, inv) == (2, "persistent")
    assert resolved(cache, inv, **{field: "retune"}) == (2, "stale")
    assert resolved(cache, inv, **{field: "refuse"}) == (1, "heuristic")


def test_of_several_differences_the_strictest_counts(cache, inv):
    save(cache, inv, jax="0.0.1", jaxlib="0.0.1")
    assert resolved(cache, inv, jax="retune", jaxlib="refuse") == (1, "heuristic")
    assert resolved(cache, inv, jax="retune", jaxlib="use") == (2, "stale")


ON_MISS = {
    ("use", "heuristic"): (2, "persistent"),
    ("use", "tune"): (2, "persistent"),
    ("use", "error"): (2, "persistent"),
    ("retune", "heuristic"): (2, "stale"),
    ("retune", "tune"): (1, "autotune"),
    ("retune", "error"): (2, "stale"),  # it was measured: it answers until the call is tuned
    ("refuse", "heuristic"): (1, "heuristic"),
    ("refuse", "tune"): (1, "autotune"),
    ("refuse", "error"): None,
}


@pytest.mark.parametrize(("stale", "on_miss"), ON_MISS)
def test_a_stale_entry_under_each_miss_policy(cache, inv, monkeypatch, stale, on_miss):
    save(cache, inv, jax="0.0.1")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(cache.path))
    monkeypatch.setenv("EJKERNEL_STALE", stale)
    monkeypatch.setenv("EJKERNEL_ON_MISS", on_miss)
    set_default_executor(None)
    chain = default_executor().chooser
    chain.tuner = Heuristically()
    wanted = ON_MISS[stale, on_miss]
    if wanted is None:
        with pytest.raises(NoConfigError, match=r"The saved entry is not used: measured with jax 0\.0\.1, not"):
            chain.resolve(inv, KERNEL)
    else:
        found = chain.resolve(inv, KERNEL)
        assert (found.config, found.source) == wanted


class Heuristically:
    """A tuner that measures nothing."""

    def tune(self, inv, kernel, **options):
        return found(inv, 1)


def test_an_error_names_the_saved_entry_once_and_survives_pickling():
    error = NoConfigError("op", ("memory", "persistent"), "", "The saved entry is not used: measured with jax 1, not 2")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert "What is saved" not in str(NoConfigError("op", ("memory",)))


def test_a_call_to_retune_is_tuned_if_allowed_and_noted_as_missed(cache, inv):
    save(cache, inv, jax="0.0.1")
    policy = AutotunePolicy(stale=StalePolicy(jax="retune"), note_misses=True)
    ConfigSelectorChain(persistent=cache, policy=policy).resolve(inv, KERNEL)
    assert list((cache.path / "missed").rglob("*.json"))
    chain = ConfigSelectorChain(persistent=cache, policy=dataclasses.replace(policy, autotune=True))
    assert chain.resolve(inv, KERNEL).source == "autotune"
    assert differences(cache.load(inv.key)) == ()
    assert resolved(cache, inv, jax="refuse")[1] == "persistent"


def test_a_later_layer_answers_where_the_own_entry_is_stale(cache, inv, tmp_path):
    save(cache, inv, jax="0.0.1")
    other = PersistentCache(tmp_path / "other", shipped=False)
    save(other, inv, 3)
    both = PersistentCache(cache.path, layers=[other.path], shipped=False)
    assert resolved(both, inv) == (2, "persistent")
    assert resolved(both, inv, jax="retune") == (3, "persistent")


def test_explain_says_which_and_why(cache, inv):
    save(cache, inv, jax="0.0.1", space="0" * 16)
    chain = ConfigSelectorChain(persistent=cache)
    said = {c.tier: c.note for c in chain.consult(inv, KERNEL)}
    assert "measured with jax 0.0.1, not" in said["persistent"]
    assert "its search space has changed since" in said["persistent"]
    chain.policy = AutotunePolicy(stale=StalePolicy(jax="refuse"))
    said = {c.tier: c.note for c in chain.consult(inv, KERNEL)}
    assert said["persistent"].endswith("the policy says refuse")


# --- the space ---


def test_a_search_keeps_the_digest_of_its_space(cache, inv):
    ConfigSelectorChain(persistent=cache).search(inv, KERNEL)
    assert measured_with(cache.load(inv.key))["space"] == space_digest(KERNEL, inv)


def test_a_space_that_changed_is_noticed_where_the_policy_asks(cache, inv, monkeypatch):
    save(cache, inv, space=space_digest(KERNEL, inv))
    assert resolved(cache, inv, space="retune") == (2, "persistent")
    monkeypatch.setattr(KERNEL, "space", [1, 2, 3, 4])
    assert resolved(cache, inv, space="retune") == (2, "stale")
    assert resolved(cache, inv) == (2, "persistent")


def digest(space):
    return space_digest(Spaced(space), Invocation(kernel=KERNEL, args=(jnp.ones(4),)))


def test_a_digest_depends_on_the_content_of_the_space():
    assert digest([1, 2]) == digest([2, 1])
    assert digest([1, 2]) != digest([1, 2, 3])
    axes = {"rows": [1, 2, 4], "stages": range(1, 4)}
    assert digest(ConfigSpace(axes)) == digest(ConfigSpace(dict(axes)))
    assert digest(ConfigSpace(axes)) != digest(ConfigSpace(axes | {"stages": range(1, 5)}))
    assert digest(ConfigSpace(axes)) != digest(ConfigSpace(axes, constraints=lambda rows, stages: rows * stages < 9))


def test_a_space_that_cannot_be_evaluated_has_no_digest():
    assert digest([object()]) is None

    class Fails(Spaced):
        def config_space(self, inv):
            raise ValueError("no space today")

    assert space_digest(Fails([]), Invocation(kernel=KERNEL, args=(jnp.ones(4),))) is None


# --- how it is said ---


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", StalePolicy()),
        ("retune", StalePolicy(jax="retune", jaxlib="retune", driver="retune", space="retune")),
        (" JAX = refuse, driver=retune ", StalePolicy(jax="refuse", driver="retune")),
    ],
)
def test_the_environment_sets_it(monkeypatch, text, policy):
    monkeypatch.setenv("EJKERNEL_STALE", text)
    assert default_executor().chooser.policy.stale == policy


@pytest.mark.parametrize("text", ["always", "jax", "jax=maybe", "python=use", "retune,jax=use", "jax=retune=use"])
def test_a_bad_variable_is_an_error(text):
    with pytest.raises(ConfigError, match=r"EJKERNEL_STALE must be .*got"):
        _ = Settings({"EJKERNEL_STALE": text}).stale


@pytest.mark.parametrize("text", ["jax=retune,jax=refuse", "jax=retune, JAX = use", "jax=use,driver=use,jax=use"])
def test_two_actions_for_one_difference_are_an_error(text):
    with pytest.raises(ConfigError, match=r"EJKERNEL_STALE must .*got"):
        _ = Settings({"EJKERNEL_STALE": text}).stale


def test_a_bad_policy_is_an_error():
    with pytest.raises(ConfigError, match="jax must be one of use, retune, refuse, got 'never'"):
        StalePolicy(jax="never")
    with pytest.raises(ConfigError, match="stale must be a StalePolicy"):
        AutotunePolicy(stale="refuse")
