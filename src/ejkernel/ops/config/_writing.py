# SPDX-License-Identifier: Apache-2.0
"""Atomic, durable file writes, safe removal, and clean-up after crashes.

A write creates a temporary file in the same folder and renames it into place.

A command such as `ejkernel cache prune` reads an entry, decides, and removes it. A put may replace the file in between,
and no system call removes a file only if it is unchanged. So a put renames its file into place under a shared lock. A
command holds the exclusive lock while it compares the file with the content that it judged, and removes or replaces
it. Readers take no lock. On file systems where the lock does not reach other machines, a removal renames the file
aside, compares it again, and restores it if it has changed. The lock is `flock` on the cache folder itself, so no lock
file is needed. The operating system releases it when the process ends, even after a crash.

A durable write takes milliseconds, little compared with a search. The temporary file of a killed process is removed
when it is older than an hour by the file system's clock. A writer that was suspended for longer finds its temporary
file gone and writes it again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from ejkernel.ops.config._files import UnusableError, check_inside, read_file
from ejkernel.ops.utils.error_text import printable

logger = logging.getLogger(__name__)

LEFT_OVER: Final = 3600.0  # seconds after which a temporary file is abandoned; a write takes milliseconds

_BESIDE: Final = re.compile(r"\..*\.(\d+)-([0-9a-f]{8}){1,2}\.tmp")  # process and random digits
_NO_SYNC: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # errors of file systems without fsync
_NO_FOLDER_SYNC: Final = (*_NO_SYNC, errno.EACCES, errno.EPERM, errno.EISDIR)  # a writable folder may be unreadable

_COMPARED: Final = 64 << 20  # files up to this many bytes are compared by content, others by inode, size and time
_ASIDE: Final = re.compile(r"\.(.+)\.\d+-[0-9a-f]{8}\.aside")
_ATTEMPTS: Final = 8  # attempts of a write, while `ejkernel cache clear` removes empty folders

Seen = tuple[object, ...]  # see `seen`

_cleaned: set[str] = set()  # folders that this process has cleaned of abandoned temporary files


def write_file(file: Path, content: str | bytes, *, durable: bool = True, root: Path | None = None) -> None:
    """Write a file atomically: readers see the complete old content or the complete new content.

    The first write of this process into a folder also removes abandoned temporary files there.

    Args:
        file: The file; missing folders are created.
        content: The new content.
        durable: Whether to sync to disk before returning, so that the file survives a power failure.
        root: The cache folder, if the file belongs to a cache. No folder between the two may be a link, and the write
            takes the shared lock, so that no command removes the new file by mistake.

    Raises:
        OSError: The file cannot be written; its old content is unchanged.
    """
    raw = content.encode() if isinstance(content, str) else content
    write_chunks(file, lambda: (raw,), durable=durable, root=root)


def write_chunks(
    file: Path, chunks: Callable[[], Iterable[bytes]], *, durable: bool = True, root: Path | None = None
) -> None:
    """Write a file in chunks, like `write_file`; a large file need not fit in memory.

    Args:
        file: The file; missing folders are created.
        chunks: Returns the new content in chunks; called again for each attempt.
        durable: See `write_file`.
        root: See `write_file`.

    Raises:
        OSError: The file cannot be written; its old content is unchanged.
    """
    placing = contextlib.nullcontext if root is None else functools.partial(shared, root)
    _retried(lambda: _write({file: chunks()}, root, placing, durable=durable))
    # Done by writers, since readers may lack permission to remove; once per folder, since it lists the folder.
    if (folder := str(file.parent)) not in _cleaned:
        _cleaned.add(folder)
        remove_abandoned(file.parent)


def replace_judged(texts: Mapping[Path, str], root: Path, check: Callable[[], object]) -> None:
    """Write files of a cache, all or none, if the existing files have not changed since they were judged.

    Args:
        texts: The new content of each file.
        root: The cache folder.
        check: Called under the exclusive lock before the renames; raises if an existing file has changed.

    Raises:
        OSError: The files cannot be written.
    """

    @contextlib.contextmanager
    def placing() -> Iterator[None]:
        with exclusive(root):
            check()
            yield

    chunks = {file: (text.encode(),) for file, text in texts.items()}
    _retried(lambda: _write(chunks, root, placing, durable=True))


def keep_elsewhere(folder: Path | None, parts: tuple[str, ...], text: str) -> Path | None:
    """Write a file that a cache folder does not take to a temporary folder; return it, or `None` without any.

    Args:
        folder: The temporary folder; `None` creates one.
        parts: The path of the file in the cache folder, and in the temporary one.
        text: Its content.
    """
    made = None
    try:
        place = folder or (made := _new_folder())
        write_file(place.joinpath(*parts), text, root=place)
    except OSError as error:
        # Without any such folder, the caller warns that results stay in this process.
        level = logging.INFO if folder is None else logging.WARNING
        logger.log(level, "a result is not kept in a temporary folder either: %s", printable(error))
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        return folder
    return place


def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="ejkernel-"))  # only its owner may read it


def _retried(write: Callable[[], None]) -> None:
    """Repeat a write whose folder or temporary file another process has removed.

    Another process removes the temporary file as abandoned if this process was suspended for a long time.
    """
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(FileNotFoundError):
            write()
            return
    write()


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of killed processes from a folder, but not from its subfolders.

    The time of the folder's last change is the current time by the file system's clock: a file was just renamed in it.
    """
    try:
        now = folder.stat().st_mtime
        left = [folder / name for name in os.listdir(folder) if _BESIDE.fullmatch(name)]
    except OSError as error:
        logger.info("a folder cannot be searched for abandoned temporary files: %s", printable(error))
        return
    for file in left:
        try:
            if now - file.lstat().st_mtime > LEFT_OVER:
                file.unlink()
        except FileNotFoundError:  # another process has removed it
            continue
        except OSError as error:
            logger.info("an abandoned temporary file cannot be removed: %s", printable(error))


