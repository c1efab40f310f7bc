# SPDX-License-Identifier: Apache-2.0
"""Compiled candidates timed in turns, on the inputs that they were checked on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from ejkernel.ops.autotuner.bench.checking import check_device
from ejkernel.ops.autotuner.bench.oracle import Oracle
from ejkernel.ops.autotuner.measure.measurement import Runner, interleaved, sets_for_cold
from ejkernel.ops.autotuner.measure.memory import device_bytes, num_bytes
from ejkernel.ops.autotuner.measure.race import Race
from ejkernel.ops.autotuner.process.watch import Watch
from ejkernel.ops.autotuner.trials.candidates import Candidate
from ejkernel.ops.autotuner.trials.status import Status

_MOST_SETS: Final = 512  # of inputs for cold caches; inputs so small that they need more are measured warm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times candidates.

    Attributes:
        oracle: The call, with its inputs.
        warmup: Calls of each candidate before its first sample.
        cold_cache: Whether caches are cold where that can be had.
        stop: Whether to end as soon as possible: what was sampled by then decides.
    """

    oracle: Oracle
    warmup: int = 0
    cold_cache: bool = False
    stop: Callable[[], bool] = lambda: False

    def race(self, runners: Sequence[Candidate], race: Race) -> list[Candidate]:
        """Measure compiled candidates in turns, and return them, the best first; one that fails leaves the race.

        Raises:
            DeviceLostError: the device no longer works in this process.
        """
        oracle = self.oracle
        oracle.watch.begin("measuring", [runner.config for runner in runners], oracle.limits.idle)
        sets = self.argument_sets()
        functions = [
            Runner(_Run(runner, runner.compiled, index, oracle.watch), sets) for index, runner in enumerate(runners)
        ]
        failed: list[int] = []

        def left(index: int, error: BaseException) -> None:
            failed.append(index)
            runners[index].fail(Status.FAILED, error)
            check_device(oracle, runners[index])

        measurements = interleaved(functions, race=race, warmup=self.warmup, stop=self.stop, on_error=left)
        for index, measurement in enumerate(measurements):
            if index not in failed and measurement.samples:
                # Which the runner does not know: it was compiled long before.
                seconds = runners[index].compile_seconds
                runners[index].measurement = dataclasses.replace(measurement, compile_seconds=seconds)
                runners[index].status = Status.MEASURED
        return [runners[index] for index in race.ranking()]

    def argument_sets(self) -> list[list[Any]]:
        """Return the inputs and, for cold caches, as many copies as the caches cannot hold, if the device has room."""
        arrays = self.oracle.arrays
        size = sum(map(num_bytes, arrays))
        count = sets_for_cold(size) if self.cold_cache else 1
        room = device_bytes()
        # Candidates need room for their results, beside the copies.
        if count > _MOST_SETS or (room is not None and count * size > room / 2):
            count = 1
        copies = [[jnp.copy(array) for array in arrays] for _ in range(count - 1)]
        return [arrays, *jax.block_until_ready(copies)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """A candidate's program, called under watch."""

    candidate: Candidate
    compiled: Any
    index: int
    watch: Watch

    def __call__(self, *arrays: jax.Array) -> Any:
        self.watch.running(self.index)
        return self.compiled(*arrays)

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()
