# SPDX-License-Identifier: Apache-2.0
"""`MeasurementStore`: the measurements of every search, stored beside the cache entries."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ejkernel.ops.autotuner.search.model import Record
from ejkernel.ops.autotuner.store.log import StoredSearch as StoredSearch
from ejkernel.ops.autotuner.store.log import dump, lines_of, load, load_header
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.status import SearchProgress, SearchState
from ejkernel.ops.config._files import (
    ENTRY,
    UnusableError,
    check_inside,
    listed,
    location,
    places,
    provenance,
    read_file,
    slug,
    warn_of,
)
from ejkernel.ops.config._writing import write_file
from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.core.declared_names import config_type_of
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import CacheWarning
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.services import Shown
from ejkernel.ops.utils.storage.serialize import describe, stable_json, to_data

logger = logging.getLogger(__name__)


LOG: Final = ".jsonl"  # suffix of a search's file, other than that of entries
KEPT: Final = 8  # newest searches stored for one call: older ones describe outdated drivers
_LARGEST: Final = 64 << 20  # bytes of a search; an outcome takes hundreds
_STAMP: Final = "%Y%m%dT%H%M%SZ"
_NAME: Final = re.compile(rf"(.+)\.\d{{8}}T\d{{6}}Z-[0-9a-f]{{12}}{re.escape(LOG)}")
_EQUAL: Final = 1e-4  # tolerance for weights
RECORDS: Final = 4  # calls used as starting points; each costs one measurement and time to fit
_NO_PART = ("wiring",)  # the origin of a call, not part of its identity; see `Invocation.call_key`


@dataclasses.dataclass(frozen=True, slots=True)
class _Log:
    """A log with a valid first line."""

    key: ConfigKey
    call: Any
    name: str
    lines: list[str]
    path: Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallHistory:
    """The stored searches of one call.

    Attributes:
        entry: The saved configuration; `None` without one.
        searches: The searches, the newest first.
    """

    entry: StoredEntry | None
    searches: tuple[StoredSearch, ...]

    @property
    def behind(self) -> StoredSearch | None:
        """The newest search that saved the configuration in force; `None` if its file is not here."""
        return next((one for one in self.searches if not one.not_saved and one.stays is None and self.entry), None)

    @property
    def shown(self) -> StoredSearch:
        """The search behind the saved configuration, else the newest."""
        return self.behind or self.searches[0]

    @property
    def shown_and_newer(self) -> tuple[StoredSearch, ...]:
        """`shown`, then the newest search if they differ."""
        newest = self.searches[0]
        return (self.shown,) if self.shown is newest else (self.shown, newest)


class MeasurementStore(Shown):
    """The searches of a persistent cache: one file per search, beside the entry of its call.

    Its records are starting points for a search, never results. A new search measures the best configurations of a
    record first. The times are a prior that the model may drop.

    Files are never changed, so processes cannot lose each other's searches. Each call keeps its eight newest searches,
    in the order of writing, even if the clock was set back. Unusable files are skipped with one `CacheWarning`. If the
    cache folder is read-only, searches go to the temporary folder of the cache.

    Attributes:
        cache: The cache.
        program: The program that is tuned, as typed; saved with the searches.
        times: How often it makes each call, by key; saved with them, too.

    Args:
        cache: All its folders are read; the first one is written. A path means a cache in that folder only.
    """

    def __init__(self, cache: PersistentCache | str | Path) -> None:
        self.cache = cache if isinstance(cache, PersistentCache) else PersistentCache(cache, shipped=False)
        self.program = ""
        self.times: Mapping[ConfigKey, int] = {}

    def __repr__(self) -> str:
        return f"MeasurementStore({self.cache!r})"

    def save(self, data: AutotuneData) -> None:
        """Store a search.

        A search too large to be read again is dropped with a `CacheWarning`. If the folder cannot be written, the
        search goes to the temporary folder of the cache, with one `CacheWarning` per cache.

        Raises:
            SerializationError: A configuration has no JSON form.
        """
        now = self.cache.clock()
        whole = dataclasses.replace(data, program=self.program, times=self.times.get(data.key, 0))
        text = dump(whole, provenance(data.key, now))
        # Larger files would not be read again.
        if len(text.encode()) > _LARGEST:
            message = f"the search of {data.key.op} is not stored: it takes more than {_LARGEST} bytes"
            warn(message, CacheWarning)
            return
        folder = self.cache.path
        try:
            if folder is None:
                raise OSError("no home folder is known")
            beside = folder.joinpath(*location(data.key)[:2])
            # The new name must sort after all existing ones, even if the clock was set back.
            check_inside(folder, beside / LOG)
            known = _known(data.key, (place.name for place in listed(beside)))
            name = _name(data.key, now, text, known)
            write_file(beside / name, text, root=folder)
        except OSError as error:
            parts = (*location(data.key)[:2], _name(data.key, now, text, ()))
            self.cache.keep_elsewhere(parts, text, error)
        else:
            _remove(beside, known[: 1 - KEPT])

    def copy(self, other: MeasurementStore, *, dry_run: bool = False) -> int:
        """Copy the searches of another cache to the writable folder; return how many this cache did not have.

        Raises:
            OSError: The folder cannot be written.
        """
        folder, count = self.cache.path, 0
        if folder is None:
            return 0
        for log in other._logs(None):
            beside = folder.joinpath(*location(log.key)[:2])
            known = _known(log.key, (place.name for place in listed(beside)))
            kept = sorted({*known, log.name})[-KEPT:]
            if log.name in known or log.name not in kept:
                continue
            count += 1
            raw = None if dry_run else read_file(log.path, _LARGEST)
            if raw is not None:
                write_file(beside / log.name, raw.decode(), root=folder)
                _remove(beside, set(known) - set(kept))
        return count

    def searches(self, op: str | None = None) -> Iterator[StoredSearch]:
        """Yield all searches, or those of one versioned operation; for each call the newest first.

        If the saved configuration is not the winner of a search, it is in `stays`.
        """
        return (search for search, _ in self._loaded(self._logs(op)))

    def _loaded(self, logs: Iterable[_Log]) -> Iterator[tuple[StoredSearch, StoredEntry | None]]:
        """Yield the searches of usable logs, each with the saved entry of its call, which is loaded once."""
        saved: dict[ConfigKey, StoredEntry | None] = {}
        for log in logs:
            search = _loaded(log)
            if search is None:
                continue
            if search.key not in saved:
                saved[search.key] = self.cache.load(search.key)
            entry = saved[search.key]
            yield search if entry is None or entry.config is None else search.replaced_by(entry), entry

    def by_call(self, key: ConfigKey | None = None) -> dict[ConfigKey, CallHistory]:
        """Return all searches, or those of one call, by call."""
        found: dict[ConfigKey, tuple[StoredEntry | None, list[StoredSearch]]] = {}
        for search, entry in self._loaded(self._logs(None if key is None else key.op, key)):
            found.setdefault(search.key, (entry, []))[1].append(search)
        return {key: CallHistory(entry=entry, searches=tuple(searches)) for key, (entry, searches) in found.items()}

    def history(self, key: ConfigKey) -> CallHistory | None:
        """Return the searches of one call; `None` without one."""
        return self.by_call(key).get(key)

    def unusable(self, key: ConfigKey) -> str:
        """Return that a log of a call cannot be used, with the reason; empty if all can be used."""
        for place in self._places(key.op):
            if _is_of(key, place.name):
                try:
                    read_search(Path(place.path))
                except UnusableError as error:
                    return f"the log {place.path} cannot be used: {error}"
        return ""

    def progress(self, key: ConfigKey) -> SearchProgress | None:
        """Return the tuning progress of a call, as all commands report it; `None` without a search.

        With a cache entry, this is the progress of the search behind the entry, otherwise of the newest search.
        """
        entry = self.cache.load(key)
        if entry is not None:
            return SearchProgress.stored_in(entry.measured)
        return next((search.progress for search, _ in self._loaded(self._logs(key.op, key))), None)

    def without_entry(self) -> list[StoredSearch]:
        """Return the newest search of each call without an entry; such searches are partial or failed."""
        return [history.searches[0] for history in self.by_call().values() if history.entry is None]

    def unfinished(self, inv: Invocation[Cfg, Out], shares: Mapping[str, float] | None = None) -> tuple[Outcome, ...]:
        """Return the measured candidates of a call's newest search, if it ended early, without the heuristic.

        Failed searches are ignored. Searches with other versions, or of other calls together, give no candidates.

        Args:
            inv: The call, or the first of several that share a configuration.
            shares: The weight of each call's time in the mean, by call key; the weights add up to 1. By default the
                call is alone.
        """
        wanted = {inv.key.call: 1.0} if shares is None else shares
        for search, _ in self._loaded(self._logs(inv.key.op, inv.key)):
            if search.progress.state == SearchState.FAILED:
                continue
            here = provenance(inv.key, self.cache.clock())
            is_same = all(search.provenance.get(name) == here.get(name) for name in here if name != "time")
            is_same = is_same and are_alike(search.shares, wanted)
            is_open = search.progress.state == SearchState.PARTIAL
            return search.measured(config_type_of(inv, inv.kernel)) if is_open and is_same else ()
        return ()

    def records(self, inv: Invocation[Cfg, Out], *, count: int = RECORDS) -> list[Record]:
        """Return the measurements of the call and of similar calls, as starting points of a search.

        The order is: this call on this device, this call on other devices, similar calls on this device (the nearest
        first), similar calls on other devices. Similar calls have the same operation and version, and differ only in
        the dimensions of their arrays. The distance is the sum of the absolute log2 ratios of these dimensions.

        Args:
            inv: The call.
            count: Largest number of records; all searches of one call on one device form one record.

        Raises:
            UnstableKeyError: The call has no key.
        """
        by_key: dict[ConfigKey, tuple[tuple[int, float, str], list[_Log]]] = {}
        common, dimensions = dimensions_of(inv.description)
        # Read only the logs of this operation.
        for log in self._logs(inv.key.op):
            theirs = dimensions_of(log.call)
            if theirs[0] == common:
                elsewhere, apart = log.key.device != inv.key.device, distance(dimensions, theirs[1])
                other = log.key.call != inv.key.call
                rank = (2 * other + elsewhere, apart, f"{log.key.device} {log.key.call}")
                by_key.setdefault(log.key, (rank, []))[1].append(log)
        cfg_type = config_type_of(inv, inv.kernel)
        found: list[Record] = []
        for (*_, label), logs in sorted(by_key.values(), key=lambda item: item[0]):
            searches = [search for log in logs if (search := _loaded(log)) is not None]
            record = _merged(label, [search.record(label, cfg_type) for search in searches])
            if record.times:
                found.append(record)
            # Do not decode the logs of more distant calls.
            if len(found) >= count:
                break
        return found

    def _logs(self, op: str | None, key: ConfigKey | None = None) -> Iterator[_Log]:
        """Yield the logs, or those of one key, for each key the newest first; skip unusable files with a warning."""
        seen = set()
        for place in self._places(op):
            # Another layer may hold a copy; the content of a file never changes.
            if place.name in seen or not (key is None or _is_of(key, place.name)):
                continue
            seen.add(place.name)
            try:
                raw = read_file(place.path, _LARGEST)
                log = None if raw is None else _log(place.name, raw, Path(place.path))
            except UnusableError as error:
                warn_of(place.path, error)
            else:
                # Two operations may share a folder, because folder names drop some characters.
                if log is not None and op in (None, log.key.op):
                    yield log

    def _places(self, op: str | None) -> Iterator[os.DirEntry[str]]:
        """Yield potential logs, limited to one operation if `op` is given."""
        wanted = None if op is None else slug(op)
        for folder in filter(None, (self.cache.kept_in, *self.cache.folders())):
            found = places(folder, LOG, lambda name: wanted is None or name == wanted)
            yield from sorted(found, key=lambda place: place.name, reverse=True)


def are_alike(shares: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Return whether two searches are of the same calls with the same weights, which entries store rounded."""
    return shares.keys() == others.keys() and all(abs(shares[key] - others[key]) < _EQUAL for key in shares)


