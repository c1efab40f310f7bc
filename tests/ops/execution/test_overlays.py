# SPDX-License-Identifier: Apache-2.0
"""Overlays, results and policies over compiled code: in force inside, gone outside, and cheap when repeated."""

from __future__ import annotations

import concurrent.futures
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.sample_kernels import ShowsConfig, logged

from ejkernel.ops import (
    AutotunePolicy,
    AutotuningResult,
    ConfigCache,
    ConfigError,
    ConfigSelectorChain,
    Entry,
    Executor,
    Invocation,
    NoConfigError,
    overlay_cache,
    policy_override,
)
from ejkernel.ops.core.context import current_scope

ONE = np.float32(1)
PAIR = np.ones(2, np.float32)


class CountingChain(ConfigSelectorChain):
    """Counts its resolutions."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.resolved = 0

    def resolve(self, inv, kernel):
        self.resolved += 1
        return super().resolve(inv, kernel)


@pytest.fixture
def chain():
    return CountingChain(ConfigCache())


@pytest.fixture
def kernel():
    return ShowsConfig("shown")


@pytest.fixture
def f(chain, kernel):
    return functools.partial(Executor(chain), kernel)


def scanned(f):
    def step(carry, _):  # made once: JAX keeps an eager scan's program for the function that it was given
        return f(carry), None

    return lambda x: jax.lax.scan(step, x, None, length=2)[0]


def batched(f):
    return lambda x: jax.vmap(f)(x * PAIR)


def branched(f):
    return lambda x: jax.lax.cond(x > 0, f, jnp.negative, x)


def looped(f):
    return lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, x))[1]


# Programs of a scalar that return the configuration, plus 100 for gradients.
PROGRAMS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "jit(jit)": lambda f: jax.jit(lambda x: jax.jit(f)(x) + 0),
    "jit(scan)": lambda f: jax.jit(scanned(f)),
    "eager scan": scanned,
    "jit(cond)": lambda f: jax.jit(branched(f)),
    "eager cond": branched,
    "jit(while)": lambda f: jax.jit(looped(f)),
    "jit(checkpoint)": lambda f: jax.jit(jax.checkpoint(f)),
    "eager checkpoint": jax.checkpoint,
    "vmap(jit)": lambda f: batched(jax.jit(f)),
    "jit(vmap)": lambda f: jax.jit(batched(f)),
    "eager vmap": batched,
    "jit(grad)": lambda f: jax.jit(jax.grad(f)),
    "eager grad": jax.grad,
    "vmap(jit(grad))": lambda f: batched(jax.jit(jax.grad(f))),
}
each_program = pytest.mark.parametrize("program", PROGRAMS)


def keys_of(kernel):
    """Return the keys of the forward call, alone and batched; gradients fall back to their forward's."""
    alone = Invocation(kernel=kernel, args=(ONE,))
    batched = Invocation(kernel=kernel, args=(ONE,), batch_axes=(0,), batch_sizes=(2,))
    return [alone.key, batched.key]


def as_overlay(kernel, config):
    return overlay_cache(dict.fromkeys(keys_of(kernel), config))


def as_result(kernel, config):
    keys = keys_of(kernel)
    return AutotuningResult(keys[0].device, tuple(Entry(key.op, key.call, config) for key in keys))


def shown(function):
    """Return the configuration that `function` ran with."""
    return int(np.ravel(function(ONE))[0]) % 100


@pytest.mark.slow
@pytest.mark.sampled
@each_program
@pytest.mark.parametrize("put_in_force", [as_overlay, as_result], ids=["overlay", "result"])
def test_a_configuration_holds_inside_its_block_and_nowhere_else(program, put_in_force, kernel, f):
    function = PROGRAMS[program](f)
    seen = [shown(function)]
    with put_in_force(kernel, 7):
        seen.append(shown(function))
        with put_in_force(kernel, 8):
            seen.append(shown(function))
        seen.append(shown(function))
    seen.append(shown(function))
    assert seen == [0, 7, 8, 7, 0]


@pytest.mark.slow
@each_program
def test_returning_to_a_block_or_out_of_it_resolves_nothing_again(program, kernel, chain, f):
    function = PROGRAMS[program](f)
    shown(function)
    with as_overlay(kernel, 7):
        shown(function)
    before = chain.resolved
    for _ in range(2):
        shown(function)
        with as_overlay(kernel, 7):  # another overlay of equal content
            shown(function)
    assert chain.resolved == before


