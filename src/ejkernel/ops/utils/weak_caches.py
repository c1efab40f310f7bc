# SPDX-License-Identifier: Apache-2.0
"""Caches per object that do not keep it alive, bounded caches, weak references to instances, copies without caches."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

T = TypeVar("T")


class Copied:
    """An object whose copies and pickles create some attributes anew, such as locks, listeners and caches."""

    _anew: ClassVar[Mapping[str, Callable[[], Any]]] = {}  # the attributes, each with the function that creates it

    def __getstate__(self) -> dict[str, Any]:
        # The copy changes its own tables. `dict.copy` is atomic, so other threads may change the original meanwhile.
        kept = {name: value for name, value in vars(self).items() if name not in self._anew}
        return {name: value.copy() if isinstance(value, dict | set) else value for name, value in kept.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, **{name: make() for name, make in self._anew.items()})


@dataclasses.dataclass(eq=False, repr=False)
class PerObject(Generic[T]):
    """A value for each object, by identity: equal objects have separate values, and objects need not be hashable.

    A value must not reference its object, or the object would never be freed.

    Attributes:
        make: Creates the value of a new object.
        by_address: The values. A weak reference's callback removes its entry before another object gets the address.
    """

    make: Callable[[], T]
    by_address: dict[int, tuple[T, weakref.ref[Any]]] = dataclasses.field(default_factory=dict)

    def of(self, owner: object) -> T:
        """Return the object's value."""
        address, table = id(owner), self.by_address
        found = table.get(address)
        if found is None:  # of two threads, the first stores its value
            new = self.make(), weakref.ref(owner, lambda _: table.pop(address, None))
            found = table.setdefault(address, new)
        return found[0]

    def clear(self) -> None:
        """Forget the values of all objects."""
        self.by_address.clear()

    def __len__(self) -> int:
        return len(self.by_address)


class Bounded(dict[Any, T]):
    """A dictionary that drops its oldest entries. Thread-safe; at worst two threads create the same entry."""

    most = 1 << 11  # the size of JAX's own caches: a traced and compiled program takes 0.4 MB

    def copy(self) -> Self:
        """Return a copy with the same limit."""
        return type(self)(self)

    def keep(self, key: object, value: T) -> T:
        """Store an entry unless the key has one already, and return the stored value."""
        if len(self) >= self.most:
            for oldest in list(self)[: max(1, self.most // 4)]:
                self.pop(oldest, None)
        return self.setdefault(key, value)

    def replace(self, key: object, value: T) -> None:
        """Store an entry, replacing an existing entry of the key."""
        self.pop(key, None)
        self.keep(key, value)


class Records(Bounded[T]):
    """A bounded dictionary of calls or answers, 1 kB each."""

    most = 1 << 14


_living: dict[int, weakref.ref[Any]] = {}  # in order of creation; by address, as in `PerObject`


class Noted:
    """A base class that registers each instance on creation, even if a subclass does not call `__init__`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create and register an instance."""
        made = super().__new__(cls)
        address, table = id(made), _living  # at shutdown, the global name is deleted before the callbacks run
        table[address] = weakref.ref(made, lambda _: table.pop(address, None))
        return made


def living(cls: type) -> list[Any]:
    """Return the live instances of `cls`, oldest first."""
    found = (reference() for reference in list(_living.values()))
    return [instance for instance in found if isinstance(instance, cls)]
