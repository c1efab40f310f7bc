# SPDX-License-Identifier: Apache-2.0
"""Worker processes, which contain crashes and kernels that never return.

The worker holds the device, runs tuning tasks and reports each step before it starts. The parent keeps the results so
far, kills a worker without a sign of life, and continues with a new one without the guilty candidate. A process pool
does not report the current step of a lost worker. One worker serves a whole session, because JAX and a device take
seconds to start.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import util
from pathlib import Path
from typing import Any, Generic, TypeVar

from ejkernel.ops.autotuner.process.lifetime import module_path, reset_in_forks, start_process, use_module_path
from ejkernel.ops.autotuner.process.messages import Exchange
from ejkernel.ops.autotuner.process.serve import BEATS, RUNNING, SHARED, STOP, WAKES, begin_serving, reports, serve
from ejkernel.ops.autotuner.process.supervisor import Signs, Supervisor, WorkerDiedError
from ejkernel.ops.autotuner.process.watch import Cancellation, Instruction
from ejkernel.ops.errors import DeviceLostError, TuningError

_LOOK = 0.2  # seconds between checks whether a worker is alive
_GOODBYE = 5.0  # seconds allowed for a worker to exit


_UNGUARDED = 78
GUARD = (
    'a worker process imports the program that started it: put the program\'s code below `if __name__ == "__main__":`.'
)


class Worker(Supervisor):
    """One worker process, over a pipe and shared memory; it ends with `close`, or with this process.

    Args:
        environ: Variables to set in the worker's environment, e.g. `CUDA_VISIBLE_DEVICES`.
        output: A file for all output of the worker; standard error if empty.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, *, output: str = "") -> None:
        super().__init__()
        _check_that_main_is_there()
        context = multiprocessing.get_context("spawn")
        self._pulse = context.RawArray("q", SHARED)
        pipe, other = context.Pipe()
        arguments = (other, self._pulse, dict(environ or {}), reports() is None, os.getpid(), output)
        self._process = context.Process(target=_serve, args=(module_path(), *arguments), name="ejkernel-worker")
        start_process(self._process.start)
        other.close()
        self._pipe = Exchange(pipe)
        atexit.register(self.kill)  # not a daemon, because it may start processes

    @property
    def pid(self) -> int | None:
        """The pid of the worker."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether its process is running."""
        return self._process.is_alive()

    def post(self, request: bytes) -> None:
        """See `Supervisor`."""
        self._pipe.post(request)

    def receive(self) -> bytes | None:
        """See `Supervisor`.

        Raises:
            WorkerDiedError: The worker ended or closed the connection.
            TuningError: The worker would have run the user's program again.
        """
        try:
            message = self._pipe.take()
            if message is None:
                has_ended = not self._process.is_alive()
                self._pipe.wait(self._process.sentinel, _LOOK)
                message = self._pipe.take()
                if message is None and has_ended:  # its last messages were read after its end
                    raise EOFError
        except EOFError:
            self._process.join(_GOODBYE)
            raise self._end_of_process() from None
        return message

    def signs(self) -> Signs:
        """See `Supervisor`."""
        return Signs(self._pulse[BEATS], self._pulse[WAKES], self._pulse[RUNNING])

    def tell(self, instruction: Instruction) -> None:
        """See `Supervisor`."""
        self._pulse[STOP] = instruction != Instruction.GO_ON
        if instruction == Instruction.END_AT_ONCE:
            self.kill()

    def _end_of_process(self) -> TuningError:
        code = self._process.exitcode
        if code == _UNGUARDED:
            return TuningError(f"the worker exited: {GUARD}")
        if code is None:
            return WorkerDiedError("the worker closed its connection")
        if code < 0:
            return WorkerDiedError(f"the worker was killed by {signal.Signals(-code).name}")
        return WorkerDiedError(f"the worker exited with status {code}")

    def kill(self, *, wait: bool = True) -> None:
        """Kill the worker and its children; without `wait`, return before they have ended."""
        pid = self._process.pid
        if pid is not None:
            for other in _session_of(pid):
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


def _serve(modules: tuple[list[str], list[str]], *arguments: Any) -> None:
    """Run as a worker."""
    use_module_path(modules)
    begin_serving(*arguments)
    with worker_session():
        serve()
    os._exit(0)  # skip the interpreter's shutdown, which would abort threads that still compile in C++


# --- shared workers ---

T = TypeVar("T")
W = TypeVar("W", bound=Worker)


