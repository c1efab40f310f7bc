# SPDX-License-Identifier: Apache-2.0
"""Shared caches mended, merged and pruned, while others read and write them.

Whatever is done here, what is to stay is written before anything is removed, and only objects are removed that were
read: so whoever does the same, or adds a pack meanwhile, loses nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterable

from ejkernel.ops.config._files import UnusableError
from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.config.shared import packs
from ejkernel.ops.config.shared.exchange import SharedPlace
from ejkernel.ops.config.shared.layer import side_by_side
from ejkernel.ops.config.shared.packs import DamagedError, Pack, packed, read_line, salvaged

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What was removed from a shared cache.

    Attributes:
        entries: How many entries.
        packs: How many fewer packs there are.
        damaged: How many packs that could not be read.
    """

    entries: int
    packs: int
    damaged: int = 0


def mend(place: SharedPlace) -> int:
    """Write again what is damaged there and whole here, and return how many packs that was; all of them are read.

    Raises:
        UnusableError: the copy is damaged, too.
        OSError: the place cannot be read or written.
    """
    held = {name: pack for pack in place.copy.whole_packs() for name in pack.names}
    listed = place.store.sizes(math.inf).keys()
    damaged = _damaged(place, listed & held.keys())
    own = {name for name in damaged if held[name].path.name == name}
    for name in own:
        raw = held[name].path.read_bytes()
        packs.check(name, raw)
        place.store.write(name, raw)
    # Of a pack that was merged into another one here, the bytes are gone; but its entries are in that one.
    parts = damaged - own
    if parts:
        sources = list(dict.fromkeys(held[name] for name in sorted(parts)))
        _put_instead(place, place.copy.best_lines(sources), parts, there=listed - parts)
    return len(damaged)


def merge(place: SharedPlace) -> int:
    """Make as few packs as can be of those that are there, and return how many fewer there are.

    Raises:
        UnusableError: the copy is damaged; nothing is changed.
        OSError: the place cannot be read or written.
    """
    return prune(place, lambda entry: False).packs


def prune(
    place: SharedPlace, unwanted: Callable[[StoredEntry], bool], *, unreadable: bool = False, dry_run: bool = False
) -> Pruned:
    """Remove entries, and those that are worse than others of their class; as few packs as can be hold the rest.

    Args:
        place: The shared cache.
        unwanted: Whether an entry is to be removed.
        unreadable: Remove packs that are damaged, too; what is whole of them stays.
        dry_run: Only say what would be removed.

    Raises:
        UnusableError: the copy is damaged; nothing is changed.
        OSError: the place cannot be read or written.
    """
    listed = place.store.sizes(math.inf)
    if not listed.keys() <= _names(place.copy.packs()):
        place.layer.refresh()
    sources = [pack for pack in place.copy.packs() if pack.names <= listed.keys()]
    known = _names(sources)
    damaged = _damaged(place, listed.keys() - known) if unreadable else set()
    saved = [line for name in sorted(damaged) for line in _whole_lines(place, name)]
    best = {*place.copy.best_lines(sources), *saved}
    kept = [line for line in best if not _is_unwanted(line, unwanted)]
    every = {line for pack in sources for line in pack.walk()}
    if dry_run:
        fewer = len(known) + len(damaged) - len(dict(packed(kept)))
    else:
        gone = known | _damaged(place, damaged)  # once more, for another machine may have written one again
        fewer = _put_instead(place, kept, gone, there=listed.keys() - damaged)
    return Pruned(entries=len(every.union(saved)) - len(kept), packs=fewer, damaged=len(damaged))


def _names(found: Iterable[Pack]) -> frozenset[str]:
    return frozenset().union(*(pack.names for pack in found))


def _damaged(place: SharedPlace, names: Iterable[str]) -> set[str]:
    """Return those of the packs that are not what was written; one of a later form is no such."""

    def name_if_damaged(name: str) -> str:
        try:
            place.store.read(name)
        except DamagedError as error:
            logger.info("%s of %s is damaged: %s", name, place, error)
            return name
        except UnusableError as error:
            logger.info("%s of %s is of no use here: %s", name, place, error)
        return ""

    return set(side_by_side(name_if_damaged, names)) - {""}


def _whole_lines(place: SharedPlace, name: str) -> list[bytes]:
    try:
        return salvaged(place.store.raw(name) or b"")
    except DamagedError as error:  # it is too large, and so none of ours
        logger.info("nothing of %s of %s is saved: %s", name, place, error)
        return []


def _is_unwanted(line: bytes, unwanted: Callable[[StoredEntry], bool]) -> bool:
    try:
        return unwanted(read_line(line))
    except UnusableError as error:  # such as one of a later form, of which nothing is known here
        logger.info("an entry of a shared cache stays: %s", error)
        return False


def _put_instead(place: SharedPlace, lines: Iterable[bytes], gone: Collection[str], there: Collection[str]) -> int:
    """Write packs of `lines`, but for those that are `there`, and then remove others; return how many fewer it are."""
    new = dict(packed(lines))
    added = new.keys() - set(there)
    for name in sorted(added):
        place.store.write(name, new[name])
    removed = set(gone) - new.keys()
    for name in sorted(removed):
        place.store.remove(name)
    place.layer.refresh()
    return len(set(gone)) - len(new.keys() - (set(there) - set(gone)))
