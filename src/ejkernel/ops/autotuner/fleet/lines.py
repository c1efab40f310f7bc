# SPDX-License-Identifier: Apache-2.0
"""What a caller and whoever carries out its task say to each other meanwhile, beside the task and its answer.

An executor brings a task to a worker and its answer back, and nothing else. A line lets progress be seen, and a search
be asked for its end; and what it brought is not lost with the worker. Where the other end cannot be reached, all that
is said comes with the answer.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import enum
import fcntl
import functools
import os
import secrets
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_LENGTH = struct.Struct("<Q")
_PREFIX = "ejkernel-lines-"
_NEW = 60.0  # seconds for which nobody else touches a folder


class Wish(enum.IntEnum):
    """What a caller wants of a search."""

    GO_ON = 0
    END = 1  # with the best so far
    END_AT_ONCE = 2


class LineEnd(Protocol):
    """The end of a line that is sent with a task; it can be pickled."""

    def connect(self) -> bool:
        """Return whether the caller can be reached from this process."""

    def say(self, message: bytes) -> None:
        """Tell the caller something, in order."""

    def wish(self) -> Wish:
        """Return what the caller wants; of one that is gone, that it ends at once."""


class Line(Protocol):
    """The caller's end."""

    @property
    def end(self) -> LineEnd:
        """What is sent with the task."""

    def heard(self) -> Iterator[bytes]:
        """Yield what was said since the last time."""

    def tell(self, wish: Wish) -> None:
        """Say what is wanted from now on."""

    def close(self) -> None:
        """Let go of it; whoever is still at the other end is to end at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class FolderEnd:
    """The other end of a `FolderLine`.

    Attributes:
        folder: The folder.
        secret: What the folder around it holds, so that one of that name on another machine is not taken for it.
    """

    folder: Path
    secret: str

    def connect(self) -> bool:
        """See `LineEnd`."""
        try:
            return (self.folder.parent / "secret").read_text() == self.secret
        except OSError:
            return False

    def say(self, message: bytes) -> None:
        """See `LineEnd`."""
        try:
            with open(self.folder / "said", "ab", buffering=0) as file:
                file.write(_LENGTH.pack(len(message)) + message)
        except FileNotFoundError:  # nobody listens any more, which `wish` says
            return

    def wish(self) -> Wish:
        """See `LineEnd`."""
        if not self.folder.exists() or (self.folder / Wish.END_AT_ONCE.name).exists():
            return Wish.END_AT_ONCE
        return Wish.END if (self.folder / Wish.END.name).exists() else Wish.GO_ON


class FolderLine:
    """A folder that caller and worker both see: of processes of one machine, a temporary one."""

    def __init__(self) -> None:
        around, secret = _folder_of_this_process(os.getpid())
        self._folder = Path(tempfile.mkdtemp(dir=around))
        self._read = 0
        self.end = FolderEnd(self._folder, secret)

    def heard(self) -> Iterator[bytes]:
        """See `Line`."""
        try:
            with open(self._folder / "said", "rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return
        while len(new) >= _LENGTH.size:
            whole = _LENGTH.size + _LENGTH.unpack_from(new)[0]
            if len(new) < whole:  # the rest is being written, or never was
                return
            yield new[_LENGTH.size : whole]
            self._read += whole
            new = new[whole:]

    def tell(self, wish: Wish) -> None:
        """See `Line`."""
        (self._folder / wish.name).touch()

    def close(self) -> None:
        """See `Line`."""
        shutil.rmtree(self._folder, ignore_errors=True)


@functools.cache
def _folder_of_this_process(pid: int) -> tuple[Path, str]:
    """Return a folder that is there as long as this process, and its secret.

    It tells whoever begins a task after its line was closed from whoever has no such folder.
    """
    _remove_those_of_lost_processes()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # nobody else may read or write there
    secret = secrets.token_hex()
    (folder / "secret").write_text(secret)
    _lock(folder)  # until this process ends, however it does
    atexit.register(_remove, folder, pid)
    return folder, secret


def _remove(folder: Path, pid: int) -> None:
    if pid == os.getpid():  # and not one that was forked from it
        shutil.rmtree(folder, ignore_errors=True)


def _remove_those_of_lost_processes() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is somebody else's, or gone meanwhile, or its process is there
            found = folder.lstat()
            # One that is being made has no lock yet.
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _NEW:
                os.close(_lock(folder))
                shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int:
    """Take the lock of a folder, and return what it ends with.

    Raises:
        BlockingIOError: another process has it.
    """
    lock = os.open(folder / "secret", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise
    return lock
