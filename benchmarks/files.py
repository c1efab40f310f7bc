# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.files`: the cost of saving configurations and searches in files, and of finding them again."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks import report
from ejkernel.ops import ConfigKey, Invocation, Kernel, PersistentCache
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.store import measurements as stores
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.config import _writing, persistent
from ejkernel.ops.config._files import location
from ejkernel.ops.config.shared.copies import LocalCopy
from ejkernel.ops.config.shared.packs import check, line_of, packed
from ejkernel.ops.utils.storage.serialize import sealed_object

BARS = {  # for 100,000 entries; seconds and microseconds are the processor's, for other processes have the machine too
    "entries_cpu_seconds": 5.0,
    "shared_entries_cpu_seconds": 5.0,
    "first_of_a_process_cpu_us": 2000.0,
    "shared_first_of_a_process_cpu_us": 2000.0,
    "warm_cpu_us": 100.0,
    "shared_warm_cpu_us": 100.0,
    "grown_mb": 20.0,
    "shared_grown_mb": 20.0,
}
PROCESSES = 5  # each looks up keys, with cold caches
LISTINGS = 3  # of which the soonest counts
LOOKED_UP = 100  # keys that each of them looks up

# The work of a new process: open the folder, and look up keys that are far apart.
LOOKUPS = """
import dataclasses, json, sys, time
import jax
from ejkernel.ops import ConfigKey, PersistentCache
from ejkernel.ops.config.shared.copies import LocalCopy

@dataclasses.dataclass(frozen=True)
class Config:
    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

folder, shared, keys = json.loads(sys.argv[1])
cache = PersistentCache(folder, layers=["file:///nowhere"] if shared else [], shipped=False)
if shared:
    cache.shared[0].copy = LocalCopy(cache.path / "copy")
before, walls, cpus = resident(), [], []
for key in keys:
    wall, cpu = time.perf_counter(), time.process_time()
    config = cache.get(ConfigKey(*key), Config)
    walls.append(time.perf_counter() - wall)
    cpus.append(time.process_time() - cpu)
    assert config is not None, key
print(json.dumps({"wall": walls, "cpu": cpus, "grown": resident() - before}))
"""
CANDIDATES = 17  # of a search; as many as attention has
_WRITE = _writing.write_file


class Square(Kernel[dict[str, Any], jax.Array]):
    """A kernel with a configuration of the usual size."""

    def run(self, q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, cfg: dict[str, Any]) -> jax.Array:
        """Return something of the right shape."""
        return q * k * v


def searched(number: int, kernel: Kernel[Any, Any]) -> AutotuneData:
    """Return a search for a call with a shape that depends on `number`."""
    x = jax.ShapeDtypeStruct((number + 1, 1024, 8, 64), np.float32)
    inv = Invocation(kernel=kernel, args=(x, x, x), kwargs={"causal": True}, device="gpu:nvidia_h200")
    outcomes = tuple(
        Outcome(
            config={"block_q": 64, "block_kv": 64 + index, "num_warps": 4, "num_stages": 2},
            status=Status.MEASURED,
            measurement=Measurement(samples=tuple(1e-4 + index * 1e-6 + n * 1e-7 for n in range(15)), method="cupti"),
            compile_seconds=1.25,
        )
        for index in range(CANDIDATES)
    )
    return AutotuneData(inv=inv, config=outcomes[-1].config, outcomes=outcomes, seconds=12.5)


def put(cache: PersistentCache, data: AutotuneData) -> None:
    """Store a search's winner, as a chain does."""
    cache.put(data.key, data.config, call=data.inv.description, measured=data.summary_data())


def seconds_each(function: Callable[[Any], object], items: Sequence[Any]) -> float:
    """Return the median of the seconds that the function takes for an item."""
    times = []
    for item in items:
        start = time.perf_counter()
        function(item)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def not_durable(file: Path, text: str) -> None:
    """Write a file, and leave it to the system when it is on the disk."""
    _WRITE(file, text, durable=False)


def entry_costs(folder: Path, count: int) -> dict[str, float]:
    """Return the microseconds of putting and getting an entry."""
    found: dict[str, float] = {}
    searches = [searched(number, Square("square")) for number in range(count)]
    for name, write in (("put", _WRITE), ("put_without_fsync", not_durable)):
        cache = PersistentCache(folder / name, shipped=False)
        with mock.patch.object(persistent, "write_file", write):
            found[f"{name}_us"] = seconds_each(functools.partial(put, cache), searches) * 1e6
    found["get_us"] = seconds_each(lambda data: cache.get(data.key, dict[str, Any]), searches) * 1e6
    found["miss_us"] = seconds_each(lambda data: cache.get(data.key._replace(call="none")), searches) * 1e6
    return found


def fill(folder: Path, count: int) -> list[ConfigKey]:
    """Put so many entries into a folder, of 100 operations, and return their keys."""
    cache = PersistentCache(folder, shipped=False)
    data = searched(0, Square("square"))
    put(cache, data)
    (file,) = folder.rglob("*.json")
    text = file.read_text(encoding="utf-8").rpartition(",")[0] + "\n}"
    file.unlink()
    keys = []
    for number in range(count):  # as `put` writes them, but sooner
        key = data.key._replace(op=f"square{number % 100}@v0", call=f"{number:016x}")
        path = folder.joinpath(*location(key))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sealed_object(text.replace(data.key.call, key.call).replace("square@v0", key.op)))
        keys.append(key)
    return keys


