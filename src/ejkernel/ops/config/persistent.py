# SPDX-License-Identifier: Apache-2.0
"""Configurations on disk: one small, readable JSON file per key.

One file per key needs no lock and loses no update. Files are renamed into place, so readers see only complete files.
File names derive from keys, so no input can choose a path.
"""

from __future__ import annotations

import copy
import datetime
import functools
import os
import re
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

from ejkernel import settings
from ejkernel.ops.config import estimates
from ejkernel.ops.config._files import (
    ENTRY,
    UnusableError,
    check_inside,
    forget_warning,
    is_url,
    location,
    now,
    places,
    slug,
    warn_of,
    warn_once,
)
from ejkernel.ops.config._writing import keep_elsewhere, write_file
from ejkernel.ops.config.cache import as_config_key, key_and_config, key_of
from ejkernel.ops.config.entries import (
    StoredEntry,
    check_key,
    decoded,
    new_entry,
    parsed,
    read_at,
    read_entry,
    text_of,
)
from ejkernel.ops.config.misses import notes
from ejkernel.ops.core.declared_names import why_not_decoded
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import CacheWarning, ConfigError
from ejkernel.ops.utils.error_text import value_text
from ejkernel.ops.utils.messages.names import nearest
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.services import Shown

if TYPE_CHECKING:
    from ejkernel.ops.config.shared.layer import SharedLayer

_DEVICE: Final = re.compile(r"(cpu|gpu|tpu)-.+")  # a cache folder has one folder for each device
_INNER: Final = re.compile(rf"{_DEVICE.pattern}|{notes.FOLDER}|{estimates.FOLDER}")  # the folders of a cache folder
_PACK: Final = re.compile(r"[0-9a-f]+\.pack")  # in a shared cache, `ops/config/shared/packs.py`
_MOST: Final = 200  # folders to look into
_TYPICAL = 8 << 10  # bytes of an entry
_REMEDY = "; `ejkernel cache prune --unreadable` removes it, and `ejkernel tune` measures the call again"


