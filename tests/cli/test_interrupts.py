# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C where Python or an extension would drop its exception."""

from __future__ import annotations

import gc
import signal
import threading
import weakref

import pytest

from ejkernel.cli import interrupts

PRESS = "def run(self):\n    press()\n"


class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


class ExtensionFileLoader:
    """Its method looks like the import of an extension, which turns exceptions into others."""

    def __init__(self):
        found = {"press": lambda: signal.raise_signal(signal.SIGINT)}
        exec(compile(PRESS, interrupts._IMPORTS, "exec"), found)
        self.run = found["run"]


def in_a_collection():
    def press(phase, info):
        if phase == "start":
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(press)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(press)


class Cycle:
    def __init__(self):
        self.itself = self


def in_a_callback_of_a_weak_reference():
    reference = weakref.ref(Cycle(), lambda _: signal.raise_signal(signal.SIGINT))
    gc.collect()
    assert reference() is None


def in_a_finalizer():
    Finalized()


def in_an_import():
    loader = ExtensionFileLoader()
    try:
        loader.run(loader)
    except KeyboardInterrupt:
        raise ImportError("while initializing the extension") from None


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
@pytest.mark.parametrize("press", [in_a_collection, in_a_callback_of_a_weak_reference, in_a_finalizer, in_an_import])
def test_ctrl_c_is_delivered_after_code_that_drops_its_exception(press):
    before = signal.getsignal(signal.SIGINT)
    reached = []

    def run():
        with interrupts.none_lost():
            press()
            reached.append(press)
            threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert reached
    assert signal.getsignal(signal.SIGINT) is before


def test_another_handler_stays_and_runs_once():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("other"))
    try:
        with interrupts.none_lost():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["other"]


def test_a_collection_of_another_thread_delays_nothing():
    thread = threading.Thread(target=interrupts._note_collection, args=("start", {}))
    thread.start()
    thread.join()
    assert not interrupts._is_lost(None)
