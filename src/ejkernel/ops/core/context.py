# SPDX-License-Identifier: Apache-2.0
"""The settings of a call: JAX's, and its scope, the overlays, policy overrides and recorders in force around it.

The scope is the value of a JAX user context, which is part of JAX's cache keys. JAX therefore traces a compiled
function again under a new scope, and reuses the old executable outside. Each thread has its own scope; the measuring
thread enters the scope of its caller. Scopes are compared by content: entering an equal overlay compiles nothing.
JAX's caches hold one value for the whole context and do not know which functions contain a call. A new scope
recompiles every function that runs in it, even a function without calls. Search membership of a thread is kept
separately, outside all cache keys: a candidate compiles to the same program as any other call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import threading
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple, Protocol

import jax

from ejkernel import compat


class Layer(Protocol, Hashable):
    """An overlay: configurations that take precedence while the layer is in force."""

    def lookup(self, key: Any) -> Any:
        """Return the configuration under `key`, or `None`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """The value of the context.

    Attributes:
        layers: Overlays, innermost last.
        policies: Policy changes, innermost last.
        recording: Numbers of the recorders that collect lowered calls.
    """

    layers: tuple[Layer, ...] = ()
    policies: tuple[Any, ...] = ()
    recording: tuple[int, ...] = ()


# Created at import: JAX documents that creating a context is not thread-safe.
_context = compat.tracing.make_user_context(Scope())


def current_scope() -> Scope:
    """Return the scope of this thread."""
    scope: Scope = _context.value
    return scope


class Numerics(NamedTuple):
    """The settings in `jax.config` that change the numbers of a traced function."""

    default_matmul_precision: str | None
    enable_x64: bool
    default_prng_impl: str
    numpy_dtype_promotion: Any  # an enum of JAX
    numpy_rank_promotion: str
    threefry_partitionable: bool
    softmax_custom_jvp: bool


_numerics = operator.attrgetter(*(f"jax_{name}" for name in Numerics._fields))


def numerics_in_force() -> Numerics:
    """Return the settings of this thread."""
    return Numerics(*_numerics(jax.config))


@contextlib.contextmanager
def numerics(wanted: Numerics) -> Iterator[None]:
    """Apply settings in this thread within a `with` block.

    Raises:
        ValueError: JAX does not accept one of the values.
    """
    with contextlib.ExitStack() as stack:
        for name, now, value in zip(Numerics._fields, numerics_in_force(), wanted, strict=True):
            if now != value:
                stack.enter_context(getattr(jax, name)(value))
        yield


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings under which a call was traced; it is resolved and computed under the same settings.

    Attributes:
        numerics: JAX's settings; by default those of this thread.
        scope: Ours: overlays, policies and recorders; by default those of this thread.
    """

    numerics: Numerics = dataclasses.field(default_factory=numerics_in_force)
    scope: Scope = dataclasses.field(default_factory=current_scope)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Apply these settings inside the `with` block."""
        with contextlib.ExitStack() as stack:
            # This runs for every traced call, and in most programs nothing differs.
            if self.numerics != numerics_in_force():
                stack.enter_context(numerics(self.numerics))
            if self.scope != current_scope():
                stack.enter_context(entered(self.scope))
            yield


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Apply `scope` inside the `with` block; each entry creates a context object, because JAX leaks a reused one."""
    with _context(scope):
        yield


_searches = threading.local()


def search_depth() -> int:
    """Return the number of searches that this thread belongs to: 0 outside, 1 in a search, more in nested searches."""
    return getattr(_searches, "depth", 0)


def is_measuring() -> bool:
    """Return whether this thread measures candidates."""
    return getattr(_searches, "depth", 0) > 0


@contextlib.contextmanager
def at_search_depth(depth: int) -> Iterator[None]:
    """Set the search depth of this thread inside the `with` block."""
    before, _searches.depth = search_depth(), depth
    try:
        yield
    finally:
        _searches.depth = before
