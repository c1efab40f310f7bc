# SPDX-License-Identifier: Apache-2.0
"""The speed-up of tuning with several workers over one, and the results when workers are killed.

    python -m benchmarks.fan_out --ray [--kills COUNT] --output FILE    # two nodes of a local cluster, a core each
    python -m benchmarks.fan_out --devices 2 4 --output FILE            # GPUs of this machine, by threads

Runs of one worker and of several are interleaved, so other work of the machine affects both. Each run has calls of new
sizes, so nothing is compiled in advance. One candidate of the kernel is many times as fast as the others, which makes
winners comparable.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.report import environment
from ejkernel.ops import (
    AutotunePolicy,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Event,
    Invocation,
    Kernel,
    PersistentCache,
    RayExecutor,
    WorkerRestarted,
    device_fingerprint,
    on_event,
)
from ejkernel.ops.autotuner.fleet import dispatch
from ejkernel.ops.autotuner.process.worker import worker_session
from ejkernel.ops.execution.offline import tune_invocations

CORES = (0, 1)
REPEATS = (200, 1, 20, 50, 100)  # of each candidate, the heuristic's first
BEST = 1
LEAST = 64  # rows of the smallest call


class Repeated(Kernel[int, jax.Array]):
    """`tanh(x @ x)`, computed as often as the configuration says."""

    def run(self, x: jax.Array, *, cfg: int) -> jax.Array:
        """Compute it."""
        y: jax.Array = jax.lax.fori_loop(0, cfg, lambda _, y: jnp.tanh(x @ x + 0 * y), jnp.zeros_like(x))
        return y

    def heuristic_cfg(self, inv: Invocation[int, jax.Array]) -> int:
        """Return the slowest."""
        del inv
        return REPEATS[0]

    def config_space(self, inv: Invocation[int, jax.Array]) -> list[int]:
        """Return all."""
        del inv
        return list(REPEATS)


repeated = Repeated("repeated")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The cost and the results of tuning some calls."""

    seconds: float
    found: int
    best: int
    saved: int
    lost: tuple[str, ...]
    load: float | None = None

    def __str__(self) -> str:
        return f"{self.found} calls in {self.seconds:.1f} s, {self.best} with the best, {len(self.lost)} workers lost"


def calls(count: int, sizes: Iterator[int], device: str) -> list[Invocation[Any, Any]]:
    """Return calls that were not tuned before."""
    from benchmarks.fan_out import repeated  # importable by workers, unlike `__main__`

    types = (jax.ShapeDtypeStruct((size, size), jnp.float32) for size in itertools.islice(sizes, count))
    return [Invocation(kernel=repeated, args=(x,), device=device).abstract() for x in types]


def tuned(executor: concurrent.futures.Executor, todo: Sequence[Invocation[Any, Any]]) -> Run:
    """Tune calls."""
    lost: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, WorkerRestarted):
            lost.append(event.reason)

    with tempfile.TemporaryDirectory() as folder, on_event(note):
        cache = PersistentCache(folder)
        chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(
            ConfigCache(), cache, policy=AutotunePolicy(executor=executor)
        )
        start = time.perf_counter()
        result: AutotuningResult = tune_invocations(chain, todo)
        seconds = time.perf_counter() - start
        saved = sum(call.key in cache for call in todo)
    best = sum(entry.cfg == BEST for entry in result.entries)
    return Run(seconds=round(seconds, 2), found=len(result), best=best, saved=saved, lost=tuple(lost))


def interleaved(
    executors: Mapping[int, concurrent.futures.Executor], options: argparse.Namespace, device: str
) -> dict[str, Any]:
    """Return the runs by number of workers, and the ratio of the calls per second of several workers to one."""
    sizes, counts = itertools.count(LEAST), list(executors)
    for count, executor in executors.items():  # their processes are there before the clock starts
        tuned(executor, calls(2 * count, sizes, device))
    runs: dict[int, list[Run]] = {count: [] for count in counts}
    for number in range(options.rounds):
        for count in counts if number % 2 else reversed(counts):
            load = os.getloadavg()[0]
            run = tuned(executors[count], calls(options.calls, sizes, device))
            runs[count].append(dataclasses.replace(run, load=round(load, 1)))
            print(f"{count} at work: {run} (load {load:.1f})", flush=True)
    ratios = {
        count: [round(one.seconds / run.seconds, 3) for one, run in zip(runs[1], runs[count], strict=True)]
        for count in counts
        if count > 1
    }
    for count, found in ratios.items():
        print(f"throughput of {count}: {statistics.median(found):.2f}x, of {found}")
    return {
        "throughput": {count: round(statistics.median(found), 3) for count, found in ratios.items()},
        "ratios": ratios,
        "runs": {count: [dataclasses.asdict(run) for run in made] for count, made in runs.items()},
    }


