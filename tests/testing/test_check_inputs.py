# SPDX-License-Identifier: Apache-2.0
"""`check_kernel` on kernels with errors for some inputs or configurations only, and on similar correct kernels."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.ops import wrong_in_places as kernels

from ejkernel.ops import Kernel, check_kernel
from ejkernel.testing.rows import GROUPS

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).standard_normal((4, 6), np.float32)
Y = X[::-1] + 1

WRONG = {  # the checks that find it, and their group
    "ScaledResiduals": (["residuals"], "gradient"),
    "ResidualsByBlock": (["residuals"], "gradient"),
    "KeptByConfiguration": (["residuals"], "gradient"),
    "WrongBackwardConfiguration": (["residuals"], "gradient"),
    "WrongInFloat16": (["float16"], "dtypes"),
    "WrongInBfloat16": (["bfloat16"], "dtypes"),
    "WrongGradientInFloat16": (["float16"], "dtypes gradient"),
    "RaisingInFloat16": (["float16"], "dtypes"),
    "RaisingInBfloat16": (["bfloat16"], "dtypes"),
    "BlocksOfRows": (["odd sizes"], "inputs"),
    "WithoutReference": (["odd sizes"], "inputs"),
    "SpaceOfEvenRows": (["odd sizes"], "inputs"),
    "BackwardWithoutTail": (["residuals, odd sizes"], "inputs gradient"),
    "WrongAboveFour": (["vmap"], "vmap"),
    "WrongAboveEight": (["vmap"], "vmap"),
    "WrongAboveEightOfOne": (["vmap over x", "vmap over y"], "vmap"),
    "WithoutTail": (["odd sizes"], "inputs"),
    "ShorterByTail": (["odd sizes"], "inputs"),
    "GradientWithoutTail": (["odd sizes"], "inputs gradient"),
    "TailOfColumns": (["odd sizes"], "inputs"),
    "Overflowing": (["scaled by 1000"], "inputs"),
    "OverflowingUnderOneConfiguration": (["scaled by 1000"], "inputs"),
    "OverflowingGradient": (["scaled by 1000"], "inputs gradient"),
    "ZeroByZero": (["zeros"], "inputs"),
    "ZeroByZeroInGradient": (["zeros"], "inputs gradient"),
    "ZeroByZeroOfOne": (["zeros", "zeros in y"], "inputs"),
    "LostForSmall": (["scaled by 0.001"], "inputs"),
    "ConstantGradient": (["second derivative"], "second derivative gradient"),
}
RIGHT = (
    "Sine",
    "Scaled",
    "Sum",
    "Softmax",
    "Unit",
    "Versine",
    "Kinked",
    "Saturating",
    "Shifted",
    "Peaked",
    "Powers",
    "Positions",
    "Roots",
    "EvenRows",
    "Repeated",
    "Poles",
)


def arguments(kernel):
    if isinstance(kernel, kernels.Roots):
        return (np.abs(X) + 1,), {}
    if isinstance(kernel, kernels.Shifted):
        return (X, Y[:, 0]), {}
    return ((X, Y) if isinstance(kernel, kernels.Sum) else (X,)), ({"rows": 4} if kernel.op_id == "Repeated" else {})


def report_on(name, **options):
    kernel = getattr(kernels, name)(name)
    args, kwargs = arguments(kernel)
    return check_kernel(kernel, *args, **kwargs, **options, strict=False)


@pytest.mark.parametrize("name", WRONG)
def test_check_kernel_finds_a_partly_wrong_kernel_by(name):
    checks, groups = WRONG[name]
    report = report_on(name, without=[group for group in GROUPS if group not in groups])
    assert list(dict.fromkeys(row.check for row in report.failures)) == checks, str(report)


@pytest.mark.parametrize("name", RIGHT)
def test_a_similar_correct_kernel_passes(name):
    report = report_on(name, without=["tangents", "vmap", "platforms", "key", "pickle", "export", "split"])
    assert report.ok, str(report)


def test_a_refused_size_is_skipped_with_the_reason():
    report = report_on("EvenRows", without=[group for group in GROUPS if group != "inputs"])
    statuses = {row.check: (row.status, row.reason) for row in report.rows if "instead of" in row.check}
    assert statuses["7 instead of 6"] == ("ok", "")
    assert statuses["5 instead of 4"][0] == "skipped"
    assert "x must have an even number of rows, got 5" in statuses["5 instead of 4"][1]


def test_a_crash_names_implementation_configuration_shapes_and_what_to_do():
    report = report_on("BlocksOfRows", without=[group for group in GROUPS if group != "inputs"])
    failures = report.failures
    assert {row.config["implementation"] for row in failures} == {"blocks"}
    assert failures[0].reason.startswith("float32[5, 7]: TypeError: cannot reshape")
    assert "raise UnsupportedError with the reason, or leave the configuration out of the space" in failures[0].reason
    text = " ".join(str(report).split())
    assert "implementation=blocks rows=" in text
    assert "what to do: odd sizes: mask the rest of a length that the block does not divide" in text
    assert f"check_kernel(kernel, ..., configs=[{failures[0].config}], without=['second derivative'," in text


def test_a_wrong_value_has_its_position():
    report = report_on("WithoutTail", without=[group for group in GROUPS if group != "inputs"])
    assert re.search(r"differs from the reference: 0 instead of -?[\d.]+ at \[4, \d\]", report.failures[0].reason)


def test_without_a_reference_a_value_differs_from_the_heuristic_s():
    kernel = type("Unconfirmed", (kernels.OverflowingUnderOneConfiguration,), {"reference": Kernel.reference})()
    report = check_kernel(kernel, X, without=[group for group in GROUPS if group != "inputs"], strict=False)
    assert report.failures[0].reason.startswith("result 0 differs from the heuristic's: ")


def test_each_kernel_is_tried():
    made = {name for name, kind in vars(kernels).items() if isinstance(kind, type) and issubclass(kind, Kernel)}
    assert made - {"Kernel"} == {*WRONG, *RIGHT}
