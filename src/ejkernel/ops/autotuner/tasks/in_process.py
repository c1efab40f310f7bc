# SPDX-License-Identifier: Apache-2.0
"""Tuning tasks in this process.

A hanging candidate cannot be killed here. Its measuring thread is abandoned and another thread continues. The waiting
thread therefore keeps the journal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from ejkernel.ops.autotuner.process.outputs import Outputs
from ejkernel.ops.autotuner.process.threads import AbandonedError, on_measuring_thread
from ejkernel.ops.autotuner.process.watch import Cancellation, Watch
from ejkernel.ops.autotuner.tasks.journal import Journal, named
from ejkernel.ops.autotuner.tasks.run import TuningRun
from ejkernel.ops.autotuner.tasks.task import TuningTask
from ejkernel.ops.autotuner.trials.events import Event
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.errors import TuningWarning
from ejkernel.ops.utils.messages.warn import warn


def tune_here(
    task: TuningTask, *, cancellation: Cancellation, clock: Callable[[], float] = time.perf_counter
) -> AutotuneData:
    """Run a task on the measuring thread; with a budget, replace that thread each time a candidate hangs.

    After Ctrl-C a hanging candidate is abandoned too.

    Args:
        task: The task.
        cancellation: Requested by Ctrl-C, which ends the search with the best result so far.
        clock: Source of seconds for the budget. Hanging candidates are only detected with the default clock.

    Raises:
        TuningError: No candidate could be measured, or the reference failed.
        KeyboardInterrupt: The user pressed Ctrl-C twice.
    """
    outputs = Outputs()
    try:
        return _carried_out(task, cancellation, outputs, clock)
    finally:
        outputs.mend()  # candidates may have closed them
        outputs.close()


def _carried_out(
    task: TuningTask, cancellation: Cancellation, outputs: Outputs, clock: Callable[[], float]
) -> AutotuneData:
    journal, rest = Journal(task, cancellation=cancellation), task
    while True:
        attempt = _Attempt(journal, cancellation, outputs, has_budget=task.policy.budget_s is not None)
        run = TuningRun(rest, watch=attempt, cancellation=cancellation, tell=attempt.tell, clock=clock)
        try:
            # With a custom clock, a thread cannot wait for the end of the budget.
            return attempt.carry_out(run, is_watched=clock is time.perf_counter)
        except AbandonedError as error:
            why = f"{error}{named(attempt.accused)}"
            text = f"{task.inv.op_id}: {why}; it cannot be ended in this process, so its thread is abandoned"
            warn(f"{text} (a worker process can be ended: AutotunePolicy(isolate=True)).", TuningWarning)
            # Ctrl-C asks for the end, not for another attempt.
            if journal.is_over:
                return journal.conclude(why)
            journal.attribute_crash(str(error), attempt.what, attempt.accused, is_silence=True)
            rest = journal.task()


class _Attempt(Watch):
    """The work of one thread on a task: a `Watch` that records the last sign of life.

    Attributes:
        what: The current step.
    """

    def __init__(self, journal: Journal, cancellation: Cancellation, outputs: Outputs, *, has_budget: bool) -> None:
        self._journal = journal
        self._cancellation = cancellation
        self._outputs = outputs
        self._has_budget = has_budget
        self._is_abandoned = False
        self.compiling(())
        self.begin("starting", (), math.inf)

    @property
    def accused(self) -> list[Any]:
        """The candidates running or compiling now."""
        return [*self._configs[self._running : self._running + 1], *self._compiling]

    def carry_out(self, run: TuningRun, *, is_watched: bool) -> AutotuneData:
        """Execute a run on the measuring thread; if it is watched, within the time left."""
        self._alive = time.monotonic()
        look = self._look if is_watched else None
        try:
            return on_measuring_thread(run.run, on_interrupt=self._cancellation.request, look=look)
        except BaseException:
            self._is_abandoned = True
            raise

    def tell(self, event: Event) -> None:
        """Record an event, unless this attempt was abandoned."""
        self._alive = time.monotonic()
        if not self._is_abandoned:
            self._journal.note(event)

    def compiling(self, configs: Sequence[object]) -> None:
        """See `Watch`."""
        self._outputs.mend()
        self._compiling = list(configs)
        self._alive = time.monotonic()

    def begin(self, doing: str, configs: Sequence[object], allowed: float) -> None:
        """See `Watch`."""
        self._outputs.mend()
        self._running, self._configs = 0, configs
        self.what, self._allowed = doing, allowed
        self._alive = time.monotonic()

    def running(self, index: int) -> None:
        """See `Watch`."""
        self._running, self._alive = index, time.monotonic()

    def damage(self) -> int:
        """See `Watch`."""
        return self._outputs.mend()

    def is_abandoned(self) -> bool:
        """See `Watch`."""
        self._alive = time.monotonic()
        return self._is_abandoned

    def _look(self) -> None:
        """Abandon the attempt after a long silence, or at the end of its time.

        Raises:
            AbandonedError: The thread is silent for too long, or the time is over.
        """
        # Without a budget a candidate may run until Ctrl-C.
        silent = time.monotonic() - self._alive if self._has_budget else 0.0
        allowed = self._journal.silence(self.what, self.accused, self._allowed)
        if silent > allowed:
            raise AbandonedError(f"no sign of life for {silent:.1f} s while {self.what} (allowed: {allowed:.1f} s)")
        if self._journal.left() <= 0:
            raise AbandonedError(f"its time was over while {self.what}")
