# SPDX-License-Identifier: Apache-2.0
"""A tuning task as plain data, with the earlier results that it starts from."""

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
from ejkernel.ops.core.kernel import Kernel, kernel_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedCall:
    """A further call that shares the configuration.

    Attributes:
        inv: The call, of the task's kernel.
        weight: Weight of its time in the geometric mean.
        inputs: Inputs to measure with; generated from the signature if `None`.
        programs: Configurations compiled before, with their programs for this call.
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
    """The description of a search; can be sent to a worker process.

    Attributes:
        inv: The call, abstract, with its kernel.
        candidates: Configurations to measure beside the heuristic; the kernel's space if `None`.
        policy: Only `validate`, `budget_s`, `cold_cache`, `compile_processes` and `max_candidates` apply.
        records: Measurements from other calls and devices, the nearest first.
        rejected: Outcomes of candidates that need no measurement.
        known: Outcomes of an earlier attempt that lost its worker, or of an earlier search that ended early.
        spent: Seconds used by earlier attempts.
        programs: Configurations compiled before, with their programs.
        reference: The kernel's reference for this call, compiled before.
        inputs: Inputs to measure with; generated from the signature if `None`.
        weight: Weight of the call's time in the geometric mean.
        others: Calls that share the configuration.
        partners: Configurations in force for the call's other direction (backward or forward).
        suspects: Configurations of which one ended an earlier attempt; they are compiled one at a time.
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
        return kernel_of(self.inv)

    @property
    def calls(self) -> tuple[Invocation[Any, Any], ...]:
        """All calls that the configuration is for."""
        return (self.inv, *(other.inv for other in self.others))
