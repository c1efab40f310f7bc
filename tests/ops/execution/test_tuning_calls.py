# SPDX-License-Identifier: Apache-2.0
"""Searches under every transformation: the surrounding trace, the tuned calls, and their inputs."""

from __future__ import annotations

import io
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from tests.ops.found import found
from tests.ops.sample_kernels import Searched, told_apart

from ejkernel.ops.autotuner.process.threads import on_measuring_thread
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.errors import KernelError, TuningError, TuningWarning
from ejkernel.ops.execution.discovery import discover
from ejkernel.ops.execution.executor import Executor
from ejkernel.ops.execution.offline import autotune
from ejkernel.ops.registry import recording

pytestmark = [pytest.mark.slow, pytest.mark.sampled]

X = np.linspace(0.0, 1.0, 16, dtype=np.float32)
ROUNDS = 4


def tune(kernel, *args):
    return Autotuner(rounds=1).tune(Invocation(kernel=kernel, args=args or (X,)), kernel)


def keys_in(chain):
    return [entry[0] for entry in chain.cache.items()]


def fates(tuned):
    return {outcome.config: (outcome.status, outcome.reason) for outcome in tuned.outcomes}


# --- real measurements, where only success matters ---


def test_real_times_are_positive():
    tuned = tune(Searched())
    assert all(outcome.measurement.median > 0 and outcome.compile_seconds > 0 for outcome in tuned.outcomes)


def test_a_search_is_logged_at_its_start_and_end(caplog):
    with caplog.at_level("INFO", "ejkernel.ops.autotuner.tuner"):
        tune(Searched())
    assert [text.partition(" f32")[0].partition(" in ")[0] for text in caplog.messages] == [
        f"{verb} {Searched().op_id_v}" for verb in ("tuning", "tuned")
    ]


def test_autotune_of_a_kernel_names_the_call_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    autotune(Searched(), X, num_iters=1)
    assert sys.stderr.getvalue() == f"tuning {Searched().op_id} f32[16]\n"


SITUATIONS = {
    "eager": lambda call: call(X),
    "jit": lambda call: jax.jit(call)(X),
    "grad": lambda call: jax.grad(lambda x: call(x).sum())(X),
    "jit of grad": lambda call: jax.jit(jax.grad(lambda x: call(x).sum()))(X),
    "vmap": lambda call: jax.vmap(call)(X.reshape(4, 4)),
    "vmap of grad": lambda call: jax.vmap(jax.grad(lambda x: call(x).sum()))(X.reshape(4, 4)),
    "hessian": lambda call: jax.hessian(lambda x: call(x).sum())(X[:2]),
    "scan": lambda call: jax.lax.scan(lambda carry, _: (call(carry), None), X, length=2),
    "while": lambda call: jax.lax.while_loop(lambda x: x[1] < 1, call, X),
    "cond": lambda call: jax.lax.cond(X[0] < 1, call, lambda x: x, X),
    "checkpoint": lambda call: jax.grad(lambda x: jax.checkpoint(call)(x).sum())(X),
    "shard_map": lambda call: jax.shard_map(call, mesh=mesh_of(), in_specs=SPEC, out_specs=SPEC)(X),
    "jit of shard_map": lambda call: jax.jit(jax.shard_map(call, mesh=mesh_of(), in_specs=SPEC, out_specs=SPEC))(X),
    "set_mesh": lambda call: under(jax.set_mesh(mesh_of()), call),
    "set_mesh explicit": lambda call: under(jax.set_mesh(mesh_of(AxisType.Explicit)), call),
    "disable_jit": lambda call: under(jax.disable_jit(), call),
    "default_device": lambda call: under(jax.default_device(jax.devices("cpu")[3]), call),
    "x64": lambda call: under(jax.enable_x64(True), call),
}
SPEC = PartitionSpec("data")


def mesh_of(axis_type=AxisType.Auto):
    return jax.make_mesh((8,), ("data",), axis_types=(axis_type,))


