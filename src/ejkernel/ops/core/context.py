# SPDX-License-Identifier: Apache-2.0
"""What is in force around a call: overlays, policy overrides, recording.

It is one value of a JAX user context, which is a part of JAX's own cache keys: a function that `jit` has already
compiled is traced again inside, and goes back to its old executable outside. The value belongs to its thread; the
measuring thread enters the caller's. Values are equal by content, so that entering an equal overlay compiles nothing.
JAX's caches have one value for the whole context, and do not tell which function holds a call: under another all
functions that run in it are compiled anew. Whether a thread belongs to a search is beside it, and in no cache key: a
candidate's programs are those of any other call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple, Protocol

from ejkernel import compat


class Layer(Protocol, Hashable):
    """Configurations that take precedence while they are in force."""

    def lookup(self, key: Any) -> Any:
        """Return the configuration under `key`, or `None`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """The value of the context.

    Attributes:
        layers: Overlays, innermost last.
        policies: Policy changes, innermost last.
        recording: Numbers of the recorders that want the calls that are lowered.
    """

    layers: tuple[Layer, ...] = ()
    policies: tuple[Any, ...] = ()
    recording: tuple[int, ...] = ()


class Settings(NamedTuple):
    """All that is in force around a call when it is traced: it computes, and is resolved, under that and nothing else.

    Attributes:
        numerics: JAX's settings.
        scope: Ours.
    """

    numerics: compat.Numerics
    scope: Scope

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Put them in force inside the `with` block, where others may be."""
        with contextlib.ExitStack() as stack:
            # Only what differs is entered: in most programs nothing does, and this is done for every call that is
            # traced.
            if self.numerics != compat.numerics_in_force():
                stack.enter_context(compat.numerics(self.numerics))
            if self.scope != current_scope():
                stack.enter_context(entered(self.scope))
            yield


def settings_in_force() -> Settings:
    """Return what is in force in this thread."""
    return Settings(compat.numerics_in_force(), current_scope())


# Made at import: JAX says that making one is not thread-safe.
_context = compat.make_user_context(Scope())


def current_scope() -> Scope:
    """Return what is in force in this thread."""
    scope: Scope = _context.value
    return scope


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Put `scope` in force; every entry makes a context object of its own, for JAX leaks one that is entered twice."""
    with _context(scope):
        yield


_searches = threading.local()


def search_depth() -> int:
    """Return how many searches this thread is part of: 0 outside, 1 on a search's threads, more where they nest."""
    return getattr(_searches, "depth", 0)


def is_measuring() -> bool:
    """Return whether this thread is one that candidates are measured on."""
    return search_depth() > 0


@contextlib.contextmanager
def at_search_depth(depth: int) -> Iterator[None]:
    """Make this thread part of so many searches inside the `with` block."""
    before, _searches.depth = search_depth(), depth
    try:
        yield
    finally:
        _searches.depth = before
