# SPDX-License-Identifier: Apache-2.0
"""Candidates that die in every way, in searches that are killed at random moments.

No process may stay behind, stored files must be intact, and a complete search must find the only candidate that is
correct and fast.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
from tests.ops.faulty_kernels import BEST, CLOSING, RAISED, SHAPE, Faulty

from benchmarks.torture.commands import status_of
from benchmarks.torture.material import quiet
from benchmarks.torture.part import Budget, Tally
from ejkernel.ops import AutotunePolicy, Autotuner, ConfigSelectorChain, Invocation, PersistentCache
from ejkernel.ops.autotuner.bench.oracle import Limits
from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout

_MARK: Final = "TORTURE_MARK"
_LEAVE: Final = 60.0  # seconds in which a process must end after its parent
_LAST: Final = 900.0  # seconds that a search to its end may take
_CHILD: Final = "import sys; from benchmarks.torture.candidates import search; search(sys.argv[1])"


class Dying(Faulty):
    """A kernel with candidates that die in every way."""

    kinds = (
        *("abort", "exit", "abort while tracing", "memory", "nan", "wrong", "terabyte", "wrong gradient"),
        *RAISED,
        *CLOSING,
        "never",
        "lock",
        "never while tracing",
    )


DYING: Final = Dying("dying")


def search(folder: str) -> None:
    """Tune, save the result, and print it."""
    quiet()
    run = AdaptiveTimeout(first=120.0, least=2.0, factor=5.0)
    chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(
        persistent=PersistentCache(folder, shipped=False),
        tuner=Autotuner(limits=Limits(run=run)),
        policy=AutotunePolicy(autotune=True, isolate=True),
    )
    inv = Invocation(kernel=DYING, args=(jax.ShapeDtypeStruct(SHAPE, jnp.float32),))
    sys.stderr.write(f"found {chain.resolve(inv, DYING).config!r}\n")


def candidates(budget: Budget, tally: Tally) -> None:
    """Kill searches at random moments, and then let one go to its end."""
    quiet()
    folder = budget.folder / "cache"
    for number in budget.numbers():
        seconds = budget.random("candidates", number).uniform(1.0, 8.0 if budget.inputs == 1 else 40.0)
        mark = secrets.token_hex(8)
        process = _started(folder, mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.kill()
        process.wait()
        tally.counts["killed searches"] += 1
        _check(folder, mark, number, tally)
    if budget.inputs != 1:
        _let_go(folder, tally)


def _started(folder: Path, mark: str) -> subprocess.Popen[str]:
    env = {**os.environ, _MARK: mark, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _CHILD, str(folder)]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _check(folder: Path, mark: str, number: int, tally: Tally) -> None:
    """Report processes left behind, and damaged files."""
    end = time.monotonic() + _LEAVE
    while (left := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    if left:
        tally.found("hang", "candidates", number, f"{len(left)} processes are left behind")
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    if folder.is_dir() and tally.try_("candidates", number, lambda: _verified(folder)) == 1:
        tally.found("lost", "candidates", number, "a file is not whole")


def _verified(folder: Path) -> int:
    return status_of(["cache", "verify", "--cache", str(folder)])


def _marked(mark: str) -> list[int]:
    """Return the processes that have the mark in their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
    return found


def _let_go(folder: Path, tally: Tally) -> None:
    """Let a search go to its end."""
    mark = secrets.token_hex(8)
    process = _started(folder, mark)
    try:
        _, text = process.communicate(timeout=_LAST)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        tally.found("hang", "candidates", -1, f"a search had not come to its end after {_LAST:g} s")
        return
    tally.counts["run to completion"] += 1
    if f"found {BEST!r}" not in text:
        tally.found("wrong", "candidates", -1, f"status {process.returncode}: {text[-1000:]}")
    _check(folder, mark, -1, tally)