def under(context, call):
    with context:
        return call(X)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_call_is_tuned_inside_any_trace(situation):
    chain = ConfigSelectorChain(autotune=True, tuner=Autotuner(rounds=1))
    executor, kernel = Executor(chain), Searched(space=(1, 2))
    jax.block_until_ready(SITUATIONS[situation](lambda x: executor(kernel, x)))
    sources = {chain.cache.remembered(key).source for key in keys_in(chain)}
    assert sources == {"autotune"}


def test_several_threads_tune_different_calls_at_once():
    chain = ConfigSelectorChain(autotune=True, tuner=Autotuner(rounds=1))
    executor, kernel, start = Executor(chain), Searched(space=(1, 2)), threading.Barrier(4, timeout=30)

    def work(size):
        start.wait()
        jax.jit(lambda x: executor(kernel, x))(np.ones(size, np.float32))

    threads = [threading.Thread(target=work, args=(size,)) for size in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(chain.cache) == 4


def test_a_candidate_may_call_a_kernel_that_needs_tuning_too():
    chain = ConfigSelectorChain(autotune=True, tuner=Autotuner(rounds=1))
    executor, inner = Executor(chain), Searched(space=(1, 2))

    class Outer(Searched):
        def __init__(self):
            super().__init__(space=(1, 2))
            self._name = "Outer"

        def run(self, x, *, cfg):
            return executor(inner, x) * 2

    outer = Outer()
    jax.jit(lambda x: executor(outer, x))(X)
    # A winner's gradient may have been checked, which looks the inner backward up, and does not tune it.
    tuned = {key.op for key in keys_in(chain) if chain.cache.remembered(key).source == "autotune"}
    assert tuned == {"Outer@v0", "Double@v0"}


def test_a_search_inside_a_candidate_does_not_wait_for_a_thread_that_waits_for_it():
    """One thread tunes a call with a candidate that makes a second call; another thread tunes the second call."""
    kernel = Searched()
    first, second = (Invocation(kernel=kernel, args=(np.ones(size, np.float32),)) for size in (1, 2))
    first_is_measured, second_has_its_lock = threading.Event(), threading.Event()

    class Crossing(Autotuner):
        def tune(self, inv, kernel, **options):
            if inv is second:
                second_has_its_lock.set()
                return on_measuring_thread(lambda: found(inv, 7))

            def candidate():
                first_is_measured.set()
                second_has_its_lock.wait(30)
                chain.resolve(second, kernel)
                return found(inv, 7)

            return on_measuring_thread(candidate)

    chain = ConfigSelectorChain(autotune=True, tuner=Crossing())
    threads = [threading.Thread(target=chain.resolve, args=(inv, kernel), daemon=True) for inv in (first, second)]
    threads[0].start()
    first_is_measured.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert len(chain.cache) == 2


def test_precision_and_64_bit_mode_hold_for_the_candidates():
    seen = []

    class Witness(Searched):
        def run(self, x, *, cfg):
            seen.append((str(jax.config.jax_default_matmul_precision), jax.config.jax_enable_x64, x.dtype))
            return told_apart(x + x, cfg)

    with jax.default_matmul_precision("highest"), jax.enable_x64(True):
        tune(Witness(), np.ones(3, np.float64))
    assert set(seen) == {("highest", True, np.dtype("float64"))}


def test_a_call_is_measured_under_the_settings_of_its_place_in_a_function():
    seen = []

    class Witness(Searched):
        def run(self, x, *, cfg):
            seen.append(str(jax.config.jax_default_matmul_precision))
            return told_apart(x + x, cfg)

    witness = Witness()

    def function(x):
        with jax.default_matmul_precision("highest"):
            return witness(x)

    (inv,) = discover(function, X)
    seen.clear()
    Autotuner(rounds=1).tune(inv, witness)
    assert set(seen) == {"highest"}


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, jax.vmap], ids=["call", "grad", "vmap"])
def test_a_weakly_typed_argument_is_measured_as_such(transform):
    seen = set()

    class Scaled(Searched):
        def run(self, x, scale, *, cfg):
            seen.add((x * scale).dtype)
            return told_apart(x * scale, cfg).sum()

    kernel, x = Scaled(), jnp.ones((4, 4), jnp.bfloat16)
    for inv in discover(transform(lambda x: kernel(x, jnp.asarray(2.0))), x):
        seen.clear()
        tuned = Autotuner(rounds=1).tune(inv, kernel)
        assert {outcome.status for outcome in tuned.outcomes} <= {"measured", "same"}
        assert seen == {jnp.dtype("bfloat16")}


