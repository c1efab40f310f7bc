# SPDX-License-Identifier: Apache-2.0
"""The copy of a shared cache on this machine: a folder of packs. Finding, adding and merging packs need no lock.

Files are never modified, so a process cannot lose entries that others have added. A process that merges packs first
writes the merged pack and then removes only the packs that it has read.
"""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ejkernel.ops.config._files import UnusableError, check_inside, warn_of
from ejkernel.ops.config._writing import write_chunks, write_file
from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.config.shared import packs
from ejkernel.ops.config.shared.choice import best_of_classes, by_preference
from ejkernel.ops.config.shared.packs import SUFFIX, DamagedError, Pack, checked, line_of, read_line, token_in, token_of
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.error_text import printable

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 3  # attempts of a lookup, while other processes merge packs
MOST_PACKS: Final = 4  # more packs are merged, because a lookup searches each pack


class LocalCopy:
    """A folder of packs.

    Unusable packs and lines are skipped, with one `CacheWarning` each.

    Args:
        folder: The folder; it need not exist.
        root: The cache folder that contains it; no folder between the two may be a link.
    """

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        self.folder = folder
        self._root = root
        self._packs: dict[str, Pack] = {}
        self._damaged: set[str] = set()  # names of files

    def packs(self) -> list[Pack]:
        """Return the existing packs."""
        for _ in range(_ATTEMPTS):
            try:
                self._check_folder()
                self._packs = self._opened_packs(os.listdir(self.folder))
                break
            except (FileNotFoundError, NotADirectoryError):  # no folder, or a pack was merged after the listing
                self._packs = {}
            except OSError as error:
                warn_of(str(self.folder), error)
                self._packs = {}
                break
        return list(self._packs.values())

    def _opened_packs(self, names: Sequence[str]) -> dict[str, Pack]:
        found = {}
        for name in sorted(filter(packs.is_name, names)):
            try:
                found[name] = self._packs.get(name) or Pack(self.folder / name)
            except FileNotFoundError:
                raise
            except (OSError, UnusableError) as error:
                self._mark_unusable(self.folder / name, error)
        return found

    def whole_packs(self) -> list[Pack]:
        """Return the existing packs without those known to be damaged."""
        return [pack for pack in self.packs() if pack.path.name not in self._damaged]

    def verify(self) -> None:
        """Read all packs and remember the damaged ones."""
        for pack in self.packs():
            try:
                packs.verify(pack.path)
            except DamagedError:
                self._damaged.add(pack.path.name)
            except (OSError, UnusableError) as error:
                warn_of(str(pack.path), error)

    def remove_damaged(self) -> None:
        """Remove the damaged packs whose entries are also in other packs.

        Raises:
            OSError: A pack cannot be removed.
        """
        known = frozenset().union(*(pack.names for pack in self.whole_packs()))
        opened = {pack.path.name: pack for pack in self.packs()}
        for name in sorted(self._damaged):
            if name not in opened or opened[name].names <= known:  # a pack that cannot be opened answers no lookup
                self._remove(name)

    def _check_folder(self) -> None:
        """Check that no link leads from the cache folder to another place.

        Raises:
            OSError: The copy's folder, or a folder above it inside the cache, is a link.
        """
        if self._root is not None:
            check_inside(self._root, self.folder / SUFFIX)

    def _mark_unusable(self, path: Path, error: Exception) -> None:
        """Warn that a pack, or a part of it, cannot be used. A damaged pack is marked, to be fetched again."""
        if isinstance(error, DamagedError):
            self._damaged.add(path.name)
        warn_of(str(path), error)

    def find(self, key: ConfigKey) -> list[StoredEntry]:
        """Return the best entry of a key per provenance class, in lookup order."""
        token = token_of(key)
        found = []
        for line, pack in self._found(token).items():
            try:
                found.append(read_line(line))
            except UnusableError as error:
                self._mark_unusable(pack.path, error)
        return by_preference(found) if len(found) > 1 else found

    def entries(self, operation: str | None = None) -> Iterator[StoredEntry]:
        """Yield, for each key, the entry that lookups use.

        Args:
            operation: Yield only entries of this operation (its name without the version).
        """
        for entries in self.variants(operation):
            yield entries[0] if len(entries) == 1 else by_preference(entries)[0]

    def variants(self, operation: str | None = None) -> Iterator[list[StoredEntry]]:
        """Yield, for each key, the list of all its entries; see `entries`."""
        wanted = None if operation is None else json.dumps(f"{operation}@v")[:-1].encode()  # as written in lines
        for _, lines in itertools.groupby(_merged([self._walked(pack) for pack in self.packs()]), token_in):
            read = [self._read(line) for line in lines if wanted is None or wanted in line]
            found = [entry for entry in read if entry is not None]
            if found:
                yield found

    def add(self, name: str, raw: bytes) -> None:
        """Add a pack that the caller has checked.

        Raises:
            OSError: The pack cannot be written.
        """
        self._check_folder()
        write_file(self.folder / name, raw)
        self._damaged.discard(name)
        self._packs.pop(name, None)

    def remove(self, gone: Sequence[Pack]) -> None:
        """Remove packs.

        Raises:
            OSError: A pack cannot be removed.
        """
        for pack in gone:
            self._remove(pack.path.name)

    def _remove(self, name: str) -> None:
        self._check_folder()
        (self.folder / name).unlink(missing_ok=True)
        self._damaged.discard(name)

    def merge(self, most: int = MOST_PACKS) -> None:
        """Merge all packs into a single pack if there are more than `most`, keeping the best entry per key and class.

        Raises:
            UnusableError: A line is damaged; nothing was changed.
            OSError: The merged pack cannot be written.
        """
        sources = self.packs()
        if len(sources) <= most:
            return
        names = sorted(frozenset().union(*(pack.names for pack in sources)))
        target = self.folder / packs.merged_name(names)
        write_chunks(target, lambda: packs.written(self.best_lines(sources), names))
        self.remove([pack for pack in sources if pack.path != target])

    def best_lines(self, sources: Sequence[Pack] | None = None) -> Iterator[bytes]:
        """Yield, sorted, the line of the best entry per key and provenance class, and all lines of other schemas.

        Raises:
            UnusableError: A line is damaged, so the result must not replace the packs.
            OSError: A pack cannot be read.
        """
        walks = [self._checked(pack) for pack in (self.packs() if sources is None else sources)]
        for _, lines in itertools.groupby(_merged(walks), token_in):
            of_key = list(lines)
            if len(of_key) == 1:
                yield of_key[0]
                continue
            read = [(line, self._read(line)) for line in of_key]
            best = {line_of(entry) for entry in best_of_classes(entry for _, entry in read if entry is not None)}
            yield from sorted(best | {line for line, entry in read if entry is None})

    def _walked(self, pack: Pack) -> Iterator[bytes]:
        """Yield the lines of a pack up to the first that cannot be read."""
        try:
            yield from pack.walk()
        except (OSError, UnusableError) as error:
            self._mark_unusable(pack.path, error)

    def _checked(self, pack: Pack) -> Iterator[bytes]:
        """Yield the lines of a pack and raise at the first damaged line; see `best_lines`."""
        try:
            yield from map(checked, pack.walk())
        except DamagedError:
            self._damaged.add(pack.path.name)
            raise

    def _read(self, line: bytes) -> StoredEntry | None:
        try:
            return read_line(line)
        except UnusableError as error:
            warn_of(f"{printable(token_in(line))} of {self.folder}", error)
            return None

    def _found(self, token: str) -> dict[bytes, Pack]:
        """Return the lines of a key, each with a pack that contains it."""
        for _ in range(_ATTEMPTS):
            found: dict[bytes, Pack] = {}
            is_whole = True
            for pack in self.packs():
                try:
                    found |= dict.fromkeys(pack.find(token), pack)
                except FileNotFoundError:  # another process has merged it
                    is_whole = False
                except (OSError, UnusableError) as error:
                    self._mark_unusable(pack.path, error)
            if is_whole:
                break
        return found


def _merged(walks: Sequence[Iterator[bytes]]) -> Iterator[bytes]:
    """Return the lines of several packs in sorted order, without duplicates."""
    return (line for line, _ in itertools.groupby(heapq.merge(*walks)))
