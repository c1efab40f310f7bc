# SPDX-License-Identifier: Apache-2.0
"""How far a tier's answers hold."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ops.sample_kernels import Double

from ejkernel.ops.config.selection import BareChooser, ConfigSelectorChain, Resolution
from ejkernel.ops.config.tiers import CHOOSER, FORWARD, HEURISTIC, OVERLAY, OVERRIDE, Tier, tier_named
from ejkernel.ops.core.invocation import Invocation


@pytest.fixture
def inv():
    return Invocation(kernel=Double(), args=(np.ones(4, np.float32),))


class Always:
    def choose(self, inv, kernel):
        return 3


def test_a_chain_asks_only_known_tiers(inv):
    names = [consulted.tier for consulted in ConfigSelectorChain().consult(inv, inv.kernel)]
    assert [tier_named(name).name for name in names] == names
    assert tier_named(names[-1]) is HEURISTIC


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
