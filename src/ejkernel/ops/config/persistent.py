# SPDX-License-Identifier: Apache-2.0
"""Configurations on disk: a folder, one small readable JSON file a key, written beside and renamed into place."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, overload

from ejkernel import settings
from ejkernel.ops.config._files import (
    ENTRY,
    UnusableError,
    file_name,
    forget_warning,
    identity,
    location,
    now,
    places,
    provenance,
    read_file,
    restored_key,
    slug,
    warn_of,
)
from ejkernel.ops.config._writing import write_file
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import CacheWarning, ConfigError, SerializationError
from ejkernel.ops.utils.storage.sealed import read_object, sealed_json
from ejkernel.ops.utils.storage.serialize import describe, from_data, from_plain, to_data
from ejkernel.ops.utils.values.typenames import decode_config, type_name

SCHEMA: Final = 2  # raise when the layout of an entry changes; entries of another schema are a warned miss
_LARGEST: Final = 4 << 20  # bytes of an entry; real ones have a few thousand


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
        path: The file; `None` for an entry that could not be written and lives in memory.
    """

    key: Any
    config: Any
    config_type: str
    call: Any
    measured: Mapping[str, Any] | None
    provenance: Mapping[str, Any]
    path: Path | None = None

    @property
    def chosen_for(self) -> str:
        """The cases that the configuration is the best for together, with their times; empty if there is one alone."""
        measured = self.measured or {}
        cases, mean = measured.get("cases"), measured.get("geometric_mean")
        if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases) or not cases:
            return ""
        named = [
            (", ".join(filter(None, (str(case.get("arguments", "")), str(case.get("draw", ""))))), case)
            for case in cases
        ]
        times = [f"{name}: {case.get('winner_us')} us" for name, case in named]
        mean_us = mean.get("winner_us") if isinstance(mean, dict) else None
        return f"one for {'; '.join(times)}; geometric mean {mean_us} us"


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


