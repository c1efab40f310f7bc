# SPDX-License-Identifier: Apache-2.0
"""A layer of a persistent cache that machines share: read from a copy on this machine, which is brought up to date."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
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
from ejkernel.ops.errors import CacheWarning, EjkernelError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import counted
from ejkernel.ops.utils.messages.warn import warn

_T = TypeVar("_T")
logger = logging.getLogger(__name__)

FOLDER: Final = ".layers"  # in the cache's folder; no device is called so
AGAIN: Final = 900.0  # seconds after which a miss looks again for what others have found
PATIENCE: Final = 10.0  # seconds that a call waits for that; what comes later is for later calls
_LISTINGS: Final = 3  # of a place that others merge meanwhile
_AT_ONCE: Final = 8  # packs that are fetched side by side
_MOST: Final = 1 << 30  # bytes of a copy


class SharedLayer:
    """A place by its URL, and its copy on this machine, which is all that a lookup reads.

    Args:
        url: See `Store`.
        cache_dir: The folder of the cache that this is a layer of, which the copy is kept in; `None`: there is none.
        connect: Opens a store.
        clock: Seconds that only grow.
        bounded: Whether a place is refused that is too large to be read by every program.
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
        self._connect = connect
        self._clock = clock
        self._next = self._until = -float("inf")
        self._running: threading.Thread | None = None
        self._lock = threading.Lock()
        self._warned = False
        self.problem = ""
        # of the place, when it was last read; a copy of it may have what it has not
        self.is_empty, self.is_there = False, True

    def __str__(self) -> str:
        return shown(self.url)

    def find(self, key: object) -> list[StoredEntry]:
        """Return what the copy has for a key, in the order in which entries answer."""
        return [] if self.copy is None else self.copy.find(key)

    def entries(self, operation: str | None = None) -> Iterator[StoredEntry]:
        """Yield for each key of the copy the entry that answers."""
        return iter(()) if self.copy is None else self.copy.entries(operation)

    def look_again(self, patience: float = PATIENCE) -> None:
        """Bring the copy up to date, unless that was done lately, and wait for it a while.

        Where the place cannot be reached, that is one `CacheWarning`, and the copy stays as it is.
        """
        with self._lock:
            now = self._clock()
            if self._running is None or not self._running.is_alive():
                if now < self._next:
                    return
                self._next, self._until = now + AGAIN, now + patience
                # in a thread: a network that does not answer would otherwise be waited for as long as its library likes
                self._running = threading.Thread(target=self._refresh, name=f"read {self}", daemon=True)
                self._running.start()
            running, left = self._running, max(0.0, self._until - now)
        running.join(left)
        self.tell()
        if running.is_alive() and not self.problem:
            self._warn(f"it has not answered for {patience:g} s")

    def tell(self) -> None:
        """Warn, once for this object, of what the last attempt could not bring here."""
        if self.problem:
            self._warn(self.problem)

    def refresh(self) -> int:
        """Bring the copy up to date, and return how many packs were fetched; `problem` tells of those of no use.

        Raises:
            UnreachableError: the place cannot be read.
            OSError: the copy cannot be written.
        """
        if self.copy is None:
            raise OSError("there is no folder to keep a copy in; set EJKERNEL_CACHE_DIR")
        store, fetched, most = self._connect(self.url), 0, MOST if self._bounded else math.inf
        listed = store.sizes(most)
        for _ in range(_LISTINGS):
            fetched += self._fetch(store, listed)
            gone = [pack for pack in self.copy.packs() if not pack.names <= listed.keys()]
            before, listed = listed, store.sizes(most) if gone else listed
            if listed == before:  # else others merge meanwhile: what is gone may be in what was not listed yet
                # An empty place may be one that is not mounted; else what was removed there, or merged, goes here too.
                self.copy.remove(gone if listed else [])
                self.copy.remove_damaged()
                break
        self.is_empty, self.is_there = not listed, store.is_there
        if not self.is_there:
            self.problem = "there is no such place, or nothing was ever put there; is the URL right?"
        self._tidy()
        return fetched

    def _fetch(self, store: Store, listed: Mapping[str, int]) -> int:
        """Add those packs to the copy that it has not; return how many, and leave in `problem` what is of no use."""
        copy = self.copy
        assert copy is not None
        stay = [pack for pack in copy.whole_packs() if pack.names <= listed.keys()]
        known = frozenset().union(*(pack.names for pack in stay))
        new = {name: size for name, size in sorted(listed.items()) if name not in known}
        usable = [size for size in new.values() if size <= LARGEST]
        if self._bounded and sum(usable) > _MOST - sum(pack.size for pack in stay):
            raise OSError(f"its copy would have more than {_MOST} bytes; {REMEDY}")

        def fetch(name: str) -> str | None:
            """Return `""`, or why a pack is of no use; `None` if it is gone."""
            try:
                if new[name] > LARGEST:
                    raise UnusableError(f"it has {new[name]} bytes, and none has more than {LARGEST}")
                raw = store.read(name)
            except UnusableError as error:
                return f"{name}: {error}"
            if raw is None:
                return None
            copy.add(name, raw)
            return ""

        found = side_by_side(fetch, new)
        problems = sorted(filter(None, found))
        self.problem = f"{counted(len(problems), 'pack')} cannot be used, such as {problems[0]}" if problems else ""
        return found.count("")

    def _tidy(self) -> None:
        try:
            if self.copy is not None:
                self.copy.merge()
        except (OSError, UnusableError) as error:  # such as another process's merging the same
            logger.info("the packs of %s stay as they are: %s", self, error_text(error))

    def _refresh(self) -> None:
        try:
            self.refresh()
        except (OSError, EjkernelError, Warning) as error:  # a warning, where warnings are errors
            self.problem = error_text(error)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            text = f"the copy of the shared cache {self} is used as it is, and is not up to date: {reason}"
            warn(text, CacheWarning)


def copy_folder(url: str, cache_dir: Path) -> Path:
    """Return where the copy of a shared cache is kept."""
    return cache_dir / FOLDER / f"{slug(shown(url))}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def side_by_side(do: Callable[[str], _T], items: Iterable[str]) -> list[_T]:
    """Return what `do` makes of items, in whatever order; what it raises ends this.

    On threads that keep no process from ending, as those of a pool would while a network does not answer.
    """
    todo = list(items)
    found: list[_T] = []
    raised: list[OSError | EjkernelError] = []

    def work() -> None:
        with contextlib.suppress(IndexError):  # nothing is left
            while not raised:
                item = todo.pop()
                try:
                    found.append(do(item))
                except (OSError, EjkernelError) as error:
                    raised.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_AT_ONCE, len(todo)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return found
