# SPDX-License-Identifier: Apache-2.0
"""Shared and exclusive locks on a folder.

The lock is `flock` on the folder itself, so no lock file is needed. The operating system releases it when the process
ends, even after a crash. On a network file system the lock may not reach other machines.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PATIENCE: Final = 10.0  # seconds that a process waits for the lock
_FIRST_WAIT, _LONGEST_WAIT = 0.0005, 0.02  # seconds between two attempts
_NO_LOCK: Final = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_NO_FOLDER: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM)  # a writable folder may be unreadable


class LockedError(OSError):
    """Another process holds the lock of a folder."""


@contextlib.contextmanager
def shared(root: Path) -> Iterator[None]:
    """Hold the shared lock for a `with` block. Does nothing if the file system has no locks.

    Raises:
        LockedError: Another process has held the exclusive lock for `PATIENCE` seconds.
    """
    with _held(root, is_shared=True):
        yield


@contextlib.contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Hold the exclusive lock for a `with` block. Does nothing if the file system has no locks.

    Raises:
        LockedError: Other processes have held the lock for `PATIENCE` seconds.
    """
    with _held(root, is_shared=False):
        yield


@contextlib.contextmanager
def _held(root: Path, *, is_shared: bool) -> Iterator[None]:
    descriptor = _opened(root)
    if descriptor is None:
        yield
        return
    try:
        is_locked = _locked(descriptor, root, is_shared=is_shared)
        try:
            yield
        finally:
            if is_locked:  # unlock explicitly: a process forked by another thread may still have the descriptor open
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _opened(root: Path) -> int | None:
    """Return a descriptor of a folder; `None` if it cannot be locked."""
    if fcntl is None:
        return None
    try:
        return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_FOLDER:
            return None
        raise


def _locked(descriptor: int, root: Path, *, is_shared: bool) -> bool:
    """Acquire the lock; return whether the file system has locks.

    Raises:
        LockedError: Another process holds the lock.
    """
    how = (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    deadline, wait = time.monotonic() + PATIENCE, _FIRST_WAIT
    while True:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            if time.monotonic() > deadline:
                text = f"another process has held the lock of this folder for {PATIENCE:g} s"
                raise LockedError(errno.EAGAIN, text, str(root)) from None
        except OSError as error:
            if error.errno in _NO_LOCK:
                return False
            raise
        else:
            return True
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
