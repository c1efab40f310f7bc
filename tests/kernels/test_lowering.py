# SPDX-License-Identifier: Apache-2.0
"""Every implementation, lowered for its platforms on any machine: an interpreter accepts copies that a GPU refuses."""

from __future__ import annotations

import contextlib
import dataclasses

import jax.export
import numpy as np
import pytest
from tests.kernels.conformance import Row, subjects

from ejkernel import compat
from ejkernel.ops import ConfigSpace, Invocation
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.testing.forms import CUDNN, lowered
from ejkernel.testing.subject import Scope, Subject

pytestmark = pytest.mark.slow

ROWS = [Row(subject, name) for subject in subjects().values() for name in subject.backends]
HOPPER = {str(row): row for row in ROWS if row.name == "mosaic_gpu"}
EXPORTED = {"gpu": ("cuda", "rocm"), "tpu": ("tpu",), "cpu": ("cpu",)}
DEVICES = {"tpu": "tpu:v5", "cpu": "cpu:some", "cuda": "gpu:nvidia_h200", "rocm": "gpu:amd_instinct_mi300x"}
SAMPLED = 1  # configurations of a space and direction to lower in every run; `--whole` lowers all


def platforms(row):
    """Return the platforms to lower an implementation for; our Hopper kernels run on no other GPU."""
    return ("cuda",) if str(row) in HOPPER else [name for platform in row.platforms for name in EXPORTED[platform]]


def odd(row):
    """Return the names of calls of odd sizes, of our Hopper kernels."""
    return (*row.subject.odd,) if str(row) in HOPPER else ()


def calls(row):
    """Yield the dtypes and names of all calls, of other implementations in one dtype."""
    for dtype, names in row.calls() if str(row) in HOPPER else [(row.backend.dtypes[0], row.subject.calls)]:
        for name in dict.fromkeys((*row.subject.briefly, *names, *row.subject.spaces, *odd(row))):
            yield dtype, name


def params(cases):
    return [pytest.param(*case, id=", ".join(map(str, case))) for case in cases]


def covered(row, platform, dtype, name):
    """Return what a case adds to a sample: every row, every platform, and on Hopper every dtype and all odd sizes."""
    own = {dtype, *({name} & {*odd(row)})}
    return {str(row), platform, *((str(row), each) for each in own)}


def described(row, platform, dtype, name):
    """Return the call that an implementation sees on a platform, its arguments and its options."""
    operation, (args, options) = row.subject.operation, row.subject.described(name, dtype)
    options = options | row.rounding(dtype)
    inv = Invocation(kernel=operation, args=args, kwargs=options, device=DEVICES[platform])
    return operation.call_of(inv), args, options


def unsupported(row, platform, dtype, name, *, backward=False):
    """Return why an implementation does not run a call, or its backward; `None` if it does."""
    call, _, _ = described(row, platform, dtype, name)
    own = dataclasses.replace(call, backward=backward)
    return row.subject.operation.implementations.unsupported(row.name, own)


def runs(row, platform, dtype, name):
    return unsupported(row, platform, dtype, name) is None


def targeted(platform):
    """Return a context for lowering kernels that ask for their device."""
    if platform == "cuda":
        return Target.named("nvidia_h200").entered()
    return compat.executables.abstract_device("tpu", "TPU v5", 1) if platform == "tpu" else contextlib.nullcontext()


@pytest.mark.parametrize("row", HOPPER.values(), ids=str)
def test_every_hopper_kernel_runs_a_call_of_odd_sizes(row):
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    assert any(runs(row, "cuda", row.backend.dtypes[0], name) for name in row.subject.odd)


@pytest.mark.sampled(by=covered, runs=runs)
@pytest.mark.parametrize(
    ("row", "platform", "dtype", "name"),
    params((row, platform, *call) for row in ROWS for platform in platforms(row) for call in calls(row)),
)
def test_a_call_and_its_gradient_export_for_the_platforms_that_the_implementation_names(row, platform, dtype, name):
    """An implementation without a backward must find one that takes its residuals; one with a backward may refuse."""
    if reason := unsupported(row, platform, dtype, name):
        pytest.skip(reason)
    _, args, options = described(row, platform, dtype, name)
    subject = Subject.of(row.subject.operation, args, options | {"implementation": row.name}, Scope())
    refuses = row.implementation.has_backward() and unsupported(row, platform, dtype, name, backward=True)
    with targeted(platform):
        for function in lowered(subject, subject.executed(None))[: 1 if refuses else 2]:
            exported = jax.export.export(function, platforms=[platform], disabled_checks=CUDNN)(*subject.types)
            assert exported.platforms == (platform,)


SPACES = [
    (row, platform, row.backend.dtypes[0], name)
    for row in ROWS
    for platform in platforms(row)
    for name in (*odd(row), *row.subject.spaces)
]


def covered_by_spaces(row, platform, dtype, name):
    """Return the row, the platform and the size that a space adds to a sample; odd sizes are exported above."""
    return {str(row), platform, *({(row.subject.operation.name, name)} if name in row.subject.spaces else ())}


@pytest.mark.sampled(by=covered_by_spaces, runs=runs)
@pytest.mark.parametrize(("row", "platform", "dtype", "name"), params(SPACES))
def test_a_space_lowers_for_the_platforms_that_the_implementation_names(request, row, platform, dtype, name):
    call, args, options = described(row, platform, dtype, name)
    operation = row.subject.operation
    subject = Subject.of(operation, args, options, Scope())
    for direction in ("fwd", "bwd"):
        own = dataclasses.replace(call, backward=direction == "bwd")
        if operation.implementations.unsupported(row.name, own):
            continue
        space = row.implementation.space(own)
        for found in chosen_of(space, whole=request.config.getoption("--whole")):
            if row.implementation.params_fault(own, found) is None:
                run = subject.executed(operation.config_type(implementation=row.name, **{direction: found}))
                with targeted(platform):
                    lowered(subject, run)[own.backward].trace(*subject.types).lower(lowering_platforms=(platform,))


def chosen_of(space, *, whole):
    """Return all of a space, or always the same sample of it."""
    if isinstance(space, ConfigSpace):
        return list(space) if whole else space.sample(np.random.default_rng(0), SAMPLED)
    return list(space) if whole else list(space)[:: -(-len(space) // SAMPLED)]
