# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole: beside their place first, kept when the machine stops, and tidied up after a crash.

A command such as `ejkernel cache prune` reads an entry, decides, and removes it; a put may replace the file in between,
and no system call removes a file only if it is unchanged. So a put renames its file into place under a shared lock, and
a command compares the file with the one that it judged, and removes or replaces it, under the exclusive lock. Readers
take no lock. Where the lock does not reach other machines, a removal renames the file aside, compares it once more, and
puts it back if it is another one.

A durable write takes milliseconds, which after a search nobody sees. What a killed process left beside a file's place
is removed as soon as its writer is known to be dead: the file's name has the process and a digest of its machine. Where
the writer is on another machine, it is removed when it is older than an hour, by the file system's own clock; a process
that stood still for so long finds its file gone, and writes it again.
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
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

from ejkernel.ops.config._files import UnusableError, check_inside, read_file
from ejkernel.ops.utils.printable import printable
from ejkernel.ops.utils.storage.folder_lock import exclusive, shared

logger = logging.getLogger(__name__)

LEFT_OVER: Final = 3600.0  # seconds after which a file beside its place is nobody's: to write one takes milliseconds

_BESIDE: Final = re.compile(r"\..*\.(\d+)-([0-9a-f]{8})?[0-9a-f]{8}\.tmp")  # process, machine, and what is random
_NO_SYNC: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # what a file system says that has no such thing
_NO_FOLDER_SYNC: Final = (*_NO_SYNC, errno.EACCES, errno.EPERM, errno.EISDIR)  # one may write where one may not read

_COMPARED: Final = 64 << 20  # bytes of a file whose content is compared; of a larger one, inode, size and time
_ASIDE: Final = re.compile(r"\.(.+)\.\d+-[0-9a-f]{8}\.aside")
_ATTEMPTS: Final = 8  # of a write, while `ejkernel cache clear` removes empty folders

Seen = tuple[object, ...]  # see `seen`

_tidied: set[str] = set()  # folders that this process has looked through for what others left


def write_file(file: Path, text: str, *, durable: bool = True, root: Path | None = None) -> None:
    """Write a file beside its place and rename it into it, so that readers see the old text or the new one, whole.

    The first time that this process writes into a folder, it removes what processes that ended half-way left there.

    Args:
        file: The file; folders are made.
        text: What it is to hold.
        durable: Whether to return only when it would survive the end of the machine, where the file system can do that.
        root: The cache folder, if the file is one of a cache: no folder between the two may be a link, and no command
            removes the file unseen.

    Raises:
        OSError: it cannot be written; what was there before is there still.
    """
    raw = text.encode()
    write_chunks(file, lambda: (raw,), durable=durable, root=root)


def write_chunks(
    file: Path, chunks: Callable[[], Iterable[bytes]], *, durable: bool = True, root: Path | None = None
) -> None:
    """Write a file as `write_file` does, of chunks: what is large need not be in memory whole.

    Args:
        file: The file; folders are made.
        chunks: Yields what it is to hold; called again where the first attempt has lost its place.
        durable: See `write_file`.
        root: See `write_file`.

    Raises:
        OSError: it cannot be written; what was there before is there still.
    """
    placing = contextlib.nullcontext if root is None else functools.partial(shared, root)
    modified = _retried(lambda: _written({file: chunks}, root, placing, durable=durable))
    # By who writes there, since who reads may not be allowed to remove; once, for it lists the folder.
    if (folder := str(file.parent)) not in _tidied:
        _tidied.add(folder)
        remove_left_over(file.parent, modified)


def replace_judged(texts: Mapping[Path, str], root: Path, check: Callable[[], object]) -> None:
    """Write files of a cache, all of them or none, if what is there still is what was judged.

    Args:
        texts: What each file is to hold.
        root: The cache folder.
        check: Called under the exclusive lock, before the files are renamed into place; raises if something changed.

    Raises:
        OSError: they cannot be written.
    """

    @contextlib.contextmanager
    def placing() -> Iterator[None]:
        with exclusive(root):
            check()
            yield

    raw = {file: (text.encode(),) for file, text in texts.items()}
    chunks = {file: (lambda parts=parts: parts) for file, parts in raw.items()}
    _retried(lambda: _written(chunks, root, placing, durable=True))


def _retried(write: Callable[[], float]) -> float:
    """Write again where the folder was removed, or the file beside its place.

    Another process takes the file for left over if this one stood still for long.
    """
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(FileNotFoundError):
            return write()
    return write()


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


def is_being_written(name: str) -> bool:
    """Return whether a file's name is that of a write by a process that runs on this machine."""
    match = _BESIDE.fullmatch(name)
    if match is None or os.name != "posix":
        return match is not None
    return _runs(int(match[1]))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


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
    return match is not None and match[2] == _this_machine() is not None and not _runs(int(match[1]))


@functools.cache
def _this_machine() -> str | None:
    """Return a digest of what numbers processes here: the machine since its start, or a container of it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = os.readlink("/proc/self/ns/pid")
    except (OSError, ValueError):  # nothing is there but on Linux
        return None
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:8]


class _Ready(NamedTuple):
    """A file that was written beside its place."""

    beside: Path
    file: Path
    modified: float  # by the clock of the file system
    folders: list[Path]  # those in which a new name appeared, or will


def _written(
    files: Mapping[Path, Callable[[], Iterable[bytes]]],
    root: Path | None,
    placing: Callable[[], AbstractContextManager[object]],
    *,
    durable: bool,
) -> float:
    """Write files, rename them into place in the block of `placing`, and return when the last one was written."""
    with contextlib.ExitStack() as stack:
        ready = [stack.enter_context(_beside(file, chunks(), root, durable)) for file, chunks in files.items()]
        with placing():
            for each in ready:
                os.replace(each.beside, each.file)  # atomic on one file system
    # The renaming is kept when the folder is; a new folder's own name is in the folder above.
    for folder in dict.fromkeys(folder for each in ready for folder in each.folders) if durable else ():
        _sync_folder(folder)
    return ready[-1].modified


@contextlib.contextmanager
def _beside(file: Path, chunks: Iterable[bytes], root: Path | None, durable: bool) -> Iterator[_Ready]:
    """Write a file beside its place, for the `with` block, which renames it."""
    if root is not None:
        check_inside(root, file)
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
        yield _Ready(beside, file, modified, [file.parent, *new])
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


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


# --- removing ---


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
