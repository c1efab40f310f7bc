# SPDX-License-Identifier: Apache-2.0
"""A worker's side: a task carried out wherever an executor has brought it.

The device is that of a worker process which this one starts: a candidate that ends it costs itself, and neither the
executor's process nor what else that does. The process stays for a while, because to start JAX and a device takes
seconds. Nothing is written but to the caller.
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
from ejkernel.ops.autotuner.fleet.lines import LineEnd, Wish
from ejkernel.ops.autotuner.process.cancellation import Cancellation
from ejkernel.ops.autotuner.process.lifetime import begin_anew_in_forks
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

_LOOK = 0.5  # seconds between two looks at what the caller wants
_STAY = 30.0  # seconds that a worker process stays for another task


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """A process: its machine's name and its number."""

    machine: str
    pid: int

    @classmethod
    def here(cls) -> Location:
        """Return where this is."""
        return cls(platform.node(), os.getpid())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What an executor brings to a worker.

    Attributes:
        task: What to do.
        scope: The settings of ours that were in force.
        versions: The caller's JAX and jaxlib.
        caller: Who wants it.
        end: By which the caller is told what happens.
    """

    task: TuningTask
    scope: Scope
    versions: tuple[str, str]
    caller: Location
    end: LineEnd


@dataclasses.dataclass(frozen=True, slots=True)
class Refused(Message):
    """The task is not for this worker."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived(Message):
    """The task has come to a worker."""

    where: Location


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came of a task.

    Attributes:
        outcome: `Returned` with an `AutotuneData`, `Raised` or `Refused`.
        said: What could not be said before.
    """

    outcome: Message
    said: tuple[Message, ...] = ()


def versions() -> tuple[str, str]:
    """Return the versions that measurements depend on: of JAX and jaxlib."""
    return jax.__version__, str(version("jaxlib"))


def carry_out(sent: bytes) -> bytes:
    """Carry out an assignment, and return its `Answer`; both are pickled. This raises nothing."""
    came_out = carried_out(sent)
    answer = Answer(came_out) if isinstance(came_out, Raised) else came_out.value
    try:
        return pickled(answer)
    except TuningError as error:
        return pickled(Answer(Raised(error)))


def tune_at_place(assignment: Assignment) -> Answer:
    """Carry out an assignment in this thread."""
    voice = _Voice(assignment)
    is_local = assignment.caller == Location.here()
    if not is_local:
        _leave_interrupts_to(assignment.caller)
    if voice.wish() != Wish.GO_ON:
        return Answer(Raised(sendable(KeyboardInterrupt())))
    outcome: Message
    with contextlib.nullcontext() if is_local else voice.overheard():
        try:
            with worker_session() if is_local else _stay():
                outcome = _outcome(assignment, voice)
        except BaseException as error:  # noqa: BLE001 - the caller's to raise
            outcome = Raised(sendable(error))
    return Answer(outcome, tuple(voice.kept))


def _outcome(assignment: Assignment, voice: _Voice) -> Message:
    task = assignment.task
    if versions() != assignment.versions:
        here, there = (f"JAX {jax_version} and jaxlib {lib}" for jax_version, lib in (versions(), assignment.versions))
        return Refused(f"{Location.here()} has {here}, and the caller {there}")
    wanted = task.inv.device_fingerprint
    devices = devices_of(wanted.partition(":")[0])
    if not devices:
        return Refused(f"{Location.here()} sees no GPU, and the call is for {wanted}")
    # Where there is a worker already, none has to be started.
    devices.sort(key=lambda device: _slot_of(device).worker is None)
    with leased(devices, lambda: voice.wish() != Wish.GO_ON) as device, in_slot(_slot_of(device)):
        worker = _slot_of(device).worker
        if worker is not None and not worker.is_alive:  # it has ended while it waited for another task
            _slot_of(device).clear()
        with shared_worker() as worker:
            has_it, there = worker.call(_what_is_here, wanted)
        if not has_it:
            return Refused(f"{Location.here()} has {there}, and the call is for {wanted}")
        with _heeded(voice, _slot_of(device)), entered(assignment.scope):
            return Returned(tune_isolated(task, watch=voice.note_under_way))


def _what_is_here(wanted: str) -> tuple[bool, str]:
    return device_called(wanted) is not None, device_fingerprint()


_slots: dict[str, WorkerSlot] = {}  # by the name of the device; who has that leased has the slot


def _slot_of(device: Device) -> WorkerSlot:
    return _slots.setdefault(device.name, WorkerSlot(device.environ))


class _Voice:
    """What is said to the caller, at once where that can be.

    Attributes:
        kept: What cannot be, and goes with the answer.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._end = assignment.end
        self._is_heard = self._end.connect()
        self._under_way: tuple[str, list[Any]] | None = None
        self._thread = threading.get_ident()
        self.kept: list[Message] = []
        if self._is_heard:
            self.say(Arrived(Location.here()))

    def say(self, message: Message) -> None:
        """Say something."""
        if self._is_heard:
            self._end.say(pickled(message))
        else:
            self.kept.append(message)

    def wish(self) -> Wish:
        """Return what the caller wants."""
        return self._end.wish() if self._is_heard else Wish.GO_ON

    def note_under_way(self, what: str, configs: Sequence[Any]) -> None:
        """Say what a worker is at, if nobody has by now: who is not heard again may have been ended by it."""
        if self._is_heard and (what, list(configs)) != self._under_way:
            self._under_way = (what, list(configs))
            self.say(Began(what, list(configs), 0.0))

    @contextlib.contextmanager
    def overheard(self) -> Iterator[None]:
        """Say all that this thread tells its listeners, and warns of, inside the `with` block."""

        def happened(event: Event) -> None:
            if threading.get_ident() == self._thread:
                self.say(Happened(event))

        def warn(message: Warning | str, *rest: object, **more: object) -> None:
            if threading.get_ident() == self._thread:
                self.say(_warned(message))
            else:
                shown(message, *rest, **more)

        with warnings.catch_warnings(), on_event(happened):
            warnings.simplefilter("always")  # which to show is the caller's to say
            shown: Callable[..., Any] = warnings.showwarning
            warnings.showwarning = warn
            yield


