# SPDX-License-Identifier: Apache-2.0
"""A process of its own for what a process may not survive: a crash, a kernel that never returns.

The worker holds the device, carries out tuning tasks, and says what it is at, before it does it. The parent keeps what
was found out so far, ends a worker that shows no sign of life, and lets a new one go on without the candidate that was
to blame. It is not a process pool's worker, because a pool does not say what its worker was at; and one serves a whole
session, because to start JAX and a device takes seconds.

Tasks and answers are pickled: here they go between a process and its own child, and nowhere else (but see `fleet`).
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
    begin_anew_in_forks,
    module_path,
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

_LOOK = 0.2  # seconds between two looks at whether a worker is alive
_START = 120.0  # seconds in which a worker must have started
_STUCK = 5 * WAKE_UP  # seconds without waking up after which somebody keeps a worker's interpreter from it
_GOODBYE = 5.0  # seconds that a worker has to end by itself


_UNGUARDED = 78
GUARD = (
    "a worker process imports the program that started it: put what the program does below "
    '`if __name__ == "__main__":`.'
)


class WorkerDiedError(TuningError):
    """A worker process ended, or had to be ended, before it had an answer."""


class WorkerSilentError(WorkerDiedError):
    """A worker process was ended because it showed no sign of life, or because its time was over."""


class Deadline(Protocol):
    """How long a worker may be waited for, beside what it says itself."""

    def silence(self, doing: WorkerStatus, *, is_stuck: bool) -> float:
        """Return the seconds without a sign of life after which it is ended.

        Args:
            doing: What it is at.
            is_stuck: Whether its interpreter's lock is not to be had.
        """

    def left(self) -> float:
        """Return the seconds after which it is ended whatever it does."""


@dataclasses.dataclass(slots=True)
class WorkerStatus:
    """What a worker is at.

    Attributes:
        what: In words.
        configs: The candidates that the device works on, in turns.
        compiling: The candidates that are compiled meanwhile.
        allowed: Seconds without a sign of life after which the worker is ended; a function, if they change.
    """

    what: str = "starting"
    configs: Sequence[Any] = ()
    compiling: Sequence[Any] = ()
    allowed: float | Callable[[], float] = _START

    @property
    def limit(self) -> float:
        """The seconds that are allowed now."""
        return self.allowed() if callable(self.allowed) else self.allowed


class Worker:
    """One worker process; it ends with this process, or with `close`.

    Args:
        environ: Variables to set in the worker's environment, such as `CUDA_VISIBLE_DEVICES`.
        is_leaf: Whether it starts no workers itself.
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
        self.is_busy = False  # true, too, once it has died at work, or nobody has waited for its answer
        self.doing = WorkerStatus()
        atexit.register(self.kill)  # it is no daemon, for it may have processes of its own

    @property
    def pid(self) -> int | None:
        """The worker's process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether its process is there."""
        return self._process.is_alive()

    @property
    def culprit(self) -> Any:
        """The candidate that the device worked on last; `None` if it did not work on one."""
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
        """Return `function(*args)`, computed in the worker; what it raises is raised here.

        Args:
            function: Something at the top of a module.
            *args: What it is called with.
            on_event: Called with what the worker tells meanwhile.
            cancellation: Asks it for the end of its search; the first Ctrl-C requests that, and a second one is raised.
                If left out it cannot be asked, and the first is raised.
            doing: What it is at, until it says so itself.
            deadline: For how long it is waited for; without one, for as long as it says itself.

        Raises:
            KeyboardInterrupt: Ctrl-C, as above; the worker is gone.
            WorkerDiedError: the worker ended, or showed no sign of life for as long as is allowed; it is gone.
            TuningError: the function or its arguments cannot be sent to another process.
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
                is_dead = not self._process.is_alive()  # what it said last may be there by now, so look once more
            self._check_time(now - alive, deadline, is_stuck=now - awake > _STUCK)

    def _pass_on_cancellation(self) -> None:
        self._pulse[STOP] = self._cancellation is not None and self._cancellation.is_requested

    def _next_message(self, interrupts: list[Callable[[], object]]) -> bytes | None:
        """Return the next message, `None` if none comes soon.

        Ctrl-C asks the worker to stop, if it can be asked and was not before.

        Raises:
            KeyboardInterrupt: it cannot be asked, or was.
            WorkerDiedError: none comes any more.
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
        """End the worker if it has been silent for too long, or its time is over.

        Raises:
            WorkerSilentError: it was.
        """
        allowed = deadline.silence(self.doing, is_stuck=is_stuck)
        if silent > allowed:
            text = f"no sign of life for {silent:.1f} s while {self.doing.what} (allowed: {allowed:.1f} s)"
        elif deadline.left() <= 0:
            text = f"its time was over while {self.doing.what}"
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
            return f"the worker ended itself: {GUARD}"
        if code is None:
            return f"the worker closed its connection while {self.doing.what}"
        if code < 0:
            return f"the worker was ended by {signal.Signals(-code).name} while {self.doing.what}"
        return f"the worker exited with status {code} while {self.doing.what}"

    def kill(self, *, wait: bool = True) -> None:
        """End the worker and whatever it started, now; without `wait` it may be there a moment longer."""
        pid = self._process.pid
        if pid is not None:
            for other in [] if self._is_leaf else _session_of(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it may not have made its group yet
                os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        if wait:
            atexit.unregister(self.kill)
            self._process.join(_GOODBYE)

    def close(self) -> None:
        """Let the worker end by itself, if it does so soon."""
        self._pipe.close()
        self._process.join(_GOODBYE)
        self.kill()  # what it started may be left


def _check_that_main_is_there() -> None:
    """End this process if it is a worker that is only importing the program, which should not start any.

    Going on, it would do all that the program does, beside the process that the user started.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.stderr.write(f"ejkernel: {GUARD}\n")
        os._exit(_UNGUARDED)


def _session_of(leader: int) -> list[int]:
    """Return the processes of the session that a worker leads: its own workers have groups of their own in it."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):  # nothing is there but on Linux
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = file.read_text().rpartition(")")[2].split()  # the name before may hold anything
            if int(fields[3]) == leader:
                found.append(int(file.parent.name))
    return found


class _OwnDeadline:
    """A deadline that leaves it to the worker."""

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
    """Be a worker."""
    use_module_path(modules)
    begin_serving(pipe, pulse, environ, leads, parent)
    with worker_session():
        serve()
    os._exit(0)  # at once: threads that still compile would end in the middle of C++, and not quietly


# --- workers that are shared ---


@dataclasses.dataclass(slots=True, eq=False)
class WorkerSlot:
    """A place for one worker at a time.

    Attributes:
        environ: Variables to set in the worker's environment.
        cancellation: By which the worker is asked for the end of its search, whichever that is.
        is_closed: Whether no other worker is to come.
        worker: Who is there.
        lock: Held by the thread that the worker works for.
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
        """End the worker, whoever waits for it; whoever asks for another is interrupted."""
        self.is_closed = True
        worker = self.worker
        if worker is not None:
            worker.kill()


_first = WorkerSlot()
_taken = [_first]  # the slots of this session
_here = threading.local()  # the slot of a thread, if it is not the first
_closing: list[Callable[[], object]] = []  # what else the session's end closes
_users = [0]
_guard = threading.Lock()


def _begin_anew() -> object:
    global _first, _guard, _here
    left = (_first, _guard, _here, *_taken, *_closing)
    _first, _guard, _here = WorkerSlot(), threading.Lock(), threading.local()
    _taken[:], _closing[:], _users[:] = [_first], [], [0]
    return left


begin_anew_in_forks(_begin_anew)


@contextlib.contextmanager
def worker_session() -> Iterator[None]:
    """Keep the workers for all that is done inside the `with` block; the outermost block closes them."""
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
    """Have `close` called when the session that this is part of ends; a worker is one as long as it lives."""
    with _guard:
        _closing.append(close)


@contextlib.contextmanager
def in_slot(slot: WorkerSlot) -> Iterator[None]:
    """Give this thread another slot, for a worker of its own, inside the `with` block; the session closes it."""
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
    """Give the worker of this thread's slot, to one thread at a time; one that has died is replaced the next time."""
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
            # Of one that is busy nobody has waited for the answer: the next to ask would be given that.
            if worker.is_busy or isinstance(error, DeviceLostError):
                worker.kill()
                slot.worker = None
            raise


def close_first() -> None:
    """Close the worker that a session has where nobody asked for several, so that its devices are free."""
    _first.clear()
