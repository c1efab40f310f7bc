# SPDX-License-Identifier: Apache-2.0
"""Kernels under JAX's transformations: results equal the plain function's, and only executed calls are resolved."""

from __future__ import annotations

import functools
import traceback

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.ops.sample_kernels import (
    Plain,
    ShowsConfig,
    WithResiduals,
    WithRule,
    assert_trees_close,
    logged,
    squared,
    tanh_matmul,
)

from ejkernel.ops import ConfigKey, ConfigSelectorChain, Executor, Invocation, Kernel, overlay_cache

pytestmark = [pytest.mark.slow, pytest.mark.sampled]

KERNELS = [Plain("plain"), WithRule("rule"), WithResiduals("residuals")]

_rng = np.random.default_rng(0)


def _random(*shape):
    return _rng.standard_normal(shape, np.float32)


x, w = _random(4, 5), _random(5, 3)
X, W = _random(6, 4, 5), _random(6, 5, 3)  # a batch of each
XX = _random(2, 6, 4, 5)  # batches of batches
TALL = _random(8, 5)  # a row for each of eight devices
ROWS = (0, None)  # in_axes: the first argument is batched, the second is not
FLAGS = np.arange(6) > 2


def grads(f):
    return jax.grad(squared(f), (0, 1))


def scanned(f):
    return lambda xs, w: jax.lax.scan(lambda total, x: (total + f(x, w).sum(), f(x, w)), 0.0, xs)[1]


def looped(f):
    def call(x, w):
        start = (0, jnp.zeros((4, 3)))
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + f(x, w)), start)[1]

    return call


def branched(f):
    return lambda flag, x, w: jax.lax.cond(flag, lambda: f(x, w), lambda: jnp.zeros((4, 3)))


def summed_over_axis(f):
    return lambda x, w: f(x, w) + jax.lax.psum(f(x, w), "i")


@functools.cache
def mesh(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


def sharded(f):
    return jax.shard_map(f, mesh=mesh(), in_specs=(P("d"), P()), out_specs=P("d"))


def placed(array, spec, kind=AxisType.Explicit):
    return jax.device_put(array, NamedSharding(mesh(kind), spec))


def without_jit(f):
    with jax.disable_jit():
        return jax.vmap(f, ROWS)(X, w)


def exported(f):
    return jax.export.export(jax.jit(jax.vmap(f, ROWS)))(X, w).call(X, w)


def shape_alone(f):
    return jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), jax.eval_shape(jax.vmap(f, ROWS), X, w))


