# SPDX-License-Identifier: Apache-2.0
"""Calls support the features of plain JAX functions: references, transposes, effects, array-like objects, methods."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.sample_kernels import Computes

from ejkernel.modules import rms_norm
from ejkernel.ops import ArgumentError, GradientError, Kernel, autotune, default_executor, tune

X = np.array([1.0, 2.0, 3.0], np.float32)


def with_own_reference(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] * x
    return ref[...]


def add_to(ref, x):
    ref[...] += x
    return ref[...] * 2


OWN_REFERENCE = Computes("own_reference", with_own_reference)
ADD_TO = Computes("add_to", add_to)
TRIPLE = Computes("triple", lambda x: 3 * x)
PRODUCT = Computes("product", lambda x, y: (x * y, jnp.arange(3)))
APPLIES = Computes("applies", lambda x, function: function(x))

PROGRAMS = {
    "eager": lambda f: f(X),
    "jit": lambda f: jax.jit(f)(X),
    "vmap": lambda f: jax.vmap(f)(X[None]),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f))(X[None]),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(X),
    "jvp": lambda f: jax.jvp(f, (X,), (X,))[1],
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_run_may_create_references(program):
    np.testing.assert_allclose(program(OWN_REFERENCE), program(with_own_reference), rtol=1e-6)


@pytest.mark.parametrize("program", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_reference_argument_is_written(program):
    results = []
    for function in (ADD_TO, add_to):
        ref = jax.new_ref(jnp.ones(3))
        call = program(lambda ref, x, f=function: f(ref, x))
        results.append((call(ref, X), call(ref, X), ref[...]))
    jax.tree.map(np.testing.assert_array_equal, *results)
    np.testing.assert_array_equal(results[0][2], 1 + 2 * X)


def through_reference(function):
    def call(x):
        ref = jax.new_ref(x)
        y = function(ref, x)
        return ref[...] + 10 * y

    return call


@pytest.mark.slow
@pytest.mark.parametrize("program", [PROGRAMS[name] for name in ("eager", "jit", "vmap", "jit of vmap")])
def test_a_reference_created_around_a_call_is_written(program):
    np.testing.assert_array_equal(program(through_reference(ADD_TO)), program(through_reference(add_to)))


def test_two_references_and_the_arguments_between_them_keep_their_order():
    def call(f):
        def program(x):
            first, second = jax.new_ref(x), jax.new_ref(2 * x)
            f(first, x)
            f(second, first[...])
            return f(first, second[...])

        return jax.jit(program)(X)

    np.testing.assert_array_equal(call(ADD_TO), call(add_to))


def test_a_gradient_through_a_reference_argument_is_an_error_with_the_fix():
    with pytest.raises(GradientError, match=r"add_to: a call that takes a reference .* pass the reference's value"):
        jax.grad(lambda x: through_reference(ADD_TO)(x).sum())(X)


TRANSPOSES = {
    "plain": (lambda f: f, X),
    "under jit": (jax.jit, X),
    "of a batch": (jax.vmap, X[None]),
    "of a sum": (lambda f: lambda x: f(x) + f(2 * x), X),
}


@pytest.mark.slow
@pytest.mark.parametrize(("program", "x"), TRANSPOSES.values(), ids=TRANSPOSES.keys())
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_linear_call_is_transposed(program, x, outer):
    def transposed(f):
        return outer(lambda ct: jax.linear_transpose(program(f), x)(ct)[0])(x)

    np.testing.assert_allclose(transposed(TRIPLE), transposed(TRIPLE.function), rtol=1e-6)


@pytest.mark.parametrize("which", [0, 1])
def test_a_call_linear_in_one_argument_is_transposed_in_it(which):
    def transposed(f):
        def linear(value):
            return f(value, 2 * X)[0] if which == 0 else f(2 * X, value)[0]

        return jax.linear_transpose(linear, X)(X)[0]

    np.testing.assert_array_equal(transposed(PRODUCT), transposed(PRODUCT.function))


@pytest.mark.filterwarnings("ignore::ejkernel.ops.errors.UnstableKeyWarning")
@pytest.mark.parametrize("program", [lambda f: jax.jit(f)(X), lambda f: jax.grad(f)(X), lambda f: jax.vmap(f)(X)])
def test_a_closed_over_traced_array_is_an_error_with_the_fix(program):
    with pytest.raises(ArgumentError, match=r"applies: .* uses a traced array .* pass it as an argument"):
        program(lambda x: APPLIES(X, lambda v: v * x).sum())


class Printing(Kernel[int, Any]):
    """Tells of each time that a part of it runs."""

    ordered = False

    def __init__(self, name, reported, *, rule=False, ordered=False):
        super().__init__(name)
        self.reported, self.rule, self.ordered = reported, rule, ordered

    def run(self, x, *, cfg):
        if not self.rule:
            jax.debug.callback(lambda: self.reported.append("run"), ordered=self.ordered)
        return x * x

    def heuristic_cfg(self, inv):
        return 1


class PrintingRule(Printing):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        jax.debug.callback(lambda: self.reported.append("rule"), ordered=self.ordered)
        return (2 * primals[0] * cotangents[0],)


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("program", [PROGRAMS[name] for name in ("eager", "jit", "grad", "jit of grad", "jvp")])
def test_an_effect_of_run_happens_once_also_under_differentiation(program, ordered):
    reported = []
    kernel = Printing("printing", reported, ordered=ordered)
    expected = program(lambda x: x * x)
    np.testing.assert_allclose(program(kernel), expected, rtol=1e-6)
    jax.effects_barrier()
    assert reported == ["run"]


@pytest.mark.parametrize("ordered", [False, True])
def test_equal_calls_of_a_program_each_have_their_effects(ordered):
    reported = []
    kernel = Printing("printing", reported, ordered=ordered)
    np.testing.assert_allclose(jax.jit(lambda x: kernel(kernel(kernel(x))))(X), X**8, rtol=1e-6)
    jax.effects_barrier()
    assert reported == ["run"] * 3


class CountsTraces(Computes):
    """Tells how often `run` is traced."""

    def __init__(self, name, function):
        super().__init__(name, function)
        self.traces = 0

    def run(self, *args, cfg):
        self.traces += 1
        return super().run(*args, cfg=cfg)


class CountsTracesWithRule(CountsTraces):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (jnp.cos(primals[0]) * cotangents[0],)


@pytest.mark.parametrize(
    ("kernel", "transform", "traces"),
    [
        (CountsTraces("forward", jnp.sin), lambda f: f, 1),
        (CountsTraces("gradient", jnp.sin), jax.grad, 2),  # for the types, and for JAX to differentiate
        (CountsTracesWithRule("rule", jnp.sin), jax.grad, 1),
    ],
    ids=lambda value: getattr(value, "op_id", None),
)
def test_run_is_traced_no_more_often_than_it_must_be(kernel, transform, traces):
    def program(f):
        return jax.jit(transform(lambda x: f(f(x)).sum()))(X)

    np.testing.assert_allclose(program(kernel), program(jnp.sin), rtol=1e-6)
    assert kernel.traces == traces


def test_an_effect_of_a_gradient_rule_happens_once():
    reported = []
    kernel = PrintingRule("rule", reported, rule=True)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: kernel(x).sum()))(X), 2 * X)
    jax.effects_barrier()
    assert reported == ["rule"]


def test_an_ordered_effect_in_a_gradient_rule_is_an_error_with_the_fix():
    kernel = PrintingRule("rule", [], rule=True, ordered=True)
    with pytest.raises(GradientError, match=r"rule.bwd: the gradient rule has ordered effects .* make them unordered"):
        jax.jit(jax.grad(lambda x: kernel(x).sum()))(X)


class Parameter:
    """An array in disguise, as libraries of models have them."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return jnp.asarray(self.value)