def is_being_written(name: str) -> bool:
    """Return whether a file name is the temporary name of a write by a process now running on this machine."""
    match = _BESIDE.fullmatch(name)
    if match is None or os.name != "posix":
        return match is not None
    try:
        os.kill(int(match[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        return True
    return True


def _write(
    files: Mapping[Path, Iterable[bytes]],
    root: Path | None,
    placing: Callable[[], AbstractContextManager[object]],
    *,
    durable: bool,
) -> None:
    """Write temporary files, and rename them inside `placing`."""
    changed: list[Path] = []  # the folders that get a new name: those of the files, and parents of created folders
    with contextlib.ExitStack() as stack:
        ready = {}
        for file, chunks in files.items():
            if root is not None:
                check_inside(root, file)
            changed += [file.parent, *_made(file.parent)]
            ready[file] = stack.enter_context(_beside(file, chunks, durable))
        with placing():
            for file, beside in ready.items():
                os.replace(beside, file)  # atomic on one file system
    # Syncing a folder makes a rename in it durable; the name of a new folder is stored in its parent.
    for folder in dict.fromkeys(changed) if durable else ():
        _sync_folder(folder)


@contextlib.contextmanager
def _beside(file: Path, chunks: Iterable[bytes], durable: bool) -> Iterator[Path]:
    """Write the temporary file for a `with` block, which renames it."""
    # Not `tempfile`: only the owner can read its files, but a group may share the folder.
    beside = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("xb") as stream:
            stream.writelines(chunks)
            stream.flush()
            if durable:
                _sync(stream.fileno(), _NO_SYNC)
        yield beside
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _made(folder: Path) -> list[Path]:
    """Create a folder and return the parents of all created folders."""
    if folder.is_dir():
        return []
    new = [parent.parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return new


def _sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk, if the file system supports it."""
    descriptor = _opened_folder(folder, _NO_FOLDER_SYNC)
    if descriptor is None:
        return
    try:
        _sync(descriptor, _NO_FOLDER_SYNC)
    finally:
        os.close(descriptor)


def _opened_folder(folder: Path, cannot: tuple[int, ...]) -> int | None:
    """Return a descriptor of a folder; `None` if opening it fails with one of these errors."""
    try:
        return os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError as error:
        if error.errno in cannot:
            return None
        raise


def _sync(descriptor: int, cannot: tuple[int, ...]) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in cannot:
            raise


# --- removing ---


def seen(root: Path, file: Path) -> Seen | None:
    """Return a value that identifies a file's content, for a later comparison; `None` if the file does not exist.

    Args:
        root: The cache folder.
        file: A file in it.

    Raises:
        OSError: A folder between the two is a link, or the file's status cannot be read.
    """
    check_inside(root, file)
    try:
        raw = read_file(file, _COMPARED)
    except UnusableError:  # not a regular file, too large, or unreadable for this user
        status = os.lstat(file)
        return ("status", stat.S_IFMT(status.st_mode), status.st_ino, status.st_size, status.st_mtime_ns)
    return None if raw is None else ("content", hashlib.sha256(raw).digest())


def remove_judged(root: Path, file: Path, judged: Seen | None) -> bool:
    """Remove a file if it has not changed since it was judged; return whether it is gone.

    Args:
        root: The cache folder.
        file: A file in it.
        judged: The result of `seen` before the file was judged.

    Raises:
        OSError: The file cannot be removed, or the lock cannot be acquired.
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
    """Restore the files that a killed command had renamed aside.

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
    """Give a file its old name, unless a newer file has that name."""
    try:
        os.link(aside, file, follow_symlinks=False)
    except FileExistsError:  # written after the old file was renamed aside
        pass
    except OSError as error:  # a folder, or a file system without hard links
        logger.info("%s is restored by a rename, since it cannot be linked: %s", printable(file), printable(error))
        if not os.path.lexists(file):
            os.rename(aside, file)
            return
    aside.unlink(missing_ok=True)


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


def shared(root: Path) -> AbstractContextManager[None]:
    """Hold the shared lock for a `with` block. Does nothing if the file system has no locks.

    Raises:
        LockedError: Another process has held the exclusive lock for `PATIENCE` seconds.
    """
    return _held(root, is_shared=True)


def exclusive(root: Path) -> AbstractContextManager[None]:
    """Hold the exclusive lock for a `with` block. Does nothing if the file system has no locks.

    Raises:
        LockedError: Other processes have held the lock for `PATIENCE` seconds.
    """
    return _held(root, is_shared=False)


@contextlib.contextmanager
def _held(root: Path, *, is_shared: bool) -> Iterator[None]:
    descriptor = None if fcntl is None else _opened_folder(root, _NO_FOLDER)
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
