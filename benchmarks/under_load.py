# SPDX-License-Identifier: Apache-2.0
"""How often a search picks the wrong one of two candidates while other processes keep the machine busy.

    python -m benchmarks.under_load --name after --output benchmarks/results

Two candidates are tuned over and over, as `autotune(num_warmup=3, num_iters=10)` does; one does 1.5 times the work. In
some runs the heuristic is the slow candidate and must be replaced, in others the fast one and must stay. In a third
kind of runs, two different programs do the same work, and the heuristic must stay. Both are compiled once, before the
load starts, since compiling would take most of the time. The script starts and ends the busy processes; they also end
by themselves after a while.

`contradictions` counts runs whose printed medians contradict the choice, by more than a tie; `undecided` counts runs
that report too little evidence.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import environment
from ejkernel.ops import AutotunePolicy, Invocation, Kernel
from ejkernel.ops.autotuner.tuner import Autotuner

BUSY = 14
MARGIN = 0.02  # smaller differences are ties
STEPS = {"short": 20, "middle": 200, "long": 1000, "parallel": 8}  # of the fast one: about 0.2, 1.5, 7 and 2 ms
RATIOS = {"slow": (1.5, 1.0), "fast": (1.0, 1.5), "equal": (1.0, 1.0)}  # work of the heuristic, and of the other


class Work(Kernel[int, jax.Array]):
    """The sine or, of a `parallel` kind, a product, computed as often as the configuration says."""

    def __init__(self, kind: str, heuristic: str) -> None:
        super().__init__(f"{kind}_{heuristic}")
        self.kind = kind
        self.steps = tuple(round(STEPS[kind] * ratio) for ratio in RATIOS[heuristic])

    def run(self, x: jax.Array, *, cfg: int) -> jax.Array:
        """Compute it; equal work of other configurations is another program all the same."""
        once: Callable[[jax.Array], jax.Array] = jnp.sin
        if self.kind == "parallel":
            once = lambda y: y @ x  # noqa: E731
        result: jax.Array = jax.lax.fori_loop(0, self.steps[cfg], lambda _, y: once(x + 0 * y), x)
        return result + 0 * (cfg + x[0, 0])

    def heuristic_cfg(self, inv: Invocation[int, jax.Array]) -> int:
        """Return the first."""
        return 0

    def config_space(self, inv: Invocation[int, jax.Array]) -> list[int]:
        """Return both."""
        return [0, 1]


@contextlib.contextmanager
def busy_processes(count: int, seconds: int) -> Iterator[None]:
    """Keep `count` processes busy inside the `with` block, for so many seconds at most."""
    loop = f"import signal\nsignal.alarm({seconds})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", loop]) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@dataclasses.dataclass
class Tally:
    """Results of the runs of one kind."""

    runs: int = 0
    wrong: int = 0
    undecided: int = 0
    contradictions: int = 0
    by_processor: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)

    def note(self, data: Any, seconds: float, right: int) -> None:
        """Note a search."""
        medians = [outcome.measurement.median for outcome in data.outcomes if outcome.measurement is not None]
        chosen = data.winner.measurement.median
        self.runs += 1
        self.wrong += data.config != right
        self.undecided += getattr(data, "undecided", False)
        self.contradictions += min(medians) < (1 - MARGIN) * chosen
        self.by_processor += data.winner.measurement.method == "processor"
        self.seconds.append(seconds)

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**dataclasses.asdict(self), "seconds": round(statistics.median(self.seconds), 3)}


@dataclasses.dataclass(frozen=True)
class Ready:
    """A compiled program, in the form that a search expects."""

    program: Any
    spilled: int | None = None

    def load(self) -> Any:
        """Return it."""
        return self.program


@dataclasses.dataclass(frozen=True)
class Call:
    """A call with its programs, as `Autotuner.tune` wants them."""

    inv: Invocation[int, jax.Array]
    programs: tuple[tuple[int, Ready], ...]
    configs: tuple[int, ...] = (0, 1)
    rejected: tuple[Any, ...] = ()
    reference: Any = None

    @classmethod
    def of(cls, kind: str, heuristic: str) -> Call:
        """Return a call of one kind, compiled."""
        kernel, size = Work(kind, heuristic), 256 if kind == "parallel" else 64
        x = jnp.asarray(np.random.default_rng(0).uniform(0, 0.01, (size, size)), jnp.float32)
        programs = []
        for config in (0, 1):
            compiled = jax.jit(lambda x, config=config: [kernel.run(x, cfg=config)]).lower(x).compile()
            programs.append((config, Ready(compiled)))
        return cls(Invocation(kernel=kernel, args=(x,)), tuple(programs))

    def tune(self, seed: int) -> tuple[Any, float]:
        """Return a search, and how long it took."""
        assert self.inv.kernel is not None
        start = time.perf_counter()
        tuner, policy = Autotuner(rounds=10, warmup=3, seed=seed), AutotunePolicy(validate=False)
        data = tuner.tune(self.inv, self.inv.kernel, policy=policy, compiled=self)  # type: ignore[arg-type]
        return data, time.perf_counter() - start


def measure(kinds: Sequence[str], runs: int, busy: int, seconds: float) -> dict[str, Any]:
    """Return the results of interleaved runs of each kind: at most `runs`, and as many as the time allows."""
    calls = {f"{kind}, heuristic {case}": (case, Call.of(kind, case), Tally()) for kind in kinds for case in RATIOS}
    end = time.perf_counter() + seconds
    with busy_processes(busy, round(seconds) + 120):
        for run in range(runs):
            for case, call, tally in calls.values():
                if time.perf_counter() < end:
                    tally.note(*call.tune(run), right=int(case == "slow"))
    return {name: tally.data() for name, (_, _, tally) in calls.items() if tally.runs}


def main(argv: Sequence[str] | None = None) -> int:
    """Print and keep the figures; 0 if at most one run in a hundred is wrong, 1 if more are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--runs", type=int, default=100, help="of each kind and case")
    parser.add_argument("--busy", type=int, default=BUSY, help="busy processes")
    parser.add_argument("--seconds", type=float, default=180.0, help="for all of it")
    parser.add_argument("--name", default="after", help="name of these figures")
    parser.add_argument("--output", type=Path, help="folder of under_load.json; adds to the file")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    found = measure(args.kinds, args.runs, args.busy, args.seconds)
    for name, row in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in row.items()))
    runs, wrong = (sum(row[key] for row in found.values()) for key in ("runs", "wrong"))
    print(f"{wrong} of {runs} wrong", file=sys.stderr)
    if args.output:
        file = args.output / "under_load.json"
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        kept[args.name] = {"environment": environment(), "busy": args.busy, "cases": found}
        file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0 if wrong <= 0.01 * runs else 1


if __name__ == "__main__":
    raise SystemExit(main())
