# SPDX-License-Identifier: Apache-2.0
"""Do processes of one program ever run different configurations, or hang? Many random launches of four.

    python -m benchmarks.ranks [--runs 200] [--processes 4] [--rounds 2] [--seed 0] [--control] [--output FILE]

A run is a launch of new processes. Each has its own hash seed, caches, heuristics and policies, joins a coordination
service and goes through some rounds of `benchmarks.rank_rounds`. In every fifth run one process is killed before the
last round. Processes are forked from others that have imported JAX without using it.

A call is divergent if two processes used different configurations for it, or if its result shows two. A run hangs if
it takes longer than two minutes. With --control the processes do not agree, to show that the benchmark can fail.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import environment
from ejkernel.ops import ConfigurationDigest

_QUICK = "--xla_backend_optimization_level=0"  # most of the time is the compiler's
_RUNS_OF_A_HOST = 20  # then others are started, with other hash seeds
_KILLED_EVERY = 5


class Host:
    """A process that forks one rank of each run."""

    def __init__(self, hash_seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rank_rounds"],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "OPENBLAS_NUM_THREADS": "1", "XLA_FLAGS": _QUICK},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def start(self, **plan: Any) -> None:
        """Fork a rank."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(plan) + "\n")
        self._process.stdin.flush()

    def result(self, until: float) -> dict[str, Any]:
        """Return how the rank ended; kill it if it has not ended by `until`."""
        pid = int(self._lines.get())
        try:
            return {"hangs": False, "status": int(self._lines.get(timeout=max(0.001, until - time.monotonic())))}
        except queue.Empty:
            os.kill(pid, signal.SIGKILL)
            return {"hangs": True, "status": int(self._lines.get())}

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch(hosts: Sequence[Host], options: argparse.Namespace, seed: int, killed: bool) -> dict[str, Any]:
    """Return the outcome of one run."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        plan = {
            "port": free_port(),
            "count": len(hosts),
            "seed": seed,
            "rounds": options.rounds,
            "agree": not options.control,
            "folder": folder,
            "someone_killed": killed,
        }
        for index, host in enumerate(hosts):
            host.start(index=index, killed=killed and index == len(hosts) - 1, **plan)
        ended = [host.result(began + options.longest) for host in hosts]
        written = [Path(folder, f"{index}.jsonl") for index in range(len(hosts))]
        found = [list(map(json.loads, file.read_text().splitlines())) if file.exists() else [] for file in written]
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 2),
        "hangs": sum(rank["hangs"] for rank in ended),
        "killed": killed,
        "failed": _failures(ended, killed),
        "divergent": _divergent(found),
        "calls": len({call for rank in found for entry in rank for call in entry["used"]}),
        "errors": sum(entry["errors"] for rank in found for entry in rank),
        "rounds": min(map(len, found[:-1] if killed else found)),
    }


def _failures(ended: Sequence[Mapping[str, Any]], killed: bool) -> list[int]:
    wanted = [*[0] * (len(ended) - 1), -signal.SIGKILL if killed else 0]
    return [rank["status"] for rank, status in zip(ended, wanted, strict=True) if rank["status"] != status]


def _divergent(found: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the calls with different configurations in two processes, or with results of two configurations."""
    wrong = [f"result of {name}" for rank in found for entry in rank for name in entry["mixed"]]
    last = [ConfigurationDigest({c: tuple(d) for c, d in rank[-1]["used"].items()}) for rank in found if rank]
    for mine in last:
        for other in last:
            wrong += [call for call, both in mine.difference(other).items() if all(both)]
    return sorted(set(wrong))


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the outcome of every run."""
    rng, runs, hosts = random.Random(options.seed), [], []
    with contextlib.ExitStack() as stack:
        for number in range(options.runs):
            if number % _RUNS_OF_A_HOST == 0:
                stack.close()
                hosts = [Host(rng.randrange(1, 2**32)) for _ in range(options.processes)]
                for host in hosts:
                    stack.callback(host.close)
            killed = number % _KILLED_EVERY == _KILLED_EVERY - 1
            runs.append(launch(hosts, options, rng.randrange(2**32), killed))
            if runs[-1]["hangs"] or runs[-1]["failed"] or runs[-1]["divergent"] or number % 10 == 9:
                print(json.dumps({"run": number, **runs[-1]}), file=sys.stderr, flush=True)
    return runs


def summary(runs: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures."""
    seconds = [run["seconds"] for run in runs]
    bad = [run for run in runs if run["divergent"] or run["hangs"] or run["failed"]]
    return {
        "environment": environment(),
        "processes": options.processes,
        "control": options.control,
        "rounds_of_a_run": options.rounds,
        "seed": options.seed,
        "runs": len(runs),
        "runs_with_a_process_killed": sum(run["killed"] for run in runs),
        "rounds": sum(run["rounds"] for run in runs),
        "calls": sum(run["calls"] for run in runs),
        "divergent": sum(len(run["divergent"]) for run in runs),
        "hangs": sum(run["hangs"] for run in runs),
        "failed_processes": dict(Counter(status for run in runs for status in run["failed"])),
        "errors_of_overlays_that_differ": sum(run["errors"] for run in runs),
        "seconds_of_a_run": {"median": round(float(np.median(seconds)), 2), "most": max(seconds)},
        "bad_runs": len(bad),
        "bad": bad,
    }


def main() -> None:
    """Launch, compare and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=120.0, help="seconds after which a run hangs")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = summary(run_all(options), options)
    print(json.dumps(found, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
