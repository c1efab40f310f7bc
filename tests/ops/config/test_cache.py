# SPDX-License-Identifier: Apache-2.0
"""Configurations in memory, and overlays: precedence, their effect on compiled programs, and equality of values."""

from __future__ import annotations

import dataclasses
import threading

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.sample_kernels import Times

from ejkernel.ops.config.cache import ConfigCache, Overlay, config_token, overlay_cache, same_config
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ConfigError, SerializationError
from ejkernel.ops.execution.executor import Executor
from ejkernel.ops.utils.weak_caches import Records

KEY = ConfigKey("cpu:some", "matmul@v1", "0123456789abcdef")
X = np.ones(4, np.float32)


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int = 64


@dataclasses.dataclass(frozen=True)
class Other:
    rows: int = 64


@pytest.fixture
def cache():
    return ConfigCache()


# --- memory ---


@pytest.mark.parametrize("key", [KEY, "text", 1, ("a", 2, None), frozenset({1})])
def test_any_hashable_key_is_stored(cache, key):
    cache.put(key, Tile())
    assert (cache.get(key), key in cache, len(cache)) == (Tile(), True, 1)


def test_a_missing_key_gives_none(cache):
    assert (cache.get(KEY), KEY in cache, len(cache)) == (None, False, 0)


def test_a_key_and_its_parts_are_the_same(cache):
    cache.put(*KEY, Tile())
    assert cache.get(KEY) == cache.get(*KEY) == cache.get(tuple(KEY)) == Tile()


@pytest.mark.parametrize("arguments", [(), (KEY,), ("device", "op", Tile()), (*KEY, Tile(), 1)])
def test_put_takes_two_or_four_arguments(cache, arguments):
    with pytest.raises(TypeError, match=r"put takes \(key, cfg\) or \(device, op, call, cfg\), got"):
        cache.put(*arguments)


@pytest.mark.parametrize("arguments", [(), ("device", "op"), (*KEY, 1)])
def test_get_takes_one_or_three_arguments(cache, arguments):
    with pytest.raises(TypeError, match=r"get takes \(key\) or \(device, op, call\), got"):
        cache.get(*arguments)


def test_the_last_put_wins(cache):
    cache.put(KEY, Tile(1))
    cache.put(KEY, Tile(2))
    assert cache.items() == [(KEY, Tile(2))]


def test_put_entries_come_from_memory(cache):
    cache.put(KEY, Tile())
    assert cache.remembered(KEY).source == "memory"


def test_removing_returns_whether_an_entry_existed(cache):
    cache.put(KEY, Tile())
    assert [cache.remove(*KEY), cache.remove(KEY), KEY in cache] == [True, False, False]


def test_clearing_forgets_everything(cache):
    cache.put(KEY, Tile())
    cache.clear()
    assert cache.items() == []


class Listener:
    def __init__(self):
        self.calls = 0

    def called(self):
        self.calls += 1


@pytest.mark.parametrize(
    ("change", "calls"),
    [
        (lambda cache: cache.put("new", Tile()), 0),  # first answer for this call
        (lambda cache: cache.put(KEY, Tile()), 0),
        (lambda cache: cache.remember(KEY, Tile(), "autotune"), 0),
        (lambda cache: cache.put(KEY, Tile(8)), 1),
        (lambda cache: cache.put(KEY, Other()), 1),
        (lambda cache: cache.remove(KEY), 1),
        (lambda cache: cache.remove("missing"), 0),
        (lambda cache: cache.clear(), 1),
    ],
)
def test_a_listener_is_notified_of_invalid_answers(cache, change, calls):
    cache.put(KEY, Tile())
    listener = Listener()
    cache.subscribe(listener.called)
    change(cache)
    assert listener.calls == calls


def test_a_listener_is_not_kept_alive(cache, collect):
    cache.put(KEY, Tile())
    listener = Listener()
    cache.subscribe(listener.called)
    del listener
    collect()
    cache.clear()
    assert cache._listeners == []


def test_threads_may_write_at_once(cache):
    start = threading.Barrier(8)

    def write(number):
        start.wait()
        for index in range(100):
            cache.put((number, index), index)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache) == 800


# --- equality of values ---


def test_equal_fields_of_different_types_are_different_configurations():
    assert not same_config(Tile(), Other())


@given(st.sampled_from([1, 1.0, True, "1"]), st.sampled_from([1, 1.0, True, "1"]))
def test_numbers_of_different_types_are_different_configurations(left, right):
    assert same_config(left, right) == (type(left) is type(right))


def test_configurations_may_be_dictionaries():
    assert same_config({"a": 1, "b": [2]}, {"b": [2], "a": 1})


def test_a_configuration_must_be_data():
    with pytest.raises(SerializationError):
        config_token({"a": object()})


# --- overlays ---


def test_overlays_are_equal_by_content():
    left, right = Overlay({KEY: {"a": 1, "b": 2}}), Overlay({tuple(KEY): {"b": 2, "a": 1}})
    assert (left == right, hash(left) == hash(right), left.digest == right.digest) == (True, True, True)


@pytest.mark.parametrize("other", [{}, {KEY: Other()}, {KEY: Tile(1)}, {KEY._replace(call="f" * 16): Tile()}])
def test_overlays_of_different_content_are_different(other):
    assert Overlay({KEY: Tile()}) != Overlay(other)


