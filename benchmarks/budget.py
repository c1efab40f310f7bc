# SPDX-License-Identifier: Apache-2.0
"""How long a search exceeds its budget when a candidate never returns.

    python -m benchmarks.budget [--budget 10] [--runs 3] [--output FILE]

The candidate hangs while it runs or while it is traced, with or without the interpreter's lock. Within one process the
lock cannot be taken away, so the two cases with the lock are measured in worker processes only.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.report import environment
from ejkernel.ops import AutotunePolicy, Autotuner, Invocation, Kernel, TuningError, TuningWarning

SHAPE = (64, 64)
HANGS = ("running", "tracing", "running with the lock", "tracing with the lock")


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """A configuration: how much is done, and where it hangs."""

    repeats: int
    hang: str = ""


def hang(kind: str) -> None:
    """Never return."""
    if "lock" in kind:
        ctypes.PyDLL(None).pause()
    threading.Event().wait()


class Hanging(Kernel[Way, jax.Array]):
    """`x`, by way of products; the second of its candidates never returns."""

    def __init__(self, kind: str) -> None:
        super().__init__("hanging")
        self.kind = kind

    def run(self, x: jax.Array, *, cfg: Way) -> jax.Array:
        """Compute the result, or hang."""
        if cfg.hang.startswith("tracing"):
            hang(cfg.hang)
        y: jax.Array = jax.lax.fori_loop(0, cfg.repeats, lambda _, y: y + 1e-30 * jnp.sin(y @ y), x)
        if not cfg.hang:
            return y

        def callback(x: Any) -> Any:
            hang(cfg.hang)
            return x

        hung: jax.Array = jax.pure_callback(callback, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
        return hung

    def reference(self, x: jax.Array) -> jax.Array:
        """Return the reference result."""
        return x

    def heuristic_cfg(self, inv: Any) -> Way:
        """Return the slow configuration."""
        return Way(400)

    def config_space(self, inv: Any) -> list[Way]:
        """Return a configuration that hangs, and a fast one."""
        return [Way(1, self.kind), Way(1)]


def searched(kind: str, *, isolate: bool, budget: float) -> dict[str, Any]:
    """Return the seconds and the outcome of one search."""
    kernel = Hanging(kind)
    inv = Invocation(kernel=kernel, args=(jax.ShapeDtypeStruct(SHAPE, jnp.float32),))
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        try:
            data = Autotuner().tune(inv, kernel, policy=AutotunePolicy(isolate=isolate, budget_s=budget))
        except TuningError as error:
            return {"seconds": round(time.perf_counter() - start, 2), "found": str(error)}
    seconds = round(time.perf_counter() - start, 2)
    return {
        "seconds": seconds,
        "found": "the fast one" if data.config == Way(1) else "the heuristic",
        "heuristic": data.heuristic.status,
        "hanging": [outcome.status for outcome in data.outcomes if outcome.config.hang],
    }


def main() -> None:
    """Search as often as was asked for, and print or write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = []
    for kind in HANGS:
        for isolate in (True, False) if "lock" not in kind else (True,):
            runs = [searched(kind, isolate=isolate, budget=options.budget) for _ in range(options.runs)]
            found.append({"hangs while": kind, "in a worker": isolate, "searches": runs})
            print(json.dumps(found[-1]), flush=True)
    report = {**environment(), "budget_s": options.budget, "results": found}
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
