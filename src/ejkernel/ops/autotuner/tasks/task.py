# SPDX-License-Identifier: Apache-2.0
"""A tuning task as data, and what it starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from ejkernel.ops.autotuner.bench.limits import Limits
from ejkernel.ops.autotuner.search.strategies import Record
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.autotuner.trials.programs import Program
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.core.examples import GivenInputs
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedCall:
    """A further call that a configuration is searched for.

    Attributes:
        inv: The call, of the task's kernel.
        weight: How much it counts beside the others.
        inputs: What to measure with, in place of what is made from the signature.
        programs: Configurations that were compiled for it before, with their programs.
        reference: The kernel's reference for this call, compiled before.
        partners: See `TuningTask`.
    """

    inv: Invocation[Any, Any]
    weight: float = 1.0
    inputs: GivenInputs | None = None
    programs: tuple[tuple[Any, Program], ...] = ()
    reference: Program | None = None
    partners: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningTask:
    """What to search for, and how; fit to be sent to a worker process.

    Attributes:
        inv: The call, abstract, with its kernel.
        candidates: What to measure beside the heuristic; the kernel's own if `None`.
        policy: `validate`, `budget_s`, `cold_cache`, `compile_processes` and `max_candidates` are heeded.
        records: What was measured elsewhere, the nearest first.
        rejected: Outcomes of candidates that need no measuring.
        known: Outcomes of an earlier attempt, which a worker process did not survive, or of a search that had to end.
        spent: Seconds that earlier attempts took.
        programs: Configurations that were compiled before, with their programs.
        reference: The kernel's reference for this call, compiled before.
        inputs: What to measure with, in place of what is made from the signature.
        weight: How much the call counts beside others.
        others: Calls that are to have the same configuration.
        partners: Configurations in force for the call's other direction: its backward's, or its forward's.
        suspects: Configurations of which one ended that process; they are compiled one at a time.
        rounds, warmup, seed, width, limits: See `Autotuner`.
    """

    inv: Invocation[Any, Any]
    candidates: Collection[Any] | None = None
    policy: AutotunePolicy = dataclasses.field(default_factory=AutotunePolicy)
    records: tuple[Record, ...] = ()
    rejected: tuple[Outcome, ...] = ()
    known: tuple[Outcome, ...] = ()
    spent: float = 0.0
    programs: tuple[tuple[Any, Program], ...] = ()
    reference: Program | None = None
    inputs: GivenInputs | None = None
    weight: float = 1.0
    others: tuple[SharedCall, ...] = ()
    partners: tuple[Any, ...] = ()
    suspects: tuple[Any, ...] = ()
    rounds: int = 15
    warmup: int = 2
    seed: int = 0
    width: int | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)

    @property
    def kernel(self) -> Kernel[Any, Any]:
        """The call's kernel."""
        assert self.inv.kernel is not None  # who makes a task has put it there
        return self.inv.kernel

    @property
    def calls(self) -> tuple[Invocation[Any, Any], ...]:
        """All calls that the configuration is for."""
        return (self.inv, *(other.inv for other in self.others))