@pytest.mark.slow
@pytest.mark.parametrize("program", ["eager", "jit", "jit(scan)", "vmap(jit)", "jit(vmap)", "jit(grad)", "eager grad"])
def test_threads_have_separate_overlays(program, kernel, f):
    function = PROGRAMS[program](f)
    together = threading.Barrier(4, timeout=60)

    def work(config):
        with as_overlay(kernel, config):
            together.wait()
            first = shown(function)
            together.wait()
            return [first, shown(function)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(20, 24))) == [[config] * 2 for config in range(20, 24)]
    assert shown(function) == 0


def test_a_new_thread_starts_without_the_overlay(kernel, f):
    with as_overlay(kernel, 7), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(shown, f).result() == 0


# Executables compiled ahead of time


def test_a_compiled_executable_keeps_the_configuration_that_it_was_lowered_with(kernel, f):
    compiled = jax.jit(f).lower(ONE).compile()
    with as_overlay(kernel, 7):
        assert shown(compiled) == 0


def test_a_program_lowered_inside_and_compiled_outside_keeps_the_overlay(kernel, f):
    with as_overlay(kernel, 7):
        lowered = jax.jit(f).lower(ONE)
    assert shown(lowered.compile()) == 7


def test_a_pullback_belongs_to_the_overlay_of_its_forward(kernel, f):
    with as_overlay(kernel, 7):
        value, pull = jax.vjp(f, ONE)
    assert (int(value), int(pull(ONE)[0])) == (7, 107)


# --- content of an overlay ---


def test_an_explicit_configuration_wins_over_an_overlay(kernel, f):
    with as_overlay(kernel, 7):
        assert int(f(ONE, cfg=5)) == 5


def test_an_inner_overlay_hides_only_its_own_calls(kernel, f):
    other = ShowsConfig("other")
    g = functools.partial(f.func, other)
    with as_overlay(kernel, 7), as_overlay(other, 8):
        assert (shown(f), shown(g)) == (7, 8)


def test_an_overlay_may_be_a_config_cache(kernel, f):
    cache = ConfigCache()
    cache.put(keys_of(kernel)[0], 7)
    with overlay_cache(cache):
        assert shown(f) == 7


def test_an_overlay_is_read_once_when_it_is_entered(kernel, f):
    entries = {keys_of(kernel)[0]: 7}
    with overlay_cache(entries):
        entries[keys_of(kernel)[0]] = 8
        assert shown(f) == 7


@pytest.mark.parametrize("given", [None, [1], {"matmul": 1}, {("a", "b"): 1}], ids=str)
def test_something_else_than_an_overlay_is_an_error(given):
    with pytest.raises(ConfigError, match=r"cache must be a ConfigCache|keys of an overlay must be ConfigKey"):
        overlay_cache(given).__enter__()


@pytest.mark.slow
def test_an_overlay_answers_with_a_backward_configuration(kernel, f):
    logging, chooser = logged(kernel)
    jax.grad(logging)(ONE)
    _, backward = (inv.key for inv in chooser.asked)
    with overlay_cache({backward: 9}):
        assert (shown(f), shown(jax.grad(f))) == (0, 9)


def test_an_overlay_is_not_remembered(kernel, chain, f):
    with as_overlay(kernel, 7):
        shown(f)
    assert len(chain.cache) == 0


def test_an_error_inside_ends_the_overlay(kernel, f):
    with pytest.raises(ZeroDivisionError), as_overlay(kernel, 7):
        1 / 0  # noqa: B018
    assert shown(f) == 0


# Results


def test_one_result_may_be_entered_twice(kernel, f):
    result = as_result(kernel, 7)
    function = jax.jit(f)
    with result:
        with result:
            inner = shown(function)
        middle = shown(function)
    assert (inner, middle, shown(function)) == (7, 7, 0)
    assert current_scope().layers == ()


def test_one_result_may_be_entered_in_several_threads_at_once(kernel, f):
    result = as_result(kernel, 7)
    inside = threading.Barrier(2, timeout=60)

    def work(_):
        with result:
            inside.wait()
            value = shown(f)
            inside.wait()
        return value, shown(f)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [(7, 0)] * 2


def test_a_merged_result_prefers_the_later_entries(kernel, f):
    with as_result(kernel, 7) | as_result(kernel, 8):
        assert shown(f) == 8


def test_a_result_of_another_device_changes_nothing(kernel, f):
    here = as_result(kernel, 7)
    with AutotuningResult("gpu:another", here.entries):
        assert shown(f) == 0


# Policies


def test_a_policy_without_heuristic_makes_a_miss_an_error_in_compiled_code_too(f):
    function = jax.jit(f)
    assert shown(function) == 0
    with policy_override(heuristic=False), pytest.raises(NoConfigError, match="shown"):
        function(ONE)
    assert shown(function) == 0


