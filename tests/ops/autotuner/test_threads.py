# SPDX-License-Identifier: Apache-2.0
"""Work on a separate thread, and Ctrl-C while waiting for it."""

from __future__ import annotations

import concurrent.futures
import threading
from types import SimpleNamespace

import jax
import pytest

from ejkernel.ops.autotuner.process import lifetime, threads
from ejkernel.ops.autotuner.process.threads import AbandonedError, in_callers_context, on_measuring_thread, raise_in
from ejkernel.ops.core.context import is_measuring


@pytest.fixture
def interrupted(monkeypatch):
    """`interrupted(times)` raises Ctrl-C so many times during the wait for a finished result."""

    def setup(times):
        left = [KeyboardInterrupt] * times
        wait_for = threads._wait_for

        def wait(future, look):
            wait_for(future, look)
            if left:
                raise left.pop()

        monkeypatch.setattr(threads, "_wait_for", wait)

    return setup


def test_ctrl_c_at_the_very_end_does_not_lose_the_result(interrupted):
    interrupted(1)
    asked = []
    assert on_measuring_thread(lambda: "the result", on_interrupt=lambda: asked.append(True)) == "the result"
    assert asked == [True]


def test_a_second_ctrl_c_is_raised(interrupted):
    interrupted(2)
    with pytest.raises(KeyboardInterrupt):
        on_measuring_thread(lambda: None, on_interrupt=lambda: None)


def test_ctrl_c_is_raised_if_the_work_cannot_be_ended(interrupted):
    interrupted(1)
    with pytest.raises(KeyboardInterrupt):
        on_measuring_thread(lambda: None)


def test_a_keyboard_interrupt_of_the_work_itself_is_no_ctrl_c():
    asked = []

    def work():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_measuring_thread(work, on_interrupt=lambda: asked.append(True))
    assert asked == []


def test_abandoned_work_continues_and_later_work_has_another_thread():
    may_end, ended = threading.Event(), threading.Event()

    def work():
        may_end.wait(60)
        ended.set()

    def look():
        raise AbandonedError("it takes too long")

    with pytest.raises(AbandonedError, match="it takes too long"):
        on_measuring_thread(work, look=look)
    assert on_measuring_thread(ended.is_set) is False
    may_end.set()
    assert ended.wait(60)


def test_work_apart_has_the_caller_s_device_and_precision_and_knows_that_it_measures():
    last = jax.devices()[-1]
    with jax.default_device(last), jax.default_matmul_precision("highest"), jax.enable_x64(True):
        found = on_measuring_thread(lambda: (jax.numpy.ones(2).devices(), jax.numpy.ones(2).dtype, is_measuring()))
    assert found == ({last}, "float64", True)
    assert not is_measuring()


def test_work_on_another_thread_keeps_its_depth_by_default():
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        assert not other.submit(in_callers_context(is_measuring)).result()
        assert other.submit(in_callers_context(is_measuring, deeper=True)).result()


@pytest.mark.parametrize("end", [AbandonedError("it hangs"), KeyboardInterrupt()], ids=["hangs", "second ctrl-c"])
def test_hanging_work_after_ctrl_c_is_abandoned_and_the_next_has_another_thread(monkeypatch, end):
    goes_on, raised = threading.Event(), [KeyboardInterrupt(), end]

    def wait(future, look):
        raise raised.pop(0)

    before = list(threads._abandoned)
    with monkeypatch.context() as patch:
        patch.setattr(threads, "_wait_for", wait)
        with pytest.raises(type(end)):
            on_measuring_thread(goes_on.wait, on_interrupt=lambda: None)
    (left,) = (thread for thread in threads._abandoned if thread not in before)
    assert on_measuring_thread(threading.get_ident) != left.ident
    goes_on.set()
    left.wait(60)


def test_an_exception_of_a_signal_handler_asks_the_work_to_end_and_the_next_has_another_thread():
    asked, late = threading.Event(), threading.Event()

    def work():
        asked.wait(60)
        late.wait(60)

    def look():
        raise TimeoutError("the user's time limit")

    with pytest.raises(TimeoutError, match="the user's time limit"):
        on_measuring_thread(work, on_interrupt=asked.set, look=look)
    assert asked.is_set()
    assert on_measuring_thread(lambda: "another thread") == "another thread"
    late.set()


def test_an_abandoned_thread_in_python_ends_on_request():
    began, ended = threading.Event(), []

    def poll():
        try:
            began.set()
            while True:
                pass
        except SystemExit:
            ended.append(True)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    began.wait()
    raise_in([thread.ident, threading.get_ident(), None])  # except this thread
    thread.join(60)
    assert ended == [True]


def test_only_abandoned_threads_that_do_not_end_by_themselves_are_broken_off_at_exit(monkeypatch):
    ending, stuck = (
        SimpleNamespace(ident=number, wait=lambda _, ends=ends: ends) for number, ends in enumerate((1, 0))
    )
    for abandoned, expected in (([ending], []), ([ending, stuck], [1])):
        raised = []
        monkeypatch.setattr(threads, "_threads", {})
        monkeypatch.setattr(threads, "_abandoned", abandoned)
        monkeypatch.setattr(threads, "_of_callbacks", list)
        monkeypatch.setattr(threads, "raise_in", raised.extend)
        monkeypatch.setattr(threads.compat.settings, "silence_failed_callbacks", lambda: None)
        threads._wait_at_exit()
        assert raised == expected


def test_one_thread_starts_the_processes_of_all_threads(monkeypatch):
    monkeypatch.setattr(lifetime, "_starters", {})
    together, starters = threading.Barrier(8), set()

    def begin(_):
        together.wait()
        lifetime.start_process(lambda: starters.add(threading.get_ident()))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(begin, range(8)))
    assert len(starters) == 1