BATCHING = {
    "f": lambda f: f(x, w),
    "vmap": lambda f: jax.vmap(f, ROWS)(X, w),
    "vmap over inner and outer axes": lambda f: jax.vmap(f, (2, None), out_axes=1)(np.moveaxis(X, 0, 2), w),
    "vmap(vmap)": lambda f: jax.vmap(jax.vmap(f), ROWS)(XX, W),
    "vmap with axis_name": lambda f: jax.vmap(summed_over_axis(f), ROWS, axis_name="i")(X, w),
    "jit(vmap)": lambda f: jax.jit(jax.vmap(f, ROWS))(X, w),
    "vmap(jit)": lambda f: jax.vmap(jax.jit(f), ROWS)(X, w),
    "vmap(scan)": lambda f: jax.vmap(scanned(f), ROWS)(XX, w),
    "scan(vmap)": lambda f: scanned(jax.vmap(f, ROWS))(XX, w),
    "vmap(while)": lambda f: jax.vmap(looped(f), ROWS)(X, w),
    "vmap(cond) over the predicate": lambda f: jax.vmap(branched(f), (0, 0, None))(FLAGS, X, w),
    "disable_jit": without_jit,
    "eval_shape": shape_alone,
    "export": exported,
}
REVERSE = {
    "vmap(grad)": lambda f: jax.vmap(grads(f), ROWS)(X, w),
    "grad(vmap)": lambda f: grads(jax.vmap(f, ROWS))(X, w),
    "vmap(grad(vmap))": lambda f: jax.vmap(grads(jax.vmap(f, ROWS)), ROWS)(XX, w),
    "vmap(jit(grad))": lambda f: jax.vmap(jax.jit(grads(f)), ROWS)(X, w),
    "grad(scan(vmap))": lambda f: grads(scanned(jax.vmap(f, ROWS)))(XX, w),
    "vmap(grad(scan))": lambda f: jax.vmap(grads(scanned(f)), ROWS)(XX, w),
    "vmap(grad(checkpoint))": lambda f: jax.vmap(jax.grad(jax.checkpoint(squared(f)), (0, 1)), ROWS)(X, w),
    "grad(checkpoint(vmap))": lambda f: jax.grad(jax.checkpoint(squared(jax.vmap(f, ROWS))), (0, 1))(X, w),
    "grad(checkpoint) with a policy": lambda f: jax.grad(
        jax.checkpoint(squared(f), policy=jax.checkpoint_policies.dots_saveable), (0, 1)
    )(x, w),
    "vmap(grad(cond))": lambda f: jax.vmap(jax.grad(squared(branched(f)), (1, 2)), (0, 0, None))(FLAGS, X, w),
    "jacrev": lambda f: jax.jacrev(f)(x, w),
    "jacrev(grad)": lambda f: jax.jacrev(jax.grad(squared(f)))(x, w),
    "vmap(grad(grad))": lambda f: jax.vmap(jax.grad(squared(jax.grad(squared(f)))), ROWS)(X, w),
}
FORWARD = {
    "jvp": lambda f: jax.jvp(f, (x, w), (x, w)),
    "vmap(jvp)": lambda f: jax.vmap(lambda x: jax.jvp(f, (x, w), (x, w)))(X),
    "linearize": lambda f: jax.linearize(f, x, w)[1](x, w),
    "jacfwd": lambda f: jax.jacfwd(f)(x, w),
    "hessian": lambda f: jax.hessian(squared(f))(x, w),
    "jvp(grad)": lambda f: jax.jvp(jax.grad(squared(f)), (x, w), (x, w)),
}
SHARDING = {
    "shard_map": lambda f: jax.jit(sharded(f))(TALL, w),
    "grad(shard_map)": lambda f: jax.jit(grads(sharded(f)))(TALL, w),
    "shard_map(vmap)": lambda f: jax.jit(sharded(jax.vmap(f, ROWS)))(np.stack([TALL] * 8), w),
    "vmap(shard_map)": lambda f: jax.jit(jax.vmap(sharded(f), ROWS))(np.stack([TALL] * 3), w),
    "explicit mesh": lambda f: jax.jit(f)(placed(TALL, P("d")), placed(w, P())),
    "grad on an explicit mesh": lambda f: jax.jit(grads(f))(placed(TALL, P("d")), placed(w, P())),
    "vmap on an explicit mesh": lambda f: jax.jit(jax.vmap(f, ROWS))(placed(np.stack([x] * 8), P("d")), placed(w, P())),
    "vmap with spmd_axis_name": lambda f: jax.jit(jax.vmap(f, ROWS, spmd_axis_name="d"))(
        placed(np.stack([x] * 8), P("d"), AxisType.Auto), w
    ),
}
PROGRAMS = BATCHING | REVERSE | FORWARD | SHARDING


def with_kernels(programs):
    """Return cases: kernels differ in their derivatives, so of programs without any, two run with each kernel."""
    derivatives = {"f", "vmap", *REVERSE, *FORWARD, "grad(shard_map)", "grad on an explicit mesh"}
    return [
        pytest.param(program, kernel, id=f"{program}-{kernel.name}")
        for program in programs
        for kernel in (KERNELS if program in derivatives else KERNELS[:1])
    ]


@functools.cache
def expected_of(program):
    return PROGRAMS[program](tanh_matmul)


@functools.cache
def outcome_of(program, kernel):
    """Return the result of a program, and the calls that it resolved."""
    f, chooser = logged(kernel)
    return PROGRAMS[program](f), chooser.calls


@pytest.mark.parametrize(("program", "kernel"), with_kernels(PROGRAMS))
def test_a_transformed_kernel_agrees_with_the_plain_function(program, kernel):
    expected, (actual, _) = expected_of(program), outcome_of(program, kernel)
    assert_trees_close(actual, expected)


