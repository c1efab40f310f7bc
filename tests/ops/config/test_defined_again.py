# SPDX-License-Identifier: Apache-2.0
"""A notebook cell runs again: configurations of the earlier class are misses for the new class."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel, PersistentCache, tune
from ejkernel.ops.config.cache import overlay_cache
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.errors import CacheWarning, KernelError
from ejkernel.ops.implementation import Implementation, Implementations, OperationCall, OperationConfig
from ejkernel.ops.operation import Operation

X = np.ones(4, np.float32)

pytestmark = pytest.mark.filterwarnings("ignore::ejkernel.ops.errors.KernelWarning")


def first_cell():
    """Return a kernel as its cell makes it at first."""

    @dataclasses.dataclass(frozen=True)
    class Tiles:
        rows: int = 2

    class Scale(Kernel):
        def run(self, x, *, cfg):
            return x * cfg.rows

        def heuristic_cfg(self, inv):
            return Tiles()

    return Scale(), Tiles


def second_cell():
    """Return it after its configuration got another field."""

    @dataclasses.dataclass(frozen=True)
    class Tiles:
        columns: int = 3

    class Scale(Kernel):
        def run(self, x, *, cfg):
            return x * cfg.columns

        def heuristic_cfg(self, inv):
            return Tiles()

    return Scale(), Tiles


def invocation(kernel):
    return Invocation(kernel=kernel, args=(X,))


def test_a_remembered_configuration_of_the_class_before_is_a_miss():
    chain = ConfigSelectorChain()
    (before, old), (after, new) = first_cell(), second_cell()
    chain.cache.put(invocation(before).key, old())
    with pytest.warns(CacheWarning, match=r"in memory must be a Tiles, got .*rows=2.*, of an earlier"):
        found = chain.resolve(invocation(after), after)
    assert (type(found.config), found.source) == (new, "heuristic")
    # The answer takes the old one's place, so that the next call does not warn again.
    assert chain.resolve(invocation(after), after).config == new()


def test_eager_calls_and_gradients_run_with_the_class_after():
    executor = Executor(ConfigSelectorChain())
    (before, old), (after, _) = first_cell(), second_cell()
    executor(before, X)
    executor.chooser.cache.put(invocation(before).key, old(5))
    with pytest.warns(CacheWarning, match="of an earlier definition of Tiles"):
        out, gradient = jax.value_and_grad(lambda x: executor(after, x).sum())(jnp.asarray(X))
    assert (float(out), float(gradient[0]), float(executor(after, X)[0])) == (12, 3, 3)


def test_an_overlay_of_the_class_before_is_a_miss():
    chain = ConfigSelectorChain()
    (before, old), (after, new) = first_cell(), second_cell()
    with (
        overlay_cache({invocation(before).key: old()}),
        pytest.warns(CacheWarning, match="the overlay's configuration must be a Tiles"),
    ):
        assert chain.resolve(invocation(after), after).config == new()


def test_an_entry_that_the_class_before_saved_is_a_miss(tmp_path):
    (before, old), (after, new) = first_cell(), second_cell()
    with pytest.warns(CacheWarning, match=r"get\(\) will not find"):
        PersistentCache(tmp_path).put(invocation(before).key, old())
    chain = ConfigSelectorChain(ConfigCache(), PersistentCache(tmp_path))
    with pytest.warns(CacheWarning, match="ignoring"):
        assert chain.resolve(invocation(after), after).config == new()


@pytest.mark.parametrize("config", [4, (4,), {"rows": 4}, "four"])
def test_plain_data_is_a_miss_for_a_configuration_class(config):
    chain = ConfigSelectorChain()
    after, new = second_cell()
    chain.cache.put(invocation(after).key, config)
    with pytest.warns(CacheWarning, match="must be a Tiles, got"):
        assert chain.resolve(invocation(after), after).config == new()


# --- configurations of several kinds ---


class Wide(NamedTuple):
    """One of two classes of configurations."""

    rows: int


@dataclasses.dataclass(frozen=True)
class Narrow:
    """The other one."""

    rows: int = 1


class Subclass(Narrow):
    """One that extends it."""


class ByCandidates(Kernel):
    """A kernel with candidates of two classes."""

    def run(self, x, *, cfg):
        return x * cfg.rows

    def heuristic_cfg(self, inv):
        return Narrow()

    def config_space(self, inv):
        return [Narrow(), Wide(2)]


class ByAnnotation(Kernel):
    """A kernel with two classes in its annotation."""

    def run(self, x, *, cfg: Narrow | Wide):
        return x * cfg.rows

    def heuristic_cfg(self, inv):
        return Narrow()


class Plain(Kernel):
    """A kernel with plain JSON values as configurations."""

    def __init__(self, heuristic):
        super().__init__()
        self.heuristic = heuristic

    def run(self, x, *, cfg):
        return x

    def heuristic_cfg(self, inv):
        return self.heuristic


@pytest.mark.parametrize(
    ("kernel", "config"),
    [
        (ByCandidates(), Wide(2)),
        (ByCandidates(), Subclass(2)),
        (ByAnnotation(), Wide(2)),
        (Plain((1, 2)), [3, 4]),
        (Plain(1), 2.5),
        (Plain({"rows": 1}), {"rows": 2}),
    ],
    ids=["candidates", "subclass", "annotation", "list", "float", "dictionary"],
)
def test_a_configuration_of_any_kind_that_the_kernel_has_is_taken(kernel, config):
    chain = ConfigSelectorChain()
    chain.cache.put(invocation(kernel).key, config)
    assert chain.resolve(invocation(kernel), kernel).config == config


def test_a_kernel_without_its_own_answer_uses_memory():
    class Silent(Kernel):
        def run(self, x, *, cfg):
            return x

    kernel, chain = Silent(), ConfigSelectorChain()
    chain.cache.put(invocation(kernel).key, Narrow())
    assert chain.resolve(invocation(kernel), kernel).config == Narrow()


# --- functions, and operations ---


def test_a_redefined_function_finds_no_earlier_configuration():
    def total(x, *, rows=2):
        return x * rows

    def cell(x, *, columns=3):
        return x * columns

    cell.__name__ = "total"
    before, after = tune(total, space={"rows": [2]}), tune(cell, space={"columns": [3]})
    chain = ConfigSelectorChain()
    chain.cache.put(invocation(before).key, {"rows": 2})
    with pytest.warns(CacheWarning, match="must be a dictionary with columns"):
        assert chain.resolve(invocation(after), after).config == {"columns": 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(OperationConfig):
    """The configuration of an operation; its cell runs again."""

    implementation: str = "plain"


def operation(field, path="Doubled"):
    """Return a new operation as one of its cells makes it, with one parameter field, and its parameters' class."""
    made = dataclasses.make_dataclass("Params", [(field, int, 2)], frozen=True)

    class Plain(Implementation):
        name = "plain"
        params = made

        def heuristic(self, call):
            return made()

    class Doubled(Operation[Config, OperationCall, jax.Array]):
        __qualname__ = path
        implementations = Implementations({"plain": Plain()})

        def describe(self, *args, **options):
            return OperationCall()

    return Doubled(), made


def test_an_operation_may_be_defined_again_with_the_same_class_of_configurations():
    before, old = operation("rows")
    remembered = Config(fwd=old())
    after, new = operation("columns")
    chain = ConfigSelectorChain()
    chain.cache.put(invocation(before).key, remembered)
    with pytest.warns(CacheWarning, match="fwd must be an instance of Params for implementation='plain'"):
        assert chain.resolve(invocation(after), after).config == Config(fwd=new())


def test_another_operation_needs_a_separate_class():
    operation("rows")
    with pytest.raises(KernelError, match="Config is the configuration type of another operation"):
        operation("rows", path="Tripled")
