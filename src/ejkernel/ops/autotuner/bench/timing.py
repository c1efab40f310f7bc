# SPDX-License-Identifier: Apache-2.0
"""Times compiled candidates in interleaved rounds, on the inputs that they were checked on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from ejkernel.ops.autotuner.bench.checking import check_device
from ejkernel.ops.autotuner.bench.oracle import Oracle
from ejkernel.ops.autotuner.measure.measurement import (
    COLD,
    WARM,
    Runner,
    device_bytes,
    interleaved,
    num_bytes,
    sets_for_cold,
)
from ejkernel.ops.autotuner.measure.sampling import Sampling
from ejkernel.ops.autotuner.process.watch import Watch
from ejkernel.ops.autotuner.trials.candidates import Candidate
from ejkernel.ops.autotuner.trials.status import Status

_MOST_SETS: Final = 512  # input sets for cold caches; smaller inputs would need more sets and are measured warm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times candidates.

    Attributes:
        oracle: The call, with its inputs.
        warmup: Calls of each candidate before its first sample.
        cold_cache: Whether to measure with cold caches, if possible.
        heard: Called with the sampling between two samples.
    """

    oracle: Oracle
    warmup: int = 0
    cold_cache: bool = False
    heard: Callable[[Sampling], None] = lambda sampling: None

    def measure(
        self,
        runners: Sequence[Candidate],
        sampling: Sampling,
        *,
        heuristic: Candidate | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Candidate]:
        """Measure compiled candidates in interleaved rounds; return those with samples, the best first.

        A candidate that fails takes no further part.

        Args:
            runners: The candidates.
            sampling: Decides which candidates are sampled in each round.
            heuristic: The candidate among them that the others are compared with.
            stop: Returns whether to end as soon as possible; the samples so far then decide.

        Raises:
            DeviceLostError: The device no longer works in this process.
        """
        oracle = self.oracle
        oracle.watch.begin("measuring", [runner.config for runner in runners], oracle.limits.idle)
        workloads, sets = oracle.workloads, self.argument_sets()
        cases = [workload.case for workload in workloads if workload.case is not None]
        functions = [
            [
                Runner(_Run(runner, runner.compiled[one.number], index, oracle.watch), own)
                for one, own in zip(workloads, sets, strict=True)
            ]
            for index, runner in enumerate(runners)
        ]
        failed: list[int] = []

        def left(index: int, error: BaseException) -> None:
            failed.append(index)
            runners[index].fail(Status.FAILED, error)
            check_device(oracle, runners[index])

        def must_stop() -> bool:
            self.heard(sampling)
            return stop()

        with oracle.settings.during(*(repr(runner.config) for runner in runners)):
            measurements = interleaved(
                functions, cases=cases, sampling=sampling, warmup=self.warmup, stop=must_stop, on_error=left
            )
        theirs = next((m.samples for m, own in zip(measurements, runners, strict=True) if own is heuristic), ())
        cache = COLD if all(len(own) > 1 for own in sets) else WARM
        for index, (runner, measurement) in enumerate(zip(runners, measurements, strict=True)):
            if index not in failed and measurement.samples:
                runner.measurement = dataclasses.replace(
                    measurement.beside(theirs),
                    cache=cache,
                    compile_seconds=runner.compile_seconds,
                    peak_bytes=runner.peak_bytes,
                    output_bytes=runner.output_bytes,
                )
                runner.beside, runner.status, runner.is_recalled = tuple(theirs), Status.MEASURED, False
        return [runners[index] for index in sampling.ranking()]

    def argument_sets(self) -> list[list[list[Any]]]:
        """Return the inputs of each workload and, for cold caches, enough copies to exceed the caches.

        If the device lacks memory, no copies are made. Workloads that share an array also share its copies.
        """
        workloads = self.oracle.workloads
        sizes = [sum(map(num_bytes, workload.arrays)) for workload in workloads]
        counts = [sets_for_cold(size) if self.cold_cache else 1 for size in sizes]
        room = device_bytes()
        needed = sum(count * size for count, size in zip(counts, sizes, strict=True))
        # Beside the copies, candidates need memory for their results.
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
