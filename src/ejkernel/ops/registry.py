# SPDX-License-Identifier: Apache-2.0
"""Recorded and missed calls, for later tuning. Only signatures are stored, no arrays and no tracers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from ejkernel.ops.core.context import current_scope, entered
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.utils.validation import check_argument
from ejkernel.ops.utils.weak_caches import Records


class Recorded(tuple[Kernel[Any, Any], tuple[Any, ...], dict[str, Any]]):
    """`(kernel, args, kwargs)` of a recorded call, with abstract arguments; `invocation` holds the complete call."""

    invocation: Invocation[Any, Any]

    def __new__(cls, inv: Invocation[Cfg, Out]) -> Recorded:
        """Create it from an invocation."""
        recorded = super().__new__(cls, (inv.kernel, inv.args, dict(inv.kwargs)))  # type: ignore[arg-type]
        recorded.invocation = inv
        return recorded


Invocations = dict[str, dict[str, dict[str, Recorded]]]

_invocations: Invocations = {}
_missed = Records[tuple[weakref.ref[Kernel[Any, Any]], Invocation[Any, Any]]]()
_collectors: dict[int, list[Invocation[Any, Any]]] = {}
_tokens = itertools.count(1)
_unused: list[int] = []  # tokens under which no call was lowered
_lock = threading.Lock()


def record_invocation(kernel: Kernel[Cfg, Out], inv: Invocation[Cfg, Out]) -> None:
    """Record the signature of a call; it replaces an earlier record of the same call.

    Raises:
        UnstableKeyError: A static argument has no stable name, so the call has no key.
    """
    check_argument(hasattr(kernel, "op_id"), "kernel", "a Kernel", kernel)
    check_argument(hasattr(inv, "abstract_args"), "inv", "an Invocation", inv)
    abstract = dataclasses.replace(inv, kernel=kernel).abstract()
    device, op, call = abstract.key
    with _lock:
        _invocations.setdefault(device, {}).setdefault(op, {})[call] = Recorded(abstract)
        for token in current_scope().recording:
            if token in _collectors:
                _collectors[token].append(abstract)


def get_invocations(device: str | None = None) -> Any:
    """Return the recorded calls, `{device: {op: {call key: (kernel, args, kwargs)}}}`, or the entry of one device."""
    with _lock:
        copy = {dev: {op: dict(calls) for op, calls in ops.items()} for dev, ops in _invocations.items()}
    return copy if device is None else copy.get(device, {})


def clear_invocations() -> None:
    """Forget all recorded and missed calls."""
    with _lock:
        _invocations.clear()
        _missed.clear()


def missed() -> Invocations:
    """Return the untuned calls of this process, in the form of `get_invocations()`.

    They ran with a provisional configuration, such as the heuristic or the configuration of their forward.
    `autotune_recorded(missed())` tunes them; tuned calls disappear from the result.
    """
    found: Invocations = {}
    with _lock:
        # A copy, because a collected kernel removes its entries.
        noted = list(_missed.items())
    for (device, op, call), (owner, inv) in noted:
        kernel = owner()
        if kernel is not None:
            found.setdefault(device, {}).setdefault(op, {})[call] = Recorded(dataclasses.replace(inv, kernel=kernel))
    return found


def note_missed(kernel: Kernel[Cfg, Out], inv: Invocation[Cfg, Out], key: ConfigKey) -> None:
    """Record an untuned call for the lifetime of its kernel; beyond the limit, only the latest calls are kept."""
    if key not in _missed:
        # Weak: recording a miss must not keep alive a kernel that the user has dropped.
        owner = weakref.ref(kernel, lambda _: _missed.pop(key, None))
        _missed.keep(key, (owner, inv.abstract(keeps_kernel=False)))


def forget_missed(key: ConfigKey) -> None:
    """Remove a call that has been tuned."""
    with _lock:
        _missed.pop(key, None)


@contextlib.contextmanager
def recording() -> Iterator[list[Invocation[Any, Any]]]:
    """Record each call lowered inside the `with` block, in the list that the block yields.

    Functions already compiled by `jit` are traced again inside the block, so their calls are recorded too.
    """
    seen: list[Invocation[Any, Any]] = []
    with _lock:
        # The token is part of JAX's cache keys: with a new token, JAX recompiles everything that runs in the block.
        token = _unused.pop() if _unused else next(_tokens)
        _collectors[token] = seen
    try:
        scope = current_scope()
        with entered(dataclasses.replace(scope, recording=(*scope.recording, token))):
            yield seen
    finally:
        with _lock:
            del _collectors[token]
            if not seen:  # programs compiled under this token contain no calls, so it can be reused without recompiling
                _unused.append(token)
