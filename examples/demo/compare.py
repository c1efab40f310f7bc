# SPDX-License-Identifier: Apache-2.0
"""Train several builds of one program side by side: JAX alone, ejkernel untuned, and ejkernel tuned.

`ejkernel bench` compares any program in the same way; see `ejkernel.cli.rounds`. Here each build trains its own state,
so that their losses can be compared, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from train import CUDNN, EJKERNEL, PLAIN, Model, Operations, batch_of, default_model, memory_limit, training_step

from ejkernel.cli.rounds import FEWEST, compared, run_rounds
from ejkernel.ops import ConfigSelectorChain, Executor, PersistentCache, labels_to_configs, set_default_executor
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.autotuner.trials.status import SearchProgress

UNTUNED, TUNED = "untuned", "tuned"


@dataclasses.dataclass(kw_only=True)
class Build:
    """One build of the program.

    Attributes:
        name: Name in the table.
        compiled: The step; `None` if it does not run here.
        missing: Reason for not running here.
        state: Argument and result of the step.
        temporary_bytes: Device memory that a step needs beside its arguments and results.
        needed_bytes: Device memory that a step needs in all.
        configurations: The configuration of each call, by its label.
        saved: How many of them come from the folder of configurations.
        seconds: Time of each step.
        losses: Loss of each step.
    """

    name: str
    compiled: Callable[..., Any] | None = None
    missing: str = ""
    state: Any = None
    temporary_bytes: int = 0
    needed_bytes: int = 0
    configurations: dict[str, str] = dataclasses.field(default_factory=dict)
    saved: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)

    def train(self, batch: Any) -> None:
        """Run one step; record its time and loss."""
        assert self.compiled is not None
        start = time.perf_counter()
        self.state, loss = jax.block_until_ready(self.compiled(self.state, batch))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))

    def drop(self, why: str) -> None:
        """Leave the build out of the comparison."""
        self.missing, self.compiled, self.state = why, None, None


def say(text: str) -> None:
    """Print progress."""
    print(f"  {text}", file=sys.stderr, flush=True)


def build(
    name: str, operations: Operations, model: Model, cache: Path | None = None, untuned: Build | None = None
) -> Build:
    """Compile the training step, with the configurations saved in the folder `cache` if given.

    If these are the configurations of `untuned`, the result has its program.
    """
    persistent = None if cache is None else PersistentCache(cache)
    chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(persistent=persistent)
    set_default_executor(Executor(chain))
    function, (state, batch) = training_step(operations, model)
    lowered = function.lower(state, batch)
    configurations = {label: repr(config) for label, config in labels_to_configs(lowered, chain)}
    saved = [config for _, config in labels_to_configs(lowered, ConfigSelectorChain(persistent=persistent))]
    known = sum(config is not None for config in saved)
    if untuned is not None and configurations == untuned.configurations:
        say(f"{name}: the same program as {untuned.name}, because tuning found no faster configuration")
        return dataclasses.replace(untuned, name=name, state=state, saved=known, seconds=[], losses=[])
    say(f"compiling: {name}")
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory is not None  # only backends outside JAX's own return None
    return Build(
        name=name,
        compiled=compiled,
        state=state,
        temporary_bytes=memory.temp_size_in_bytes,
        needed_bytes=memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes,
        configurations=configurations,
        saved=known,
    )


def baseline(name: str, operations: Operations, model: Model, deadline: float) -> Build:
    """Compile a build of JAX alone; one that cannot be compiled here in time says why."""
    if time.monotonic() > deadline:
        return Build(name=name, missing="not compared: no time left to compile it")
    try:
        return build(name, operations, model)
    except Exception as error:  # noqa: BLE001 - JAX raises many types for a call that cuDNN does not support
        return Build(name=name, missing=f"not available: {(str(error).splitlines() or [type(error).__name__])[0]}")


def drop_too_large(builds: Sequence[Build], limit: int | None) -> None:
    """Drop the builds that do not fit: step and the state of all other builds need more than `limit` bytes."""
    states = {each.name: sum(leaf.nbytes for leaf in jax.tree.leaves(each.state)) for each in builds}
    for each in builds:
        needed = each.needed_bytes + sum(states.values()) - states[each.name]
        if limit is not None and each.compiled is not None and needed > limit:
            each.drop(f"does not fit: a step needs {each.needed_bytes / 2**30:.1f} of {limit / 2**30:.1f} GiB")


def run(builds: Sequence[Build], model: Model, rounds: int, deadline: float) -> None:
    """Train all builds for so many rounds after the warm-up; for fewer after the deadline."""
    steps = [each.train for each in builds]
    run_rounds(steps, rounds, deadline=deadline, inputs=lambda n: jax.block_until_ready(batch_of(model, n)), say=say)


def summary(builds: Sequence[Build], model: Model) -> dict[str, Any]:
    """Return the results as data."""
    by_name = {each.name: each for each in builds}
    running = {each.name: each for each in builds if each.compiled is not None}
    tuned, untuned = by_name[TUNED], by_name[UNTUNED]
    found = compared({name: each.seconds for name, each in running.items()}, TUNED)
    return {
        "device": jax.devices()[0].device_kind,
        "rounds": found.rounds,
        "tokens": model.tokens,
        "shape": f"{model.layers} layers, {model.batch} x {model.seq:,} tokens, vocabulary {model.vocabulary:,}",
        "missing": {each.name: each.missing for each in builds if each.compiled is None},
        "seconds": found.seconds,
        "middle half of the tuned steps": found.middle[TUNED],
        "over tuned": found.over,
        "temporary_bytes": {name: each.temporary_bytes for name, each in running.items()},
        "losses": {name: each.losses for name, each in running.items()},
        "configurations": tuned.configurations,
        "saved": tuned.saved,
        "changed": tuned.configurations != untuned.configurations,
    }


def compare(cache: Path, rounds: int, model: Model, seconds: float = math.inf) -> dict[str, Any]:
    """Return the results of so many rounds after the warm-up, as data.

    Args:
        cache: Folder of configurations for the tuned build.
        rounds: Timed steps of each build.
        model: Sizes.
        seconds: Time after which the last round begins, compilation included. Plain JAX is compared in any case.
    """
    deadline = time.monotonic() + seconds
    untuned = build(UNTUNED, EJKERNEL, model)
    own = [untuned, build(TUNED, EJKERNEL, model, cache, untuned)]
    builds = [baseline("plain JAX", PLAIN, model, math.inf)]
    if jax.default_backend() == "gpu" and model.cap is None:
        builds.append(baseline("JAX with cuDNN", CUDNN, model, deadline))
    builds += own
    if own[0].configurations == own[1].configurations:
        own[0].drop("the same program as tuned")
    drop_too_large(builds, memory_limit())
    run([each for each in builds if each.compiled is not None], model, rounds, deadline)
    return summary(builds, model) | {"unfinished": unfinished_searches(cache)}


def unfinished_searches(cache: Path) -> int:
    """Return the number of calls whose search did not finish, of those that the folder has."""
    store = PersistentCache(cache)
    known = [SearchProgress.stored_in(entry.measured) for _, entry in store.entries()]
    known += [search.progress for search in MeasurementStore(store).without_entry()]
    return sum(progress is not None and not progress.state.is_finished for progress in known)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path, help="folder of configurations for the tuned build")
    parser.add_argument("--rounds", type=int, default=21, help="timed steps of each build (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time after which the last round begins")
    args = parser.parse_args(argv)
    if args.rounds < FEWEST:
        parser.error(f"--rounds must be at least {FEWEST} for an interval, got {args.rounds}")
    print(json.dumps(compare(args.cache, args.rounds, default_model(), args.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
