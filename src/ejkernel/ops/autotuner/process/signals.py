# SPDX-License-Identifier: Apache-2.0
"""Deferred Ctrl-C, and ending threads before the process exits.

At exit the interpreter stops each thread that requests its lock. If that thread is in a callback of XLA, it unwinds
through C++ and aborts the process with "terminate called". Such threads must therefore end earlier.
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
    """Collect Ctrl-C inside the `with` block for the caller to handle: raised anywhere, it could split a message."""
    held: list[Callable[[], object]] = []
    before: Any = None
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # another thread, or Ctrl-C is ignored
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
    """Raise `SystemExit` in the threads with these identifiers as soon as they run Python."""
    for ident in threads:
        if ident is not None and ident != threading.get_ident():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))


def of_callbacks() -> list[int]:
    """Return the threads that run Python but were started by XLA, for callbacks."""
    ours = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    return [ident for ident in sys._current_frames() if ident not in ours]
