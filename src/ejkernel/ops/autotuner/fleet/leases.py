# SPDX-License-Identifier: Apache-2.0
"""Exclusive leases of a machine's devices: two searches on one device would distort each other's times."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ejkernel import settings
from ejkernel.ops.errors import TuningError, TuningWarning
from ejkernel.ops.utils.messages.warn import warn

_LOOK = 0.2  # seconds between checks for a free device
_PATIENCE = 60.0  # seconds of waiting before a warning


class Device:
    """A device of this machine, or the processor.

    Args:
        name: Its name.
        parts: Names of the resources locked while the device is leased.
        environ: Environment variables that make it the only visible device.
    """

    def __init__(self, name: str, parts: Sequence[str], environ: Mapping[str, str]) -> None:
        self.name = name
        self.parts = parts
        self.environ = environ


def devices_of(platform: str) -> list[Device]:
    """Return the devices of a platform visible to this process; for `cpu`, one device with all cores."""
    if platform == "cpu":
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        return [Device("cpu", [f"core-{core}" for core in cores], {})]
    if platform != "gpu":
        return [Device(platform, [platform], {})]
    return [Device(f"gpu-{name}", [f"gpu-{name}"], settings.gpu_named(name)) for name in settings.visible_gpus()]


@contextlib.contextmanager
def leased(devices: Sequence[Device], is_asked_to_end: Callable[[], bool]) -> Iterator[Device]:
    """Lease the first free device for the `with` block; wait if all are leased.

    A lease excludes other processes and threads of the same user on this machine that use `leased`. It ends with its
    process.

    Raises:
        KeyboardInterrupt: `is_asked_to_end` returned true during the wait.
    """
    waited = 0.0
    while True:
        for device in devices:
            with contextlib.ExitStack() as held:
                if all(_is_locked(part, held) for part in device.parts):
                    yield device
                    return
        if is_asked_to_end():
            raise KeyboardInterrupt
        threading.Event().wait(_LOOK)
        waited += _LOOK
        if waited - _LOOK < _PATIENCE <= waited:
            names = ", ".join(device.name for device in devices)
            warn(f"waiting for {names}, leased by other searches", TuningWarning)


def _is_locked(part: str, held: contextlib.ExitStack) -> bool:
    # Each `open` gets a separate lock, so threads of one process exclude each other, too.
    lock = os.open(_folder() / f"{part.replace('/', '_')}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    held.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"ejkernel-devices-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise TuningError(f"{folder} belongs to another user; remove it, or set TMPDIR to a private folder.")
    return folder
