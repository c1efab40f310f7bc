# SPDX-License-Identifier: Apache-2.0
"""The policy: permitted actions on a miss, its fields, and overrides of them."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest
from tests.ops.sample_kernels import Double

from ejkernel.ops.config.cache import CHOOSER, FORWARD, HEURISTIC, OVERLAY, OVERRIDE, Tier
from ejkernel.ops.config.policy import AutotunePolicy, effective_policy, policy_override
from ejkernel.ops.config.selection import BareChooser, ConfigSelectorChain, Resolution
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.errors import ConfigError, NoConfigError
from ejkernel.ops.execution.executor import Executor

X = np.ones(4, np.float32)


def test_nothing_is_tuned_by_default():
    policy = AutotunePolicy()
    assert (policy.autotune, policy.heuristic, policy.validate, policy.budget_s) == (False, True, True, None)


@pytest.mark.parametrize("name", ["autotune", "heuristic", "isolate"])
def test_a_flag_must_be_a_bool(name):
    with pytest.raises(ConfigError, match=f"{name} must be True or False, got 1"):
        AutotunePolicy(**{name: 1})


@pytest.mark.parametrize("value", [1, "gradients", None])
def test_validate_is_true_false_or_outputs(value):
    assert AutotunePolicy(validate="outputs").validate == "outputs"
    with pytest.raises(ConfigError, match="validate must be True, False or 'outputs', got "):
        AutotunePolicy(validate=value)


@pytest.mark.parametrize("seconds", [0, -1.5, float("nan")])
def test_a_budget_must_be_positive(seconds):
    with pytest.raises(ConfigError, match="budget_s must be positive seconds or None"):
        AutotunePolicy(budget_s=seconds)


def test_an_override_holds_only_inside_its_block():
    chain = ConfigSelectorChain()
    with policy_override(autotune=True):
        inside = effective_policy(chain)
    assert (inside.autotune, effective_policy(chain)) == (True, chain.policy)


def test_an_override_keeps_the_other_fields():
    with policy_override(budget_s=3.0):
        found = effective_policy(ConfigSelectorChain(autotune=True))
    assert found == AutotunePolicy(autotune=True, budget_s=3.0)


def test_the_innermost_override_wins():
    with policy_override(autotune=True), policy_override(autotune=False):
        assert effective_policy(None).autotune is False


def test_an_override_for_one_chain_does_not_affect_others():
    one, other = ConfigSelectorChain(), ConfigSelectorChain()
    with policy_override(one, autotune=True):
        assert [effective_policy(chain).autotune for chain in (one, other)] == [True, False]


def test_an_unknown_field_is_an_error_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"AutotunePolicy has no field 'tune'; it has autotune, heuristic"):
        policy_override(tune=True).__enter__()


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        (
            AutotunePolicy(cold_cache=True, budget_s=3.0),
            r"got an AutotunePolicy; .*\(budget_s=3\.0, cold_cache=True\)\.$",
        ),
        (Executor(ConfigSelectorChain()), r"got <.*Executor.*; pass the executor's chain: .*executor\.chooser"),
        (True, r"got True; pass fields of the policy by name, e\.g\. policy_override\(autotune=True\)\.$"),
    ],
)
def test_a_selector_must_be_a_chain(selector, message):
    with pytest.raises(ConfigError, match=f"selector must be a ConfigSelectorChain, {message}"):
        policy_override(selector).__enter__()


def test_a_bad_value_is_an_error_on_entry():
    with pytest.raises(ConfigError, match="budget_s"):
        policy_override(budget_s=-1).__enter__()


def test_an_override_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), policy_override(autotune=True):
        1 / 0  # noqa: B018
    assert effective_policy(None).autotune is False


def test_an_override_holds_only_in_its_thread():
    seen = []
    with policy_override(autotune=True):
        thread = threading.Thread(target=lambda: seen.append(effective_policy(None).autotune))
        thread.start()
        thread.join()
    assert seen == [False]


def test_an_override_reaches_a_compiled_function():
    executor, kernel = Executor(ConfigSelectorChain()), Double()
    compiled = jax.jit(lambda x: executor(kernel, x))
    compiled(X)
    with pytest.raises(NoConfigError), policy_override(heuristic=False):
        compiled(X)


def test_an_override_reaches_eager_calls():
    executor, kernel = Executor(ConfigSelectorChain()), Double()
    executor(kernel, X)
    with pytest.raises(NoConfigError), policy_override(heuristic=False):
        executor(kernel, X)


# --- how far a tier's answers hold ---


@pytest.fixture
def inv():
    return Invocation(kernel=Double(), args=(np.ones(4, np.float32),))


class Always:
    def choose(self, inv, kernel):
        return 3


def test_a_chain_asks_only_known_tiers(inv):
    names = [consulted.tier for consulted in ConfigSelectorChain().consult(inv, inv.kernel)]
    found = [Resolution(None, name, None).tier for name in names]
    assert [tier.name for tier in found] == names
    assert found[-1] is HEURISTIC


@pytest.mark.parametrize(
    ("tier", "provisional", "passing", "for_one_call", "saved"),
    [
        (OVERRIDE, False, True, True, False),
        (OVERLAY, False, True, False, False),
        (FORWARD, True, False, False, True),
        (HEURISTIC, True, False, True, False),
        (CHOOSER, False, False, True, False),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_validity_of_an_answer_depends_on_its_tier(tier, provisional, passing, for_one_call, saved):
    found = (tier.is_provisional, tier.is_temporary, tier.is_for_one_call, tier.is_saved)
    assert found == (provisional, passing, for_one_call, saved)


def test_answers_of_an_unknown_tier_hold_for_good():
    assert Resolution(1, "the oracle", None).tier == Tier("the oracle")


def test_a_bare_chooser_is_asked_as_a_chain_is(inv):
    chooser = BareChooser(Always())
    (consulted,) = chooser.consult(inv, inv.kernel)
    assert consulted.resolution == chooser.resolve(inv, inv.kernel) == Resolution(3, "chooser", inv.key)