def _warned(message: Warning | str) -> Warned:
    """Return a warning as it is said: one of the user's own that cannot be pickled, as its text."""
    try:
        pickled(message)
    except TuningError:
        return Warned(error_text(message) if isinstance(message, Warning) else message)
    return Warned(message)


@contextlib.contextmanager
def _heeded(voice: _Voice, slot: WorkerSlot) -> Iterator[None]:
    """Do with the slot's worker what the caller wants, inside the `with` block."""
    slot.cancellation, slot.is_closed = Cancellation(), False
    is_done = threading.Event()

    def heed() -> None:
        while not is_done.wait(_LOOK):
            wish = voice.wish()
            if wish != Wish.GO_ON:
                slot.cancellation.request()
            if wish == Wish.END_AT_ONCE:
                slot.abandon()

    thread = threading.Thread(target=heed, name="ejkernel-heed", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
        slot.is_closed = False


def _leave_interrupts_to(caller: Location) -> None:
    """Leave Ctrl-C to the caller, if it has started this process: a terminal sends it to both.

    A process pool whose idle processes end by it is broken, and its busy ones are ended with it.
    """
    parent = parent_process()
    is_mine = parent is not None and Location(platform.node(), parent.pid or 0) == caller
    if is_mine and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Stay:
    """A session of workers that goes on for a while after a task, for another one."""

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
                util.Finalize(None, self.end, exitpriority=100)  # or the process would wait for its workers to end
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
        """Close the workers, if nobody uses them."""
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


begin_anew_in_forks(_begin_anew)  # such as the processes of a pool that forks
