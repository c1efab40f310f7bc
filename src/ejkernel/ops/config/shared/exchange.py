# SPDX-License-Identifier: Apache-2.0
"""Copying entries between places: cache folders and shared caches."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ejkernel.ops.config._files import UnusableError, expanded, is_url, location, warn_of
from ejkernel.ops.config._writing import replace_judged
from ejkernel.ops.config.entries import StoredEntry, check_key, read_at, text_of
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.shared.choice import (
    Verdict,
    by_preference,
    calls_of,
    evidence,
    judge,
    provenance_class,
    search_of,
    together,
)
from ejkernel.ops.config.shared.copies import LocalCopy
from ejkernel.ops.config.shared.layer import SharedLayer
from ejkernel.ops.config.shared.packs import line_of, packed
from ejkernel.ops.config.shared.stores import Store
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ConfigError


class _ChangedError(Exception):
    """Another process has changed an entry since a new entry was compared with it."""


class FolderPlace:
    """A cache folder, with one entry per key.

    Args:
        folder: The folder.

    Attributes:
        has_classes: Whether the place keeps one entry per key and provenance class, rather than one per key.
    """

    has_classes = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def variants(self) -> Iterator[list[StoredEntry]]:
        """Yield, for each key, the list of its entries; lookups on this machine use the first."""
        for _, entry in PersistentCache(self.folder, shipped=False).entries():
            yield [entry]

    def rival(self, entry: StoredEntry) -> StoredEntry | None:
        """Return the existing entry that `entry` would replace, or `None`."""
        file = self.folder.joinpath(*location(entry.key))
        try:
            found = read_at(file, root=self.folder)
            if found is not None:
                check_key(found, entry.key)
            return found
        except UnusableError as error:
            warn_of(str(file), error)
            return None

    def put(
        self, entries: Sequence[StoredEntry], rivals: Mapping[ConfigKey, StoredEntry | None] | None = None
    ) -> Sequence[StoredEntry]:
        """Write entries durably. Calls tuned together are written together, or not at all.

        Args:
            entries: The entries.
            rivals: The existing entries that they were compared with, by key. `None`: replace
                existing entries without a comparison.

        Returns:
            The entries that were not written, because another process has changed their rivals since.

        Raises:
            OSError: The entries cannot be written.
        """
        together = collections.defaultdict[str, list[StoredEntry]](list)
        for entry in entries:
            together[search_of(entry) or str(entry.key)].append(entry)
        left: list[StoredEntry] = []
        for members in together.values():
            texts = {self.folder.joinpath(*location(entry.key)): text_of(entry) for entry in members}
            try:
                replace_judged(texts, self.folder, functools.partial(self._check, members, rivals))
            except _ChangedError:
                left += members
        return left

    def _check(self, members: Sequence[StoredEntry], rivals: Mapping[ConfigKey, StoredEntry | None] | None) -> None:
        """Raise `_ChangedError` if another process has changed a rival of these entries."""
        for entry in members if rivals is not None else ():
            before, now = (rivals or {})[entry.key], self.rival(entry)
            if (before and line_of(before)) != (now and line_of(now)):
                raise _ChangedError


class SharedPlace(SharedLayer):
    """A shared cache to read and write, with one entry per key and provenance class.

    The constructor refreshes the copy on this machine and fetches damaged packs again.

    Args:
        url: See `Store`.
        cache_dir: The folder for the copy.
        may_be_new: Accept a shared cache that does not exist yet.
        bounded: Reject a shared cache that is too large for ordinary programs to read.

    Attributes:
        copy: The copy on this machine.
        fetched: Number of packs that the constructor fetched.

    Raises:
        ConfigError: The shared cache does not exist, and has no copy on this machine.
        OSError: The URL cannot be read, or its copy cannot be written.
    """

    has_classes = True
    copy: LocalCopy  # the constructor passes a folder

    def __init__(self, url: str, cache_dir: Path, *, may_be_new: bool = False, bounded: bool = True) -> None:
        super().__init__(url, cache_dir, connect=Store, bounded=bounded)
        self.copy.verify()
        self.fetched = self.refresh()
        if not (self.is_there or may_be_new or self.copy.packs()):
            raise ConfigError(f"{self} cannot be read: {self.problem}.")
        if self.is_there or not may_be_new:
            self.tell()

    def variants(self) -> Iterator[list[StoredEntry]]:
        """See `FolderPlace`."""
        yield from () if self.is_empty else map(by_preference, self.copy.variants())

    def rival(self, entry: StoredEntry) -> StoredEntry | None:
        """See `FolderPlace`."""
        mine, there = provenance_class(entry), [] if self.is_empty else self.copy.find(entry.key)
        return next((other for other in there if provenance_class(other) == mine), None)

    def put(
        self, entries: Sequence[StoredEntry], rivals: Mapping[ConfigKey, StoredEntry | None] | None = None
    ) -> Sequence[StoredEntry]:
        """See `FolderPlace`. Writes only new objects, so entries of other writers cannot be lost."""
        del rivals
        for name, raw in packed(map(line_of, entries)):
            self.store.write(name, raw)
            self.copy.add(name, raw)
            self.is_empty = False
        return ()


Place = FolderPlace | SharedPlace


class Step(NamedTuple):
    """The decision about copying one entry.

    Attributes:
        theirs: The entry to copy.
        ours: The existing entry at the target, or `None`.
        verdict: Whether the entry is copied, and why.
    """

    theirs: StoredEntry
    ours: StoredEntry | None
    verdict: Verdict

    @property
    def action(self) -> str:
        """`added`, `replaced`, `kept`, or `same`."""
        if self.ours is None:
            return "added" if self.verdict.takes else "kept"
        if line_of(self.ours) == line_of(self.theirs):
            return "same"
        return "replaced" if self.verdict.takes else "kept"


class Plan:
    """The decisions about copying entries from some places to a target.

    Args:
        target: The place that entries are copied to.

    Attributes:
        steps: One decision per entry.
        rivals: The target's existing entries for the calls in `entries`, by key.
    """

    def __init__(self, target: Place) -> None:
        self._target = target
        self._put: dict[tuple[str, ...], StoredEntry] = {}  # by slot, see `_slot`
        self.steps: list[Step] = []
        self.rivals: dict[ConfigKey, StoredEntry | None] = {}

    @property
    def entries(self) -> tuple[StoredEntry, ...]:
        """The entries to write."""
        return tuple(self._put.values())

    @property
    def conflicts(self) -> list[Step]:
        """The steps that cannot decide which of two configurations is better."""
        return [step for step in self.steps if step.verdict.is_conflict]

    def take(self, source: Place) -> None:
        """Decide about the entries of a place. A target with one entry per key gets the first entry of each key."""
        if self._target.has_classes:
            choices = [[entry] for variants in source.variants() for entry in variants]
        else:
            choices = self._without_incomplete(list(source.variants()))
        sets: dict[str, list[list[StoredEntry]]] = {}
        for choice in choices:
            search = search_of(choice[0])
            if search:
                sets.setdefault(search, []).append(choice)
            else:
                self._note([self._step(choice[0])])
        for members in sets.values():
            self._take_set(members)

    def _without_incomplete(self, choices: list[list[StoredEntry]]) -> list[list[StoredEntry]]:
        """Remove the sets tuned together of which a call is missing or prefers an entry of another set.

        Two sets may share a call. The worse set is removed, and its other calls use their next entry.
        """
        while True:
            firsts = collections.defaultdict(list)
            for choice in choices:
                firsts[search_of(choice[0])].append(choice[0])
            incomplete = {
                name: found for name, found in firsts.items() if name and len(found) < len(calls_of(found[0]))
            }
            if not incomplete:
                return choices
            worst = min(incomplete, key=lambda name: max(map(evidence, incomplete[name])))
            verdict = Verdict(
                False, "tuned together with a call that has no entry or one of another set", is_conflict=True
            )
            left = []
            for choice in choices:
                others = [entry for entry in choice if search_of(entry) != worst]
                if others:
                    left.append(others)
                elif self._target.rival(choice[0]) is None:
                    self._note([Step(choice[0], None, verdict)])
            choices = left

    def _take_set(self, members: Sequence[list[StoredEntry]]) -> None:
        steps = [self._step(choice[0]) for choice in members]
        stays = [step for step in steps if step.action == "kept"]
        if not stays:
            self._note(steps)
            return
        why = f"tuned together with a call that keeps its entry: {stays[0].verdict.why}"
        verdict = Verdict(False, why, is_conflict=True)
        self._note([step if step.action in ("kept", "same") else step._replace(verdict=verdict) for step in steps])
        for choice in members:  # copy entries of the same calls tuned alone, if any
            alone = next((entry for entry in choice[1:] if not together(entry)), None)
            if alone is not None:
                self._note([self._step(alone)])

    def _note(self, steps: Sequence[Step]) -> None:
        self.steps += steps
        self._put |= {self._slot(step.theirs): step.theirs for step in steps if step.action in ("added", "replaced")}

    def _step(self, entry: StoredEntry) -> Step:
        ours = self._put.get(self._slot(entry))
        if ours is None:
            ours = self.rivals[entry.key] = self._target.rival(entry)
        return Step(entry, ours, Verdict(True, "") if ours is None else judge(ours, entry))

    def _slot(self, entry: StoredEntry) -> tuple[str, ...]:
        """Return the slot of an entry; the target keeps one entry per slot."""
        return (*entry.key, *(provenance_class(entry) if self._target.has_classes else ()))


def plan(sources: Iterable[Place], target: Place) -> Plan:
    """Decide which entries of some places to copy to a target, without changing anything.

    Calls tuned together are copied together, or not at all if the target keeps its entry for one of them.
    """
    found = Plan(target)
    for source in sources:
        found.take(source)
    return found


def bring(sources: Sequence[Place], target: Place) -> Plan:
    """Copy the entries of some places to a target and return the decisions.

    An entry of the target that another process changes during the copy stays, and so do those tuned together with it.

    Raises:
        OSError: The target cannot be written.
    """
    found = plan(sources, target)
    late = {entry.key for entry in target.put(found.entries, found.rivals)}
    verdict = Verdict(False, "another process is saving configurations of this call")
    found.steps = [step._replace(verdict=verdict) if step.theirs.key in late else step for step in found.steps]
    return found


def place_of(name: str, cache_dir: Path) -> FolderPlace | SharedPlace:
    """Return the place with this name. For a URL, this refreshes the copy on this machine.

    Args:
        name: The path of a folder, or a URL.
        cache_dir: The cache folder, which holds the copies.

    Raises:
        ConfigError: The folder or shared cache does not exist.
        OSError: The URL cannot be read, or its copy cannot be written.
    """
    if is_url(name):
        return SharedPlace(name, cache_dir)
    folder = expanded(name)
    if not folder.is_dir():
        raise ConfigError(
            f"the folder {folder} does not exist; pass a folder or a URL such as s3://bucket/{folder.name}."
        )
    return FolderPlace(folder)
