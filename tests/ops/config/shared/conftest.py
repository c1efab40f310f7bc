# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests for places."""

from __future__ import annotations

import pytest
from tests.ops.config.shared.stores import FakeStore

from ejkernel.ops.config.shared import exchange


@pytest.fixture
def store(monkeypatch):
    """An in-memory store that replaces the store of any URL."""
    store = FakeStore()
    monkeypatch.setattr(exchange, "Store", store)
    return store


@pytest.fixture
def shared(tmp_path, store):
    """The shared cache in that store, as this machine sees it."""
    return exchange.SharedPlace("fake://team", tmp_path / "mine")
