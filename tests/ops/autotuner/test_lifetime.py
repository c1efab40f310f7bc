# SPDX-License-Identifier: Apache-2.0
"""Kernels, executors and static values die with their user's last reference, and nothing is traced in vain."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.sample_kernels import Applies

from ejkernel.ops import ConfigSelectorChain, Executor, Invocation, autotune, default_executor, tune
from ejkernel.ops.core import primitive
from ejkernel.ops.registry import recording
from ejkernel.ops.utils.weak_caches import Bounded

X = np.arange(3, dtype=np.float32)

pytestmark = [
    pytest.mark.usefixtures("collect"),
    pytest.mark.filterwarnings("ignore::ejkernel.ops.errors.UnstableKeyWarning"),
]


class WithRule(Applies):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (2 * cotangents[0], None)[: len(primals)]


APPLIES = Applies("applies")


class Function:
    """An object to pass as a static argument."""

    def __call__(self, x):
        return x * 3


USES = {
    "eager": lambda f: f(X),
    "jit": lambda f: jax.jit(functools.partial(f))(X),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(X),
    "vmap": lambda f: jax.vmap(f)(X[None]),
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "linearize": lambda f: jax.linearize(f, X)[1](X),
    "lower": lambda f: jax.jit(functools.partial(f)).lower(X).as_text(),
}


def is_collected(make, use):
    """Return whether the result of `make` is collected after its last use."""
    made = make()
    reference = weakref.ref(made)
    use(made)
    del made
    gc.collect()
    return reference() is None


@pytest.mark.slow
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("cls", [Applies, WithRule])
def test_a_kernel_is_collected(cls, use):
    assert is_collected(cls, use)


@pytest.mark.parametrize(
    "use",
    [
        lambda kernel: kernel(X, cfg=1),
        lambda kernel: jax.jit(lambda x: kernel(x, cfg=1))(X),
        lambda kernel: default_executor().choose_config(kernel, X),
        lambda kernel: default_executor().explain(kernel, X),
        lambda kernel: default_executor().compile(kernel, X)(X),
        lambda kernel: kernel({"x": X, "y": (X, 1)}, lambda tree: tree["x"]),
    ],
    ids=["cfg=", "cfg= under jit", "choose_config", "explain", "compile", "containers"],
)
def test_a_kernel_is_collected_after_other_uses(use):
    assert is_collected(Applies, use)


def test_a_tuned_kernel_is_collected():
    def make():
        @tune(space={"factor": [2.0, 3.0]})
        def scaled(x, *, factor=2.0):
            return x * 2 + (factor - factor)

        return scaled

    assert is_collected(make, lambda kernel: autotune(kernel, X, num_warmup=0, num_iters=1))


@pytest.mark.slow
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("make", [Function, lambda: lambda x: x * 4], ids=["object", "function"])
def test_a_static_value_is_collected(make, use):
    assert is_collected(make, lambda function: use(lambda x: APPLIES(x, function)))


@pytest.mark.parametrize(
    "hold",
    [
        functools.partial,
        lambda function: function.__call__,
        lambda function: jax.jit(function.__call__),
        lambda function: lambda x: function(x) + 1,
    ],
    ids=["partial", "method", "jit", "closure"],
)
def test_the_content_of_a_static_value_is_collected(hold):
    assert is_collected(Function, lambda function: APPLIES(X, hold(function)))


def test_kernels_that_others_were_given_are_collected_with_them():
    """The trace of an outer kernel calls the inner one; JAX itself keeps the last trace."""
    references = []
    for _ in range(3):
        inner = Applies("inner")
        Applies("outer")(X, inner)
        references.append(weakref.ref(inner))
    del inner
    gc.collect()
    assert references[0]() is None


@pytest.mark.slow
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_an_executor_is_collected(use):
    make = lambda: Executor(ConfigSelectorChain())  # noqa: E731
    assert is_collected(make, lambda executor: use(lambda x: executor(APPLIES, x)))


def test_an_array_argument_is_collected():
    assert is_collected(lambda: jnp.arange(3.0) + 1, lambda x: (APPLIES(x), jax.grad(lambda x: APPLIES(x).sum())(x)))


def test_an_executor_keeps_nothing_of_collected_kernels():
    executor = Executor(ConfigSelectorChain())
    kernels = [Applies("many") for _ in range(3)]
    for kernel in kernels:
        executor(kernel, X)
    assert len(executor._plans.tables) == 3
    del kernels, kernel
    gc.collect()
    assert len(executor._plans.tables) == 0


@pytest.mark.slow
def test_calls_that_differ_in_static_values_alone_fill_a_bounded_table(monkeypatch):
    monkeypatch.setattr(Bounded, "most", 8)

    class Scales(Applies):
        def run(self, x, scale, *, cfg):
            return x * len(scale)

    executor, scales = Executor(ConfigSelectorChain()), Scales("scales")
    for number in range(20):
        np.testing.assert_array_equal(executor(scales, X, ("a",) * number), X * number)
    assert 0 < len(executor._plans.tables.of(scales)) <= 8
    np.testing.assert_array_equal(executor(scales, X, ()), X * 0)  # rebuilt after its eviction


@pytest.mark.slow
def test_eager_gradients_with_ever_new_static_values_fill_bounded_tables(monkeypatch):
    monkeypatch.setattr(Bounded, "most", 4)

    class Scales(Applies):
        def run(self, x, scale, *, cfg):
            return x * scale

    executor, scales = Executor(ConfigSelectorChain()), Scales("scales")
    for number in range(6):
        jax.grad(lambda x, number=number: executor(scales, x, number).sum())(X)
    assert 0 < len(primitive._eager.of(scales)) <= 4
    assert 0 < len(primitive._traces.of(scales)) <= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("use", "call"),
    [
        (lambda f: jax.grad(lambda x: f(x).sum()), {"args": (X,)}),
        (jax.vmap, {"args": (X[0],), "batch_axes": ((0,),), "batch_sizes": (3,)}),
    ],
    ids=["grad", "vmap"],
)
def test_programs_of_replaced_configurations_are_dropped(use, call):
    class Shifts(Applies):
        def run(self, x, *, cfg):
            return x * cfg

    executor, shifts = Executor(ConfigSelectorChain()), Shifts("shifts")
    key = Invocation(kernel=shifts, **call).key

    def put_and_call(config):
        executor.chooser.cache.put(key, config)
        return float(use(lambda x: executor(shifts, x))(X)[1])

    def programs():
        gc.collect()
        return len(jax.local_devices()[0].client.live_executables())

    assert [put_and_call(config) for config in (1, 2)] == [1, 2]
    before = programs()
    assert [put_and_call(config) for config in (1, 2) * 2] == [1, 2] * 2
    assert programs() == before


def test_recording_without_a_call_retraces_nothing_the_second_time():
    traced = []

    @jax.jit
    def unrelated(x):
        traced.append(1)
        return x + 1

    for _ in range(4):
        with recording() as seen:
            unrelated(X)
        assert seen == []
    assert len(traced) == 1


def test_recording_does_not_make_a_call_be_missed_after_an_empty_block():
    call = jax.jit(functools.partial(APPLIES))
    with recording() as empty:
        pass
    for _ in range(2):
        with recording() as seen:
            call(X)
        assert len(seen) == 1
    assert empty == []
