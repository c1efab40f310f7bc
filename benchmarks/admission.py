# SPDX-License-Identifier: Apache-2.0
"""Does a search ever admit a fast wrong candidate? Many searches, each with a different error.

    python -m benchmarks.admission [--runs 1000] [--jobs N] [--output FILE]

Every search has a slow correct heuristic, a correct candidate that sums in another order, and a wrong one with a tenth
of the time. Times are made up, so only the check can reject the wrong candidate. Errors are typical of kernels: one
element, the last rows, a mask off by one, a scale, a tile in the wrong place, NaN, a result for other inputs, a
gradient.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import environment
from ejkernel.ops import Invocation, Kernel
from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.measure.sampling import Sampling
from ejkernel.ops.autotuner.tuner import Autotuner

ERRORS = ("element", "rows", "mask", "scale", "tile", "nan", "stale", "gradient")
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """A configuration: the number of parts of the sum, and the error to make."""

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


def _element(out: jax.Array, at: tuple[int, int]) -> jax.Array:
    size = jnp.sqrt(jnp.mean(out.astype(jnp.float32) ** 2))
    return out.at[at].add((2 * size).astype(out.dtype))


_SPOIL: dict[str, Callable[[jax.Array, tuple[int, int]], jax.Array]] = {
    "element": _element,
    "rows": lambda out, at: out.at[-1:].set(0),
    "mask": lambda out, at: out.at[:, at[1]].set(out[:, at[1] - 1]),
    "scale": lambda out, at: out * jnp.asarray(1.05, out.dtype),
    "tile": lambda out, at: jnp.roll(out, 1, 0),
    "nan": lambda out, at: out.at[at].set(jnp.nan),
}


class Product(Kernel[Way, jax.Array]):
    """`x @ w`, with a planted error."""

    def __init__(self, run: Run) -> None:
        super().__init__("product")
        self.parameters = run
        rng = np.random.default_rng(run.seed)
        self.at = int(rng.integers(run.rows)), int(rng.integers(run.depth))
        x, w = ((run.rows, run.depth), run.dtype), ((run.depth, run.depth), run.dtype)
        self.inv = Invocation(kernel=self, args=tuple(jax.ShapeDtypeStruct(*like) for like in (x, w)))
        self.first = self.example_inputs(self.inv, np.random.default_rng(run.seed))[0][0]

    def run(self, x: jax.Array, w: jax.Array, *, cfg: Way) -> jax.Array:
        """Return the product, summed in parts in float32."""
        pieces = zip(jnp.split(x, cfg.parts, 1), jnp.split(w, cfg.parts, 0), strict=True)
        out = jnp.asarray(sum(jnp.matmul(a, b, preferred_element_type=jnp.float32) for a, b in pieces)).astype(x.dtype)
        if cfg.error == "stale":
            return jnp.where(jnp.all(x == self.first), out, 0 * out)
        return _SPOIL[cfg.error](out, self.at) if cfg.error in _SPOIL else out

    def custom_vjp(self, primals: Any, cfg: Way, kwargs: Any, cotangents: Any) -> tuple[jax.Array, jax.Array]:
        """The gradient, or twice that."""
        x, w = jax.vjp(lambda x, w: self.run(x, w, cfg=Way(1)), *primals)[1](cotangents[0])
        return x * (2 if cfg.error == "gradient" else 1), w

    def heuristic_cfg(self, inv: Invocation[Way, jax.Array]) -> Way:
        """The plain product."""
        return Way(1)

    def config_space(self, inv: Invocation[Way, jax.Array]) -> list[Way]:
        """Another order, and the error."""
        return [Way(4), Way(4, self.parameters.error)]


def made_up(functions: Any, *, sampling: Sampling, **_: Any) -> list[Measurement]:
    """Let the wrong candidate be fastest, and the heuristic slowest."""
    configs = [function.function.candidate.config for function in functions]
    while indices := sampling.next_round():
        for index in indices:
            sampling.note(index, 0.1 if configs[index].error else 2.0 / configs[index].parts)
    return [Measurement(samples=samples) for samples in sampling.samples]


def winner_of(run: Run) -> str:
    """Return the winner of a search: `right`, `wrong`, or the `heuristic`."""
    kernel = Product(run)
    with mock.patch.object(timing, "interleaved", made_up):
        config = Autotuner(seed=run.seed, width=1).tune(kernel.inv, kernel).config
    return "wrong" if config.error else {1: "heuristic", 4: "right"}[config.parts]


def main() -> None:
    """Count the winners of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    runs = runs_of(options.runs)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        winners = list(pool.map(winner_of, runs, chunksize=4))
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
