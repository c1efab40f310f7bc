# SPDX-License-Identifier: Apache-2.0
"""Static values decoded from their descriptions, and rejected descriptions."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import inspect
import json
import math
import re
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from ejkernel.ops.errors import DescriptionError
from ejkernel.ops.utils.values.description import _FORMS, undescribe
from ejkernel.ops.utils.values.nameable import Names
from ejkernel.ops.utils.values.signature import describe


class Parts(enum.Flag):
    ROWS = 1
    COLUMNS = 2


class Mode(enum.Enum):
    FAST = 1
    SAFE = 2


class Level(enum.IntEnum):
    ONE = 1


class Pair(NamedTuple):
    left: Any
    right: Any = 0


@dataclasses.dataclass(frozen=True)
class Options:
    scale: Any = 1
    twice: Any = dataclasses.field(init=False, default=2)

    def __post_init__(self):
        if self.scale == "bad":
            raise ValueError("a bad scale")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    tokens: Any
    mode: str = dataclasses.field(default="train", metadata={"static": True})


class Box:
    def __init__(self, inner, tag):
        self.inner, self.tag = inner, tag


jax.tree_util.register_pytree_node(Box, lambda box: ((box.inner,), box.tag), lambda tag, inner: Box(*inner, tag))


def activation(x):
    return x * 2


class Methods:
    @staticmethod
    def square(x):
        return x * x


HERE = Names()
HERE.add_value([Mode, Level, Parts, Pair, Options, Batch, Box, activation, Methods.square, Methods])


def again(value, names=HERE):
    """Return the value after a trip through JSON."""
    return undescribe(json.loads(json.dumps(describe(value))), names)


VALUES = [
    None,
    True,
    7,
    -3,
    1.5,
    -0.0,
    math.inf,
    2 + 3j,
    "text é",
    b"\x00\xff",
    (1, (2.0, "a")),
    [1, [2]],
    {"b": 1, "a": {2: (3,)}},
    frozenset({1, 2}),
    slice(1, None, 2),
    range(0, 10, 3),
    Mode.SAFE,
    Level.ONE,
    Parts.ROWS | Parts.COLUMNS,
    Parts(0),
    Pair(1, (2,)),
    Options(scale=0.5),
    PartitionSpec("data", None, ("a", "b")),
    np.dtype("float32"),
    jnp.dtype("bfloat16"),
    activation,
    Methods.square,
    Methods,
    float,
    jnp.tanh,
    jax.nn.gelu,
    jax.lax.add,
    jnp,
    collections.OrderedDict(b=1, a=2),
    collections.defaultdict(int, {"a": 1}),
]


def name_of(value):
    """Return the test's id, without addresses so that it is the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+| from '[^']*'", "", repr(value))


@pytest.mark.parametrize("value", VALUES, ids=name_of)
def test_values_survive_a_round_trip(value):
    got = again(value)
    assert type(got) is type(value)
    assert got == value
    assert describe(got) == describe(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [({1, 2}, frozenset({1, 2})), (jnp.float32, np.dtype("float32")), (np.int8, np.dtype("int8"))],
    ids=name_of,
)
def test_values_with_equal_descriptions_decode_to_one_value(value, expected):
    assert again(value) == expected
    assert describe(again(value)) == describe(value)


def test_a_nan_comes_back():
    assert math.isnan(again(math.nan))


def test_a_partial_comes_back():
    got = again(functools.partial(activation, 1, y=2))
    assert (got.func, got.args, got.keywords) == (activation, (1,), {"y": 2})


def test_pytrees_come_back_with_arrays_in_them():
    got = again(Batch(jnp.ones((2, 3), jnp.int32), "eval"))
    assert (got.tokens.shape, got.tokens.dtype, got.mode) == ((2, 3), np.dtype("int32"), "eval")
    box = again(Box([jnp.ones(2), 5], "tag"))
    assert (box.inner[0].shape, box.inner[1], box.tag) == ((2,), 5, "tag")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "complex64", "uint8"])
def test_arrays_decode_to_their_types(dtype):
    got = again(jax.ShapeDtypeStruct((0, 3), dtype, weak_type=True))
    assert (got.shape, str(got.dtype), got.weak_type) == ((0, 3), dtype, True)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_come_back(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    got = again(keys)
    assert (got.shape, got.dtype) == (keys.shape, keys.dtype)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=6)
ANY = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.builds(Options, inner.filter(lambda value: value != "bad"))
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(ANY)
def test_describing_a_decoded_value_gives_the_same_description(value):
    assert describe(again(value)) == describe(value)


DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["float32", "os.system"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.sampled_from([*_FORMS]).flatmap(lambda names: st.fixed_dictionaries(dict.fromkeys(sorted(names), inner)))
    ),
    max_leaves=10,
)


@given(DATA)
def test_any_data_at_all_is_a_value_or_a_refusal(data):
    with contextlib.suppress(DescriptionError):
        undescribe(data, HERE)


# --- rejected descriptions ---


@pytest.mark.parametrize(
    "name",
    ["os.system", "builtins.eval", "subprocess.Popen", "jax.numpy.save", "jax.numpy.load", "jax.jit", "numpy.load"],
)
def test_only_registered_and_harmless_functions_are_found(name):
    with pytest.raises(DescriptionError, match="may not be named here"):
        undescribe({"name": name}, HERE)


