# SPDX-License-Identifier: Apache-2.0
"""`check_kernel` says which step runs."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import pytest

from ejkernel.ops import tune
from ejkernel.ops.errors import ArgumentError
from ejkernel.testing import check_kernel
from ejkernel.testing.report import Steps


@tune(space={"rows": [1, 2]})
def total(x, *, rows=1):
    return x.reshape(rows, -1).sum(0).sum()


@pytest.mark.slow
def test_each_step_that_begins_is_planned(monkeypatch):
    lines, begin = [], Steps.begin
    monkeypatch.setattr(Steps, "begin", lambda self, name: (begin(self, name), lines.append(self.line())))
    check_kernel(total, jnp.ones(4), without=["vmap", "dtypes", "export"], progress=False, strict=False)
    assert [line.partition(", after")[0] for line in lines] == [
        "step 1 of 10: the reference",
        "step 2 of 10: configuration rows=1",
        "step 3 of 10: configuration rows=2",
        "step 4 of 10: pairs of forward and backward",
        "step 5 of 10: scaled inputs, zeros",
        "step 6 of 10: odd sizes",
        "step 7 of 10: pickle",
        "step 8 of 10: split",
        "step 9 of 10: platforms",
        "step 10 of 10: key",
    ]


def test_the_current_step_is_repeated_until_the_end():
    steps, told, heard = Steps(), [], threading.Event()

    def tell(line):
        told.append(line)
        heard.set()

    steps.plan(["one", "two"])
    steps.begin("two")
    with steps.shown(tell, every=0.01):
        assert heard.wait(60)
    count = len(told)
    assert told[0].startswith("step 2 of 2: two, after ")
    assert not heard.clear()
    assert not heard.wait(0.1)
    assert len(told) == count


def test_progress_is_a_bool_or_a_function():
    with pytest.raises(ArgumentError, match="progress must be a bool or a function, got 'yes'"):
        check_kernel(total, jnp.ones(4), progress="yes")
