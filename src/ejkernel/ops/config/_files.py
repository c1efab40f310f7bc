# SPDX-License-Identifier: Apache-2.0
"""Where a key's files are kept, and how they are read; what was measured with what."""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import hashlib
import json
import os
import platform
import re
import stat
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import CacheWarning, ConfigError, EjkernelError
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.storage.serialize import stable_json

ENTRY: Final = ".json"  # how the name of an entry ends; whatever else lies beside it ends otherwise
_KEY: Final = frozenset(ConfigKey._fields)
_SLUG_LENGTH: Final = 48
_NO_SLUG: Final = "_"
_NOT_IN_PATHS: Final = re.compile(r"[^a-z0-9._-]+")
# Without waiting, and without making a terminal this process's: what lies in a file's place may be a device.
_READ: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0)
_URL: Final = re.compile(r"([a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*://.*", re.IGNORECASE | re.DOTALL)
_NVIDIA_VERSION: Final = Path("/proc/driver/nvidia/version")

_quoted: Final = json.encoder.encode_basestring_ascii
_warned: set[str] = set()  # files this process has warned of already


class UnusableError(EjkernelError):
    """An entry cannot be used, for the reason in the message."""


class Place(NamedTuple):
    """Something in a folder."""

    name: str
    where: Traversable | str


def location(key: object) -> tuple[str, str, str]:
    """Return folder, folder and file name of a key: readable, and unique through the digest of the whole key."""
    text = identity(key)
    device, op, call = key if isinstance(key, ConfigKey) else ("", "", text)
    return _known_slug(device), _known_slug(op), file_name(call, text)


def file_name(call: str, text: str) -> str:
    """Return the name of the file of the key whose `identity` is `text`."""
    return f"{slug(call)}-{hashlib.sha256(text.encode()).hexdigest()[:8]}{ENTRY}"


def identity(key: object) -> str:
    """Return the canonical JSON of a key, as `stable_json` does, but sooner where the key is a usual one."""
    if isinstance(key, ConfigKey):
        device, op, call = key
        if type(device) is type(op) is type(call) is str and device.isascii() and op.isascii() and call.isascii():
            return f'{{"call":{_quoted(call)},"device":{_quoted(device)},"op":{_quoted(op)}}}'
    return stable_json(key)


def is_url(place: object) -> TypeGuard[str]:
    """Return whether a place is named by a URL, rather than by a path."""
    return isinstance(place, str) and _URL.fullmatch(place) is not None


def expanded(name: str) -> Path:
    """Return the path of that name, which may begin with `~`.

    Raises:
        ConfigError: nobody knows the home folder that it begins with.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"there is no home folder that {name!r} could begin with; write the whole path.") from error


def slug(text: str) -> str:
    """Return a text as a part of a path: lower case, short, and without what a file system minds."""
    # Lower case, because some file systems do not tell the cases apart; unique through the digest in the file's name.
    return _NOT_IN_PATHS.sub("-", text.lower())[:_SLUG_LENGTH].strip(".-") or _NO_SLUG


_known_slug: Final = functools.lru_cache(maxsize=256)(slug)  # a process has few devices and operations


def restored_key(data: object) -> Any:
    """Return the key that was stored as `data`."""
    if isinstance(data, dict) and data.keys() == _KEY:
        device, op, call = data["device"], data["op"], data["call"]
        if type(device) is type(op) is type(call) is str:
            return ConfigKey(device, op, call)
    return _frozen(data)


def _frozen(data: object) -> Any:
    return tuple(_frozen(item) for item in data) if isinstance(data, list) else data


# --- reading ---


def check_inside(root: str | Path, file: str | Path) -> None:
    """Raise if a folder between a cache's folder and one of its files is a link, which would lead out of the cache.

    Only links that are there are seen, not those that another process makes a moment later. The cache's folder itself,
    and those above it, may be links.

    Raises:
        OSError: one is a link.
    """
    folder = str(root)
    for part in str(file)[len(folder) :].strip(os.sep).split(os.sep)[:-1]:
        folder = os.path.join(folder, part)
        if os.path.islink(folder):
            raise OSError(errno.ELOOP, "this folder is a link, and links inside a cache are not followed", folder)


def files(folder: Path, suffix: str) -> Iterator[Path]:
    """Yield the files of a cache's folder whose names end with `suffix`, sorted."""
    return (Path(str(place.where)) for place in places(folder, suffix))


def places(folder: Traversable, suffix: str, is_wanted: Callable[[str], bool] | None = None) -> Iterator[Place]:
    """Yield where such files are, sooner than `files`; `is_wanted` is asked about operations' folders, by name.

    Folders that are links are left out.
    """
    for device in listed(folder):
        for op in () if _is_link(device) else listed(device.where):
            if (is_wanted is None or is_wanted(op.name)) and not _is_link(op):
                yield from (f for f in listed(op.where) if f.name.endswith(suffix) and not f.name.startswith("."))


