# SPDX-License-Identifier: Apache-2.0
"""`Autotuner`: measures candidates and returns the winner, or keeps the heuristic."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from ejkernel.ops.autotuner.bench.oracle import Limits
from ejkernel.ops.autotuner.measure.correctness import NOT_FINITE
from ejkernel.ops.autotuner.process.threads import on_device_of
from ejkernel.ops.autotuner.process.watch import Cancellation
from ejkernel.ops.autotuner.search.strategies import Record
from ejkernel.ops.autotuner.tasks.in_process import tune_here
from ejkernel.ops.autotuner.tasks.task import SharedCall, TuningTask
from ejkernel.ops.autotuner.trials.events import Counter, SearchFinished, emit, on_event
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.status import FAULTY, Status
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.core.context import numerics
from ejkernel.ops.core.examples import GivenInputs, why_not_finite
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import GradientWarning, TuningError, TuningWarning
from ejkernel.ops.utils.formatting import arguments, compact
from ejkernel.ops.utils.messages.names import check_argument, is_count
from ejkernel.ops.utils.messages.warn import warn

if TYPE_CHECKING:
    from ejkernel.ops.autotuner.compile.bundles import BundledCall

logger = logging.getLogger(__name__)


class Autotuner:
    """Measures the candidates of a call on inputs generated from its signature, and returns the fastest correct one.

    Candidates are compiled ahead of time in parallel, checked against the kernel's reference, and timed in interleaved
    rounds. They run on a separate thread, outside the caller's traces. A failing or wrong candidate becomes an outcome
    with its reason and never ends the search. The heuristic stays unless a candidate beats it in the same rounds.

    Args:
        rounds: Samples of each candidate that is not dropped early.
        warmup: Calls of each candidate before its first sample.
        seed: Seed of the random inputs.
        width: Number of candidates compiled at a time; by default one per core.
        limits: Time limits for the steps of a search.
        clock: Source of seconds, for budgets.
    """

    def __init__(
        self,
        *,
        rounds: int = 15,
        warmup: int = 2,
        seed: int = 0,
        width: int | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_argument(is_count(rounds, 1), "rounds", "a positive int", rounds)
        check_argument(is_count(warmup, 0), "warmup", "an int >= 0", warmup)
        self.rounds = rounds
        self.warmup = warmup
        self.seed = seed
        self.width = width
        self.limits = limits or Limits()
        self._clock = clock

    def tune(
        self,
        inv: Invocation[Cfg, Out],
        kernel: Kernel[Cfg, Out],
        *,
        candidates: Collection[object] | None = None,
        policy: AutotunePolicy | None = None,
        records: Sequence[Record] = (),
        known: Sequence[Outcome] = (),
        rejected: Sequence[Outcome] = (),
        compiled: BundledCall | None = None,
        inputs: GivenInputs | None = None,
        weight: float = 1.0,
        others: Sequence[SharedCall] = (),
        partners: Sequence[object] = (),
        progress: Callable[[int, int], object] | None = None,
        conclude: Callable[[AutotuneData], AutotuneData] = lambda data: data,
    ) -> AutotuneData:
        """Search for the best configuration of `inv`, or of several calls that share one.

        Ctrl-C ends the search with the best result so far, and `interrupted` set; a second Ctrl-C raises.

        Args:
            inv: The call; it may be a backward or batched call.
            kernel: Its kernel.
            candidates: Configurations to measure beside the heuristic; by default the kernel's `config_space`. Lists
                are measured completely; a strategy samples larger `ConfigSpace`s.
            policy: Everything applies except `devices` and the choice of tiers.
            records: Measurements of the same operation from other calls or devices, the nearest first.
            known: Candidates measured by an earlier search of the call that ended early. Only the best of them are
                measured again.
            rejected: Candidates that need no measurement, with the reason.
            compiled: Candidates compiled before; they replace `candidates`.
            inputs: Inputs to measure with; generated from the signature if `None`.
            weight: Weight of the call's time in the geometric mean.
            others: Further calls of the kernel. The winner has the least weighted geometric mean of all calls' times.
            partners: Configurations in force for the call's other direction: of the backward for a forward call, of
                the forward for a backward call. The winner must give correct gradients with each.
            progress: Called with the number of candidates compiled and checked, and the total. Events give more
                detail (`on_event`).
            conclude: Saves the result and returns it, before warnings and events report it: either may raise.

        Raises:
            TuningError: No candidate could be measured, or the reference failed.
            KeyboardInterrupt: The user pressed Ctrl-C before the first measurement, or twice.
        """
        check_argument(isinstance(inv, Invocation), "inv", "an Invocation", inv)
        check_argument(isinstance(kernel, Kernel), "kernel", "a Kernel", kernel)
        inv = dataclasses.replace(inv.abstract(), kernel=kernel)
        task = TuningTask(
            inv=inv,
            candidates=candidates if compiled is None else compiled.configs,
            rejected=(*rejected, *(() if compiled is None else _rejected(compiled, alone=not others))),
            programs=() if compiled is None else compiled.programs,
            reference=None if compiled is None else compiled.reference,
            inputs=inputs,
            weight=weight,
            others=tuple(
                dataclasses.replace(o, inv=dataclasses.replace(o.inv.abstract(), kernel=kernel)) for o in others
            ),
            partners=tuple(partners),
            policy=policy or AutotunePolicy(),
            records=tuple(records),
            known=tuple(known),
            rounds=self.rounds,
            warmup=self.warmup,
            seed=self.seed,
            width=self.width,
            limits=copy.deepcopy(self.limits),  # adaptive limits must not carry over to other calls
        )
        with (
            contextlib.nullcontext()
            if progress is None
            else on_event(Counter(lambda _, done, total: progress(done, total), [inv.key]))
        ):
            logger.info("tuning %s %s", inv.op_id_v, arguments(inv.description))
            with process_session(task.policy):  # a Ctrl-C while processes end discards nothing
                data = conclude(self._carried_out(task))
            _report(data, inputs, candidates)
            emit(SearchFinished(inv.key, data))
        return data

    def _carried_out(self, task: TuningTask) -> AutotuneData:
        if task.policy.executor is not None:
            from ejkernel.ops.autotuner.fleet.dispatch import tune_elsewhere  # imports multiprocessing

            return tune_elsewhere(task)
        if task.policy.isolate:
            from ejkernel.ops.autotuner.tasks.isolated import tune_isolated  # imports multiprocessing

            return tune_isolated(task)
        return self._here(task)

    def _here(self, task: TuningTask) -> AutotuneData:
        cancellation = Cancellation()
        try:
            # The call may have been recorded under other settings of JAX than those in force here.
            with on_device_of(task.inv), numerics(task.inv.numerics):
                data = tune_here(task, cancellation=cancellation, clock=self._clock)
        except TuningError:
            if cancellation.is_requested:  # the reason why nothing was measured
                raise KeyboardInterrupt from None
            raise
        return dataclasses.replace(data, interrupted=cancellation.is_requested)


def _rejected(compiled: BundledCall, *, alone: bool) -> tuple[Outcome, ...]:
    """Return the outcomes that need no measurement; `same` holds only if the call is alone."""
    return tuple(outcome for outcome in compiled.rejected if alone or outcome.status != Status.SAME)


def process_session(policy: AutotunePolicy) -> contextlib.AbstractContextManager[None]:
    """Return a context in which all searches share the policy's worker processes."""
    if not policy.isolate and policy.executor is None and policy.compile_processes == 0:
        return contextlib.nullcontext()
    from ejkernel.ops.autotuner.process.worker import worker_session  # imports multiprocessing

    return worker_session()


