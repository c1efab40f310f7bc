# SPDX-License-Identifier: Apache-2.0
"""A tuning task as plain data, and the configurations that it tries: those of one call, or those that several share."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from ejkernel.ops.autotuner.bench.oracle import Limits
from ejkernel.ops.autotuner.search.strategies import Record
from ejkernel.ops.autotuner.trials.candidates import LISTED, Program, distinct, heuristic_of, is_in
from ejkernel.ops.autotuner.trials.outcome import Outcome
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core.examples import GivenInputs
from ejkernel.ops.core.hooks import asked, check_candidates
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, candidates_of, kernel_of, overrides
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.formatting import arguments, compact, counted

_LOOKED_AT: Final = 256  # configurations tried to find the first that all calls can share


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedCall:
    """One of the calls that share a configuration.

    Attributes:
        inv: The call.
        weight: Weight of its time in the geometric mean.
        inputs: Inputs to measure with; generated from the signature if `None`.
        programs: Configurations compiled before, with their programs for this call.
        reference: The kernel's reference for this call, compiled before.
        partners: Configurations in force for the call's other direction (backward or forward).
    """

    inv: Invocation[Any, Any]
    weight: float = 1.0
    inputs: GivenInputs | None = None
    programs: tuple[tuple[Any, Program], ...] = ()
    reference: Program | None = None
    partners: tuple[Any, ...] = ()


def calls_in(sets: Iterable[Sequence[SharedCall]]) -> list[Invocation[Any, Any]]:
    """Return the calls of all sets."""
    return [call.inv for calls in sets for call in calls]


def shares_of(calls: Sequence[SharedCall]) -> dict[str, float]:
    """Return the weight of each call, by call key; the weights add up to 1."""
    total = sum(call.weight for call in calls)
    return {call.inv.call_key: call.weight / total for call in calls}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningTask(SharedCall):
    """The description of a search for one call, or for several; can be sent to a worker process.

    Attributes:
        others: Further calls of the same kernel that share the configuration.
        candidates: Configurations to measure beside the heuristic; the kernel's space if `None`.
        policy: Only `validate`, `budget_s`, `cold_cache`, `compile_processes` and `max_candidates` apply.
        records: Measurements from other calls and devices, the nearest first.
        rejected: Outcomes of candidates that need no measurement.
        known: Outcomes of an earlier attempt that lost its worker, or of an earlier search that ended early.
        spent: Seconds used by earlier attempts.
        suspects: Configurations of which one ended an earlier attempt; they are compiled one at a time.
        rounds, warmup, seed, width, limits: See `Autotuner`.
    """

    others: tuple[SharedCall, ...] = ()
    candidates: Collection[Any] | None = None
    policy: AutotunePolicy = dataclasses.field(default_factory=AutotunePolicy)
    records: tuple[Record, ...] = ()
    rejected: tuple[Outcome, ...] = ()
    known: tuple[Outcome, ...] = ()
    spent: float = 0.0
    suspects: tuple[Any, ...] = ()
    rounds: int = 15
    warmup: int = 2
    seed: int = 0
    width: int | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)

    @property
    def kernel(self) -> Kernel[Any, Any]:
        """The kernel of all calls."""
        return kernel_of(self.inv)

    @property
    def shared(self) -> tuple[SharedCall, ...]:
        """All calls that the configuration is for."""
        return (self, *self.others)

    @property
    def calls(self) -> tuple[Invocation[Any, Any], ...]:
        """The invocations of these calls."""
        return tuple(call.inv for call in self.shared)


class Configurations:
    """The configurations of a search.

    Several calls share one search. Their lists are united. If one call has a space too large to list, the search
    samples that space. A configuration must run for every call: the kernel's `why_not` decides, or without it each
    call's own space.

    Args:
        task: The task.

    Attributes:
        first: The configurations to measure first: the heuristics, with the baseline in front.
        others: The other configurations.

    Raises:
        TuningError: The search has no configuration, or none that all calls can share.
    """

    def __init__(self, task: TuningTask) -> None:
        self._task = task
        self._heuristics = [heuristic_of(inv, task.kernel) for inv in task.calls]
        self._spaces: list[Collection[Any]] = []
        if task.candidates is None:
            self._spaces = [candidates_of(task.kernel, inv) for inv in task.calls]
        self.others: Collection[Any] = _united(self._spaces)
        if task.candidates is not None:
            self.others = check_candidates(task.candidates, f"{task.inv.op_id}: candidates")
        self.first: list[Any] = distinct(itertools.chain.from_iterable(self._heuristics))
        if task.others:
            self.first = distinct([self.baseline, *self.first])

    @property
    def baseline(self) -> Any:
        """The configuration that all others are compared with: the first heuristic, or the first of `others`."""
        some = itertools.islice(self.others, _LOOKED_AT if self._task.others else 1)
        looked_at = distinct([*self.first, *some]) if self._task.others else [*self.first, *some]
        for config in looked_at:
            if not self.why_refused(config):
                return config
        op_id, calls = self._task.inv.op_id, len(self._task.calls)
        if not looked_at:
            raise TuningError(
                f"{op_id}: there is nothing to measure; config_space(inv) returned no configuration. Check its "
                "conditions for this call, or give the kernel a heuristic_cfg."
            )
        raise TuningError(
            f"{op_id}: none of {counted(len(looked_at), 'configuration')} runs for all of {calls} calls; the first, "
            f"{compact(looked_at[0])}, {self.why_refused(looked_at[0]).rstrip('.')}; tune fewer calls together, or "
            "each alone."
        )

    def why_refused(self, config: object) -> str:
        """Return why several calls cannot share a configuration; empty if they can."""
        if not self._task.others:
            return ""
        reasons = (self._why_not(number, inv, config) for number, inv in enumerate(self._task.calls))
        return next(filter(None, reasons), "")

    def _why_not(self, number: int, inv: Invocation[Any, Any], config: Any) -> str:
        kernel = self._task.kernel
        reason = asked(f"{kernel.op_id}: why_not", kernel.why_not, inv, config)
        if reason:
            return f"does not run for {arguments(inv.description)}: {reason}"
        if not self._spaces or overrides(kernel, "why_not"):
            return ""
        if is_in(self._spaces[number], config) or is_in(self._heuristics[number], config):
            return ""
        return f"is not in config_space of {arguments(inv.description)}"


def _united(spaces: Sequence[Collection[Any]]) -> Collection[Any]:
    if len(spaces) == 1:
        return spaces[0]
    for space in spaces:
        if isinstance(space, ConfigSpace) and not space.has_at_most(LISTED):
            return space
    return distinct(itertools.chain.from_iterable(spaces))
