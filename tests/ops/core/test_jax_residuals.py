# SPDX-License-Identifier: Apache-2.0
"""JAX's residuals of `run`: the forward runs once, and forward and backward may have different configurations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import GradientError, Kernel, KernelError, autotune, check_kernel, overlay_cache
from ejkernel.ops.execution.discovery import discover

X = np.linspace(0.1, 1.0, 12, dtype=np.float32).reshape(4, 3)
W = np.linspace(-0.5, 0.5, 15, dtype=np.float32).reshape(3, 5)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def layer(x, w, rows):
    return jnp.tanh(x @ w)


def _forward(x, w, rows):
    """Save the marker `cbrt`, and a table with a shape by configuration, beside arguments and output."""
    out = jnp.tanh(x @ w)
    return out, (x, w, out, jnp.cbrt(x), jnp.arange(rows))


def _backward(rows, residuals, cotangent):
    x, w, out, root, table = residuals
    assert table.shape == (rows,)
    inner = cotangent * (1 - out * out) * table[1] * rows / rows
    return inner @ w.T + 0 * root, x.T @ inner


layer.defvjp(_forward, _backward)


class Layer(Kernel[int, jax.Array]):
    keeps_residuals = True

    def run(self, x, w, *, cfg):
        return layer(2 * x, w, cfg)

    def heuristic_cfg(self, inv):
        return 2

    def config_space(self, inv):
        return [2, 4]


wrapped = Layer("wrapped")


def loss(x, w):
    return jnp.sum(wrapped(x, w) ** 2)


def plain_loss(x, w):
    return jnp.sum(jnp.tanh(2 * x @ w) ** 2)


gradient = jax.grad(loss, (0, 1))
WAYS = {
    "jit": jax.jit(gradient),
    "checkpoint": jax.jit(jax.grad(jax.checkpoint(loss), (0, 1))),
    "vmap": jax.jit(lambda x, w: jax.tree.map(lambda g: g[0], jax.vmap(gradient, (0, None))(x[None], w))),
    "scan": jax.jit(lambda x, w: jax.lax.scan(lambda _, x: (None, gradient(x, w)), None, x[None])[1]),
}


def agree(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.squeeze(one), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_the_forward_is_in_the_program_once(way):
    assert WAYS[way].lower(X, W).as_text().count("lo.cbrt") == 1


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_plain_jax(way):
    agree(WAYS[way](X, W), jax.grad(plain_loss, (0, 1))(X, W))


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "backward"), [(2, 4), (4, 2), (4, 4)])
def test_the_backward_may_have_another_configuration_than_the_forward(forward, backward):
    step = jax.jit(gradient)
    keys = {inv.direction: inv.key for inv in discover(step, X, W)}
    with overlay_cache({keys["fwd"]: forward, keys["bwd"]: backward}):
        agree(step(X, W), jax.grad(plain_loss, (0, 1))(X, W))


@pytest.mark.slow
def test_all_configurations_are_candidates_of_the_backward():
    result = autotune(jax.jit(gradient), X, W)
    backward = next(search for search in result.searches if search.inv.direction == "bwd")
    assert {outcome.status for outcome in backward.outcomes} <= {"measured", "same"}


class Chunked(Kernel[int, jax.Array]):
    """JAX's residual of it has one row for each unit of its configuration."""

    keeps_residuals = True

    def run(self, x, *, cfg):
        return jnp.sin(jnp.sin(x).reshape(cfg, -1)).reshape(x.shape)

    def heuristic_cfg(self, inv):
        return 2


chunked = Chunked("chunked")


def test_residuals_must_not_depend_on_the_configuration():
    step = jax.jit(jax.grad(lambda x: chunked(x).sum()))
    np.testing.assert_allclose(step(X), jax.grad(lambda x: jnp.sin(jnp.sin(x)).sum())(X), rtol=1e-5)
    backward = next(inv.key for inv in discover(step, X) if inv.direction == "bwd")
    with overlay_cache({backward: 4}), pytest.raises(GradientError, match=r"depend on the configuration: .*\[2,6\]"):
        step(X)
    forward = next(inv.key for inv in discover(jax.value_and_grad(lambda x: chunked(x).sum()), X))
    with overlay_cache({forward: 4}), pytest.raises(KernelError, match=r"With keeps_residuals=True the residuals"):
        step(X)


@pytest.mark.slow
def test_check_kernel_finds_residuals_that_depend_on_the_configuration():
    def told(kernel, *args):
        report = check_kernel(kernel, *args, configs=[2, 4], without=["vmap", "export"], strict=False)
        return {row.config: row.reason for row in report.rows if row.check == "residuals"}

    assert told(wrapped, X, W) == {2: "", 4: ""}
    found = told(chunked, X)
    assert not found[2]
    assert "the residuals depend on the configuration" in found[4]


class TakesIntegers(Kernel[int, jax.Array]):
    keeps_residuals = True

    def run(self, x, at, *, scale=None, power=2, cfg):
        return (jnp.sin(x)[at] * (1.0 if scale is None else scale)) ** power, at + 1

    def heuristic_cfg(self, inv):
        return 1


@pytest.mark.slow
def test_integers_static_arguments_and_arrays_by_keyword_are_as_in_plain_jax():
    kernel = TakesIntegers("takes_integers")
    x, at, scale = jnp.arange(4.0), jnp.array([2, 0]), jnp.float32(3)

    def of(function):
        return jax.grad(lambda x, scale: function(x, at, scale=scale, power=3)[0].sum(), (0, 1))(x, scale)

    agree(of(kernel), of(functools.partial(kernel.run, cfg=1)))


def test_an_explicit_rule_comes_first():
    class Ruled(Layer):
        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return tuple(jnp.full_like(primal, 7) for primal in primals)

    kernel = Ruled("ruled")
    assert float(jax.grad(lambda x: kernel(x, W).sum())(X)[0, 0]) == 7


def test_a_checkpoint_policy_may_save_residuals_by_name():
    policy = jax.checkpoint_policies.save_only_these_names("wrapped.out", "wrapped.residuals")
    saving = jax.checkpoint(lambda x, w: jnp.sin(loss(x, w)), policy=policy)
    assert jax.jit(jax.grad(saving)).lower(X, W).as_text().count("lo.cbrt") == 1


class Squared(Kernel[int, jax.Array]):
    keeps_residuals = True

    def run(self, x, *, cfg):
        return jnp.sin(x) ** 2

    def heuristic_cfg(self, inv):
        return 1


def test_higher_derivatives_and_python_number_tangents_are_as_in_plain_jax():
    kernel = Squared("squared")
    np.testing.assert_allclose(jax.grad(jax.grad(kernel))(0.3), 2 * np.cos(0.6), rtol=1e-5)
    np.testing.assert_allclose(jax.jvp(kernel, (0.3,), (1.0,))[1], np.sin(0.6), rtol=1e-5)
