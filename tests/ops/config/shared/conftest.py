# SPDX-License-Identifier: Apache-2.0
"""What tests of several places have."""

from __future__ import annotations

import pytest
from tests.ops.config.shared.stores import FakeStore

from ejkernel.ops.config.shared import exchange


@pytest.fixture
def store(monkeypatch):
    """A store in memory, in the place of whichever a URL names."""
    store = FakeStore()
    monkeypatch.setattr(exchange, "Store", store)
    return store


@pytest.fixture
def shared(tmp_path, store):
    """The shared cache in that store, as this machine sees it."""
    return exchange.SharedPlace("fake://team", tmp_path / "mine")
