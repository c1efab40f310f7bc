# SPDX-License-Identifier: Apache-2.0
"""The worker's side: runs a task in a process of the executor.

This process starts a worker process that uses the device, so a crashing candidate leaves the executor's process
intact. The worker process stays for later tasks, because JAX and the device take seconds to start. All results go to
the caller; nothing is saved here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import math
import os
import platform
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ejkernel import settings
from ejkernel.ops.autotuner.fleet.lines import Line
from ejkernel.ops.autotuner.process.messages import (
    Arrived,
    Began,
    Happened,
    Message,
    Raised,
    Returned,
    Warned,
    carried_out,
    pickled,
    pickled_answer,
    sendable,
)
from ejkernel.ops.autotuner.process.watch import Cancellation, Instruction
from ejkernel.ops.autotuner.process.worker import (
    Worker,
    WorkerSlot,
    in_slot,
    of_session,
    shared_worker,
    this_slot,
    worker_session,
)
from ejkernel.ops.autotuner.tasks.isolated import tune_isolated
from ejkernel.ops.autotuner.tasks.task import TuningTask
from ejkernel.ops.autotuner.trials.events import Event, on_event
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.config._files import version
from ejkernel.ops.core.context import Scope, entered
from ejkernel.ops.errors import TuningError, TuningWarning
from ejkernel.ops.utils.fingerprint import cores, device_called, device_fingerprint
from ejkernel.ops.utils.messages.warn import warn

_LOOK = 0.5  # seconds between polls of the caller's instruction
_STAY = 30.0  # seconds for which an idle worker process stays
_FREE = 0.2  # seconds between checks for a free device
_PATIENCE = 60.0  # seconds of waiting for a device before a warning


class RefusedError(TuningError):
    """This machine cannot run the task."""


def location(pid: int | None = None) -> str:
    """Return the name of a process on this machine; without a pid, of the current process."""
    return f"process {os.getpid() if pid is None else pid} on {platform.node()}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A task as the executor transports it to a worker.

    Attributes:
        task: The task.
        scope: The caller's settings in force.
        versions: The caller's versions of JAX and jaxlib.
        caller: The location of the caller.
        line: The line to the caller.
    """

    task: TuningTask
    scope: Scope
    versions: str
    caller: str
    line: Line


def versions() -> str:
    """Return the versions of JAX and jaxlib, which measurements depend on."""
    return f"JAX {jax.__version__} and jaxlib {version('jaxlib')}"


def carry_out(sent: bytes) -> tuple[bytes, ...]:
    """Run a pickled assignment; return the pickled messages that the line did not carry, and then the answer."""
    came_out = carried_out(sent)
    return tuple(map(pickled_answer, came_out.value if isinstance(came_out, Returned) else [came_out]))


def tune_at_place(assignment: Assignment) -> list[Message]:
    """Run an assignment in this thread; return the messages that the line did not carry, and then the answer."""
    reporter = _Reporter(assignment)
    is_local = assignment.caller == location()
    if not is_local:
        _leave_interrupts_to(assignment.caller)
    if reporter.instruction() != Instruction.GO_ON:
        return [Raised(sendable(KeyboardInterrupt()))]
    answer: Message
    with contextlib.nullcontext() if is_local else reporter.forwarding_events():
        try:
            with worker_session(stay=0.0 if is_local else _STAY):
                answer = Returned(_found(assignment, reporter))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            answer = Raised(sendable(error))
    return [*reporter.kept, answer]


def _found(assignment: Assignment, reporter: _Reporter) -> AutotuneData:
    """Run the task on a free device.

    Raises:
        RefusedError: This machine lacks the device or the versions of the call.
    """
    here = location()
    if versions() != assignment.versions:
        raise RefusedError(f"{here} has {versions()}, the caller {assignment.versions}")
    wanted = assignment.task.inv.device_fingerprint
    devices = devices_of(wanted.partition(":")[0])
    if not devices:
        raise RefusedError(f"{here} sees no GPU, but the call is for {wanted}")
    # Prefer devices with a running worker process.
    devices.sort(key=lambda device: _slot_of(device).worker is None)
    with leased(devices, lambda: reporter.instruction() != Instruction.GO_ON) as device, in_slot(_slot_of(device)):
        this_slot().cancellation = reporter.cancellation  # until the next task
        with shared_worker() as worker:
            has_it, there = worker.call(_device_here, wanted)
        if not has_it:
            raise RefusedError(f"{here} has {there}, but the call is for {wanted}")
        with entered(assignment.scope):
            return tune_isolated(assignment.task, watch=reporter.look)


def _device_here(wanted: str) -> tuple[bool, str]:
    return device_called(wanted) is not None, device_fingerprint()


