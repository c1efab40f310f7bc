# SPDX-License-Identifier: Apache-2.0
"""Time every configuration of one of our own spaces, in the format of `benchmarks/search.py`.

    python -m benchmarks.record compile SPACE FOLDER   # anywhere with JAX's CUDA plugin
    python -m benchmarks.record measure FOLDER OUT     # on the device

If a call is measured on several draws of inputs, a sample is their geometric mean. A process measures a few dozen
configurations and reports the current one. If it is silent for too long it is ended, and that configuration counts as
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import attention, attention_cases, experts, shipped
from ejkernel.ops import Invocation
from ejkernel.ops.autotuner.compile.bundles import BundledCall, compile_bundle, read_bundle
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.measure.measurement import Runner, interleaved
from ejkernel.ops.autotuner.measure.sampling import Case
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.examples import example_sets, saver
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.implementation import OperationConfig


def _attention(case: str, direction: str) -> Invocation[Any, Any]:
    calls = shipped.aimed(lambda: attention.calls_of(attention_cases.CASES[case]))
    return next(inv for inv in calls if inv.direction == direction)


def _grouped(number: int, **sizes: int) -> Invocation[Any, Any]:
    """Return a product into experts with one expert per token; 0: forward, 1: rows' gradient, 2: weights' gradient."""
    layer = experts.Experts(width=sizes["k"], hidden=sizes["n"], count=sizes["groups"], chosen=1)
    return shipped.aimed(lambda: experts.calls_of(layer, sizes["m"], training=True))[number]


# Spaces of our own kernels, by name.
SPACES: dict[str, Callable[[], Invocation[Any, Any]]] = {
    "attention_causal_d128": functools.partial(_attention, "causal D128 B4 4k", "fwd"),
    "attention_full_d64": functools.partial(_attention, "full D64 4k", "fwd"),
    "grouped_matmul_64_groups": functools.partial(_grouped, 0, m=16384, k=2048, n=2048, groups=64),
    "grouped_matmul_wgrad_64_groups": functools.partial(_grouped, 2, m=16384, k=2048, n=2048, groups=64),
}
ROUNDS = 7  # samples of a configuration
TOGETHER = 256  # configurations that a process measures
SILENT = 20.0  # seconds after which a process is ended


def configurations(inv: Invocation[Any, Any]) -> list[OperationConfig]:
    """Return the whole space of our own kernels."""
    kernel: Any = inv.kernel
    call = kernel.call_of(inv)
    field = "bwd" if call.backward else "fwd"
    space = kernel.implementations["mosaic_gpu"].space(call)
    return [kernel.config_type(implementation="mosaic_gpu", **{field: params}) for params in space]


def compile_space(space: str, folder: Path, processes: int) -> None:
    """Compile all configurations of a space into a bundle."""
    (made,) = compile_bundle(
        [SPACES[space]()], Target.named(shipped.TARGET), folder, candidates=configurations, processes=processes
    )
    print(f"{space}: {len(made.programs)} programs")


def _measure(bundle: Path, indices: Sequence[int], tell: Connection) -> None:
    """Measure these configurations of a bundle, one after the other, and tell of each when it begins and ends."""
    (call,) = read_bundle(bundle)
    inv = rebuild(call.description)
    heuristic = Choice(config=call.configs[0], platform=inv.platform)
    sets = example_sets(inv, np.random.default_rng(0), saver(inv.node.forward, heuristic))
    for index in indices:
        program = call.candidates[index].program
        tell.send((index, None))
        assert program is not None  # only those are asked for
        try:
            loaded = program.load()
            runners = [Runner(loaded, [arrays]) for arrays in sets.values()]
            cases = [Case(call=inv.call_key, draw=draw) for draw in sets] if len(sets) > 1 else []
            (times,) = interleaved([runners], cases=cases, rounds=ROUNDS)
        except Exception as error:  # noqa: BLE001 - a configuration that fails is a result
            tell.send((index, str(error)))
        else:
            tell.send((index, [1e3 * sample for sample in times.samples]))


def measured(bundle: Path, wanted: Sequence[int]) -> Iterator[tuple[int, list[float] | str]]:
    """Yield each configuration's index with its samples in milliseconds, or the reason for having none."""
    spawn, left = multiprocessing.get_context("spawn"), list(wanted)
    while left:
        here, there = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_measure, args=(bundle, left[:TOGETHER], there))
        process.start()
        there.close()
        at, allowed = left[0], 3 * SILENT  # the first word comes after JAX is there
        with contextlib.suppress(EOFError):
            while here.poll(allowed):
                (at, found), allowed = here.recv(), SILENT
                if found is not None:
                    left.remove(at)
                    yield at, found
        if at in left:
            left.remove(at)
            yield at, "it ended its process, or did not return"
        process.kill()
        process.join()


def recorded(name: str, call: BundledCall, times: dict[int, list[float] | str]) -> dict[str, Any]:
    """Return a space in the form of a file: constant axes are left out, five digits are kept."""
    params = [to_axes(candidate.outcome.config) for candidate in call.candidates]
    varying = [axis for axis in params[0] if len({values[axis] for values in params}) > 1]
    rows = []
    for index, values in enumerate(params):
        samples = times.get(index)
        kept = [_short(sample) for sample in samples] if isinstance(samples, list) else []
        rows.append([[values[axis] for axis in varying], _short(float(np.median(kept))) if kept else None, kept])
    return {
        "kernel": name,
        "device": "H200",
        "unit": "ms",
        "jax": jax.__version__,
        "axes": {axis: sorted({values[axis] for values in params}) for axis in varying},
        "configurations": len(rows),
        "valid": sum(row[1] is not None for row in rows),
        "rows": rows,
    }


def to_axes(config: OperationConfig) -> dict[str, Any]:
    """Return a configuration as values by name, true and false as 1 and 0."""
    params: Any = config.bwd if config.fwd is None else config.fwd
    plain = {name: getattr(params, name) for name in params.__dataclass_fields__}
    return {name: int(value) if isinstance(value, bool) else value for name, value in plain.items()}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    steps = parser.add_subparsers(dest="step", required=True)
    compiling, measuring = steps.add_parser("compile"), steps.add_parser("measure")
    compiling.add_argument("space", choices=list(SPACES))
    compiling.add_argument("folder", type=Path)
    compiling.add_argument("--processes", type=int, default=2)
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("space", choices=list(SPACES))
    measuring.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    if args.step == "compile":
        compile_space(args.space, args.folder, args.processes)
    else:
        measure_space(args.space, args.folder, args.out)
    return 0


def measure_space(space: str, folder: Path, out: Path) -> None:
    """Measure a bundle, and write the results, also while it runs."""
    (call,) = read_bundle(folder)
    wanted = [index for index, candidate in enumerate(call.candidates) if candidate.program is not None]
    times: dict[int, list[float] | str] = {}
    started = time.monotonic()
    for index, found in measured(folder, wanted):
        times[index] = found
        if len(times) % 32 == 0 or len(times) == len(wanted):
            _write(out / f"{space}__H200.json.gz", recorded(space, call, times))
    failed = sum(isinstance(found, str) for found in times.values())
    print(f"{space}: {len(times)} measured, {failed} of them failed, in {time.monotonic() - started:.0f} s")


def _write(file: Path, data: Any, opener: Callable[..., Any] = gzip.GzipFile) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with opener(file, "wb", mtime=0) as stream:  # the same content, the same file
        stream.write(json.dumps(data).encode())


if __name__ == "__main__":
    sys.exit(main())
