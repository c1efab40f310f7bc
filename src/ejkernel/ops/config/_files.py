# SPDX-License-Identifier: Apache-2.0
"""Paths of a key's files, reading files safely, and the provenance of a measurement."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import json
import os
import platform
import re
import stat
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeGuard, TypeVar, cast

from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import CacheWarning, ConfigError, EjkernelError, SerializationError
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.storage.serialize import describe, digest_of, from_plain, read_object

ENTRY: Final = ".json"  # suffix of an entry's file; no other file beside it has this suffix
_KEY: Final = frozenset(ConfigKey._fields)
_SLUG_LENGTH: Final = 48
_NO_SLUG: Final = "_"
_NOT_IN_PATHS: Final = re.compile(r"[^a-z0-9._-]+")
# A device may lie at the file's path: do not block, and do not let a terminal control this process.
_READ: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0)
_URL: Final = re.compile(r"([a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*://.*", re.IGNORECASE | re.DOTALL)
_NVIDIA_VERSION: Final = Path("/proc/driver/nvidia/version")

_quoted: Final = json.encoder.encode_basestring_ascii
_warned: set[str] = set()  # files and places that this process has warned about


class UnusableError(EjkernelError):
    """An entry cannot be used; the message has the reason."""


class ClosedFolderError(UnusableError):
    """A folder above an entry may not be searched, so it is unknown whether the entry exists."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.folder = folder

    def __str__(self) -> str:
        return (
            f"the cache folder {self.folder} may not be read by this user, so its configurations are not used; change "
            "its permissions, or choose another folder."
        )


@contextlib.contextmanager
def or_unusable() -> Iterator[None]:
    """Raise `UnusableError` instead of `SerializationError`; also a decorator."""
    try:
        yield
    except SerializationError as error:
        raise UnusableError(str(error)) from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """The first fields of a file about one call.

    Attributes:
        schema: Version of the file's layout.
        key: Device, operation and call.
        call: The abstract call, from `Invocation.description`.
    """

    schema: int
    key: dict[str, str]
    call: dict[str, Any]

    @property
    def config_key(self) -> ConfigKey:
        """The key of the call's configuration."""
        return ConfigKey(**self.key)


RecordT = TypeVar("RecordT", bound=CallRecord)


class CallFiles(Generic[RecordT]):
    """Files in a folder beside the entries of a cache, one for each call. Files that cannot be used are skipped.

    Attributes:
        cache_dir: The folder of the persistent cache.
        record: Type of the files' content.
        name: Name of the folder.
        schema: Version of the files' layout.
        largest: Most bytes of a file.
        called, what: Words for a file in messages.
    """

    record: ClassVar[type[CallRecord]]
    name: ClassVar[str]
    schema: ClassVar[int]
    largest: ClassVar[int]
    called: ClassVar[str]
    what: ClassVar[str]

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.cache_dir / self.name

    def file_of(self, key: ConfigKey) -> Path:
        """Return the file of a call."""
        return self.folder.joinpath(*location(key))

    def files(self) -> list[Path]:
        """Return all files, sorted by device, operation and call."""
        return [] if os.path.islink(self.folder) else list(files(self.folder, ENTRY))

    @or_unusable()
    def read(self, file: Path) -> RecordT | None:
        """Return the record of a file; `None` if it is gone.

        Raises:
            UnusableError: It cannot be used.
        """
        raw = read_file(file, self.largest, root=self.cache_dir)
        if raw is None:
            return None
        found = cast(RecordT, from_plain(read_object(raw, self.schema, self.what), self.record))
        # With a wrong file name, tuning or removing the call would change the file of another one.
        if set(found.key) != _KEY or self.file_of(found.config_key) != file:
            raise UnusableError(f"it holds another key: {describe(found.key)}")
        self.check(found)
        return found

    def check(self, found: RecordT) -> None:
        """Raise `UnusableError` if a record has impossible values."""

    def usable(self, file: Path) -> RecordT | None:
        """Return the record of a file; `None` if it is gone, or with a `CacheWarning` if it cannot be used."""
        try:
            return self.read(file)
        except UnusableError as error:
            warn(f"ignoring {self.called} {file}: {error}", CacheWarning)
            return None


def location(key: ConfigKey) -> tuple[str, str, str]:
    """Return the two folder names and the file name of a key. A digest of the whole key makes the path unique."""
    return _known_slug(key.device), _known_slug(key.op), f"{slug(key.call)}-{digest_of(key_text(key), 8)}{ENTRY}"


def key_text(key: ConfigKey) -> str:
    """Return a key as canonical JSON: as `stable_json` does, but faster."""
    return f'{{"call":{_quoted(key.call)},"device":{_quoted(key.device)},"op":{_quoted(key.op)}}}'


def is_url(place: object) -> TypeGuard[str]:
    """Return whether the name of a place is a URL, rather than a path."""
    return isinstance(place, str) and _URL.fullmatch(place) is not None


def expanded(name: str) -> Path:
    """Return the path with this name, which may begin with `~`.

    Raises:
        ConfigError: The home folder cannot be determined.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"the home folder in {name!r} cannot be determined; write the whole path.") from error


def slug(text: str) -> str:
    """Return a text as a part of a path: short, in lower case, with only `a-z0-9._-`."""
    # Lower case, because some file systems ignore case. Collisions are harmless: the file name has a digest.
    return _NOT_IN_PATHS.sub("-", text.lower())[:_SLUG_LENGTH].strip(".-") or _NO_SLUG


_known_slug: Final = functools.lru_cache(maxsize=256)(slug)  # a process has few devices and operations


# --- reading ---


def check_inside(root: str | Path, file: str | Path) -> None:
    """Check that no folder between a cache's folder and one of its files is a link, which would lead out of the cache.

    A link that another process creates after this check is not detected. The cache's folder and the folders above it
    may be links.

    Raises:
        OSError: A folder is a link.
    """
    folder = str(root)
    for part in str(file)[len(folder) :].strip(os.sep).split(os.sep)[:-1]:
        folder = os.path.join(folder, part)
        if os.path.islink(folder):
            raise OSError(errno.ELOOP, "this folder is a link, and links inside a cache are not followed", folder)


def files(folder: Path, suffix: str) -> Iterator[Path]:
    """Yield the files with `suffix` in a cache's folder, sorted."""
    return (Path(place) for place in places(folder, suffix))


