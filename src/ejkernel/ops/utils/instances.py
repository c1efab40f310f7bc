# SPDX-License-Identifier: Apache-2.0
"""The living instances of a class, held weakly: a name in a text or a file can only find what is already there."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Self

_lock = threading.Lock()
_living: dict[int, weakref.ref[Any]] = {}  # in the order of their making; by id, because not all are hashable


class Noted:
    """A base class whose instances are noted when they are made, whether or not a subclass calls `__init__`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an instance, and note it."""
        del args, kwargs  # __init__'s
        made = super().__new__(cls)
        identity = id(made)
        with _lock:
            _living.pop(identity, None)  # of an instance that is gone, and whose callback has not run yet
            _living[identity] = weakref.ref(made)
        return made


def living(cls: type) -> list[Any]:
    """Return the instances of `cls` that are alive, oldest first."""
    with _lock:
        found = [(identity, reference()) for identity, reference in _living.items()]
        for identity, instance in found:
            if instance is None:
                del _living[identity]
    return [instance for _, instance in found if isinstance(instance, cls)]
