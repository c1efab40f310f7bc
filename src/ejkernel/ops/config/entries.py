# SPDX-License-Identifier: Apache-2.0
"""An entry of a persistent cache: its layout, its file, and what it holds."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from ejkernel.ops.config._files import (
    UnusableError,
    check_inside,
    file_name,
    identity,
    location,
    provenance,
    read_file,
    restored_key,
)
from ejkernel.ops.core.declared_names import decode_config, type_name
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ConfigError, SerializationError
from ejkernel.ops.utils.printable import printable
from ejkernel.ops.utils.storage.sealed import read_object, sealed_json
from ejkernel.ops.utils.storage.serialize import describe, from_plain, to_data

SCHEMA: Final = 2  # raise when the layout of an entry changes; entries of another schema are a warned miss
WHAT: Final = "an entry of this cache"
LARGEST: Final = 4 << 20  # bytes of an entry; real ones have a few thousand


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """One entry as it is in its file.

    Attributes:
        key: What it was stored under; a `ConfigKey` for the usual keys.
        config: The configuration as plain JSON data.
        config_type: `module.Qualname` of the configuration's class, or `json` for plain data.
        call: The abstract call as plain data, if it was given.
        measured: What was measured, if it was given.
        provenance: Device, versions and time of writing.
        path: The file; `None` for an entry of a shared cache, and for one that could not be written, in memory.
    """

    key: Any
    config: Any
    config_type: str
    call: Any
    measured: Mapping[str, Any] | None
    provenance: Mapping[str, Any]
    path: Path | None = None

    # An entry says whatever its file says.

    @property
    def speedup(self) -> float | None:
        """How many times faster than the heuristic's its configuration was, if the entry tells."""
        found = (self.measured or {}).get("speedup")
        return found if isinstance(found, float) else None

    @property
    def time(self) -> str:
        """When it was written, to the minute, as `2026-01-31 12:00`; `-` if the entry does not tell."""
        return printable(self.provenance.get("time", "-"))[:16].replace("T", " ")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """Layout of a file."""

    schema: int
    key: Any
    config_type: str
    config: Any
    call: Any
    measured: dict[str, Any] | None
    provenance: dict[str, Any]


_FIELDS: Final = {field.name for field in dataclasses.fields(_File)}


def new_entry(
    key: object, cfg: object, call: object, measured: Mapping[str, object] | None, time: datetime.datetime
) -> StoredEntry:
    """Return the entry of a configuration that was found here and now.

    Raises:
        SerializationError: something given has no JSON form.
    """
    return StoredEntry(
        key=key,
        config_type=type_name(cfg),
        config=to_data(cfg),
        call=to_data(call),
        measured=None if measured is None else dict(to_data(measured)),
        provenance=provenance(key, time),
    )


def data_of(entry: StoredEntry) -> dict[str, Any]:
    """Return all that a file holds of an entry, as plain data; `entry_of` reads it."""
    data = {name: getattr(entry, name) for name in _FIELDS - {"schema"}}
    return data | {"schema": SCHEMA, "key": to_data(entry.key)}


def text_of(entry: StoredEntry) -> str:
    """Return the text of an entry's file; equal entries have equal ones.

    Raises:
        SerializationError: it is larger than what is read.
    """
    text = sealed_json(data_of(entry))
    if len(text.encode()) > LARGEST:
        raise SerializationError(f"$: an entry must not be larger than {LARGEST} bytes, got {len(text.encode())}.")
    return text


def entry_of(data: dict[str, Any], path: Path | None = None) -> StoredEntry:
    """Return the entry that a text's JSON object is, which has the right schema.

    Raises:
        UnusableError: it is none.
    """
    if not _is_entry(data):
        try:
            from_plain(data, _File)  # which says what is wrong
        except SerializationError as error:
            raise UnusableError(str(error)) from error
    return StoredEntry(
        key=restored_key(data["key"]),
        config=data["config"],
        config_type=data["config_type"],
        call=data["call"],
        measured=data["measured"],
        provenance=data["provenance"],
        path=path,
    )


