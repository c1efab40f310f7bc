# SPDX-License-Identifier: Apache-2.0
"""The caller's side: submits a task to an executor, and again after the loss of its worker."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ejkernel.ops.autotuner.fleet.lines import FolderLine, Line
from ejkernel.ops.autotuner.fleet.place import Assignment, RefusedError, carry_out, location, tune_at_place, versions
from ejkernel.ops.autotuner.process.supervisor import Supervisor, WorkerDiedError, WorkerStatus, interrupts_held_back
from ejkernel.ops.autotuner.process.watch import Cancellation, Instruction
from ejkernel.ops.autotuner.process.worker import this_slot
from ejkernel.ops.autotuner.tasks.isolated import of_caller
from ejkernel.ops.autotuner.tasks.journal import Journal, named
from ejkernel.ops.autotuner.tasks.task import SharedCall, TuningTask
from ejkernel.ops.autotuner.trials.candidates import CodeFile, Program
from ejkernel.ops.autotuner.trials.events import WorkerRestarted, emit
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.config.policy import PolicyChange
from ejkernel.ops.core.context import Scope, current_scope
from ejkernel.ops.errors import CandidateError, TuningError, TuningWarning
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.messages.warn import warn

_LOOK = 0.2  # seconds between polls of a line
_BACK_OFF = 1.0  # seconds before a refused task is sent again; grows with each refusal
_MOST_REFUSALS = 5

C = TypeVar("C", bound=SharedCall)
Submit = Callable[[bytes], "concurrent.futures.Future[tuple[bytes, ...]]"]


class ExecutorWorker(Supervisor):
    """A worker that an executor chooses, over the executor's task and a line.

    Args:
        line: The line to the worker.
        submit: Gives a pickled request to the executor.
    """

    def __init__(self, line: Line, submit: Submit) -> None:
        super().__init__()
        self.line = line
        self._submit = submit
        self._task: concurrent.futures.Future[tuple[bytes, ...]] | None = None
        self._received: collections.deque[bytes] = collections.deque()
        self._is_over = False

    def post(self, request: bytes) -> None:
        """See `Supervisor`."""
        self._task = self._submit(request)

    def receive(self) -> bytes | None:
        """See `Supervisor`."""
        assert self._task is not None  # a request comes first
        if not self._received and not self._is_over:
            # Poll `done()`: `wait` does not report a future that was cancelled before it started.
            is_done = self._task.done() or bool(concurrent.futures.wait([self._task], timeout=_LOOK).done)
            self._received.extend(self.line.heard())
            if is_done and not self._received:
                try:
                    self._received.extend(self._task.result())
                except concurrent.futures.CancelledError:
                    raise WorkerDiedError("its task was cancelled") from None
                except BaseException as error:
                    # A worker returns its exceptions as `Raised`, so this is an error of the executor.
                    raise WorkerDiedError(error_text(error)) from error
                self._is_over = True
        if self._is_over and not self._received:
            raise WorkerDiedError("its task ended without an answer")
        return self._received.popleft() if self._received else None

    def tell(self, instruction: Instruction) -> None:
        """See `Supervisor`. A worker that has not started, or has no line, cannot end its search early."""
        if instruction == Instruction.GO_ON:
            return
        self.line.tell(instruction)
        self._received.extend(self.line.heard())
        is_heard = bool(self.where or self._received)
        if instruction == Instruction.END and self._task is not None and not is_heard and not self._task.done():
            self._task.cancel()
            self._is_over = True


def tune_elsewhere(task: TuningTask) -> AutotuneData:
    """Run a search on the executor of the task's policy, and return its record.

    The executor is a `concurrent.futures.Executor`. After the loss of a worker, the search goes on in another worker.
    If the executor accepts no more tasks, this process tunes the rest.

    Raises:
        TuningError: No candidate could be measured, or workers refused the task or were lost too often.
        KeyboardInterrupt: Ctrl-C came before the first measurement, or twice; or the worker failed after Ctrl-C.
    """
    executor = task.policy.executor
    assert executor is not None  # checked by the caller
    return _Dispatch(_sendable(task), executor).run()


class _Dispatch:
    """One task, over its successive workers."""

    def __init__(self, task: TuningTask, executor: concurrent.futures.Executor) -> None:
        self._task = task
        self._executor = executor
        self._here: concurrent.futures.Executor | None = None  # replaces an executor that accepts no more tasks
        self._journal = Journal(task, is_remote=True)
        self._refusals: list[str] = []
        self._spent = task.spent
        self._cancellation = Cancellation(within=this_slot().cancellation)

    def run(self) -> AutotuneData:
        """See `tune_elsewhere`."""
        try:
            while True:
                new_line = FolderLine.new if self._here else getattr(self._executor, "line", FolderLine.new)
                with contextlib.closing(new_line()) as line:  # ends a worker that is still connected
                    worker = ExecutorWorker(line, self._submit)
                    try:
                        data = self._carried_out(worker)
                    except RefusedError as refusal:
                        self._refusals.append(str(refusal))
                    except WorkerDiedError as death:
                        self._record_loss(death.reason, worker)
                        continue
                    else:
                        return of_caller(data, self._task, self._cancellation)
                self._back_off()
        finally:
            if self._here is not None:
                self._here.shutdown(wait=False)

    def _carried_out(self, worker: ExecutorWorker) -> AutotuneData:
        task = dataclasses.replace(self._journal.task(), spent=self._spent)
        assignment = Assignment(task=task, scope=_scope(), versions=versions(), caller=location(), line=worker.line)
        try:
            data: AutotuneData = worker.call(
                tune_at_place,
                assignment,
                on_event=self._journal.note,
                cancellation=self._cancellation,
                doing=WorkerStatus(what="waiting for a worker", allowed=math.inf),
            )
        except BaseException:
            if self._cancellation.is_requested:  # the cancellation caused the error
                raise KeyboardInterrupt from None
            raise
        return data

    def _submit(self, sent: bytes) -> concurrent.futures.Future[tuple[bytes, ...]]:
        if self._here is None:
            try:
                return self._executor.submit(carry_out, sent)
            except Exception as error:  # noqa: BLE001 - broken, shut down, or an error of the user's executor
                text = f"the executor accepts no more tasks, so this process tunes the rest: {error_text(error)}"
                warn(text, TuningWarning)
                self._here = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ejkernel-here")
        return self._here.submit(carry_out, sent)

    def _back_off(self) -> None:
        """Wait before the next attempt, so that a busy worker can finish and accept the task.

        Raises:
            TuningError: Too many workers refused the task.
        """
        if len(self._refusals) > _MOST_REFUSALS:
            listed = "; ".join(dict.fromkeys(self._refusals))
            raise TuningError(
                f"{self._task.inv.op_id}: the executor's workers refuse the task: {listed}. Pass an executor "
                "with workers that all have the device and the versions of the call."
            )
        end = time.monotonic() + _BACK_OFF * len(self._refusals)
        with interrupts_held_back() as interrupts:
            while time.monotonic() < end and not interrupts and not self._cancellation.is_requested:
                threading.Event().wait(_LOOK)
        if self._cancellation.is_requested:
            raise KeyboardInterrupt

    def _record_loss(self, reason: str, worker: ExecutorWorker) -> None:
        self._spent += worker.seconds
        self._journal.attribute_crash(reason, worker.doing.what, worker.accused)
        where = f" ({worker.where})" if worker.where else ""
        emit(WorkerRestarted(self._task.inv.key, f"a worker was lost{where}: {reason}{named(worker.accused)}"))


def _scope() -> Scope:
    """Return the current scope without parts that belong to this process."""
    here = current_scope()
    changes = [
        tuple((name, value) for name, value in change.changes if name != "executor")
        for change in here.policies
        if change.selector is None
    ]
    policies = tuple(PolicyChange(None, change) for change in changes if change)
    return dataclasses.replace(here, policies=policies, recording=())


def _sendable(task: TuningTask) -> TuningTask:
    """Return the task for another machine: without the executor, with the code of its programs."""
    policy = dataclasses.replace(task.policy, executor=None, devices=1, isolate=True)
    return dataclasses.replace(_with_code(task), policy=policy, others=tuple(map(_with_code, task.others)))


def _with_code(call: C) -> C:
    programs = ((config, _read(program)) for config, program in call.programs)
    there = tuple((config, program) for config, program in programs if program is not None)
    return dataclasses.replace(call, programs=there, reference=_read(call.reference))


def _read(program: Program | None) -> Program | None:
    """Return a program with its code in memory; `None` if the file is gone, so that the worker compiles it."""
    if program is None or not isinstance(program.code, CodeFile):
        return program
    try:
        return dataclasses.replace(program, code=program.code.read())
    except CandidateError as error:
        warn(f"a candidate is compiled again: {error}", TuningWarning)
        return None