def read_search(file: Path) -> StoredSearch | None:
    """Return the search of a file in a cache folder; `None` if the file is gone.

    Raises:
        UnusableError: The file cannot be used.
    """
    raw = read_file(file, _LARGEST)
    return None if raw is None else load(_log(file.name, raw, file).lines, file)


def _log(name: str, raw: bytes, path: Path) -> _Log:
    """Return the log with this name and content."""
    lines = lines_of(raw)
    key, call = load_header(lines)
    if not _is_of(key, name):
        raise UnusableError(f"it holds another key: {describe(key)}")
    return _Log(key, call, name, lines, path)


def _merged(label: str, records: Sequence[Record]) -> Record:
    """Merge several records, given the newest first; for a configuration in several, the newest time counts.

    Clocks and temperatures differ between days, so older times are rescaled by the configurations measured in both.
    """
    merged: dict[str, tuple[Any, float | None]] = {}
    for record in records:
        own = {stable_json(to_data(config)): (config, seconds) for config, seconds in record.times}
        factor = _ratio(
            (now, before)
            for token, (_, before) in own.items()
            if token in merged and (now := merged[token][1]) is not None and before is not None
        )
        for token, (config, seconds) in own.items():
            merged.setdefault(token, (config, None if seconds is None else seconds * factor))
    return Record(label, tuple(merged.values()))


