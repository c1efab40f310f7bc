# SPDX-License-Identifier: Apache-2.0
"""Threads for measuring and compiling, free of the caller's open traces, meshes and transformations.

At exit the interpreter stops each thread that requests its lock. If that thread is in a callback of XLA, it unwinds
through C++ and aborts the process with "terminate called". Such threads must therefore end earlier.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax

from ejkernel import compat
from ejkernel.ops.autotuner.process.lifetime import SerialThread
from ejkernel.ops.core.context import at_search_depth, current_scope, entered, numerics, numerics_in_force, search_depth
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.fingerprint import default_device, device_called, device_fingerprint, name_of_device

T = TypeVar("T")

_LOOK = 0.2  # seconds between calls of `look`
_AT_EXIT = 30.0  # seconds that the exit of the process waits for running work
_AT_EXIT_LEFT = 1.0  # seconds that it waits for abandoned work


class AbandonedError(TuningError):
    """Work on a measuring thread was abandoned because it does not end."""


_threads: dict[tuple[jax.Device, int], SerialThread] = {}
_abandoned: list[SerialThread] = []
_guard = threading.Lock()


def _thread_of(device: jax.Device, depth: int) -> SerialThread:
    with _guard:
        if (device, depth) not in _threads:
            _threads[device, depth] = SerialThread(f"ejkernel-measure-{device.id}-{depth}")
        return _threads[device, depth]


def _abandon(thread: SerialThread) -> None:
    """Remove a thread, so that later work gets a new one."""
    with _guard:
        _abandoned.append(thread)
        for place in [place for place, there in _threads.items() if there is thread]:
            del _threads[place]


def raise_in(threads: Iterable[int | None]) -> None:
    """Raise `SystemExit` in the threads with these identifiers as soon as they run Python."""
    for ident in threads:
        if ident is not None and ident != threading.get_ident():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))


def _of_callbacks() -> list[int]:
    """Return the threads that run Python but were started by XLA, for callbacks."""
    ours = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    return [ident for ident in sys._current_frames() if ident not in ours]


def _wait_at_exit() -> None:
    """Wait for running measurements: the interpreter must not exit while they are in C++."""
    end = time.monotonic() + _AT_EXIT
    for thread in list(_threads.values()):
        thread.wait(max(0.0, end - time.monotonic()))
    end = time.monotonic() + _AT_EXIT_LEFT
    stuck = [thread for thread in _abandoned if not thread.wait(max(0.0, end - time.monotonic()))]
    if stuck:
        compat.settings.silence_failed_callbacks()
        raise_in([*(thread.ident for thread in stuck), *_of_callbacks()])
    for thread in stuck:
        thread.wait(_AT_EXIT_LEFT)


atexit.register(_wait_at_exit)


def in_callers_context(work: Callable[[], T], *, deeper: bool = False) -> Callable[[], T]:
    """Return `work` for another thread, with this thread's matmul precision, 64-bit mode, device and overlays.

    Recording does not carry over.

    Args:
        work: The function.
        deeper: Whether `work` belongs to a search one level deeper.
    """
    depth = search_depth() + deeper
    device = default_device()
    own = numerics_in_force()
    scope = dataclasses.replace(current_scope(), recording=())

    def inside() -> T:
        with at_search_depth(depth), numerics(own), jax.default_device(device), entered(scope):
            return work()

    return inside


def on_measuring_thread(
    work: Callable[[], T],
    *,
    on_interrupt: Callable[[], None] | None = None,
    look: Callable[[], None] | None = None,
) -> T:
    """Run `work` on the default device's measuring thread, with the caller's settings; see `in_callers_context`.

    If a candidate on a measuring thread runs a kernel itself, `work` runs on a second thread: the candidate's trace is
    open on the first, which waits.

    Args:
        work: The function to run.
        on_interrupt: Called on the first Ctrl-C, before waiting for `work` again. The second Ctrl-C is raised, and any
            other exception of a signal handler at once, after a call of this function.
        look: Called repeatedly during the wait. If it raises, the error is raised here and `work` continues alone.
    """
    # Under the caller's open trace, mesh or transformation, JAX behaves as usual only on another thread.
    thread = _thread_of(default_device(), search_depth())
    future = thread.submit(in_callers_context(work, deeper=True))
    try:
        try:
            _wait_for(future, look)
        except KeyboardInterrupt:  # from the user: `_wait_for` does not raise errors of `work`
            if on_interrupt is None:
                raise
            on_interrupt()  # also if `work` has just finished; its result is kept
            _wait_for(future, look)
    except BaseException as error:  # e.g. the exception of a user's signal handler
        if not future.done():  # later measurements must not wait for it
            _abandon(thread)
            if on_interrupt is not None and not isinstance(error, AbandonedError):
                on_interrupt()
        raise
    return future.result()


def _wait_for(future: concurrent.futures.Future[Any], look: Callable[[], None] | None) -> None:
    while not concurrent.futures.wait([future], timeout=None if look is None else _LOOK).done:
        if look is not None:
            look()


@contextlib.contextmanager
def on_device_of(inv: Invocation[Cfg, Out]) -> Iterator[None]:
    """Make the device of a call the default device inside the `with` block.

    Raises:
        TuningError: This process has no such device.
    """
    # JAX replaces an unavailable GPU with the CPU, and the CPU's times would be stored as the GPU's.
    device = device_called(inv.device_fingerprint)
    if device is None:
        raise TuningError(
            f"{inv.op_id}: the call is for {name_of_device(inv.device_fingerprint)}, but the default device of this "
            f"process is {device_fingerprint()}; tune it on a machine with the right device."
        )
    with contextlib.nullcontext() if device is default_device() else jax.default_device(device):
        yield
