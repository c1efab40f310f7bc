# SPDX-License-Identifier: Apache-2.0
"""A lock on a cache folder, so that commands remove and replace only the files that they have judged.

A command such as `ejkernel cache prune` reads an entry, decides, and removes it; a put may replace the file in between,
and no system call removes a file only if it is unchanged. So a put renames its file into place under a shared lock, and
a command compares the file with the one that it judged, and removes or replaces it, under the exclusive lock.

The lock is `flock` on the folder itself, held for one rename or one removal. The kernel releases it when a process
ends, however it ends. Readers take no lock. On a network file system the lock may not reach other machines; there a
removal renames the file aside, compares it once more, and puts it back if it is another one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ejkernel.ops.config._files import UnusableError, check_inside, read_file
from ejkernel.ops.utils.printable import printable

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)

PATIENCE: Final = 10.0  # seconds that a put or a command waits for the lock
_COMPARED: Final = 64 << 20  # bytes of a file whose content is compared; of a larger one, inode, size and time
_FIRST_WAIT, _LONGEST_WAIT = 0.0005, 0.02  # seconds between two attempts
_NO_LOCK: Final = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_NO_FOLDER: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM)  # one may write where one may not read
_ASIDE: Final = re.compile(r"\.(.+)\.\d+-[0-9a-f]{8}\.aside")


class LockedError(OSError):
    """Another process holds the lock of a cache folder."""


Seen = tuple[object, ...]


def seen(root: Path, file: Path) -> Seen | None:
    """Return what identifies a file's content, to be compared later; `None` if there is no file.

    Args:
        root: The cache folder.
        file: A file in it.

    Raises:
        OSError: a folder between the two is a link, or the file's status cannot be read.
    """
    check_inside(root, file)
    try:
        raw = read_file(file, _COMPARED)
    except UnusableError:  # no regular file, a large one, or one that this user cannot read
        status = os.lstat(file)
        return ("status", stat.S_IFMT(status.st_mode), status.st_ino, status.st_size, status.st_mtime_ns)
    return None if raw is None else ("content", hashlib.sha256(raw).digest())


def remove_judged(root: Path, file: Path, judged: Seen | None) -> bool:
    """Remove a file if it is still the one that was judged; return whether it is gone.

    Args:
        root: The cache folder.
        file: A file in it.
        judged: What `seen` returned before the file was judged.

    Raises:
        OSError: it cannot be removed, or the lock cannot be had.
    """
    with exclusive(root):
        now = seen(root, file)
        if now is None or now != judged:
            return now is None
        aside = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}.aside")
        try:
            os.rename(file, aside)
        except FileNotFoundError:
            return True
        if seen(root, aside) == judged:
            aside.unlink()
            return True
        _put_back(aside, file)
        return False


def restore_aside(root: Path, folder: Path) -> None:
    """Put back the files of a folder that a killed command had renamed aside.

    Args:
        root: The cache folder.
        folder: A folder in it.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = [(name, match[1]) for name in sorted(os.listdir(folder)) if (match := _ASIDE.fullmatch(name))]
        for name, original in found:
            with exclusive(root):
                _put_back(folder / name, folder / original)


def _put_back(aside: Path, file: Path) -> None:
    """Give a file its name again, unless a newer one has it."""
    try:
        os.link(aside, file, follow_symlinks=False)
    except FileExistsError:  # it was put later than what was renamed aside
        pass
    except OSError as error:  # a folder, or a file system without hard links
        logger.info("%s is renamed back, not linked: %s", printable(file), printable(error))
        if not os.path.lexists(file):
            os.rename(aside, file)
            return
    aside.unlink(missing_ok=True)


@contextlib.contextmanager
def shared(root: Path) -> Iterator[None]:
    """Hold the lock together with other puts, for the `with` block: no command removes a file meanwhile.

    Raises:
        LockedError: a command has held it for `PATIENCE` seconds.
    """
    with _held(root, is_shared=True):
        yield


@contextlib.contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Hold the lock alone, for the `with` block: no put renames its file into place meanwhile.

    Raises:
        LockedError: other processes have held it for `PATIENCE` seconds.
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
            if is_locked:  # a process that another thread has forked meanwhile keeps the descriptor open
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
    """Take the lock; return whether the file system has locks.

    Raises:
        LockedError: another process has it.
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
