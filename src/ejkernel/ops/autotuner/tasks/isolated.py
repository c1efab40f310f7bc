# SPDX-License-Identifier: Apache-2.0
"""Tuning tasks in worker processes: a crashing candidate loses only its worker."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from ejkernel.ops.autotuner.process.messages import Happened
from ejkernel.ops.autotuner.process.serve import reports
from ejkernel.ops.autotuner.process.supervisor import Deadline, WorkerDiedError, WorkerSilentError, WorkerStatus
from ejkernel.ops.autotuner.process.threads import on_device_of, on_measuring_thread
from ejkernel.ops.autotuner.process.watch import Cancellation
from ejkernel.ops.autotuner.process.worker import Worker, shared_worker, this_slot, worker_session
from ejkernel.ops.autotuner.tasks.journal import Journal, named
from ejkernel.ops.autotuner.tasks.run import TuningRun
from ejkernel.ops.autotuner.tasks.task import TuningTask
from ejkernel.ops.autotuner.trials.events import WorkerRestarted, emit, on_event
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.config.policy import PolicyChange
from ejkernel.ops.core.context import Scope, current_scope, entered, numerics
from ejkernel.ops.errors import DeviceLostError, TuningError


def tune_isolated(task: TuningTask, *, watch: Callable[[str, Sequence[Any]], object] = lambda *_: None) -> AutotuneData:
    """Run a task in a worker process; start a new worker each time a candidate ends the last one.

    Args:
        task: The task.
        watch: Called repeatedly with the worker's current step and its candidates: those running on the device and
            those being compiled.

    Raises:
        TuningError: No candidate could be measured, the reference failed, or a worker ended for unknown reasons.
        KeyboardInterrupt: The user pressed Ctrl-C before the first measurement, or twice.
    """
    # Later workers must also learn of a Ctrl-C.
    cancellation = Cancellation(within=this_slot().cancellation)
    journal = Journal(task, cancellation=cancellation)
    here = current_scope()
    # A candidate that tunes other calls does so in the same worker.
    policies = (*here.policies, PolicyChange(None, (("isolate", False),)))
    scope = dataclasses.replace(here, policies=policies, recording=())
    workers = _Workers(journal, watch, cancellation)
    with worker_session():
        while True:
            try:
                data = workers.carry_out(scope)
            except (WorkerDiedError, DeviceLostError) as death:
                if journal.is_over:
                    return journal.conclude(f"{death}{named(workers.accused)}")
                is_silence = isinstance(death, WorkerSilentError)
                journal.attribute_crash(str(death), workers.what, workers.accused, is_silence=is_silence)
                emit(WorkerRestarted(task.inv.key, str(death)))
            except TuningError as error:
                if cancellation.is_requested:  # the reason why nothing was measured
                    raise KeyboardInterrupt from None
                if not str(error).startswith(task.inv.op_id):
                    raise TuningError(f"{task.inv.op_id}: {error}") from error
                raise
            else:
                return of_caller(data, task, cancellation)


def of_caller(data: AutotuneData, task: TuningTask, cancellation: Cancellation) -> AutotuneData:
    """Return a worker's result with the calls of the caller, interrupted also if the request came after its end."""
    interrupted = data.interrupted or cancellation.is_requested
    return dataclasses.replace(data, inv=task.inv, calls=task.calls if task.others else (), interrupted=interrupted)


def _carry_out(task: TuningTask, scope: Scope, sent: float) -> AutotuneData:
    """Run a task in this worker and send its events to the caller; `sent` is the time at which the caller sent it."""
    mine = reports()
    assert mine is not None  # runs in workers only
    task = dataclasses.replace(task, spent=task.spent + time.monotonic() - sent)  # the start of the worker counts
    run = TuningRun(task, watch=mine, cancellation=mine.cancellation)
    with (
        entered(scope),
        on_device_of(task.inv),
        numerics(task.inv.numerics),
        on_event(lambda event: mine.send(Happened(event))),
    ):
        return on_measuring_thread(run.run)


class _Workers(Deadline):
    """The successive workers of a task, and their limits."""

    def __init__(
        self, journal: Journal, watch: Callable[[str, Sequence[Any]], object], cancellation: Cancellation
    ) -> None:
        self._journal = journal
        self._watch = watch
        self._worker: Worker | None = None
        self._cancellation = cancellation

    def carry_out(self, scope: Scope) -> AutotuneData:
        """Continue the task in the session's worker."""
        with shared_worker() as self._worker:
            data: AutotuneData = self._worker.call(
                _carry_out,
                self._journal.task(),
                scope,
                time.monotonic(),
                on_event=self._journal.note,
                cancellation=self._cancellation,
                deadline=self,
            )
        return data

    @property
    def what(self) -> str:
        """The worker's current or last step."""
        return "" if self._worker is None else self._worker.doing.what

    @property
    def accused(self) -> list[Any]:
        """The candidates that run or compile in the worker, or last did."""
        return [] if self._worker is None else self._worker.accused

    def silence(self, doing: WorkerStatus, *, is_stuck: bool) -> float:
        """See `Deadline`."""
        self._watch(doing.what, [*doing.configs, *doing.compiling])
        return self._journal.silence(doing.what, self.accused, doing.limit, is_stuck=is_stuck)

    def left(self) -> float:
        """See `Deadline`."""
        return self._journal.left()
