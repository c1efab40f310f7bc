# SPDX-License-Identifier: Apache-2.0
"""Every implementation of every operation: one suite; a new one joins by being registered."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tests.kernels.conformance import (
    assert_close,
    by_implementation,
    by_reference,
    compute,
    described,
    is_inexact,
    split,
    subjects,
)

from ejkernel.ops import ConfigSpace, Invocation
from ejkernel.ops.core import invocation

pytestmark = pytest.mark.slow

SUBJECTS = subjects()
PLATFORMS = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}  # as programs are lowered for
EXPORTED = {"gpu": ("cuda", "rocm"), "tpu": ("tpu",), "cpu": ("cpu",)}
DEVICES = {"gpu": "gpu:nvidia_h200", "tpu": "tpu:v5", "cpu": "cpu:some"}
DEVICES |= {"cuda": DEVICES["gpu"], "rocm": "gpu:amd_instinct_mi300x"}
CUDNN = [
    jax.export.DisabledSafetyCheck.custom_call(f"__cudnn$fmha{bias}Softmax{end}")
    for bias in ("", "ScaleBias")
    for end in ("", "Backward")
]
SAMPLED = 4  # configurations of a space that is lowered in every run; `--whole-spaces` lowers all


@dataclasses.dataclass(frozen=True)
class Row:
    """An implementation under test; `simulated`: not on the device that it is for."""

    operation: str
    name: str
    simulated: bool

    @property
    def subject(self):
        return SUBJECTS[self.operation]

    @property
    def backend(self):
        return self.subject.backends[self.name]

    @property
    def implementation(self):
        return self.subject.operation.implementations[self.name]

    @property
    def successor(self):
        """Whose backward follows its forward: its own, or another's that takes the same residuals."""
        if self.implementation.has_backward():
            return self.implementation
        implementations = self.subject.operation.implementations
        everywhere = (found for name, found in implementations.items() if not implementations.platforms(name))
        return next(o for o in everywhere if o.has_backward() and o.residuals == self.implementation.residuals)

    @property
    def platforms(self):
        return self.subject.operation.implementations.platforms(self.name) or tuple(PLATFORMS)

    @property
    def exported(self):
        """The platforms that programs are exported for, as `jax.export` calls them."""
        return [name for platform in self.platforms for name in EXPORTED[platform]]

    def __str__(self):
        return f"{self.operation}, {self.name}{', simulated' * self.simulated}"


TESTED = [
    Row(operation, name, simulated)
    for operation, subject in SUBJECTS.items()
    for name, backend in subject.backends.items()
    for simulated in (False, True)[: 1 + (backend.simulate is not None)]
]
REAL = [tested for tested in TESTED if not tested.simulated]


def all_calls(dtypes_of):
    """Return `pytest.param`s of every implementation with each of its calls and dtypes."""
    return [
        pytest.param(tested, name, dtype, id=f"{tested}, {name}, {dtype}")
        for tested in TESTED
        for dtype, names in dtypes_of(tested)
        for name in names
    ]


def thoroughly(tested):
    first, *others = tested.backend.dtypes
    subject = tested.subject
    further = ((dtype, (*subject.briefly, *(subject.in_float16 if dtype == "float16" else ()))) for dtype in others)
    return [(first, subject.calls), *further]


def briefly(tested):
    return [(tested.backend.dtypes[0], tested.subject.briefly)]


@pytest.fixture
def on_device(request, monkeypatch):
    """A function that has an implementation run here, or skips with the reason."""

    def ready(tested):
        if tested.simulated:
            tested.backend.simulate(monkeypatch)
        elif jax.default_backend() not in tested.platforms:
            request.getfixturevalue(tested.platforms[0])

    return ready


@pytest.fixture
def tpu():
    pytest.skip("needs a TPU")


def calls_of(tested, name, dtype, *, forward_only=False):
    """Return arguments, options and descriptions of both directions, or skip with the implementation's reason."""
    args, options = tested.subject.prepared(name, dtype)
    calls = [
        described(tested.subject, args, options, backward=backward, here=not tested.simulated)
        for backward in (False, True)
    ]
    for call in calls[: 2 - forward_only]:
        reason = tested.subject.operation.implementations.unsupported(tested.name, call)
        if reason and (not call.backward or tested.successor is tested.implementation):
            pytest.skip(reason)
    return args, options, calls


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def test_every_implementation_has_its_row():
    for subject in SUBJECTS.values():
        assert set(subject.backends) == set(subject.operation.implementations)


