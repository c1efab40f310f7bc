# SPDX-License-Identifier: Apache-2.0
"""Static arguments, eagerly and under transformations: different values compute separately, equal keys are one call."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.sample_kernels import Applies

from ejkernel.ops import Invocation, Kernel, UnstableKeyError, UnstableKeyWarning, tune
from ejkernel.ops.registry import recording

pytestmark = pytest.mark.slow

X = np.array([1.0, 2.0, 3.0], np.float32)


class ByDescription(Applies):
    """Computes with the difference between values with equal hashes and `==`."""

    def run(self, x, value, *, cfg):
        return x * x * _number_of(value)


def _number_of(value):
    if isinstance(value, tuple | list):
        return sum((index + 2) * _number_of(item) for index, item in enumerate(value))
    if isinstance(value, dict):
        return _number_of(list(value))
    if isinstance(value, Options):
        return _number_of(value.value)
    sign = -1.0 if isinstance(value, float) and np.signbit(value) else 1.0
    kinds = [bool, int, float, Text, np.str_, str]
    return sign * (2 + next(at for at, kind in enumerate(kinds) if isinstance(value, kind)))


class Text(enum.StrEnum):
    ONE = "one"


@dataclasses.dataclass(frozen=True)
class Options:
    value: Any


APPLIES, BY_DESCRIPTION = Applies("applies"), ByDescription("by_description")

TRANSFORMATIONS = {
    "eager": lambda f: f(X),
    "jit": lambda f: jax.jit(lambda x: jax.tree.map(f, x))(X),  # the function need not be hashable
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: jax.vmap(f)(X[None])[0],
}
transformed = pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS.keys())
no_key = pytest.mark.filterwarnings("ignore::ejkernel.ops.errors.UnstableKeyWarning")


def scaled(scale, x):
    return x * x * scale


class Scale:
    """Holds an array, and is called."""

    def __init__(self, scale):
        self.scale = jnp.float32(scale)

    def __call__(self, x):
        return scaled(self.scale, x)


class Layer:
    """Looks like an array to code that only checks for a dtype."""

    dtype, shape = np.dtype("float32"), (3,)

    def __init__(self, bias):
        self.bias = bias

    def __call__(self, x):
        return x * x + self.bias * x


def closure(scale):
    def inner(x):
        return x * x * scale

    return inner


def wrapped(scale):
    @functools.wraps(square)
    def inner(x):
        return square(x) * scale

    return inner


def square(x):
    return x * x


def custom_jvp(factor):
    @jax.custom_jvp
    def function(x):
        return x * x

    function.defjvp(lambda primals, tangents: (function(*primals), factor * tangents[0]))
    return function


def custom_vjp(factor):
    @jax.custom_vjp
    def function(x):
        return x * x

    function.defvjp(lambda x: (x * x, None), lambda _, cotangent: (factor * cotangent,))
    return function


FUNCTIONS = {
    "partials of arrays": lambda n: functools.partial(scaled, jnp.float32(n)),
    "partials of NumPy arrays": lambda n: functools.partial(scaled, np.full(3, n, np.float32)),
    "partials of objects": lambda n: functools.partial(lambda layer, x: layer(x), Layer(n)),
    "objects that hold arrays": Scale,
    "jit of closures": lambda n: jax.jit(closure(n)),
    "closures": closure,
    "wrapped functions": wrapped,
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "objects with a dtype": Layer,
    "bound methods": lambda n: Layer(n).__call__,
    "frozen dataclasses of closures": lambda n: _Held(closure(n)),
    "tree_util.Partial of closures": lambda n: jax.tree_util.Partial(closure(n)),
    "objects of local classes": lambda n: type("Local", (), {"__call__": lambda self, x: x * x * n})(),
}


@dataclasses.dataclass(frozen=True)
class _Held:
    function: Any

    def __call__(self, x):
        return self.function(x)


@no_key
@transformed
@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_functions_with_equal_descriptions_compute_separately(make, transform):
    for function in (make(2.0), make(5.0)):
        expected = transform(function)
        np.testing.assert_allclose(transform(lambda x, f=function: APPLIES(x, f)), expected, rtol=1e-6)


VALUES = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    ((1,), (True,)),
    ((1, 2.0), (1.0, 2)),
    ([0.0], [-0.0]),
    ({1: 0}, {True: 0}),
    (Options(1), Options(1.0)),
    (Options((0.0,)), Options((-0.0,))),
    ("one", Text.ONE),
]


@transformed
@pytest.mark.parametrize(("left", "right"), VALUES, ids=str)
def test_values_equal_in_python_keep_their_types(left, right, transform):
    for value in (left, right):
        expected = transform(lambda x, value=value: x * x * _number_of(value))
        np.testing.assert_array_equal(transform(lambda x, value=value: BY_DESCRIPTION(x, value)), expected)


@no_key
def test_a_redefined_function_computes_its_new_definition(page):
    source = "def function(x):\n    return x * {}"
    for factor in (2, 3):
        page(source.format(factor))
        function = page("").function
        np.testing.assert_array_equal(APPLIES(X, function), X * factor)
        np.testing.assert_array_equal(jax.jit(lambda x, f=function: APPLIES(x, f))(X), X * factor)


@dataclasses.dataclass
class Mutable:
    scale: float


class Scales(Applies):
    def run(self, x, option, *, cfg):
        return x * sum(vars(option).values() if isinstance(option, Mutable) else option)


SCALES = Scales("scales")


@no_key
@pytest.mark.parametrize("transform", [lambda f: f(X), lambda f: jax.jit(f)(X)], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("option", "change"),
    [
        (Mutable(2.0), lambda option: setattr(option, "scale", 3.0)),
        ({2.0}, lambda option: option.add(1.0)),
        ([2.0], lambda option: option.append(1.0)),
        (types.MappingProxyType({2.0: "a"}), None),
    ],
    ids=["dataclass", "set", "list", "unchanged"],
)
def test_a_value_that_changed_is_computed_with_as_it_is_now(option, change, transform):
    option = option if change is None else copy.copy(option)
    call = lambda x: SCALES(x, option)  # noqa: E731 - a new function for each `jit`
    np.testing.assert_array_equal(transform(call), 2 * X)
    if change is not None:
        change(option)
        np.testing.assert_array_equal(transform(lambda x: SCALES(x, option)), 3 * X)


def test_a_numpy_array_in_a_partial_function_may_change():
    scale = np.full(3, 2, np.float32)
    function = functools.partial(scaled, scale)
    with pytest.warns(UnstableKeyWarning):
        np.testing.assert_array_equal(APPLIES(X, function), 2 * X * X)
    scale[:] = 3
    np.testing.assert_array_equal(Applies("again")(X, square), X * X)
    np.testing.assert_array_equal(APPLIES(X, function), 3 * X * X)


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(scaled, np.float32(2)),
        functools.partial(scaled, scale=jnp.ones(3)),
        _Held(Scale(2)),
        _Held(np.ones(3)),
        Scale(2),
        lambda x: x,
        "\ud800",
        10**5000,
    ],
    ids=["scalar", "keyword", "object", "dataclass", "plain object", "lambda", "surrogate", "huge integer"],
)
def test_a_value_without_a_description_makes_the_call_uncacheable_with_one_warning(function):
    kernel = SCALES
    with pytest.raises(UnstableKeyError, match="scales"):
        _ = Invocation(kernel=kernel, args=(X, function)).key

    class Ignores(Applies):
        def run(self, x, function, *, cfg):
            return x * cfg

    ignores = Ignores("ignores")
    with pytest.warns(UnstableKeyWarning, match="ignores: the call cannot be cached or tuned"):
        np.testing.assert_array_equal(ignores(X, function), X)
    # any further warning would be an error
    np.testing.assert_array_equal(jax.jit(lambda x: ignores(x, function))(X), X)
    np.testing.assert_array_equal(ignores(X[:2], function), X[:2])


def key_of(kernel, *args, **kwargs):
    return Invocation(kernel=kernel, args=args, kwargs=kwargs).call_key


class Defaults(Kernel[int, Any]):
    def run(self, x, scale=1.0, mode="fast", *, cfg, bias=None, shift=0):
        return x * scale

    def heuristic_cfg(self, inv):
        return 1


DEFAULTS = Defaults("defaults")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1.0,), {}),
        ((1.0, "fast"), {}),
        ((), {"scale": 1.0}),
        ((), {"mode": "fast"}),
        ((), {"bias": None}),
        ((), {"shift": 0}),
        ((1.0,), {"mode": "fast", "shift": 0, "bias": None}),
    ],
)
def test_an_explicit_default_has_the_key_of_an_omitted_one(args, kwargs):
    assert key_of(DEFAULTS, X, *args, **kwargs) == key_of(DEFAULTS, X)
    with recording() as seen:
        DEFAULTS(X, *args, **kwargs)
    assert [inv.call_key for inv in seen] == [key_of(DEFAULTS, X)]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {}),
        ((True,), {}),
        ((1.0, np.bytes_("fast")), {}),
        ((jnp.float32(1.0),), {}),
        ((), {"shift": False}),
        ((), {"shift": 0.0}),
        ((), {"shift": -0.0}),
        ((), {"bias": 0}),
    ],
)
def test_a_value_of_another_type_equal_to_a_default_has_a_separate_key(args, kwargs):
    assert key_of(DEFAULTS, X, *args, **kwargs) != key_of(DEFAULTS, X)


def test_an_omitted_default_may_be_a_value_that_jax_cannot_flatten():
    class Table(Kernel[int, Any]):
        def run(self, x, table={1: 2.0, "one": 3.0}, *, cfg, scale=1.0):  # noqa: B006
            return x * table[1] * scale

        def heuristic_cfg(self, inv):
            return 1

    kernel = Table("table_default")
    assert kernel(X, scale=1.0)[0] == 2 * X[0]
    assert key_of(kernel, X, scale=1.0) == key_of(kernel, X)


def test_an_explicit_tunable_argument_is_fixed_even_at_its_default():
    @tune(space={"rows": [1, 2], "columns": [1, 2]})
    def total(x, *, rows=1, columns=1, scale=1.0):
        return x * scale

    assert key_of(total, X, rows=1) != key_of(total, X)
    assert key_of(total, X, scale=1.0) == key_of(total, X)


def local_class():
    @dataclasses.dataclass(frozen=True)
    class Local:
        value: int = 1

    return Local


def test_a_function_that_wraps_another_has_not_its_key():
    assert key_of(APPLIES, X, square)
    with pytest.raises(UnstableKeyError):
        key_of(APPLIES, X, wrapped(2))


def test_an_instance_of_a_local_class_has_no_key():
    for cls in (local_class(), local_class()):
        with pytest.raises(UnstableKeyError):
            key_of(APPLIES, X, cls())


def test_an_enumeration_of_strings_has_not_the_keys_of_strings():
    assert key_of(BY_DESCRIPTION, X, Text.ONE) != key_of(BY_DESCRIPTION, X, "one")


def test_equal_computations_have_one_key():
    assert key_of(APPLIES, X, jitted_square) == key_of(APPLIES, X, square_of_the_module)
    assert key_of(BY_DESCRIPTION, X, np.str_("one")) == key_of(BY_DESCRIPTION, X, "one")


def square_of_the_module(x):
    return x * x


jitted_square = jax.jit(square_of_the_module)


def test_a_string_of_numpy_is_a_static_argument():
    np.testing.assert_array_equal(BY_DESCRIPTION(X, np.str_("one")), X * X * _number_of(np.str_("one")))


@dataclasses.dataclass
class Scaling(Kernel[int, Any]):
    """A kernel that compares by content, and cannot be hashed."""

    scale: float = 1.0
    offset: float = 0.0

    def run(self, x, *, cfg):
        return x * x * self.scale + self.offset

    def heuristic_cfg(self, inv):
        return 1


@transformed
def test_dataclass_kernels_with_other_fields_are_separate_kernels(transform):
    for scale in (2.0, 3.0):
        kernel = Scaling(scale)
        np.testing.assert_allclose(transform(kernel), transform(lambda x, s=scale: x * x * s))


def test_dataclass_kernels_with_other_fields_have_separate_keys():
    keys = {Invocation(kernel=Scaling(scale), args=(X,)).key for scale in (1.0, 1, 2.0)}
    assert len(keys) == 3
    assert Invocation(kernel=Scaling(2.0), args=(X,)).key in keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """A layer as in many libraries: arrays, and static fields."""

    weight: Any
    activation: Any = dataclasses.field(metadata={"static": True}, default=square)
    power: Any = dataclasses.field(metadata={"static": True}, default=1)

    def __call__(self, x):
        return self.activation(x * self.weight) * _number_of(self.power)


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, weight, data):
        self.weight, self.data = weight, data

    def tree_flatten(self):
        return (self.weight,), self.data

    @classmethod
    def tree_unflatten(cls, data, children):
        return cls(*children, data)

    def __call__(self, x):
        return x * x * self.weight * _number_of(self.data)


@no_key
@pytest.mark.parametrize("transform", [TRANSFORMATIONS["eager"], TRANSFORMATIONS["grad"]], ids=["eager", "grad"])
@pytest.mark.parametrize("pair", VALUES[:4], ids=str)
@pytest.mark.parametrize("make", [lambda v: Linear(jnp.full(3, 2.0), power=v), lambda v: Node(jnp.full(3, 2.0), v)])
def test_static_fields_of_nodes_are_distinguished_though_equal_in_jax(make, pair, transform):
    for value in pair:
        layer = make(value)
        np.testing.assert_array_equal(transform(lambda x, layer=layer: APPLIES(x, layer)), transform(layer))


def test_a_layer_with_static_fields_has_a_key_and_a_gradient():
    layers = [Linear(jnp.full(3, 2.0)), Linear(jnp.full(3, 5.0)), Linear(jnp.ones(3), activation=jnp.tanh)]
    keys = [key_of(APPLIES, X, layer) for layer in layers]
    assert keys[0] == keys[1] != keys[2]
    for layer in layers:
        gradient = jax.grad(lambda layer: APPLIES(X, layer).sum())(layer)
        expected = jax.grad(lambda layer: layer(X).sum())(layer)
        np.testing.assert_allclose(gradient.weight, expected.weight, rtol=1e-6)


@no_key
def test_a_recreated_node_is_the_same_call():
    traced = []

    class Counts(Applies):
        def run(self, x, layer, *, cfg):
            traced.append(layer)
            return layer(x)

    counts = Counts("counts")
    numbers = []
    for scale in (2.0, 3.0, 4.0):
        counts(X, Linear(jnp.full(3, scale), activation=square))
        numbers.append(len(traced))
    assert numbers == numbers[:1] * 3


def test_a_kernel_is_a_static_argument_of_another():
    inner = Scaling(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnstableKeyWarning)
        np.testing.assert_array_equal(APPLIES(X, inner), 3 * X * X)
        np.testing.assert_array_equal(APPLIES(X, Scaling(4.0)), 4 * X * X)