def test_candidates_are_not_recorded_or_stamped():
    with recording() as seen:
        tune(Searched())
    assert seen == []


# --- tuned calls: batched and backward calls, and their inputs ---


class Square(Kernel[int, jax.Array]):
    """`x * x`; its `vjp` fails unless the residuals belong to the arguments."""

    def __init__(self):
        super().__init__()
        self.checked = []

    def run(self, x, *, cfg):
        for _ in range(cfg):  # the programs of two configurations differ, those of their derivatives too
            x = 1.0 * x
        return x * x

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return [1, 2]

    def fwd_with_residuals(self, x, *, cfg):
        return told_apart(x * x, cfg), (2 * x, x.shape[0] * jnp.ones(()))

    def vjp(self, residuals, out, cotangents, x, *, cfg):
        doubled, count = residuals
        consistent = (doubled == 2 * x).all() & (out == x * x).all() & (count == x.shape[0])
        return (told_apart(jnp.where(consistent, cotangents[0] * doubled, jnp.nan), cfg),)


class Ruled(Square):
    """The same with the other form of gradient."""

    fwd_with_residuals = Kernel.fwd_with_residuals
    vjp = Kernel.vjp

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (told_apart(cotangents[0] * 2 * primals[0], cfg),)


class Plain(Square):
    fwd_with_residuals = Kernel.fwd_with_residuals
    vjp = Kernel.vjp


DERIVED = {
    "grad": (lambda f: jax.grad(lambda x: f(x).sum()), X),
    "value_and_grad": (lambda f: jax.value_and_grad(lambda x: f(x).sum()), X),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())), X.reshape(4, 4)),
    "grad of vmap": (lambda f: jax.grad(lambda x: jax.vmap(f, in_axes=1)(x).sum()), X.reshape(2, 8)),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,)), X),
    "hessian": (lambda f: jax.hessian(lambda x: f(x).sum()), X[:3]),
    "two vmaps": (lambda f: jax.vmap(jax.vmap(f)), X.reshape(2, 2, 4)),
}


@pytest.mark.parametrize(
    ("kind", "transformation"),
    [
        *[(Square, name) for name in DERIVED],
        *[
            (kind, transformation)
            for kind in (Ruled, Plain)
            for transformation in ("value_and_grad", "vmap of grad", "jvp")
        ],
    ],
)
def test_every_call_of_a_transformed_program_can_be_tuned(kind, transformation):
    transform, argument = DERIVED[transformation]
    kernel = kind()
    with recording() as seen:
        jax.jit(transform(lambda x: kernel(x))).lower(argument)  # noqa: PLW0108
    assert seen != []
    for inv in seen:
        statuses = [outcome.status for outcome in Autotuner(rounds=1).tune(inv, kernel).outcomes]
        assert statuses == ["measured", "measured"], inv.op_id


def test_a_backward_is_checked_against_the_gradient_of_the_reference():
    class Referenced(Ruled):
        def reference(self, x):
            return x * x

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return (cotangents[0] * (2 if cfg == 1 else 3) * primals[0],)

    kernel = Referenced()
    with recording() as seen:
        jax.jit(jax.grad(lambda x: kernel(x).sum())).lower(X)
    with pytest.warns(TuningWarning, match="the only candidate beside the heuristic was rejected"):
        assert fates(Autotuner().tune(seen[-1], kernel))[2][0] == "wrong"