_LISTED = 5  # rejected candidates in a warning


def _report(data: AutotuneData, inputs: GivenInputs | None, given: Collection[object] | None) -> None:
    """Warn of rejected candidates and wrong gradients; `given` are the candidates that the user passed."""
    others = [outcome for outcome in data.outcomes[1:] if outcome.status != Status.SAME]
    rejected = [outcome for outcome in others if outcome.status in FAULTY]
    are_all = bool(others) and len(rejected) == len(others)
    if are_all or (rejected and isinstance(given, Sequence)):
        shown = rejected[: 1 if given is None else _LISTED]
        reasons = [f"{compact(each.config)}, {each.status}: {each.reason}" for each in shown]
        text = f"{data.inv.op_id}: {_of_all(len(rejected), len(others), len(shown))}{'; '.join(reasons)}"
        if given is not None and len(rejected) > len(shown):
            text += f"; and {len(rejected) - len(shown)} more, which the result of autotune_kernel lists"
        if all(NOT_FINITE in outcome.reason for outcome in rejected) and data.inv.kernel is not None:
            text += f"; {why_not_finite(data.inv.kernel, inputs)}"
        warn(text, TuningWarning)
    if isinstance(given, Sequence) and not given:
        warn(f"{data.inv.op_id}: the list of candidates is empty, so only the heuristic was measured.", TuningWarning)
    if data.rule_fault:
        warn(f"{data.inv.op_id}: {data.rule_fault}", GradientWarning)
    logger.info(
        "tuned %s in %.1f s: %d candidates, %s, %s",
        data.inv.op_id_v,
        data.seconds,
        len(data.outcomes),
        compact(data.config),
        data.in_words,
    )


def _of_all(rejected: int, others: int, shown: int) -> str:
    """Return the first words of a message that lists `shown` of the rejected candidates."""
    if others == 1:
        return "the only candidate beside the heuristic was rejected; it is "
    how_many = f"all {others}" if rejected == others else f"{rejected} of {others}"
    verb, end = "was" if rejected == 1 else "were", "; the first, " if shown == 1 < rejected else ": "
    return f"{how_many} candidates beside the heuristic {verb} rejected{end}"