@dataclasses.dataclass(slots=True, eq=False)
class WorkerSlot(Generic[W]):
    """A place for one worker at a time.

    Attributes:
        make: Starts a worker.
        cancellation: Asks the worker to end its current search.
        worker: The current worker.
        lock: Held by the thread that uses the worker.
    """

    make: Callable[[], W]
    cancellation: Cancellation = dataclasses.field(default_factory=Cancellation)
    worker: W | None = None
    lock: Any = dataclasses.field(default_factory=threading.RLock)

    @contextlib.contextmanager
    def lent(self) -> Iterator[W]:
        """Lend the worker, to one thread at a time. A dead worker is replaced.

        Raises:
            KeyboardInterrupt: The slot is abandoned.
        """
        with self.lock:
            if self.worker is not None and not self.worker.is_alive:  # it died while idle
                self._drop(self.worker)
            if self.cancellation.instruction == Instruction.END_AT_ONCE:
                raise KeyboardInterrupt
            worker = self.worker = self.worker or self.make()
            try:
                yield worker
            except BaseException as error:
                # Kill a busy worker: its pending answer would go to the next caller.
                if worker.is_busy or isinstance(error, DeviceLostError):
                    self._drop(worker)
                raise

    def _drop(self, worker: W) -> None:
        worker.kill()
        self.worker = None

    def close(self) -> None:
        """Close the worker; the next use starts another."""
        with self.lock:
            if self.worker is not None:
                self.worker.close()
            self.worker = None

    def abandon(self) -> None:
        """Kill the worker, even if a thread waits for it, and start no other."""
        self.cancellation.request(at_once=True)
        worker = self.worker
        if worker is not None:
            worker.kill()


class _Session:
    """The workers of this process.

    Attributes:
        first: The default slot.
        named: Other objects by name. The end of the last block closes them.
        here: Has the slot of a thread other than the default one.
        users: Number of `worker_session` blocks in progress.
        timer: Closes the workers later.
    """

    def __init__(self) -> None:
        self.first = WorkerSlot(Worker)
        self.named: dict[object, Any] = {}
        self.here = threading.local()
        self.users = 0
        self.timer: threading.Timer | None = None
        self.guard = threading.Lock()

    def enter(self) -> None:
        with self.guard:
            self.users += 1

    def leave(self, stay: float) -> None:
        with self.guard:
            self.users -= 1
            if stay and not self.users:
                self._close_in(stay)
            is_last = not self.users and self.timer is None
        if is_last:
            self.close()

    def _close_in(self, seconds: float) -> None:
        if self.timer is None:
            util.Finalize(None, self.close, exitpriority=100)  # or the exit of this process waits for its workers
        else:
            self.timer.cancel()
        self.timer = threading.Timer(seconds, self.close)
        self.timer.daemon = True
        self.timer.start()

    def close(self) -> None:
        """Close the workers if no block is in progress."""
        with self.guard:
            self.timer = None
            left: list[Any] = []
            if not self.users:
                left, self.named = [*self.named.values(), self.first], {}
        for each in left:
            each.close()


_session = _Session()


def _begin_anew() -> object:
    global _session
    left, _session = _session, _Session()
    return left


reset_in_forks(_begin_anew)


@contextlib.contextmanager
def worker_session(stay: float = 0.0) -> Iterator[None]:
    """Reuse the workers inside the `with` block; the outermost block closes them, `stay` seconds later."""
    session = _session
    session.enter()
    try:
        yield
    finally:
        session.leave(stay)


def of_session(name: object, make: Callable[[], T]) -> T:
    """Return the current session's object of that name, which the session closes. A worker process is one session."""
    with _session.guard:
        if name not in _session.named:
            _session.named[name] = make()
        found: T = _session.named[name]
        return found


@contextlib.contextmanager
def in_slot(slot: WorkerSlot[Worker]) -> Iterator[None]:
    """Use `slot` for this thread's worker inside the `with` block; the session closes it."""
    of_session(slot, lambda: slot)
    before, here = this_slot(), _session.here
    here.slot = slot
    try:
        yield
    finally:
        here.slot = before


def this_slot() -> WorkerSlot[Worker]:
    """Return this thread's slot."""
    slot: WorkerSlot[Worker] = getattr(_session.here, "slot", _session.first)
    return slot


@contextlib.contextmanager
def shared_worker() -> Iterator[Worker]:
    """Lend the worker of this thread's slot."""
    with worker_session(), this_slot().lent() as worker:
        yield worker


def close_first() -> None:
    """Close the session's default worker, so that its devices are free for several workers."""
    _session.first.close()
