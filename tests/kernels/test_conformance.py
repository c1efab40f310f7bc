# SPDX-License-Identifier: Apache-2.0
"""Every implementation of every operation: one suite; a new one joins by being registered."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.export
import numpy as np
import pytest
from tests import selection
from tests.kernels.conformance import Row, subjects

from ejkernel import compat
from ejkernel.ops import ConfigSpace, Invocation
from ejkernel.ops.core import invocation
from ejkernel.testing.forms import CUDNN, lowered
from ejkernel.testing.subject import Scope
from ejkernel.testing.subject import Subject as Called

pytestmark = pytest.mark.slow

SUBJECTS = subjects()
ROWS = [Row(subject, name) for subject in SUBJECTS.values() for name in subject.backends]
TESTED = [*ROWS, *(dataclasses.replace(row, simulated=True) for row in ROWS if row.backend.simulate is not None)]
EXPORTED = {"gpu": ("cuda", "rocm"), "tpu": ("tpu",), "cpu": ("cpu",)}
DEVICES = {"tpu": "tpu:v5", "cpu": "cpu:some", "cuda": "gpu:nvidia_h200", "rocm": "gpu:amd_instinct_mi300x"}
SAMPLED = 1  # configurations of a space and direction to lower in every run; `--whole` lowers all


def params(cases):
    return [pytest.param(*case, id=", ".join(map(str, case))) for case in cases]


def covered(row, name, dtype):
    """Return what a case adds to a sample: each call, each dtype of a row, and a case with `vmap`."""
    own = {(str(row), dtype), *([(str(row), "vmap")] if is_thorough(row, name, dtype) else [])}
    return own if row.backend.tested_apart else own | {(row.subject.operation.name, name)}


def is_thorough(row, name, dtype):
    """Return whether a case also checks tangents and `vmap`."""
    return name in row.subject.briefly and dtype == row.backend.dtypes[0]


def runs_here(row, name, dtype):
    """Return whether the process can run a case."""
    has_device = row.simulated or jax.default_backend() in row.platforms
    return has_device and not any(row.unsupported(name, dtype, backward=backward) for backward in (False, True))


@pytest.fixture
def ready(request, monkeypatch):
    """A function that prepares an implementation to run a call, or skips with the reason."""

    def prepare(row, name, dtype):
        for backward in (False, True):
            if reason := row.unsupported(name, dtype, backward=backward):
                pytest.skip(reason)
        if row.simulated:
            row.backend.simulate(monkeypatch)
        elif jax.default_backend() not in row.platforms:
            request.getfixturevalue(row.platforms[0])

    return prepare


@pytest.fixture
def tpu():
    pytest.skip("needs a TPU")


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def test_every_implementation_has_its_row():
    for subject in SUBJECTS.values():
        assert set(subject.backends) == set(subject.operation.implementations)


CASES = [(row, name, dtype) for row in TESTED for dtype, names in row.calls() for name in names]


def test_the_sample_has_every_implementation_with_each_dtype_and_every_call():
    sets = [covered(*case) for case in CASES]
    kept = [CASES[index] for index in selection.covering(sets, lambda index: runs_here(*CASES[index]))]
    here = [case for case in CASES if runs_here(*case)]
    assert {(str(row), dtype) for row, _, dtype in kept} == {(str(row), dtype) for row, _, dtype in here}
    assert {(row.subject.operation.name, name) for row, name, _ in kept} == {
        (operation, name) for operation, subject in SUBJECTS.items() for name in subject.calls
    }
    thorough = ({str(case[0]) for case in cases if is_thorough(*case)} for cases in (kept, here))
    assert next(thorough) == next(thorough)


# --- numbers ---


@pytest.mark.sampled(by=covered, runs=runs_here)
@pytest.mark.parametrize(("row", "name", "dtype"), params(CASES))
def test_an_implementation_passes_the_checks(ready, row, name, dtype):
    """Output, residuals and gradients match the reference; of some calls also tangents, and both under `vmap`."""
    ready(row, name, dtype)
    further = ("vmap", "tangents") if is_thorough(row, name, dtype) else ()
    report = row.report(name, dtype, "gradient", *further)
    assert report.ok, str(report)


@pytest.mark.sampled(
    by=lambda row, name: {str(row), (row.subject.operation.name, name)},
    runs=lambda row, name: runs_here(row, name, row.backend.dtypes[0]),
)
@pytest.mark.parametrize(("row", "name"), params((r, name) for r in ROWS for name in r.subject.briefly))
def test_an_operation_passes_the_checks_of_programs(ready, row, name):
    """Under `jit`, inside a `shard_map`, and exported."""
    dtype = row.backend.dtypes[0]
    ready(row, name, dtype)
    report = row.report(name, dtype, "gradient", "export", "split", alone=False)
    assert report.ok, str(report)


def test_suite_notices_a_wrong_gradient_a_wrong_dtype_and_wrong_residuals(monkeypatch):
    row = Row(SUBJECTS["rms_norm"], "xla")
    kind, forward = type(row.implementation), type(row.implementation).forward
    with monkeypatch.context() as patch:
        patch.setattr(kind, "backward", lambda self, call, residuals, out, cts, *args, params: args)
        assert {each.check for each in row.report("rows", "float32", "gradient").failures} == {
            "gradient of x",
            "gradient of weight",
        }

    def wrong(self, *args, params):
        out, residuals = forward(self, *args, params=params)
        return out.astype("float16"), residuals

    monkeypatch.setattr(kind, "forward", wrong)
    assert {each.check for each in row.report("rows", "float32", "gradient").failures} == {"under grad"}
    wrong_residuals = dataclasses.replace(row.subject, check_residuals=lambda *given: 1 / 0)
    failures = Row(wrong_residuals, "xla").report("rows", "float32", "gradient").failures
    assert "ZeroDivisionError: division by zero" in {each.reason for each in failures if each.check == "residuals"}


# --- platforms: on any machine ---


@pytest.mark.sampled(
    by=lambda row, platform: {str(row), platform}, runs=lambda row, platform: supported_call(row, platform) is not None
)
@pytest.mark.parametrize(
    ("row", "platform"), params((r, name) for r in ROWS for platform in r.platforms for name in EXPORTED[platform])
)
def test_a_call_and_its_gradient_export_for_the_platforms_that_the_implementation_names(monkeypatch, row, platform):
    """An implementation without a backward must find one that takes its residuals."""
    # A program for a GPU that this process lacks is for some GPU, and the kernels are for Hopper alone.
    known = invocation.platform_fingerprint
    monkeypatch.setattr(
        invocation, "platform_fingerprint", lambda name: DEVICES["cuda"] if name == "cuda" else known(name)
    )
    found = supported_call(row, platform)
    args, options = found or pytest.skip(f"no call of {row} runs on {platform}")
    subject = Called.of(row.subject.operation, args, options | {"implementation": row.name}, Scope())
    for function in lowered(subject, subject.executed(None)):
        with targeted(platform):
            exported = jax.export.export(function, platforms=[platform], disabled_checks=CUDNN)(*subject.types)
        assert exported.platforms == (platform,)


def targeted(platform):
    """Return a context in which kernels for a TPU that ask for its generation can be lowered."""
    return compat.abstract_device("tpu", "TPU v5", 1) if platform == "tpu" else contextlib.nullcontext()


def supported_call(row, platform):
    """Return arguments and options of the first call that the implementation runs on a platform, or `None`."""
    subject = row.subject
    for name in (*subject.briefly, *subject.calls, *subject.spaces):
        args, options = row.subject.described(name, row.backend.dtypes[0])
        inv = Invocation(kernel=subject.operation, args=args, kwargs=options, device=DEVICES[platform])
        if subject.operation.implementations.unsupported(row.name, subject.operation.call_of(inv)) is None:
            return args, options
    return None


@pytest.mark.sampled(by=lambda row, platform, name: {str(row), platform, (row.subject.operation.name, name)})
@pytest.mark.parametrize(
    ("row", "platform", "name"),
    params((r, EXPORTED[platform][0], name) for r in ROWS for platform in r.platforms for name in r.subject.spaces),
)
def test_a_space_lowers_for_the_platforms_that_the_implementation_names(request, row, platform, name):
    operation, (args, options) = row.subject.operation, row.subject.described(name, row.backend.dtypes[-1])
    call = operation.call_of(Invocation(kernel=operation, args=args, kwargs=options, device=DEVICES[platform]))
    subject = Called.of(operation, args, options, Scope())
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