class PersistentCache(Shown):
    """A folder of configurations above read-only layers: folders of the same layout, or URLs.

    A lookup returns the entry of the first layer that has the key. Lookups in a URL read its local copy only;
    `refresh_if_due` updates the copy. A chain does so for calls without a measured configuration.

    A key is a `ConfigKey` or another tuple of three strings. An unusable entry is a miss with one `CacheWarning` per
    file. If the folder is not writable, the cache warns once and keeps new entries in memory, and in a temporary folder
    that the warning names. It also warns once of a missing layer.

    Attributes:
        path: The writable folder; `None` if `~` cannot be expanded because the user has no home folder.
        layers: The read-only layers, read after `path`.
        shared: The layers with URLs.
        shipped: Whether a chain continues with the shipped configurations after a miss.
        clock: Returns the time of new entries.
        kept_in: The temporary folder with the entries and searches that could not be written; `None` without any.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        layers: Sequence[str | Path] | None = None,
        shipped: bool = True,
        clock: Callable[[], datetime.datetime] | None = None,
    ) -> None:
        """Open the cache. Folders are read and created on first use.

        Args:
            path: The writable folder; `None` means `EJKERNEL_CACHE_DIR`, or `~/.cache/ejkernel/configs`.
            layers: Folders and URLs of shared caches, read after `path` in this order; `None` means those of
                `EJKERNEL_CACHE_LAYERS` if `path` is `None`, too, and otherwise none.
            shipped: Whether a chain continues with the shipped configurations after a miss.
            clock: Returns the time of new entries.
        """
        if isinstance(layers, (str, Path)):
            raise ConfigError(f"layers must be a sequence of folders, got {layers!r}; write [{str(layers)!r}].")
        if layers is None:
            layers = settings.current().cache_layers if path is None else ()
        self._is_usual = path is None
        self.path = _expand(path)
        opened = {layer: _shared(layer, self.path) if is_url(layer) else _expand(layer) for layer in map(_text, layers)}
        self.layers = tuple(layer for layer in opened.values() if layer is not None)
        self.shared = tuple(layer for layer in self.layers if not isinstance(layer, Path))
        self._homeless = [str(name) for name, layer in opened.items() if layer is None]
        self._has_looked_for_layers = False
        self.shipped = shipped
        self.clock = clock if clock is not None else now
        # Texts of unwritable files, so that each lookup returns new objects, and the errors of their puts.
        self._memory: dict[ConfigKey, tuple[str, str]] = {}
        self._write_failed = False
        self.kept_in: Path | None = None

    @property
    def places(self) -> tuple[str, ...]:
        """The searched folders and URLs, starting with the own folder."""
        return tuple(map(str, (() if self.path is None else (self.path,)) + self.layers))

    def refresh_if_due(self) -> None:
        """Update the copies of shared layers, unless they were updated recently.

        Waits a few seconds at most. Warns once (`CacheWarning`) of an unreachable shared cache.
        """
        for layer in self.shared:
            layer.refresh_if_due()

    @property
    def fault(self) -> str:
        """Why the folder has no configurations, e.g. because it is above a cache folder; empty if nothing is wrong."""
        variable = settings.current().cache_variable if self._is_usual else ""
        return "" if self.path is None else fault_of(self.path, variable)

    @property
    def why_nothing(self) -> str:
        """Why neither the folder nor a layer has entries of an operation, as far as it can be told."""
        variable = settings.current().cache_variable if self._is_usual else ""
        is_meant = self.path is not None and (variable or self.path.is_dir())
        if not self.layers or (is_meant and self.fault):
            return self.fault
        # A default folder that does not exist yet is no cause: the layers are meant to have the configurations.
        faults = (fault_of(layer) for layer in self.layers if isinstance(layer, Path))
        places = [place for place in self.places if is_meant or place != str(self.path)]
        return next(filter(None, faults), f"nothing was tuned for this operation in {' or '.join(places)}")

    def why_not_writable(self) -> str | None:
        """Return why the folder is not writable; `None` if a test write succeeds."""
        if self.path is None:
            return "the user has no home folder"
        existing = next((place for place in (self.path, *self.path.parents) if place.exists()), None)
        if existing is not None and not existing.is_dir():
            return f"{existing} is a file, not a folder" if existing != self.path else "it is a file, not a folder"
        try:
            probe = self.path / f".{secrets.token_hex(8)}"
            # Permissions say nothing about read-only file systems, quotas or root, so write a file.
            # It has the size of an entry, because a full disk may still take an empty file.
            write_file(probe, " " * _TYPICAL, durable=False)
            probe.unlink()
        except FileNotFoundError:
            return f"no folder can be created in {existing}"
        except OSError as error:
            return str(error)
        return None

    def __repr__(self) -> str:
        return f"PersistentCache({str(self.path)!r}, layers={list(map(str, self.layers))}, shipped={self.shipped})"

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
            call: The abstract call that the key represents, for readers of the file.
            measured: The measured figures, for readers of the file.

        Raises:
            SerializationError: An argument has no JSON form, or the entry is too large.
        """
        given, cfg = key_and_config(key_and_cfg)
        key = _key(given)
        if cfg is None:
            raise ConfigError("cfg must not be None: get() returns None for a missing entry.")
        # Serialize first: a value without a JSON form must not touch the old entry.
        text = text_of(new_entry(key, cfg, call, measured, self.clock()))
        self._store(key, text)
        reason = why_not_decoded(cfg, key.op)
        if reason:
            warn(f"get() will not find what was stored for {value_text(key)}: {reason}", CacheWarning)

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
            cfg_type: The type to decode as. `None` uses the type named by the entry, if a kernel class of this process
                names it, if it is marked `nameable`, or if this process has stored a value of it.
        """
        parts, cfg_type = _split_type(key_and_type, cfg_type)
        key = _key(*parts)
        return next((config for config, _ in self.found(key, cfg_type)), None)

    def found(
        self,
        key: ConfigKey,
        cfg_type: object = None,
        *,
        decode: Callable[[StoredEntry, object], Any] = decoded,
        problem: Callable[[str], None] | None = None,
    ) -> Iterator[tuple[Any, StoredEntry]]:
        """Yield the usable configurations of a key with their entries; `get` returns the first.

        Args:
            key: The key.
            cfg_type: The type to decode as; see `get`.
            decode: Returns the configuration of an entry.
            problem: Receives the fault of each unusable entry, instead of a warning.
        """
        for place, read in self._places(key):
            try:
                entry = read()
                if entry is None:
                    continue
                check_key(entry, key)
                config = decode(entry, cfg_type)
            except UnusableError as error:
                if problem is None:
                    warn_of(place, error, _REMEDY)
                else:
                    problem(f"{place}: {error}")
            else:
                yield config, entry

    def load(self, *key: object) -> StoredEntry | None:
        """Return the whole entry of `load(key)` or `load(device, op, call)`, with the configuration as plain data."""
        return next((entry for _, entry in self.found(_key(*key), decode=lambda entry, _: entry.config)), None)

    def __contains__(self, key: object) -> bool:
        found = as_config_key(key)
        return found is not None and self.load(found) is not None

    def remove(self, *key: object) -> bool:
        """Remove the entry of a key from the writable folder; return whether it had one. Layers stay unchanged."""
        wanted = _key(*key)
        found = self._memory.pop(wanted, None) is not None
        if self.path is None:
            return found
        try:
            file = self.path.joinpath(*location(wanted))
            check_inside(self.path, file)
            file.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return found
        except OSError as error:
            self._warn_not_writable(error)
            return found
        return True

    def keys(self) -> list[ConfigKey]:
        """Return the keys of all readable entries, each once: the writable folder's first, each folder's sorted."""
        return [key for key, _ in self.entries()]

    def problem(self, key: object, cfg_type: object = None) -> str | None:
        """Return why the entries of a key are unusable; `None` if it has no entry or a usable one."""
        problems: list[str] = []
        found = next(self.found(_key(key), cfg_type, problem=problems.append), None)
        return "; ".join(problems) or None if found is None else None

    def entries(self, operation: str | None = None) -> Iterator[tuple[ConfigKey, StoredEntry]]:
        """Yield `(key, entry)` for each key, as `load` would find it.

        Args:
            operation: Read only entries of this operation, named without its version.
        """
        seen = set()
        for entry in self._all(operation):
            if entry.key not in seen:
                seen.add(entry.key)
                yield entry.key, entry

    def _look_for_layers(self) -> None:
        """Warn once of missing layers, and of folders above or inside a cache folder. A missing own folder is no fault.

        Shared caches at URLs are contacted on a miss.
        """
        if self._has_looked_for_layers:
            return
        self._has_looked_for_layers = True
        if not self._write_failed and self.path is not None and os.path.isfile(self.path):
            text = f"the persistent cache {self.path} is a file, so it has no configurations"
            warn_once(str(self.path), f"{text}; name a folder, e.g. with EJKERNEL_CACHE_DIR.")
        for place in (self.path, *self.layers):
            if isinstance(place, Path) and os.path.isdir(place) and fault_of(place):
                warn_once(f"{place} has", f"{self.fault if place == self.path else fault_of(place)}.")
        folders = [str(layer) for layer in self.layers if isinstance(layer, Path)]
        for name in (*self._homeless, *(folder for folder in folders if not os.path.isdir(folder))):
            text = f"there is no folder {name}, a layer read after {self.path}; check its name."
            warn_once(name, text)

    def _all(self, operation: str | None = None) -> Iterator[StoredEntry]:
        """Yield all entries."""
        self._look_for_layers()
        for text, _ in list(self._memory.values()):
            yield parsed(text.encode(), None)
        for layer in (self.path, *self.layers):
            if isinstance(layer, Path):
                yield from _all_in(layer, operation)
            elif layer is not None:
                yield from layer.entries(operation)

    def _places(self, key: ConfigKey) -> Iterator[tuple[str, Callable[[], StoredEntry | None]]]:
        self._look_for_layers()
        kept = self._memory.get(key)
        if kept is not None:
            yield f"{key} (in memory)", functools.partial(parsed, kept[0].encode(), None)
        parts = location(key)
        for layer in (self.path, *self.layers):
            if isinstance(layer, Path):
                file = os.path.join(layer, *parts)  # a string: building a `Path` takes as long as opening the file
                yield file, functools.partial(read_at, file, root=layer)
            elif layer is not None:
                yield from ((f"{key} of {layer}", lambda entry=entry: entry) for entry in layer.find(key))

    def folders(self) -> Iterator[Path]:
        """Yield the folders, in lookup order."""
        yield from (layer for layer in (self.path, *self.layers) if isinstance(layer, Path))

    def _store(self, key: ConfigKey, text: str) -> None:
        try:
            if self.path is None:
                raise OSError("no home folder is known")
            file = self.path.joinpath(*location(key))
            write_file(file, text, root=self.path)
        except OSError as error:
            self._memory[key] = text, error.strerror or str(error)
            self.keep_elsewhere(location(key), text, error)
        else:
            # The file replaces an older entry in memory, from when the folder was not writable.
            self._memory.pop(key, None)
            forget_warning(file)

    def why_unwritten(self, key: ConfigKey) -> str:
        """Return why the entry put for a key is only in the memory of this process; empty if a file has it."""
        kept = self._memory.get(key)
        return "" if kept is None else kept[1]

    def on_disk(self) -> PersistentCache:
        """Return a view of the cache without the entries that only the memory of this process holds."""
        view = copy.copy(self)
        view._memory = {}
        return view

    def keep_elsewhere(self, parts: tuple[str, ...], text: str, error: OSError) -> None:
        """Keep a file that cannot be written to the cache folder in a temporary folder, and warn once."""
        self.kept_in = keep_elsewhere(self.kept_in, parts, text)
        self._warn_not_writable(error)

    @property
    def how_to_import(self) -> str:
        """The folder with the results that could not be written, and the command that saves them; may be empty."""
        if self.kept_in is None:
            return ""
        kept = f"New results are kept in {self.kept_in}"
        if self.path is None:
            return f"{kept}; set EJKERNEL_CACHE_DIR to it or to another folder."
        command = shlex.join(["ejkernel", "cache", "merge", str(self.kept_in), "--cache", str(self.path)])
        return f"{kept}; once {self.path} can be written, save them with `{command}`."

    def _warn_not_writable(self, error: OSError) -> None:
        """Warn, once for this object, that new entries stay in memory."""
        if not self._write_failed:
            self._write_failed = True
            where = "the persistent cache" if self.path is None else f"the persistent cache {self.path}"
            how = self.how_to_import or "Configurations stay in this process; set EJKERNEL_CACHE_DIR."
            warn(f"{where} cannot be written ({error}). {how}", CacheWarning)


# --- keys and their places ---


def _key(*parts: object) -> ConfigKey:
    """Return the key given as a whole or in its three parts."""
    key = key_of(parts)
    found = as_config_key(key)
    if found is None:
        raise ConfigError(f"a key of a PersistentCache is a ConfigKey: device, op and call, three str; got {key!r}.")
    return found


def _split_type(given: tuple[object, ...], cfg_type: object) -> tuple[tuple[Any, ...], Any]:
    if len(given) not in (2, 4):
        return given, cfg_type
    if cfg_type is not None:
        raise TypeError("get() got cfg_type twice.")
    return given[:-1], given[-1]


def _shared(url: str, folder: Path | None) -> SharedLayer:
    from ejkernel.ops.config.shared.layer import SharedLayer  # few programs use one

    return SharedLayer(url, folder)


def _text(layer: str | Path) -> str | Path:
    if not isinstance(layer, (str, Path)):
        raise ConfigError(f"layers must contain only folders and URLs, got {layer!r}.")
    return layer


def _expand(path: str | Path | None) -> Path | None:
    try:
        return settings.current().cache_dir if path is None else Path(path).expanduser()
    except RuntimeError:  # a container's user without a home
        return None


def _all_in(folder: Path, operation: str | None) -> Iterator[StoredEntry]:
    begin = "" if operation is None else slug(f"{operation}@v")
    for place in places(folder, ENTRY, lambda op: op.startswith(begin)):
        try:
            found = read_entry(place.path)
        except UnusableError as error:
            warn_of(place.path, error, _REMEDY)
        else:
            yield from () if found is None else (found,)


# --- folders named by mistake ---


def fault_of(folder: Path, variable: str = "") -> str:
    """Return why a folder holds no configurations, and which one was probably meant; empty if nothing is wrong with it.

    Args:
        folder: The folder.
        variable: The environment variable that names it, if any.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return _why_missing(folder, variable)
    if any(map(_INNER.fullmatch, names)):
        return ""
    if any(map(_PACK.fullmatch, names)):
        url = Path(os.path.abspath(folder)).as_uri()
        return f"{folder} is a shared cache; name it by its URL, {url}, e.g. in EJKERNEL_CACHE_LAYERS"
    places = [folder.parents[at] for at, place in enumerate((folder, folder.parent)) if _DEVICE.fullmatch(place.name)]
    inner = [folder / name for name in names[:_MOST]]
    places += [*inner, *(place / settings.CACHE_FOLDER for place in inner)]
    meant = next(filter(_is_cache, places), None)
    how = f"set {variable}={meant}" if variable else f"name {meant}"
    return "" if meant is None else f"{folder} has no configurations, but {meant} has some: {how}"


def _why_missing(folder: Path, variable: str) -> str:
    if os.path.isdir(folder):  # it may not be read, which other messages say
        return ""
    text = f"there is no folder {folder}{f', named by {variable}' if variable else ''}"
    try:
        similar = nearest(folder.name, (place.name for place in os.scandir(folder.parent) if place.is_dir()))
    except OSError:
        return text
    return text if similar is None else f"{text}, but there is {folder.parent / similar}"


def _is_cache(folder: Path) -> bool:
    try:
        return any(map(_INNER.fullmatch, os.listdir(folder)))
    except OSError:  # a file, or it may not be read
        return False
