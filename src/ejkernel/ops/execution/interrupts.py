# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, where it must not come at any moment."""

from __future__ import annotations

import contextlib
import multiprocessing.resource_tracker
import signal
import threading
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Start a process inside the `with` block that Ctrl-C does not reach before it calls `interrupts_dropped`.

    A terminal sends Ctrl-C to all processes of its group, and one that is only starting would die of it with a
    traceback. This process hears of it when the block ends.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # it is started with the first process, and its start unblocks what was blocked before
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def interrupts_dropped() -> None:
    """Forget a Ctrl-C that came while this process was started inside `interrupts_blocked`, and hear the next one."""
    if not hasattr(signal, "pthread_sigmask"):
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which forgets what waits
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, before)