def _is_link(place: Place) -> bool:
    return isinstance(place.where, (str, Path)) and os.path.islink(place.where)


def listed(folder: Traversable | str) -> list[Place]:
    """Return what is in a folder, sorted; nothing if there is none, or if it cannot be read, with a warning."""
    try:
        if isinstance(folder, (str, Path)):  # in text: of 100,000 paths the objects would take most of the time
            begin = f"{folder}{os.sep}"
            return [Place(name, begin + name) for name in sorted(os.listdir(folder))]
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted((Place(item.name, item) for item in found), key=lambda place: place.name)
    except (FileNotFoundError, NotADirectoryError):  # removed since, or a file of somebody's
        return []
    except OSError as error:
        warn_of(str(folder), error)
        return []


def read_file(file: Traversable | str, largest: int, *, follow_links: bool = False) -> bytes | None:
    """Return what a file holds, or `None` if there is no file; whatever else is there, this does not wait for it.

    Args:
        file: The file.
        largest: How many bytes it may have.
        follow_links: Whether it may be a link.

    Raises:
        UnusableError: it cannot be read, is a link or no regular file, or has more than `largest` bytes.
    """
    try:
        if isinstance(file, (str, Path)):
            raw = _read_path(file, largest, follow_links=follow_links)
        else:
            raw = _read_other(file, largest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UnusableError(f"it cannot be read: {error}") from error
    if len(raw) > largest:
        raise UnusableError(f"it has more than {largest} bytes")
    return raw


@contextlib.contextmanager
def opened(path: str | Path, *, follow_links: bool = False) -> Iterator[tuple[int, int]]:
    """Open a file to read it, for the `with` block; whatever else is there, this does not wait for it.

    Args:
        path: The file.
        follow_links: Whether it may be a link.

    Yields:
        Its descriptor and its size.

    Raises:
        OSError: it cannot be opened.
        UnusableError: it is a link, or no regular file.
    """
    try:
        descriptor = os.open(path, _READ if follow_links else _READ | _NO_LINK)  # a pipe would be waited for otherwise
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise UnusableError(
                "it cannot be read: it is no regular file, but a link, which is not followed"
            ) from error
        raise
    try:
        # Of what was opened; a name could stand for something else a moment later.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnusableError("it cannot be read: it is no regular file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def _read_path(path: str | Path, largest: int, *, follow_links: bool) -> bytes:
    with opened(path, follow_links=follow_links) as (descriptor, size):
        if size > largest:
            raise UnusableError(f"it has more than {largest} bytes")
        raw = os.read(descriptor, size + 1)
        while len(raw) <= largest and len(raw) != size:  # a file system that is read piece by piece, or grew
            chunk = os.read(descriptor, largest + 1 - len(raw))
            if not chunk:
                break
            raw += chunk
        return raw


def _read_other(file: Traversable, largest: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(largest + 1)


def warn_of(place: str, reason: Exception) -> None:
    """Warn, once a place, that what is there is ignored."""
    warn_once(place, f"ignoring cache entry {place}: {reason}")


def warn_once(place: str, text: str) -> None:
    """Warn of a place, unless this process has done so."""
    if place not in _warned:
        _warned.add(place)
        warn(text, CacheWarning)


def forget_warning(file: Path) -> None:
    """Let the next bad content of this file be warned of again."""
    _warned.discard(str(file))


def provenance(key: object, time: datetime.datetime) -> dict[str, Any]:
    """Return what was measured with what, and when."""
    device = key.device if isinstance(key, ConfigKey) else None
    return {
        "device": device,
        "driver": driver_of(device),
        "ejkernel": version("ejkernel-ops"),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "python": platform.python_version(),
        "time": time.astimezone(datetime.UTC).isoformat(timespec="seconds"),
    }


def now() -> datetime.datetime:
    """Return the time."""
    return datetime.datetime.now(datetime.UTC)


@functools.cache
def version(distribution: str) -> str | None:
    """Return the version of a distribution that is installed here; `None` for a source tree on the path."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def driver_of(device: str | None) -> str | None:
    """Return the version of the driver that a device has here; `None` if it needs none, or none is known."""
    return _driver() if device is not None and device.startswith("gpu") else None


@functools.cache
def _driver() -> str | None:
    """Return the version of the NVIDIA driver, from its own file: asking JAX would initialise the device."""
    try:
        text = _NVIDIA_VERSION.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\b\d{3}(\.\d+)+\b", text)
    return None if match is None else match.group()
