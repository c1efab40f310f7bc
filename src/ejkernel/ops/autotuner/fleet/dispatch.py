# SPDX-License-Identifier: Apache-2.0
"""The caller's side: submits a task to an executor, and again after the loss of its worker."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from ejkernel.ops.autotuner.bench.oracle import REFERENCE
from ejkernel.ops.autotuner.fleet.lines import FolderLine, Instruction, Line
from ejkernel.ops.autotuner.fleet.place import (
    Answer,
    Arrived,
    Assignment,
    Location,
    Refused,
    carry_out,
    tune_at_place,
    versions,
)
from ejkernel.ops.autotuner.process.cancellation import Cancellation
from ejkernel.ops.autotuner.process.messages import Began, Happened, Message, Raised, Request, Returned, Warned
from ejkernel.ops.autotuner.process.serve import pickled, unpickled
from ejkernel.ops.autotuner.process.signals import interrupts_held_back
from ejkernel.ops.autotuner.process.worker import this_slot
from ejkernel.ops.autotuner.tasks.journal import Journal, named
from ejkernel.ops.autotuner.tasks.task import SharedCall, TuningTask
from ejkernel.ops.autotuner.trials.candidates import CodeFile, Program, config_id
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
_MOST_LOSSES = 20  # lost workers before a task fails; preemptible machines lose many
_OUT_AFTER = 2  # lost workers before a candidate is ruled out
_OUT_AFTER_RUNNING = 3  # the same for a candidate that already ran, an unlikely cause


class WorkerLostError(TuningError):
    """An executor lost a task."""


class _RefusedError(TuningError):
    """A worker refused a task."""


def tune_elsewhere(task: TuningTask) -> AutotuneData:
    """Run a task on the executor of its policy, and again after each loss of a worker.

    Raises:
        TuningError: No candidate could be measured, all workers refused the task, or too many workers were lost.
        KeyboardInterrupt: Ctrl-C came before the first measurement, or twice.
    """
    executor = task.policy.executor
    assert executor is not None  # checked by the caller
    return _Dispatch(_sendable(task), executor).run()


class _Dispatch:
    """One task, over all attempts."""

    def __init__(self, task: TuningTask, executor: concurrent.futures.Executor) -> None:
        self._task = task
        self._executor = executor
        self._here: concurrent.futures.Executor | None = None  # replaces an executor that accepts no more tasks
        self._journal = Journal(task)
        self._losses_alone: collections.Counter[Any] = collections.Counter()
        self._losses = 0
        self._refusals: list[str] = []
        self._spent = task.spent
        self._slot = this_slot()
        self._cancellation = Cancellation(within=self._slot.cancellation)

    def run(self) -> AutotuneData:
        """See `tune_elsewhere`."""
        try:
            while True:
                attempt = _Attempt(self._new_line(), self._note)
                try:
                    with contextlib.closing(attempt.line):
                        return self._carried_out(attempt)
                except _RefusedError as refusal:
                    self._send_elsewhere(str(refusal))
                except WorkerLostError as loss:
                    self._record_loss(str(loss), attempt)
        finally:
            if self._here is not None:
                self._here.shutdown(wait=False)

    def _carried_out(self, attempt: _Attempt) -> AutotuneData:
        outcome = self._outcome(attempt)
        if isinstance(outcome, Refused):
            raise _RefusedError(outcome.reason)
        if isinstance(outcome, Raised):
            if self._cancellation.is_requested:  # the cancellation caused the error
                raise KeyboardInterrupt
            raise outcome.error
        assert isinstance(outcome, Returned)  # the only other outcome
        data: AutotuneData = outcome.value
        task = self._task
        return dataclasses.replace(data, inv=task.inv, calls=task.calls if task.others else ())

    def _outcome(self, attempt: _Attempt) -> Message:
        task = dataclasses.replace(self._journal.task(), spent=self._spent)
        assignment = Assignment(
            task=task, scope=_scope(), versions=versions(), caller=Location.here(), end=attempt.line.end
        )
        sent = pickled(Request(tune_at_place, (assignment,)))
        with interrupts_held_back() as interrupts:
            future = self._submit(sent)
            answer = self._wait_for(future, attempt, interrupts)
        for message in answer.said:
            attempt.take_note(message)
        return answer.outcome

    def _submit(self, sent: bytes) -> concurrent.futures.Future[bytes]:
        if self._here is None:
            try:
                return self._executor.submit(carry_out, sent)
            except Exception as error:  # noqa: BLE001 - broken, shut down, or an error of the user's executor
                text = f"the executor accepts no more tasks, so this process tunes the rest: {error_text(error)}"
                warn(text, TuningWarning)
                self._here = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ejkernel-here")
        return self._here.submit(carry_out, sent)

    def _wait_for(
        self,
        future: concurrent.futures.Future[bytes],
        attempt: _Attempt,
        interrupts: list[Callable[[], object]],
    ) -> Answer:
        # Poll `done()`: `wait` does not report a future that was cancelled before it started.
        while not future.done():
            concurrent.futures.wait([future], timeout=_LOOK)
            attempt.listen()
            self._pass_on_cancellation(future, attempt, interrupts)
        attempt.listen()
        try:
            answer: Answer = unpickled(future.result())
        except concurrent.futures.CancelledError:
            if self._cancellation.is_requested:
                raise KeyboardInterrupt from None
            raise WorkerLostError("its task was cancelled") from None
        except BaseException as error:
            # A worker returns its exceptions as `Raised`, so this is an error of the executor.
            if self._cancellation.is_requested:
                raise KeyboardInterrupt from None
            raise WorkerLostError(error_text(error)) from error
        return answer

    def _pass_on_cancellation(
        self, future: concurrent.futures.Future[bytes], attempt: _Attempt, interrupts: list[Callable[[], object]]
    ) -> None:
        """Forward Ctrl-C to the worker: the first ends the search with the best so far, the second at once.

        Raises:
            KeyboardInterrupt: The caller need not wait for an answer.
        """
        try:
            while interrupts:
                interrupts.pop()()
        except KeyboardInterrupt:
            if self._cancellation.is_requested:
                attempt.line.tell(Instruction.END_AT_ONCE)
                raise
            self._cancellation.request()
        if self._slot.is_closed:
            attempt.line.tell(Instruction.END_AT_ONCE)
            raise KeyboardInterrupt
        if self._cancellation.is_requested:
            attempt.line.tell(Instruction.END)
            if attempt.where is None:  # no worker has started, or the worker has no line
                future.cancel()
                raise KeyboardInterrupt

    def _note(self, message: Message) -> None:
        if isinstance(message, Happened):
            self._journal.note(message.event)
        elif isinstance(message, Warned):
            warn(message.warning)

    # --- retries ---

    def _send_elsewhere(self, reason: str) -> None:
        """Wait before the next attempt, so that a busy worker can finish and accept the task.

        Raises:
            TuningError: Too many workers refused the task.
        """
        self._refusals.append(reason)
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

    def _record_loss(self, reason: str, attempt: _Attempt) -> None:
        """Record the loss of a worker, and rule out a candidate that caused several losses.

        Most losses have other causes, so a candidate is ruled out only after it ran alone in several lost workers.

        Raises:
            TuningError: Too many workers were lost.
        """
        self._losses += 1
        self._spent += attempt.seconds
        where = f" ({attempt.where})" if attempt.where else ""
        text = f"a worker was lost{where}: {reason}{named(attempt.accused)}"
        if self._losses >= _MOST_LOSSES:
            raise TuningError(f"{self._task.inv.op_id}: gave up after the loss of {self._losses} workers: {text}")
        emit(WorkerRestarted(self._task.inv.key, text))
        self._journal.suspect(attempt.accused)
        if len(attempt.accused) != 1 or attempt.what.startswith(REFERENCE):
            return
        (culprit,) = attempt.accused
        self._losses_alone[config_id(culprit)] += 1
        most = _OUT_AFTER_RUNNING if self._journal.was_measured(culprit) else _OUT_AFTER
        if self._losses_alone[config_id(culprit)] >= most:
            self._journal.rule_out(culprit, f"{most} workers were lost while it ran alone; the last loss: {reason}")

    def _new_line(self) -> Line:
        make: Callable[[], Line] = FolderLine if self._here else getattr(self._executor, "line", FolderLine)
        return make()


class _Attempt:
    """One attempt of a task on one worker.

    Attributes:
        line: The line to the worker.
        where: The location of the worker, once it has started.
        what: The last reported step.
        accused: The candidates of that step.
    """

    def __init__(self, line: Line, note: Callable[[Message], None]) -> None:
        self.line = line
        self.where: Location | None = None
        self.what = ""
        self.accused: list[Any] = []
        self._note = note
        self._times: list[float] = []

    @property
    def seconds(self) -> float:
        """Seconds between the first and the last message."""
        return self._times[-1] - self._times[0] if self._times else 0.0

    def listen(self) -> None:
        """Process new messages."""
        for said in self.line.heard():
            self.take_note(unpickled(said))

    def take_note(self, message: Message) -> None:
        """Process one message."""
        self._times = [*self._times[:1], time.monotonic()]
        if isinstance(message, Arrived):
            self.where = message.where
        elif isinstance(message, Began):
            self.what, self.accused = message.what, list(message.configs)
        else:
            self._note(message)


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
    return dataclasses.replace(
        task,
        policy=dataclasses.replace(task.policy, executor=None, devices=1, isolate=True),
        programs=_in_memory(task.programs),
        reference=_read(task.reference),
        others=tuple(_with_code(other) for other in task.others),
    )


def _with_code(call: SharedCall) -> SharedCall:
    return dataclasses.replace(call, programs=_in_memory(call.programs), reference=_read(call.reference))


def _in_memory(programs: tuple[tuple[Any, Program], ...]) -> tuple[tuple[Any, Program], ...]:
    return tuple((config, there) for config, program in programs if (there := _read(program)) is not None)


def _read(program: Program | None) -> Program | None:
    """Return a program with its code in memory; `None` if the file is gone, so that the worker compiles it."""
    if program is None or not isinstance(program.code, CodeFile):
        return program
    try:
        return dataclasses.replace(program, code=program.code.read())
    except CandidateError as error:
        warn(f"a candidate is compiled again: {error}", TuningWarning)
        return None