def test_hooks_see_the_direction_and_the_arguments_of_the_forward():
    seen = []

    class Curious(Ruled):
        def config_space(self, inv):
            seen.append((inv.op_id, inv.direction, inv.args, inv.batch_sizes))
            return [1]

    kernel = Curious()
    with recording() as calls:
        jax.jit(jax.vmap(jax.grad(lambda x: kernel(x).sum()))).lower(X.reshape(4, 4))
    Autotuner(rounds=1).tune(calls[-1], kernel)
    assert seen == [("Curious.bwd", "bwd", (jax.ShapeDtypeStruct((4,), np.float32),), (4,))]


def test_a_kernel_makes_its_own_example_inputs():
    seen = []

    class Sized(Searched):
        def run(self, x, *, cfg):
            return jax.pure_callback(lambda x: seen.append(np.asarray(x).tolist()) or x, x, x)

        def example_inputs(self, inv, rng):
            return (np.full(inv.args[0].shape, 7.0, np.float32),), {}

    tune(Sized(space=(1,)), np.ones(2, np.float32))
    assert {tuple(values) for values in seen} == {(7.0, 7.0)}


def test_own_example_inputs_are_made_for_each_element_of_a_batch():
    made = []

    class Sized(Searched):
        def example_inputs(self, inv, rng):
            made.append(inv.args[0].shape)
            return (np.full(inv.args[0].shape, float(len(made)), np.float32),), {}

    kernel = Sized(space=(1,))
    inv = Invocation(kernel=kernel, args=(X,), batch_axes=((0,), (1,)), batch_sizes=(2, 3))
    Autotuner(rounds=1).tune(inv, kernel)
    assert made == [(16,)] * 6


def test_own_example_inputs_must_fit_the_signature():
    class Misfit(Searched):
        def example_inputs(self, inv, rng):
            return (np.ones(3, np.float32),), {}

    with pytest.raises(TuningError, match=r"example_inputs must be arrays of types .*16,.* got .*3,"):
        tune(Misfit())


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int8", "uint32", "bool", "complex64", "float8_e4m3fn", "key"]
)
def test_inputs_of_every_dtype_are_made(dtype):
    class Same(Searched):
        def run(self, x, *, cfg):
            return told_apart(jnp.flip(x), cfg)

    like = jax.random.split(jax.random.key(0), 4) if dtype == "key" else jax.ShapeDtypeStruct((4,), dtype)
    assert tune(Same(space=(1, 2)), like).outcomes[1].status == "measured"


def test_inputs_depend_only_on_the_seed():
    seen = []

    class Witness(Searched):
        def run(self, x, *, cfg):
            return jax.pure_callback(lambda x: seen.append(np.asarray(x).tobytes()) or x, x, x)

    for seed in (0, 0, 1):
        Autotuner(rounds=1, seed=seed).tune(Invocation(kernel=Witness(), args=(X,)), Witness(space=(1,)))
    assert len(set(seen)) == 2


def test_static_arguments_reach_the_candidates():
    class Power(Kernel[int, jax.Array]):
        def run(self, x, exponent, *, cfg, activation=None):
            return told_apart(activation(x**exponent), cfg)

        def config_space(self, inv):
            return [1, 2]

    kernel = Power()
    inv = Invocation(kernel=kernel, args=(X, 2), kwargs={"activation": jnp.tanh})
    assert {status for status, _ in fates(Autotuner(rounds=1).tune(inv, kernel)).values()} == {"measured"}


def test_bad_examples_and_bad_candidates_are_distinguished():
    class Broken(Searched):
        def example_inputs(self, inv, rng):
            raise KernelError("cannot be made")

    with pytest.raises(TuningError, match=r"example inputs or the heuristic.* failed: KernelError: cannot be made"):
        tune(Broken())


def test_the_arrays_of_a_caller_are_not_kept(collect):
    array = np.ones(16, np.float32)
    alive = weakref.ref(array)
    tuned = tune(Searched(), array)
    del array
    collect()
    assert (alive(), len(tuned.outcomes)) == (None, 3)
