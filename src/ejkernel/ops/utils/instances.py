# SPDX-License-Identifier: Apache-2.0
"""Weak references to all instances of a class. A name in a text or file can only find existing instances."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Self

_lock = threading.Lock()
_living: dict[int, weakref.ref[Any]] = {}  # in order of creation; by id, because not all instances are hashable


class Noted:
    """A base class that registers each instance on creation, even if a subclass does not call `__init__`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create and register an instance."""
        del args, kwargs  # arguments of `__init__`
        made = super().__new__(cls)
        identity = id(made)
        with _lock:
            _living.pop(identity, None)  # a dead instance may have had the same id
            _living[identity] = weakref.ref(made)
        return made


def living(cls: type) -> list[Any]:
    """Return the live instances of `cls`, oldest first."""
    with _lock:
        found = [(identity, reference()) for identity, reference in _living.items()]
        for identity, instance in found:
            if instance is None:
                del _living[identity]
    return [instance for _, instance in found if isinstance(instance, cls)]