def versions() -> dict[str, str]:
    """Return those of Ray, if it is there."""
    try:
        return {"ray": importlib.metadata.version("ray")}
    except importlib.metadata.PackageNotFoundError:
        return {}


# --- Ray ---


@contextlib.contextmanager
def two_nodes() -> Iterator[None]:
    """Provide a cluster of two nodes, with one core of this machine each."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")  # or workers run at lower priority than other processes
    from ray.cluster_utils import Cluster

    before = os.sched_getaffinity(0)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for number, core in enumerate(CORES):
        os.sched_setaffinity(0, {core})  # child processes inherit it
        cluster.add_node(num_cpus=1, resources={f"node{number}": 1})
    os.sched_setaffinity(0, before)
    import ray

    ray.init(cluster.address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def killed(options: argparse.Namespace, executor: concurrent.futures.Executor, device: str) -> dict[str, Any]:
    """Kill random workers during tuning until there were enough kills; return the results of the calls."""
    places: dict[int, bool] = {}
    receive, enough, rng = dispatch.ExecutorWorker.receive, threading.Event(), random.Random(options.seed)
    kills: list[float] = []

    def noted(worker: Any) -> bytes | None:
        message = receive(worker)
        if worker.where is not None:
            places[worker.where.pid] = True
        return message

    def kill() -> None:
        while len(kills) < options.kills and not enough.wait(rng.uniform(0.5, options.every)):
            living = [pid for pid in places if Path(f"/proc/{pid}").exists()]
            if living:
                os.kill(rng.choice(living), signal.SIGKILL)
                kills.append(time.perf_counter())

    sizes, runs = itertools.count(4 * LEAST), []
    killer = threading.Thread(target=kill)
    with mock.patch.object(dispatch.ExecutorWorker, "receive", noted):
        killer.start()
        try:
            while len(kills) < options.kills:
                before = len(kills)
                run = tuned(executor, calls(options.calls, sizes, device))
                runs.append(run)
                print(f"with {len(kills) - before} kills: {run}", flush=True)
        finally:
            enough.set()
            killer.join()
    return {"kills": len(kills), "calls": options.calls * len(runs), "runs": [dataclasses.asdict(run) for run in runs]}


def by_ray(options: argparse.Namespace) -> dict[str, Any]:
    """Measure with two nodes of a core each, and one of them."""
    everything = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CORES[0]})
    device = device_fingerprint()  # that of a process with one core
    os.sched_setaffinity(0, everything)
    with (
        two_nodes(),
        RayExecutor("auto", num_cpus=1, resources={"node0": 0.01}) as one,
        RayExecutor("auto", num_cpus=1) as several,
    ):
        found: dict[str, Any] = {"device": device}
        if options.rounds:
            found["interleaved"] = interleaved({1: one, len(CORES): several}, options, device)
        if options.kills:
            found["killed"] = killed(options, several, device)
    return found


def by_threads(options: argparse.Namespace) -> dict[str, Any]:
    """Measure with as many GPUs as were asked for, and with one of them."""
    device = device_fingerprint(jax.devices("gpu")[0])
    with contextlib.ExitStack() as stack:
        if not options.cold:
            stack.enter_context(worker_session())
        executors = {
            count: stack.enter_context(concurrent.futures.ThreadPoolExecutor(count))
            for count in sorted({1, *options.devices})
        }
        return {"device": device, "cold": options.cold, "interleaved": interleaved(executors, options, device)}


def main() -> None:
    """Run the selected measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--devices", type=int, nargs="+", metavar="COUNT")
    parser.add_argument("--cold", action="store_true", help="each run on GPUs starts its workers, which takes seconds")
    parser.add_argument("--calls", type=int, default=24, help="calls of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of one worker, and of several; 0: of neither")
    parser.add_argument("--kills", type=int, default=0, help="workers of Ray to kill")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.ray == (options.devices is not None):
        parser.error("give --ray or --devices")
    found = by_ray(options) if options.ray else by_threads(options)
    found = {"environment": environment() | versions(), **found}
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
