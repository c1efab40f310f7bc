# SPDX-License-Identifier: Apache-2.0
"""Our kernels of 8-bit numbers, lowered for a GPU on any machine: the interpreter accepts copies that a GPU refuses."""

from __future__ import annotations

import pytest
from tests.kernels.conformance import Row, subjects

from ejkernel import compat
from ejkernel.ops import Invocation
from ejkernel.ops.core import invocation
from ejkernel.testing.forms import lowered
from ejkernel.testing.subject import Scope
from ejkernel.testing.subject import Subject as Called

pytestmark = pytest.mark.slow

H200 = "gpu:nvidia_h200"
ROWS = [Row(subject, "mosaic_gpu") for name, subject in subjects().items() if "quantize" in name]


@pytest.mark.parametrize(
    ("row", "name"), [pytest.param(row, name, id=f"{row}, {name}") for row in ROWS for name in row.subject.calls]
)
def test_a_call_and_its_gradient_lower_with_the_heuristics_of_the_kernel(monkeypatch, row, name):
    if reason := compat.mosaic_gpu_reason():
        pytest.skip(reason)
    args, options = row.subject.described(name, row.backend.dtypes[0])
    operation = row.subject.operation
    inv = Invocation(kernel=operation, args=args, kwargs=options, device=H200)
    if reason := operation.implementations.unsupported(row.name, operation.call_of(inv)):
        pytest.skip(reason)
    monkeypatch.setattr(invocation, "platform_fingerprint", lambda _: H200)
    subject = Called.of(operation, args, options | {"implementation": row.name}, Scope())
    for function in lowered(subject, subject.executed(None)):
        function.trace(*subject.types).lower(lowering_platforms=("cuda",))
