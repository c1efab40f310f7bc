# SPDX-License-Identifier: Apache-2.0
"""Tuning tasks in worker processes: a crashing candidate loses only its worker."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from ejkernel.ops.autotuner.process.messages import Happened
from ejkernel.ops.autotuner.process.serve import reports
from ejkernel.ops.autotuner.process.supervisor import Deadline, Supervisor, WorkerDiedError, WorkerSilentError
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
    worker: Worker | None = None
    with worker_session():
        while True:
            try:
                with shared_worker() as worker:
                    data: AutotuneData = worker.call(
                        _carry_out,
                        journal.task(),
                        scope,
                        time.monotonic(),
                        on_event=journal.note,
                        cancellation=cancellation,
                        deadline=_Limits(journal, watch),
                    )
            except (WorkerDiedError, DeviceLostError) as death:
                what, accused = ("", []) if worker is None else (worker.doing.what, worker.accused)
                if journal.is_over:
                    return journal.conclude(f"{death}{named(accused)}")
                is_silence = isinstance(death, WorkerSilentError)
                journal.attribute_crash(str(death), what, accused, is_silence=is_silence)
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Limits(Deadline):
    """The limits of a task's workers, and the report of their steps."""

    journal: Journal
    watch: Callable[[str, Sequence[Any]], object]

    def silence(self, worker: Supervisor, *, is_stuck: bool) -> float:
        """See `Deadline`."""
        doing = worker.doing
        self.watch(doing.what, [*doing.configs, *doing.compiling])
        return self.journal.silence(doing.what, worker.accused, doing.limit, is_stuck=is_stuck)

    def left(self) -> float:
        """See `Deadline`."""
        return self.journal.left()
