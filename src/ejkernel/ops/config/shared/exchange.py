# SPDX-License-Identifier: Apache-2.0
"""What two places make of each other's entries: folders of a cache, and shared caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from ejkernel.ops.config._files import UnusableError, expanded, identity, is_url, location, warn_of
from ejkernel.ops.config._writing import write_file
from ejkernel.ops.config.entries import StoredEntry, entry_in, text_of
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.shared.choice import Verdict, by_preference, judge, provenance_class
from ejkernel.ops.config.shared.copies import LocalCopy
from ejkernel.ops.config.shared.layer import SharedLayer
from ejkernel.ops.config.shared.packs import line_of, packed
from ejkernel.ops.config.shared.stores import Store, shown
from ejkernel.ops.errors import ConfigError


class Place(Protocol):
    """Where entries are."""

    @property
    def has_classes(self) -> bool:
        """Whether it keeps an entry of each provenance class for a key, rather than one entry."""

    def variants(self) -> Iterator[list[StoredEntry]]:
        """Yield for each key all its entries, the one that answers here first."""

    def rival(self, entry: StoredEntry) -> StoredEntry | None:
        """Return what is there of the key of an entry that it would stand beside; `None` if nothing is."""

    def put(self, entries: Sequence[StoredEntry]) -> None:
        """Put entries there; when this returns, they are kept.

        Raises:
            OSError: they cannot be written.
        """


class FolderPlace:
    """The folder of a cache, which has one entry for each key.

    Args:
        folder: The folder.
    """

    has_classes = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def variants(self) -> Iterator[list[StoredEntry]]:
        """See `Place`."""
        for _, entry in PersistentCache(self.folder, shipped=False).entries():
            yield [entry]

    def rival(self, entry: StoredEntry) -> StoredEntry | None:
        """See `Place`."""
        try:
            return entry_in(self.folder, entry.key)
        except UnusableError as error:
            warn_of(str(self.folder.joinpath(*location(entry.key))), error)
            return None

    def put(self, entries: Sequence[StoredEntry]) -> None:
        """See `Place`."""
        for entry in entries:
            write_file(self.folder.joinpath(*location(entry.key)), text_of(entry))


class SharedPlace:
    """A shared cache, which has an entry for each key and provenance class; its copy here is brought up to date.

    Args:
        url: See `Store`.
        cache_dir: The folder that the copy is kept in.
    """

    has_classes = True

    def __init__(self, url: str, cache_dir: Path) -> None:
        self._store = Store(url)
        self.layer = SharedLayer(url, cache_dir, connect=lambda _: self._store)
        self.fetched = self.layer.refresh()
        self.layer.tell()
        self._is_empty = self.layer.is_empty

    def __str__(self) -> str:
        return shown(self._store.url)

    @property
    def copy(self) -> LocalCopy:
        """The copy of it."""
        assert self.layer.copy is not None  # it was brought up to date
        return self.layer.copy

    def variants(self) -> Iterator[list[StoredEntry]]:
        """See `Place`."""
        yield from () if self._is_empty else map(by_preference, self.copy.variants())

    def rival(self, entry: StoredEntry) -> StoredEntry | None:
        """See `Place`."""
        mine, there = provenance_class(entry), [] if self._is_empty else self.copy.find(entry.key)
        return next((other for other in there if provenance_class(other) == mine), None)

    def put(self, entries: Sequence[StoredEntry]) -> None:
        """See `Place`: into new objects, so that nothing of another writer's can be lost."""
        for name, raw in packed(map(line_of, entries)):
            self._store.write(name, raw)
            self.copy.add(name, raw)
            self._is_empty = False

    def merge(self) -> int:
        """Make as few packs as can be of those that are there; return how many fewer there are.

        What is removed was read before, and all of it that was not worse than something else is kept by then; so
        whoever does the same, or adds a pack meanwhile, loses nothing.

        Raises:
            UnusableError: the copy is damaged; nothing is changed.
            OSError: the place cannot be read or written.
        """
        before = self._store.sizes()
        if not before.keys() <= frozenset().union(*(pack.names for pack in self.copy.packs())):
            self.layer.refresh()
        read = frozenset().union(*(pack.names for pack in self.copy.packs())) & before.keys()
        new = dict(packed(self.copy.best_lines()))
        for name, raw in new.items():
            if name not in before:
                self._store.write(name, raw)
        gone = read - new.keys()
        for name in gone:
            self._store.remove(name)
        self.layer.refresh()
        return len(gone) - len(new.keys() - before.keys())


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What becomes of an entry at another place.

    Attributes:
        theirs: The entry.
        ours: What is there; `None` if nothing is.
        verdict: Whether it comes to be there, and why.
    """

    theirs: StoredEntry
    ours: StoredEntry | None
    verdict: Verdict

    @property
    def action(self) -> str:
        """`added`, `replaced`, `kept`, or `same`."""
        if self.ours is None:
            return "added"
        if line_of(self.ours) == line_of(self.theirs):
            return "same"
        return "replaced" if self.verdict.takes else "kept"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What comes of bringing the entries of some places to another one.

    Attributes:
        steps: What becomes of each entry.
        entries: What is put there.
    """

    steps: tuple[Step, ...]
    entries: tuple[StoredEntry, ...]

    @property
    def conflicts(self) -> list[Step]:
        """The steps where nothing tells which of two configurations is the better."""
        return [step for step in self.steps if step.verdict.is_conflict]


def plan(sources: Iterable[Place], target: Place) -> Plan:
    """Return what comes of bringing the entries of some places to another one; nothing is changed yet."""
    found: list[Step] = []
    put: dict[tuple[str, ...], StoredEntry] = {}
    for source in sources:
        for variants in source.variants():
            for entry in variants if target.has_classes else variants[:1]:
                slot = (identity(entry.key), *(provenance_class(entry) if target.has_classes else ()))
                step = _step(entry, put.get(slot) or target.rival(entry))
                found.append(step)
                if step.action in ("added", "replaced"):
                    put[slot] = entry
    return Plan(tuple(found), tuple(put.values()))


def _step(theirs: StoredEntry, ours: StoredEntry | None) -> Step:
    return Step(theirs, ours, Verdict(True, "") if ours is None else judge(ours, theirs))


def place_of(name: str, cache_dir: Path) -> FolderPlace | SharedPlace:
    """Return the place of that name, a folder or a URL; of a URL, the copy here is brought up to date.

    Args:
        name: The folder's path, or the URL.
        cache_dir: The cache's own folder, which copies are kept in.

    Raises:
        ConfigError: there is no such folder.
        OSError: a URL cannot be read, or its copy not be written.
    """
    if is_url(name):
        return SharedPlace(name, cache_dir)
    folder = expanded(name)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}, and it is no URL either, such as s3://bucket/{folder.name}.")
    return FolderPlace(folder)
