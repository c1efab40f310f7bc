# SPDX-License-Identifier: Apache-2.0
"""Threads that resolve calls, under their own overlays, while others change the caches.

A thread gets the configuration of its overlay; without an overlay, a configuration that was put for the call or the
heuristic, never another call's.
"""

from __future__ import annotations

import concurrent.futures
import functools
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from benchmarks.torture.material import DOUBLE, Tile, quiet
from benchmarks.torture.part import Budget, Tally
from ejkernel.ops import (
    AutotuningResult,
    ConfigSelectorChain,
    Entry,
    Executor,
    Invocation,
    PersistentCache,
    overlay_cache,
    policy_override,
)

_THREADS: Final = 8
_MORE: Final = 300.0  # seconds until an unfinished thread counts as hanging
_CALLS: Final = 5
_PER_CALL: Final = 1000  # rows of a configuration say which call it is for


class Subject:
    """A chain with a cache on disk, and calls that all threads make of it.

    Args:
        budget: Of the part.
    """

    def __init__(self, budget: Budget) -> None:
        self.cache = PersistentCache(budget.folder / "cache", shipped=False)
        self.chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(persistent=self.cache)
        self.executor = Executor(self.chain)
        self.arrays = [jnp.ones((4, rows)) for rows in range(1, _CALLS + 1)]
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in self.arrays]
        self.calls = [Invocation(kernel=DOUBLE, args=(shape,)) for shape in shapes]
        self.jitted = jax.jit(lambda x: self.executor(DOUBLE, x))

    def is_for(self, which: int, config: Tile) -> bool:
        """Return whether a configuration was put for this call, or is the heuristic's."""
        return config == Tile(1) or config.rows // _PER_CALL == which + 1

    def step(self, chance: random.Random) -> str:
        """Do one random operation of a thread; return the problem, or `""`."""
        which = chance.randrange(_CALLS)
        own = Tile(_PER_CALL * (which + 1) + chance.randrange(_PER_CALL))
        return chance.choice(_STEPS)(self, chance, which, own)


def _resolve(subject: Subject, chance: random.Random, which: int, own: Tile) -> str:
    found = subject.chain.resolve(subject.calls[which], DOUBLE).config
    return "" if subject.is_for(which, found) else f"call {which} is answered with {found}"


def _overlaid(subject: Subject, chance: random.Random, which: int, own: Tile) -> str:
    inv = subject.calls[which]
    with overlay_cache({inv.key: own}):
        inside = subject.chain.resolve(inv, DOUBLE)
        other = _resolve(subject, chance, (which + 1) % _CALLS, own)
    if (inside.config, inside.source) != (own, "overlay"):
        return f"an overlay says {own}, and {inside.source} {inside.config} answers"
    return other


def _result(subject: Subject, chance: random.Random, which: int, own: Tile) -> str:
    key = subject.calls[which].key
    with AutotuningResult(key.device, (Entry(key.op, key.call, own),)):
        inside = subject.chain.resolve(subject.calls[which], DOUBLE)
    return "" if inside.config == own else f"a result says {own}, and {inside.source} {inside.config} answers"


def _refused(subject: Subject, chance: random.Random, which: int, own: Tile) -> str:
    with policy_override(subject.chain, note_misses=True), overlay_cache({subject.calls[which].key: own}):
        inside = subject.chain.resolve(subject.calls[which], DOUBLE)
    return "" if inside.config == own else f"an overlay under a policy says {own}, and {inside.config} answers"


def _put(subject: Subject, chance: random.Random, which: int, own: Tile) -> str:
    subject.cache.put(subject.calls[which].key, own)
    return ""


def _remember(subject: Subject, chance: random.Random, which: int, own: Tile) -> str:
    subject.chain.cache.put(subject.calls[which].key, own)
    return ""


def _forget(subject: Subject, chance: random.Random, which: int, own: Tile) -> str:
    subject.chain.cache.remove(subject.calls[which].key)
    return ""


def _remove(subject: Subject, chance: random.Random, which: int, own: Tile) -> str:
    subject.cache.remove(subject.calls[which].key)
    return ""


def _read(subject: Subject, chance: random.Random, which: int, own: Tile) -> str:
    found = subject.cache.get(subject.calls[which].key, Tile)
    return "" if found is None or subject.is_for(which, found) else f"the cache has {found} for call {which}"


def _list(subject: Subject, chance: random.Random, which: int, own: Tile) -> str:
    wrong = [key for key, entry in subject.cache.entries() if entry.config["rows"] < _PER_CALL]
    return f"the cache lists {wrong}" if wrong else ""


def _run(subject: Subject, chance: random.Random, which: int, own: Tile) -> str:
    found = (subject.jitted if chance.random() < 0.5 else lambda x: subject.executor(DOUBLE, x))(subject.arrays[which])
    return "" if found.shape == subject.arrays[which].shape else f"call {which} returns {found.shape}"


_Step = Callable[[Subject, random.Random, int, Tile], str]
_STEPS: Final[tuple[_Step, ...]] = (
    *(
        _resolve,
        _resolve,
        _overlaid,
        _overlaid,
        _result,
        _refused,
        _put,
        _remember,
        _forget,
        _remove,
        _read,
        _list,
        _run,
    ),
)


def threads(budget: Budget, tally: Tally) -> None:
    """Run threads that get in each other's way as often as can be."""
    quiet()
    subject, switching = Subject(budget), sys.getswitchinterval()
    steps = None if budget.inputs is None else budget.inputs // _THREADS
    end, lock = time.monotonic() + budget.seconds, threading.Lock()

    def work(index: int) -> None:
        chance, number = budget.random("threads", index), 0
        while time.monotonic() < end if steps is None else number < steps:
            problem = subject.step(chance)
            number += 1
            if problem:
                with lock:
                    tally.found("wrong", "threads", index, problem)
        with lock:
            tally.counts["steps"] += number

    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            running = [pool.submit(work, index) for index in range(_THREADS)]
            for future in concurrent.futures.wait(running, budget.seconds + _MORE).not_done:
                tally.found("hang", "threads", running.index(future), "a thread has not come to its end")
            for index, ended in enumerate(running):
                tally.try_("threads", index, functools.partial(ended.result, 0.0))
    finally:
        sys.setswitchinterval(switching)
