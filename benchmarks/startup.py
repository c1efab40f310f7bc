# SPDX-License-Identifier: Apache-2.0
"""The start-up time of commands beside an idle interpreter and `import jax`, and the time to list 10,000 entries."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.files import fill

BAR_MS = 150.0
LIST_BAR_MS = 2000.0
ENTRIES = 10_000
_CLI = ("-m", "ejkernel")
COMMANDS: dict[str, tuple[str, ...]] = {
    "python -c pass": ("-c", "pass"),
    "python -c 'import click'": ("-c", "import click"),
    "python -c 'import jax'": ("-c", "import jax"),
    **{
        f"ejkernel {line}": (*_CLI, *line.split())
        for line in ("--help", "--version", "tune --help", "cache --help", "cache path")
    },
}
LIST = f"ejkernel cache list, {ENTRIES:,} entries"


def seconds(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU seconds of each command's process, interleaved."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*COMMANDS, LIST)}
    with tempfile.TemporaryDirectory() as folder:
        # Use bytecode, as an installed package does, even if this environment disables it.
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{folder}/code"}
        fill(Path(folder) / "cache", ENTRIES)
        commands = COMMANDS | {LIST: (*_CLI, "cache", "list", "--cache", f"{folder}/cache")}
        for turn in range(rounds + 1):
            for name, arguments in commands.items():
                start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=True)
                wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
                if turn:  # the first brings files into memory, and writes the bytecode
                    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                    found[name].append((wall, processor))
    return found


def measure(rounds: int) -> dict[str, Any]:
    """Return the result, ready for JSON."""
    figures = {
        name: {
            "minimum_ms": round(min(wall for wall, _ in taken) * 1e3, 1),
            "median_ms": round(statistics.median(wall for wall, _ in taken) * 1e3, 1),
            "minimum_cpu_ms": round(min(cpu for _, cpu in taken) * 1e3, 1),
        }
        for name, taken in seconds(rounds).items()
    }
    return {
        "environment": report.environment(),
        "bar_ms": BAR_MS,
        "list_bar_ms": LIST_BAR_MS,
        "rounds": rounds,
        "commands": figures,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; 0 if the bar is met, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="processes of each command")
    parser.add_argument("--out", type=Path, metavar="DIR", help="add the run to startup.json there")
    args = parser.parse_args(argv)
    run = measure(args.rounds)
    for name, figures in run["commands"].items():
        print(f"{name:36}" + "".join(f"{kind} {value:7.1f}  " for kind, value in figures.items()))
    if args.out is not None:
        kept = args.out / "startup.json"
        found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        found[run["environment"]["jax"]] = run  # one run for each version of JAX, the latest
        kept.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
    # the processor's time, which other processes of the machine add the least to
    ours = {name: figures["minimum_cpu_ms"] for name, figures in run["commands"].items() if name.startswith("ejkernel")}
    listing, slowest = ours.pop(LIST), max(ours.values())
    print(f"bar of {BAR_MS:.0f} ms: {'met' if slowest <= BAR_MS else 'NOT MET'}", file=sys.stderr)
    print(f"bar of {LIST_BAR_MS:.0f} ms: {'met' if listing <= LIST_BAR_MS else 'NOT MET'}", file=sys.stderr)
    return 0 if slowest <= BAR_MS and listing <= LIST_BAR_MS else 1


if __name__ == "__main__":
    sys.exit(main())