def _ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the median ratio; 1 without pairs."""
    ratios = sorted(math.log(now / before) for now, before in pairs)
    return math.exp(ratios[len(ratios) // 2]) if ratios else 1.0


def _loaded(log: _Log) -> StoredSearch | None:
    try:
        return load(log.lines, log.path)
    except UnusableError as error:
        warn_of(str(log.path), error)
        return None


def _name(key: ConfigKey, time: datetime.datetime, text: str, known: Sequence[str]) -> str:
    """Return the file name of a search: the entry's name, the time (names sort by age) and the content's digest.

    It sorts after the `known` names, which are older, even if the clock was set back.
    """
    stem = _stem(key)
    stamp = time.astimezone(datetime.UTC).strftime(_STAMP)
    newest = known[-1][len(stem) + 1 :].partition("-")[0] if known else ""
    if newest >= stamp:
        stamp = _after(newest)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{stem}.{stamp}-{digest}{LOG}"


def _after(stamp: str) -> str:
    """Return the time a second later; unchanged if it is invalid or the last possible time."""
    try:
        return (datetime.datetime.strptime(stamp, _STAMP) + datetime.timedelta(seconds=1)).strftime(_STAMP)
    except (ValueError, OverflowError):
        return stamp


def _stem(key: ConfigKey) -> str:
    return location(key)[2].removesuffix(ENTRY)


def _is_of(key: ConfigKey, name: str) -> bool:
    """Return whether `name` is the file name of a search of `key`."""
    match = _NAME.fullmatch(name)
    return match is not None and match[1] == _stem(key)


def _known(key: ConfigKey, names: Iterable[str]) -> list[str]:
    """Return the names of the searches of `key`, the oldest first."""
    return sorted(name for name in names if _is_of(key, name))


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        try:
            (folder / name).unlink(missing_ok=True)  # another process may remove it too
        except OSError as error:
            logger.info("an old search could not be removed: %s", printable(error))


def dimensions_of(call: object) -> tuple[str, tuple[int, ...]]:
    """Return the part of a call that must be equal in comparable calls, and the dimensions that may differ.

    The common part has the structure of the arguments, the arrays' dtypes and ranks, all static arguments and the
    transformations. The dimensions are those of the arrays and the sizes of enclosing `vmap`s.

    Args:
        call: An invocation's `description`.
    """
    dimensions: list[int] = []
    parts = {name: part for name, part in call.items() if name not in _NO_PART} if isinstance(call, dict) else call
    common = _without_dimensions(parts, dimensions)
    return stable_json(common), tuple(dimensions)


def distance(mine: tuple[int, ...], theirs: tuple[int, ...]) -> float:
    """Return the sum of the absolute log2 ratios of the dimensions; e.g. 1 if one dimension doubles."""
    return sum(abs(_log2(one) - _log2(other)) for one, other in zip(mine, theirs, strict=True))


def _log2(dimension: int) -> float:
    return math.log2(max(dimension, 0.5))  # an empty dimension is as far from 1 as 2 is


def _without_dimensions(data: object, dimensions: list[int]) -> Any:
    """Return a copy without the arrays' dimensions, and append these to `dimensions`."""
    if isinstance(data, list):
        if len(data) == 3 and data[0] == "vmap" and type(data[1]) is int:
            dimensions.append(data[1])
            return [data[0], 0, data[2]]
        return [_without_dimensions(item, dimensions) for item in data]
    if not isinstance(data, dict):
        return data
    array = data.get("array")
    if isinstance(array, list) and len(array) == 2 and isinstance(array[1], list):
        kept = [dim if type(dim) is not int else 0 for dim in array[1]]  # a symbolic dimension is a name
        dimensions.extend(dim for dim in array[1] if type(dim) is int)
        return data | {"array": [array[0], kept]}
    return {name: _without_dimensions(item, dimensions) for name, item in sorted(data.items())}
