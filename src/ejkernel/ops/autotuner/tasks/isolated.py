# SPDX-License-Identifier: Apache-2.0
"""Tuning tasks in worker processes: a candidate that ends its process costs itself, and nothing else."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from ejkernel import compat
from ejkernel.ops.autotuner.process.cancellation import Cancellation
from ejkernel.ops.autotuner.process.messages import Happened
from ejkernel.ops.autotuner.process.serve import reports
from ejkernel.ops.autotuner.process.threads import on_device_of, on_measuring_thread
from ejkernel.ops.autotuner.process.worker import (
    Worker,
    WorkerDiedError,
    WorkerSilentError,
    WorkerStatus,
    shared_worker,
    this_slot,
    worker_session,
)
from ejkernel.ops.autotuner.tasks.journal import Journal, named
from ejkernel.ops.autotuner.tasks.run import TuningRun
from ejkernel.ops.autotuner.tasks.task import TuningTask
from ejkernel.ops.autotuner.trials.events import WorkerRestarted, emit, on_event
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.config.policy import PolicyChange
from ejkernel.ops.core.context import Scope, current_scope, entered
from ejkernel.ops.errors import DeviceLostError, TuningError


def tune_isolated(task: TuningTask, *, watch: Callable[[str, Sequence[Any]], object] = lambda *_: None) -> AutotuneData:
    """Carry out a task in a worker process, and go on in a new one as often as a candidate ends it.

    Args:
        task: What to search for.
        watch: Called, again and again, with what the worker is at, and its candidates: those that the
            device works on, in turns, and those that are compiled meanwhile.

    Raises:
        TuningError: no candidate could be measured; there is no truth to compare with; or a worker ended for no
            reason that could be found.
        KeyboardInterrupt: Ctrl-C came before anything was measured, or twice.
    """
    # The next worker must know, too, that Ctrl-C has asked for the end.
    cancellation = Cancellation(within=this_slot().cancellation)
    journal = Journal(task, cancellation=cancellation)
    here = current_scope()
    # what a candidate tunes in its turn is tuned in the worker itself
    policies = (*here.policies, PolicyChange(None, (("isolate", False),)))
    scope = dataclasses.replace(here, policies=policies, recording=())
    attempt = _Attempt(journal, watch, cancellation)
    with worker_session():
        while True:
            try:
                data = attempt.carry_out(scope)
            except (WorkerDiedError, DeviceLostError) as death:
                if journal.is_over:
                    return journal.conclude(f"{death}{named(attempt.accused)}")
                is_silence = isinstance(death, WorkerSilentError)
                journal.attribute_crash(str(death), attempt.what, attempt.accused, is_silence=is_silence)
                emit(WorkerRestarted(task.inv.key, str(death)))
            except TuningError as error:
                if cancellation.is_requested:  # the reason why nothing was measured
                    raise KeyboardInterrupt from None
                if not str(error).startswith(task.inv.op_id):
                    raise TuningError(f"{task.inv.op_id}: {error}") from error
                raise
            else:
                return dataclasses.replace(data, inv=task.inv, calls=task.calls if task.others else ())


def _carry_out(task: TuningTask, scope: Scope, sent: float) -> AutotuneData:
    """Run a task, which was sent at that time, in this process, which is a worker, and tell the parent what happens."""
    mine = reports()
    assert mine is not None  # only workers are sent here
    task = dataclasses.replace(task, spent=task.spent + time.monotonic() - sent)  # this process had to start
    run = TuningRun(task, watch=mine, cancellation=mine.cancellation)
    with (
        entered(scope),
        on_device_of(task.inv),
        compat.numerics(task.inv.numerics),
        on_event(lambda event: mine.send(Happened(event))),
    ):
        return on_measuring_thread(run.run)


class _Attempt:
    """What a worker does of a task, one after the other until it is done; a `Deadline` for them."""

    def __init__(
        self, journal: Journal, watch: Callable[[str, Sequence[Any]], object], cancellation: Cancellation
    ) -> None:
        self._journal = journal
        self._watch = watch
        self._worker: Worker | None = None
        self._cancellation = cancellation

    def carry_out(self, scope: Scope) -> AutotuneData:
        """Have the session's worker go on with the task."""
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
        """What the worker is, or was last, at."""
        return "" if self._worker is None else self._worker.doing.what

    @property
    def accused(self) -> list[Any]:
        """The candidates that are, or were last, under way."""
        if self._worker is None:
            return []
        culprit = self._worker.culprit
        return [*([] if culprit is None else [culprit]), *self._worker.doing.compiling]

    def silence(self, doing: WorkerStatus, *, is_stuck: bool) -> float:
        """See `Deadline`."""
        self._watch(doing.what, [*doing.configs, *doing.compiling])
        return self._journal.silence(doing.what, self.accused, doing.limit, is_stuck=is_stuck)

    def left(self) -> float:
        """See `Deadline`."""
        return self._journal.left()
