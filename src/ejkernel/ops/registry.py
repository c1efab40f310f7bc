# SPDX-License-Identifier: Apache-2.0
"""Calls that were seen, or missed, so that they can be tuned later. Only signatures are kept: no array, no tracer."""

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
from ejkernel.ops.utils.weak_caches import MOST_RECORDS, Bounded


class Recorded(tuple[Kernel[Any, Any], tuple[Any, ...], dict[str, Any]]):
    """`(kernel, args, kwargs)` of a recorded call, with abstract arguments; `invocation` is the whole of it."""

    invocation: Invocation[Any, Any]

    def __new__(cls, inv: Invocation[Cfg, Out]) -> Recorded:
        """Make it of an invocation."""
        recorded = super().__new__(cls, (inv.kernel, inv.args, dict(inv.kwargs)))  # type: ignore[arg-type]
        recorded.invocation = inv
        return recorded


Invocations = dict[str, dict[str, dict[str, Recorded]]]

_invocations: Invocations = {}
_missed: Bounded[tuple[weakref.ref[Kernel[Any, Any]], Invocation[Any, Any]]] = Bounded(MOST_RECORDS)
_collectors: dict[int, list[Invocation[Any, Any]]] = {}
_tokens = itertools.count(1)
_unused: list[int] = []  # tokens under which no call was lowered
_lock = threading.Lock()


def record_invocation(kernel: Kernel[Cfg, Out], inv: Invocation[Cfg, Out]) -> None:
    """Keep the signature of a call; the same call again replaces it.

    Raises:
        UnstableKeyError: a static argument has no stable name, so the call has no key to be kept under.
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
    """Return what was recorded: `{device: {op: {call key: (kernel, args, kwargs)}}}`; for one device, its part."""
    with _lock:
        copy = {dev: {op: dict(calls) for op, calls in ops.items()} for dev, ops in _invocations.items()}
    return copy if device is None else copy.get(device, {})


def clear_invocations() -> None:
    """Forget all recorded and missed calls."""
    with _lock:
        _invocations.clear()
        _missed.clear()


def missed() -> Invocations:
    """Return the calls of this process that nothing was measured for, in the form of `get_invocations()`.

    A provisional tier answered them, such as the heuristic, or what was found for their forward.
    `autotune_recorded(missed())` tunes them, and what was tuned is no longer among them.
    """
    found: Invocations = {}
    with _lock:
        # A copy, since kernels that are collected take their entries out.
        noted = list(_missed.items())
    for (device, op, call), (owner, inv) in noted:
        kernel = owner()
        if kernel is not None:
            found.setdefault(device, {}).setdefault(op, {})[call] = Recorded(dataclasses.replace(inv, kernel=kernel))
    return found


def note_missed(kernel: Kernel[Cfg, Out], inv: Invocation[Cfg, Out], key: ConfigKey) -> None:
    """Keep a call that nothing was measured for while its user keeps the kernel; of very many the latest."""
    if key not in _missed:
        # Weakly: a miss was noted and not asked for, and must not keep a kernel that its user has dropped.
        owner = weakref.ref(kernel, lambda _: _missed.pop(key, None))
        _missed.keep(key, (owner, inv.abstract().without_kernel()))


def forget_missed(key: ConfigKey) -> None:
    """Let go of a call that has been tuned since."""
    with _lock:
        _missed.pop(key, None)


@contextlib.contextmanager
def recording() -> Iterator[list[Invocation[Any, Any]]]:
    """Record every call that is lowered inside the `with` block; gives the list that they are added to.

    Functions that `jit` has compiled are traced again inside, so their calls are seen too.
    """
    seen: list[Invocation[Any, Any]] = []
    with _lock:
        # The number is in the key of JAX's caches, which have one value for the whole context: with a new one JAX
        # compiles anew all that runs in the block.
        token = _unused.pop() if _unused else next(_tokens)
        _collectors[token] = seen
    try:
        scope = current_scope()
        with entered(dataclasses.replace(scope, recording=(*scope.recording, token))):
            yield seen
    finally:
        with _lock:
            del _collectors[token]
            if not seen:  # what was compiled meanwhile has no call in it, and need not be compiled anew the next time
                _unused.append(token)
