# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole: beside their place first, kept when the machine stops, and tidied up after a crash.

A durable write takes milliseconds, which after a search nobody sees. What a killed process left beside a file's place
is removed as soon as its writer is known to be dead: the file's name has the process and a digest of its machine. Where
the writer is on another machine, it is removed when it is older than an hour, by the file system's own clock; a process
that stood still for so long finds its file gone, and writes it again.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from ejkernel.ops.utils.printable import printable

logger = logging.getLogger(__name__)

LEFT_OVER: Final = 3600.0  # seconds after which a file beside its place is nobody's: to write one takes milliseconds

_BESIDE: Final = re.compile(r"\..*\.(\d+)-([0-9a-f]{8})?[0-9a-f]{8}\.tmp")  # process, machine, and what is random
_NO_SYNC: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # what a file system says that has no such thing
_NO_FOLDER_SYNC: Final = (*_NO_SYNC, errno.EACCES, errno.EPERM, errno.EISDIR)  # one may write where one may not read

_tidied: set[str] = set()  # folders that this process has looked through for what others left


def write_file(file: Path, text: str, *, durable: bool = True) -> None:
    """Write a file beside its place and rename it into it, so that readers see the old text or the new one, whole.

    The first time that this process writes into a folder, it removes what processes that ended half-way left there.

    Args:
        file: The file; folders are made.
        text: What it is to hold.
        durable: Whether to return only when it would survive the end of the machine, where the file system can do that.

    Raises:
        OSError: it cannot be written; what was there before is there still.
    """
    raw = text.encode()
    write_chunks(file, lambda: (raw,), durable=durable)


def write_chunks(file: Path, chunks: Callable[[], Iterable[bytes]], *, durable: bool = True) -> None:
    """Write a file as `write_file` does, of chunks: what is large need not be in memory whole.

    Args:
        file: The file; folders are made.
        chunks: Yields what it is to hold; called again where the first attempt has lost its place.
        durable: See `write_file`.

    Raises:
        OSError: it cannot be written; what was there before is there still.
    """
    try:
        modified = _written(file, chunks(), durable)
    except FileNotFoundError:
        # the folder was removed; or this process stood still for so long that another one took its file for left over
        modified = _written(file, chunks(), durable)
    # By who writes there, since who reads may not be allowed to remove; once, for it lists the folder.
    if (folder := str(file.parent)) not in _tidied:
        _tidied.add(folder)
        remove_left_over(file.parent, modified)


def remove_left_over(folder: Path, now: float) -> int:
    """Remove what processes left in a folder when they were ended while they wrote, and return how many files it was.

    Args:
        folder: The folder; not the ones below it.
        now: The time, by the clock of the file system: that of a file that was written just now.
    """
    try:
        left = [folder / name for name in os.listdir(folder) if _BESIDE.fullmatch(name)]
    except OSError as error:
        logger.info("what others may have left in a folder stays there: %s", printable(error))
        return 0
    return sum(_removed(file, now) for file in left)


def _removed(file: Path, now: float) -> bool:
    try:
        if not _is_writer_dead(file.name) and now - file.lstat().st_mtime <= LEFT_OVER:
            return False
        file.unlink()
    except FileNotFoundError:  # another process does the same
        return False
    except OSError as error:
        logger.info("what another process left stays there: %s", printable(error))
        return False
    return True


def _is_writer_dead(name: str) -> bool:
    """Return whether a file's name says that its writer was a process of this machine which is gone."""
    match = _BESIDE.fullmatch(name)
    if match is None or match[2] != _this_machine():
        return False
    try:
        os.kill(int(match[1]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # another user's
        return False
    return False


@functools.cache
def _this_machine() -> str | None:
    """Return a digest of what numbers processes here: the machine since its start, or a container of it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = os.readlink("/proc/self/ns/pid")
    except (OSError, ValueError):  # nothing is there but on Linux
        return None
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:8]


def _written(file: Path, chunks: Iterable[bytes], durable: bool) -> float:
    """Write a file, and return when it was written, by the clock of the file system."""
    new = _made(file.parent)
    # not tempfile: its files are for their owner alone, and a folder may be shared by a group
    beside = file.with_name(f".{file.name}.{os.getpid()}-{_this_machine() or ''}{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("xb") as stream:
            stream.writelines(chunks)
            stream.flush()
            if durable:
                _sync(stream.fileno(), _NO_SYNC)
            modified = os.fstat(stream.fileno()).st_mtime
        os.replace(beside, file)  # atomic on one file system
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    # The renaming is kept when the folder is; a new folder's own name is in the folder above.
    for folder in (file.parent, *new) if durable else ():
        _sync_folder(folder)
    return modified


def _made(folder: Path) -> list[Path]:
    """Make a folder, and return those in which a new name appeared for that."""
    if folder.is_dir():
        return []
    new = [parent.parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return new


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder kept; what file system has no such thing keeps them when it likes."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        if error.errno in _NO_FOLDER_SYNC:
            return
        raise
    try:
        _sync(descriptor, _NO_FOLDER_SYNC)
    finally:
        os.close(descriptor)


def _sync(descriptor: int, cannot: tuple[int, ...]) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in cannot:
            raise
