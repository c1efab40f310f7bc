# SPDX-License-Identifier: Apache-2.0
"""The copy of a shared cache on this machine: a folder of packs, which are found, added and merged without a lock.

A file of it is never changed, so processes cannot lose what others have added: one that merges packs removes only those
that it has read, once what it made of them is there.
"""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ejkernel.ops.config._files import UnusableError, check_inside, warn_of
from ejkernel.ops.config._writing import write_chunks
from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.config.shared import packs
from ejkernel.ops.config.shared.choice import best_of_classes, by_preference
from ejkernel.ops.config.shared.packs import (
    SUFFIX,
    DamagedError,
    Pack,
    checked,
    entry_in_line,
    line_of,
    read_line,
    token_in,
    token_of,
)
from ejkernel.ops.utils.printable import printable

logger = logging.getLogger(__name__)

_TICK_NS: Final = 2_000_000_000  # of the coarsest clock of a file system
_ATTEMPTS: Final = 3  # of a lookup, while other processes merge packs
MOST_PACKS: Final = 4  # more are merged into one, for each is searched for each key


class LocalCopy:
    """A folder of packs.

    A pack or a line that cannot be used is left out, with one `CacheWarning`.

    Args:
        folder: The folder; it need not be there.
        root: The cache folder that it is in; no folder between the two may be a link.
    """

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        self.folder = folder
        self._root = root
        self._name = str(folder)
        self._packs: dict[str, Pack] = {}
        self._listed: int | None = None
        self._damaged: set[str] = set()  # names of files

    def packs(self) -> list[Pack]:
        """Return the packs that are there; the folder is listed only if it has changed."""
        for _ in range(_ATTEMPTS):
            try:
                self._check_folder()
                changed = os.stat(self._name).st_mtime_ns
                if changed == self._listed:
                    break
                self._packs = self._opened_packs(os.listdir(self._name))
                # A change within the same tick of the file system's clock would leave no trace.
                self._listed = changed if time.time_ns() - changed > _TICK_NS else None
                break
            except (FileNotFoundError, NotADirectoryError):  # there is none; or one was merged since it was listed
                self._packs, self._listed = {}, None
            except OSError as error:
                warn_of(self._name, error)
                self._packs, self._listed = {}, None
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
                self._leave_out(self.folder / name, error)
        return found

    def whole_packs(self) -> list[Pack]:
        """Return the packs that are there, but for those that were found damaged."""
        return [pack for pack in self.packs() if pack.path.name not in self._damaged]

    def verify(self) -> None:
        """Read all packs, and take note of those that are damaged."""
        for pack in self.packs():
            try:
                packs.verify(pack.path)
            except DamagedError:
                self._damaged.add(pack.path.name)
            except (OSError, UnusableError) as error:
                warn_of(str(pack.path), error)

    def remove_damaged(self) -> None:
        """Remove the packs that were found damaged, if all that they had is in others.

        Raises:
            OSError: one cannot be removed.
        """
        known = frozenset().union(*(pack.names for pack in self.whole_packs()))
        opened = {pack.path.name: pack for pack in self.packs()}
        for name in sorted(self._damaged):
            if name not in opened or opened[name].names <= known:  # what cannot be opened has no answers
                if self._is_damaged(name):  # another process may have fetched it again
                    self._check_folder()
                    (self.folder / name).unlink(missing_ok=True)
                self._damaged.discard(name)
        self._listed = None

    def _is_damaged(self, name: str) -> bool:
        try:
            packs.verify(self.folder / name)
        except (OSError, UnusableError):
            return True
        return False

    def _check_folder(self) -> None:
        """Raise if the copy's folder is a link, which would lead out of the cache.

        Raises:
            OSError: it is.
        """
        if self._root is not None:
            check_inside(self._root, self.folder / SUFFIX)

    def _leave_out(self, path: Path, error: Exception) -> None:
        """Warn that a pack, or some of it, is of no use; one that is damaged is to be had again."""
        if isinstance(error, DamagedError):
            self._damaged.add(path.name)
        warn_of(str(path), error)

    def find(self, key: object) -> list[StoredEntry]:
        """Return the entries of a key in the order in which they answer here: of each provenance class the best."""
        token = token_of(key)
        found = []
        for line, pack in self._found(token).items():
            try:
                found.append(entry_in_line(line, key))
            except UnusableError as error:
                self._leave_out(pack.path, error)
        return by_preference(found) if len(found) > 1 else found

    def entries(self, operation: str | None = None) -> Iterator[StoredEntry]:
        """Yield for each key the entry that answers here; with `operation`, of that one alone, without its version."""
        for entries in self.variants(operation):
            yield entries[0] if len(entries) == 1 else by_preference(entries)[0]

    def variants(self, operation: str | None = None) -> Iterator[list[StoredEntry]]:
        """Yield for each key all entries of it; see `entries`."""
        wanted = None if operation is None else json.dumps(f"{operation}@v")[:-1].encode()  # as lines have it
        for _, lines in itertools.groupby(_merged([self._walked(pack) for pack in self.packs()]), token_in):
            read = [self._read(line) for line in lines if wanted is None or wanted in line]
            found = [entry for entry in read if entry is not None]
            if found:
                yield found

    def add(self, name: str, raw: bytes) -> None:
        """Add a pack, which was checked.

        Raises:
            OSError: it cannot be written.
        """
        self._check_folder()
        write_chunks(self.folder / name, lambda: (raw,))
        self._damaged.discard(name)
        self._packs.pop(name, None)
        self._listed = None

    def remove(self, gone: Sequence[Pack]) -> None:
        """Remove packs.

        Raises:
            OSError: one cannot be removed.
        """
        for pack in gone:
            self._check_folder()
            pack.path.unlink(missing_ok=True)
            self._damaged.discard(pack.path.name)
        self._listed = None

    def merge(self, most: int = MOST_PACKS) -> None:
        """Make one pack of all, if there are more than `most`; of each key and provenance class the best stays.

        Raises:
            UnusableError: a line of them is not what was written; nothing is changed.
            OSError: it cannot be written.
        """
        sources = self.packs()
        if len(sources) <= most:
            return
        names = sorted(frozenset().union(*(pack.names for pack in sources)))
        target = self.folder / packs.merged_name(names)
        write_chunks(target, lambda: packs.written(self.best_lines(sources), names))
        self.remove([pack for pack in sources if pack.path != target])

    def best_lines(self, sources: Sequence[Pack] | None = None) -> Iterator[bytes]:
        """Yield, sorted, the lines of packs that are not worse than another one; those of another schema stay.

        Raises:
            UnusableError: one is not what was written, so that what is made of them must not replace them.
            OSError: a pack cannot be read.
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
        """Yield the lines of a pack as far as it can be read."""
        try:
            yield from pack.walk()
        except (OSError, UnusableError) as error:
            self._leave_out(pack.path, error)

    def _checked(self, pack: Pack) -> Iterator[bytes]:
        """Yield the lines of a pack; see `best_lines`."""
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
        """Return the lines of a key, each with a pack that has it."""
        for _ in range(_ATTEMPTS):
            found: dict[bytes, Pack] = {}
            is_whole = True
            for pack in self.packs():
                try:
                    found |= dict.fromkeys(pack.find(token), pack)
                except FileNotFoundError:  # another process has put others in its place
                    is_whole, self._listed = False, None
                except (OSError, UnusableError) as error:
                    self._leave_out(pack.path, error)
            if is_whole:
                break
        return found


def _merged(walks: Sequence[Iterator[bytes]]) -> Iterator[bytes]:
    """Yield the lines of packs, sorted, each once."""
    if len(walks) == 1:
        yield from walks[0]
        return
    previous = b""
    for line in heapq.merge(*walks):
        if line != previous:
            previous = line
            yield line
