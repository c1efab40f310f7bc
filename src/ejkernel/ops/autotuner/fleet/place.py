# SPDX-License-Identifier: Apache-2.0
"""The worker's side: runs a task in a process of the executor.

This process starts a worker process that uses the device, so a crashing candidate leaves the executor's process
intact. The worker process stays for later tasks, because JAX and the device take seconds to start. All results go to
the caller; nothing is saved here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import parent_process, util
from typing import Any

import jax

from ejkernel.ops.autotuner.fleet.leases import Device, devices_of, leased
from ejkernel.ops.autotuner.fleet.lines import Instruction, LineEnd
from ejkernel.ops.autotuner.process.cancellation import Cancellation
from ejkernel.ops.autotuner.process.lifetime import reset_in_forks
from ejkernel.ops.autotuner.process.messages import Began, Happened, Message, Raised, Returned, Warned
from ejkernel.ops.autotuner.process.serve import carried_out, pickled, sendable
from ejkernel.ops.autotuner.process.worker import WorkerSlot, in_slot, shared_worker, worker_session
from ejkernel.ops.autotuner.tasks.isolated import tune_isolated
from ejkernel.ops.autotuner.tasks.task import TuningTask
from ejkernel.ops.autotuner.trials.events import Event, on_event
from ejkernel.ops.config._files import version
from ejkernel.ops.core.context import Scope, entered
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.fingerprint import device_called, device_fingerprint

_LOOK = 0.5  # seconds between polls of the caller's instruction
_STAY = 30.0  # seconds for which an idle worker process stays


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """A process: the name of its machine and its pid."""

    machine: str
    pid: int

    @classmethod
    def here(cls) -> Location:
        """Return the location of this process."""
        return cls(platform.node(), os.getpid())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A task as the executor transports it to a worker.

    Attributes:
        task: The task.
        scope: The caller's settings in force.
        versions: The caller's versions of JAX and jaxlib.
        caller: The location of the caller.
        end: The worker's end of the line to the caller.
    """

    task: TuningTask
    scope: Scope
    versions: tuple[str, str]
    caller: Location
    end: LineEnd


@dataclasses.dataclass(frozen=True, slots=True)
class Refused(Message):
    """The worker cannot run the task."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived(Message):
    """The task has reached a worker."""

    where: Location


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The result of a task.

    Attributes:
        outcome: `Returned` with an `AutotuneData`, `Raised` or `Refused`.
        said: Messages that could not be sent over the line.
    """

    outcome: Message
    said: tuple[Message, ...] = ()


def versions() -> tuple[str, str]:
    """Return the versions of JAX and jaxlib, which measurements depend on."""
    return jax.__version__, str(version("jaxlib"))


def carry_out(sent: bytes) -> bytes:
    """Run a pickled assignment; return its pickled `Answer`. Errors go into the answer."""
    came_out = carried_out(sent)
    answer = Answer(came_out) if isinstance(came_out, Raised) else came_out.value
    try:
        return pickled(answer)
    except TuningError as error:
        return pickled(Answer(Raised(error)))


def tune_at_place(assignment: Assignment) -> Answer:
    """Run an assignment in this thread."""
    reporter = _Reporter(assignment)
    is_local = assignment.caller == Location.here()
    if not is_local:
        _leave_interrupts_to(assignment.caller)
    if reporter.instruction() != Instruction.GO_ON:
        return Answer(Raised(sendable(KeyboardInterrupt())))
    outcome: Message
    with contextlib.nullcontext() if is_local else reporter.forwarding_events():
        try:
            with worker_session() if is_local else _stay():
                outcome = _outcome(assignment, reporter)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            outcome = Raised(sendable(error))
    return Answer(outcome, tuple(reporter.kept))


def _outcome(assignment: Assignment, reporter: _Reporter) -> Message:
    task = assignment.task
    if versions() != assignment.versions:
        here, there = (f"JAX {jax_version} and jaxlib {lib}" for jax_version, lib in (versions(), assignment.versions))
        return Refused(f"{Location.here()} has {here}, the caller {there}")
    wanted = task.inv.device_fingerprint
    devices = devices_of(wanted.partition(":")[0])
    if not devices:
        return Refused(f"{Location.here()} sees no GPU, but the call is for {wanted}")
    # Prefer devices with a running worker process.
    devices.sort(key=lambda device: _slot_of(device).worker is None)
    with leased(devices, lambda: reporter.instruction() != Instruction.GO_ON) as device, in_slot(_slot_of(device)):
        worker = _slot_of(device).worker
        if worker is not None and not worker.is_alive:  # it ended while idle
            _slot_of(device).clear()
        with shared_worker() as worker:
            has_it, there = worker.call(_device_here, wanted)
        if not has_it:
            return Refused(f"{Location.here()} has {there}, but the call is for {wanted}")
        with _following_instructions(reporter, _slot_of(device)), entered(assignment.scope):
            return Returned(tune_isolated(task, watch=reporter.note_under_way))


