# SPDX-License-Identifier: Apache-2.0
"""Searches that are cut short: by their budget, by Ctrl-C, by the death of their worker or of their own process.

Some candidates are wrong, crash or hang. After each search, every saved entry must name a candidate that was measured,
is correct, and beat the heuristic in the same search. Each call is searched several times, so that earlier entries
exist and must be kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp

from benchmarks.torture.material import quiet
from benchmarks.torture.part import PATIENCE, Budget, Tally
from ejkernel.ops import AutotunePolicy, Autotuner, ConfigSelectorChain, Invocation, Kernel, PersistentCache
from ejkernel.ops.autotuner.bench.oracle import Limits
from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.errors import TuningError

_SHAPE: Final = (32, 32)
_SEARCHES: Final = 4  # of each call, one after the other
_ENDS: Final = ("the budget", "Ctrl-C", "a killed worker", "a killed process")
_FAULTS: Final = ("wrong", "wrong", "raise", "abort", "exit", "never")
_CHILD: Final = "import sys; from benchmarks.torture.searches import serve; serve(sys.argv[1])"
_START: Final = 120.0  # seconds for the searching process to start


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration: its fault, and its amount of work."""

    kind: str = ""
    repeats: int = 0


HEURISTIC: Final = Candidate(repeats=200)


