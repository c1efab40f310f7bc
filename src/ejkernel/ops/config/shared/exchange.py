# SPDX-License-Identifier: Apache-2.0
"""What two places make of each other's entries: folders of a cache, and shared caches."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from ejkernel.ops.config._files import UnusableError, expanded, identity, is_url, location, warn_of
from ejkernel.ops.config._writing import replace_judged
from ejkernel.ops.config.entries import StoredEntry, entry_in, text_of
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
from ejkernel.ops.config.shared.stores import Store, shown
from ejkernel.ops.errors import ConfigError

_PLANS: Final = 5  # for calls that other processes save meanwhile


class Place(Protocol):
    """Where entries are."""

    @property
    def has_classes(self) -> bool:
        """Whether it keeps an entry of each provenance class for a key, rather than one entry."""

    def variants(self) -> Iterator[list[StoredEntry]]:
        """Yield for each key all its entries, the one that answers here first."""

    def rival(self, entry: StoredEntry) -> StoredEntry | None:
        """Return what is there of the key of an entry that it would stand beside; `None` if nothing is."""

    def put(
        self, entries: Sequence[StoredEntry], rivals: Mapping[str, StoredEntry | None] | None = None
    ) -> Sequence[StoredEntry]:
        """Put entries there; when this returns, they are kept.

        Args:
            entries: The entries.
            rivals: What they were judged against, by the `identity` of the key; without, what is there is replaced.

        Returns:
            Those that were not put, because another process has put something else there since they were judged.

        Raises:
            OSError: they cannot be written.
        """


class _ChangedError(Exception):
    """An entry is no longer the one that another was judged against."""


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

    def put(
        self, entries: Sequence[StoredEntry], rivals: Mapping[str, StoredEntry | None] | None = None
    ) -> Sequence[StoredEntry]:
        """See `Place`; calls that were tuned together are written together, or not at all."""
        together = collections.defaultdict[str, list[StoredEntry]](list)
        for entry in entries:
            together[search_of(entry) or identity(entry.key)].append(entry)
        left: list[StoredEntry] = []
        for members in together.values():
            texts = {self.folder.joinpath(*location(entry.key)): text_of(entry) for entry in members}
            try:
                replace_judged(texts, self.folder, functools.partial(self._check, members, rivals))
            except _ChangedError:
                left += members
        return left

    def _check(self, members: Sequence[StoredEntry], rivals: Mapping[str, StoredEntry | None] | None) -> None:
        """Raise if another process has put something since these entries were judged."""
        for entry in members if rivals is not None else ():
            before, now = (rivals or {})[identity(entry.key)], self.rival(entry)
            if (before and line_of(before)) != (now and line_of(now)):
                raise _ChangedError


class SharedPlace:
    """A shared cache, which has an entry for each key and provenance class.

    Its copy here is brought up to date; what is damaged of that is fetched again.

    Args:
        url: See `Store`.
        cache_dir: The folder that the copy is kept in.
        may_be_new: Whether it is no surprise if there is no such place yet.
        bounded: Whether it is refused if it is too large to be read by every program.

    Attributes:
        store: The place itself.
        layer: Its copy here, and when it was brought up to date.
        fetched: How many packs were fetched for that.
    """

    has_classes = True

    def __init__(self, url: str, cache_dir: Path, *, may_be_new: bool = False, bounded: bool = True) -> None:
        self.store = Store(url)
        self.layer = SharedLayer(url, cache_dir, connect=lambda _: self.store, bounded=bounded)
        self.copy.verify()
        self.fetched = self.layer.refresh()
        if self.layer.is_there or not may_be_new:
            self.layer.tell()
        self._is_empty = self.layer.is_empty

    def __str__(self) -> str:
        return shown(self.store.url)

    @property
    def copy(self) -> LocalCopy:
        """The copy of it."""
        assert self.layer.copy is not None  # it was given a folder
        return self.layer.copy

    def variants(self) -> Iterator[list[StoredEntry]]:
        """See `Place`."""
        yield from () if self._is_empty else map(by_preference, self.copy.variants())

    def rival(self, entry: StoredEntry) -> StoredEntry | None:
        """See `Place`."""
        mine, there = provenance_class(entry), [] if self._is_empty else self.copy.find(entry.key)
        return next((other for other in there if provenance_class(other) == mine), None)

    def put(
        self, entries: Sequence[StoredEntry], rivals: Mapping[str, StoredEntry | None] | None = None
    ) -> Sequence[StoredEntry]:
        """See `Place`: into new objects, so that nothing of another writer's can be lost."""
        del rivals
        for name, raw in packed(map(line_of, entries)):
            self.store.write(name, raw)
            self.copy.add(name, raw)
            self._is_empty = False
        return ()


