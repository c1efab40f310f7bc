# SPDX-License-Identifier: Apache-2.0
"""Invalid answers are never used, and choosers with their own rules are asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.sample_kernels import ShowsConfig

from ejkernel.ops import (
    CacheWarning,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    KernelWarning,
    overlay_cache,
    policy_override,
)

X = np.ones(3, np.float32)


class SizeAsConfig(ShowsConfig):
    """All sizes are one bucket, with the size as the heuristic."""

    def heuristic_cfg(self, inv):
        return inv.args[0].shape[0]

    def bucket(self, inv):
        return (jax.ShapeDtypeStruct((8,), jnp.float32),), {}


def test_a_configuration_equal_to_the_heuristics_reaches_the_other_calls_of_its_bucket(executor, chain):
    kernel = SizeAsConfig()
    calls = [np.ones(size, np.float32) for size in (3, 4, 5)]
    assert [int(executor(kernel, x)) for x in calls] == [3, 4, 5]
    key = Invocation(kernel=kernel, args=(calls[0],)).key
    chain.cache.put(key, chain.cache.get(key))
    assert [int(executor(kernel, x)) for x in calls] == [3, 3, 3]


@pytest.mark.parametrize("program", [lambda f: f, jax.vmap], ids=["plain", "vmap"])
def test_a_configuration_equal_to_the_heuristics_reaches_a_backward(executor, chain, program):
    class Backward(SizeAsConfig):
        def heuristic_cfg(self, inv):
            return 1 if inv.direction == "fwd" else 2

        def bucket(self, inv):
            return inv.abstract_args, inv.abstract_kwargs

    kernel = Backward()

    def gradient():
        x = X if program is not jax.vmap else X[None]
        return float(program(jax.grad(lambda x: executor(kernel, x)))(x).ravel()[0])

    assert gradient() == 102
    forward = next(key for key in dict(chain.cache.items()) if ".bwd" not in key.op)
    chain.cache.put(forward, 1)
    assert gradient() == 101


def configuration_class(field="size"):
    """Return the class that a notebook's cell makes of one and the same text."""
    return dataclasses.make_dataclass("Tile", [(field, int)], frozen=True, namespace={"__module__": __name__})


def kernel_of(tile, name="tiled"):
    class Tiled(Kernel[tile, Any]):
        def run(self, x, *, cfg):
            return x * cfg.size

        def heuristic_cfg(self, inv):
            return tile(1)

    return Tiled(name)


def test_a_configuration_of_a_redefined_class_is_a_miss_with_a_warning_in_memory(executor, chain):
    old, new = configuration_class(), configuration_class()
    kernel = kernel_of(new)
    chain.cache.put(Invocation(kernel=kernel, args=(X,)).key, old(7))
    with pytest.warns(CacheWarning, match="the configuration in memory must be a Tile"):
        np.testing.assert_array_equal(executor(kernel, X), X)


def test_a_configuration_of_a_redefined_class_is_a_miss_with_a_warning_in_an_overlay(executor):
    old, new = configuration_class(), configuration_class()
    kernel = kernel_of(new)
    key = Invocation(kernel=kernel, args=(X,)).key
    with overlay_cache({key: old(7)}), pytest.warns(CacheWarning, match="the overlay's configuration must be a Tile"):
        np.testing.assert_array_equal(executor(kernel, X), X)
    with overlay_cache({key: new(7)}):
        np.testing.assert_array_equal(executor(kernel, X), 7 * X)


class Factor(Kernel[int, Any]):
    def run(self, x, *, cfg):
        return 2 * x

    def heuristic_cfg(self, inv):
        return 1


class OtherFactor(Factor):
    def run(self, x, *, cfg):
        return 3 * x


@pytest.mark.filterwarnings("error::ejkernel.ops.errors.KernelWarning")
def test_two_living_kernels_of_one_name_with_different_code_are_one_warning():
    executor = Executor(ConfigSelectorChain())
    first, second, third = Factor("factor"), OtherFactor("factor"), OtherFactor("factor")
    with pytest.warns(KernelWarning, match=r"factor@v0: two kernels of this name .*, Factor and OtherFactor"):
        np.testing.assert_array_equal(executor(first, X), 2 * X)
    # any further warning would be an error
    np.testing.assert_array_equal(executor(second, X), 3 * X)
    np.testing.assert_array_equal(executor(third, X), 3 * X)


def _apart(first, second):
    return Factor(first[0]), type("OtherFactor", (OtherFactor,), {"version": second[1]})(second[0])


@pytest.mark.filterwarnings("error::ejkernel.ops.errors.KernelWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: (Factor("one_code"), Factor("one_code")),
        lambda: (Factor("one"), OtherFactor("two")),
        lambda: _apart(("versions", "0"), ("versions", "1")),
    ],
    ids=["one code", "two names", "two versions"],
)
def test_kernels_that_cannot_be_taken_for_each_other_are_no_warning(make):
    executor = Executor(ConfigSelectorChain())
    for kernel in make():
        executor(kernel, X)


class Chooses(ConfigSelectorChain):
    def choose(self, inv, kernel):
        return 5


class Adds(ConfigSelectorChain):
    def choose(self, inv, kernel):
        return 10 + super().choose(inv, kernel)


class Inherits(Adds):
    pass


def _on_the_instance():
    chain = ConfigSelectorChain()
    chain.choose = lambda inv, kernel: 6
    return chain


class Resolves(Chooses):
    """Overrides `resolve`, which has the last word."""

    def resolve(self, inv, kernel):
        return dataclasses.replace(ConfigSelectorChain.resolve(self, inv, kernel), config=8)


CHOOSERS = {
    "overrides choose": (Chooses, 5),
    "asks super()": (Adds, 10),
    "inherits choose": (Inherits, 10),
    "has choose on the instance": (_on_the_instance, 6),
    "overrides resolve": (Resolves, 8),
}


@pytest.mark.parametrize(("make", "chosen"), CHOOSERS.values(), ids=CHOOSERS.keys())
def test_a_chain_that_chooses_by_itself_is_asked(make, chosen):
    executor, kernel = Executor(make()), ShowsConfig("shows")
    assert executor(kernel, X) == chosen
    assert jax.jit(lambda x: executor(kernel, x))(X) == chosen
    assert jax.grad(lambda x: executor(kernel, x))(X)[0] == 100 + chosen
    assert executor.choose_config(kernel, X) == chosen


def test_an_explicit_configuration_wins_over_a_chain_with_its_own_choose():
    assert Executor(Chooses())(ShowsConfig("shows"), X, cfg=2) == 2


def test_a_chain_that_calls_super_respects_overlays_and_policies():
    executor, kernel = Executor(Adds()), ShowsConfig("shows")
    with overlay_cache({Invocation(kernel=kernel, args=(X,)).key: 4}):
        assert executor(kernel, X) == 14
    with policy_override(autotune=False):
        assert executor(kernel, X) == 10
