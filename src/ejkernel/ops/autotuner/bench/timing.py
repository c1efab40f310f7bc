# SPDX-License-Identifier: Apache-2.0
"""Compiled candidates timed in turns, on the inputs that they were checked on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from ejkernel.ops.autotuner.bench.checking import check_device
from ejkernel.ops.autotuner.bench.oracle import Oracle, Workload
from ejkernel.ops.autotuner.measure.measurement import OnEach, Runner, interleaved, sets_for_cold
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

    def race(
        self, runners: Sequence[Candidate], race: Race, *, stop: Callable[[], bool] | None = None
    ) -> list[Candidate]:
        """Measure compiled candidates in turns, and return those that have samples, the best first.

        One that fails leaves the race.

        Args:
            runners: The candidates.
            race: Who is sampled how often.
            stop: In place of the usual one.

        Raises:
            DeviceLostError: the device no longer works in this process.
        """
        oracle = self.oracle
        oracle.watch.begin("measuring", [runner.config for runner in runners], oracle.limits.idle)
        workloads, sets = oracle.workloads, self.argument_sets()
        functions = [
            _measured([self._runner(runner, index, *one) for one in zip(workloads, sets, strict=True)])
            for index, runner in enumerate(runners)
        ]
        failed: list[int] = []

        def left(index: int, error: BaseException) -> None:
            failed.append(index)
            runners[index].fail(Status.FAILED, error)
            check_device(oracle, runners[index])

        with oracle.settings.during(*(repr(runner.config) for runner in runners)):
            measurements = interleaved(functions, race=race, warmup=self.warmup, stop=stop or self.stop, on_error=left)
        for index, measurement in enumerate(measurements):
            if index not in failed and measurement.samples:
                # Which the runner does not know: it was compiled long before.
                seconds = runners[index].compile_seconds
                runners[index].measurement = dataclasses.replace(measurement, compile_seconds=seconds)
                runners[index].status, runners[index].is_recalled = Status.MEASURED, False
        return [runners[index] for index in race.ranking()]

    def _runner(self, runner: Candidate, index: int, workload: Workload, sets: Sequence[Sequence[Any]]) -> Runner:
        assert runner.compiled is not None  # who has no program is in no race
        run = _Run(runner, runner.compiled[workload.number], index, self.oracle.watch)
        return Runner(run, sets, case=workload.case)

    def argument_sets(self) -> list[list[list[Any]]]:
        """Return, of each workload, its inputs and, for cold caches, as many copies as the caches cannot hold.

        There are none where the device has no room for them. Arrays that workloads share have copies that these share.
        """
        workloads = self.oracle.workloads
        sizes = [sum(map(num_bytes, workload.arrays)) for workload in workloads]
        counts = [sets_for_cold(size) if self.cold_cache else 1 for size in sizes]
        room = device_bytes()
        needed = sum(count * size for count, size in zip(counts, sizes, strict=True))
        # Candidates need room for their results, beside the copies.
        if max(counts) > _MOST_SETS or (room is not None and needed > room / 2):
            counts = [1] * len(counts)
        made: dict[tuple[int, int], Any] = {}

        def copy(array: Any, number: int) -> Any:
            if (id(array), number) not in made:
                made[id(array), number] = jnp.copy(array)
            return made[id(array), number]

        sets = [
            [w.arrays, *([copy(array, number) for array in w.arrays] for number in range(1, count))]
            for w, count in zip(workloads, counts, strict=True)
        ]
        jax.block_until_ready(sets)
        return sets


def _measured(runners: Sequence[Runner]) -> Runner | OnEach:
    return runners[0] if len(runners) == 1 else OnEach(tuple(runners))


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
