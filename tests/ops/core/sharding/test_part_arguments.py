# SPDX-License-Identifier: Apache-2.0
"""Kernels that choose the arguments of a shard: its result may depend on its position."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import Kernel, KernelCheckError, ShardingRule, check_kernel
from ejkernel.ops.core.callspec import take_apart
from ejkernel.ops.core.sharding.parts import programs_of_parts
from ejkernel.ops.core.transformations.batching import Level, Vmapped
from ejkernel.ops.core.transformations.nodes import Choice, Forward
from ejkernel.ops.execution.discovery import discover


class Numbered(Kernel[int, jax.Array]):
    """The square of each row, times its number and a scale; row numbers begin at `first`."""

    def __init__(self, **hooks):
        super().__init__(name="numbered")
        self.__dict__.update(hooks)

    def sharding_rule(self, inv):
        first = ", " if "first" in inv.kwargs else ""
        return ShardingRule(f"m n, n{first} -> m n", split="m n")

    def part_arguments(self, part, x, scale, **options):
        if part.is_split("m"):
            options["first"] = options.get("first", 0) + part.start("m")
        return (x, scale), options

    def heuristic_cfg(self, inv):
        return 1

    def run(self, x, scale, *, cfg, first=0):
        return x**2 * numbers(x, first) * scale


class WithRule(Numbered):
    """The same, with a gradient rule."""

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return gradients(*primals, *cotangents, kwargs.get("first", 0))


class WithResiduals(Numbered):
    """The same, with a gradient from residuals."""

    def sharding_rule(self, inv):
        rule = super().sharding_rule(inv)
        return ShardingRule(rule.axes, split=rule.split, residuals="m n")

    def fwd_with_residuals(self, x, scale, *, cfg, first=0):
        return self.run(x, scale, cfg=cfg, first=first), 2 * x * numbers(x, first)

    def vjp(self, residuals, out, cotangents, x, scale, *, cfg, first=0):
        return residuals * scale * cotangents[0], gradients(x, scale, *cotangents, first)[1]


class Unhooked(Kernel[int, jax.Array]):
    """A kernel that has a rule alone."""

    def sharding_rule(self, inv):
        return ShardingRule("m n -> m n", split="m")

    def run(self, x, *, cfg):
        return x


def numbers(x, first):
    return (first + 1 + jnp.arange(x.shape[0], dtype=x.dtype))[:, None]


def gradients(x, scale, dout, first):
    weights = numbers(x, first)
    return 2 * x * weights * scale * dout, (x**2 * weights * dout).sum(0)


def plain(x, scale):
    return x**2 * numbers(x, 0) * scale


X, SCALE = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(8, 4), (4,)]))
MODES = {
    "auto": (AxisType.Auto,) * 2,
    "explicit": (AxisType.Explicit,) * 2,
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


def mesh_of(mode="auto"):
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=MODES[mode])


def placed(mesh, *pairs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]


def close(left, right):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), left, right)


def gradient(function):
    return jax.value_and_grad(lambda *arrays: jnp.sin(function(*arrays)).sum(), argnums=(0, 1))


@pytest.mark.parametrize("spec", [P("a"), P(("a", "b")), P("a", "b")], ids=str)
@pytest.mark.parametrize("kind", [Numbered, WithRule, WithResiduals])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_every_shard_agrees_with_the_whole_forward_and_backward(mode, kind, spec):
    mesh = mesh_of(mode)
    with jax.set_mesh(mesh):
        found = jax.jit(gradient(kind()))(*placed(mesh, (X, spec), (SCALE, P(*spec[1:]))))
    close(found, gradient(plain)(X, SCALE))


TRANSFORMED = {
    "vmap": lambda f: gradient(jax.vmap(f, (0, None))),
    "vmap of the last axis, and of both": lambda f: gradient(jax.vmap(jax.vmap(f, (2, None)), (0, 0))),
    "tangents": lambda f: lambda *arrays: jax.jvp(f, arrays, arrays)[1],
    "tangents of a vmap": lambda f: lambda *arrays: jax.jvp(jax.vmap(f, (0, None)), arrays, arrays)[1],
    "second derivatives": lambda f: jax.grad(lambda *arrays: gradient(f)(*arrays)[1][0].sum()),
}
STACKED = {"vmap": ((3,), ()), "vmap of the last axis, and of both": ((3,), (3,)), "tangents of a vmap": ((3,), ())}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Numbered, WithRule, WithResiduals])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_shards_agree_with_the_whole_under_every_transformation(name, kind):
    lead = STACKED.get(name, ((), ()))
    x, scale = (jnp.broadcast_to(array, (*more, *array.shape)) for array, more in zip((X, SCALE), lead, strict=True))
    spec = P(*[None] * len(lead[0]), ("a", "b"))
    if "last axis" in name:
        x = jnp.stack([x, 2 * x], -1)
    found = jax.jit(TRANSFORMED[name](kind()))(*placed(mesh_of(), (x, spec), (scale, P())))
    close(found, TRANSFORMED[name](plain)(x, scale))


def test_a_shard_has_the_key_of_the_call_inside_shard_map():
    kernel, mesh = Numbered(), mesh_of()

    def by_hand(x, scale):
        return jax.vmap(lambda x: kernel(x, scale, first=jax.lax.axis_index("a") * x.shape[0]))(x)

    stacked = jnp.stack([X, X])
    inside = jax.shard_map(by_hand, mesh=mesh, in_specs=(P(None, "a"), P()), out_specs=P(None, "a"))
    given = placed(mesh, (stacked, P(None, "a")), (SCALE, P()))
    (part,) = discover(jax.vmap(kernel, (0, None)), *given)
    (manual,) = discover(inside, *given)
    assert part.key == manual.key
    assert [x.shape for x in part.array_types] == [(2, 4, 4), (4,), ()]


def test_a_shard_inside_a_manual_axis_counts_from_its_start():
    kernel, mesh = Numbered(), mesh_of()

    def by_hand(x, scale):
        return kernel(x, scale, first=jax.lax.axis_index("a") * x.shape[0])

    inside = jax.shard_map(by_hand, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), axis_names={"a"})
    with jax.set_mesh(mesh):
        close(jax.jit(inside)(*placed(mesh, (X, P(("a", "b"))), (SCALE, P()))), plain(X, SCALE))


def test_a_shard_along_another_axis_is_an_ordinary_call():
    kernel, mesh = Numbered(), mesh_of()
    (part,) = discover(kernel, *placed(mesh, (X, P(None, "a")), (SCALE, P("a"))))
    (call,) = discover(kernel, X[:, :2], SCALE[:2])
    assert part.key == call.key


def test_static_arguments_of_a_shard_are_supported():
    seen = []

    def part_arguments(part, x, scale, **options):
        seen.append((part.length("m"), part.whole("m"), part.length("n"), part.is_split("n")))
        return (x, scale), options

    kernel = Numbered(part_arguments=part_arguments)
    discover(kernel, *placed(mesh_of(), (X, P("b")), (SCALE, P())))
    assert seen == [(2, 8, 4, False)]


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (
            lambda part, x, scale: ((x * 2, scale), {}),
            "part_arguments must pass floating-point arrays through unchanged",
        ),
        (lambda part, x, scale: ((x, x[0]), {}), "part_arguments must pass"),
        (lambda part, x, scale: x, r"part_arguments must return \(args, kwargs\)"),
        (
            lambda part, x, scale: ((x, scale), part.start("rows")),
            "axis must be one of sharding_rule.s axes, m, n; got",
        ),
        (lambda part, x, scale: ((x, scale), 1 / 0), "part_arguments raised ZeroDivisionError"),
    ],
)
def test_a_wrong_hook_is_a_kernel_error_with_the_reason(hook, says):
    with pytest.raises(TypeError, match=f"numbered: {says}"):
        jax.jit(Numbered(part_arguments=hook))(*placed(mesh_of(), (X, P("a")), (SCALE, P())))


@pytest.mark.parametrize("batched", [False, True])
def test_a_program_stored_by_jax_differs_if_the_shards_of_its_calls_do(batched):
    def part_arguments(factor, part, x, scale):
        return (x, scale), {"first": factor * part.start("m")}

    kernels = [Numbered(part_arguments=functools.partial(part_arguments, factor)) for factor in (1, 2, 1)]
    programs = []
    for kernel in kernels:
        node = Forward(take_apart(kernel, (X, SCALE), {})[0])
        node = Vmapped(node, Level(3, (0, None), None, None)) if batched else node
        arrays = (jnp.stack([X] * 3), SCALE) if batched else (X, SCALE)
        programs.append(list(programs_of_parts(node, arrays, Choice(config=1))))
    assert programs[0] == programs[2]
    assert programs[0] != programs[1]
    assert len(programs[0]) == 2
    assert list(programs_of_parts(Forward(take_apart(Unhooked(), (X,), {})[0]), (X,), Choice(config=1))) == []


@pytest.mark.slow
def test_check_of_a_kernel_finds_shards_that_lack_an_argument():
    without = ["dtypes", "platforms", "vmap", "pickle", "export", "gradient", "tangents", "key"]
    assert check_kernel(Numbered(), X, SCALE, without=without).ok
    forgotten = Numbered(part_arguments=lambda part, x, scale: ((x, scale), {}))
    with pytest.raises(KernelCheckError, match="split along m"):
        check_kernel(forgotten, X, SCALE, without=without)
