# SPDX-License-Identifier: Apache-2.0
"""Work on a thread of its own, and Ctrl-C while it is waited for."""

from __future__ import annotations

import concurrent.futures

import jax
import pytest

from ejkernel.ops.execution import threads
from ejkernel.ops.execution.threads import apart, carried
from ejkernel.ops.utils import services


class Interrupted(concurrent.futures.Future):
    """Done; but Ctrl-C comes so many times while its result is waited for."""

    def __init__(self, times):
        super().__init__()
        self.times = times
        self.set_result("the result")

    def result(self, timeout=None):
        if self.times:
            self.times -= 1
            raise KeyboardInterrupt
        return super().result(timeout)


@pytest.fixture
def interrupted(monkeypatch):
    """`interrupted(times)` lets Ctrl-C come so many times."""

    def setup(times):
        class Executor:
            def submit(self, work):
                return Interrupted(times)

        monkeypatch.setattr(threads, "_thread_of", lambda device, depth: Executor())

    return setup


def test_ctrl_c_at_the_very_end_does_not_lose_the_result(interrupted):
    interrupted(1)
    asked = []
    assert apart(lambda: None, on_interrupt=lambda: asked.append(True)) == "the result"
    assert asked == [True]


def test_a_second_ctrl_c_is_raised(interrupted):
    interrupted(2)
    with pytest.raises(KeyboardInterrupt):
        apart(lambda: None, on_interrupt=lambda: None)


def test_ctrl_c_is_raised_where_nobody_can_end_the_work(interrupted):
    interrupted(1)
    with pytest.raises(KeyboardInterrupt):
        apart(lambda: None)


def test_work_apart_has_the_caller_s_device_and_precision_and_knows_that_it_measures():
    last = jax.devices()[-1]
    with jax.default_device(last), jax.default_matmul_precision("highest"), jax.enable_x64(True):
        found = apart(lambda: (jax.numpy.ones(2).devices(), jax.numpy.ones(2).dtype, services.is_measuring()))
    assert found == ({last}, "float64", True)
    assert not services.is_measuring()


def test_what_is_carried_to_another_thread_is_no_deeper_unless_it_is_said_so():
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        assert not other.submit(carried(services.is_measuring)).result()
        assert other.submit(carried(services.is_measuring, deeper=True)).result()
