# SPDX-License-Identifier: Apache-2.0
"""Threads that are still at work when the process ends.

At its end the interpreter stops every other thread that asks for its lock. A thread that is then in a callback of XLA
is unwound through C++, which aborts the process with "terminate called". So it is asked to end before that.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterable


def raise_in(threads: Iterable[int | None]) -> None:
    """Raise `SystemExit` in threads, by their identifiers, as soon as they run Python."""
    for ident in threads:
        if ident is not None and ident != threading.get_ident():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))


def of_callbacks() -> list[int]:
    """Return the threads that run Python and that no Python code has started: those of XLA that call back."""
    ours = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    return [ident for ident in sys._current_frames() if ident not in ours]
