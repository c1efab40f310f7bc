# SPDX-License-Identifier: Apache-2.0
"""Settings at the call site belong to the call: JAX's, ours, and the named axes."""

from __future__ import annotations

import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.sample_kernels import Computes, ShowsConfig

from ejkernel.ops import Invocation, NoConfigError, overlay_cache, policy_override
from ejkernel.ops.registry import recording

X = np.ones((4, 4), np.float32)


SQUARED = Computes("squared", lambda x: x @ x)
NOISE = Computes("noise", lambda x: x + jax.random.normal(jax.random.key(0), x.shape))
WIDE = Computes("wide", lambda x: x.astype(jnp.float64).sum())
MIXED = Computes("mixed", lambda x: x + jnp.arange(4))
SHOWS = ShowsConfig("shows")
KEY = Invocation(kernel=SHOWS, args=(X,)).key


def key_of(kernel):
    return Invocation(kernel=kernel, args=(X,)).call_key


def inside(scope, function):
    """Return `function`, traced inside its own context."""

    def call(x):
        with scope():
            return function(x)

    return call


def grad_of(function):
    return jax.grad(lambda x: function(x).sum())


def highest():
    return jax.default_matmul_precision("highest")


@pytest.mark.parametrize("program", [lambda f: f, grad_of, jax.vmap, lambda f: grad_of(jax.checkpoint(f))])
def test_precision_set_inside_a_jitted_function_applies_to_its_calls(program):
    shape = (3, 4, 4) if program is jax.vmap else (4, 4)
    x = np.ones(shape, np.float32)
    inner = jax.jit(program(inside(highest, SQUARED))).lower(x).as_text()
    outer = jax.jit(program(SQUARED)).lower(x).as_text()
    dots = inner.count("dot_general")
    assert dots == outer.count("dot_general") > 0
    assert inner.count("[HIGHEST, HIGHEST]") == dots
    assert "HIGHEST" not in outer


@pytest.mark.parametrize("program", [lambda f: f, grad_of])
def test_precision_set_inside_a_jitted_function_is_in_the_keys_of_its_calls(program):
    with recording() as seen:
        jax.jit(program(inside(highest, SQUARED))).lower(X)
    assert {inv.description["precision"] for inv in seen} == {"highest"}
    with highest():
        assert {inv.call_key for inv in seen if inv.direction == "fwd"} <= {key_of(SQUARED)}
    assert key_of(SQUARED) not in {inv.call_key for inv in seen}


def test_a_gradient_taken_outside_has_the_settings_of_its_forward():
    def pulled_back(x):
        with highest():
            _, pullback = jax.vjp(SQUARED, x)
        return pullback(x)

    text = jax.jit(pulled_back).lower(X).as_text()
    assert text.count("[HIGHEST, HIGHEST]") == text.count("dot_general") > 1


def test_the_same_call_under_two_settings_is_two_calls():
    both = jax.jit(lambda x: (SQUARED(x), inside(highest, SQUARED)(x), SQUARED(x)))
    with recording() as seen:
        text = both.lower(X).as_text()
    assert text.count("HIGHEST, HIGHEST") == 1
    assert len({inv.call_key for inv in seen}) == 2


SETTINGS = {
    "default_prng_impl": (lambda: jax.default_prng_impl("rbg"), NOISE),
    "threefry_partitionable": (lambda: jax.threefry_partitionable(False), NOISE),
    "enable_x64": (lambda: jax.enable_x64(True), WIDE),
}


