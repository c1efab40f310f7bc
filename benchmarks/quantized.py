# SPDX-License-Identifier: Apache-2.0
"""The shared part of the benchmarks of 8-bit products: contenders of a shape run interleaved, in its own process.

All processes compile our kernels at once. Then one after another compiles the contenders whose kernels XLA chooses,
because XLA times them and a busy card would mislead it, and measures. `us` are the host clock's times of a warm card,
limited by power: the median of slices with many calls in a row. `kernel_us` is the sum of the kernels of a single call
after a pause, the median of a few.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import functools
import json
import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
TURNS_S = 900.0  # for compiling and for waiting until other processes have measured
Function = Callable[..., Any]
Ratios = Callable[[dict[str, Any]], dict[str, float]]


@contextlib.contextmanager
def _locked(mode: int) -> Iterator[None]:
    """Compile with `LOCK_SH`, together with other processes; measure with `LOCK_EX`, when none of them works."""
    with (Path(tempfile.gettempdir()) / "ejkernel_benchmarks_quantized.lock").open("w") as file:
        fcntl.flock(file, mode)
        yield


def run_contenders(
    names: Sequence[str],
    function: Callable[[str], Function],
    kind_of: Callable[[str], Hashable],
    operands: Callable[[Any, bool], Sequence[Any]],
    error: Callable[[str, Any, Any], float | None],
    *,
    seconds: float,
    flops: float = 0.0,
) -> dict[str, Any]:
    """Return the figures of each contender, or the reason for having none; print them as they are found.

    Args:
        names: Those of the contenders.
        function: Returns a contender's function.
        kind_of: Returns the kind of a contender's operands.
        operands: Returns the operands of a kind, which are positive or not; contenders of the same kind share them.
        error: Returns the error of a contender, given its compiled program and its operands, or `None`.
        seconds: The process ends if measuring takes longer.
        flops: Operations of one call, for rates.
    """
    kinds = dict.fromkeys(map(kind_of, names))
    shapes = {kind: jax.eval_shape(functools.partial(operands, kind), False) for kind in kinds}

    def compiled(name: str) -> Any:
        return jax.jit(function(name)).lower(*shapes[kind_of(name)]).compile()

    with _locked(fcntl.LOCK_SH), concurrent.futures.ThreadPoolExecutor() as pool:
        own = {name: pool.submit(compiled, name) for name in names if not _is_chosen_by_xla(name)}
        made = {kind: jax.jit(functools.partial(operands, kind)).lower(False).compile() for kind in kinds}
    with _locked(fcntl.LOCK_EX):
        signal.alarm(math.ceil(seconds))
        given = {kind: make(False) for kind, make in made.items()}
        found: dict[str, Any] = {}
        runs: dict[str, Function] = {}
        for name in names:
            kind = kind_of(name)
            try:
                program = own[name].result() if name in own else compiled(name)
                errors = [error(name, program, given[kind]), error(name, program, made[kind](True))]
            except Exception as problem:  # noqa: BLE001  # a contender's failure is a result, with its reason
                found[name] = {"reason": f"{type(problem).__name__}: {problem}".splitlines()[0][:300]}
            else:
                found[name] = {} if None in errors else {"errors": errors}
                if _is_chosen_by_xla(name):
                    found[name]["f8 call"] = "matmul$f8" in str(program.as_text())
                runs[name] = functools.partial(program, *given[kind])
            print(json.dumps(found), flush=True)
        _add_times(flops, found, runs)
        signal.alarm(0)
    return found


def _is_chosen_by_xla(name: str) -> bool:
    """Whether XLA chooses kernels of a contender by timing them."""
    return "xla" in name or "cublas" in name


def _add_times(flops: float, found: dict[str, Any], runs: Mapping[str, Function]) -> None:
    """Add the times of contenders that run: of calls in a row, and of the kernels of single calls."""
    first = {name: [seconds_per_call(run, 3) for _ in range(2)] for name, run in runs.items()}
    numbers = {name: max(1, int(SLICE_S / seconds[-1])) for name, seconds in first.items()}
    warm: dict[str, list[float]] = {name: [] for name in runs}
    single: dict[str, list[float]] = {name: [] for name in runs}
    order = np.random.default_rng(0)
    for _ in range(SLICES):
        for name in map(str, order.permutation(list(runs))):
            warm[name].append(seconds_per_call(runs[name], numbers[name]))
    for _ in range(SINGLE_CALLS if jax.default_backend() == "gpu" else 0):
        for name in map(str, order.permutation(list(runs))):
            time.sleep(PAUSE_S)  # the card cools down
            kernels = compat.executables.cupti_seconds(runs[name])
            single[name] += [] if kernels is None else [kernels]
    for name in runs:
        for kind, samples in (("us", warm[name]), ("kernel_us", single[name])):
            if samples:
                us = 1e6 * float(np.median(samples))
                found[name][kind] = round(us, 1)
                if flops and not name.startswith(("quantize", "copy")):
                    found[name][f"{kind.removesuffix('us')}tflops"] = round(flops / us / 1e6)


def add_rates(found: dict[str, Any], size: Callable[[str], float]) -> None:
    """Add the rates at which contenders read and write memory, given the bytes that count."""
    for name, row in found.items():
        if "us" in row:
            row["gb_per_s"] = round(size(name) / row.get("kernel_us", row["us"]) / 1e3)


def table(found: dict[str, Any], title: Callable[[str], str] = str) -> str:
    """Return a Markdown table, a line per shape and contender; `title` names a shape."""
    heads = {
        "us": "us",
        "tflops": "TFLOP/s",
        "kernel_us": "kernels us",
        "kernel_tflops": "TFLOP/s",
        "gb_per_s": "GB/s",
        "errors": "errors: mean zero, positive",
        "reason": "reason",
    }
    shapes = {key: rows for key, rows in found.items() if key != "environment"}
    contenders = [row for rows in shapes.values() for row in rows["contenders"].values()]
    fields = [field for field in heads if any(field in row for row in contenders)]
    lines = [f"| | {' | '.join(heads[field] for field in fields)} |", "|---" * (len(fields) + 1) + "|"]
    for key, rows in shapes.items():
        for name, row in rows["contenders"].items():
            cells = [_cell(row.get(field, "")) for field in fields]
            lines.append(f"| {title(key)}, {name} | {' | '.join(cells)} |")
    lines += ["", *(f"- {title(key)}: {_ratios(rows)}" for key, rows in shapes.items())]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _ratios(rows: dict[str, Any]) -> str:
    """Return the ratios of a shape, and why its process failed, as text."""
    said = [f"{name} {value}" for name, value in rows["ratios"].items()]
    return "; ".join([*said, *([rows["reason"]] if "reason" in rows else [])])


def _measured_apart(module: str, shape: str, names: Sequence[str], seconds: float, ratios: Ratios) -> dict[str, Any]:
    """Return the result of measuring in a separate process, or the reason for having none."""
    arguments = ("--one", shape, "--contenders", *names)
    lines, reason = run_apart(f"benchmarks.{module}", *arguments, "--seconds", str(seconds), seconds=TURNS_S)
    rows: dict[str, Any] = json.loads(lines[-1]) if lines and lines[-1].endswith("}") else {}
    return {"contenders": rows, "ratios": ratios(rows)} | ({"reason": reason} if reason else {})


def run_shapes(
    module: str,
    doc: str | None,
    shapes: Mapping[str, Any],
    contenders: Mapping[str, Any],
    *,
    few: Mapping[str, Sequence[str]],
    seconds: float,
    measured: Callable[[Any, Sequence[str], float], dict[str, Any]],
    ratios: Ratios,
    argv: Sequence[str] | None,
    title: Callable[[str], str] = str,
) -> int:
    """Run a benchmark as a program: print its table, and write it with `--out`.

    Args:
        module: The benchmark's module, in this package.
        doc: Its documentation.
        shapes: Its shapes.
        contenders: Its contenders.
        few: The shapes that run by default, and the contenders of each.
        seconds: The default limit for measuring a shape.
        measured: Returns the figures of contenders for a shape, in this process, given that limit.
        ratios: Returns ratios of a shape's figures.
        argv: The program's arguments; `None`: those of the command line.
        title: Names a shape in the table.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=doc)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"write {module}_<device>.json and .md")
    parser.add_argument("--shapes", nargs="*", default=list(few), choices=list(shapes), metavar="SHAPE")
    parser.add_argument("--contenders", nargs="*", choices=list(contenders), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=seconds, help="limit for measuring a shape (%(default)s)")
    parser.add_argument("--one", choices=list(shapes), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measured(shapes[args.one], args.contenders, args.seconds)))
        return 0
    found: dict[str, Any] = {"environment": report.environment()}
    names = {shape: args.contenders or few.get(shape) or next(iter(few.values())) for shape in args.shapes}
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        jobs = {pool.submit(_measured_apart, module, key, own, args.seconds, ratios): key for key, own in names.items()}
        for job in concurrent.futures.as_completed(jobs):
            found[jobs[job]] = job.result()
            print(jobs[job], json.dumps(job.result()), file=sys.stderr, flush=True)
            found = {key: found[key] for key in ("environment", *names) if key in found}
            if args.out is not None:  # written after each process, in case a later one fails
                report.write(args.out, f"{module}_{report.platform_name()}", found, table(found, title))
    print(table(found, title))
    return 0