# --- numbers ---


@pytest.mark.parametrize(("tested", "name", "dtype"), all_calls(thoroughly))
def test_output_residuals_and_gradients_match_the_reference(on_device, tested, name, dtype):
    args, options, calls = calls_of(tested, name, dtype)
    on_device(tested)
    arrays, joined = split(args)
    run = by_implementation(tested.implementation, tested.successor, calls, tested.backend.params, joined)
    expected, cotangents, expected_gradients = by_reference(tested.subject, name, args, options, dtype)
    types = jax.eval_shape(lambda *arrays: tested.subject.operation.reference(*joined(arrays), **options), *arrays)
    cotangents = jax.tree.map(lambda x, like: x.astype(like.dtype), cotangents, types)
    out, residuals, gradients = compute(run, arrays, cotangents)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), types) == jax.tree.map(lambda x: (x.shape, x.dtype), out)
    assert_close(tested.subject, expected, out, dtype)
    assert [(x.shape, x.dtype) for x in arrays] == [(x.shape, x.dtype) for x in gradients]
    for wanted, found in zip(expected_gradients, gradients, strict=True):
        assert_close(tested.subject, wanted, found, dtype, allow=2)
    if tested.subject.check_residuals is not None:
        tested.subject.check_residuals(args, options, residuals, dtype)


@pytest.mark.parametrize(("tested", "name", "dtype"), all_calls(briefly))
@pytest.mark.parametrize("shared", [False, True], ids=["all batched", "first batched"])
def test_a_batched_call_is_the_stack_of_its_examples(on_device, tested, name, dtype, shared):
    args, _, calls = calls_of(tested, name, dtype)
    on_device(tested)
    arrays, joined = split(args)
    run = by_implementation(tested.implementation, tested.successor, calls, tested.backend.params, joined)
    axes = [None if shared and index else 0 for index in range(len(arrays))]
    batched = [x if axis is None else jnp.stack([x, x[::-1]]) for x, axis in zip(arrays, axes, strict=True)]
    example = [x if axis is None else x[1] for x, axis in zip(batched, axes, strict=True)]
    found = compute(jax.vmap(run, in_axes=(axes,)), batched)
    expected = compute(run, example)
    for wanted, got in zip(
        jax.tree.leaves((expected[0], expected[2])), jax.tree.leaves((found[0], found[2])), strict=True
    ):
        assert_close(tested.subject, wanted, got[1], dtype)


@pytest.mark.parametrize(("tested", "name", "dtype"), all_calls(briefly))
def test_tangents_match_the_reference(on_device, tested, name, dtype):
    """Forward mode goes through every implementation, also where only another knows the tangents."""
    args, options, _ = calls_of(tested, name, dtype, forward_only=True)
    on_device(tested)
    operation = tested.subject.operation
    arrays, joined = split(args)
    cfg = operation.config_type(implementation=tested.name, fwd=tested.backend.params[0])

    def tangents(function):
        return lambda *arrays: jax.jvp(lambda *arrays: function(*joined(arrays), **options), arrays, arrays)[1]

    expected = compute(tangents(operation.reference), *[x.astype(jnp.float32) for x in arrays])
    actual = compute(tangents(functools.partial(operation.run, cfg=cfg)), *arrays)
    assert_close(tested.subject, expected, actual, dtype, allow=2)


# --- programs ---


def real_calls():
    return [p for p in all_calls(briefly) if not p.values[0].simulated]


def gradients_of(function, like):
    """Return value and gradients of a sum over what `function` returns, for all arrays that have gradients."""
    wrt = tuple(index for index, array in enumerate(like) if is_inexact(array))

    def total(*arrays):
        return sum(jnp.sin(out.astype(jnp.float32)).sum() for out in jax.tree.leaves(function(*arrays)))

    return jax.value_and_grad(total, wrt)


