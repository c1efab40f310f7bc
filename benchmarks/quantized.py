# SPDX-License-Identifier: Apache-2.0
"""The shared part of the benchmarks of 8-bit products: contenders are compiled at once and run interleaved.

Each shape has its own process. `us` are the host clock's times of a warm card, limited by power: the median of slices
with many calls in a row. `kernel_us` is the sum of the kernels of a single call after a pause, the median of a few.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import report
from benchmarks.apart import run_apart
from benchmarks.linear_cross_entropy_hopper import seconds_per_call
from ejkernel import compat

SLICES, SLICE_S = 5, 0.08
SINGLE_CALLS, PAUSE_S = 5, 0.15
Function = Callable[..., Any]
Ratios = Callable[[dict[str, Any]], dict[str, float]]


def run_contenders(
    names: Sequence[str],
    function: Callable[[str], Function],
    arrays: Callable[[str], Sequence[Any]],
    row: Callable[[str, Any], dict[str, Any]],
) -> tuple[dict[str, Any], dict[str, Function]]:
    """Compile contenders, check each, and print the figures after each.

    Args:
        names: Those of the contenders.
        function: Returns a contender's function.
        arrays: Returns its arguments.
        row: Runs its compiled program; returns the first figures, such as errors.

    Returns:
        The figures of each contender, or the reason for having none; and calls of those that run.
    """
    found: dict[str, Any] = {}
    runs: dict[str, Function] = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compile_one = lambda name: jax.jit(function(name)).lower(*arrays(name)).compile()  # noqa: E731
        jobs = {name: pool.submit(compile_one, name) for name in names}
        for name, job in jobs.items():
            try:
                program = job.result()
                found[name] = row(name, program)
            except Exception as problem:  # noqa: BLE001  # a contender's failure is a result, with its reason
                found[name] = {"reason": f"{type(problem).__name__}: {problem}".splitlines()[0][:300]}
            else:
                runs[name] = functools.partial(program, *arrays(name))
            print(json.dumps(found), flush=True)
    return found, runs


def add_times(flops: float, found: dict[str, Any], runs: Mapping[str, Function]) -> None:
    """Add the times of contenders that run: of calls in a row, and of the kernels of single calls."""
    numbers = {name: max(1, int(SLICE_S / seconds_per_call(run, 3))) for name, run in runs.items()}
    warm: dict[str, list[float]] = {name: [] for name in runs}
    single: dict[str, list[float]] = {name: [] for name in runs}
    order = np.random.default_rng(0)
    for _ in range(SLICES):
        for name in map(str, order.permutation(list(runs))):
            warm[name].append(seconds_per_call(runs[name], numbers[name]))
    for _ in range(SINGLE_CALLS if jax.default_backend() == "gpu" else 0):
        for name in map(str, order.permutation(list(runs))):
            time.sleep(PAUSE_S)  # the card cools down
            kernels = compat.cupti_seconds(runs[name])
            single[name] += [] if kernels is None else [kernels]
    for name in runs:
        for kind, samples in (("us", warm[name]), ("kernel_us", single[name])):
            if samples:
                us = 1e6 * float(np.median(samples))
                found[name][kind] = round(us, 1)
                if not name.startswith("quantize"):
                    found[name][f"{kind.removesuffix('us')}tflops"] = round(flops / us / 1e6)


def table(found: dict[str, Any], title: Callable[[str], str] = str) -> str:
    """Return a Markdown table, a line per shape and contender; `title` names a shape."""
    fields = ("us", "tflops", "kernel_us", "kernel_tflops")
    lines = ["| | us | TFLOP/s | kernels us | TFLOP/s | errors: mean zero, positive |", "|---" * 6 + "|"]
    for key, rows in found.items():
        if key == "environment":
            continue
        for name, row in rows["contenders"].items():
            cells = [f"{row[field]:,}" if row.get(field) else "" for field in fields]
            said = row.get("errors", row.get("reason", ""))
            lines.append(f"| {title(key)}, {name} | {' | '.join(cells)} | {said} |")
        lines.append(f"| {key}, ratios | {rows['ratios']} {rows.get('reason', '')} | | | | |")
    return "\n".join(lines) + "\n"


def measured_apart(module: str, shape: str, names: Sequence[str], seconds: float, ratios: Ratios) -> dict[str, Any]:
    """Return the result of measuring in a separate process, or the reason for having none."""
    lines, reason = run_apart(f"benchmarks.{module}", "--one", shape, "--contenders", *names, seconds=seconds)
    rows: dict[str, Any] = json.loads(lines[-1]) if lines and lines[-1].endswith("}") else {}
    return {"contenders": rows, "ratios": ratios(rows)} | ({"reason": reason} if reason else {})


def run_shapes(
    module: str,
    doc: str | None,
    shapes: Mapping[str, Any],
    contenders: Mapping[str, Function],
    *,
    few: Sequence[str],
    seconds: float,
    measured: Callable[[Any, Sequence[str]], dict[str, Any]],
    ratios: Ratios,
    argv: Sequence[str] | None,
) -> int:
    """Run a benchmark of groups as a program: print its table, and write it with `--out`.

    Args:
        module: The benchmark's module, in this package.
        doc: Its documentation.
        shapes: Its shapes; the last one only by request.
        contenders: Its contenders, of which `few` run by default.
        few: See `contenders`.
        seconds: The default limit of a process.
        measured: Returns the figures of contenders for a shape, in this process.
        ratios: Returns ratios of a shape's figures.
        argv: The program's arguments; `None`: those of the command line.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=doc)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"write {module}_<device>.json and .md")
    parser.add_argument("--shapes", nargs="*", default=list(shapes)[:-1], choices=list(shapes), metavar="SHAPE")
    parser.add_argument("--contenders", nargs="*", default=list(few), choices=list(contenders), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=seconds, help="limit of one process (default: %(default)s)")
    parser.add_argument("--one", choices=list(shapes), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measured(shapes[args.one], args.contenders)))
        return 0
    found: dict[str, Any] = {"environment": report.environment()}
    for shape in args.shapes:
        found[shape] = measured_apart(module, shape, args.contenders, args.seconds, ratios)
        print(shape, json.dumps(found[shape]), file=sys.stderr, flush=True)
        if args.out is not None:  # written after each process, in case a later one fails
            report.write(args.out, f"{module}_{report.platform_name()}", found, table(found))
    print(table(found))
    return 0
