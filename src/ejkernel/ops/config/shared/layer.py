# SPDX-License-Identifier: Apache-2.0
"""A layer of a persistent cache that machines share. Lookups read a copy on this machine; misses refresh the copy."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

from ejkernel.ops.config._files import UnusableError, slug
from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.config.shared.copies import LocalCopy
from ejkernel.ops.config.shared.packs import LARGEST
from ejkernel.ops.config.shared.stores import MOST, REMEDY, Store, shown
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import CacheWarning, EjkernelError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import counted
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.values.signature import digest_of

_T = TypeVar("_T")
logger = logging.getLogger(__name__)

FOLDER: Final = ".layers"  # in the cache folder; no device has this name
AGAIN: Final = 900.0  # seconds between two refreshes of the copy
PATIENCE: Final = 10.0  # seconds that a call waits for a refresh; a slower refresh serves later calls
_LISTINGS: Final = 3  # listings of the store, in case another machine merges packs during a refresh
_AT_ONCE: Final = 8  # packs fetched in parallel
_MOST: Final = 1 << 30  # maximum bytes of a copy


class SharedLayer:
    """A shared cache and its copy on this machine. Lookups read only the copy.

    Args:
        url: See `Store`.
        cache_dir: The folder of the persistent cache that this layer belongs to; the copy is kept below it. `None`:
            no folder and no copy.
        connect: Makes the store.
        clock: Monotonic clock in seconds.
        bounded: Whether to reject a shared cache that is too large for ordinary programs to read.
    """

    def __init__(
        self,
        url: str,
        cache_dir: Path | None,
        *,
        connect: Callable[[str], Store] = Store,
        clock: Callable[[], float] = time.monotonic,
        bounded: bool = True,
    ) -> None:
        self.url = url
        self._bounded = bounded
        self.copy = None if cache_dir is None else LocalCopy(copy_folder(url, cache_dir), cache_dir)
        self.store = connect(url)
        self._clock = clock
        self._next = self._until = -float("inf")
        self._running: threading.Thread | None = None
        self._lock = threading.Lock()
        self._warned = False
        self.problem = ""
        # The state of the store at its last listing; the copy may hold entries that the store has lost.
        self.is_empty, self.is_there = False, True

    def __str__(self) -> str:
        return shown(self.url)

    def find(self, key: ConfigKey) -> list[StoredEntry]:
        """Return the copy's entries for a key, in lookup order."""
        return [] if self.copy is None else self.copy.find(key)

    def entries(self, operation: str | None = None) -> Iterator[StoredEntry]:
        """Yield, for each key of the copy, the entry that lookups use."""
        return iter(()) if self.copy is None else self.copy.entries(operation)

    def refresh_if_due(self, patience: float = PATIENCE) -> None:
        """Refresh the copy, unless it was refreshed within the last `AGAIN` seconds, and wait up to `patience` seconds.

        If the store cannot be reached, emit one `CacheWarning` and leave the copy as it is.
        """
        with self._lock:
            now = self._clock()
            if self._running is None or not self._running.is_alive():
                if now < self._next:
                    return
                self._next, self._until = now + AGAIN, now + patience
                # In a thread, because the store's library may block for much longer than `patience`.
                self._running = threading.Thread(target=self._refresh, name=f"read {self}", daemon=True)
                self._running.start()
            running, left = self._running, max(0.0, self._until - now)
        running.join(left)
        self.tell()
        if running.is_alive() and not self.problem:
            self._warn(f"it has not answered for {patience:g} s")

    def tell(self) -> None:
        """Warn, once for this object, of the problem that the last refresh had."""
        if self.problem:
            self._warn(self.problem)

    def refresh(self) -> int:
        """Refresh the copy and return the number of fetched packs; `problem` describes packs that cannot be used.

        Raises:
            UnreachableError: The store cannot be read.
            OSError: The copy cannot be written.
        """
        if self.copy is None:
            raise OSError("the cache has no folder for a copy; set EJKERNEL_CACHE_DIR")
        store, fetched, most = self.store, 0, MOST if self._bounded else math.inf
        listed = store.sizes(most)
        for _ in range(_LISTINGS):
            fetched += self._fetch(self.copy, listed)
            gone = [pack for pack in self.copy.packs() if not pack.names <= listed.keys()]
            before, listed = listed, store.sizes(most) if gone else listed
            # After a concurrent merge, the entries of a removed pack may be in an unlisted pack.
            if listed == before:
                # Remove packs that the store has removed or merged. An empty store may just not be mounted.
                self.copy.remove(gone if listed else [])
                self.copy.remove_damaged()
                break
        self.is_empty, self.is_there = not listed, store.is_there
        if not self.is_there:
            self.problem = "it does not exist, or nothing was ever saved there; check the URL"
        try:
            self.copy.merge()
        except (OSError, UnusableError) as error:  # e.g. another process merges the same packs
            logger.info("the packs of %s were not merged: %s", self, error_text(error))
        return fetched

    def _fetch(self, copy: LocalCopy, listed: Mapping[str, int]) -> int:
        """Add the missing packs to the copy, return their number, and describe unusable packs in `problem`."""
        stay = [pack for pack in copy.whole_packs() if pack.names <= listed.keys()]
        known = frozenset().union(*(pack.names for pack in stay))
        new = {name: size for name, size in sorted(listed.items()) if name not in known}
        usable = [size for size in new.values() if size <= LARGEST]
        if self._bounded and sum(usable) > _MOST - sum(pack.size for pack in stay):
            raise OSError(f"its copy would be larger than {_MOST} bytes; {REMEDY}")

        problems: list[str] = []

        def fetch(name: str) -> bool:
            """Fetch one pack; return `False` if it is gone or cannot be used."""
            try:
                if new[name] > LARGEST:
                    raise UnusableError(f"it has {new[name]} bytes, more than the maximum of {LARGEST}")
                raw = self.store.read(name)
            except UnusableError as error:
                problems.append(f"{name}: {error}")
                return False
            if raw is not None:
                copy.add(name, raw)
            return raw is not None

        fetched = sum(in_parallel(fetch, new))
        some = f"{counted(len(problems), 'pack')} of entries cannot be used"
        self.problem = f"{some}, e.g. {min(problems)}" if problems else ""
        return fetched

    def _refresh(self) -> None:
        try:
            self.refresh()
        except (OSError, EjkernelError, Warning) as error:  # Warning: the program may turn warnings into errors
            self.problem = str(error) if isinstance(error, EjkernelError) else error_text(error)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            has_copy = self.copy is not None and bool(self.copy.packs())
            instead = "its earlier copy is used" if has_copy else "there is no copy of it here"
            warn(f"the shared cache {self} could not be read and {instead}: {reason}", CacheWarning)


def copy_folder(url: str, cache_dir: Path) -> Path:
    """Return the folder for the copy of a shared cache."""
    return cache_dir / FOLDER / f"{slug(shown(url))}-{digest_of(os.fsencode(url), 8)}"


def in_parallel(do: Callable[[str], _T], items: Iterable[str]) -> list[_T]:
    """Apply `do` to all items in parallel and return the results in any order. The first error stops the work.

    The threads are daemons: those of a pool would keep the process alive while a network does not answer.
    """
    every = list(items)
    todo = iter(every)  # the threads share it: a list's iterator yields each item once
    found: list[_T] = []
    raised: list[Exception] = []

    def work() -> None:
        try:
            for item in todo:
                found.append(do(item))
                if raised:
                    return
        except Exception as error:  # noqa: BLE001 - the caller's thread raises it
            raised.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_AT_ONCE, len(every)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return found
