# SPDX-License-Identifier: Apache-2.0
"""Whether a fast wrong candidate is ever admitted: many searches, each with an error of another kind.

    python -m benchmarks.admission [--runs 1000] [--jobs N] [--output FILE]

Every search has a slow right heuristic, a right candidate that sums in another order, and a wrong one that is said to
take a tenth of the time: times are made up, so that nothing but the check stands between it and the user. Errors are
of the kinds that kernels have: one element, the last rows, a mask off by one, a scale, a tile in the wrong place, NaN,
a result that was right for other inputs, a gradient.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
from collections import Counter
from pathlib import Path
from typing import Any

ERRORS = ("element", "rows", "mask", "scale", "tile", "nan", "stale", "gradient")
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """A configuration: how the sum is split, and what goes wrong."""

    parts: int
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One search's parameters."""

    seed: int
    error: str
    dtype: str
    rows: int
    depth: int


def runs_of(count: int) -> list[Run]:
    """Return `count` different searches."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [
        Run(
            seed=int(rng.integers(2**31)),
            error=ERRORS[index % len(ERRORS)],
            dtype=str(rng.choice(DTYPES)),
            rows=int(rng.integers(3, 200)),
            depth=int(2 ** rng.integers(4, 9)),
        )
        for index in range(count)
    ]


def winner_of(run: Run) -> str:
    """Return what a search names: `right`, `wrong`, or the `heuristic`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from ejkernel.ops import Invocation, Kernel
    from ejkernel.ops.execution import bench
    from ejkernel.ops.execution.measuring import Measurement
    from ejkernel.ops.execution.tuning import Autotuner

    seconds = {Way(1): 1.0, Way(4): 0.5, Way(4, run.error): 0.1}
    rng = np.random.default_rng(run.seed)
    row, column = int(rng.integers(run.rows)), int(rng.integers(run.depth))

    def spoiled(x: Any, out: Any) -> Any:
        if run.error == "element":
            return out.at[row, column].add(2 * jnp.sqrt(jnp.mean(out.astype(jnp.float32) ** 2)).astype(out.dtype))
        if run.error == "rows":
            return out.at[-1:].set(0)
        if run.error == "mask":
            return out.at[:, column].set(out[:, column - 1])
        if run.error == "scale":
            return out * jnp.asarray(1.05, out.dtype)
        if run.error == "tile":
            return jnp.roll(out, 1, 0)
        if run.error == "nan":
            return out.at[row, column].set(jnp.nan)
        return jnp.where(jnp.all(x == x0), out, 0 * out) if run.error == "stale" else out

    class Product(Kernel[Way, jax.Array]):
        def run(self, x: Any, w: Any, *, cfg: Way) -> Any:
            pieces = zip(jnp.split(x, cfg.parts, 1), jnp.split(w, cfg.parts, 0), strict=True)
            out = sum(jnp.matmul(a, b, preferred_element_type=jnp.float32) for a, b in pieces)
            out = jnp.asarray(out).astype(x.dtype)
            return spoiled(x, out) if cfg.error else out

        def custom_vjp(self, primals: Any, cfg: Way, kwargs: Any, cotangents: Any) -> Any:
            gradients = jax.vjp(lambda x, w: self.run(x, w, cfg=Way(1)), *primals)[1](cotangents[0])
            return (gradients[0] * (2 if cfg.error == "gradient" else 1), gradients[1])

        def heuristic_cfg(self, inv: Any) -> Way:
            return Way(1)

        def config_space(self, inv: Any) -> list[Way]:
            return list(seconds)

    def made_up(functions: Any, *, race: Any, **_: Any) -> list[Measurement]:
        while indices := race.next_round():
            for index in indices:
                race.note(index, seconds[functions[index].function.candidate.config])
        return [Measurement(samples=samples) for samples in race.samples]

    bench.interleaved = made_up
    kernel = Product("product")
    inv = Invocation(
        kernel=kernel,
        args=(
            jax.ShapeDtypeStruct((run.rows, run.depth), run.dtype),
            jax.ShapeDtypeStruct((run.depth, run.depth), run.dtype),
        ),
    )
    x0 = kernel.example_inputs(inv, np.random.default_rng(run.seed))[0][0]
    config = Autotuner(seed=run.seed, width=1).tune(inv, kernel).config
    return "wrong" if config.error else {1: "heuristic", 4: "right"}[config.parts]


def main() -> None:
    """Count who is admitted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    runs = runs_of(options.runs)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        winners = list(pool.map(winner_of, runs, chunksize=4))
    from benchmarks.report import environment

    by_error = {error: Counter(w for r, w in zip(runs, winners, strict=True) if r.error == error) for error in ERRORS}
    found = {
        "environment": environment(),
        "runs": len(runs),
        "winners": Counter(winners),
        "by_error": by_error,
        "wrong": [dataclasses.asdict(r) for r, w in zip(runs, winners, strict=True) if w == "wrong"],
    }
    print(json.dumps(found, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
