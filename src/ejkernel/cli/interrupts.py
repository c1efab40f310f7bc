# SPDX-License-Identifier: Apache-2.0
"""Delivers Ctrl-C where Python or an extension would drop the exception of its handler.

A garbage collection runs Python functions: JAX's, finalizers, and callbacks of weak references. Python prints an
exception there and goes on. An extension module turns an exception during its import into an `ImportError`, some after
a traceback. There Ctrl-C is delivered a moment later.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

_DELAY: Final = 0.02  # seconds
_IMPORTS: Final = "<frozen importlib._bootstrap_external>"
_phase = ["stop"]  # of the main thread's latest garbage collection

Handler = Callable[[int, FrameType | None], Any]


def delivered(handler: Handler) -> Handler:
    """Return a handler of SIGINT that runs again a moment later where its exception would be lost."""

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_lost(frame):
            _send_again()
        else:
            handler(number, frame)

    return handle


@contextlib.contextmanager
def none_lost() -> Iterator[None]:
    """Let Ctrl-C in the `with` block always raise `KeyboardInterrupt`, unless it is ignored or has another handler."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = delivered(signal.default_int_handler)
    signal.signal(signal.SIGINT, handler)
    gc.callbacks.append(_note_collection)
    try:
        yield
    finally:
        gc.callbacks.remove(_note_collection)
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _note_collection(phase: str, info: dict[str, int]) -> None:
    del info
    if threading.get_ident() == threading.main_thread().ident:  # handlers of signals run in the main thread
        _phase[0] = phase


def _is_lost(frame: FrameType | None) -> bool:
    """Return whether an exception that is raised in this frame is lost before it reaches the command."""
    if _phase[0] == "start":  # the frame of a weak reference's callback looks like any other
        return True
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        code = frame.f_code
        if code in callbacks or code.co_name == "__del__":
            return True
        if code.co_filename == _IMPORTS and type(frame.f_locals.get("self")).__name__ == "ExtensionFileLoader":
            return True
        frame = frame.f_back
    return False


def _send_again() -> None:
    """Send SIGINT to the main thread, which may then wait in a system call."""
    main = threading.main_thread().ident
    assert main is not None  # it has started
    timer = threading.Timer(_DELAY, signal.pthread_kill, (main, signal.SIGINT))
    timer.daemon = True
    timer.start()
