# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, where it must not come at any moment."""

from __future__ import annotations

import contextlib
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
