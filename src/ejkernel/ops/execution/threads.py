# SPDX-License-Identifier: Apache-2.0
"""Threads of our own for measuring and compiling, where no trace, mesh or transformation of the caller is open."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from ejkernel import compat
from ejkernel.ops.core.context import current_scope, entered
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils import services
from ejkernel.ops.utils.fingerprint import default_device, device_called, device_fingerprint

T = TypeVar("T")

_inside = threading.local()


@functools.lru_cache(maxsize=64)
def _thread_of(device: jax.Device, depth: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"ejkernel-measure-{device.id}-{depth}")


def _depth() -> int:
    """Return how many searches this thread is part of: 0 outside, 1 on a search's threads, more where they nest."""
    return getattr(_inside, "depth", 0)


def carried(work: Callable[[], T], *, deeper: bool = False) -> Callable[[], T]:
    """Return `work` for another thread, with this thread's matmul precision, 64-bit mode, device and overlays.

    Recording does not carry over. With `deeper`, the other thread is one level of searches further down.
    """
    depth = _depth() + deeper
    device = default_device()
    numerics = compat.numerics_in_force()
    scope = dataclasses.replace(current_scope(), recording=())

    def inside() -> T:
        before, _inside.depth = _depth(), depth
        try:
            with (
                compat.numerics(numerics),
                jax.default_device(device),
                entered(scope),
            ):
                return work()
        finally:
            _inside.depth = before

    return inside


def apart(work: Callable[[], T], *, on_interrupt: Callable[[], None] | None = None) -> T:
    """Run `work` on the default device's measuring thread, with the caller's settings; see `carried`.

    Called on a measuring thread, by a candidate that runs a kernel itself, `work` has another one: the candidate's
    trace is open on the first, which waits.

    Args:
        work: What to run.
        on_interrupt: Called on Ctrl-C, after which `work` is waited for; a second one is raised.
    """
    future = _thread_of(default_device(), _depth()).submit(carried(work, deeper=True))
    try:
        return future.result()
    except KeyboardInterrupt:
        if on_interrupt is None:
            raise
        on_interrupt()  # even if the work has just been done: it is not lost
        return future.result()


@contextlib.contextmanager
def on_device_of(inv: Invocation[Any, Any]) -> Iterator[None]:
    """Make the device that a call is for the default device inside the `with` block.

    Raises:
        TuningError: this process has no such device.
    """
    device = device_called(inv.device_fingerprint)
    if device is None:
        raise TuningError(
            f"{inv.op_id}: the call is for {inv.device_fingerprint}, and this process, whose default device is "
            f"{device_fingerprint()}, has none; tune it where there is one."
        )
    with contextlib.nullcontext() if device is default_device() else jax.default_device(device):
        yield


services.provide(is_measuring=lambda: _depth() > 0)