class PersistentCache:
    """A folder of configurations over read-only folders of the same form; the first that has a key answers.

    A key is a `ConfigKey`, another tuple of three strings, or any value that `stable_json` accepts; keys of equal
    JSON are equal. An entry that cannot be used is a miss with one `CacheWarning` a file; a folder that cannot be
    written is one `CacheWarning`, after which this object keeps in memory what it was given.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        layers: Sequence[str | Path] = (),
        shipped: bool = True,
        clock: Callable[[], datetime.datetime] | None = None,
    ) -> None:
        """Open the cache; nothing is read or made before it is needed.

        Args:
            path: The only folder that is written; `None` means `EJKERNEL_CACHE_DIR`, or `~/.cache/ejkernel/configs`.
            layers: Folders that are read after it, in this order.
            shipped: Whether a chain that finds nothing here goes on to what the package brings along.
            clock: Source of the entries' time.
        """
        if isinstance(layers, (str, Path)):
            raise ConfigError(f"layers must be a sequence of folders, got {layers!r}; write [{str(layers)!r}].")
        self._path = _expand(path)
        self._layers = tuple(layer for layer in map(_expand, layers) if layer is not None)
        self._shipped = shipped
        self._clock = clock if clock is not None else now
        self._memory: dict[str, str] = {}  # canonical key: text of the file that could not be written
        self._write_failed = False

    @property
    def path(self) -> Path | None:
        """The folder that is written; `None` if this process has no home folder to expand `~` with."""
        return self._path

    @property
    def layers(self) -> tuple[Path, ...]:
        """The folders that are read after `path`."""
        return self._layers

    @property
    def shipped(self) -> bool:
        """Whether a chain that finds nothing here goes on to what the package brings along."""
        return self._shipped

    @property
    def clock(self) -> Callable[[], datetime.datetime]:
        """Source of the entries' time."""
        return self._clock

    def why_not_writable(self) -> str | None:
        """Return why nothing can be stored on disk, found out by trying; `None` if it can."""
        if self._path is None:
            return "there is no home folder to put it in"
        try:
            probe = self._path / f".{secrets.token_hex(8)}"
            write_file(probe, "", durable=False)
            probe.unlink()
        except OSError as error:
            return str(error)
        return None

    def __repr__(self) -> str:
        return f"PersistentCache({str(self._path)!r}, layers={[str(p) for p in self._layers]}, shipped={self._shipped})"

    @overload
    def put(self, key: Any, cfg: Any, /, *, call: Any = ..., measured: Mapping[str, Any] | None = ...) -> None: ...
    @overload
    def put(
        self, device: str, op: str, call_key: str, cfg: Any, /, *, call: Any = ..., measured: Any = ...
    ) -> None: ...
    def put(self, *key_and_cfg: object, call: object = None, measured: Mapping[str, object] | None = None) -> None:
        """Store a configuration: `put(key, cfg)` or `put(device, op, call, cfg)`.

        Args:
            key_and_cfg: The key, whole or in its three parts, and the configuration.
            call: The abstract call that the key stands for, kept for readers.
            measured: What was measured, kept for readers.

        Raises:
            SerializationError: Something given has no JSON form, or all of it is larger than what is read.
        """
        if len(key_and_cfg) not in (2, 4):
            raise TypeError(f"put() takes (key, cfg) or (device, op, call, cfg), got {len(key_and_cfg)} arguments.")
        key, cfg = _key(key_and_cfg[:-1]), key_and_cfg[-1]
        if cfg is None:
            raise ConfigError("cfg must not be None, which is how get() says that there is no entry.")
        entry = _File(
            schema=SCHEMA,
            key=to_data(key),
            config_type=type_name(cfg),
            config=to_data(cfg),
            call=to_data(call),
            measured=None if measured is None else dict(to_data(measured)),
            provenance=provenance(key, self._clock()),
        )
        text = sealed_json(entry)
        if len(text.encode()) > _LARGEST:
            raise SerializationError(f"$: an entry must not be larger than {_LARGEST} bytes, got {len(text.encode())}.")
        self._store(key, text)

    @overload
    def get(self, key: Any, cfg_type: Any = ..., /) -> Any: ...
    @overload
    def get(self, key: Any, /, *, cfg_type: Any) -> Any: ...
    @overload
    def get(self, device: str, op: str, call: str, cfg_type: Any = ..., /) -> Any: ...
    @overload
    def get(self, device: str, op: str, call: str, /, *, cfg_type: Any) -> Any: ...
    def get(self, *key_and_type: object, cfg_type: object = None) -> Any:
        """Return the configuration of a key, or `None`: `get(key)` or `get(device, op, call)`.

        Args:
            key_and_type: The key, whole or in its three parts; `cfg_type` may follow.
            cfg_type: The type to decode as. `None` takes the type that the entry names, if a kernel class of this
                process names it too, if it is marked `nameable`, or if this process has stored one.
        """
        parts, cfg_type = _split_type(key_and_type, cfg_type)
        key = _key(parts)
        return next((config for config in self._answers(key, lambda entry: decoded(entry, cfg_type))), None)

    def load(self, *key: object) -> StoredEntry | None:
        """Return the whole entry of `load(key)` or `load(device, op, call)`, with the configuration as plain data."""
        return next(self._answers(_key(key), lambda entry: entry), None)

    def __contains__(self, key: object) -> bool:
        return self.load(key) is not None

    def remove(self, *key: object) -> bool:
        """Remove the entry of a key from the written folder, and say whether one was there; layers are not touched."""
        wanted = _key(key)
        found = self._memory.pop(identity(wanted), None) is not None
        if self._path is None:
            return found
        try:
            self._path.joinpath(*location(wanted)).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return found
        except OSError as error:
            self.warn_not_writable(error)
            return found
        return True

    def keys(self) -> list[Any]:
        """Return the keys of all readable entries, each once: the written folder's first, each folder's sorted."""
        return [key for key, _ in self.entries()]

    def problem(self, key: object, cfg_type: object = None) -> str | None:
        """Return why the entries of a key cannot be used; `None` if there is none, or one that can be used."""
        problems: list[str] = []
        found = next(self._answers(_key((key,)), lambda entry: (decoded(entry, cfg_type),), problems.append), None)
        return "; ".join(problems) or None if found is None else None

    def entries(self, operation: str | None = None) -> Iterator[tuple[Any, StoredEntry]]:
        """Yield `(key, entry)` for each key, as `load` would find it.

        With `operation`, the name of one without its version, other operations' files are not read.
        """
        seen = set()
        for canonical, entry in self._all(operation):
            if canonical not in seen:
                seen.add(canonical)
                yield entry.key, entry

    def _all(self, operation: str | None = None) -> Iterator[tuple[str, StoredEntry]]:
        """Yield all entries, each with the canonical form of its key."""
        for canonical, text in list(self._memory.items()):
            yield canonical, _parse(text.encode(), None)
        begin = "" if operation is None else slug(f"{operation}@v")
        for folder in self.folders():
            for name, place in places(folder, ENTRY, lambda op: op.startswith(begin)):
                try:
                    found = _found(name, place)
                except UnusableError as error:
                    warn_of(str(place), error)
                else:
                    yield from () if found is None else (found,)

    def _answers(
        self, key: object, use: Callable[[StoredEntry], Any], problem: Callable[[str], None] | None = None
    ) -> Iterator[Any]:
        """Yield what `use` makes of the entry of each place that has a usable one; `problem` is told of the others."""
        canonical = identity(key)
        for place, read in self._places(key, canonical):
            try:
                entry = read()
                if entry is None:
                    continue
                _check_key(entry, canonical)
                answer = use(entry)
            except UnusableError as error:
                if problem is None:
                    warn_of(place, error)
                else:
                    problem(f"{place}: {error}")
            else:
                yield answer

    def _places(self, key: object, canonical: str) -> Iterator[tuple[str, Callable[[], StoredEntry | None]]]:
        text = self._memory.get(canonical)
        if text is not None:
            yield f"{canonical} (in memory)", functools.partial(_parse, text.encode(), None)
        parts = location(key)
        for folder in self.folders():
            file = folder.joinpath(*parts)
            yield str(file), functools.partial(_read, file)

    def folders(self) -> Iterator[Path]:
        """Yield the folders that are read, in their order."""
        if self._path is not None:
            yield self._path
        yield from self._layers

    def _store(self, key: object, text: str) -> None:
        canonical = identity(key)
        try:
            if self._path is None:
                raise OSError("no home folder is known")
            file = self._path.joinpath(*location(key))
            write_file(file, text)
        except OSError as error:
            self._memory[canonical] = text
            self.warn_not_writable(error)
        else:
            self._memory.pop(canonical, None)
            forget_warning(file)

    def warn_not_writable(self, error: OSError) -> None:
        """Warn, once for this object, that what it is given stays in memory."""
        if not self._write_failed:
            self._write_failed = True
            where = "the persistent cache" if self._path is None else f"the persistent cache {self._path}"
            message = (
                f"{where} cannot be written ({error}); configurations stay in this process. Set EJKERNEL_CACHE_DIR."
            )
            warnings.warn(message, CacheWarning, stacklevel=4)