class Step(NamedTuple):
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
            return "added" if self.verdict.takes else "kept"
        if line_of(self.ours) == line_of(self.theirs):
            return "same"
        return "replaced" if self.verdict.takes else "kept"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What comes of bringing the entries of some places to another one.

    Attributes:
        steps: What becomes of each entry.
        entries: What is put there.
        rivals: What is there now of the calls in `entries`, by the `identity` of the key.
    """

    steps: tuple[Step, ...]
    entries: tuple[StoredEntry, ...]
    rivals: Mapping[str, StoredEntry | None] = dataclasses.field(default_factory=dict)

    @property
    def conflicts(self) -> list[Step]:
        """The steps where nothing tells which of two configurations is the better."""
        return [step for step in self.steps if step.verdict.is_conflict]


def plan(sources: Iterable[Place], target: Place) -> Plan:
    """Return what comes of bringing the entries of some places to another one; nothing is changed yet.

    Calls that were tuned together come together: if one of them has something there that is to stay, none comes.
    """
    planner = _Planner(target)
    for source in sources:
        planner.take(source)
    return Plan(tuple(planner.steps), tuple(planner.put.values()), planner.rivals)


def bring(sources: Sequence[Place], target: Place) -> Plan:
    """Bring the entries of some places to another one, and return what came of it.

    An entry that another process puts there meanwhile is judged like all others: this is planned again for its call.

    Raises:
        OSError: the target cannot be written.
    """
    found = plan(sources, target)
    left = target.put(found.entries, found.rivals)
    for _ in range(_PLANS):
        if not left:
            return found
        calls = {identity(entry.key) for entry in left}
        again = plan(sources, target)
        entries = [entry for entry in again.entries if identity(entry.key) in calls]
        left = target.put(entries, again.rivals)
        found = _joined(found, again, calls)
    late = {identity(entry.key) for entry in left}
    verdict = Verdict(False, "another process saves configurations of this call now")
    steps = [step._replace(verdict=verdict) if identity(step.theirs.key) in late else step for step in found.steps]
    return dataclasses.replace(found, steps=tuple(steps))


def _joined(first: Plan, second: Plan, calls: Collection[str]) -> Plan:
    """Return the first plan, but for some calls, by the `identity` of their keys, the second."""

    def of(steps: Sequence[Step], are_in: bool) -> list[Step]:
        return [step for step in steps if (identity(step.theirs.key) in calls) is are_in]

    entries = {identity(entry.key): entry for entry in (*first.entries, *second.entries)}
    return Plan((*of(first.steps, False), *of(second.steps, True)), tuple(entries.values()), second.rivals)


class _Planner:
    """What is to become of entries.

    Args:
        target: Where they come.

    Attributes:
        steps: What becomes of each entry.
        put: What is to be put there, by what it stands for.
        rivals: What the target had, when it was last asked, by the `identity` of the key.
    """

    def __init__(self, target: Place) -> None:
        self._target = target
        self.steps: list[Step] = []
        self.put: dict[tuple[str, ...], StoredEntry] = {}
        self.rivals: dict[str, StoredEntry | None] = {}

    def take(self, source: Place) -> None:
        """Take the entries of a place; where one has room there, the first of them."""
        if self._target.has_classes:
            choices = [[entry] for variants in source.variants() for entry in variants]
        else:
            choices = self._without_torn(list(source.variants()))
        sets: dict[str, list[list[StoredEntry]]] = {}
        for choice in choices:
            search = search_of(choice[0])
            if search:
                sets.setdefault(search, []).append(choice)
            else:
                self._note([self._step(choice[0])])
        for members in sets.values():
            self._take_set(members)

    def _without_torn(self, choices: list[list[StoredEntry]]) -> list[list[StoredEntry]]:
        """Return choices without sets of which not every call is there, or has that set's entry as its first.

        Two sets may have a call in common; the worse of them stays away, and its other calls have what comes next.
        """
        while True:
            firsts = collections.defaultdict(list)
            for choice in choices:
                firsts[search_of(choice[0])].append(choice[0])
            torn = {name: found for name, found in firsts.items() if name and len(found) < len(calls_of(found[0]))}
            if not torn:
                return choices
            worst = min(torn, key=lambda name: max(map(evidence, torn[name])))
            verdict = Verdict(False, "tuned together with a call that has another set's, or none", is_conflict=True)
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
        verdict = Verdict(False, f"tuned together with a call that stays: {stays[0].verdict.why}", is_conflict=True)
        self._note([step if step.action in ("kept", "same") else step._replace(verdict=verdict) for step in steps])
        for choice in members:  # what is better of the same calls, tuned alone, may come all the same
            alone = next((entry for entry in choice[1:] if not together(entry)), None)
            if alone is not None:
                self._note([self._step(alone)])

    def _note(self, steps: Sequence[Step]) -> None:
        self.steps += steps
        self.put |= {self._slot(step.theirs): step.theirs for step in steps if step.action in ("added", "replaced")}

    def _step(self, entry: StoredEntry) -> Step:
        ours = self.put.get(self._slot(entry))
        if ours is None:
            ours = self.rivals[identity(entry.key)] = self._target.rival(entry)
        return Step(entry, ours, Verdict(True, "") if ours is None else judge(ours, entry))

    def _slot(self, entry: StoredEntry) -> tuple[str, ...]:
        """Return what there is room for one entry of."""
        return (identity(entry.key), *(provenance_class(entry) if self._target.has_classes else ()))


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