def read_entry(file: Path) -> StoredEntry | None:
    """Return the entry of a file that was found in a cache's folder, or `None` if it is gone.

    Raises:
        UnusableError: it cannot be used.
    """
    found = found_entry(file.name, file)
    return None if found is None else found[1]


def entry_in(folder: Traversable, key: ConfigKey, *, follow_links: bool = False) -> StoredEntry | None:
    """Return the entry of a key in a folder that is laid out as a cache's, or `None` if it has none.

    Args:
        folder: The folder.
        key: The key.
        follow_links: Whether links in the folder are followed, as in an installed package.

    Raises:
        UnusableError: it cannot be used.
    """
    file = folder.joinpath(*location(key))
    root = folder if isinstance(folder, Path) and not follow_links else None
    entry = read_at(file, root=root, follow_links=follow_links)
    if entry is not None:
        check_key(entry, identity(key))
    return entry


def check_key(entry: StoredEntry, canonical: str) -> None:
    """Raise unless an entry is that of the key with this `identity`.

    Raises:
        UnusableError: it is not.
    """
    # A file's name has eight digits of its key's digest, and somebody may have renamed it.
    if identity(entry.key) != canonical:
        raise UnusableError(f"it holds another key: {describe(entry.key)}")


def found_entry(name: str, place: Traversable | str) -> tuple[str, StoredEntry] | None:
    """Return the entry that lies in a folder under that name, behind its key's `identity`; `None` if it is gone.

    Raises:
        UnusableError: it cannot be used.
    """
    entry = read_at(place)
    if entry is None:
        return None
    canonical = identity(entry.key)
    if file_name(entry.key.call if isinstance(entry.key, ConfigKey) else canonical, canonical) != name:
        raise UnusableError(f"it holds another key: {describe(entry.key)}")
    return canonical, entry


def read_at(
    file: Traversable | str, *, root: str | Path | None = None, follow_links: bool = False
) -> StoredEntry | None:
    """Return the entry of a file, or `None` if there is no file.

    Args:
        file: The file.
        root: The cache folder, if it is not known that no folder between the two is a link.
        follow_links: Whether the file may be a link.

    Raises:
        UnusableError: it cannot be used.
    """
    try:
        if root is not None and isinstance(file, (str, Path)):
            check_inside(root, file)
    except OSError as error:
        raise UnusableError(f"it cannot be read: {error}") from error
    raw = read_file(file, LARGEST, follow_links=follow_links)
    if raw is None:
        return None
    return parsed(raw, Path(file) if isinstance(file, (str, Path)) else None)


def parsed(raw: bytes, path: Path | None) -> StoredEntry:
    """Return the entry of a file's content.

    Raises:
        UnusableError: it is none.
    """
    try:
        data = read_object(raw, SCHEMA, WHAT)
    except SerializationError as error:
        raise UnusableError(str(error)) from error
    return entry_of(data, path)


def _is_entry(data: Mapping[str, object]) -> bool:
    """Return whether an object has the fields of an entry; to decode it takes longer than all the rest of reading."""
    return (
        data.keys() == _FIELDS
        and type(data["config_type"]) is str
        and type(data["provenance"]) is dict
        and (data["measured"] is None or type(data["measured"]) is dict)
    )


def decoded(entry: StoredEntry, cfg_type: object) -> Any:
    """Return the configuration of an entry; for the type see `PersistentCache.get`.

    Raises:
        UnusableError: it is no such configuration.
    """
    try:
        if cfg_type is None:
            return decode_config(entry.config, entry.config_type)
        return from_plain(entry.config, cfg_type)  # it was parsed
    except ConfigError as error:
        raise UnusableError(f"its configuration cannot be decoded: {error}") from error