@pytest.mark.parametrize(("tested", "name", "dtype"), real_calls())
def test_a_program_runs_it_under_jit_shard_map_and_export(on_device, tested, name, dtype):
    on_device(tested)
    args, options, _ = calls_of(tested, name, dtype)
    arrays, joined = split(args, lambda leaf: True)
    chosen = options | {"implementation": tested.name}

    def function(*arrays):
        return tested.subject.operation(*joined(arrays), **chosen)

    devices = jax.devices()[: 2 if jax.device_count() > 1 else 1]
    mesh = jax.make_mesh((len(devices),), ("all",), axis_types=(AxisType.Auto,), devices=devices)
    rows = P("all") if tested.subject.splits else P()
    specs = tuple(rows if array.shape[:1] == arrays[0].shape[:1] else P() for array in arrays)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=rows)
    gradients = jax.jit(gradients_of(function, arrays))
    exported = jax.export.deserialize(jax.export.export(gradients, disabled_checks=CUDNN)(*arrays).serialize())
    expected = gradients(*arrays)
    for found in (exported.call(*arrays), jax.jit(gradients_of(mapped, arrays))(*arrays)):
        for wanted, got in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            assert_close(tested.subject, wanted, got, dtype)


@pytest.mark.parametrize(
    ("tested", "platform"),
    [pytest.param(row, name, id=f"{row} for {name}") for row in REAL for name in row.exported],
)
def test_a_call_and_its_gradient_export_for_the_platforms_that_the_implementation_names(monkeypatch, tested, platform):
    """On any machine: an implementation without a backward must find one that takes its residuals."""
    # A program for a GPU that this process lacks is for some GPU, and the kernels are for Hopper alone.
    known = invocation.platform_fingerprint
    monkeypatch.setattr(
        invocation, "platform_fingerprint", lambda name: DEVICES["gpu"] if name == "cuda" else known(name)
    )
    args, options = supported_call(tested, platform)
    arrays, joined = split(args, lambda leaf: True)
    chosen = options | {"implementation": tested.name}

    def function(*arrays):
        return tested.subject.operation(*joined(arrays), **chosen)

    for program in (function, gradients_of(function, arrays)):
        structs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        exported = jax.export.export(jax.jit(program), platforms=[platform], disabled_checks=CUDNN)(*structs)
        assert exported.platforms == (platform,)


def supported_call(tested, platform):
    """Return arguments and options of the first call that the implementation runs on a platform, or skip."""
    subject, reason = tested.subject, ""
    for name in (*subject.briefly, *subject.calls, *subject.spaces):
        args, options = subject.prepared(name, tested.backend.dtypes[0])
        inv = Invocation(kernel=subject.operation, args=args, kwargs=options, device=DEVICES[platform])
        reason = subject.operation.implementations.unsupported(tested.name, subject.operation.call_of(inv))
        if reason is None:
            return args, options
    pytest.skip(reason)


# --- spaces ---


@pytest.mark.parametrize(
    ("tested", "platform", "name"),
    [
        pytest.param(tested, platform, name, id=f"{tested} on {platform}, {name}")
        for tested in REAL
        for platform in tested.platforms
        for name in tested.subject.spaces
    ],
)
def test_a_space_lowers_for_the_platforms_that_the_implementation_names(request, tested, platform, name):
    operation, dtype = tested.subject.operation, tested.backend.dtypes[-1]
    args, options = tested.subject.prepared(name, dtype)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    arrays, joined = split(structs, lambda leaf: True)
    inv = Invocation(kernel=operation, args=structs, kwargs=options, device=DEVICES[platform])
    call = operation.call_of(inv)
    for backward in (False, True):
        direction = dataclasses.replace(call, backward=backward)
        if operation.implementations.unsupported(tested.name, direction):
            continue
        for params in chosen_of(
            tested.implementation.space(direction), whole=request.config.getoption("--whole-spaces")
        ):
            if tested.implementation.params_fault(direction, params) is not None:
                continue
            cfg = operation.config_type(implementation=tested.name, **{"bwd" if backward else "fwd": params})
            run = functools.partial(_run, operation, joined, cfg, options)
            function = gradients_of(run, arrays) if backward else run
            jax.jit(function).trace(*arrays).lower(lowering_platforms=(PLATFORMS[platform],))


def _run(operation, joined, cfg, options, *arrays):
    return operation(*joined(arrays), cfg=cfg, **options)


def chosen_of(space, *, whole):
    """Return all of a space, or some of it that are always the same."""
    if isinstance(space, ConfigSpace):
        return list(space) if whole else space.sample(np.random.default_rng(0), SAMPLED)
    return list(space) if whole else list(space)[:: -(-len(space) // SAMPLED)]
