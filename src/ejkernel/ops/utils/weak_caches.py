# SPDX-License-Identifier: Apache-2.0
"""What is remembered for an object, as long as somebody else holds it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
# Entries of one table: what was traced and compiled takes 0.4 MB each, and JAX's own caches of it have this size.
_MOST = 1 << 11
MOST_RECORDS = 1 << 14  # entries of a table of calls and answers, 1 kB each


class PerObject(Generic[T]):
    """One value for each object, by identity: equal objects, and objects that cannot be hashed, have their own.

    What is kept must not hold the object itself, or it would live for ever.

    Args:
        make: Makes the value of an object that has none yet.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        # By address, which cannot be another object's before the reference has removed it.
        self.by_address: dict[int, tuple[T, weakref.ref[Any]]] = {}

    def of(self, owner: object) -> T:
        """Return the object's value."""
        found = self.by_address.get(id(owner))
        if found is not None:
            return found[0]
        address, table = id(owner), self.by_address
        with self._lock:
            found = table.get(address)
            if found is None:
                found = table[address] = self._make(), weakref.ref(owner, lambda _: table.pop(address, None))
        return found[0]

    def clear(self) -> None:
        """Forget the values of all objects."""
        self.by_address.clear()

    def __len__(self) -> int:
        return len(self.by_address)


class IdentitySet:
    """A set of objects by identity, which does not keep them alive."""

    def __init__(self) -> None:
        self._members: PerObject[None] = PerObject(lambda: None)

    def add(self, member: object) -> None:
        """Add an object."""
        self._members.of(member)

    def __contains__(self, member: object) -> bool:
        return id(member) in self._members.by_address


class Bounded(dict[Any, T]):
    """A table that drops its oldest entries; safe to use from several threads, at the worst two make one entry.

    Args:
        most: The largest number of entries; by default that of JAX's own caches.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self._most = _MOST if most is None else most

    def keep(self, key: object, value: T) -> T:
        """Store an entry unless there is one already, and return the one that is stored."""
        self._make_room()
        return self.setdefault(key, value)

    def replace(self, key: object, value: T) -> None:
        """Store an entry in place of the one that was stored under its key."""
        self._make_room()
        self[key] = value

    def _make_room(self) -> None:
        if len(self) >= self._most:
            for oldest in list(self)[: max(1, self._most // 4)]:
                self.pop(oldest, None)
