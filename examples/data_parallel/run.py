# SPDX-License-Identifier: Apache-2.0
"""Train a transformer over a mesh, with ejkernel's attention and with JAX's, interleaved.

    python examples/data_parallel/run.py --library equinox --data 2 --model 1

Examples are divided over `data`, heads and hidden units over `model`, without `shard_map` and without any code for
devices in the models. Needs `equinox`, or `flax` with `--library nnx`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from parts import Size, mesh_of, ours, plain, tokens

SIZES = {
    "small": Size(),
    "gpu": Size(layers=4, width=4096, heads=32, groups=8, vocabulary=32768, batch=4, length=4096, dtype=jnp.bfloat16),
}
ATTENTIONS = {"ejkernel": ours, "jax.nn": plain}


def train(library: str, size: Size, data: int, model: int, steps: int) -> dict[str, Any]:
    """Return the losses of every attention, and how long its steps took."""
    mesh = mesh_of(data, model)
    module = importlib.import_module(f"{library}_model")
    with jax.set_mesh(mesh):
        runs = {name: module.training(size, attention, mesh) for name, attention in ATTENTIONS.items()}
        losses: dict[str, list[float]] = {name: [] for name in runs}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        state = {name: parameters for name, (_, parameters) in runs.items()}
        for turn in range(steps + 1):
            batch = tokens(size, mesh, turn % 2)
            for name, (step, _) in runs.items():
                started = time.perf_counter()
                state[name], loss = step(state[name], batch)
                losses[name].append(float(loss))
                seconds[name].append(time.perf_counter() - started)
    ratios = [b / a for a, b in zip(seconds["ejkernel"][1:], seconds["jax.nn"][1:], strict=True)]
    return {
        "library": library,
        "mesh": {"data": data, "model": model},
        "losses": losses,
        "step_ms": {name: round(statistics.median(times[1:]) * 1e3, 2) for name, times in seconds.items()},
        "ratio": round(statistics.median(ratios), 3),
    }


def main() -> int:
    """Train, print the result, and return 1 if the losses disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=("equinox", "nnx"), default="equinox")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--model", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="keep the result here")
    args = parser.parse_args()
    result = train(args.library, SIZES[args.size], args.data, args.model, args.steps)
    times = ", ".join(f"{name} {value} ms" for name, value in result["step_ms"].items())
    print(f"{args.library} over {args.data} x {args.model} devices: {times} a step, {result['ratio']} times as fast")
    if args.json is not None:
        result["environment"] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    pairs = zip(*result["losses"].values(), strict=True)
    tolerance = 2e-3 if SIZES[args.size].dtype == jnp.float32 else 3e-2
    agree = all(abs(a - b) <= tolerance * abs(b) for a, b in pairs)
    print(
        f"losses {'agree' if agree else 'DISAGREE'}: {result['losses']['ejkernel'][0]:.4f} to "
        f"{result['losses']['ejkernel'][-1]:.4f}"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
