# SPDX-License-Identifier: Apache-2.0
"""What is read without cattrs is what would be read with it, and an entry of the usual form does not load it."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Literal

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops import ConfigKey, FwdParams, PersistentCache
from ejkernel.ops.errors import ConfigError, SerializationError
from ejkernel.ops.utils.storage import decode
from ejkernel.ops.utils.storage.quick import quick


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int
    order: Literal["row", 1, True] = "row"
    scale: float | None = None

    def __post_init__(self):
        if self.rows < 0:
            raise ConfigError(f"rows must not be negative, got {self.rows}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    tile: Tile
    grid: tuple[int, ...] = ()
    names: dict[str, bool] = dataclasses.field(default_factory=dict)
    other: Tile | None = None
    extra: Any = None
    either: int | str = 0
    made: int = dataclasses.field(default=3, init=False)


TYPES = [Any, int, float, bool, str, None, Tile, Launch, dict[str, Any], dict[str, int], list[int], jnp.float64]
names = st.sampled_from([f.name for cls in (Tile, Launch) for f in dataclasses.fields(cls)] + ["x"])
leaves = st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2) | st.sampled_from(["row", ""])
tiles = st.fixed_dictionaries({"rows": st.integers(-1, 3)}, optional={"order": leaves, "scale": leaves})
values = st.recursive(
    leaves | tiles, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=8
)
launches = st.fixed_dictionaries({"tile": tiles}, optional={"grid": st.lists(leaves, max_size=2), "either": leaves})


def by_cattrs(data, cls):
    try:
        return decode.decode(data, cls)
    except SerializationError:
        return "refused"


@given(values | launches, st.sampled_from(TYPES))
def test_what_is_read_is_what_cattrs_would_read(data, cls):
    try:
        found = quick(data, cls)
    except LookupError:
        return
    expected = by_cattrs(data, cls)
    assert (repr(found), type(found)) == (repr(expected), type(expected))


@pytest.mark.parametrize(
    ("data", "cls"),
    [
        ({"rows": 4, "order": "row"}, Tile),
        ({"tile": {"rows": 1, "scale": 0.5}, "grid": [1, 2], "other": None}, Launch),
        ({"a": [1, {}]}, dict[str, Any]),
    ],
)
def test_the_usual_configurations_are_read(data, cls):
    assert quick(data, cls) == decode.decode(data, cls)


@pytest.mark.parametrize(
    ("data", "cls"),
    [
        ({"rows": -1}, Tile),
        ({"rows": True}, Tile),
        ({"rows": 1, "x": 1}, Tile),
        ({}, Tile),
        ({"tile": {"rows": 1}, "made": 3}, Launch),
        ({"rows": 1, "order": 1.0}, Tile),
        ([1], Tile),
        (1, float),
    ],
)
def test_what_is_wrong_or_rare_is_left_to_cattrs(data, cls):
    with pytest.raises(LookupError):
        quick(data, cls)


def test_a_lookup_loads_no_cattrs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ejkernel.ops.utils.storage.decode", None)  # to import it is an error
    cache = PersistentCache(tmp_path, shipped=False)
    for number, config in enumerate([FwdParams(q_blocksize=64), {"rows": [1, {}]}, 64]):
        key = ConfigKey("gpu:x", "mm@v1", f"{number:016x}")
        cache.put(key, config)
        assert cache.get(key) == config
        assert cache.get(key, dict[str, Any] if isinstance(config, dict) else type(config)) == config
