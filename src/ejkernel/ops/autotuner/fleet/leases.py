# SPDX-License-Identifier: Apache-2.0
"""Devices of a machine that tasks take turns on: times of two searches that share one say nothing."""

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

_LOOK = 0.2  # seconds between two looks at whether a device is free
_PATIENCE = 60.0  # seconds after which whoever waits says so


class Device:
    """A device of this machine, or the processor.

    Args:
        name: What it is called.
        parts: What nobody else may have meanwhile.
        environ: Variables with which a process sees it alone.
    """

    def __init__(self, name: str, parts: Sequence[str], environ: Mapping[str, str]) -> None:
        self.name = name
        self.parts = parts
        self.environ = environ


def devices_of(platform: str) -> list[Device]:
    """Return the devices of a platform that this process may use; for a processor, one: all of its cores."""
    if platform == "cpu":
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        return [Device("cpu", [f"core-{core}" for core in cores], {})]
    if platform != "gpu":
        return [Device(platform, [platform], {})]
    return [Device(f"gpu-{name}", [f"gpu-{name}"], settings.gpu_called(name)) for name in settings.visible_gpus()]


@contextlib.contextmanager
def leased(devices: Sequence[Device], is_asked_to_end: Callable[[], bool]) -> Iterator[Device]:
    """Have the first of the devices that is free for the `with` block; wait for one if none is.

    It holds among processes and threads of one user on one machine that ask for it, and ends with its process.

    Raises:
        KeyboardInterrupt: it is asked to end while it waits.
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
            warn(f"waiting for {names}, which other searches have", TuningWarning)


def _is_locked(part: str, held: contextlib.ExitStack) -> bool:
    # A lock of its own for each time that the file is opened: threads of one process exclude each other too.
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
        raise TuningError(f"{folder} is somebody else's; remove it, or set TMPDIR to a folder of your own.")
    return folder
