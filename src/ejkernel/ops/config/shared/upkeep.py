# SPDX-License-Identifier: Apache-2.0
"""Repairing, merging and pruning shared caches while other machines read and write them.

Each function writes the new packs before it removes any, and removes only packs that it has read. So no entry is lost
when another machine prunes or adds a pack at the same time.
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
from ejkernel.ops.config.shared.layer import in_parallel
from ejkernel.ops.config.shared.packs import DamagedError, Pack, packed, read_line, salvaged

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What `prune` removed from a shared cache.

    Attributes:
        entries: Number of removed entries.
        packs: By how much the number of packs fell.
        damaged: Number of removed packs that could not be read.
    """

    entries: int
    packs: int
    damaged: int = 0


def mend(place: SharedPlace) -> int:
    """Replace the shared cache's damaged packs from the copy and return their number. This reads every pack.

    Raises:
        UnusableError: The copy is damaged, too.
        OSError: The shared cache cannot be read or written.
    """
    held = {name: pack for pack in place.copy.whole_packs() for name in pack.names}
    listed = place.store.sizes(math.inf).keys()
    damaged = _damaged(place, listed & held.keys())
    own = {name for name in damaged if held[name].path.name == name}
    for name in own:
        raw = held[name].path.read_bytes()
        packs.check(name, raw)
        place.store.write(name, raw)
    # The copy of a merged pack no longer exists, but its entries are in the merged pack.
    parts = damaged - own
    if parts:
        sources = list(dict.fromkeys(held[name] for name in sorted(parts)))
        _replace_packs(place, place.copy.best_lines(sources), parts, there=listed - parts)
    return len(damaged)


def merge(place: SharedPlace) -> int:
    """Merge the packs into as few as possible and return by how much their number fell.

    Raises:
        UnusableError: The copy is damaged; nothing was changed.
        OSError: The shared cache cannot be read or written.
    """
    return prune(place, lambda entry: False).packs


def prune(
    place: SharedPlace, unwanted: Callable[[StoredEntry], bool], *, unreadable: bool = False, dry_run: bool = False
) -> Pruned:
    """Remove unwanted entries and all but the best of each class, and merge the rest into as few packs as possible.

    Args:
        place: The shared cache.
        unwanted: Returns whether to remove an entry.
        unreadable: Remove damaged packs, too; their undamaged entries stay.
        dry_run: Change nothing, only return what would be removed.

    Raises:
        UnusableError: The copy is damaged; nothing was changed.
        OSError: The shared cache cannot be read or written.
    """
    listed = place.store.sizes(math.inf)
    if not listed.keys() <= _names(place.copy.packs()):
        place.refresh()
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
        gone = known | _damaged(place, damaged)  # check again: another machine may have repaired a pack
        fewer = _replace_packs(place, kept, gone, there=listed.keys() - damaged)
    return Pruned(entries=len(every.union(saved)) - len(kept), packs=fewer, damaged=len(damaged))


def _names(found: Iterable[Pack]) -> frozenset[str]:
    return frozenset().union(*(pack.names for pack in found))


def _damaged(place: SharedPlace, names: Iterable[str]) -> set[str]:
    """Return the names of the damaged packs. A pack of a later schema is not damaged."""
    found = set()

    def check(name: str) -> None:
        try:
            place.store.read(name)
        except DamagedError as error:
            logger.info("%s of %s is damaged: %s", name, place, error)
            found.add(name)
        except UnusableError as error:
            logger.info("%s of %s cannot be used here: %s", name, place, error)

    in_parallel(check, names)
    return found


def _whole_lines(place: SharedPlace, name: str) -> list[bytes]:
    try:
        return salvaged(place.store.raw(name) or b"")
    except DamagedError as error:  # larger than any pack that ejkernel writes
        logger.info("no entry of %s of %s was recovered: %s", name, place, error)
        return []


def _is_unwanted(line: bytes, unwanted: Callable[[StoredEntry], bool]) -> bool:
    try:
        return unwanted(read_line(line))
    except UnusableError as error:  # e.g. an entry of a later schema
        logger.info("an unreadable entry of a shared cache stays: %s", error)
        return False


def _replace_packs(place: SharedPlace, lines: Iterable[bytes], gone: Collection[str], there: Collection[str]) -> int:
    """Write packs of `lines` not `there` yet, then remove those `gone`; return by how much their number fell."""
    new = dict(packed(lines))
    added = new.keys() - set(there)
    for name in sorted(added):
        place.store.write(name, new[name])
    removed = set(gone) - new.keys()
    for name in sorted(removed):
        place.store.remove(name)
    place.refresh()
    return len(set(gone)) - len(new.keys() - (set(there) - set(gone)))