def _device_here(wanted: str) -> tuple[bool, str]:
    return device_called(wanted) is not None, device_fingerprint()


_slots: dict[str, WorkerSlot] = {}  # by device name; the lease of the device also covers its slot


def _slot_of(device: Device) -> WorkerSlot:
    return _slots.setdefault(device.name, WorkerSlot(device.environ))


class _Reporter:
    """Sends messages to the caller, at once if connected.

    Attributes:
        kept: Messages that could not be sent and go with the answer.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._end = assignment.end
        self._is_connected = self._end.connect()
        self._under_way: tuple[str, list[Any]] | None = None
        self._thread = threading.get_ident()
        self.kept: list[Message] = []
        if self._is_connected:
            self.say(Arrived(Location.here()))

    def say(self, message: Message) -> None:
        """Send a message, or keep it for the answer."""
        if self._is_connected:
            self._end.say(pickled(message))
        else:
            self.kept.append(message)

    def instruction(self) -> Instruction:
        """Return the caller's instruction."""
        return self._end.instruction() if self._is_connected else Instruction.GO_ON

    def note_under_way(self, what: str, configs: Sequence[Any]) -> None:
        """Report the current step if it is new. If the worker is lost, the last report names the possible cause."""
        if self._is_connected and (what, list(configs)) != self._under_way:
            self._under_way = (what, list(configs))
            self.say(Began(what, list(configs), 0.0))

    @contextlib.contextmanager
    def forwarding_events(self) -> Iterator[None]:
        """Send this thread's events and warnings to the caller inside the `with` block."""

        def happened(event: Event) -> None:
            if threading.get_ident() == self._thread:
                self.say(Happened(event))

        def warn(message: Warning | str, *rest: object, **more: object) -> None:
            if threading.get_ident() == self._thread:
                self.say(_warned(message))
            else:
                shown(message, *rest, **more)

        with warnings.catch_warnings(), on_event(happened):
            warnings.simplefilter("always")  # the caller filters
            shown: Callable[..., Any] = warnings.showwarning
            warnings.showwarning = warn
            yield


def _warned(message: Warning | str) -> Warned:
    """Return the message for a warning; a user's warning that cannot be pickled becomes its text."""
    try:
        pickled(message)
    except TuningError:
        return Warned(error_text(message) if isinstance(message, Warning) else message)
    return Warned(message)


@contextlib.contextmanager
def _following_instructions(reporter: _Reporter, slot: WorkerSlot) -> Iterator[None]:
    """Apply the caller's instructions to the slot's worker inside the `with` block."""
    slot.cancellation, slot.is_closed = Cancellation(), False
    is_done = threading.Event()

    def follow() -> None:
        while not is_done.wait(_LOOK):
            instruction = reporter.instruction()
            if instruction != Instruction.GO_ON:
                slot.cancellation.request()
            if instruction == Instruction.END_AT_ONCE:
                slot.abandon()

    thread = threading.Thread(target=follow, name="ejkernel-follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
        slot.is_closed = False


def _leave_interrupts_to(caller: Location) -> None:
    """Ignore Ctrl-C if the caller started this process: a terminal sends it to both.

    An idle pool process that dies of Ctrl-C breaks the pool, which then kills the busy ones.
    """
    parent = parent_process()
    is_mine = parent is not None and Location(platform.node(), parent.pid or 0) == caller
    if is_mine and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Stay:
    """A session of workers that outlives its task for a while, for the next task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: contextlib.ExitStack | None = None
        self._users = 0
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Keep the workers inside the `with` block."""
        with self._lock:
            self._users += 1
            if self._timer is not None:
                self._timer.cancel()
            if self._session is None:
                self._session = contextlib.ExitStack()
                self._session.enter_context(worker_session())
                util.Finalize(None, self.end, exitpriority=100)  # or the exit of this process waits for its workers
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._timer = threading.Timer(_STAY, self.end)
                    self._timer.daemon = True
                    self._timer.start()

    def end(self) -> None:
        """Close the workers if they are idle."""
        with self._lock:
            session, self._session = (self._session, None) if self._users == 0 else (None, self._session)
            if session is not None:
                session.close()


_stay = _Stay()


def _begin_anew() -> object:
    left = (vars(_stay).copy(), *_slots.values())
    vars(_stay).update(vars(_Stay()))
    _slots.clear()
    return left


reset_in_forks(_begin_anew)  # e.g. in a process pool that forks
