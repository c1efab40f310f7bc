# SPDX-License-Identifier: Apache-2.0
"""Identity of static values: equal only for the same type, bits and structure."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import struct
import types
import weakref
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from ejkernel.ops.utils import weak_caches
from ejkernel.ops.utils.values.identity import by_is, identity, identity_of_node, token_of
from ejkernel.ops.utils.weak_caches import Bounded, Noted, PerObject, living

NAN, OTHER_NAN = (struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8 << 48, (0x7FF8 << 48) + 1))


class Color(enum.Enum):
    RED = "red"


class Text(enum.StrEnum):
    RED = "red"


class Pair(NamedTuple):
    left: Any
    right: Any


class Other(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any

    @functools.cached_property
    def twice(self):
        return 2 * self.value


@dataclasses.dataclass(frozen=True)
class Derived(Frozen):
    pass


@dataclasses.dataclass
class Mutable:
    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    value: Any


class ByContent:
    """Compares and hashes by content, in a slot with a mangled name."""

    __slots__ = ("__value", "__weakref__")

    def __init__(self, value):
        self.__value = value

    def change(self, value):
        self.__value = value

    def __eq__(self, other):
        return isinstance(other, ByContent) and self.__value == other.__value

    def __hash__(self):
        return hash(self.__value)


class Unhashable(ByContent):
    __slots__ = ()
    __hash__ = None


class Plain:
    def __init__(self, value=0):
        self.value = value

    def method(self):
        return self.value

    def other(self):
        return -self.value


class AlwaysEqual:
    """Says that it equals everything."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


def function(x):
    return x


def parts(value):
    """Return type and content of plain data, with the bits of floats. Equal results mean equal values."""
    if isinstance(value, tuple | frozenset):
        return type(value), type(value)(parts(item) for item in value)
    if isinstance(value, float):
        return float, struct.pack("<d", value)
    return type(value), value


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([0.0, -0.0, 1.0, NAN, OTHER_NAN]), st.text("a1")
)
data = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)),
    max_leaves=8,
)


@given(data, data)
def test_identities_are_equal_exactly_for_values_of_one_type_bits_and_structure(left, right):
    assert (identity(left) == identity(right)) == (parts(left) == parts(right))


@pytest.mark.slow
@given(data, data)
def test_containers_are_distinguished_by_their_values(left, right):
    same = identity(left) == identity(right)
    for hold in (Frozen, Slotted, functools.partial(Pair, 1), functools.partial(functools.partial, function)):
        assert (identity(hold(left)) == identity(hold(right))) == same


