# SPDX-License-Identifier: Apache-2.0
"""JSON of configurations: round trips, one text for equal content, and strictness in both directions."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import os
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops.errors import ConfigError, SerializationError
from ejkernel.ops.utils.datacarrier import FwdParams
from ejkernel.ops.utils.storage.serialize import from_json, from_plain, stable_json, to_data, to_json

T = TypeVar("T")
Warps = NewType("Warps", int)


class Backend(enum.Enum):
    XLA = "xla"
    MOSAIC = "mosaic_gpu"


class Order(enum.IntEnum):
    ROW = 0
    COLUMN = 1


class Parts(enum.Flag):
    LEFT = 1
    RIGHT = 2


class Mode(str, enum.Enum):  # noqa: UP042 - the form that has two bases
    FAST = "fast"


class Tile(NamedTuple):
    rows: int
    columns: int = 8


SMALL = Tile(4)
FLOAT32 = np.dtype("float32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    block: int
    scale: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    flag: bool = False
    inner: Inner
    maybe: Inner | None = None
    size: int | float | str = 1
    layout: Literal["row", "column", 1] = "row"
    backend: Backend = Backend.XLA
    order: Order = Order.ROW
    parts: Parts = Parts.LEFT
    mode: Mode = Mode.FAST
    blocks: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    items: list[Inner] = dataclasses.field(default_factory=list)
    table: dict[str, Inner] = dataclasses.field(default_factory=dict)
    tile: Tile = SMALL
    dtype: jnp.dtype = FLOAT32
    names: frozenset[str] = frozenset()
    anything: Any = None


@dataclasses.dataclass(frozen=True)
class Node:
    value: int
    children: tuple[Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class Box(Generic[T]):
    content: T


@dataclasses.dataclass
class Left:
    a: int


@dataclasses.dataclass
class Right:
    a: int


@dataclasses.dataclass
class Wide:
    a: int
    b: int = 0


ints = st.integers(-(2**70), 2**70)
floats = st.floats(allow_nan=False, allow_infinity=False)
inners = st.builds(Inner, block=ints, scale=floats)
tiles = st.builds(Tile, ints, ints)
outers = st.builds(
    Outer,
    name=st.text(),
    flag=st.booleans(),
    inner=inners,
    maybe=st.none() | inners,
    size=ints | floats | st.text(),
    layout=st.sampled_from(["row", "column", 1]),
    backend=st.sampled_from(Backend),
    order=st.sampled_from(Order),
    parts=st.sampled_from([Parts(0), *Parts, Parts.LEFT | Parts.RIGHT]),
    mode=st.sampled_from(Mode),
    blocks=st.lists(ints, max_size=3).map(tuple),
    pair=st.tuples(ints, st.text()),
    items=st.lists(inners, max_size=2),
    table=st.dictionaries(st.text(), inners, max_size=2),
    tile=tiles,
    dtype=st.sampled_from(["float32", "bfloat16", "int4", "float8_e4m3fn", "bool"]).map(np.dtype),
    names=st.frozensets(st.text(), max_size=3),
    anything=st.none() | st.booleans() | ints | floats | st.text() | st.lists(ints, max_size=2),
)
json_values = st.recursive(
    st.none() | st.booleans() | ints | floats | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def refused(text, cls):
    """Return the error message for decoding `text` as a `cls`."""
    with pytest.raises(SerializationError) as caught:
        from_json(text, cls)
    return str(caught.value)


def same_types(left, right):
    return type(left) is type(right) and stable_json(left) == stable_json(right)


# --- round trips ---


@pytest.mark.slow
@given(outers)
def test_a_nested_configuration_survives_json(config):
    again = from_json(to_json(config), Outer)
    assert config == again
    assert all(same_types(getattr(config, f.name), getattr(again, f.name)) for f in dataclasses.fields(Outer))


@given(outers)
def test_stable_json_reads_back_as_the_same_configuration(config):
    assert config == from_json(stable_json(config), Outer)


@given(json_values)
def test_plain_data_survives_json_with_its_types(value):
    again = from_json(to_json(value), Any)
    assert same_types(value, again)
    assert stable_json(value) == stable_json(again)


@pytest.mark.parametrize("value", [None, True, 3, 2.5, "text", [1, "a"], (1, 2), {"a": [1]}])
def test_a_plain_value_at_the_top_reads_back_as_its_own_type(value):
    assert value == from_json(to_json(value), type(value))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int4", "uint8", "bool", "complex64", "float8_e5m2", "float0"])
def test_a_dtype_survives_json(name):
    dtype = np.dtype(jax.dtypes.float0) if name == "float0" else np.dtype(name)
    assert f'"{name}"' == stable_json(dtype)
    assert dtype == from_json(stable_json(dtype), np.dtype)


@pytest.mark.parametrize("scalar", [jnp.bfloat16, jnp.float32, np.float32, np.int8, jnp.bool_])
def test_a_scalar_type_is_written_as_its_dtype(scalar):
    assert np.dtype(scalar).name == to_data(scalar)


def test_a_key_dtype_is_written_by_name():
    assert to_data(jax.eval_shape(lambda: jax.random.key(0)).dtype) == "key<fry>"


@pytest.mark.parametrize(
    ("scalar", "value"),
    [(np.int64(3), 3), (np.float32(0.5), 0.5), (np.float64(0.5), 0.5), (np.bool_(True), True), (np.str_("a"), "a")],
)
def test_a_numpy_scalar_is_written_as_a_python_value(scalar, value):
    data = to_data(scalar)
    assert (type(value), value) == (type(data), data)


def test_a_scalar_of_a_jax_dtype_is_written_as_a_number():
    assert to_data([jnp.bfloat16.dtype.type(1.5), np.dtype("int4").type(3)]) == [1.5, 3]


def test_a_named_tuple_is_an_object_and_takes_its_defaults():
    assert to_data(Tile(4)) == {"columns": 8, "rows": 4}
    assert Tile(4, 8) == from_json('{"rows": 4}', Tile)


def test_a_named_tuple_without_annotations_keeps_its_plain_items():
    point = collections.namedtuple("point", "x y", defaults=[0])
    assert point(1, [2]) == from_json(to_json(point(1, [2])), point)
    assert "$.x: missing; point needs it; $.z: point has no such field; it has x, y" in refused('{"z": 1}', point)
    assert refused("[1, 2]", point).startswith("$: expected an object")


def test_a_configuration_that_holds_itself_by_name_survives_json():
    tree = Node(1, (Node(2), Node(3, (Node(4),))))
    assert tree == from_json(to_json(tree), Node)


def test_a_generic_configuration_takes_its_argument():
    assert Box(3) == from_json('{"content": 3}', Box[int])
    assert "$.content: expected str" in refused('{"content": 3}', Box[str])
    assert "generic argument T" in refused('{"content": 3}', Box)


def test_a_name_inside_an_annotation_is_resolved():
    @dataclasses.dataclass
    class Holder:
        nodes: object

    Holder.__annotations__["nodes"] = list["Node"]  # as without the __future__ import
    Holder.__dataclass_fields__["nodes"].type = list["Node"]
    assert Holder([Node(1)]) == from_json('{"nodes": [{"value": 1}]}', Holder)


def test_fields_that_init_does_not_take_are_left_out():
    @dataclasses.dataclass
    class Derived:
        a: int
        b: int = dataclasses.field(init=False)

        def __post_init__(self):
            self.b = self.a + 1

    assert stable_json(Derived(1)) == '{"a":1}'
    assert Derived(1) == from_json('{"a": 1}', Derived)


def test_a_dataclass_inside_a_function_reads_back():
    @dataclasses.dataclass(frozen=True)
    class Local:
        blocks: tuple[int, ...]
        inner: Inner | None = None

    assert Local((1, 2), Inner(block=3)) == from_json(to_json(Local((1, 2), Inner(block=3))), Local)


def test_an_annotation_that_cannot_be_resolved_is_a_clear_error():
    @dataclasses.dataclass
    class Hidden:
        a: int

    @dataclasses.dataclass
    class Holder:
        hidden: Hidden

    message = refused('{"hidden": {"a": 1}}', Holder)
    assert "the annotations of" in message
    assert "'Hidden' is not defined" in message


@pytest.mark.parametrize(
    ("cls", "text", "value"),
    [
        (Sequence[int], "[1]", (1,)),
        (Mapping[str, int], '{"a": 1}', {"a": 1}),
        (set[int], "[1, 2]", {1, 2}),
        (Annotated[int, "warps"], "4", 4),
        (Warps, "4", 4),
        (dict, '{"a": [1]}', {"a": [1]}),
        (tuple, "[1, [2]]", (1, (2,))),
        (float, "2", 2.0),
        (Literal[1, "a"], "1", 1),
        (dict[Literal["a"], int], '{"a": 1}', {"a": 1}),
        (None, "null", None),
        (int | float, "2", 2),
        (float | int, "2.0", 2.0),
        (str | np.dtype, '"float32"', "float32"),
        (Left | Wide, '{"a": 1, "b": 2}', Wide(1, 2)),
        (Left | Wide, '{"a": 1}', Left(1)),
        (tuple[int, ...] | tuple[int, int], "[1, 2]", (1, 2)),
    ],
    ids=str,
)
def test_the_annotation_determines_the_decoded_type(cls, text, value):
    out = from_json(text, cls)
    assert (type(value), value) == (type(out), out)


# --- one text for equal content ---


@pytest.mark.slow
@given(st.dictionaries(st.text(), json_values))
def test_insertion_order_does_not_matter(value):
    assert stable_json(value) == stable_json(dict(reversed(value.items())))


@given(st.sets(st.text() | st.integers()))
def test_sets_are_sorted(value):
    assert stable_json(value) == stable_json(frozenset(sorted(value, key=repr, reverse=True)))


@given(json_values)
def test_stable_json_is_ascii_without_spaces_between_tokens(value):
    text = stable_json(value)
    assert text.isascii()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


@pytest.mark.slow
def test_stable_json_is_the_same_under_every_hash_seed():
    probe = (
        "from ejkernel.ops.utils.storage.serialize import stable_json; import numpy as np;"
        "print(stable_json({'b': {'x', 'y', 'zz', 'é'}, 'a': np.dtype('bfloat16'), 'c': 0.1}))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", probe],
            check=True,
            capture_output=True,
            env={**_environment(), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert {b'{"a":"bfloat16","b":["\\u00e9","x","y","zz"],"c":0.1}\n'} == {text.replace(b"\r", b"") for text in texts}


def _environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_numbers_of_different_types_have_different_texts():
    assert len({stable_json(1), stable_json(1.0), stable_json(True)}) == 3


def test_to_json_is_indented_and_sorted():
    assert to_json({"b": 1, "a": "é"}) == '{\n  "a": "é",\n  "b": 1\n}'


# --- values that cannot be encoded ---


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "float must be finite, got nan"),
        (math.inf, "float must be finite, got inf"),
        (np.float32("nan"), "float must be finite, got nan"),
        ({1: 2}, "keys must be str, got int 1"),
        ({None: 2}, "keys must be str, got None"),
        (len, "a callable of type builtin_function_or_method has no JSON form"),
        (Inner, "a callable of type type has no JSON form"),
        (np.ones(2), "a value of type numpy.ndarray has no JSON form; convert it to numbers with .tolist()."),
        (jnp.int32(3), "ArrayImpl has no JSON form; convert it to numbers with .tolist()."),
        (1j, "a value of type complex has no JSON form"),
        (np.complex64(1j), "a value of type numpy.complex64 has no JSON form"),
        (b"a", "a value of type bytes has no JSON form"),
        (Opaque(), "Opaque has no JSON form"),
        (np.floating, "a callable of type type has no JSON form"),
        (np.dtype(">i4"), "has no JSON form"),
        ("\ud800", "str must be valid Unicode"),
        ({"\ud800": 1}, "str must be valid Unicode"),
    ],
)
@pytest.mark.parametrize("write", [to_data, to_json, stable_json])
def test_a_value_without_a_json_form_is_an_error_with_its_path(write, value, message):
    with pytest.raises(SerializationError, match=r"^\$\.fwd\[1\]: ") as caught:
        write({"fwd": [0, value]})
    assert message in str(caught.value)


def test_an_odd_key_is_quoted_in_the_path():
    with pytest.raises(SerializationError, match=r'^\$\["a b"\]\.c: '):
        to_data({"a b": {"c": math.nan}})


def test_the_path_goes_through_dataclasses_and_named_tuples():
    with pytest.raises(SerializationError, match=r"^\$\.inner\.scale: "):
        to_data(Outer(name="a", inner=Inner(block=1, scale=math.nan)))
    with pytest.raises(SerializationError, match=r"^\$\[0\]\.rows: "):
        to_data([Tile(math.inf)])


def test_a_container_that_holds_itself_is_an_error():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(SerializationError, match="or a container that contains itself"):
        to_data(loop)


def test_an_integer_that_python_refuses_to_print_is_an_error():
    with pytest.raises(SerializationError, match="cannot be written as JSON"):
        stable_json(10**6000)


def test_other_mappings_and_subclasses_of_built_ins_are_written():
    class Text(str):
        __slots__ = ()

    data = to_data(types.MappingProxyType({Text("a"): Text("b")}))
    assert data == {"a": "b"}
    assert str is type(data["a"])


# --- text that cannot be decoded ---


@pytest.mark.slow
@given(outers, st.lists(st.sampled_from(["inner", "maybe", "tile"]), max_size=1))
def test_an_unknown_field_is_refused_at_any_depth(config, path):
    data = to_data(config)
    place = data
    for name in path:
        if place[name] is None:
            return
        place = place[name]
    place["blok"] = 1
    with pytest.raises(SerializationError, match=r"^\$[a-z.]*\.blok: \w+ has no such field; it has ") as caught:
        from_plain(data, Outer)
    assert str(caught.value).startswith("$" + "".join(f".{name}" for name in path) + ".blok: ")


@pytest.mark.slow
@given(outers, st.sampled_from(sorted({f.name for f in dataclasses.fields(Outer)} - {"size", "anything"})))
def test_a_value_of_a_wrong_type_is_refused_with_its_path(config, field):
    data = to_data(config)
    data[field] = 2.5
    with pytest.raises(SerializationError, match=rf"^\$\.{field}: ") as caught:
        from_plain(data, Outer)
    assert "2.5" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "cls"),
    [
        ("true", int),
        ("64.0", int),
        ('"1"', int),
        ("1", bool),
        ("null", bool),
        ("1", str),
        ("true", float),
        ('"1.0"', float),
        ("NaN", float),
        ("Infinity", float),
        ("1e999", float),
        (str(2**53 + 1), float),
        (str(10**400), float),
        ("1", None),
        ('"abc"', list[str]),
        ('{"a": 1}', list[str]),
        ('"ab"', tuple[str, str]),
        ("[1]", tuple[int, int]),
        ("[1, 2, 3]", tuple[int, int]),
        ("[]", dict[str, int]),
        ("[1, 1]", frozenset[int]),
        ("[[1]]", set[list[int]]),
        ("[]", FwdParams),
        ("null", FwdParams),
        ('"FwdParams"', FwdParams),
        ("true", Literal[1]),
        ("1.0", Literal[1]),
        ("true", Order),
        ('"XLA"', Backend),
        ("4", Parts),
        ("true", Parts),
        ('"f4"', np.dtype),
        ('"float"', np.dtype),
        ('">i4"', np.dtype),
        ('"O"', np.dtype),
        ("[4, 8]", Tile),
        ("{}", Tile),
        ('{"rows": 4, "depth": 1}', Tile),
        ('{"a": 1}', Left | Right),
        ("[]", int | str),
        ("1", bytes),
        ("1", complex),
        ("1", type(len)),
        ("1", collections.deque[int]),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_is_refused(text, cls):
    assert refused(text, cls).startswith("$")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "a"}', "$.inner: missing; Outer needs it"),
        ('{"name": "a", "inner": {"block": true}}', "$.inner.block: expected int, got bool True"),
        ('{"name": "a", "inner": {"block": 1}, "maybe": {"block": "b"}}', "$.maybe.block: expected int, got str 'b'"),
        ('{"name": "a", "inner": {"block": 1}, "items": [{"block": 1}, {}]}', "$.items[1].block: missing;"),
        ('{"name": "a", "inner": {"block": 1}, "table": {"k": {"block": 1.5}}}', "$.table.k.block: expected int"),
        ('{"name": "a", "inner": {"block": 1}, "table": {"a b": 1}}', '$.table["a b"]: expected an object (Inner)'),
        ('{"name": "a", "inner": {"block": 1, "scale": NaN}}', "$.inner.scale: float must be finite"),
        ('{"name": "a", "inner": {"block": 1}, "pair": [1, 2]}', "$.pair[1]: expected str, got int 2"),
        ('{"name": "a", "inner": {"block": 1}, "anything": [1e999]}', "$.anything[0]: float must be finite"),
        ('{"name": "a", "inner": {"block": 1}, "backend": "cuda"}', '$.backend: expected one of "xla", "mosaic_gpu"'),
    ],
)
def test_the_message_starts_with_the_path(text, message):
    assert refused(text, Outer).startswith(message)


def test_every_reason_is_in_the_message():
    message = refused('{"name": 1, "inner": {"blok": 1}}', Outer)
    assert "$.name: expected str, got int 1; " in message
    assert "$.inner.block: missing; Inner needs it" in message
    assert "$.inner.blok: Inner has no such field; it has block, scale" in message


def test_a_union_of_configurations_says_why_each_does_not_fit():
    message = refused('{"a": "x"}', Left | Right)
    assert "Left: expected int, got str 'x'" in message
    assert "Right: expected int, got str 'x'" in message


def test_two_equally_fitting_configurations_are_not_chosen_between():
    assert "fits both Left and Right" in refused('{"a": 1}', Left | Right)


@dataclasses.dataclass(frozen=True)
class Picky:
    value: int
    error: str = "ValueError"

    def __post_init__(self):
        if self.value < 0:
            raise {"ValueError": ValueError, "TypeError": TypeError, "ConfigError": ConfigError}[self.error](
                "too small"
            )


@dataclasses.dataclass(frozen=True)
class HoldsPicky:
    fwd: Picky | None


@pytest.mark.parametrize("error", [ValueError, TypeError, ConfigError])
def test_a_value_that_a_class_rejects_is_an_error_with_path_and_cause(error):
    text = json.dumps({"fwd": {"value": -1, "error": error.__name__}})
    with pytest.raises(
        SerializationError, match=rf"^\$\.fwd: Picky rejected the values: {error.__name__}: too"
    ) as caught:
        from_json(text, HoldsPicky)
    assert error is type(caught.value.__cause__)


@pytest.mark.parametrize("text", ["", "{", "[1,]", "nul", "{'a': 1}", "[" * 100_000, '{"a": 1, "a": 2}', "\ufeff1"])
def test_invalid_json_is_an_error(text):
    assert refused(text, Any).startswith("$: not valid JSON (")


def test_too_deeply_nested_data_is_an_error():
    assert "nested deeper than" in refused("[" * 80 + "]" * 80, Any)


def test_a_text_must_be_a_str():
    with pytest.raises(SerializationError, match="text must be a str of JSON, got bytes"):
        from_json(b"1", int)


@given(json_values)
def test_data_of_any_other_form_raises_the_documented_error(value):
    with pytest.raises(SerializationError, match=r"^\$"):
        from_plain(value, Outer)  # never by chance: `inner` has to be an object with a `block`