class Bare(Parameter):
    """One that shows its shape and dtype too."""

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    ndim = property(lambda self: self.value.ndim)


MULTIPLIES = Computes("multiplies", lambda x, tree: x * jax.tree.leaves(tree)[0] * x)


@pytest.mark.slow
@pytest.mark.parametrize("disguise", [Parameter, Bare])
@pytest.mark.parametrize("hold", [lambda p: p, lambda p: [p], lambda p: {"p": (p, 1)}], ids=["bare", "list", "dict"])
@pytest.mark.parametrize("program", [PROGRAMS[name] for name in ("eager", "jit", "grad", "vmap")])
def test_an_array_like_object_is_an_array(program, hold, disguise):
    got = program(lambda x: MULTIPLIES(x, hold(disguise(x))))
    np.testing.assert_allclose(got, program(lambda x: x * x * x), rtol=1e-6)


def test_an_array_like_object_may_change():
    parameter = Parameter(X)
    np.testing.assert_array_equal(TRIPLE(parameter), 3 * X)
    parameter.value = 2 * X
    np.testing.assert_array_equal(TRIPLE(parameter), 6 * X)


@pytest.mark.slow
@pytest.mark.parametrize("disguise", [Parameter, Bare])
def test_a_weight_of_rms_norm_may_be_a_parameter(disguise):
    expected = rms_norm(X, 2 * X)
    np.testing.assert_array_equal(rms_norm(X, disguise(2 * X)), expected)
    gradient = jax.grad(lambda w: rms_norm(X, disguise(w)).sum())(jnp.asarray(X))
    np.testing.assert_allclose(gradient, jax.grad(lambda w: rms_norm(X, w).sum())(jnp.asarray(X)), rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class Layer:
    """Has a tuned method."""

    scale: float

    @tune(space={"rows": [1, 3]})
    def apply(self, x, *, rows=1):
        return (x.reshape(rows, -1) * x.reshape(rows, -1) * self.scale).reshape(x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("program", [PROGRAMS[name] for name in ("eager", "jit", "grad", "vmap")])
def test_a_tuned_method_computes_with_its_object(program):
    for scale in (2.0, 3.0):
        expected = program(lambda x, s=scale: x * x * s)
        np.testing.assert_allclose(program(lambda x, s=scale: Layer(s).apply(x)), expected, rtol=1e-6)


def test_a_tuned_method_is_called_with_a_configuration_and_through_its_class():
    np.testing.assert_array_equal(Layer(2.0).apply(X, rows=3), 2 * X * X)
    np.testing.assert_array_equal(Layer(2.0).apply(X, cfg={"rows": 3}), 2 * X * X)
    np.testing.assert_array_equal(Layer.apply(Layer(2.0), X), 2 * X * X)
    np.testing.assert_array_equal(default_executor()(Layer(2.0).apply, X), 2 * X * X)


def test_a_method_is_tuned_and_explained_as_the_call_that_it_is():
    layer, method = Layer(2.0), Layer(4.0).apply
    found = autotune(layer.apply, X, num_warmup=0, num_iters=1)
    assert found in ({"rows": 1}, {"rows": 3})
    assert found == default_executor().choose_config(Layer.apply, layer, X)
    reported = default_executor().explain(layer.apply, X)
    assert reported.resolution.source == "autotune"
    assert default_executor().explain(method, X).resolution.source == "heuristic"  # another object's is another call
    np.testing.assert_array_equal(layer.apply(X), 2 * X * X)


def test_choosing_and_compiling_take_a_method():
    method = Layer(2.0).apply
    assert default_executor().choose_config(method, X) == {"rows": 1}
    np.testing.assert_array_equal(default_executor().compile(method, X)(X), 2 * X * X)