# The resolved calls of each program, in any order: suffix of the operation, and batch sizes from the outermost in.
RESOLVED = {
    "f": [("", ())],
    "vmap": [("", (6,))],
    "vmap(vmap)": [("", (2, 6))],
    "vmap with axis_name": [("", (6,))],
    "vmap(jit)": [("", (6,))],
    "vmap(scan)": [("", (2,))],
    "scan(vmap)": [("", (6,))],
    "vmap(while)": [("", (6,))],
    "vmap(cond) over the predicate": [("", (6,))],
    "disable_jit": [("", (6,))],
    "eval_shape": [],
    "export": [("", (6,))],
    "vmap(grad)": [("", (6,)), (".bwd", (6,))],
    "grad(vmap)": [("", (6,)), (".bwd", (6,))],
    "vmap(grad(vmap))": [("", (2, 6)), (".bwd", (2, 6))],
    "grad(scan(vmap))": [("", (6,)), (".bwd", (6,))],
    "vmap(grad(checkpoint))": [("", (6,)), (".bwd", (6,))],
    "jacrev": [("", ()), (".bwd", (12,))],
    "jvp": [("", ()), (".jvp", ())],
    "jacfwd": [("", ()), (".jvp", (20,))],
    "jvp(grad)": [("", ()), (".jvp", ()), (".bwd", ()), (".bwd.jvp", ())],
    "grad(shard_map)": [("", ()), (".bwd", ())],
    "shard_map(vmap)": [("", (1,))],
    "vmap(shard_map)": [("", (3,))],
}


@pytest.mark.parametrize(("program", "kernel"), with_kernels(RESOLVED))
def test_only_executed_calls_are_resolved_once_with_every_batch_size(program, kernel):
    _, calls = outcome_of(program, kernel)
    assert calls == [(kernel.name + suffix, sizes) for suffix, sizes in RESOLVED[program]]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_equal_layers_are_resolved_once(kernel):
    f, chooser = logged(kernel)
    square = _random(4, 4)

    def model(y, w):
        for _ in range(24):
            y = f(y, w)
        return y

    jax.jit(jax.grad(squared(model), (0, 1))).lower(square, square)
    assert [(kernel.name, ()), (f"{kernel.name}.bwd", ())] == chooser.calls


def test_calls_of_different_shapes_are_resolved_apart():
    f, chooser = logged(KERNELS[0])
    jax.jit(lambda x, tall: (f(x, w), f(tall, w), f(x, w))).lower(x, TALL)
    assert [inv.args[0].shape for inv in chooser.asked] == [(4, 5), (8, 5)]


def test_invocation_shows_one_example_and_the_axes_of_every_vmap():
    f, chooser = logged(KERNELS[0])
    jax.vmap(jax.vmap(f, (1, 0)), ROWS)(np.moveaxis(XX, 1, 2), W)
    (inv,) = chooser.asked
    assert tuple(arg.shape for arg in inv.args) == ((4, 5), (5, 3))
    assert inv.batch_axes == ((0, None), (1, 0))


@pytest.mark.parametrize(
    "look",
    [
        lambda f: jax.make_jaxpr(jax.vmap(f, ROWS))(X, w),
        lambda f: jax.eval_shape(grads(f), x, w),
        lambda f: jax.jit(grads(f)).trace(x, w),
        lambda f: jax.make_jaxpr(scanned(f))(X, w),
    ],
    ids=["make_jaxpr", "eval_shape", "trace", "make_jaxpr of a scan"],
)
def test_looking_at_a_program_resolves_nothing(look):
    f, chooser = logged(KERNELS[2])
    look(f)
    assert chooser.calls == []


@pytest.mark.parametrize("kernel", KERNELS[:2], ids=lambda kernel: kernel.name)
def test_a_primal_with_an_unused_value_is_not_resolved(kernel):
    f, chooser = logged(kernel)
    jax.jit(jax.grad(lambda x, w: f(x, w).sum())).lower(x, w)
    assert [(f"{kernel.name}.bwd", ())] == chooser.calls


def test_a_call_with_an_unused_result_is_not_resolved():
    f, chooser = logged(KERNELS[0])
    jax.jit(lambda x, w: (f(x, w), x)[1]).lower(x, w)
    assert chooser.calls == []


def test_an_eager_call_is_resolved_once_however_often_it_runs():
    f, chooser = logged(KERNELS[0])
    for _ in range(3):
        f(x, w)
    assert chooser.calls == [("plain", ())]


def test_traced_and_manual_invocations_of_a_batched_call_have_one_key():
    f, chooser = logged(KERNELS[0])
    jax.vmap(f, ROWS)(X, w)
    by_hand = Invocation(kernel=KERNELS[0], args=(x, w), batch_axes=(0, None), batch_sizes=(6,))
    assert by_hand.key == chooser.asked[0].key


