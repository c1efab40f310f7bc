# SPDX-License-Identifier: Apache-2.0
"""Tuning tasks in worker processes: a candidate that ends its process costs itself, and nothing else."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from ejkernel import compat
from ejkernel.ops.config.policy import PolicyChange
from ejkernel.ops.core.context import Scope, current_scope, entered
from ejkernel.ops.errors import DeviceLostError, TuningError
from ejkernel.ops.execution.bench import config_id
from ejkernel.ops.execution.events import CandidateFinished, Event, SearchStarted, WorkerRestarted, emit, on_event
from ejkernel.ops.execution.outcome import CRASHED, AutotuneData, Outcome
from ejkernel.ops.execution.task import Progress, Tally, TuningRun, TuningTask
from ejkernel.ops.execution.threads import apart, on_device_of
from ejkernel.ops.execution.workers import Worker, WorkerDiedError, reports, shared_worker, worker_session


def tune_isolated(task: TuningTask, progress: Progress | None) -> AutotuneData:
    """Carry out a task in a worker process, and go on in a new one as often as a candidate ends it.

    Raises:
        TuningError: no candidate could be measured; there is no truth to compare with; or a worker ended for no
            reason that could be found.
        KeyboardInterrupt: Ctrl-C came before anything was measured, or twice.
    """
    journal = _Journal(task, progress)
    here = current_scope()
    # what a candidate tunes in its turn is tuned in the worker itself
    policies = (*here.policies, PolicyChange(None, (("isolate", False),)))
    scope = dataclasses.replace(here, policies=policies, recording=())
    with worker_session():
        while True:
            try:
                with shared_worker() as journal.worker:
                    data: AutotuneData = journal.worker.call(
                        _carry_out, journal.task(), scope, on_event=journal.note, stopping=journal.is_stopping
                    )
            except (WorkerDiedError, DeviceLostError) as death:
                journal.bury(death)
            except TuningError:
                if journal.worker.is_stopping:  # the reason why nothing was measured
                    raise KeyboardInterrupt from None
                raise
            else:
                journal.close()
                return dataclasses.replace(data, inv=task.inv)


def _carry_out(task: TuningTask, scope: Scope) -> AutotuneData:
    """Run a task in this process, which is a worker, and tell the parent what happens."""
    mine = reports()
    assert mine is not None  # only workers are sent here
    run = TuningRun(task, watch=mine, stop=mine.must_stop)
    with (
        entered(scope),
        on_device_of(task.inv),
        compat.numerics(task.inv.numerics),
        on_event(lambda event: mine.send("event", event)),
    ):
        return apart(run.run)


class _Journal:
    """What is known of a task, whatever becomes of the workers.

    Attributes:
        worker: Who is, or was last, at work on it.
        is_stopping: Whether Ctrl-C has asked for its end; the next worker must know.
    """

    worker: Worker

    def __init__(self, task: TuningTask, progress: Progress | None) -> None:
        self._task = task
        self._start = time.perf_counter()
        self._tally = Tally(progress)
        self._known = {config_id(outcome.config): outcome for outcome in task.known}
        self._told: dict[Any, Outcome] = {}
        self._suspects: dict[Any, Any] = {}
        self._unexplained = 0
        self.is_stopping = False

    def task(self) -> TuningTask:
        """Return the task as it is left to do."""
        return dataclasses.replace(
            self._task,
            known=tuple(self._known.values()),
            suspects=tuple(self._suspects.values()),
            spent=time.perf_counter() - self._start,
        )

    def note(self, event: Event) -> None:
        """Keep what a worker says, and pass on what is new."""
        is_new = True
        if isinstance(event, SearchStarted):
            is_new, self._tally.total = self._tally.total == 0, event.candidates
        elif isinstance(event, CandidateFinished):
            token = config_id(event.outcome.config)
            is_new = self._told.get(token) != event.outcome
            self._told[token] = self._known[token] = event.outcome
        self._tally.note(len(self._told))
        if is_new:
            emit(event)

    def close(self) -> None:
        """Take note that the task is done."""
        self._tally.note(self._tally.total)

    def bury(self, death: TuningError) -> None:
        """Find out who was to blame for the end of a worker.

        Raises:
            TuningError: nobody was, twice.
        """
        self.is_stopping = self.is_stopping or self.worker.is_stopping
        doing, culprit = self.worker.doing, self.worker.culprit
        compiling = [] if getattr(death, "timed_out", False) and culprit is not None else list(doing.compiling)
        accused = [*([] if culprit is None else [culprit]), *compiling]
        if len(accused) == 1:
            self._suspects.pop(config_id(accused[0]), None)
            crashed = Outcome(config=accused[0], status=CRASHED, reason=str(death))
            self.note(CandidateFinished(self._task.inv.key, crashed))
        elif accused:
            self._suspects |= {config_id(config): config for config in accused}
        else:
            self._unexplained += 1
            if self._unexplained > 1:
                raise TuningError(f"{self._task.inv.op_id}: the worker process ends without any candidate: {death}")
        emit(WorkerRestarted(self._task.inv.key, str(death)))
