# SPDX-License-Identifier: Apache-2.0
"""NumPy scalars and concrete JAX scalars as arguments: where they are Python numbers, and where they are arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ejkernel.kernels.flash_attention.operation import flash_attention as attention
from ejkernel.kernels.grouped_matmul.operation import grouped_matmul, grouped_matmul_wgrad
from ejkernel.kernels.layer_norm.operation import layer_norm
from ejkernel.kernels.rms_norm.operation import rms_norm
from ejkernel.modules import flash_attention as attend
from ejkernel.modules import rms_norm as normalise
from ejkernel.ops import Kernel, tune
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import prepared, with_python_numbers
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.values.scalars import Takes, python_numbers

X = np.ones((4, 16), np.float32)
Q = np.ones((1, 8, 2, 16), np.float32)
LHS, RHS, SIZES = np.ones((8, 4), np.float32), np.ones((2, 4, 4), np.float32), np.full(2, 4, np.int32)
KEY = np.zeros(2, np.uint32)


def bits(value):
    """Return the types and bits of a value, since `==` does not distinguish all numbers."""
    if isinstance(value, tuple | list):
        return type(value), [bits(item) for item in value]
    return type(value), value


# --- one value ---


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int64(4), 4),
        (np.bool_(True), True),
        (np.complex64(1j), 1j),
        (ml_dtypes.bfloat16(0.5), 0.5),
        (np.array(0.25), 0.25),
        (np.array(True), True),
        (jnp.float32(0.1), float(np.float32(0.1))),
        (jnp.int32(4), 4),
        (jnp.bool_(True), True),
        (jnp.bfloat16(0.5), 0.5),
        ((np.int64(4), (None, jnp.int32(2))), (4, (None, 2))),
        ([np.float32(1), "text"], [1.0, "text"]),
    ],
    ids=repr,
)
def test_a_concrete_scalar_is_a_python_number(value, expected):
    assert bits(expected) == bits(python_numbers(value, Takes.NUMBERS))


@pytest.mark.parametrize(
    "value", [0.1, None, "text", (1, 2), X, np.ones(1), np.datetime64(0, "s"), jax.random.key(0), jnp.float32], ids=repr
)
def test_any_other_value_stays_itself(value):
    assert value is python_numbers(value, Takes.NUMBERS)


@pytest.mark.parametrize("value", [np.array(2.0), jnp.float32(2)], ids=["numpy", "jax"])
def test_an_untyped_static_parameter_does_not_affect_arrays(value):
    assert value is python_numbers(value, Takes.STATIC)


def test_a_tracer_stays_a_tracer():
    jax.eval_shape(lambda x: python_numbers(x, Takes.NUMBERS), 1.0)


# --- which parameters of a kernel take numbers ---


class Signs(Kernel[int, Any]):
    """A kernel that declares the types of its parameters in every way."""

    def run(
        self,
        x,
        operand,
        factor=1.0,
        flip=False,
        scale: float | None = None,
        either: float | jax.Array = 1.0,
        *,
        cfg,
        count: int = 1,
        pair: tuple[int, int] | None = None,
        table: jax.Array | None = None,
        power=2,
        said=None,
    ):
        assert type(count) is type(power) is int
        out = x * factor * count**power
        return -out if flip else out

    def heuristic_cfg(self, inv):
        return 1


SIGNS = Signs()


@pytest.mark.parametrize("make", [np.array, jnp.asarray], ids=["numpy", "jax"])
def test_number_parameters_take_arrays_without_axes(make):
    two = make(2)
    given = {"flip": make(True), "scale": two, "count": two, "pair": (two, two), "power": two}
    _, kwargs = with_python_numbers(SIGNS, (X, X), given)
    assert kwargs == {"flip": True, "scale": 2, "count": 2, "pair": (2, 2), "power": 2}
    assert [bool, int, int, tuple, int] == [type(value) for value in kwargs.values()]


@pytest.mark.parametrize("name", ["operand", "either", "table"])
def test_parameters_that_may_be_arrays_take_numpy_scalars_as_arrays(name):
    given = {name: np.float32(2)}
    assert given is with_python_numbers(SIGNS, (X,), given)[1]


def test_a_numpy_scalar_is_static_where_a_keyword_says_nothing_of_arrays():
    assert with_python_numbers(SIGNS, (X, X), {"said": np.float32(2)})[1] == {"said": 2.0}


def test_a_number_by_position_is_an_operand_unless_its_parameter_says_otherwise():
    args, _ = with_python_numbers(SIGNS, (X, *[np.float32(2)] * 5), {})
    assert [np.ndarray, np.float32, np.float32, float, float, np.float32] == [type(arg) for arg in args]


def test_a_call_without_such_scalars_is_not_copied():
    args, kwargs = (X, X), {"count": 2}
    found = with_python_numbers(SIGNS, args, kwargs)
    assert (found[0] is args, found[1] is kwargs) == (True, True)


def test_results_of_prepare_are_converted_too():
    class Scaled(Signs):
        def prepare(self, x, **options):
            return (x, x), {"scale": 1 / np.sqrt(16.0), **options}

    _, kwargs = prepared(Scaled(), (X,), {"count": np.int64(3)})
    assert kwargs == {"scale": 0.25, "count": 3}
    assert (float, int) == (type(kwargs["scale"]), type(kwargs["count"]))


@tune(space={"rows": [1, 2, 4]})
def total(x, flip=False, *, count=1, rows=2):
    """Return a sum over rows, in the order that `rows` says."""
    assert type(count) is int
    x = -x if flip else x
    return x.reshape(rows, -1).sum(0).sum() * count


def keys(kernel, kwargs):
    args, kwargs = prepared(kernel, (X, X)[: 1 if kernel is total else 2], kwargs)
    return Invocation(kernel=kernel, args=args, kwargs={k: v for k, v in kwargs.items() if k != "cfg"}).call_key


@pytest.mark.parametrize(
    ("kernel", "scalar", "number"),
    [
        (SIGNS, {"scale": np.float64(0.1)}, {"scale": 0.1}),
        (SIGNS, {"factor": np.float64(0.1)}, {"factor": 0.1}),
        (SIGNS, {"count": jnp.int32(3)}, {"count": 3}),
        (total, {"count": np.int64(3)}, {"count": 3}),
        (total, {"rows": np.int64(4)}, {"rows": 4}),
        (total, {"rows": jnp.int32(4)}, {"rows": 4}),
        (total, {"flip": np.bool_(True)}, {"flip": True}),
    ],
)
def test_a_scalar_has_the_key_of_its_python_number(kernel, scalar, number):
    assert keys(kernel, number) == keys(kernel, scalar)


def test_float32_is_another_number_than_the_literal():
    assert keys(SIGNS, {"scale": 0.1}) != keys(SIGNS, {"scale": np.float32(0.1)})


@pytest.mark.parametrize("through", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_kernel_and_a_function_run_with_scalars_of_numpy_and_jax(through):
    # Outside the function: under `jit`, `jnp.int32(3)` would be a tracer.
    three = jnp.int32(3)
    got = through(lambda x: SIGNS(x, x, count=np.int64(2), power=three, flip=np.bool_(True)))(X)
    assert float(got[0, 0]) == -8
    assert float(through(lambda x: total(x, count=three, rows=np.int64(4)))(X)) == 192


def test_an_eager_call_with_a_numpy_scalar_shares_its_program_with_the_number():
    traces = []

    class Counted(Kernel[int, Any]):
        def run(self, x, *, cfg, scale: float):
            traces.append(scale)
            return x * scale

        def heuristic_cfg(self, inv):
            return 1

    kernel = Counted()
    for scale in (0.5, np.float32(0.5), np.array(0.5), jnp.float32(0.5)):
        kernel(X, scale=scale)
    assert traces == [0.5]


@pytest.mark.parametrize("cfg", [None, 1])
def test_a_scalar_is_static_after_any_arrays(cfg):
    seen = []

    class Notes(Kernel[int, Any]):
        def run(self, x, *, cfg, said=None):
            seen.append(type(said))
            return x * said

        def heuristic_cfg(self, inv):
            return 1

    kernel = Notes()
    for said in (jnp.float32(2), np.float32(2)):
        kernel(X, said=said, cfg=cfg)
    assert float in seen


def test_a_gradient_by_a_parameter_with_a_number_for_a_default_is_still_there():
    assert float(jax.grad(lambda factor: SIGNS(X, X, factor).sum())(2.0)) == X.size


def test_a_traced_array_in_the_place_of_a_number_is_named():
    with pytest.raises(
        ArgumentError, match=r"total: run uses a traced array as a Python number, probably flip.* static_argnames"
    ):
        jax.jit(total)(X, True)


# --- operations of the library ---


@pytest.mark.parametrize(
    ("kernel", "args", "scalars", "numbers"),
    [
        (attention, (Q, Q, Q), {"softmax_scale": 1 / np.sqrt(16)}, {"softmax_scale": 0.25}),
        (attention, (Q, Q, Q), {"softmax_scale": jnp.float32(0.5)}, {"softmax_scale": 0.5}),
        (attention, (Q, Q, Q), {"sliding_window": np.int64(4)}, {"sliding_window": 4}),
        (attention, (Q, Q, Q), {"sliding_window": (np.array(4), jnp.int32(2))}, {"sliding_window": (4, 2)}),
        (attention, (Q, Q, Q), {"causal": np.bool_(True)}, {"causal": True}),
        (attention, (Q, Q, Q), {"causal": jnp.bool_(True)}, {"causal": True}),
        (attention, (Q, Q, Q), {"logits_soft_cap": jnp.float32(3)}, {"logits_soft_cap": 3.0}),
        (attention, (Q, Q, Q), {"return_lse": jnp.bool_(True)}, {"return_lse": True}),
        (attention, (Q, Q, Q), {"deterministic": np.array(True)}, {"deterministic": True}),
        (
            attention,
            (Q, Q, Q, None, None, None, None, None, KEY),
            {"dropout_rate": jnp.float32(0.5)},
            {"dropout_rate": 0.5},
        ),
        (rms_norm, (X, X[0]), {"eps": np.float64(1e-5)}, {"eps": 1e-5}),
        (rms_norm, (X, X[0]), {"eps": np.array(1e-5)}, {"eps": 1e-5}),
        (rms_norm, (X, X[0]), {"weight_offset": jnp.float32(1)}, {"weight_offset": 1.0}),
        (layer_norm, (X, X[0], X[0]), {"eps": jnp.float32(0.5)}, {"eps": 0.5}),
        (grouped_matmul, (LHS, RHS, SIZES), {"transpose_rhs": jnp.bool_(True)}, {"transpose_rhs": True}),
        (
            grouped_matmul_wgrad,
            (LHS, LHS, SIZES),
            {"groups": np.int64(1), "first_group": np.int64(0)},
            {"groups": 1, "first_group": 0},
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_an_option_takes_every_concrete_scalar(kernel, args, scalars, numbers):
    found, expected = prepared(kernel, args, scalars)[1], prepared(kernel, args, numbers)[1]
    assert expected == found
    assert [type(value) for value in expected.values()] == [type(value) for value in found.values()]


def test_an_eager_call_takes_them():
    scale = 1 / np.sqrt(16)
    plain = attend(Q, Q, Q, causal=True, softmax_scale=0.25)
    np.testing.assert_array_equal(plain, attend(Q, Q, Q, causal=np.bool_(True), softmax_scale=scale))
    np.testing.assert_array_equal(
        normalise(X, eps=1e-5, axis=-1), normalise(X, eps=np.float64(1e-5), axis=np.array(-1))
    )


@pytest.mark.parametrize(
    ("kernel", "args", "name"),
    [
        (attention, (Q, Q, Q), "softmax_scale"),
        (attention, (Q, Q, Q), "causal"),
        (attention, (Q, Q, Q), "sliding_window"),
        (attention, (Q, Q, Q), "dropout_rate"),
        (attention, (Q, Q, Q), "return_lse"),
        (rms_norm, (X, X[0]), "eps"),
        (rms_norm, (X, X[0]), "weight_offset"),
        (grouped_matmul_wgrad, (LHS, LHS, SIZES), "groups"),
    ],
)
def test_a_traced_option_is_refused_by_name_and_says_what_to_do(kernel, args, name):
    with pytest.raises(ArgumentError, match=rf"{name} must be .* got a traced value, .* static_argnames of jax.jit"):
        jax.eval_shape(lambda value: prepared(kernel, args, {name: value}), np.float32(0.5))
