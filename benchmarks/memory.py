# SPDX-License-Identifier: Apache-2.0
"""Memory that a process gains with each call: with new static values and changing configurations, beside plain JAX.

    python -m benchmarks.memory --out benchmarks/results

Each figure comes from a separate process: its resident memory after many calls, less that after a warm-up. Every new
static value compiles a program that stays in JAX's caches until newer ones replace it, so plain JAX grows as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report
from ejkernel.ops import ConfigSelectorChain, Executor, Invocation, Kernel

WARM_UP = 30
BARS = {"new static values": 1.2, "new static values, gradient": 1.2}  # as a ratio to plain JAX
MOST_PER_PUT_KB = 20.0  # a program takes 400, so that this is noise

Step = Callable[[int], Any]


class Scale(Kernel[int, jax.Array]):
    """A small kernel with a static argument."""

    def run(self, x: jax.Array, number: int = 1, *, cfg: int) -> jax.Array:
        """Return the scaled sum."""
        return (x * (number * cfg)).sum()

    def heuristic_cfg(self, inv: Invocation[int, jax.Array]) -> int:
        """Return the only configuration."""
        return 1


def steps() -> dict[str, Step]:
    """Return the repeated calls by name; each takes a number that was not used before."""
    x, kernel = jnp.ones(16), Scale()
    executor: Executor[Any, Any] = Executor(ConfigSelectorChain())
    plain = jax.jit(lambda x, number: (x * number).sum(), static_argnums=1)
    key = Invocation(kernel=kernel, args=(x,)).key

    def put(number: int) -> None:
        executor.chooser.cache.put(key, number % 2)  # type: ignore[attr-defined]  # it is a chain

    def put_and(use: Step) -> Step:
        def step(number: int) -> Any:
            put(number)
            return use(number)

        return step

    return {
        "plain JAX, new static values": lambda number: plain(x, number),
        "ejkernel, new static values": lambda number: executor(kernel, x, number),
        "plain JAX, new static values, gradient": lambda number: jax.grad(plain)(x, float(number)),
        "ejkernel, new static values, gradient": lambda number: jax.grad(lambda x: executor(kernel, x, number))(x),
        "ejkernel, put": put_and(lambda number: executor(kernel, x)),
        "ejkernel, put, gradient": put_and(lambda number: jax.grad(lambda x: executor(kernel, x))(x)),
    }


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(name: str, count: int) -> float:
    """Return the kilobytes that this process gains with each of `count` steps."""
    step = steps()[name]
    for number in range(WARM_UP):
        step(number)
    before = resident_bytes()
    for number in range(WARM_UP, WARM_UP + count):
        step(number)
    return (resident_bytes() - before) / count / 1e3


def measure(count: int) -> dict[str, Any]:
    """Return the result of a process for each kind of step, ready for JSON."""
    found = {}
    for name in steps():
        command = [sys.executable, "-m", "benchmarks.memory", "--only", name, "--count", str(count)]
        found[name] = round(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout), 1)
    return {"environment": report.environment(), "calls": count, "kilobytes_per_call": found}


def met(run: dict[str, Any]) -> bool:
    """Return whether memory grows no faster than plain JAX's, and not at all where configurations change."""
    found = run["kilobytes_per_call"]
    ratios = [found[f"ejkernel, {name}"] <= bar * found[f"plain JAX, {name}"] for name, bar in BARS.items()]
    puts = [value <= MOST_PER_PUT_KB for name, value in found.items() if "put" in name]
    return all(ratios) and all(puts)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; 0 if the bars are met, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="calls of each kind")
    parser.add_argument("--only", choices=list(steps()), help="measure one kind in this process, and print it")
    parser.add_argument("--out", type=Path, metavar="DIR", help="add the run to memory.json there")
    args = parser.parse_args(argv)
    if args.only is not None:
        print(growth(args.only, args.count))
        return 0
    run = measure(args.count)
    for name, value in run["kilobytes_per_call"].items():
        print(f"{name:42}{value:8.1f} kB a call")
    if args.out is not None:
        kept = args.out / "memory.json"
        found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        found[run["environment"]["jax"]] = run  # one run for each version of JAX, the latest
        kept.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
    print(f"bars: {'met' if met(run) else 'NOT MET'}", file=sys.stderr)
    return 0 if met(run) else 1


if __name__ == "__main__":
    sys.exit(main())