class PerPlatform(Kernel[int, jax.Array]):
    def run_gpu(self, x, *, cfg):
        return jnp.sin(x)

    def run_cpu(self, x, *, cfg):
        return jnp.cos(x)

    def heuristic_cfg(self, inv):
        return 0


@pytest.mark.parametrize(
    ("platforms", "resolved", "operations"),
    [
        (("cuda",), ["gpu"], ["sine"]),
        (("cpu",), ["cpu"], ["cosine"]),
        (("cpu", "cuda"), ["cpu", "gpu"], ["cosine", "sine"]),
    ],
    ids="+".join,
)
def test_the_platform_is_the_program_s(platforms, resolved, operations):
    f, chooser = logged(PerPlatform())
    text = jax.jit(f).trace(x).lower(lowering_platforms=platforms).as_text()
    assert resolved == sorted(inv.platform for inv in chooser.asked)
    assert operations == [name for name in ("cosine", "sine") if f"stablehlo.{name} " in text]


def test_a_program_for_several_platforms_runs_the_form_of_the_present_one():
    f, _ = logged(PerPlatform())
    program = jax.export.export(jax.jit(f), platforms=("cpu", "cuda"))(x)
    np.testing.assert_allclose(program.call(x), np.cos(x), rtol=1e-6)


def test_an_exported_program_survives_serialisation():
    pytest.importorskip("flatbuffers", reason="jax.export serialises with it")
    f, _ = logged(KERNELS[2])
    blob = jax.export.export(jax.jit(grads(f)))(x, w).serialize()
    expected, actual = grads(tanh_matmul)(x, w), jax.export.deserialize(blob).call(x, w)
    assert_trees_close(actual, expected)


def test_a_program_with_a_symbolic_batch_is_exported():
    f, chooser = logged(KERNELS[0])
    (rows,) = jax.export.symbolic_shape("rows")
    program = jax.export.export(jax.jit(f))(jax.ShapeDtypeStruct((rows, 5), np.float32), w)
    np.testing.assert_allclose(program.call(TALL, w), tanh_matmul(TALL, w), rtol=1e-5)
    assert "rows" in str(chooser.asked[0].description)


@pytest.mark.parametrize("traced_inside", [True, False], ids=["traced inside", "traced outside"])
def test_a_call_belongs_to_the_overlay_that_it_was_traced_in(traced_inside):
    kernel = ShowsConfig()
    executor = Executor(ConfigSelectorChain())
    overlay = {Invocation(kernel=kernel, args=(x,)).key: 7}
    traced = jax.jit(functools.partial(executor, kernel)).trace(x)
    with overlay_cache(overlay):
        inside = jax.jit(functools.partial(executor, kernel)).trace(x)
        here = traced.lower()
    lowered, expected = (inside.lower(), 7) if traced_inside else (here, 0)
    assert expected == lowered.compile()(x)


@pytest.mark.parametrize("transform", [lambda f: f, grads], ids=["forward", "gradient"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_disable_jit_runs_the_kernel_operation_by_operation(kernel, transform):
    f, _ = logged(kernel)
    with jax.disable_jit():
        actual = transform(f)(x, w)
    assert_trees_close(actual, transform(tanh_matmul)(x, w))


def test_an_error_while_lowering_names_the_line_of_the_call():
    class Broken(Plain):
        def heuristic_cfg(self, inv):
            if inv.batch_sizes:
                raise RuntimeError("no configuration for a batch")
            return 0

    f, _ = logged(Broken())

    def model(X, w):
        return jax.vmap(f, ROWS)(X, w)

    with pytest.raises(RuntimeError, match="no configuration for a batch") as caught:
        jax.jit(model)(X, w)
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert __file__ in [frame.filename for frame in frames]


def test_a_key_does_not_depend_on_how_an_axis_is_counted():
    f, chooser = logged(KERNELS[0])
    last = np.moveaxis(X, 0, 2)
    jax.vmap(f, (2, None))(last, w)
    jax.vmap(f, (-1, None))(last, w)
    assert len({inv.key for inv in chooser.asked}) == 1


def test_a_device_has_a_separate_key():
    f, chooser = logged(PerPlatform())
    jax.jit(f).trace(x).lower(lowering_platforms=("cpu", "cuda"))
    here, there = sorted((inv.key for inv in chooser.asked), key=lambda key: key.device)
    assert ConfigKey("gpu:unknown", here.op, here.call) == there
