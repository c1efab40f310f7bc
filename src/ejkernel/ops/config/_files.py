# SPDX-License-Identifier: Apache-2.0
"""Where a key's files are kept, and how they are read and replaced; what was measured with what."""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import platform
import re
import secrets
import warnings
from collections.abc import Iterator
from importlib import metadata
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import CacheWarning
from ejkernel.ops.utils.serialize import stable_json

ENTRY: Final = ".json"  # how the name of an entry ends; whatever else lies beside it ends otherwise
_SLUG_LENGTH: Final = 48
_NO_SLUG: Final = "_"
_NVIDIA_VERSION: Final = Path("/proc/driver/nvidia/version")

_warned: set[str] = set()  # files this process has warned of already


class UnusableError(Exception):
    """An entry cannot be used, for the reason in the message."""


def location(key: Any) -> tuple[str, str, str]:
    """Return folder, folder and file name of a key: readable, and unique through the digest of the whole key."""
    text = stable_json(key)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    device, op, call = key if isinstance(key, ConfigKey) else ("", "", text)
    return slug(device), slug(op), f"{slug(call)}-{digest}{ENTRY}"


def slug(text: str) -> str:
    """Return a text as a part of a path: lower case, short, and without what a file system minds."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower())[:_SLUG_LENGTH].strip(".-") or _NO_SLUG


def restored_key(data: Any) -> Any:
    """Return the key that was stored as `data`."""
    if (
        isinstance(data, dict)
        and set(data) == set(ConfigKey._fields)
        and all(isinstance(v, str) for v in data.values())
    ):
        return ConfigKey(**data)
    return _frozen(data)


def _frozen(data: Any) -> Any:
    return tuple(_frozen(item) for item in data) if isinstance(data, list) else data


def write_file(file: Path, text: str) -> None:
    """Write a file beside its place and rename it into it, so that readers see the old text or the new one, whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # not tempfile: its files are for their owner alone, and a folder may be shared by a group
    beside = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("x", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        os.replace(beside, file)  # atomic on one file system
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def files(folder: Traversable, suffix: str, prefix: str = "") -> Iterator[Traversable]:
    """Yield the files whose names end with `suffix`, of operations whose folders' names begin with `prefix`."""
    for device in listed(folder):
        for op in (op for op in listed(device) if op.name.startswith(prefix)):
            yield from (file for file in listed(op) if file.name.endswith(suffix) and not file.name.startswith("."))


def listed(folder: Traversable) -> list[Traversable]:
    """Return what is in a folder, sorted by name; nothing if there is none, or if it cannot be read, with a warning."""
    try:
        return sorted(folder.iterdir(), key=lambda item: item.name) if folder.is_dir() else []
    except FileNotFoundError:  # removed since
        return []
    except OSError as error:
        warn_of(str(folder), error)
        return []


def read_text(file: Traversable) -> str | None:
    """Return what a file holds, or `None` if there is no file.

    Raises:
        UnusableError: it cannot be read, or is not text.
    """
    try:
        raw = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UnusableError(f"it cannot be read: {error}") from error
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnusableError(f"it is not UTF-8: {error}") from error


def check_schema(data: Any, schema: int, what: str) -> None:
    """Raise unless stored data are of this layout.

    Args:
        data: What the file holds.
        schema: The layout that is read.
        what: What the file ought to be, in words.

    Raises:
        UnusableError: they are of another, or no such thing.
    """
    found = data.get("schema") if isinstance(data, dict) else None
    if type(found) is not int:
        raise UnusableError(f"it is not {what}")
    if found != schema:
        age = "a newer" if found > schema else "an older"
        raise UnusableError(f"it was written by {age} ejkernel: schema {found}, not {schema}")


def warn_of(place: str, reason: Exception) -> None:
    """Warn, once a place, that what is there is ignored."""
    if place not in _warned:
        _warned.add(place)
        warnings.warn(f"ignoring cache entry {place}: {reason}", CacheWarning, stacklevel=5)


def forget_warning(file: Path) -> None:
    """Let the next bad content of this file be warned of again."""
    _warned.discard(str(file))


def provenance(key: Any, time: datetime.datetime) -> dict[str, Any]:
    """Return what was measured with what, and when."""
    device = key.device if isinstance(key, ConfigKey) else None
    return {
        "device": device,
        "driver": _driver() if device is not None and device.startswith("gpu") else None,
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


@functools.cache
def _driver() -> str | None:
    """Return the version of the NVIDIA driver, from its own file: asking JAX would initialise the device."""
    try:
        text = _NVIDIA_VERSION.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\b\d{3}(\.\d+)+\b", text)
    return None if match is None else match.group()
