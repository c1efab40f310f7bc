# SPDX-License-Identifier: Apache-2.0
"""Call keys: their content, and that every process computes the same."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import os
import subprocess
import sys
import textwrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel import ops
from ejkernel.ops import Invocation, Kernel
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.registry import recording
from ejkernel.ops.utils.values.signature import describe


class Anything(Kernel[int, Any]):
    """Takes anything, and adds up the arrays in it."""

    def run(self, x, option=None, *more, cfg, **named):
        leaves = [x, *[leaf for leaf in jax.tree.leaves((option, more, named)) if isinstance(leaf, jax.Array)]]
        return functools.reduce(jnp.add, [jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves])

    def heuristic_cfg(self, inv):
        return 1


KERNEL = Anything()
X = np.ones((8, 4), np.float32)


class Mode(enum.Enum):
    FAST = 1
    SAFE = 2


class Level(enum.IntEnum):
    ONE = 1


class Bits(enum.IntFlag):
    ONE = 1


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Options:
    scale: Any = 1
    name: str = "a"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    tokens: Any
    mode: str = dataclasses.field(default="train", metadata={"static": True})


def activation(x):
    return x * 2


def key_of(*args, **kwargs):
    return Invocation(kernel=KERNEL, args=args, kwargs=kwargs).call_key


def keys_when_lowered(function, *args):
    with recording() as seen:
        jax.jit(function).lower(*args)
    return [inv.call_key for inv in seen]


# --- form ---


def test_a_key_is_16_hexadecimal_digits():
    assert len(bytes.fromhex(key_of(X))) == 8


def test_a_whole_key_is_device_versioned_operation_and_call():
    assert Invocation(kernel=KERNEL, args=(X,)).key == (ops.device_fingerprint(), "Anything@v0", key_of(X))


def test_a_key_does_not_depend_on_the_name_of_the_operation():
    assert Invocation(op_id="other", args=(X,)).call_key == key_of(X)


def test_a_description_is_json():
    inv = Invocation(kernel=KERNEL, args=(X, Options(), {"a": activation}))
    assert json.loads(json.dumps(inv.description)) == inv.description


# --- properties ---

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.sampled_from([Mode.FAST, Level.ONE]),
)
STATICS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3), st.tuples(inner)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(), STATICS, max_size=5))
def test_the_order_of_a_dictionary_does_not_matter(options):
    assert key_of(X, dict(reversed(options.items()))) == key_of(X, options)


@given(STATICS)
def test_equal_content_gives_equal_keys(option):
    again = json.loads(json.dumps(describe(option)))
    assert describe(option) == again


@given(st.tuples(STATICS, STATICS))
def test_different_descriptions_give_different_keys(pair):
    left, right = pair
    same = json.dumps(describe(left), sort_keys=True) == json.dumps(describe(right), sort_keys=True)
    assert (key_of(X, left) == key_of(X, right)) == same


@given(st.integers(0, 2**32), st.sampled_from(["float32", "int8", "bfloat16"]))
def test_values_of_arrays_do_not_matter(seed, dtype):
    values = jnp.asarray(np.random.default_rng(seed).integers(0, 9, (3, 2)), dtype)
    assert key_of(values) == key_of(jax.ShapeDtypeStruct((3, 2), dtype))


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(["float32", "bfloat16", "int32"])
        ),
        min_size=2,
        max_size=2,
    )
)
def test_shapes_and_dtypes_matter(types):
    left, right = (key_of(jax.ShapeDtypeStruct(shape, dtype)) for shape, dtype in types)
    assert (left == right) == (types[0] == types[1])


SIMILAR = [
    1,
    1.0,
    True,
    "1",
    Level.ONE,
    b"1",
    1 + 0j,
    (1,),
    [1],
    {1},
    {1: 1},
    {"1": 1},
    range(1),
    slice(1),
    Pair(1, 1),
    (1, 1),
    Options(1),
    Options(1.0),
    Options(True),
    None,
    0.0,
    -0.0,
    math.nan,
    math.inf,
    np.dtype("int8"),
    "int8",
    np.float32(1),
    Mode.FAST,
    Mode.SAFE,
    Bits.ONE,
    Bits(0),
    Bits(2),
    Bits(4),
    PartitionSpec("data"),
    PartitionSpec(("data",), None),
]


def test_similar_values_have_different_keys():
    keys = [key_of(X, value) for value in SIMILAR]
    repeated = [value for value, key in zip(SIMILAR, keys, strict=True) if keys.count(key) > 1]
    assert repeated == []


# --- other parts of a key ---


def test_precision_matters():
    with jax.default_matmul_precision("highest"):
        precise = key_of(X)
    assert precise != key_of(X)


def test_64_bit_mode_matters():
    with jax.enable_x64(True):
        wide = key_of(X)
    assert wide != key_of(X)


def test_weak_types_matter():
    assert key_of(jnp.ones(())) != key_of(jnp.asarray(1.0))


def test_a_version_is_part_of_the_operation():
    class Newer(Anything):
        version = "2"

    assert Invocation(kernel=Newer(name="Anything"), args=(X,)).key.op == "Anything@v2"


def test_batch_axes_matter():
    made = [{}, {"batch_axes": (0,), "batch_sizes": (3,)}, {"batch_axes": (1,), "batch_sizes": (3,)}]
    keys = {Invocation(kernel=KERNEL, args=(X,), **fields).call_key for fields in made}
    assert len(keys) == 3


def test_batch_sizes_matter():
    keys = {Invocation(kernel=KERNEL, args=(X,), batch_axes=(0,), batch_sizes=(size,)).call_key for size in (3, 4)}
    assert len(keys) == 2


def test_the_order_of_batches_matters():
    levels = [((0,), (1,)), ((1,), (0,))]
    keys = {Invocation(kernel=KERNEL, args=(X,), batch_axes=axes, batch_sizes=(2, 2)).call_key for axes in levels}
    assert len(keys) == 2


def test_the_method_matters():
    assert Invocation(kernel=KERNEL, args=(X,), method="shard_map").call_key != key_of(X)


def test_metadata_does_not_matter():
    assert Invocation(kernel=KERNEL, args=(X,), metadata={"note": object()}).call_key == key_of(X)


@pytest.mark.parametrize("array", [X, jnp.asarray(X), jax.ShapeDtypeStruct((8, 4), "float32"), jax.typeof(X)])
def test_an_array_is_its_type_however_it_is_given(array):
    assert key_of(array) == key_of(X)


def test_random_keys_have_a_key():
    assert key_of(jax.random.key(0)) == key_of(jax.random.key(1)) != key_of(jax.random.key_data(jax.random.key(0)))


# --- a call made by hand is the call that a program makes ---


@pytest.mark.parametrize(
    "args",
    [(X,), (X, "relu"), (X, Options(2.0)), (X, {"b": X, "a": 1}), (X, None, X), (X, Batch(X)), (X, [X, (1, X)])],
    ids=str,
)
def test_a_traced_call_has_the_key_of_one_made_by_hand(args):
    arrays, tree = jax.tree.flatten(args)
    is_array = [isinstance(leaf, np.ndarray) for leaf in arrays]
    traced = [leaf for leaf, array in zip(arrays, is_array, strict=True) if array]

    def function(*given):
        given = iter(given)
        leaves = [next(given) if array else leaf for leaf, array in zip(arrays, is_array, strict=True)]
        return KERNEL(*jax.tree.unflatten(tree, leaves))

    assert keys_when_lowered(function, *traced) == [key_of(*args)]


def test_a_batched_call_has_the_key_of_one_made_by_hand():
    batched = np.ones((8, 5, 4), np.float32)
    made = Invocation(kernel=KERNEL, args=(X, X), batch_axes=(1, None), batch_sizes=(5,))
    assert keys_when_lowered(jax.vmap(KERNEL, in_axes=(1, None)), batched, X) == [made.call_key]


def test_a_call_batched_twice_has_the_key_of_one_made_by_hand():
    batched = np.ones((2, 8, 3, 4), np.float32)
    made = Invocation(kernel=KERNEL, args=(X,), batch_axes=((0,), (1,)), batch_sizes=(2, 3))
    assert keys_when_lowered(jax.vmap(jax.vmap(KERNEL, in_axes=1)), batched) == [made.call_key]


def test_an_array_that_no_vmap_maps_over_is_taken_once():
    sizes = {
        Invocation(kernel=KERNEL, args=(X, X), batch_axes=axes, batch_sizes=(5,)).input_bytes / X.nbytes
        for axes in [((1, None),), ((None, 0),)]
    }
    assert sizes == {6}


def test_the_bytes_of_a_call_need_neither_a_kernel_nor_batch_axes():
    assert Invocation(op_id="op", args=(X,)).input_bytes == X.nbytes
    assert Invocation(kernel=KERNEL, args=(X,), batch_sizes=(5,)).input_bytes == 5 * X.nbytes
    assert Invocation(kernel=KERNEL, args=(X,)).abstract(keeps_kernel=False).input_bytes == X.nbytes
    assert Invocation(op_id="op", args=(X, X), batch_axes=((1, None),), batch_sizes=(5,)).input_bytes == 6 * X.nbytes


def test_a_keyword_for_a_positional_parameter_is_the_same_call():
    assert key_of(X, option="relu") == key_of(X, "relu")


def test_the_order_of_keywords_does_not_matter():
    assert key_of(X, None, b=1, a=2) == key_of(X, None, a=2, b=1)


def test_the_call_is_the_same_under_jit_and_differentiation():
    calls = [
        lambda x: KERNEL(x),  # noqa: PLW0108 - jit takes a function once
        jax.jit(KERNEL),
        jax.value_and_grad(KERNEL),
        jax.checkpoint(KERNEL),
        lambda x: jax.lax.scan(lambda carry, _: (carry + KERNEL(x), None), 0.0, length=2)[0],
        lambda x: jax.lax.cond(True, KERNEL, lambda x: 0.0, x),
    ]
    assert {keys_when_lowered(call, X)[0] for call in calls} == {key_of(X)}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharding_does_not_matter(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    spread = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        assert keys_when_lowered(lambda x: KERNEL(x) + 0, spread) == [key_of(X)] == [key_of(spread)]


def test_under_shard_map_the_call_is_the_local_one():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(lambda x: KERNEL(x)[None], mesh=mesh, in_specs=spec, out_specs=spec)
    assert keys_when_lowered(mapped, X) == [key_of(X[:1])]


def test_symbolic_dimensions_are_named():
    (symbolic,) = export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((symbolic, 4), jnp.float32)
    assert key_of(shape) != key_of(X)
    assert Invocation(kernel=KERNEL, args=(shape,)).description["args"][0] == {"array": ["float32", ["b", 4]]}


def test_a_call_of_symbolic_shape_can_be_exported():
    (symbolic,) = export.symbolic_shape("b")
    exported = export.export(jax.jit(KERNEL))(jax.ShapeDtypeStruct((symbolic, 4), jnp.float32))
    assert exported.call(X) == 32.0


# --- invocations that do not fit ---


def test_an_invocation_needs_a_kernel_or_a_name():
    with pytest.raises(ArgumentError, match=r"Invocation needs kernel=\.\.\. or op_id=\.\.\.; got neither"):
        Invocation(args=(X,))


def test_batch_sizes_must_fit_batch_axes():
    with pytest.raises(ArgumentError, match=r"batch_sizes must have one size for each of the 1 levels .* got \(2, 3\)"):
        Invocation(kernel=KERNEL, args=(X,), batch_axes=(0,), batch_sizes=(2, 3))


def test_batch_axes_must_fit_the_arrays():
    inv = Invocation(kernel=KERNEL, args=(X, X), batch_axes=(0,), batch_sizes=(2,))
    with pytest.raises(ArgumentError, match=r"batch_axes must have one entry for each of 2 arrays, got \(0,\)"):
        _ = inv.node


def test_an_invocation_without_a_kernel_cannot_run():
    with pytest.raises(ArgumentError, match="Invocation of 'matmul' has no kernel; pass kernel="):
        _ = Invocation(op_id="matmul", args=(X,)).node


def test_a_versioned_name_keeps_its_version():
    assert Invocation(op_id="matmul@v3", args=(X,)).op_id_v == "matmul@v3"


# --- with sharding ---


def test_the_builder_takes_an_invocation_or_its_fields():
    inv = Invocation(kernel=KERNEL, args=(X,), kwargs={"option": 1})
    built = ops.default_key_builder_with_sharding(inv)
    assert built == ops.default_key_builder_with_sharding(KERNEL, (X,), {"option": 1}) != inv.key


def test_the_builder_prepares_the_arguments_of_a_call():
    class Powers(Kernel):
        def prepare(self, x, power=2, cfg=None):
            return (x,), {"power": int(power), **({} if cfg is None else {"cfg": cfg})}

        def run(self, x, *, power, cfg):
            return x**power

    kernel = Powers("powers")
    built = ops.default_key_builder_with_sharding(kernel, (X, 3.0))
    assert built == ops.default_key_builder_with_sharding(kernel, (X, 3.0), {"cfg": 1})
    assert built == ops.default_key_builder_with_sharding(Invocation(kernel=kernel, args=(X,), kwargs={"power": 3}))


# --- every process finds the same key ---

SCRIPT = """
import dataclasses, enum, functools, sys
import jax, jax.numpy as jnp, numpy as np
from ejkernel.ops import Invocation, Kernel

