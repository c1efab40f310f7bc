# SPDX-License-Identifier: Apache-2.0
"""All measurements of grouped products and normalisations that need a GPU, one step after the other.

    python -m benchmarks.gpu_run --out found                  # all steps
    python -m benchmarks.gpu_run --out found tests norms      # some
    python -m benchmarks.gpu_run --out found --minutes 9      # steps that can begin within nine minutes

Each step is a separate process with a time limit, and prints to a file with its name. If a step fails or exceeds its
limit, the script reports it and begins the next. With `--bundles`, it also measures search spaces: the folder has one
folder for each space, made by `benchmarks.record compile`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

KERNELS = "tests/kernels"
ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        arguments: Arguments of the interpreter; `{out}` is the folder of results.
        minutes: Time limit.
        environment: Additional environment variables.
    """

    arguments: tuple[str, ...]
    minutes: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _layer(size: str) -> tuple[str, ...]:
    file = f"{{out}}/mixture_of_experts_{size}.json"
    return ("examples/mixture_of_experts/run.py", "--size", size, "--json", file)


# The most valuable first: the device may be gone before the list ends.
STEPS = {
    "tests": Step(
        (
            *("-m", "pytest", "-n4", "-q", "--require=gpu", f"{KERNELS}/grouped_matmul", f"{KERNELS}/row_norms"),
            *(f"{KERNELS}/test_conformance.py", "-k", "on_gpu or (mosaic_gpu or jax_mgpu) and (norm or grouped)"),
        ),
        6,
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    ),
    "layer mixtral": Step(_layer("mixtral"), 2),
    "layer qwen3-30b": Step(_layer("qwen3-30b"), 3),
    "norms short": Step(("-m", "benchmarks.norms", "--rows", "short", "--out", "{out}"), 6),
    "norms": Step(("-m", "benchmarks.norms", "--rows", "long", "--out", "{out}"), 4),
    "split experts": Step(("-m", "benchmarks.split_experts", "--out", "{out}"), 3),
    # From cuDNN 9.22 on. Our programs do not need the option: it is the best that XLA alone offers.
    "cudnn option": Step(
        (
            *("-m", "benchmarks.grouped_matmul", "--contenders", "ragged_dot", "--out", "{out}/cudnn_option"),
            *("--directions", "forward", "dgrad", "--shapes", "8 groups", "64 groups"),
        ),
        3,
        {"XLA_FLAGS": "--xla_gpu_experimental_use_ragged_dot_fusion=true"},
    ),
}


def record_steps(bundles: Path) -> dict[str, Step]:
    """Return a step for each compiled space; the folder has the name of its space."""
    return {
        f"record {folder.name}": Step(
            ("-m", "benchmarks.record", "measure", str(folder), folder.name, "{out}/recorded_spaces"), 9
        )
        for folder in sorted(bundles.iterdir())
    }


def run(name: str, step: Step, out: Path) -> str:
    """Run a step to its end, or to its limit, and return how it ended."""
    command = [sys.executable, *(argument.format(out=out) for argument in step.arguments)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **step.environment}
    started = time.monotonic()
    with (out / f"{name.replace(' ', '_')}.txt").open("w", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=60 * step.minutes, check=False
            )
        except subprocess.TimeoutExpired:
            return f"ended after {step.minutes:g} minutes"
    return f"{'ok' if done.returncode == 0 else f'status {done.returncode}'}, {time.monotonic() - started:.0f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps; 1 if one failed, was ended, or did not begin."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of: {', '.join(STEPS)}; all by default")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where logs and results go")
    parser.add_argument("--bundles", type=Path, metavar="DIR", help="compiled spaces to measure")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no step begins")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    steps = STEPS | (record_steps(args.bundles) if args.bundles is not None else {})
    unknown = sorted(set(args.steps) - set(steps))
    if unknown:
        parser.error(f"no step {', '.join(unknown)}; there are {', '.join(steps)}")
    until, failed = time.monotonic() + 60 * args.minutes, False
    for name in args.steps or steps:
        began = time.monotonic() < until
        ended = run(name, steps[name], args.out.resolve()) if began else "did not begin"
        failed |= not ended.startswith("ok")
        print(f"{name}: {ended}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