def listing_seconds(cache: PersistentCache, count: int) -> dict[str, float]:
    """Return the seconds that it takes to read all entries of a cache of so many, and those of one operation."""
    found: dict[str, float] = {}
    for name, operation in (("entries", None), ("entries_of_one_operation", "square7")):
        walls, cpus = [], []
        for _ in range(LISTINGS):
            start, cpu = time.perf_counter(), time.process_time()
            read = sum(1 for _ in cache.entries(operation))
            walls.append(time.perf_counter() - start)
            cpus.append(time.process_time() - cpu)  # unaffected by other processes
            assert read in (count, count // 100), read
        found |= {f"{name}_seconds": min(walls), f"{name}_cpu_seconds": min(cpus)}
    return found


def shared_copy(folder: Path, source: Path) -> tuple[PersistentCache, dict[str, float]]:
    """Return a cache with a shared layer that holds all entries of `source`, and the cost of making its local copy."""
    copy = LocalCopy(folder / "copy")
    start = time.perf_counter()
    lines = (line_of(entry) for _, entry in PersistentCache(source, shipped=False).entries())
    made = list(packed(lines))
    packing = time.perf_counter() - start
    for name, raw in made:
        check(name, raw)
        copy.add(name, raw)
    start = time.perf_counter()
    copy.merge()
    merging = time.perf_counter() - start
    cache = PersistentCache(folder, layers=["file:///nowhere"], shipped=False)
    cache.shared[0].copy = copy
    figures = {"pack_seconds": packing, "merge_seconds": merging, "megabytes": copy.packs()[0].size / 1e6}
    return cache, figures


def lookup_costs(folder: Path, keys: Sequence[ConfigKey], *, shared: bool) -> dict[str, float]:
    """Return microseconds of the first lookup of a process and of later ones, and the memory that the process gains."""
    found = []
    step = len(keys) // LOOKED_UP
    for number in range(PROCESSES):
        wanted = keys[number::step][:LOOKED_UP]
        command = [sys.executable, "-c", LOOKUPS, json.dumps([str(folder), shared, wanted])]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    figures = {f"first_of_a_process_{name}_us": min(run[name][0] for run in found) * 1e6 for name in ("wall", "cpu")}
    for name in ("wall", "cpu"):
        figures[f"warm_{name}_us"] = min(statistics.median(run[name][1:]) for run in found) * 1e6
    return figures | {"grown_mb": max(run["grown"] for run in found)}


def large_cache(folder: Path, count: int) -> dict[str, float]:
    """Return the cost of lookups in a cache of `count` entries, in a folder and in the copy of a shared cache."""
    keys = fill(folder / "entries", count)
    figures = {
        **lookup_costs(folder / "entries", keys, shared=False),
        **listing_seconds(PersistentCache(folder / "entries", shipped=False), count),
    }
    cache, made = shared_copy(folder / "shared", folder / "entries")
    of_shared = {
        **made,
        **lookup_costs(folder / "shared", keys, shared=True),
        **listing_seconds(cache, count),
    }
    return figures | {f"shared_{name}": value for name, value in of_shared.items()}


@mock.patch.object(stores, "write_file", not_durable)
def log_seconds(folder: Path, count: int) -> dict[str, float]:
    """Return the seconds to find a call's logs among `count` logs of other operations, and of its own operation."""
    found: dict[str, float] = {}
    for name, kernels in (
        ("other_operations", [Square(f"square{n}") for n in range(40)]),
        ("its_own", [Square("one")]),
    ):
        store = MeasurementStore(PersistentCache(folder / name, shipped=False))
        for number in range(count):
            store.save(searched(number // len(kernels), kernels[number % len(kernels)]))
        wanted = searched(0, Square("one")) if name == "other_operations" else searched(1, kernels[0])
        if name == "other_operations":
            store.save(wanted)
        start, cpu = time.perf_counter(), time.process_time()
        records = store.records(wanted.inv)
        found[f"among_{count}_of_{name}_seconds"] = time.perf_counter() - start
        found[f"among_{count}_of_{name}_cpu_seconds"] = time.process_time() - cpu
        assert records, name
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; 0 if all bars are met, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.files", description=__doc__)
    parser.add_argument("--entries", type=int, default=100_000, help="entries in the listed folder")
    parser.add_argument("--logs", type=int, default=4_000, help="logs among which one call's are looked for")
    parser.add_argument("--rounds", type=int, default=300, help="entries to put and read one by one")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        figures = {
            **entry_costs(folder / "costs", args.rounds),
            **log_seconds(folder / "logs", args.logs),
            **large_cache(folder, args.entries),
        }
    run = {
        "environment": report.environment(),
        "entries": args.entries,
        "figures": {name: float(f"{value:.4g}") for name, value in figures.items()},
    }
    text = json.dumps(run, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    scale = args.entries / 100_000
    limits = {name: bar * scale if name.endswith("seconds") else bar for name, bar in BARS.items()}
    missed = [f"{name} {figures[name]:.4g} > {limit:g}" for name, limit in limits.items() if figures[name] > limit]
    print(f"bars: {'NOT MET: ' + ', '.join(missed) if missed else 'met'}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
