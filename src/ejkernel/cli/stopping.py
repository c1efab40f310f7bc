# SPDX-License-Identifier: Apache-2.0
"""Signals that end a tuning run with its best results so far."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from rich.console import Console


@contextlib.contextmanager
def announcing_the_stop(console: Console) -> Iterator[None]:
    """Print a message at Ctrl-C: the running search may take a while to end.

    SIGTERM and SIGHUP count as Ctrl-C. A scheduler or `timeout` sends the former, a closed terminal the latter; without
    a handler, the measurements of the running search would be lost.
    """
    # Not those that `nohup` ignores.
    others = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    before = {signal.SIGINT: signal.signal(signal.SIGINT, _Stop(console))}
    before |= {each: signal.signal(each, lambda *_: signal.raise_signal(signal.SIGINT)) for each in others}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class _Stop:
    """A handler of Ctrl-C, which the user may press twice."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_first = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        text = "stopping at once, without the measurements of this search"
        if self._is_first:
            text = "stopping with the best so far, which is saved; Ctrl-C again stops at once"
        self._is_first = False
        with contextlib.suppress(OSError):  # after SIGHUP the terminal is gone
            self._console.print(text, highlight=False)
        signal.default_int_handler(number, frame)
