# SPDX-License-Identifier: Apache-2.0
"""A plugin for `make doctest`: searches measure few candidates, since other tests are about what they find."""

from __future__ import annotations

import pytest

from ejkernel.ops import policy_override


@pytest.fixture(autouse=True)
def brief_searches():
    """Have the examples search with three candidates and compare outputs alone."""
    with policy_override(max_candidates=3, validate="outputs"):
        yield
