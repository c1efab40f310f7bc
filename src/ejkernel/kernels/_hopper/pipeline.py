# SPDX-License-Identifier: Apache-2.0
"""Pipelines: rings of shared-memory stages between one producer warpgroup and the consumer warpgroups.

The methods are those of CUTLASS's `PipelineTmaAsync`. Steps count from 0; step `i` uses stage `i % stages`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from .device import remainder
from .launch import CLUSTER, plgpu


class Pipeline(NamedTuple):
    """The barriers of a ring of pipeline stages: their types before `run_scoped`, references inside it.

    Attributes:
        full: One barrier per stage; the producer's copies arrive, consumers wait.
        empty: One barrier per stage; consumers arrive, the producer waits.
    """

    full: Any
    empty: Any

    @classmethod
    def types(cls, stages: int, *, consumers: int, copies: int = 1, cluster: int = 1) -> Pipeline:
        """Return the types of the barriers; each stage is filled by `copies` TMA copies, which arrive by themselves.

        In a cluster, a stage is empty when the consumers of all its blocks have released it.
        """
        full = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
        if cluster > 1:
            shared = {"collective_axes": (CLUSTER,), "num_arrivals": consumers, "num_barriers": stages}
            return cls(full, plgpu.ClusterBarrier(**shared))
        return cls(full, plgpu.Barrier(num_arrivals=consumers, num_barriers=stages))

    @property
    def stages(self) -> int:
        """The length of the ring."""
        return int(self.empty.shape[0])

    def stage(self, step: Any) -> Any:
        """Return the stage of a step."""
        return remainder(step, self.stages)

    def producer_acquire(self, step: Any) -> Any:
        """Wait until all consumers have released the stage of `step`, and return that stage."""
        stage = self.stage(step)
        self.producer_wait(step, stage)
        return stage

    def producer_wait(self, step: Any, stage: Any) -> None:
        """Wait until `stage` is empty; a stage is empty before its first use."""

        @pl.when(step >= self.stages)
        def _reused() -> None:
            plgpu.barrier_wait(self.empty.at[stage])

    def consumer_wait(self, stage: Any) -> None:
        """Wait until the copies into `stage` have arrived."""
        plgpu.barrier_wait(self.full.at[stage])

    def consumer_release(self, stage: Any) -> None:
        """Tell the producer that this warpgroup has finished with `stage`."""
        plgpu.barrier_arrive(self.empty.at[stage])


def producer_tail(steps: Any, *pipelines: Pipeline | None, unreleased: int = 0) -> None:
    """Wait until consumers have released the last stages of pipelines of one length.

    The producer calls it last: no barrier may keep an arrival without a wait.

    Args:
        steps: The number of steps of each pipeline.
        *pipelines: The pipelines; `None` is skipped.
        unreleased: How many steps, the last ones, consumers never release.
    """
    present = [pipeline for pipeline in pipelines if pipeline is not None]
    stages = present[0].stages

    @pl.loop(jnp.maximum(steps - stages, 0), steps - unreleased)
    def _wait(step: Any) -> None:
        for pipeline in present:
            plgpu.barrier_wait(pipeline.empty.at[remainder(step, stages)])


def unrolled_producer_tail(steps: Any, *pipelines: Pipeline | None) -> None:
    """Do the same without a loop, one pipeline after another.

    The register allocation of ptxas depends on it: with the loop some attention backwards spill up to 88 bytes more.
    """
    for pipeline in filter(None, pipelines):
        for stage in range(pipeline.stages):
            pl.when(stage < steps)(functools.partial(_wait_empty, pipeline, stage))


def _wait_empty(pipeline: Pipeline, stage: int) -> None:
    plgpu.barrier_wait(pipeline.empty.at[stage])