def places(folder: Path, suffix: str, is_wanted: Callable[[str], bool] | None = None) -> Iterator[os.DirEntry[str]]:
    """Yield the same files as `files`, faster; `is_wanted` receives the names of operations' folders and filters them.

    Folders that are links are skipped.
    """
    for device in listed(folder):
        # Not `is_symlink()`: on file systems that list no types, it raises if a folder cannot be searched any more.
        for op in () if os.path.islink(device) else listed(device):
            if (is_wanted is None or is_wanted(op.name)) and not os.path.islink(op):
                yield from (f for f in listed(op) if f.name.endswith(suffix) and not f.name.startswith("."))


def listed(folder: os.PathLike[str]) -> list[os.DirEntry[str]]:
    """Return the items of a folder, sorted: none if it does not exist; none and a warning if it cannot be read."""
    try:
        with os.scandir(folder) as items:  # for 100,000 entries, creating Path objects dominates the time
            return sorted(items, key=lambda item: item.name)
    except (FileNotFoundError, NotADirectoryError):  # removed since, or a file
        return []
    except OSError as error:
        name = os.fspath(folder)
        warn_once(name, f"the folder {name} cannot be listed, so its files are ignored: {error.strerror}")
        return []


def read_file(
    file: str | Path, largest: int, *, root: str | Path | None = None, follow_links: bool = False
) -> bytes | None:
    """Return the content of a file, or `None` if it does not exist. Never blocks, e.g. on a pipe.

    Args:
        file: The file.
        largest: The largest accepted size in bytes.
        root: The cache folder, to check that no folder between root and file is a link.
        follow_links: Whether the file may be a link.

    Raises:
        UnusableError: The file cannot be read, is a link or no regular file, or has more than `largest` bytes.
    """
    try:
        if root is not None:
            check_inside(root, file)
        with opened(file, follow_links=follow_links) as (descriptor, size):
            raw = os.read(descriptor, min(size, largest) + 1)
            while len(raw) != size and len(raw) <= largest:  # the file system returns short reads, or the file grew
                chunk = os.read(descriptor, largest + 1 - len(raw))
                if not chunk:
                    break
                raw += chunk
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        closed = _closed_above(file) if isinstance(error, PermissionError) else ""
        raise (ClosedFolderError(closed) if closed else UnusableError(f"it cannot be read: {error}")) from error
    if len(raw) > largest:
        raise UnusableError(f"it has more than {largest} bytes")
    return raw


def _closed_above(file: str | Path) -> str:
    """Return the first folder above a file that this process may not search; empty without one."""
    return next((str(folder) for folder in reversed(Path(file).parents) if not os.access(folder, os.X_OK)), "")


@contextlib.contextmanager
def opened(path: str | Path, *, follow_links: bool = False) -> Iterator[tuple[int, int]]:
    """Open a file for reading in a `with` block. Never blocks, e.g. on a pipe.

    Args:
        path: The file.
        follow_links: Whether the file may be a link.

    Yields:
        The descriptor and the size of the file.

    Raises:
        OSError: The file cannot be opened.
        UnusableError: The file is a link, or no regular file.
    """
    try:
        descriptor = os.open(path, _READ if follow_links else _READ | _NO_LINK)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise UnusableError("it cannot be read: it is not a regular file but a link") from error
        raise
    try:
        # Check the open descriptor, since another file may get this name at any time.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnusableError("it cannot be read: it is not a regular file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def warn_of(place: str, reason: Exception, remedy: str = "") -> None:
    """Warn, once per place, that its entry is ignored, or that a folder above it is closed."""
    if isinstance(reason, ClosedFolderError):
        warn_once(reason.folder, str(reason))
        return
    warn_once(place, f"ignoring cache entry {place}: {reason}{remedy}")


def warn_once(place: str, text: str) -> None:
    """Emit a `CacheWarning` about a place, once per process."""
    if place not in _warned:
        _warned.add(place)
        warn(text, CacheWarning)


def forget_warning(file: Path) -> None:
    """Let the next problem of this file cause a warning again."""
    _warned.discard(str(file))


def provenance(key: ConfigKey, time: datetime.datetime) -> dict[str, Any]:
    """Return the provenance of a measurement: device, versions and time."""
    return {
        "device": key.device,
        "driver": driver_of(key.device),
        "ejkernel": version("ejkernel-ops"),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "python": platform.python_version(),
        "time": time.astimezone(datetime.UTC).isoformat(timespec="seconds"),
    }


def now() -> datetime.datetime:
    """Return the current time."""
    return datetime.datetime.now(datetime.UTC)


@functools.cache
def version(distribution: str) -> str | None:
    """Return the version of an installed distribution; `None` for a source tree on the path."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def driver_of(device: str) -> str | None:
    """Return the version of a device's driver on this machine; `None` if it needs none or the version is unknown."""
    return _driver() if device.startswith("gpu") else None


@functools.cache
def _driver() -> str | None:
    """Return the version of the NVIDIA driver from `/proc`; asking JAX would initialise the device."""
    try:
        text = _NVIDIA_VERSION.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\b\d{3}(\.\d+)+\b", text)
    return None if match is None else match.group()
