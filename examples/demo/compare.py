# SPDX-License-Identifier: Apache-2.0
"""Train three builds of one program side by side: plain JAX, ejkernel as it guesses, ejkernel as it was tuned.

The builds take turns, a step each, so that whatever else the machine does hits all of them alike; what is reported is
the ratio within a turn, and how far it can be trusted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from train import EJKERNEL, PLAIN, Model, Operations, batch_of, default_model, training_step

from ejkernel.ops import ConfigSelectorChain, Executor, PersistentCache, labels_to_configs, set_default_executor

WARM_UP = 2  # the first executions fault in memory and fill caches


@dataclasses.dataclass(kw_only=True)
class Build:
    """One build of the program, as it trains."""

    compiled: Callable[..., Any]
    state: Any
    temporary_bytes: int
    configurations: dict[str, str]
    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)

    def train(self, batch: Any) -> None:
        """Take one step and note what it took."""
        start = time.perf_counter()
        self.state, loss = jax.block_until_ready(self.compiled(self.state, batch))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))


def build(operations: Operations, model: Model, cache: Path | None) -> Build:
    """Compile the training step, with the configurations that the folder `cache` has, if one is given."""
    persistent = None if cache is None else PersistentCache(cache)
    chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(persistent=persistent)
    set_default_executor(Executor(chain))
    function, (state, batch) = training_step(operations, model)
    lowered = function.lower(state, batch)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory is not None  # a backend of others may not know
    return Build(
        compiled=compiled,
        state=state,
        temporary_bytes=memory.temp_size_in_bytes,
        configurations={label: repr(config) for label, config in labels_to_configs(lowered, chain)},
    )


def ratio(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """Return the median of `slow / fast` over the turns, and the interval that holds the true one with 95 %.

    The interval is that of the sign test: nothing is assumed of how the times are spread.
    """
    ratios = sorted(a / b for a, b in zip(slow, fast, strict=True))
    n = len(ratios)
    outside = 0
    while 2 * sum(math.comb(n, k) for k in range(outside + 1)) <= 0.05 * 2**n:
        outside += 1
    return {"median": statistics.median(ratios), "low": ratios[max(outside - 1, 0)], "high": ratios[-max(outside, 1)]}


def compare(cache: Path, turns: int, model: Model) -> dict[str, Any]:
    """Return what was seen in so many turns after the warm-up, ready for JSON."""
    builds = {
        "plain JAX": build(PLAIN, model, None),
        "untuned": build(EJKERNEL, model, None),
        "tuned": build(EJKERNEL, model, cache),
    }
    for turn in range(WARM_UP + turns):
        batch = jax.block_until_ready(batch_of(model, turn))
        order = list(builds.values())
        for shift in range(len(order)):
            order[(turn + shift) % len(order)].train(batch)
    seconds = {name: each.seconds[WARM_UP:] for name, each in builds.items()}
    return {
        "device": jax.devices()[0].device_kind,
        "turns": turns,
        "tokens": model.tokens,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "temporary_bytes": {name: each.temporary_bytes for name, each in builds.items()},
        "losses": {name: each.losses for name, each in builds.items()},
        "tuned over plain JAX": ratio(seconds["plain JAX"], seconds["tuned"]),
        "tuned over untuned": ratio(seconds["untuned"], seconds["tuned"]),
        "configurations": builds["tuned"].configurations,
        "changed": builds["tuned"].configurations != builds["untuned"].configurations,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path, help="folder of configurations for the tuned build")
    parser.add_argument("--turns", type=int, default=21, help="timed steps of each build (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.turns < 6:
        parser.error(f"--turns must be at least 6 for an interval, got {args.turns}")
    print(json.dumps(compare(args.cache, args.turns, default_model())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
