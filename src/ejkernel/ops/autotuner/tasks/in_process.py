# SPDX-License-Identifier: Apache-2.0
"""Tuning tasks in this process, where what does not end can only be left.

The thread that waits keeps the journal: a measuring thread that does not end is left, and another goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ejkernel.ops.autotuner.process.cancellation import Cancellation
from ejkernel.ops.autotuner.process.outputs import Outputs
from ejkernel.ops.autotuner.process.threads import AbandonedError, on_measuring_thread
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
    """Carry out a task on the measuring thread; with a budget, go on in another one as often as a candidate hangs.

    After Ctrl-C a candidate that hangs is left, too.

    Args:
        task: What to search for.
        cancellation: Requested by Ctrl-C, which ends the search with the best so far.
        clock: Source of seconds, for the budget. Only by the usual one can anybody wait for the budget's end.

    Raises:
        TuningError: no candidate could be measured, or the reference itself failed.
        KeyboardInterrupt: Ctrl-C came twice.
    """
    with _outputs_kept() as outputs:
        # By another clock than the usual one nobody can wait for the budget's end.
        if clock is not time.perf_counter:
            attempt = _Attempt(cancellation, outputs)
            return attempt.carry_out(TuningRun(task, watch=attempt, cancellation=cancellation, clock=clock))
        return _watched(task, cancellation, outputs)


@contextlib.contextmanager
def _outputs_kept() -> Iterator[Outputs]:
    """Bring back what candidates have closed of this process's outputs, when the `with` block ends."""
    outputs = Outputs(is_ours=False)
    try:
        yield outputs
    finally:
        outputs.mend()
        outputs.close()


def _watched(task: TuningTask, cancellation: Cancellation, outputs: Outputs) -> AutotuneData:
    journal = Journal(task, cancellation=cancellation)
    while True:
        attempt = _Attempt(cancellation, outputs, journal, has_budget=task.policy.budget_s is not None)
        run = TuningRun(journal.task(), watch=attempt, cancellation=cancellation, tell=attempt.tell)
        try:
            return attempt.carry_out(run)
        except AbandonedError as error:
            text = (
                f"{task.inv.op_id}: {error}{named(attempt.accused)}; it cannot be ended in this process, and is left "
            )
            warn(f"{text}(AutotunePolicy(isolate=True) ends it).", TuningWarning)
            # What Ctrl-C asks for is an end, and not another attempt.
            if journal.is_over:
                return journal.conclude(f"{error}{named(attempt.accused)}")
            journal.attribute_crash(str(error), attempt.what, attempt.accused, is_silence=True)


class _Attempt:
    """What one thread does of a task: a `Watch` that knows since when nothing was heard.

    Attributes:
        what: What it is at.
    """

    def __init__(
        self,
        cancellation: Cancellation,
        outputs: Outputs,
        journal: Journal | None = None,
        *,
        has_budget: bool = False,
    ) -> None:
        self._cancellation = cancellation
        self._is_abandoned = False
        self._outputs = outputs
        self._journal = journal
        self._has_budget = has_budget
        self.what = "starting"
        self._allowed = float("inf")
        self._configs: Sequence[Any] = ()
        self._compiling: Sequence[Any] = ()
        self._running = 0
        self._alive = time.monotonic()

    @property
    def accused(self) -> list[Any]:
        """The candidates that are under way."""
        configs = list(self._configs)
        return [*configs[self._running : self._running + 1], *self._compiling]

    def carry_out(self, run: TuningRun) -> AutotuneData:
        """Have the measuring thread carry out a run, as long as there is time."""
        self._alive = time.monotonic()
        try:
            look = None if self._journal is None else self._look
            return on_measuring_thread(run.run, on_interrupt=self._cancellation.request, look=look)
        except (KeyboardInterrupt, AbandonedError):
            self._is_abandoned = True
            raise

    def tell(self, event: Event) -> None:
        """Keep what happens; not what happens to one that was left."""
        self._alive = time.monotonic()
        if self._journal is not None and not self._is_abandoned:
            self._journal.note(event)

    def compiling(self, configs: Sequence[object]) -> None:
        """See `Watch`."""
        self._outputs.mend()
        self._compiling, self._alive = list(configs), time.monotonic()

    def begin(self, doing: str, configs: Sequence[object], allowed: float) -> None:
        """See `Watch`."""
        self._outputs.mend()
        self._running, self._configs = 0, configs
        self.what, self._allowed, self._alive = doing, allowed, time.monotonic()

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
        """Give up what shows no sign of life.

        Raises:
            AbandonedError: nothing is heard any more, or the time is over.
        """
        assert self._journal is not None  # else nobody looks
        # Without a budget a candidate may take as long as it likes, until Ctrl-C.
        if self._has_budget:
            self._check_silence(self._journal)
        if self._journal.left() <= 0:
            raise AbandonedError(f"its time was over while {self.what}")

    def _check_silence(self, journal: Journal) -> None:
        silent = time.monotonic() - self._alive
        allowed = journal.silence(self.what, self.accused, self._allowed)
        if silent > allowed:
            raise AbandonedError(f"no sign of life for {silent:.1f} s while {self.what} (allowed: {allowed:.1f} s)")