class K(Kernel):
    def run(self, x, option=None, *, cfg): return x

class Mode(enum.Enum):
    FAST = 1

@dataclasses.dataclass(frozen=True)
class Options:
    mode: Mode = Mode.FAST
    names: frozenset = frozenset({"a", "b", "c"})

def activation(x): return x

def keys():
    x = np.ones((2, 3), np.float32)
    options = [None, 1, {"b": 1, "a": {"x", "y", "z"}}, Options(), activation, jnp.tanh, jax.nn.gelu, jnp.bfloat16,
               functools.partial(activation, 1), Mode.FAST, jax.sharding.PartitionSpec("a")]
    return [Invocation(kernel=K(), args=(x, option)).call_key for option in options]

if __name__ == "__main__":
    print(*keys())
"""


@pytest.mark.slow
def test_processes_find_the_same_keys_in_a_script_and_in_a_module(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    commands = [["script.py"], ["-c", "import script; print(*script.keys())"], ["-m", "script"]]
    running = []
    for seed, command in enumerate(commands):
        path = os.pathsep.join([str(tmp_path), *sys.path])
        env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": path}
        running.append(
            subprocess.Popen([sys.executable, *command], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
        )
    found = [process.communicate()[0].split() for process in running]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 11


def test_keys_have_never_changed():
    """A change here makes all stored configurations useless: raise the schema and say so in the changelog."""
    inv = Invocation(op_id="matmul", args=(X, X.T), kwargs={"causal": True, "scale": 0.5})
    assert inv.call_key == "f03b8fc8cfa57493"
