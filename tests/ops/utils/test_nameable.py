# SPDX-License-Identifier: Apache-2.0
"""Nameable objects: marked objects, and objects declared by signatures, defaults and fields."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NewType, Optional

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Invocation, Kernel, KernelError, PersistentCache, nameable, tune
from ejkernel.ops.autotuner.store.saving import saved_before
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core import declared_names
from ejkernel.ops.core.declared_names import decode_config, names_of
from ejkernel.ops.utils.values.nameable import Names, marked, quoted
from ejkernel.ops.utils.values.signature import describe

if TYPE_CHECKING:
    from decimal import Decimal

HERE = __name__


class Colour(enum.Enum):
    RED = 1


class Inner(NamedTuple):
    colour: Colour


class Size(enum.IntEnum):
    SMALL = 1


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner | None = None
    size: Any = Size.SMALL
    again: Outer | None = None


class Alone(enum.Enum):
    ONE = 1


Named = NewType("Named", Alone)


def function(x):
    return x


def other(x):
    return x


class Methods:
    @classmethod
    def of_class(cls, x):
        return x

    def of_object(self, x):
        return x

    @nameable
    @staticmethod
    def inside(x):
        return x


def found_in(declared):
    names = Names()
    names.add_function(declared)
    return {name.removeprefix(f"{HERE}.") for name in names._found}


# --- marking ---


def made(name):
    """Return a new dataclass of this module."""
    return dataclasses.dataclass(type(name, (), {"__module__": HERE, "__annotations__": {"rows": int}}))


def test_a_marked_object_is_found_by_its_name_in_descriptions():
    for thing in (nameable(function), nameable(Colour), nameable(jax.nn)):
        name = thing.__name__ if thing is jax.nn else f"{HERE}.{thing.__qualname__}"
        assert marked(name) is thing
    assert marked(f"{HERE}.Methods.inside") is Methods.inside
    assert marked(f"{HERE}.other") is None


def test_marking_keeps_nothing_alive(collect):
    short_lived = nameable(made("ShortLived"))
    assert marked(f"{HERE}.ShortLived") is short_lived
    del short_lived
    collect()
    assert marked(f"{HERE}.ShortLived") is None


def test_the_latest_of_a_name_counts():
    makes = [nameable(made("Twice")) for _ in range(2)]
    assert marked(f"{HERE}.Twice") is makes[1]


@pytest.mark.parametrize(
    "thing",
    [lambda x: x, functools.partial(function), 3, "name", Outer()],
    ids=["lambda", "partial", "number", "text", "object"],
)
def test_an_object_without_a_name_cannot_be_marked(thing):
    with pytest.raises(KernelError, match="nameable takes a function or class at the top level"):
        nameable(thing)


def test_a_method_of_a_class_may_be_marked_and_one_of_an_object_not():
    nameable(Methods.of_class)
    assert marked(f"{HERE}.Methods.of_class") == Methods.of_class
    with pytest.raises(KernelError, match="at the top level"):
        nameable(Methods().of_object)


def test_a_local_function_cannot_be_marked():
    def local(x):
        return x

    with pytest.raises(KernelError, match="at the top level"):
        nameable(local)


def test_a_function_of_c_may_be_marked():
    assert nameable(np.tanh) is np.tanh
    assert nameable(math.sqrt) is math.sqrt


# --- declaring ---


@pytest.mark.parametrize(
    "annotation",
    [
        Colour,
        "Colour",
        Colour | None,
        Optional["Colour"],
        Annotated[Colour, "of the text"],
        Sequence[Colour],
        dict[str, tuple[Colour, ...]],
        type[Colour],
        Callable[[Colour], jax.Array],
        Callable[..., Colour],
        Literal[Colour.RED],
        Inner,
        Outer,
    ],
)
def test_annotations_declare_the_classes_in_them(annotation):
    def run(self, x, y): ...

    run.__annotations__ = {"y": annotation}
    assert "Colour" in found_in(run)


def test_a_new_type_declares_its_supertype():
    def run(self, x: Named): ...

    assert "Alone" in found_in(run)


def test_an_annotation_that_cannot_be_resolved_declares_nothing_and_harms_no_other():
    def run(self, x: Decimal, y: Colour, z: "not even a name"): ...

    assert found_in(run) == {"Colour"}


@pytest.mark.parametrize(
    ("default", "names"),
    [
        (function, {"function"}),
        (Colour.RED, {"Colour"}),
        (Outer(size=Alone.ONE), {"Outer", "Inner", "Colour", "Size", "Alone"}),
        ((function, [other]), {"function", "other"}),
        ({"a": function, Colour.RED: 1}, {"function", "Colour"}),
        (functools.partial(function, Colour.RED, y=other), {"function", "Colour", "other"}),
        (Colour, {"Colour"}),
        (jnp, {"jax.numpy"}),
        (None, set()),
        (1, set()),
        ("os.system", set()),
    ],
)
def test_defaults_declare_their_types_and_functions(default, names):
    def run(self, x, y=default): ...

    assert found_in(run) == names


def test_a_kernels_forms_and_configuration_declare():
    class Forms(Kernel[Outer, jax.Array]):
        def run_cpu(self, x, *, cfg, how: Alone): ...
        def run_tpu(self, x, *, cfg, activation=other): ...

    names = names_of(Forms())
    for thing in (Outer, Inner, Colour, Size, Alone, other):
        assert names.find(f"{HERE}.{thing.__qualname__}") is thing


@tune(space={"rows": [1, 2]})
def tuned(x, *, how: Alone, activation=other, rows=1):
    return activation(x)


def test_a_tuned_function_declares_by_its_own_signature():
    names = names_of(tuned)
    assert names.find(f"{HERE}.Alone") is Alone
    assert names.find(f"{HERE}.other") is other


def test_jaxs_functions_go_by_the_names_that_descriptions_give_them():
    for value in (jnp.tanh, jax.nn.gelu, jax.lax.add, jax.scipy.special.erf, jnp.linalg.norm, jnp.add):
        assert Names().find(describe(value)["name"]) is value
    assert Names().find(describe(jax.lax.Precision.HIGH)["enum"]) is jax.lax.Precision


def test_a_name_in_a_message_is_short():
    assert quoted("a.b") == "'a.b'"
    assert len(quoted("a" * 10**6)) < 300


# --- kernels that name no type for their configurations ---


@dataclasses.dataclass(frozen=True)
class Unnamed:
    rows: int = 1


class Untyped(Kernel):
    def run(self, x, *, cfg):
        return x * cfg.rows

    def heuristic_cfg(self, inv):
        return Unnamed(1)


class ByAnnotation(Kernel):
    def run(self, x, *, cfg: InAnnotation):
        return x * cfg.rows

    def heuristic_cfg(self, inv) -> InReturned:
        return InReturned(1)


@dataclasses.dataclass(frozen=True)
class InAnnotation:
    rows: int = 1


@dataclasses.dataclass(frozen=True)
class InReturned:
    rows: int = 1


def test_annotations_of_hooks_name_the_type_of_a_kernel_that_names_none():
    for cls in (InAnnotation, InReturned):
        assert decode_config({"rows": 2}, f"{HERE}.{cls.__name__}") == cls(2)


def test_the_heuristic_determines_an_undeclared_configuration_type(tmp_path):
    """So its entries are found in a process that never stored one."""
    kernel = Untyped("untyped")
    inv = Invocation(kernel=kernel, args=(jnp.ones(4),))
    cache = PersistentCache(tmp_path, shipped=False)
    cache.put(inv.key, Unnamed(2))
    declared_names._noted.clear()  # as in another process
    found = ConfigSelectorChain(persistent=cache).resolve(inv, kernel)
    assert (found.config, found.source) == (Unnamed(2), "persistent")
    declared_names._noted.clear()
    earlier = saved_before(ConfigSelectorChain(persistent=cache), kernel, inv)  # a search of the call again
    assert earlier is not None
    assert earlier.config == Unnamed(2)
