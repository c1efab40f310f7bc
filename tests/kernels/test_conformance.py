# SPDX-License-Identifier: Apache-2.0
"""Every implementation of every operation: one suite; a new one joins by being registered."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from tests import selection
from tests.kernels.conformance import Row, subjects

pytestmark = pytest.mark.slow

SUBJECTS = subjects()
ROWS = [Row(subject, name) for subject in SUBJECTS.values() for name in subject.backends]
TESTED = [*ROWS, *(dataclasses.replace(row, simulated=True) for row in ROWS if row.backend.simulate is not None)]


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
    assert {each.check for each in row.report("rows", "float32", "gradient").failures} == {
        "types",
        "gradient of x",
        "gradient of weight",
        "under grad",
    }
    wrong_residuals = dataclasses.replace(row.subject, check_residuals=lambda *given: 1 / 0)
    failures = Row(wrong_residuals, "xla").report("rows", "float32", "gradient").failures
    assert "ZeroDivisionError: division by zero" in {each.reason for each in failures if each.check == "residuals"}