# --- keys and where they are kept ---


def _key(parts: tuple[Any, ...]) -> Any:
    if len(parts) == 1:
        (key,) = parts
        if isinstance(key, (tuple, list)) and len(key) == 3 and all(isinstance(part, str) for part in key):
            return ConfigKey(*key)
        return key
    if len(parts) == 3:
        if all(isinstance(part, str) for part in parts):
            return ConfigKey(*parts)
        raise ConfigError(f"device, op and call must be str, got {parts!r}.")
    raise TypeError(f"A key is one value or (device, op, call), got {len(parts)} arguments.")


def _split_type(given: tuple[object, ...], cfg_type: object) -> tuple[tuple[Any, ...], Any]:
    if len(given) not in (2, 4):
        return given, cfg_type
    if cfg_type is not None:
        raise TypeError("get() got cfg_type twice.")
    return given[:-1], given[-1]


def _expand(path: str | Path | None) -> Path | None:
    try:
        return settings.current().cache_dir if path is None else Path(path).expanduser()
    except RuntimeError:  # a container's user without a home
        return None


# --- files ---


def read_entry(file: Path) -> StoredEntry | None:
    """Return the entry of a file that was found in a cache's folder, or `None` if it is gone.

    Raises:
        UnusableError: it cannot be used.
    """
    found = _found(file.name, file)
    return None if found is None else found[1]


def entry_in(folder: Traversable, key: ConfigKey) -> StoredEntry | None:
    """Return the entry of a key in a folder that is laid out as a cache's, or `None` if it has none.

    Raises:
        UnusableError: it cannot be used.
    """
    entry = _read(folder.joinpath(*location(key)))
    if entry is not None:
        _check_key(entry, identity(key))
    return entry


def _check_key(entry: StoredEntry, canonical: str) -> None:
    if identity(entry.key) != canonical:
        raise UnusableError(f"it holds another key: {describe(entry.key)}")


def _found(name: str, place: Traversable | str) -> tuple[str, StoredEntry] | None:
    """Return the canonical form of the key of an entry that lies in a folder under that name, and the entry."""
    entry = _read(place)
    if entry is None:
        return None
    canonical = identity(entry.key)
    if file_name(entry.key.call if isinstance(entry.key, ConfigKey) else canonical, canonical) != name:
        raise UnusableError(f"it holds another key: {describe(entry.key)}")
    return canonical, entry


def _read(file: Traversable | str) -> StoredEntry | None:
    """Return the entry of a file, or `None` if there is no file."""
    raw = read_file(file, _LARGEST)
    if raw is None:
        return None
    return _parse(raw, Path(file) if isinstance(file, (str, Path)) else None)


def _parse(raw: bytes, path: Path | None) -> StoredEntry:
    try:
        data = read_object(raw, SCHEMA, "an entry of this cache")
        if not _is_entry(data):
            from_plain(data, _File)  # which says what is wrong
    except SerializationError as error:
        raise UnusableError(str(error)) from error
    del data["schema"]
    return StoredEntry(path=path, **data | {"key": restored_key(data["key"])})


def _is_entry(data: Mapping[str, object]) -> bool:
    """Return whether an object has the fields of an entry; to decode it takes longer than all the rest of reading."""
    return (
        data.keys() == _FIELDS
        and type(data["config_type"]) is str
        and type(data["provenance"]) is dict
        and (data["measured"] is None or type(data["measured"]) is dict)
    )


# --- what an entry holds ---


def decoded(entry: StoredEntry, cfg_type: object) -> Any:
    """Return the configuration of an entry; for the type see `PersistentCache.get`.

    Raises:
        UnusableError: it is no such configuration.
    """
    try:
        if cfg_type is None:
            return decode_config(entry.config, entry.config_type)
        return from_data(entry.config, cfg_type)
    except ConfigError as error:
        raise UnusableError(f"its configuration cannot be decoded: {error}") from error
