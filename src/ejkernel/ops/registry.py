# SPDX-License-Identifier: Apache-2.0
"""Recorded and missed calls, for later tuning. Only signatures are stored, no arrays and no tracers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator
from typing import Any

from ejkernel.ops.config.selection import untuned
from ejkernel.ops.core.context import current_scope, entered
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.utils.messages.names import check_argument


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
    untuned.clear()


def missed() -> Invocations:
    """Return the untuned calls of this process, in the form of `get_invocations()`.

    They ran with a provisional configuration, such as the heuristic or the configuration of their forward.
    `autotune_recorded(missed())` tunes them; tuned calls disappear from the result.
    """
    found: Invocations = {}
    for (device, op, call), (owner, inv) in list(untuned.items()):  # a copy: a collected kernel removes its entries
        kernel = owner()
        if kernel is not None:
            found.setdefault(device, {}).setdefault(op, {})[call] = Recorded(dataclasses.replace(inv, kernel=kernel))
    return found


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