@pytest.mark.slow
@pytest.mark.parametrize(("scope", "kernel"), SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("program", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_numbers_are_those_that_the_function_itself_gives_under_a_setting(program, scope, kernel):
    expected, got = (np.asarray(program(inside(scope, f))(X)) for f in (kernel.function, kernel))
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("program", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_strict_promotion_inside_holds_for_calls(program):
    with pytest.raises(jax.dtypes.TypePromotionError if hasattr(jax.dtypes, "TypePromotionError") else TypeError):
        program(inside(lambda: jax.numpy_dtype_promotion("strict"), MIXED))(X)
    assert program(MIXED)(X).shape == (4, 4)


PROGRAMS = {
    "jit": (jax.jit, 7),
    "grad": (lambda f: jax.jit(lambda x: jax.grad(f)(x)[0, 0]), 107),
    "scan": (lambda f: jax.jit(lambda x: jax.lax.scan(lambda total, _: (total + f(x), None), 0.0, None, 1)[0]), 7),
}


@pytest.mark.slow
@pytest.mark.parametrize(("program", "shown"), PROGRAMS.values(), ids=PROGRAMS.keys())
def test_an_overlay_entered_inside_a_jitted_function_holds_there(program, shown):
    backward = KEY._replace(op=KEY.op.replace("shows", "shows.bwd"))
    with recording() as seen:
        jax.grad(SHOWS)(X)
    backward = next(inv.key for inv in seen if inv.direction != "fwd")
    entries = {KEY: 7, backward: 7}
    assert program(inside(lambda: overlay_cache(entries), SHOWS))(X) == shown
    assert program(functools.partial(SHOWS))(X) == shown - 7


def test_inner_overlays_of_one_program_hold_for_their_own_calls():
    def both(x):
        with overlay_cache({KEY: 3}):
            first = SHOWS(x)
            with overlay_cache({KEY: 4}):
                second = SHOWS(x)
        return first, second, SHOWS(x)

    assert [int(value) for value in jax.jit(both)(X)] == [3, 4, 0]


def test_a_policy_entered_inside_a_jitted_function_holds_there():
    with pytest.raises(NoConfigError):
        jax.jit(inside(lambda: policy_override(heuristic=False), SHOWS))(X)
    assert jax.jit(SHOWS)(X) == 0


def test_a_recorder_entered_inside_a_jitted_function_sees_only_its_calls():
    seen = []

    def call(x):
        with recording() as recorded:
            y = SHOWS(x)
        seen.append(recorded)
        return y + SQUARED(x).sum()

    lowered = jax.jit(call).lower(X)
    assert lowered is not None
    assert [len(recorded) for recorded in seen] in ([0], [1])


class Axis(enum.Enum):
    BATCH = 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["i", Axis.BATCH, frozenset("i"), object()], ids=["text", "enum", "set", "object"])
@pytest.mark.parametrize("batched", [True, False])
def test_a_collective_inside_run_sees_the_axis_of_any_name(name, batched):
    total = Computes("total", lambda x: jax.lax.psum(x, name))
    xs = jnp.arange(12.0).reshape(4, 3)
    given, plain = [f if batched else (lambda _, f=f: f(jnp.ones(3))) for f in (total, total.function)]
    expected = jnp.broadcast_to(jax.vmap(plain, axis_name=name)(xs), (4, 3))
    np.testing.assert_array_equal(jax.vmap(given, axis_name=name)(xs), expected)


def test_the_inner_of_two_axes_of_one_name_is_meant():
    total = Computes("total", lambda x: jax.lax.psum(x, "i"))

    def nested(f):
        def outer(y):
            return jax.vmap(lambda _: f(y), axis_name="i")(jnp.ones(4))

        return jax.vmap(outer, axis_name="i")(jnp.ones((5, 3)))

    np.testing.assert_array_equal(nested(total), jnp.broadcast_to(nested(total.function), (5, 4, 3)))
    assert nested(total)[0, 0, 0] == 4


@pytest.mark.slow
@pytest.mark.parametrize("program", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_gradient_through_a_collective_on_an_unbatched_argument(program):
    total = Computes("total", lambda x: jax.lax.psum(x * x, "i"))

    def gradients(f):
        return program(jax.vmap(lambda x, y: jax.grad(lambda y: f(y).sum())(y), (0, None), axis_name="i"))

    xs, y = jnp.ones((4, 3)), jnp.arange(3.0)
    np.testing.assert_array_equal(gradients(total)(xs, y), gradients(total.function)(xs, y))


class RuleWithCollective(Computes):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (jax.lax.psum(cotangents[0] * primals[0], "i"),)


def test_a_collective_that_only_the_gradient_rule_has_sees_its_axis():
    kernel = RuleWithCollective("rule", lambda x: x * x)
    got = jax.vmap(lambda _, y: jax.grad(lambda y: kernel(y).sum())(y), (0, None), axis_name="i")(jnp.ones(4), X[0])
    np.testing.assert_array_equal(got, jnp.full((4, 4), 4.0))


def test_the_index_along_an_axis_is_each_examples_own():
    place = Computes("place", lambda x: x + jax.lax.axis_index("i"))
    got = jax.vmap(lambda _: place(jnp.zeros(2)), axis_name="i")(jnp.ones(3))
    np.testing.assert_array_equal(got, [[0, 0], [1, 1], [2, 2]])
