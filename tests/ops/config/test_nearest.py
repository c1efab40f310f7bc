# SPDX-License-Identifier: Apache-2.0
"""Why the persistent cache has nothing for a call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from tests.arrays import ones

from ejkernel.ops import CacheWarning, ConfigSelectorChain, Executor, Invocation, Kernel, PersistentCache
from ejkernel.ops.config.selection import why_no_entry

X = ones((4, 8))


class Scale(Kernel[int, jax.Array]):
    def run(self, x, scale=1.0, *, mode="a", options=None, cfg):
        return x * scale

    def heuristic_cfg(self, inv):
        return 1


class Scale2(Scale):
    version = "2"


SCALE = Scale("scale")


@pytest.fixture
def store(tmp_path):
    return PersistentCache(tmp_path, shipped=False)


def put(store, *args, kernel=SCALE, device=None, **kwargs):
    inv = Invocation(kernel=kernel, args=args, kwargs=kwargs)
    key = inv.key if device is None else inv.key._replace(device=device)
    store.put(key, 1, call=inv.description)
    return key


def why(store, *args, kernel=SCALE, **kwargs):
    inv = Invocation(kernel=kernel, args=args, kwargs=kwargs)
    return why_no_entry(store, inv, inv.key)


def test_an_untuned_operation_has_no_entry(store):
    put(store, X, kernel=Scale("scaled"))
    assert why(store, X) == "no entry"


def test_the_nearest_call_is_shown(store):
    put(store, jnp.ones((4, 4096)))
    put(store, jnp.ones((4, 16)))
    put(store, jnp.ones((9, 9)))
    assert why(store, X) == "no entry; closest tuned call: f32[4,16]"


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((X.astype(jnp.bfloat16),), {}, "closest tuned call: bf16[4,8]"),
        ((X,), {"mode": "b"}, "closest tuned call: f32[4,8], mode=b"),
        ((X, 2.0), {}, "a call with these arguments and another value of args was tuned"),
    ],
)
def test_the_call_is_shown_as_everywhere(store, args, kwargs, told):
    put(store, *args, **kwargs)
    assert why(store, X) == f"no entry; {told}"


def test_the_precision_of_a_call_with_the_same_arguments_is_named(store):
    put(store, X)
    inv = Invocation(kernel=SCALE, args=(X,), precision="highest")
    told = "a call with these arguments and another value of precision was tuned"
    assert why_no_entry(store, inv, inv.key) == f"no entry; {told}"


def test_another_device_is_reported(store):
    put(store, X, device="gpu:nvidia_h100")
    assert why(store, X) == "no entry; this call was tuned on gpu:nvidia_h100"
    assert why(store, X[:2]) == "no entry; other calls of the operation were tuned on gpu:nvidia_h100"


def test_another_version_is_reported(store):
    put(store, X)
    newer = Scale2("scale")
    assert why(store, X, kernel=newer) == "no entry; this call was tuned as version 0"
    assert why(store, X[:2], kernel=newer) == "no entry; other calls of the operation were tuned as version 0"


def test_an_unusable_entry_is_reported(store):
    put(store, X)
    next(store.path.rglob("*.json")).write_text("{")
    assert "there is an entry that cannot be used: " in why(store, X)
    assert "edited or cut off" in why(store, X)


def test_an_explanation_has_the_reason(store):
    put(store, jnp.ones((4, 16)))
    text = str(Executor(ConfigSelectorChain(persistent=store)).explain(SCALE, X))
    assert "  persistent no entry; closest tuned call: f32[4,16]\n" in text


def test_an_explanation_names_the_unusable_entry(store):
    put(store, X)
    next(store.path.rglob("*.json")).write_text("{")
    executor = Executor(ConfigSelectorChain(persistent=store))
    with pytest.warns(CacheWarning, match="ignoring cache entry"):
        text = str(executor.explain(SCALE, X))
    assert "persistent there is an entry that cannot be used" in text


@pytest.mark.parametrize(
    "stored",
    [
        None,
        3,
        [],
        {},
        {"args": 3},
        {"kwargs": 3},
        {"args": [{"float": 3}]},
        {"args": [{"map": [1]}]},
        {"args": [{"array": 3}]},
        {"kwargs": {"a": {"map": [[1]]}}, "args": [None]},
    ],
)
def test_any_stored_call_can_be_compared(store, stored):
    inv = Invocation(kernel=SCALE, args=(X,))
    store.put(inv.key._replace(call="0" * 16), 1, call=stored)
    assert why(store, X).startswith("no entry")


def test_a_copy_of_the_folder_above_the_cache_names_the_cache(tmp_path):
    (tmp_path / "configs" / "cpu-some").mkdir(parents=True)
    says = (
        f"no entry; {tmp_path} has no configurations, but {tmp_path / 'configs'} has some: name {tmp_path / 'configs'}"
    )
    with pytest.warns(CacheWarning, match="has no configurations, but"):
        assert why(PersistentCache(tmp_path, shipped=False), X) == says


def test_a_missing_folder_is_the_reason_for_no_entry(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cahce"))
    text = f"there is no folder {tmp_path / 'cahce'}, named by EJKERNEL_CACHE_DIR, but there is {tmp_path / 'cache'}"
    assert why(PersistentCache(), X) == f"no entry; {text}"


def test_a_default_folder_that_does_not_exist_is_no_reason_beside_a_layer(tmp_path, monkeypatch):
    monkeypatch.delenv("EJKERNEL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    layer = tmp_path / "team"
    PersistentCache(layer).put("cpu:some", "other@v0", "1", {"rows": 1})
    monkeypatch.setenv("EJKERNEL_CACHE_LAYERS", str(layer))
    assert why(PersistentCache(), X) == f"no entry; nothing was tuned for this operation in {layer}"
    monkeypatch.setenv("EJKERNEL_CACHE_LAYERS", str(tmp_path / "teem"))
    with pytest.warns(CacheWarning, match="there is no folder"):
        assert why(PersistentCache(), X) == f"no entry; there is no folder {tmp_path / 'teem'}, but there is {layer}"