def _slot_of(device: Device) -> WorkerSlot[Worker]:
    # The lease of the device also covers its slot.
    return of_session(device.name, lambda: WorkerSlot(functools.partial(Worker, device.environ)))


class _Reporter:
    """Sends messages to the caller, at once if connected, and follows the caller's instructions.

    Attributes:
        kept: Messages that could not be sent and go with the answer.
        cancellation: Receives the caller's instructions.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._line = assignment.line
        self._is_connected = self._line.connect()
        self._under_way: tuple[str, list[Any]] | None = None
        self._thread = threading.get_ident()
        self._next_look = 0.0
        self.kept: list[Message] = []
        self.cancellation = Cancellation()
        if self._is_connected:
            self.say(Arrived(location()))

    def say(self, message: Message) -> None:
        """Send a message, or keep it for the answer."""
        if self._is_connected:
            self._line.say(pickled(message))
        else:
            self.kept.append(message)

    def instruction(self) -> Instruction:
        """Return the caller's instruction."""
        return self._line.instruction() if self._is_connected else Instruction.GO_ON

    def look(self, what: str, configs: Sequence[Any]) -> None:
        """Report the current step if it is new, and pass on the caller's instruction.

        If this process is lost, the last report names the possible cause.
        """
        if self._is_connected and (what, list(configs)) != self._under_way:
            self._under_way = (what, list(configs))
            self.say(Began(what, list(configs), math.inf))
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK
            instruction = self.instruction()
            if instruction != Instruction.GO_ON:
                self.cancellation.request(at_once=instruction == Instruction.END_AT_ONCE)

    @contextlib.contextmanager
    def forwarding_events(self) -> Iterator[None]:
        """Send this thread's events and warnings to the caller inside the `with` block."""

        def happened(event: Event) -> None:
            if threading.get_ident() == self._thread:
                self.say(Happened(event))

        def warned(message: Warning | str, *rest: object, **more: object) -> None:
            if threading.get_ident() == self._thread:
                self.say(Warned.of(message))
            else:
                shown(message, *rest, **more)

        with warnings.catch_warnings(), on_event(happened):
            warnings.simplefilter("always")  # the caller filters
            shown: Callable[..., Any] = warnings.showwarning
            warnings.showwarning = warned
            yield


def _leave_interrupts_to(caller: str) -> None:
    """Ignore Ctrl-C if the caller started this process: a terminal sends it to both.

    An idle pool process that dies of Ctrl-C breaks the pool, which then kills the busy ones.
    """
    parent = parent_process()
    is_mine = parent is not None and location(parent.pid) == caller
    if is_mine and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


# --- exclusive leases of devices: two searches on one device would distort each other's times ---


class Device(NamedTuple):
    """A device of this machine, or the processor.

    Attributes:
        name: Its name.
        parts: Names of the resources locked while the device is leased.
        environ: Environment variables that make it the only visible device.
    """

    name: str
    parts: Sequence[str]
    environ: Mapping[str, str]


def devices_of(platform: str) -> list[Device]:
    """Return the devices of a platform visible to this process; for `cpu`, one device with all cores."""
    if platform == "cpu":
        return [Device("cpu", [f"core-{core}" for core in cores()], {})]
    if platform != "gpu":
        return [Device(platform, [platform], {})]
    return [Device(f"gpu-{name}", [f"gpu-{name}"], settings.gpu_named(name)) for name in settings.visible_gpus()]


@contextlib.contextmanager
def leased(devices: Sequence[Device], is_asked_to_end: Callable[[], bool]) -> Iterator[Device]:
    """Lease the first free device for the `with` block; wait if all are leased.

    A lease excludes other processes and threads of the same user on this machine that use `leased`. It ends with its
    process.

    Raises:
        KeyboardInterrupt: `is_asked_to_end` returned true during the wait.
    """
    waited = 0.0
    while True:
        for device in devices:
            with contextlib.ExitStack() as held:
                if all(_is_locked(part, held) for part in device.parts):
                    yield device
                    return
        if is_asked_to_end():
            raise KeyboardInterrupt
        threading.Event().wait(_FREE)
        waited += _FREE
        if waited - _FREE < _PATIENCE <= waited:
            names = ", ".join(device.name for device in devices)
            warn(f"waiting for {names}, leased by other searches", TuningWarning)


def _is_locked(part: str, held: contextlib.ExitStack) -> bool:
    # Each `open` gets a separate lock, so threads of one process exclude each other, too.
    lock = os.open(_folder() / f"{part.replace('/', '_')}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    held.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"ejkernel-devices-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise TuningError(f"{folder} belongs to another user; remove it, or set TMPDIR to a private folder.")
    return folder
