# SPDX-License-Identifier: Apache-2.0
"""Worker processes, which contain crashes and kernels that never return.

The worker holds the device, runs tuning tasks and reports each step before it starts. The parent keeps the results so
far, kills a worker without a sign of life, and continues with a new one without the guilty candidate. A process pool
does not report the current step of a lost worker. One worker serves a whole session, because JAX and a device take
seconds to start.

Tasks and answers are pickled. They pass only between a process and its own child (and in `fleet`).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ejkernel.ops.autotuner.process.cancellation import Cancellation
from ejkernel.ops.autotuner.process.lifetime import (
    module_path,
    reset_in_forks,
    start_process,
    use_module_path,
)
from ejkernel.ops.autotuner.process.messages import (
    Began,
    Compiling,
    Happened,
    Message,
    Raised,
    Request,
    Returned,
    Warned,
)
from ejkernel.ops.autotuner.process.pipes import Exchange
from ejkernel.ops.autotuner.process.serve import (
    BEATS,
    RUNNING,
    SHARED,
    STOP,
    WAKE_UP,
    WAKES,
    begin_serving,
    serve,
    unpickled,
)
from ejkernel.ops.autotuner.process.serve import pickled as pickled
from ejkernel.ops.autotuner.process.serve import reports as reports
from ejkernel.ops.autotuner.process.signals import interrupts_held_back
from ejkernel.ops.errors import DeviceLostError, TuningError
from ejkernel.ops.utils.messages.warn import warn

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_LOOK = 0.2  # seconds between checks whether a worker is alive
_START = 120.0  # seconds allowed for the start of a worker
_STUCK = 5 * WAKE_UP  # seconds without a wake-up after which other code holds the worker's interpreter lock
_GOODBYE = 5.0  # seconds allowed for a worker to exit


_UNGUARDED = 78
GUARD = (
    'a worker process imports the program that started it: put the program\'s code below `if __name__ == "__main__":`.'
)


class WorkerDiedError(TuningError):
    """A worker process ended or was killed before it answered."""


class WorkerSilentError(WorkerDiedError):
    """A worker process was killed because it showed no sign of life or exceeded its deadline."""


class Deadline(Protocol):
    """Limits on the wait for a worker, beside those that it reports."""

    def silence(self, doing: WorkerStatus, *, is_stuck: bool) -> float:
        """Return the seconds without a sign of life after which the worker is killed.

        Args:
            doing: Its current step.
            is_stuck: Whether its interpreter lock is blocked.
        """

    def left(self) -> float:
        """Return the seconds after which the worker is killed in any case."""


@dataclasses.dataclass(slots=True)
class WorkerStatus:
    """The current step of a worker.

    Attributes:
        what: The step in words, e.g. "compiling".
        configs: The candidates running on the device, interleaved.
        compiling: The candidates being compiled at the same time.
        allowed: Seconds without a sign of life after which the worker is killed; a function if they change.
    """

    what: str = "starting"
    configs: Sequence[Any] = ()
    compiling: Sequence[Any] = ()
    allowed: float | Callable[[], float] = _START

    @property
    def limit(self) -> float:
        """The currently allowed seconds."""
        return self.allowed() if callable(self.allowed) else self.allowed


class Worker:
    """One worker process; it ends with `close`, or with this process.

    Args:
        environ: Variables to set in the worker's environment, e.g. `CUDA_VISIBLE_DEVICES`.
        is_leaf: Whether the worker itself starts no workers.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        is_leaf: bool = False,
    ) -> None:
        _check_that_main_is_there()
        context = multiprocessing.get_context("spawn")
        self._pulse = context.RawArray("q", SHARED)
        pipe, other = context.Pipe()
        arguments = (other, self._pulse, dict(environ or {}), reports() is None, os.getpid(), module_path())
        self._process = context.Process(target=_serve, args=arguments, name="ejkernel-worker")
        start_process(self._process.start)
        other.close()
        self._pipe = Exchange(pipe)
        self._cancellation: Cancellation | None = None
        self._is_leaf = is_leaf
        self.is_busy = False  # stays true if the worker dies at work or its caller stops waiting
        self.doing = WorkerStatus()
        atexit.register(self.kill)  # not a daemon, because it may start processes

    @property
    def pid(self) -> int | None:
        """The pid of the worker."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether its process is running."""
        return self._process.is_alive()

    @property
    def culprit(self) -> Any:
        """The last candidate that ran on the device, or `None`."""
        configs = self.doing.configs
        return configs[min(self._pulse[RUNNING], len(configs) - 1)] if configs else None

    def call(
        self,
        function: Callable[..., Any],
        *args: object,
        on_event: Callable[[Any], None] | None = None,
        cancellation: Cancellation | None = None,
        doing: WorkerStatus | None = None,
        deadline: Deadline | None = None,
    ) -> Any:
        """Return `function(*args)`, computed in the worker; its exceptions are raised here.

        Args:
            function: A function at the top level of a module.
            *args: Its arguments.
            on_event: Called with each event that the worker reports.
            cancellation: Asks the worker to end its search. The first Ctrl-C requests it; the second is raised. Without
                it, the first Ctrl-C is raised.
            doing: The step until the worker's first report.
            deadline: Limits on the wait; by default those that the worker reports.

        Raises:
            KeyboardInterrupt: Ctrl-C, as above; the worker is killed.
            WorkerDiedError: The worker ended, or was killed after showing no sign of life for too long.
            TuningError: The function or its arguments cannot be pickled.
        """
        request = pickled(Request(function, args))
        self.doing = doing or WorkerStatus(what="receiving its task")
        self._cancellation = cancellation
        self._pass_on_cancellation()
        self.is_busy = True
        with interrupts_held_back() as interrupts:
            self._pipe.post(request)
            return self._answer(on_event, interrupts, deadline or _OwnDeadline())

    def _answer(
        self, on_event: Callable[[Any], None] | None, interrupts: list[Callable[[], object]], deadline: Deadline
    ) -> Any:
        alive = awake = time.monotonic()
        beats, wakes, is_dead = self._pulse[BEATS], self._pulse[WAKES], False
        while True:
            self._pass_on_cancellation()
            sent = self._next_message(interrupts)
            now = time.monotonic()
            if self._pulse[WAKES] != wakes:
                awake, wakes = now, self._pulse[WAKES]
            if sent is not None:
                alive = now
                message: Message = unpickled(sent)
                self.is_busy = not isinstance(message, Returned | Raised)
                if isinstance(message, Returned):
                    return message.value
                if isinstance(message, Raised):
                    raise message.error
                self._take_note(message, on_event)
            elif self._pulse[BEATS] != beats:
                alive, beats = now, self._pulse[BEATS]
            elif is_dead:
                raise WorkerDiedError(self._last_words())
            else:
                is_dead = not self._process.is_alive()  # check once more for its last message
            self._check_time(now - alive, deadline, is_stuck=now - awake > _STUCK)

    def _pass_on_cancellation(self) -> None:
        self._pulse[STOP] = self._cancellation is not None and self._cancellation.is_requested

    def _next_message(self, interrupts: list[Callable[[], object]]) -> bytes | None:
        """Return the next message; `None` if none comes soon.

        The first Ctrl-C requests the cancellation, if the caller passed one.

        Raises:
            KeyboardInterrupt: Ctrl-C without a cancellation, or a second Ctrl-C.
            WorkerDiedError: The worker closed the connection.
        """
        try:
            while interrupts:
                interrupts.pop()()
        except KeyboardInterrupt:
            if self._cancellation is None or self._cancellation.is_requested:
                self.kill()
                raise
            self._cancellation.request()
            self._pass_on_cancellation()
        try:
            message = self._pipe.take()
            if message is None:
                self._pipe.wait(self._process.sentinel, _LOOK)
                message = self._pipe.take()
        except EOFError:
            self._process.join(_GOODBYE)
            raise WorkerDiedError(self._last_words()) from None
        return message

    def _check_time(self, silent: float, deadline: Deadline, *, is_stuck: bool) -> None:
        """Kill the worker if it was silent for too long or exceeded its deadline.

        Raises:
            WorkerSilentError: The worker was killed.
        """
        allowed = deadline.silence(self.doing, is_stuck=is_stuck)
        if silent > allowed:
            text = f"no sign of life for {silent:.1f} s while {self.doing.what} (allowed: {allowed:.1f} s)"
        elif deadline.left() <= 0:
            text = f"deadline exceeded while {self.doing.what}"
        else:
            return
        self.kill()
        raise WorkerSilentError(text)

    def _take_note(self, message: Message, on_event: Callable[[Any], None] | None) -> None:
        match message:
            case Began():
                self.doing.what, self.doing.configs = message.what, message.configs
                self.doing.allowed = message.allowed
            case Compiling():
                self.doing.compiling = message.configs
            case Warned():
                warn(message.warning)
            case Happened() if on_event is not None:
                on_event(message.event)

    def _last_words(self) -> str:
        code = self._process.exitcode
        if code == _UNGUARDED:
            return f"the worker exited: {GUARD}"
        if code is None:
            return f"the worker closed its connection while {self.doing.what}"
        if code < 0:
            return f"the worker was killed by {signal.Signals(-code).name} while {self.doing.what}"
        return f"the worker exited with status {code} while {self.doing.what}"

    def kill(self, *, wait: bool = True) -> None:
        """Kill the worker and its children; without `wait`, return before they have ended."""
        pid = self._process.pid
        if pid is not None:
            for other in [] if self._is_leaf else _session_of(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # its group may not exist yet
                os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        if wait:
            atexit.unregister(self.kill)
            self._process.join(_GOODBYE)

    def close(self) -> None:
        """Ask the worker to exit, and kill it after a few seconds."""
        self._pipe.close()
        self._process.join(_GOODBYE)
        self.kill()  # its children may remain


def _check_that_main_is_there() -> None:
    """Exit if this process is a starting worker that imports the user's program, which then starts a worker.

    Otherwise each worker would run the whole program again.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.stderr.write(f"ejkernel: {GUARD}\n")
        os._exit(_UNGUARDED)


def _session_of(leader: int) -> list[int]:
    """Return the processes of a worker's session, including its own workers, which have separate groups."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):  # empty except on Linux
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = file.read_text().rpartition(")")[2].split()  # the process name may contain any character
            if int(fields[3]) == leader:
                found.append(int(file.parent.name))
    return found


class _OwnDeadline:
    """Applies only the limits that the worker reports."""

    def silence(self, doing: WorkerStatus, *, is_stuck: bool) -> float:
        """See `Deadline`."""
        del is_stuck
        return doing.limit

    def left(self) -> float:
        """See `Deadline`."""
        return math.inf


def _serve(
    pipe: Connection,
    pulse: MutableSequence[int],
    environ: dict[str, str],
    leads: bool,
    parent: int,
    modules: tuple[list[str], list[str]],
) -> None:
    """Run as a worker."""
    use_module_path(modules)
    begin_serving(pipe, pulse, environ, leads, parent)
    with worker_session():
        serve()
    os._exit(0)  # skip the interpreter's shutdown, which would abort threads that still compile in C++


# --- shared workers ---


@dataclasses.dataclass(slots=True, eq=False)
class WorkerSlot:
    """A place for one worker at a time.

    Attributes:
        environ: Variables to set in the worker's environment.
        cancellation: Asks the worker to end its current search.
        is_closed: Whether the slot accepts no more workers.
        worker: The current worker.
        lock: Held by the thread that uses the worker.
    """

    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cancellation: Cancellation = dataclasses.field(default_factory=Cancellation)
    is_closed: bool = False
    worker: Worker | None = None
    lock: Any = dataclasses.field(default_factory=threading.RLock)

    def clear(self) -> None:
        """Close the worker."""
        with self.lock:
            if self.worker is not None:
                self.worker.close()
            self.worker = None

    def abandon(self) -> None:
        """Kill the worker, even if a thread waits for it; later requests for a worker raise `KeyboardInterrupt`."""
        self.is_closed = True
        worker = self.worker
        if worker is not None:
            worker.kill()


_first = WorkerSlot()
_taken = [_first]  # the slots of this session
_here = threading.local()  # the slot of a thread other than the default one
_closing: list[Callable[[], object]] = []  # other functions to call at the end of the session
_users = [0]
_guard = threading.Lock()


def _begin_anew() -> object:
    global _first, _guard, _here
    left = (_first, _guard, _here, *_taken, *_closing)
    _first, _guard, _here = WorkerSlot(), threading.Lock(), threading.local()
    _taken[:], _closing[:], _users[:] = [_first], [], [0]
    return left


reset_in_forks(_begin_anew)


@contextlib.contextmanager
def worker_session() -> Iterator[None]:
    """Reuse the workers inside the `with` block; the outermost block closes them."""
    with _guard:
        _users[0] += 1
    try:
        yield
    finally:
        with _guard:
            _users[0] -= 1
            left: list[Callable[[], object]] = []
            if _users[0] == 0:
                left = [*_closing, *(slot.clear for slot in _taken)]
                _taken[:], _closing[:] = [_first], []
        for close in left:
            close()


def at_session_end(close: Callable[[], object]) -> None:
    """Call `close` at the end of the current session. A worker process is one session."""
    with _guard:
        _closing.append(close)


@contextlib.contextmanager
def in_slot(slot: WorkerSlot) -> Iterator[None]:
    """Use `slot` for this thread's worker inside the `with` block; the session closes it."""
    with _guard:
        if slot not in _taken:
            _taken.append(slot)
    before, _here.slot = this_slot(), slot
    try:
        yield
    finally:
        _here.slot = before


def this_slot() -> WorkerSlot:
    """Return this thread's slot."""
    slot: WorkerSlot = getattr(_here, "slot", _first)
    return slot


@contextlib.contextmanager
def shared_worker() -> Iterator[Worker]:
    """Lend the worker of this thread's slot, to one thread at a time. A dead worker is replaced on the next use."""
    slot = this_slot()
    with worker_session(), slot.lock:
        if slot.is_closed:
            raise KeyboardInterrupt
        if slot.worker is None:
            slot.worker = Worker(slot.environ)
        worker = slot.worker
        try:
            yield worker
        except BaseException as error:
            # Kill a busy worker: its pending answer would go to the next caller.
            if worker.is_busy or isinstance(error, DeviceLostError):
                worker.kill()
                slot.worker = None
            raise


def close_first() -> None:
    """Close the session's default worker, so that its devices are free for several workers."""
    _first.clear()