@given(data)
def test_a_recreated_value_is_the_same(value):
    again = Frozen(value)
    assert identity(Frozen(value)) == identity(again)
    assert hash(identity(Frozen(value))) == hash(identity(again))
    assert token_of(again) == token_of(Frozen(value))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (NAN, OTHER_NAN),
        (0j, complex(0, -0.0)),
        ("red", np.str_("red")),
        ("red", b"red"),
        ("red", Text.RED),
        (Color.RED, Text.RED),
        ((1, 2), (1, True + True, 3)),
        ((1, 2), Pair(1, 2)),
        (Pair(1, 2), Other(1, 2)),
        ((1,), (True,)),
        (frozenset({1}), frozenset({True})),
        (slice(0, 1), slice(False, True)),
        (range(0), range(1, 1)),
        (Frozen(1), Frozen(1.0)),
        (Frozen(1), Derived(1)),
        (Slotted(0.0), Slotted(-0.0)),
        (ByContent(1), ByContent(True)),
        (functools.partial(function, 1), functools.partial(function, True)),
        (functools.partial(function, x=0.0), functools.partial(function, x=-0.0)),
        (functools.partial(function), functools.partial(Plain().method)),
        (Plain().method, Plain().method),
        (Plain(), Plain()),
        (lambda x: x, lambda x: x),
        (AlwaysEqual(), AlwaysEqual()),
        (np.dtype("float32"), np.float32),
        (np.datetime64(0, "s"), np.datetime64(0, "ms")),
        (PartitionSpec("i"), PartitionSpec("j")),
        (types.MappingProxyType({"a": 1}), types.MappingProxyType({"a": True})),
        ([].append, [].append),
        ([], []),
        (Mutable(1), Mutable(1)),
    ],
)
def test_values_that_may_compute_differently_are_distinguished(left, right):
    assert identity(left) != identity(right)
    assert identity((left,)) != identity((right,))
    assert token_of(left) != token_of(right)


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: complex(float("nan"), -0.0),
        lambda: Frozen(Frozen((1, "a"))),
        lambda: Slotted(Color.RED),
        lambda: ByContent((1, 2)),
        lambda: functools.partial(function, 1, scale=2.0),
        lambda: functools.partial(functools.partial(function, 1), 2),
        lambda: slice(None, 3),
        lambda: types.MappingProxyType({"a": 1}),
        lambda: PartitionSpec("i", None),
        lambda: PLAIN.method,
        lambda: jax.jit(function),
        lambda: np.dtype("int8"),
        lambda: np.int8,
    ],
)
def test_recreated_values_are_the_same(make):
    first, second = make(), make()
    if type(first).__name__ == "PjitFunction":  # a new object each time
        second = first
    assert identity(first) == identity(second)
    assert token_of(first) == token_of(second)


PLAIN = Plain()


