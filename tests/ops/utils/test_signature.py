# SPDX-License-Identifier: Apache-2.0
"""Names and descriptions in keys: the same in every process, or an error with advice."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Invocation, Kernel
from ejkernel.ops.errors import UnstableKeyError
from ejkernel.ops.utils.values.signature import describe, name_of


class Anything(Kernel[int, Any]):
    def run(self, x, option=None, *, cfg):
        return x + 1

    def heuristic_cfg(self, inv):
        return 1


KERNEL = Anything()
X = np.ones((8, 4), np.float32)


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


class Methods:
    @staticmethod
    def square(x):
        return x * x


def key_of(*args, **kwargs):
    return Invocation(kernel=KERNEL, args=args, kwargs=kwargs).call_key


# --- names ---


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (jnp.tanh, "jax.numpy.tanh"),
        (jax.nn.gelu, "jax.nn.gelu"),
        (jax.nn.relu, "jax.nn.relu"),
        (jax.nn.silu, "jax.nn.silu"),
        (jnp.add, "jax.numpy.add"),
        (jax.lax.add, "jax.lax.add"),
        (len, "builtins.len"),
        (json.dumps, "json.dumps"),
        (np.linalg.norm, "numpy.linalg.norm"),
        (activation, f"{__name__}.activation"),
        (Methods.square, f"{__name__}.Methods.square"),
        (Options, f"{__name__}.Options"),
        (functools.lru_cache(activation), f"{__name__}.activation"),
    ],
)
def test_a_function_has_an_importable_name(function, name):
    assert name_of(function) == name


def test_a_module_is_named():
    assert describe(json) == {"name": "json"}


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, np.dtype("bfloat16"), jnp.dtype("bfloat16"), jnp.zeros((), "bfloat16").dtype]
)
def test_a_dtype_is_its_name_however_it_is_given(dtype):
    assert key_of(X, dtype) == key_of(X, jnp.bfloat16)


@pytest.mark.parametrize("dtype", [np.int8, jnp.int8, np.dtype("int8")])
def test_a_dtype_of_numpy_is_that_of_jax(dtype):
    assert key_of(X, dtype) == key_of(X, jnp.int8) != key_of(X, jnp.int16)


def test_the_functions_and_arguments_of_a_partial_matter():
    partials = [
        functools.partial(activation),
        functools.partial(activation, 1),
        functools.partial(activation, x=1),
        functools.partial(jnp.tanh, 1),
    ]
    assert len({key_of(X, partial) for partial in partials}) == 4


def test_equal_partials_have_equal_keys():
    assert key_of(X, functools.partial(activation, 1)) == key_of(X, functools.partial(activation, 1))


def test_arrays_in_a_jax_partial_are_arrays():
    left, right = (jax.tree_util.Partial(activation, np.full(2, value)) for value in (1.0, 2.0))
    assert key_of(X, left) == key_of(X, right)


def test_arrays_in_a_registered_dataclass_are_arrays():
    assert key_of(X, Batch(X)) == key_of(X, Batch(X + 1)) != key_of(X, Batch(X[:1]))


def test_static_fields_of_a_registered_dataclass_matter():
    assert key_of(X, Batch(X, "train")) != key_of(X, Batch(X, "test"))


# --- values without a name ---


def closure():
    def inner(x):
        return x

    return inner


@dataclasses.dataclass(frozen=True, eq=False)
class Opaque:
    inner: Any


@pytest.mark.parametrize(
    "value",
    [
        lambda x: x,
        closure(),
        object(),
        functools.partial(lambda x: x, 1),
        Opaque(object()),
        (1, lambda x: x),
        {"activation": lambda x: x},
        Anything().run,
    ],
    ids=["lambda", "closure", "object", "partial", "dataclass", "tuple", "dict", "method"],
)
def test_a_value_without_a_stable_name_has_no_key_and_the_error_suggests_others(value):
    text = "has no name that is the same in every process; pass a number, a string, an enum, a dataclass, or a function"
    with pytest.raises(UnstableKeyError, match=text):
        key_of(X, value)


def test_a_replaced_function_has_no_key(monkeypatch):
    old = activation
    monkeypatch.setattr(sys.modules[__name__], "activation", lambda x: x)
    with pytest.raises(UnstableKeyError, match="activation"):
        name_of(old)
