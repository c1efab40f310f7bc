# SPDX-License-Identifier: Apache-2.0
"""Gradients of kernels: every kind of argument and output, on meshes, in loops, with callbacks and effects."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.ops.sample_kernels import (
    Plain,
    WithResiduals,
    WithRule,
    assert_trees_close,
    logged,
    result_of,
    squared,
    tanh_matmul,
)

from ejkernel.ops import (
    ConfigSelectorChain,
    Executor,
    GradientError,
    Kernel,
)

pytestmark = pytest.mark.slow

_rng = np.random.default_rng(1)


def _random(*shape):
    return _rng.standard_normal(shape, np.float32)


x, w, bias, extra = _random(4, 5), _random(5, 3), _random(3), _random(2)
X = _random(6, 4, 5)
rows = np.array([0, 2, 3])


# Every kind of argument and output: a tree with a None, an integer array, an optional array, static keywords


def project(tree, index, w, bias=None, *, scale=1.0, activation=jnp.tanh):
    h = (tree["x"] @ w)[index] + (0 if bias is None else bias)
    extra = 0 if tree["extra"] is None else tree["extra"].sum()
    return {"y": activation(h) * scale, "total": tree["x"].sum() + extra}


def project_gradients(primals, cotangents, kwargs):
    """Return gradients in float32 for arguments of any dtype."""
    tree, index, *floats = primals
    _, pull = jax.vjp(lambda tree, *floats: project(tree, index, *floats, **kwargs), tree, *floats)
    tree, *floats = jax.tree.map(lambda g: g.astype(jnp.float32), pull(cotangents[0]))
    return tree, None, *floats


class Project(Kernel[int, dict]):
    def run(self, tree, index, w, bias=None, *, cfg, scale=1.0, activation=jnp.tanh):
        return project(tree, index, w, bias, scale=scale, activation=activation)

    def heuristic_cfg(self, inv):
        return 0


class ProjectWithRule(Project):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return project_gradients(primals, cotangents, kwargs)


class ProjectWithResiduals(Project):
    def fwd_with_residuals(self, tree, index, w, bias=None, *, cfg, **kwargs):
        return project(tree, index, w, bias, **kwargs), {"half": [tree["x"] / 2], "none": None}

    def vjp(self, residuals, out, cotangents, tree, *others, cfg, **kwargs):
        return project_gradients(({**tree, "x": 2 * residuals["half"][0]}, *others), cotangents, kwargs)


PROJECTS = [Project("plain"), ProjectWithRule("rule"), ProjectWithResiduals("residuals")]
each_project = pytest.mark.parametrize("kernel", PROJECTS, ids=lambda kernel: kernel.name)


def loss(f, **static):
    def scalar(x, w, bias, extra):
        optional = {} if bias is None else {"bias": bias}  # by keyword for a positional parameter
        out = f({"x": x, "extra": extra}, rows, w, **optional, **static)
        return (out["y"] ** 2).sum() + out["total"]

    return scalar


def gradients(f, *arguments, **static):
    present = tuple(index for index, value in enumerate(arguments) if value is not None)
    return jax.grad(loss(f, **static), present)(*arguments)


def plain_gradients(*arguments, **static):
    return jax.jit(lambda *arguments: gradients(project, *arguments, **static))(*arguments)


@each_project
@pytest.mark.parametrize(
    "arguments",
    [(x, w, bias, extra), (x, w, bias, None), (x, w, None, extra), (x, w, None, None)],
    ids=["all", "None in a tree", "argument left out", "both"],
)
def test_absent_arrays_have_no_gradient(kernel, arguments):
    f, _ = logged(kernel)
    assert_trees_close(gradients(f, *arguments), plain_gradients(*arguments))


@each_project
@pytest.mark.parametrize(
    "static",
    [{"scale": 2.0}, {"activation": jnp.sin}, {"scale": -1, "activation": jax.nn.gelu}],
    ids=["number", "function", "both"],
)
def test_static_keywords_reach_the_gradient(kernel, static):
    f, _ = logged(kernel)
    assert_trees_close(gradients(f, x, w, bias, extra, **static), plain_gradients(x, w, bias, extra, **static))


ALL = (0, 1, 2, 3)
FIRST = (0, None, None, None)
TRANSFORMED = {
    "jit(grad)": lambda f: jax.jit(jax.grad(loss(f), ALL))(x, w, bias, extra),
    "vmap(grad)": lambda f: jax.vmap(jax.grad(loss(f), ALL), FIRST)(X, w, bias, extra),
    "grad(vmap)": lambda f: jax.grad(lambda *a: jax.vmap(loss(f), FIRST)(*a).sum(), ALL)(X, w, bias, extra),
    "jvp": lambda f: jax.jvp(loss(f), (x, w, bias, extra), (x, w, bias, extra)),
    "jvp in one argument": lambda f: jax.jvp(lambda w: loss(f)(x, w, bias, extra), (w,), (w,)),
    "hessian": lambda f: jax.hessian(loss(f), (1, 2))(x, w, bias, extra),
    "grad(checkpoint)": lambda f: jax.grad(jax.checkpoint(loss(f)), ALL)(x, w, bias, extra),
}


@each_project
@pytest.mark.parametrize("program", TRANSFORMED)
def test_trees_and_integers_survive_transformations(kernel, program):
    f, _ = logged(kernel)
    assert_trees_close(TRANSFORMED[program](f), result_of(TRANSFORMED[program], project))


@each_project
def test_gradients_have_the_dtype_of_their_arguments(kernel):
    f, _ = logged(kernel)
    halves = [jnp.asarray(value, jnp.bfloat16) for value in (x, w, bias, extra)]
    assert_trees_close(gradients(f, *halves), plain_gradients(*halves), tolerance=5e-2)


@each_project
def test_an_integer_argument_has_a_float0_gradient(kernel):
    f, _ = logged(kernel)
    by_index = jax.grad(lambda index: f({"x": x, "extra": None}, index, w)["y"].sum(), allow_int=True)(rows)
    assert (jax.dtypes.float0, rows.shape) == (by_index.dtype, by_index.shape)


@each_project
def test_vmap_over_the_integer_argument_sums_the_gradient(kernel):
    def total(f, x):
        return jax.vmap(lambda index: f({"x": x, "extra": None}, index, w)["y"].sum())(rows[:, None]).sum()

    f, _ = logged(kernel)
    actual, expected = jax.grad(functools.partial(total, f))(x), jax.grad(functools.partial(total, project))(x)
    assert_trees_close(actual, expected)


@each_project
def test_a_keyword_after_an_omitted_positional_argument_has_a_gradient(kernel):
    class Shifted(type(kernel)):
        def run(self, tree, index, w, bias=None, shift=None, *, cfg):
            out = project(tree, index, w, bias)
            return {**out, "total": out["total"] + (0 if shift is None else (shift**2).sum())}

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return (*[None] * 4, 2 * primals[4] * cotangents[0]["total"])

    f, _ = logged(Shifted())
    actual = jax.grad(lambda shift: f({"x": x, "extra": None}, rows, w, shift=shift)["total"])(extra)
    np.testing.assert_allclose(actual, 2 * extra, rtol=1e-6)


def test_an_array_for_a_whole_tree_is_a_wrong_answer():
    class OneForAll(Project):
        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return primals[0]["x"], None, None

    f, _ = logged(OneForAll())
    with pytest.raises(GradientError, match="gradient of positional argument 0 must have the argument's structure"):
        gradients(f, x, w, None, None)


def test_none_means_a_zero_gradient_of_an_array_or_a_whole_tree():
    class Nothing(Project):
        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return None, None, None

    f, _ = logged(Nothing())
    assert_trees_close(gradients(f, x, w, None, extra), jax.tree.map(jnp.zeros_like, (x, w, extra)))


# Integer results beside floating-point ones


def best(x, w):
    scores = jnp.tanh(x @ w)
    return scores.max(-1), scores.argmax(-1)


class Best(Kernel[int, tuple]):
    def run(self, x, w, *, cfg):
        return best(x, w)

    def heuristic_cfg(self, inv):
        return 0


class BestWithRule(Best):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        assert cotangents[1].dtype == jax.dtypes.float0
        assert cotangents[1].shape == cotangents[0].shape
        return jax.vjp(lambda x, w: best(x, w)[0], *primals)[1](cotangents[0])


class BestWithResiduals(Best):
    def fwd_with_residuals(self, x, w, *, cfg):
        return best(x, w), jnp.argmax(x @ w, -1)  # an integer residual

    def vjp(self, residuals, out, cotangents, x, w, *, cfg):
        assert cotangents[1].dtype == jax.dtypes.float0
        assert cotangents[1].shape == cotangents[0].shape
        assert residuals.dtype == jnp.int32
        return jax.vjp(lambda x, w: best(x, w)[0], x, w)[1](cotangents[0])


def first_squared(f):
    return lambda *arrays: (f(*arrays)[0] ** 2).sum()


BEST = {
    "grad": lambda f: jax.grad(first_squared(f), (0, 1))(x, w),
    "jit(grad)": lambda f: jax.jit(jax.grad(first_squared(f), (0, 1)))(x, w),
    "value_and_grad with the integers": lambda f: jax.value_and_grad(
        lambda x, w: (f(x, w)[0].sum(), f(x, w)[1]), (0, 1), has_aux=True
    )(x, w),
    "vmap(grad)": lambda f: jax.vmap(jax.grad(first_squared(f), (0, 1)), (0, None))(X, w),
    "grad(vmap)": lambda f: jax.grad(first_squared(jax.vmap(f, (0, None))), (0, 1))(X, w),
    "jvp": lambda f: jax.jvp(lambda x, w: f(x, w)[0], (x, w), (x, w)),
    "vmap(jvp)": lambda f: jax.vmap(lambda x: jax.jvp(lambda x: f(x, w)[0], (x,), (x,)))(X),
    "hessian": lambda f: jax.hessian(first_squared(f))(x, w),
    "jvp of the integers": lambda f: jax.jvp(lambda x: f(x, w)[1].astype(np.float32), (x,), (x,)),
    "grad(scan)": lambda f: jax.grad(
        lambda w: jax.lax.scan(lambda c, x: (c + f(x, w)[0].sum(), f(x, w)[1]), 0.0, X)[0]
    )(w),
}


@pytest.mark.parametrize("kernel", [Best("plain"), BestWithRule("rule"), BestWithResiduals("residuals")], ids=str)
@pytest.mark.parametrize("program", BEST)
def test_integer_results_do_not_disturb_gradients(kernel, program):
    f, _ = logged(kernel)
    assert_trees_close(BEST[program](f), result_of(BEST[program], best))


@pytest.mark.parametrize("kernel", [Plain("plain"), WithRule("rule"), WithResiduals("residuals")], ids=str)
def test_constant_zero_tangents_do_not_disturb_gradients(kernel):
    @jax.custom_jvp
    def without_gradient(w):
        return 2 * w

    # an array of zeros, where JAX's own rules have a symbolic one
    without_gradient.defjvp(lambda primals, tangents: (2 * primals[0], jnp.zeros_like(tangents[0])))

    def total(f):
        return jax.grad(lambda x, w: f(x, without_gradient(w)).sum() + f(x, w).sum(), (0, 1))

    f, _ = logged(kernel)
    expected = total(tanh_matmul)(x, w)
    assert_trees_close(total(f)(x, w), expected)
    assert_trees_close(jax.jit(total(f))(x, w), expected)


# Meshes, loops, callbacks, effects


@pytest.mark.parametrize("kernel", [Plain("plain"), WithRule("rule"), WithResiduals("residuals")], ids=str)
def test_gradients_of_replicated_arguments_are_summed_over_the_mesh(kernel):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    tall = np.tile(x, (2, 1))
    executor = Executor(ConfigSelectorChain())
    specs = {"mesh": mesh, "in_specs": (P("d"), P()), "out_specs": P("d")}
    call = functools.partial(executor, kernel, method="shard_map", **specs)
    actual, expected = (jax.grad(squared(f), (0, 1))(tall, w) for f in (call, tanh_matmul))
    assert_trees_close(actual, expected)


class Loop(Plain):
    def run(self, x, w, *, cfg):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=5)[0]


class LoopWithResiduals(Loop):
    def fwd_with_residuals(self, x, w, *, cfg):
        out, saved = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), c), x, None, length=5)
        return out, saved

    def vjp(self, residuals, out, cotangents, x, w, *, cfg):
        def step(carry, c):
            d, dw = carry
            dc, more = jax.vjp(lambda c, w: jnp.tanh(c @ w), c, w)[1](d)
            return (dc, dw + more), None

        return jax.lax.scan(step, (cotangents[0], jnp.zeros_like(w)), residuals, reverse=True)[0]


@pytest.mark.parametrize(("kernel", "loops"), [(Loop(), 3), (LoopWithResiduals(), 2)], ids=["no rule", "residuals"])
def test_residuals_save_a_loop_from_running_twice(kernel, loops):
    f, _ = logged(kernel)
    square = _random(3, 3)
    compiled = jax.jit(jax.grad(squared(f), (0, 1))).lower(x[:, :3], square).compile()
    assert loops == len(re.findall(r"\swhile\(", compiled.as_text()))
    expected = jax.grad(squared(functools.partial(kernel.run, cfg=0)), (0, 1))(x[:, :3], square)
    assert_trees_close(compiled(x[:, :3], square), expected)


class OnHost(Plain):
    """A kernel that JAX cannot differentiate."""

    def run(self, x, w, *, cfg):
        like = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
        return jax.pure_callback(lambda x, w: np.tanh(np.matmul(x, w)), like, x, w, vmap_method="broadcast_all")


class OnHostWithRule(OnHost):
    custom_vjp = WithRule.custom_vjp


class OnHostWithResiduals(OnHost):
    def fwd_with_residuals(self, x, w, *, cfg):
        y = self.run(x, w, cfg=cfg)
        return y, {"y": y}

    vjp = WithResiduals.vjp


@pytest.mark.parametrize("kernel", [OnHostWithRule(), OnHostWithResiduals()], ids=["rule", "residuals"])
@pytest.mark.parametrize(
    "program",
    [
        lambda f: jax.grad(squared(f), (0, 1))(x, w),
        lambda f: jax.vmap(jax.grad(squared(f), (0, 1)), (0, None))(X, w),
        lambda f: jax.grad(squared(jax.vmap(f, (0, None))), (0, 1))(X, w),
    ],
    ids=["grad", "vmap(grad)", "grad(vmap)"],
)
def test_a_kernel_that_jax_cannot_differentiate_needs_only_its_rule(kernel, program):
    f, _ = logged(kernel)
    assert_trees_close(program(f), result_of(program, tanh_matmul))


class Printing(Plain):
    def run(self, x, w, *, cfg):
        jax.debug.print("rows {}", x.shape[0], ordered=True)
        return tanh_matmul(x, w)


@pytest.mark.parametrize(
    "kernel", [Printing(), type("PrintingRule", (Printing, WithRule), {})()], ids=["plain", "rule"]
)
@pytest.mark.parametrize(
    "program",
    [lambda f: f(x, w), lambda f: jax.jit(f)(x, w), lambda f: jax.jit(jax.grad(squared(f)))(x, w)],
    ids=["eager", "jit", "jit(grad)"],
)
def test_ordered_effects_inside_a_kernel_happen(kernel, program, capsys):
    f, _ = logged(kernel)
    assert_trees_close(program(f), result_of(program, tanh_matmul))
    jax.effects_barrier()
    assert "rows 4" in capsys.readouterr().out
