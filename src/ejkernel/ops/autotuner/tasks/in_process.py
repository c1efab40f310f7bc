# SPDX-License-Identifier: Apache-2.0
"""Tuning tasks in this process, where what does not end can only be left."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ejkernel.ops.autotuner.process.outputs import Outputs
from ejkernel.ops.autotuner.process.threads import LeftError, apart
from ejkernel.ops.autotuner.tasks.journal import Journal, named
from ejkernel.ops.autotuner.tasks.run import TuningRun
from ejkernel.ops.autotuner.tasks.task import Progress, TuningTask
from ejkernel.ops.autotuner.trials.events import Event
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.errors import TuningWarning


def tune_here(
    task: TuningTask, progress: Progress | None, *, stop: threading.Event, clock: Callable[[], float]
) -> AutotuneData:
    """Carry out a task on the measuring thread; with a budget, go on in another one as often as a candidate hangs.

    Args:
        task: What to search for.
        progress: Called with how many candidates are compiled and checked, and how many there are.
        stop: Set by Ctrl-C, which ends the search with the best so far.
        clock: Source of seconds, for the budget. Only by the usual one can anybody wait for the budget's end.

    Raises:
        TuningError: no candidate could be measured, or the reference itself failed.
        KeyboardInterrupt: Ctrl-C came twice.
    """
    with _outputs_kept() as outputs:
        if task.policy.budget_s is None or clock is not time.perf_counter:
            attempt = _Attempt(stop, outputs)
            return attempt.carry_out(TuningRun(task, progress=progress, clock=clock, **attempt.signals))
        return _within_budget(task, Journal(task, progress), stop, outputs)


@contextlib.contextmanager
def _outputs_kept() -> Iterator[Outputs]:
    """Bring back what candidates have closed of this process's outputs, when the `with` block ends."""
    outputs = Outputs(is_ours=False)
    try:
        yield outputs
    finally:
        outputs.mend()
        outputs.close()


def _within_budget(task: TuningTask, journal: Journal, stop: threading.Event, outputs: Outputs) -> AutotuneData:
    while True:
        attempt = _Attempt(stop, outputs, journal)
        try:
            data = attempt.carry_out(TuningRun(journal.task(), tell=attempt.tell, **attempt.signals))
        except LeftError as left:
            text = f"{task.inv.op_id}: {left}{named(attempt.accused)}; it cannot be ended in this process, and is left "
            warnings.warn(f"{text}(AutotunePolicy(isolate=True) ends it).", TuningWarning, stacklevel=4)
            if journal.is_over or stop.is_set():
                return journal.conclude(f"{left}{named(attempt.accused)}")
            journal.attribute_crash(str(left), attempt.what, attempt.accused)
        else:
            journal.close()
            return data


class _Attempt:
    """What one thread does of a task: a `Watch` that knows since when nothing was heard.

    Attributes:
        what: What it is at.
    """

    def __init__(self, stop: threading.Event, outputs: Outputs, journal: Journal | None = None) -> None:
        self._stop = stop
        self._abandoned = threading.Event()
        self._outputs = outputs
        self._journal = journal
        self.what = "starting"
        self._allowed = float("inf")
        self._configs: Sequence[Any] = ()
        self._compiling: Sequence[Any] = ()
        self._running = 0
        self._alive = time.monotonic()

    @property
    def signals(self) -> dict[str, Any]:
        """What the run is to heed and to tell."""
        return {"watch": self, "stop": self._stop.is_set, "abandoned": self._is_abandoned}

    @property
    def accused(self) -> list[Any]:
        """The candidates that are under way."""
        configs = list(self._configs)
        return [*configs[self._running : self._running + 1], *self._compiling]

    def carry_out(self, run: TuningRun) -> AutotuneData:
        """Have the measuring thread carry out a run, as long as there is time."""
        self._alive = time.monotonic()
        try:
            return apart(run.run, on_interrupt=self._stop.set, look=None if self._journal is None else self._look)
        except (KeyboardInterrupt, LeftError):
            self._abandoned.set()
            raise

    def tell(self, event: Event) -> None:
        """Keep what happens; not what happens to one that was left."""
        self._alive = time.monotonic()
        if self._journal is not None and not self._abandoned.is_set():
            self._journal.note(event)

    def compiling(self, configs: Sequence[Any]) -> None:
        """See `Watch`."""
        self._outputs.mend()
        self._compiling, self._alive = list(configs), time.monotonic()

    def begin(self, doing: str, configs: Sequence[Any], allowed: float) -> None:
        """See `Watch`."""
        self._outputs.mend()
        self._running, self._configs = 0, configs
        self.what, self._allowed, self._alive = doing, allowed, time.monotonic()

    def running(self, index: int) -> None:
        """See `Watch`."""
        self._running, self._alive = index, time.monotonic()

    def harm(self) -> int:
        """See `Watch`."""
        return self._outputs.mend()

    def _is_abandoned(self) -> bool:
        self._alive = time.monotonic()
        return self._abandoned.is_set()

    def _look(self) -> None:
        """Give up what shows no sign of life.

        Raises:
            LeftError: nothing is heard any more, or the time is over.
        """
        assert self._journal is not None  # without a budget nobody looks
        silent = time.monotonic() - self._alive
        allowed = self._journal.silence(self.what, self.accused, self._allowed)
        if silent > allowed:
            raise LeftError(f"no sign of life for {silent:.1f} s while {self.what} (allowed: {allowed:.1f} s)")
        if self._journal.left() <= 0:
            raise LeftError(f"its time was over while {self.what}")
