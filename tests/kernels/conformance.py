# SPDX-License-Identifier: Apache-2.0
"""Rows of the conformance suite. An operation joins with a file `<operation>_cases.py` with a `SUBJECT`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejkernel.ops import Operation, device_fingerprint, device_kind
from ejkernel.testing import paired
from ejkernel.testing.programs import compiled
from ejkernel.testing.rows import GROUPS
from ejkernel.testing.running import checked
from ejkernel.testing.subject import Scope

Call = Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """How one implementation is tested.

    Attributes:
        dtypes: Dtypes of arrays. The first runs all calls, the others those that the subject names.
        params: Parameters of forward and backward; by default the heuristic's.
        rounded: By dtype, the dtype to which operands are rounded, and whose tolerance applies.
        simulate: Makes it run on a CPU: replaces its device by an interpreter or a stand-in, with monkeypatch.
        tested_apart: Its own tests check it in calls of every kind; a sample here has its dtypes and transformations.
    """

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    params: tuple[Any, Any] = (None, None)
    rounded: Mapping[str, str] = dataclasses.field(default_factory=dict)
    simulate: Callable[[Any], None] | None = None
    tested_apart: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """The tests of one operation.

    Attributes:
        operation: The operation.
        calls: By name, functions from a dtype to positional arguments and options; small calls.
        backends: A row for each implementation, by name.
        tolerance: By dtype, the largest error relative to the largest value; gradients may differ by twice that.
        briefly: Names of calls that suffice for further dtypes, programs and transformations.
        in_float16: Names of calls that also run in float16, where values overflow unless they are scaled first.
        spaces: By name, as `calls`, calls of realistic shapes, to lower their spaces.
        odd: By name, as `calls`, calls whose sizes leave a remainder in tiles and copies, to lower our Hopper kernels.
        check_residuals: Compares the residuals of a forward: `(arguments, options, residuals, dtype)`.
    """

    operation: Operation
    calls: Mapping[str, Call]
    backends: Mapping[str, Backend]
    tolerance: Mapping[str, float]
    briefly: tuple[str, ...]
    spaces: Mapping[str, Call]
    odd: Mapping[str, Call]
    check_residuals: Callable[[Any, Any, Any, str], None] | None = None
    in_float16: tuple[str, ...] = ()
    references: dict[str, Any] = dataclasses.field(default_factory=dict)
    types: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)

    def prepared(self, name, dtype):
        """Return the arguments and options of a call as implementations see them."""
        args, options = (self.calls | self.spaces | self.odd)[name](dtype)
        return self.operation.prepare(*args, **options)

    def described(self, name, dtype):
        """Return the types of the arguments of a call, and its options, without computing the arguments."""
        if (name, dtype) not in self.types:
            options = {}

            def prepare():
                args, found = self.prepared(name, dtype)
                options.update(found)
                return args

            self.types[name, dtype] = jax.eval_shape(prepare), options
        return self.types[name, dtype]


@dataclasses.dataclass(frozen=True)
class Row:
    """An implementation under test; `simulated`: not on its own device."""

    subject: Subject
    name: str
    simulated: bool = False

    @property
    def backend(self):
        return self.subject.backends[self.name]

    @property
    def implementation(self):
        return self.subject.operation.implementations[self.name]

    @property
    def platforms(self):
        return self.subject.operation.implementations.platforms(self.name) or ("gpu", "tpu", "cpu")

    def calls(self):
        """Yield each dtype with the names of its calls."""
        subject, (first, *others) = self.subject, self.backend.dtypes
        yield first, subject.calls
        for dtype in others:
            yield dtype, (*subject.briefly, *(subject.in_float16 if dtype == "float16" else ()))

    def rounding(self, dtype):
        """Return the option that permits to round operands of a dtype; the tests forbid it by default."""
        return {"precision": "default"} if dtype in self.backend.rounded else {}

    def unsupported(self, name, dtype, *, backward):
        """Return why the implementation does not run a call; empty if it does."""
        args, options = self.subject.described(name, dtype)
        options = options | self.rounding(dtype)
        place = {} if self.simulated else {"platform": device_kind(), "device_fingerprint": device_fingerprint()}
        own = {option: value for option, value in options.items() if option != "implementation"}
        call = dataclasses.replace(self.subject.operation.describe(*args, **own), backward=backward, **place)
        if backward and not self.implementation.has_backward():
            return ""  # another implementation's backward follows
        return self.subject.operation.implementations.unsupported(self.name, call) or ""

    def report(self, name, dtype, *groups, alone=True):
        """Return the report of these groups of checks: of the implementation alone, or as the operation runs it."""
        subject, (args, options) = self.subject, self.subject.calls[name](dtype)
        options = options | self.rounding(dtype)
        kernel, compare, digits = subject.operation, None, self.backend.rounded.get(dtype, dtype)
        if alone:
            kernel = paired(kernel, self.name, simulated=self.simulated, params=self.backend.params)
            if subject.check_residuals is not None:
                own = subject.prepared(name, dtype)
                compare = lambda residuals: subject.check_residuals(*own, residuals, digits)  # noqa: E731
        else:
            options = options | {"implementation": self.name}
        scope = Scope(
            configs=(),
            without=frozenset(GROUPS) - {*groups},
            tolerance=subject.tolerance[digits],
            is_brief=True,
            programs=subject.references.setdefault(name, {}),
            check_residuals=compare,
        )
        return checked(kernel, args, options, scope)

    def __str__(self):
        return f"{self.subject.operation.name}, {self.name}{', simulated' * self.simulated}"


def subjects():
    """Return the subjects of the `*_cases.py` files in this folder, by operation name."""
    files = sorted(Path(__file__).parent.glob("*_cases.py"))
    found = [importlib.import_module(f"{__package__}.{file.stem}").SUBJECT for file in files]
    return {subject.operation.name: subject for subject in found}


def compute(function, *args):
    return compiled(function, *args)(*args)


def assert_close(subject, expected, actual, dtype):
    """Compare arrays with a tolerance relative to the largest value."""

    def compare(expected, actual):
        expected, actual = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
        atol = subject.tolerance[dtype] * max(1.0, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)

    jax.tree.map(compare, expected, actual)
