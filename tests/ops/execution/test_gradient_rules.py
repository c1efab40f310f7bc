# SPDX-License-Identifier: Apache-2.0
"""Gradient rules: their arguments, valid results, and their configurations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.sample_kernels import (
    Plain,
    ShowsConfig,
    WithResiduals,
    assert_trees_close,
    logged,
    squared,
    tanh_matmul,
)

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    GradientError,
    Kernel,
    KernelError,
    find_labels_in_lowered,
    overlay_cache,
)

_rng = np.random.default_rng(1)


def _random(*shape):
    return _rng.standard_normal(shape, np.float32)


x, w, X = _random(4, 5), _random(5, 3), _random(6, 4, 5)


# --- arguments and results of a rule ---


class Recorder(Plain):
    """Records the arguments of its rule, and returns `answer`."""

    def __init__(self, output, answer=None):
        super().__init__()
        self.output, self.answer, self.given = output, answer, None

    def run(self, x, w, *, cfg, flag=False):
        return self.output(x, w)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        self.given = (primals, cfg, kwargs, cotangents)
        return (jnp.zeros_like(x), jnp.zeros_like(w)) if self.answer is None else self.answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "shapes"),
    [
        (lambda x, w: x @ w, "((4, 3),)"),
        (lambda x, w: (x @ w,), "((4, 3),)"),
        (lambda x, w: (x @ w, x.sum()), "((4, 3), ())"),
        (lambda x, w: [x @ w, {"s": x.sum()}], "((4, 3), {'s': ()})"),
        (lambda x, w: {"y": x @ w, "s": x.sum()}, "({'s': (), 'y': (4, 3)},)"),
    ],
    ids=["one", "tuple of one", "tuple", "list", "dict"],
)
def test_cotangents_are_a_tuple_with_one_entry_for_each_output(output, shapes):
    kernel = Recorder(output)
    f, _ = logged(kernel)
    jax.grad(lambda x: sum(leaf.sum() for leaf in jax.tree.leaves(f(x, w))))(x)
    cotangents = kernel.given[3]
    assert shapes == str(jax.tree.map(np.shape, cotangents))


def test_a_rule_gets_positional_arguments_configuration_and_keywords():
    kernel = Recorder(jnp.matmul)
    f, _ = logged(kernel)
    jax.grad(lambda x: f(x, w=w, flag=True).sum())(x)
    primals, cfg, kwargs, _ = kernel.given
    assert ([primal.shape for primal in primals], cfg, kwargs) == ([(4, 5), (5, 3)], 0, {"flag": True})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((x,), r"must return a tuple of 2 gradients.*None for zero.*got 1 gradients"),
        ((x, w, None), r"must return a tuple of 2 gradients.*got 3 gradients"),
        (w, r"must return a tuple of 2 gradients.*got an array, not a tuple"),
        ((x, {"w": w}), r"gradient of positional argument 1 must have the argument's structure"),
        ((x, [w, w]), r"gradient of positional argument 1 must have the argument's structure"),
        ((x, w.T), r"gradient of w must have its shape \(5, 3\), got \(3, 5\)"),
    ],
    ids=["too few", "too many", "not a tuple", "a dict for an array", "a list for an array", "transposed"],
)
def test_a_wrong_answer_of_a_rule_is_an_error_with_the_reason(answer, message):
    f, _ = logged(Recorder(jnp.matmul, answer))
    with pytest.raises(GradientError, match=f"(?s)Recorder: .*{message}"):
        jax.grad(squared(f), (0, 1))(x, w)


class Scaled(Plain):
    def run(self, x, *, cfg, factor):
        return x * factor


class ScaledWithRule(Scaled):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (cotangents[0] * kwargs["factor"],)


def test_a_keyword_only_array_has_a_gradient_without_a_rule():
    f, _ = logged(Scaled())
    np.testing.assert_allclose(jax.grad(lambda s: f(x, factor=s).sum())(np.float32(2)), x.sum(), rtol=1e-5)


def test_a_keyword_only_array_has_no_gradient_in_a_rule():
    f, _ = logged(ScaledWithRule())
    with pytest.raises(GradientError, match=r"array passed by keyword.*make it a positional parameter"):
        jax.grad(lambda s: f(x, factor=s).sum())(np.float32(2))


def test_an_undifferentiated_keyword_only_array_is_allowed():
    f, _ = logged(ScaledWithRule())
    np.testing.assert_allclose(jax.grad(lambda x: f(x, factor=np.float32(2)).sum())(x), np.full_like(x, 2))


@pytest.mark.parametrize(
    ("hooks", "missing"),
    [({"vjp": lambda *_: None}, "fwd_with_residuals"), ({"fwd_with_residuals": lambda *_: None}, "vjp")],
    ids=["vjp alone", "fwd_with_residuals alone"],
)
def test_half_of_the_residual_form_is_an_error(hooks, missing):
    f, _ = logged(type("Half", (Plain,), hooks)())
    with pytest.raises(KernelError, match=f"Half has .* but no {missing}; define both, or custom_vjp"):
        jax.grad(squared(f))(x, w)


def test_missing_residuals_are_an_error():
    class OutAlone(WithResiduals):
        def fwd_with_residuals(self, x, w, *, cfg):
            return tanh_matmul(x, w)

    f, _ = logged(OutAlone())
    with pytest.raises(GradientError, match=r"fwd_with_residuals must return \(out, residuals\)"):
        jax.grad(squared(f))(x, w)


def labels_of(f, *arrays):
    return [label.partition("#")[2].partition("@")[0] for label in find_labels_in_lowered(jax.jit(f).lower(*arrays))]


class RuleWithInnerKernel(WithResiduals):
    def __init__(self, name, inner):
        super().__init__(name)
        self.inner = inner

    def vjp(self, residuals, out, cotangents, x, w, *, cfg):
        d = cotangents[0] * (1 - residuals["y"] ** 2)
        return self.inner(d, w.T), self.inner(x.T, d)


class Product(Plain):
    def run(self, x, w, *, cfg):
        return x @ w


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: (jax.grad(squared(f), (0, 1)), x),
        lambda f: (jax.vmap(jax.grad(squared(f), (0, 1)), (0, None)), X),
        lambda f: (jax.grad(squared(jax.vmap(f, (0, None))), (0, 1)), X),
    ],
    ids=["grad", "vmap(grad)", "grad(vmap)"],
)
def test_a_rule_may_call_another_kernel(transform):
    inner, inner_chooser = logged(Product("inner"))
    f, _ = logged(RuleWithInnerKernel("outer", inner))
    (actual, first), (expected, _) = transform(f), transform(tanh_matmul)
    assert_trees_close(actual(first, w), expected(first, w))
    assert {"outer", "outer.bwd", "inner"} == set(labels_of(actual, first, w))
    assert {(6,) * (first is X)} == {inv.batch_sizes for inv in inner_chooser.asked}


# Configurations of gradients


@pytest.fixture
def shown():
    """A kernel with 100 plus its configuration as gradient, its chain, and the keys of both directions."""
    f, chooser = logged(ShowsConfig())
    jax.grad(f)(x)
    forward, backward = [inv.key for inv in chooser.asked]
    return f.args[0], ConfigSelectorChain(ConfigCache()), forward, backward


def test_a_backward_call_runs_with_the_forwards_configuration(shown):
    kernel, chain, forward, _ = shown
    chain.cache.put(forward, 7)
    np.testing.assert_array_equal(jax.grad(functools.partial(Executor(chain), kernel))(x), np.full_like(x, 107))


def test_a_backward_call_prefers_its_own_configuration(shown):
    kernel, chain, forward, backward = shown
    chain.cache.put(forward, 7)
    chain.cache.put(backward, 8)
    np.testing.assert_array_equal(jax.grad(functools.partial(Executor(chain), kernel))(x), np.full_like(x, 108))


def test_a_backward_call_falls_back_to_an_overlay_of_the_forward(shown):
    kernel, chain, forward, _ = shown
    call = jax.jit(jax.grad(functools.partial(Executor(chain), kernel)))
    with overlay_cache({forward: 9}):
        inside = call(x)
    np.testing.assert_array_equal(inside, np.full_like(x, 109))
    np.testing.assert_array_equal(call(x), np.full_like(x, 100))


def test_an_explicit_configuration_holds_for_the_gradient_too(shown):
    kernel, chain, _, _ = shown
    actual = jax.grad(lambda x: Executor(chain)(kernel, x, cfg=5))(x)
    np.testing.assert_array_equal(actual, np.full_like(x, 105))


class Sized(Kernel[int, jax.Array]):
    """Broken: the shape of its result is its configuration."""

    def run(self, x, *, cfg):
        return x[:cfg]

    def heuristic_cfg(self, inv):
        return 2


def test_results_that_depend_on_the_configuration_are_an_error():
    kernel, chain = Sized(), ConfigSelectorChain()
    f = functools.partial(Executor(chain), kernel)
    with overlay_cache({chain_key(kernel, x): 3}), pytest.raises(KernelError, match=r"Sized: results must have.*") as e:
        jax.jit(f)(x)
    assert all(part in str(e.value) for part in ("3 (from overlay)", "float32[3, 5]", "float32[2, 5]"))


class SizedResiduals(WithResiduals):
    def fwd_with_residuals(self, x, w, *, cfg):
        y = tanh_matmul(x, w)
        return y, {"y": y, "sized": jnp.zeros(cfg + 1)}


def test_residuals_that_depend_on_the_configuration_are_an_error():
    kernel = SizedResiduals()
    f = functools.partial(Executor(ConfigSelectorChain()), kernel)
    with overlay_cache({chain_key(kernel, x, w): 3}), pytest.raises(KernelError, match="under every configuration"):
        jax.grad(squared(f))(x, w)


def chain_key(kernel, *arrays):
    f, chooser = logged(kernel)
    f(*arrays)
    return chooser.asked[0].key