class Interrupted(Kernel[Candidate, jax.Array]):
    """`x`, by way of `repeats` products; the call's `number` selects the candidates."""

    def run(self, x: jax.Array, *, number: int, cfg: Candidate) -> jax.Array:
        """Return `x`."""
        if cfg.kind == "raise":
            raise ValueError("it raises")
        x = jax.lax.fori_loop(0, cfg.repeats, lambda _, x: x + 1e-30 * jnp.sin(x @ x), x)
        if cfg.kind in ("abort", "exit", "never"):
            struck: jax.Array = jax.pure_callback(_strike(cfg.kind), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return struck
        return x * 1.01 if cfg.kind == "wrong" else x

    def reference(self, x: jax.Array, *, number: int) -> jax.Array:
        """Return the reference result."""
        return x

    def heuristic_cfg(self, inv: Invocation[Candidate, jax.Array]) -> Candidate:
        """Return the heuristic."""
        return HEURISTIC

    def config_space(self, inv: Invocation[Candidate, jax.Array]) -> list[Candidate]:
        """Return three to seven candidates beside the heuristic, some of them faulty."""
        chance = random.Random(inv.kwargs["number"])
        right = [Candidate("", repeats) for repeats in chance.sample([2, 20, 60, 190, 210, 400], 3)]
        faulty = {Candidate(chance.choice(_FAULTS), chance.choice([1, 100])) for _ in range(chance.randint(0, 4))}
        found = [*right, *sorted(faulty, key=repr)]
        chance.shuffle(found)
        return found


INTERRUPTED: Final = Interrupted("interrupted")


def _strike(kind: str) -> Any:
    def callback(x: Any) -> Any:
        if kind == "abort":
            os.abort()
        if kind == "exit":
            os._exit(3)
        threading.Event().wait()
        return x

    return callback


def call(number: int) -> Invocation[Candidate, jax.Array]:
    """Return the call that the search of this number is for."""
    x = jax.ShapeDtypeStruct(_SHAPE, jnp.float32)
    return Invocation(kernel=INTERRUPTED, args=(x,), kwargs={"number": number // _SEARCHES})


# --- the process that searches ---


def serve(folder: str) -> None:
    """Read `number budget` lines from standard input, run these searches, and answer each line when it ends."""
    from ejkernel.ops.autotuner.process.worker import worker_session

    quiet()
    with worker_session():
        for line in sys.stdin:
            number, budget = line.split()
            try:
                search(folder, int(number), float(budget))
            except (KeyboardInterrupt, TuningError) as end:
                sys.stderr.write(f"search {number}: {type(end).__name__}: {end}\n")
            os.write(1, f"{number}\n".encode())


def search(folder: str, number: int, budget: float) -> None:
    """Search for the configuration of a call; no budget is 0."""
    policy = AutotunePolicy(isolate=True, budget_s=budget or None)
    run = AdaptiveTimeout(first=10.0, least=1.0)  # give up hanging candidates soon
    chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(
        ConfigCache(),
        PersistentCache(folder, shipped=False),
        policy=policy,
        tuner=Autotuner(rounds=5, limits=Limits(run=run)),
    )
    chain.search(call(number), INTERRUPTED, policy=policy)


class _Searcher:
    """The process that searches; a new one is started where the last one is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, number: int, budget: float) -> subprocess.Popen[bytes]:
        """Have it search, and return it."""
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-c", _CHILD, str(self._folder)]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(self._folder.parent / "stderr").open("ab"),
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                start_new_session=True,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number} {budget}\n".encode())
        self.process.stdin.flush()
        return self.process

    def answers(self, seconds: float) -> bool:
        """Return whether the search is over within so many seconds, or its process is gone."""
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return bool(ready) and (os.read(self.process.stdout.fileno(), 100) is not None)

    def kill(self) -> None:
        """End it, now."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self.process = None


def _workers(parent: int) -> list[int]:
    """Return the worker processes of a process."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and b"spawn_main" in (place / "cmdline").read_bytes():
                found.append(int(place.name))
    return found


# --- the part ---


def searches(budget: Budget, tally: Tally) -> None:
    """Cut searches short, and check the saved entries."""
    quiet()
    folder = budget.folder / "cache"
    folder.mkdir()
    searcher = _Searcher(folder)
    _warm_up(searcher, tally)
    try:
        for number in budget.numbers():
            before = saved(folder, number)
            _cut_short(searcher, number, budget.random("searches", number), tally)
            check(folder, number, before, tally)
    finally:
        searcher.kill()


def _warm_up(searcher: _Searcher, tally: Tally) -> None:
    """Start the process that searches and its worker, so that the first search is no longer than the others."""
    searcher.ask(-1, 0.01)
    if not searcher.answers(_START):
        tally.found("hang", "searches", -1, "the process that searches does not start")


def _cut_short(searcher: _Searcher, number: int, chance: random.Random, tally: Tally) -> None:
    """Have one search made, and cut it short."""
    end = _ENDS[number % len(_ENDS)] if chance.random() < 0.9 else chance.choice(_ENDS)
    process = searcher.ask(number, chance.uniform(0.5, 6.0) if end == "the budget" else chance.choice([0.0, 8.0]))
    tally.counts[f"searches ended by {end}"] += 1
    if end != "the budget" and not searcher.answers(chance.uniform(0.1, 6.0)):
        if end == "a killed process":
            searcher.kill()
            return
        for victim in _workers(process.pid) if end == "a killed worker" else [process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL if end == "a killed worker" else signal.SIGINT)
        if end == "a killed worker":
            if searcher.answers(2.0):
                return
            os.kill(process.pid, signal.SIGINT)  # without a budget the search would wait for the hanging candidate
    elif end != "the budget":
        return
    if not searcher.answers(PATIENCE):
        tally.found("hang", "searches", number, f"not over {PATIENCE:g} s after it was cut short by {end}")
        searcher.kill()


def saved(folder: Path, number: int) -> StoredEntry | None:
    """Return the entry of a call."""
    return PersistentCache(folder, shipped=False).load(call(number).key)


def check(folder: Path, number: int, before: StoredEntry | None, tally: Tally) -> None:
    """Report lost entries, and entries that name a candidate not measured, correct and confirmed."""
    entry = tally.try_("searches", number, lambda: saved(folder, number))
    if entry is None:
        if before is not None:
            tally.found("lost", "searches", number, "an earlier entry is gone")
        return
    if before is not None and entry == before:
        tally.counts["entries that stayed"] += 1
        return
    tally.counts["entries that were saved"] += 1
    for fault in faults(entry):
        tally.found("wrong", "searches", number, f"{entry.config}: {fault}")


def faults(entry: StoredEntry) -> Sequence[str]:
    """Return the faults of a saved entry."""
    measured, config = dict(entry.measured or {}), entry.config
    winner, standing = measured.get("winner") or {}, measured.get("standing") or {}
    is_heuristic = config == dataclasses.asdict(HEURISTIC)
    found = {
        "it was not measured": winner.get("samples", 0) > 0,
        "it was not compared with the reference": "outputs" in measured.get("checked", ()),
        "its results are wrong": config["kind"] == "",
        "the heuristic was not measured": measured.get("heuristic") is not None or _has_failed(measured),
        "it is slower than the heuristic": is_heuristic or config["repeats"] < HEURISTIC.repeats,
        "the search kept the heuristic and was not complete": not is_heuristic
        or measured["search"]["state"] in ("complete", "undecided"),
    }
    if not is_heuristic and not _has_failed(measured):
        outcome = (standing.get("rival"), standing.get("verdict"), standing.get("alone"))
        found["it was not confirmed against the heuristic"] = outcome == (config, "wins", True)
    return [fault for fault, holds in found.items() if not holds]


def _has_failed(measured: dict[str, Any]) -> bool:
    """Return whether the heuristic is among the failures: its worker was killed twice, while it ran alone."""
    return any(failure["config"] == dataclasses.asdict(HEURISTIC) for failure in measured.get("failures", ()))