@pytest.mark.parametrize("key", ["text", ("a", "b"), ("a", "b", 3), 1])
def test_an_overlay_has_config_keys(key):
    with pytest.raises(ConfigError, match=r"keys of an overlay must be ConfigKey\(device, op, call\), got"):
        Overlay({key: Tile()})


def test_an_overlay_is_made_of_a_cache_or_a_mapping():
    with pytest.raises(ConfigError, match="cache must be a ConfigCache or a mapping, got list"):
        overlay_cache([KEY]).__enter__()


@pytest.fixture
def kernel():
    return Times()


@pytest.fixture
def run(kernel):
    """The kernel under an executor; the result is its configuration."""
    executor = Executor(ConfigSelectorChain())
    return lambda: int(executor(kernel, X)[0])


@pytest.fixture
def key(kernel):
    return Invocation(kernel=kernel, args=(X,)).key


def test_an_overlay_wins_only_inside_its_block(run, key):
    seen = [run()]
    with overlay_cache({key: 5}):
        seen.append(run())
    assert [*seen, run()] == [1, 5, 1]


def test_the_innermost_overlay_wins(run, key):
    with overlay_cache({key: 5}):
        with overlay_cache({key: 7}):
            inner = run()
        assert (inner, run()) == (7, 5)


def test_an_outer_overlay_answers_calls_missing_in_the_inner(run, key):
    with overlay_cache({key: 5}), overlay_cache({}):
        assert run() == 5


def test_an_overlay_wins_over_memory(kernel, key):
    executor = Executor(ConfigSelectorChain())
    executor.chooser.cache.put(key, 3)
    with overlay_cache({key: 5}):
        assert executor.choose_config(kernel, X) == 5


def test_an_explicit_configuration_wins_over_an_overlay(kernel, key):
    executor = Executor(ConfigSelectorChain())
    with overlay_cache({key: 5}):
        assert executor(kernel, X, cfg=9)[0] == 9


def test_an_overlay_is_not_remembered(kernel, key):
    executor = Executor(ConfigSelectorChain())
    with overlay_cache({key: 5}):
        executor(kernel, X)
    assert executor.chooser.cache.items() == []


def test_a_cache_is_read_once_on_entry(run, key):
    cache = ConfigCache()
    with overlay_cache(cache):
        cache.put(key, 5)
        assert run() == 1


def test_an_overlay_reaches_a_compiled_function(kernel, key):
    executor, seen = Executor(ConfigSelectorChain()), []
    compiled = jax.jit(lambda x: executor(kernel, x))
    for overlay in ({}, {key: 5}, {}, {key: 5}):
        with overlay_cache(overlay):
            seen.append(int(compiled(X)[0]))
    assert seen == [1, 5, 1, 5]


def test_an_equal_overlay_compiles_nothing_again(kernel, key):
    executor, traces = Executor(ConfigSelectorChain()), []

    def function(x):
        traces.append(x)
        return executor(kernel, x)

    compiled = jax.jit(function)
    for _ in range(3):
        with overlay_cache({key: 5}):
            compiled(X)
    assert len(traces) == 1


def test_an_executable_compiled_ahead_of_time_keeps_its_configuration(kernel, key):
    executor = Executor(ConfigSelectorChain())
    compiled = jax.jit(lambda x: executor(kernel, x)).lower(X).compile()
    with overlay_cache({key: 5}):
        assert compiled(X)[0] == 1


def test_a_program_traced_inside_and_lowered_outside_has_the_inside(kernel, key):
    executor = Executor(ConfigSelectorChain())
    with overlay_cache({key: 5}):
        traced = jax.jit(lambda x: executor(kernel, x)).trace(X)
    assert traced.lower().compile()(X)[0] == 5


def test_an_overlay_holds_only_in_its_thread(run, key):
    seen = []
    with overlay_cache({key: 5}):
        thread = threading.Thread(target=lambda: seen.append(run()))
        thread.start()
        thread.join()
    assert seen == [1]


def test_an_overlay_ends_with_an_error(run, key):
    with pytest.raises(ZeroDivisionError), overlay_cache({key: 5}):
        1 / 0  # noqa: B018
    assert run() == 1


def test_an_eager_call_sees_new_entries_in_memory(kernel, key):
    executor = Executor(ConfigSelectorChain())
    seen = [int(executor(kernel, X)[0])]
    for config in (3, 4):
        executor.chooser.cache.put(key, config)
        seen.append(int(executor(kernel, X)[0]))
    executor.chooser.cache.remove(key)
    assert [*seen, int(executor(kernel, X)[0])] == [1, 3, 4, 1]


def test_provisional_answers_are_bounded_and_others_stay(monkeypatch):
    monkeypatch.setattr(Records, "most", 8)
    cache = ConfigCache()
    cache.remember("measured", 1, "autotune")
    cache.remember("put after the heuristic", 2, "heuristic")
    cache.put("put after the heuristic", 3)
    for number in range(100):
        cache.remember(number, number, "heuristic")
    assert (cache.get("measured"), cache.get("put after the heuristic"), cache.get(99)) == (1, 3, 99)
    assert (cache.get(0), len(cache) <= 8 + 2) == (None, True)
