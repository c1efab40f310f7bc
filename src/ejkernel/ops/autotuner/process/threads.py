# SPDX-License-Identifier: Apache-2.0
"""Threads of our own for measuring and compiling, where no trace, mesh or transformation of the caller is open."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from ejkernel import compat
from ejkernel.ops.autotuner.process.signals import of_callbacks, raise_in
from ejkernel.ops.core.context import at_search_depth, current_scope, entered, search_depth
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.fingerprint import default_device, device_called, device_fingerprint

T = TypeVar("T")

_LOOK = 0.2  # seconds between two looks at what is done there
_AT_EXIT = 30.0  # seconds that the end of the process waits for what is under way
_AT_EXIT_LEFT = 1.0  # and for what was left, because it does not end


class AbandonedError(TuningError):
    """What was done on a measuring thread was left, because it does not end."""


class _MeasuringThread:
    """A thread that works off what it is given; a daemon, because it may have to be left at what it is at."""

    def __init__(self, name: str) -> None:
        self._given: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any], threading.Event]]
        self._given = queue.SimpleQueue()
        self._last_done = threading.Event()
        self._last_done.set()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int | None:
        """The thread's identifier."""
        return self._thread.ident

    def submit(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Have `work` done after what was given before."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._last_done = done = threading.Event()
        self._given.put((work, future, done))
        return future

    def wait(self, seconds: float) -> None:
        """Wait until there is nothing to do."""
        self._last_done.wait(seconds)

    def _serve(self) -> None:
        while True:
            work, future, done = self._given.get()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - whoever asked decides
                future.set_exception(error)
            del work, future  # or they would live until there is more to do
            done.set()


_threads: dict[tuple[jax.Device, int], _MeasuringThread] = {}
_abandoned: list[_MeasuringThread] = []
_guard = threading.Lock()


def _thread_of(device: jax.Device, depth: int) -> _MeasuringThread:
    with _guard:
        if (device, depth) not in _threads:
            _threads[device, depth] = _MeasuringThread(f"ejkernel-measure-{device.id}-{depth}")
        return _threads[device, depth]


def _abandon(thread: _MeasuringThread) -> None:
    """Have others take another thread from now on."""
    with _guard:
        _abandoned.append(thread)
        for place in [place for place, there in _threads.items() if there is thread]:
            del _threads[place]


def _wait_at_exit() -> None:
    """Wait for what is measured still: the interpreter's end would meet it in the middle of C++."""
    end = time.monotonic() + _AT_EXIT
    for thread in list(_threads.values()):
        thread.wait(max(0.0, end - time.monotonic()))
    if _abandoned:
        compat.silence_failed_callbacks()
        raise_in([*(thread.ident for thread in _abandoned), *of_callbacks()])
    for thread in _abandoned:
        thread.wait(_AT_EXIT_LEFT)


atexit.register(_wait_at_exit)


def in_callers_context(work: Callable[[], T], *, deeper: bool = False) -> Callable[[], T]:
    """Return `work` for another thread, with this thread's matmul precision, 64-bit mode, device and overlays.

    Recording does not carry over. With `deeper`, the other thread is one level of searches further down.
    """
    depth = search_depth() + deeper
    device = default_device()
    numerics = compat.numerics_in_force()
    scope = dataclasses.replace(current_scope(), recording=())

    def inside() -> T:
        with at_search_depth(depth), compat.numerics(numerics), jax.default_device(device), entered(scope):
            return work()

    return inside


def on_measuring_thread(
    work: Callable[[], T],
    *,
    on_interrupt: Callable[[], None] | None = None,
    look: Callable[[], None] | None = None,
) -> T:
    """Run `work` on the default device's measuring thread, with the caller's settings; see `in_callers_context`.

    Called on a measuring thread, by a candidate that runs a kernel itself, `work` has another one: the candidate's
    trace is open on the first, which waits.

    Args:
        work: What to run.
        on_interrupt: Called on Ctrl-C, after which `work` is waited for; a second one is raised.
        look: Called again and again meanwhile; if it raises, so does this, and `work` is left to go on by itself.
    """
    # Under an open trace, mesh or transformation, a thread of its own is the only place where JAX behaves as usual.
    thread = _thread_of(default_device(), search_depth())
    future = thread.submit(in_callers_context(work, deeper=True))
    try:
        try:
            _wait_for(future, look)
        except KeyboardInterrupt:  # the user's: what `work` raises is not seen here
            if on_interrupt is None:
                raise
            on_interrupt()  # even if the work has just been done: it is not lost
            _wait_for(future, look)
    except (AbandonedError, KeyboardInterrupt):
        if not future.done():  # what is measured next must not wait for it
            _abandon(thread)
        raise
    return future.result()


def _wait_for(future: concurrent.futures.Future[Any], look: Callable[[], None] | None) -> None:
    while not concurrent.futures.wait([future], timeout=None if look is None else _LOOK).done:
        if look is not None:
            look()


@contextlib.contextmanager
def on_device_of(inv: Invocation[Cfg, Out]) -> Iterator[None]:
    """Make the device that a call is for the default device inside the `with` block.

    Raises:
        TuningError: this process has no such device.
    """
    # JAX answers a GPU that cannot be had with the CPU, and its times would be remembered as the GPU's.
    device = device_called(inv.device_fingerprint)
    if device is None:
        raise TuningError(
            f"{inv.op_id}: the call is for {inv.device_fingerprint}, and this process, whose default device is "
            f"{device_fingerprint()}, has none; tune it where there is one."
        )
    with contextlib.nullcontext() if device is default_device() else jax.default_device(device):
        yield