def test_methods_of_one_object_are_distinguished_by_name():
    assert identity(PLAIN.method) != identity(PLAIN.other)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda value: value.append(2)),
        ({"a": 1}, lambda value: value.update(a=2)),
        ({1}, lambda value: value.add(2)),
        (bytearray(b"a"), lambda value: value.append(1)),
        (collections.deque([1]), lambda value: value.append(2)),
        (collections.OrderedDict(a=1), lambda value: value.update(a=2)),
        (collections.Counter("a"), lambda value: value.update("a")),
        (Mutable(1), lambda value: setattr(value, "value", 2)),
        (types.SimpleNamespace(a=1), lambda value: setattr(value, "a", 2)),
        (ByContent(1), lambda value: value.change(2)),
        (Unhashable(1), lambda value: value.change(2)),
        (np.zeros(3), lambda value: value.fill(1)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("hold", [lambda value: value, Frozen, functools.partial(functools.partial, function)])
def test_a_changed_value_has_another_identity(hold, value, change):
    value = copy.copy(value)
    held = hold(value)
    before = identity(held), token_of(held)
    assert before == (identity(held), token_of(held))
    change(value)
    assert identity(held) != before[0]
    assert token_of(held) != before[1]


def test_the_content_of_a_mapping_proxy_may_change():
    shown = {"a": 1}
    held = functools.partial(function, types.MappingProxyType(shown))
    before = token_of(held)
    shown["a"] = 2
    assert token_of(held) != before


def test_a_cached_result_does_not_belong_to_the_value():
    value = Frozen(1)
    before = identity(value)
    assert value.twice == 2
    assert identity(value) == before == identity(Frozen(1))


@pytest.mark.parametrize("make", [list, lambda: Mutable(None), dict])
def test_a_value_that_holds_itself_has_an_identity(make):
    value = make()
    if isinstance(value, list):
        value.append(value)
    elif isinstance(value, dict):
        value["self"] = value
    else:
        value.value = value
    assert identity(value) == identity(value)
    assert identity(value) != identity(make())


def test_by_is_does_not_ask_the_object():
    one, other = AlwaysEqual(), AlwaysEqual()
    assert by_is(one) == by_is(one)
    assert by_is(one) != by_is(other)
    assert by_is(1000) != by_is(int("1000"))


def test_a_dead_reference_equals_only_itself(collect):
    one = Plain()
    first, second = by_is(one), by_is(one)
    assert first == second
    del one
    collect()
    assert first == first
    assert first != second


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    value: object


def test_the_token_of_an_object_that_cannot_be_referred_to_is_remembered():
    one = Slotted(1)
    assert token_of(one) is token_of(one)
    assert token_of(one) == token_of(Slotted(1))


def test_tokens_of_objects_with_a_reused_address_differ():
    assert len({token_of(Slotted(number)) for number in range(500)}) == 500


def test_an_object_with_a_token_does_not_keep_its_content_alive(collect):
    one = Plain()
    reference, token = weakref.ref(one), token_of(Slotted(one))
    del one
    collect()
    assert reference() is None
    assert token != token_of(Slotted(Plain()))


def test_neither_identity_nor_token_keeps_an_object_alive(collect):
    one = Plain()
    held = functools.partial(function, one)
    kept = identity(held), token_of(held), token_of(one)
    reference = weakref.ref(one)
    del one, held
    collect()
    assert reference() is None
    assert len(kept) == 3


class Static:
    """A fully static pytree node, compared by content."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Static) and self.value == other.value

    def __hash__(self):
        return hash(self.value)


@pytest.mark.parametrize(
    ("left", "right"), [(0.0, -0.0), (1, True), ((1,), (1.0,)), (Plain(1), Plain(True)), (function, lambda x: x)]
)
def test_node_data_is_distinguished_by_type_and_bits_although_jax_uses_equality(left, right):
    node = object()
    assert identity_of_node(node, left) != identity_of_node(node, right)
    assert identity_of_node(Static(left), Static(left)) != identity_of_node(Static(right), Static(right))
    static = Static(left), Static(right)
    assert identity_of_node(static[0], static[0]) != identity_of_node(static[1], static[1])


def test_recreated_data_of_a_node_is_the_same():
    node = object()
    assert identity_of_node(node, Plain((1, "a"))) == identity_of_node(node, Plain((1, "a")))
    assert identity_of_node(node, Static(1)) == identity_of_node(node, Static(1))


def test_a_table_per_object_uses_identity_and_drops_dead_objects(collect):
    table = PerObject(list)
    one, other = AlwaysEqual(), AlwaysEqual()
    assert table.of(one) is table.of(one)
    assert table.of(one) is not table.of(other)
    del one
    collect()
    assert len(table) == 1


def test_a_bounded_table_lets_go_of_its_oldest_entries(monkeypatch):
    monkeypatch.setattr(Bounded, "most", 8)
    table = Bounded()
    for number in range(100):
        assert table.keep(number, str(number)) == str(number)
        assert len(table) <= 8
    assert 99 in table
    assert 0 not in table
    assert table.keep(99, "another") == "99"


# --- the live instances of a class ---


class Thing(Noted):
    def __init__(self, name="", *, size=0):
        self.name = name


class Unrelated(Noted):
    pass


def test_instances_are_listed_in_the_order_of_their_making():
    things = [Thing("a"), Thing("b", size=2), Thing()]
    assert [thing for thing in living(Thing) if thing in things] == things


def test_an_unreferenced_instance_is_removed(collect):
    thing = Thing("gone")
    del thing
    collect()
    assert "gone" not in [thing.name for thing in living(Thing)]


def test_the_table_does_not_grow_with_removed_instances(collect):
    collect()
    before = len(weak_caches._living)
    for _ in range(100):
        Thing("gone")
    collect()
    assert len(weak_caches._living) <= before


def test_instances_of_subclasses_count_and_those_of_other_classes_do_not():
    other, sub = Unrelated(), type("Sub", (Thing,), {})()
    assert sub in living(Thing)
    assert other not in living(Thing)


def test_a_subclass_need_not_call_init():
    class Silent(Thing):
        def __init__(self):
            pass

    silent = Silent()
    assert silent in living(Thing)


def test_a_copy_is_a_separate_instance():
    thing = Thing("original")
    twin = copy.copy(thing)
    assert twin in living(Thing)