def test_unregistered_attributes_of_a_module_are_not_found():
    with pytest.raises(DescriptionError, match="may not be named here"):
        undescribe({"name": f"{__name__}.given"}, HERE)
    assert callable(given)


def test_jaxs_functions_that_wrap_files_are_known_by_their_parameters():
    """A new function of that kind in a newer JAX must be refused too."""
    found = set()
    for module in (jnp, jax.nn, jax.lax, jax.scipy.special):
        for name, function in vars(module).items():
            if callable(function) and not name.startswith("_"):
                try:
                    parameters = inspect.signature(function).parameters
                except (TypeError, ValueError):
                    continue
                if any("file" in parameter or "path" in parameter for parameter in parameters):
                    found.add(f"{module.__name__}.{name}")
    for name in found:
        with pytest.raises(DescriptionError):
            undescribe({"name": name}, HERE)


def test_nothing_is_imported():
    assert "antigravity" not in sys.modules
    for data in (
        {"name": "antigravity.x"},
        {"dataclass": "antigravity.X", "fields": {}},
        {"enum": "antigravity.X", "name": "Y"},
    ):
        with pytest.raises(DescriptionError):
            undescribe(data, HERE)
    assert "antigravity" not in sys.modules


def test_a_modules_getattr_does_not_run(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "__getattr__", lambda name: pytest.fail("ran"), raising=False)
    with pytest.raises(DescriptionError, match="may not be named here"):
        undescribe({"name": f"{__name__}.absent"}, HERE)


def test_an_unregistered_type_is_refused():
    with pytest.raises(DescriptionError, match=r"test_description.Options' may not be named here"):
        again(Options(), Names())


def test_a_class_that_refuses_its_values_is_a_reason():
    fields = {"scale": "bad", "twice": 2}
    with pytest.raises(DescriptionError, match=r"Options rejected the values: ValueError: a bad scale"):
        undescribe({"dataclass": f"{__name__}.Options", "fields": fields}, HERE)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"array": ["float32", [2], 3]}, "needs a dtype and a shape"),
        ({"array": ["float32", ["n", 4]]}, "known sizes, got"),
        ({"array": ["float32", [True]]}, "known sizes, got"),
        ({"array": ["float32", [-1]]}, "known sizes, got"),
        ({"array": ["float32", [1] * 40]}, "at most 32"),
        ({"array": ["float32", [1 << 20, 1 << 20]]}, "larger than any device holds"),
        ({"array": ["float32", [0, 1 << 70]]}, "larger than any device holds"),
        ({"array": ["floaty", [2]]}, "is not a dtype"),
        ({"array": ["float32", [2]], "weak": False}, "needs a dtype"),
        ({"float": "one"}, "is not a float"),
        ({"bytes": "xyz"}, "hexadecimal"),
        ({"enum": f"{__name__}.Mode", "name": "SLOW"}, "Mode has no member str 'SLOW'"),
        ({"enum": f"{__name__}.Mode", "name": None}, "expected a string"),
        ({"enum": f"{__name__}.Mode", "value": 1}, "Mode has no member of value int 1"),
        ({"enum": f"{__name__}.Parts", "value": 8}, "Parts rejected the values"),
        ({"dataclass": f"{__name__}.Options", "fields": {"scale": 1}}, "fields of Options differ"),
        ({"dataclass": f"{__name__}.Pair", "fields": {}}, "is no dataclass"),
        ({"namedtuple": f"{__name__}.Options", "items": []}, "is no named tuple"),
        ({"node": f"{__name__}.Mode", "children": [], "aux": None}, "rejected the values"),
        ({"range": [0, 1, 0]}, "three integers"),
        ({"set": [{"list": []}]}, "cannot be hashed"),
        ({"map": [[1]]}, "expected a list of 2"),
        ({"partial": 3, "args": [], "kwargs": {"map": []}}, "needs a function"),
        ({"code": "import os"}, "describes no value"),
        (1.5, "describes no value"),
    ],
)
def test_bad_data_are_refused_with_a_reason(data, reason):
    with pytest.raises(DescriptionError, match=reason):
        undescribe(data, HERE)


@pytest.mark.parametrize("cls", [Batch, Box, collections.OrderedDict, collections.defaultdict], ids=name_of)
@pytest.mark.parametrize("children", [[], [1], [1, 2, 3], [None] * 1000], ids=len)
def test_a_node_of_any_content_is_a_value_or_refused(cls, children):
    """Jaxlib itself reads beyond the end of too few."""
    for aux in (None, [], 3, "s", ["a", "b"], ["eval"], {"list": [1]}, {"map": [["mode", 1]]}, "s" * 1000):
        with contextlib.suppress(DescriptionError):
            undescribe({"node": f"{cls.__module__}.{cls.__qualname__}", "children": children, "aux": aux}, HERE)


def test_deep_and_large_data_are_refused():
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    for data in (deep, [0] * 20_000):
        with pytest.raises(DescriptionError, match="more than 10000 values or 32 levels"):
            undescribe(data, HERE)
