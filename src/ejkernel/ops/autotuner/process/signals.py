# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, where it must not come at any moment; and threads that are asked to end with the process.

At its end the interpreter stops every other thread that asks for its lock. A thread that is then in a callback of XLA
is unwound through C++, which aborts the process with "terminate called". So it is asked to end before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[list[Callable[[], object]]]:
    """Collect Ctrl-C inside the `with` block, for whoever looks: raised anywhere, it would lose half a message."""
    held: list[Callable[[], object]] = []
    before: Any = None
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # nor is it, where Ctrl-C is ignored
        yield held
        return
    signal.signal(signal.SIGINT, lambda number, frame: held.append(lambda: before(number, frame)))
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)
        while held:
            held.pop()()


def raise_in(threads: Iterable[int | None]) -> None:
    """Raise `SystemExit` in threads, by their identifiers, as soon as they run Python."""
    for ident in threads:
        if ident is not None and ident != threading.get_ident():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))


def of_callbacks() -> list[int]:
    """Return the threads that run Python and that no Python code has started: those of XLA that call back."""
    ours = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    return [ident for ident in sys._current_frames() if ident not in ours]