def test_a_policy_may_be_limited_to_one_chain(kernel, chain, f):
    other = functools.partial(Executor(ConfigSelectorChain()), kernel)
    with policy_override(chain, heuristic=False):
        assert shown(other) == 0
        with pytest.raises(NoConfigError):
            f(ONE)


def test_the_innermost_policy_wins(f):
    with policy_override(heuristic=False), policy_override(heuristic=True):
        assert shown(f) == 0


def test_a_policy_and_an_overlay_hold_together(kernel, f):
    function = jax.jit(f)
    with as_overlay(kernel, 7), policy_override(heuristic=False):
        assert shown(function) == 7


def test_returning_to_an_equal_policy_resolves_nothing_again(chain, f):
    function = jax.jit(f)
    for _ in range(2):
        with policy_override(validate=False):
            shown(function)
    assert chain.resolved == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"tune": True}, "AutotunePolicy has no field 'tune'"), ({"heuristic": 1}, "heuristic must be True or False")],
)
def test_a_wrong_policy_is_an_error_at_once(changes, message):
    with pytest.raises(ConfigError, match=message):
        policy_override(**changes).__enter__()


# Memory


def test_a_new_configuration_in_memory_reaches_eager_calls_at_once(kernel, chain, f):
    seen = [shown(f)]
    for config in (3, 4):
        chain.cache.put(keys_of(kernel)[0], config)
        seen.append(shown(f))
    chain.cache.remove(keys_of(kernel)[0])
    seen.append(shown(f))
    assert seen == [0, 3, 4, 0]


@pytest.mark.parametrize("program", ["eager grad", "eager vmap", "eager checkpoint"])
def test_a_new_configuration_in_memory_reaches_eager_transformations(program, kernel, chain, f):
    function = PROGRAMS[program](f)
    seen = [shown(function)]
    for key in keys_of(kernel):
        chain.cache.put(key, 3)
    assert [*seen, shown(function)] == [0, 3]


@pytest.mark.parametrize("program", ["jit", "eager scan", "eager cond", "vmap(jit)", "jit(grad)"])
def test_a_compiled_function_keeps_its_configuration_when_memory_changes(program, kernel, chain, f):
    function = PROGRAMS[program](f)
    before = shown(function)
    for key in keys_of(kernel):
        chain.cache.put(key, 3)
    assert (before, shown(function)) == (0, 0)


def test_clearing_memory_reaches_eager_calls(kernel, chain, f):
    chain.cache.put(keys_of(kernel)[0], 3)
    before = shown(f)
    chain.cache.clear()
    assert (before, shown(f)) == (3, 0)


def test_a_plan_made_during_a_change_of_memory_is_not_kept(kernel, chain):
    class ChangesMemory(ShowsConfig):
        def run(self, x, *, cfg):
            if cfg == 1:  # lowering, and resolved already
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    pool.submit(chain.cache.put, keys_of(self)[0], 3).result()
            return super().run(x, cfg=cfg)

    changing = ChangesMemory("shown")
    chain.cache.put(keys_of(changing)[0], 1)
    f = functools.partial(Executor(chain), changing)
    assert [shown(f), shown(f)] == [1, 3]


# Kernels of one name


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_two_kernels_of_one_name_never_share_an_executable(wrap):
    class Twice(ShowsConfig):
        def run(self, x, *, cfg):
            return 2 * x

    class Thrice(ShowsConfig):
        def run(self, x, *, cfg):
            return 3 * x

    executor = Executor(ConfigSelectorChain(policy=AutotunePolicy()))
    functions = [wrap(functools.partial(executor, cls("same"))) for cls in (Twice, Thrice, Twice)]
    assert [float(function(ONE)) for function in functions] == [2, 3, 2]


def test_two_kernels_of_one_name_in_one_program_run_apart():
    class Plus(ShowsConfig):
        def __init__(self, amount):
            super().__init__("plus")
            self.amount = amount

        def run(self, x, *, cfg):
            return x + self.amount

    one, ten = Plus(1), Plus(10)
    executor = Executor(ConfigSelectorChain())
    assert float(jax.jit(lambda x: executor(ten, executor(one, executor(one, x))))(jnp.zeros(()))) == 12


def test_two_executors_do_not_share_compiled_programs(kernel):
    chains = [ConfigSelectorChain(), ConfigSelectorChain()]
    chains[1].cache.put(keys_of(kernel)[0], 4)
    assert [shown(functools.partial(Executor(chain), kernel)) for chain in chains] == [0, 4]
