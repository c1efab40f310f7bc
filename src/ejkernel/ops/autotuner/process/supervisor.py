# SPDX-License-Identifier: Apache-2.0
"""The supervision of a worker over any transport.

A worker that is idle receives a request and becomes busy. It reports its steps and shows signs of life until it
answers. A worker that dies, sends garbage, stays silent for too long or exceeds its deadline is lost: the supervisor
ends it and names its last step and the candidates of that step. The caller decides about another attempt (see
`Journal.attribute_crash`).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ejkernel.ops.autotuner.process.messages import (
    Arrived,
    Began,
    Compiling,
    Happened,
    Message,
    Raised,
    Returned,
    Warned,
    pickled,
    unpickled,
)
from ejkernel.ops.autotuner.process.watch import Cancellation, Instruction
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.messages.warn import warn

WAKE_UP = 0.5  # seconds between increments of `Signs.wakes`
_STUCK = 5 * WAKE_UP  # seconds without a wake-up after which other code holds the worker's interpreter lock
_START = 120.0  # seconds allowed for the start of a worker


class WorkerDiedError(TuningError):
    """A worker ended, or was ended, before it answered.

    Attributes:
        reason: How it ended, without the step.
    """

    def __init__(self, reason: str, what: str = "") -> None:
        super().__init__(f"{reason} while {what}" if what else reason)
        self.reason = reason


class WorkerSilentError(WorkerDiedError):
    """A worker was ended because it showed no sign of life or exceeded its deadline."""


class Signs(NamedTuple):
    """Signs of life that come without messages.

    Attributes:
        beats: A counter of signs of life.
        wakes: A counter that advances while the worker's interpreter lock is available.
        running: The index of the candidate that runs; `None` if it may be any of them.
    """

    beats: int = 0
    wakes: int = 0
    running: int | None = 0


@dataclasses.dataclass(slots=True)
class WorkerStatus:
    """The current step of a worker.

    Attributes:
        what: The step in words, e.g. "compiling".
        configs: The candidates running on the device, interleaved.
        compiling: The candidates being compiled at the same time.
        allowed: Seconds without a sign of life after which the worker is ended; a function if they change.
    """

    what: str = "starting"
    configs: Sequence[Any] = ()
    compiling: Sequence[Any] = ()
    allowed: float | Callable[[], float] = _START

    @property
    def limit(self) -> float:
        """The currently allowed seconds."""
        return self.allowed() if callable(self.allowed) else self.allowed


class Deadline:
    """Limits on the wait for a worker: here only those that it reports."""

    def silence(self, worker: Supervisor, *, is_stuck: bool) -> float:
        """Return the seconds without a sign of life after which the worker is ended.

        Args:
            worker: The worker.
            is_stuck: Whether its interpreter lock is blocked.
        """
        del is_stuck
        return worker.doing.limit

    def left(self) -> float:
        """Return the seconds after which the worker is ended in any case."""
        return math.inf


class Supervisor(abc.ABC):
    """One worker, which runs one call at a time. A subclass is a transport: it connects to the worker.

    Args:
        clock: Source of seconds.

    Attributes:
        is_busy: Whether the worker has not answered; stays true if it died at work or its caller stopped waiting.
        doing: The last reported step.
        where: The location of the worker; empty if it does not report one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: list[float] = []
        self.is_busy = False
        self.doing = WorkerStatus()
        self.where = ""

    # --- the transport; none of these methods blocks for long ---

    @abc.abstractmethod
    def post(self, request: bytes) -> None:
        """Start sending a request."""

    @abc.abstractmethod
    def receive(self) -> bytes | None:
        """Return the next message; wait for a moment, and return `None` if there is none.

        Raises:
            WorkerDiedError: The worker is lost, and all its messages were received.
        """

    @abc.abstractmethod
    def tell(self, instruction: Instruction) -> None:
        """Give the worker an instruction; end it for `END_AT_ONCE`."""

    def signs(self) -> Signs:
        """Return the signs of life so far; by default none beside the messages."""
        return Signs(running=None)

    # --- the state machine ---

    @property
    def accused(self) -> list[Any]:
        """The candidates that run or compile in the worker, or last did."""
        configs, running = self.doing.configs, self.signs().running
        if running is not None:
            last = min(running, len(configs) - 1)
            configs = configs[last : last + 1]
        return [*configs, *self.doing.compiling]

    @property
    def seconds(self) -> float:
        """Seconds between the first and the last message."""
        return self._heard[-1] - self._heard[0] if self._heard else 0.0

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
            KeyboardInterrupt: Ctrl-C, as above, or the cancellation at once; the worker is ended.
            WorkerDiedError: The worker ended, or was ended after showing no sign of life for too long.
            TuningError: The function or its arguments cannot be pickled.
        """
        request = pickled(functools.partial(function, *args))
        self.doing = doing or WorkerStatus(what="receiving its task")
        self.is_busy = True
        with interrupts_held_back() as interrupts:
            pass_on = functools.partial(self._pass_on, interrupts, cancellation)
            pass_on()
            self.post(request)
            return self._answer(on_event, deadline or Deadline(), pass_on)

    def _answer(self, on_event: Callable[[Any], None] | None, deadline: Deadline, pass_on: Callable[[], None]) -> Any:
        alive = awake = self._clock()
        signs = self.signs()
        while True:
            pass_on()
            message = self._next_message()
            now, last, signs = self._clock(), signs, self.signs()
            if signs.wakes != last.wakes:
                awake = now
            if message is not None:
                self._heard = [*self._heard[:1], now]
            if message is not None or signs.beats != last.beats:
                alive = now
            self.is_busy = not isinstance(message, Returned | Raised)
            if not self.is_busy:
                pass_on()  # raised later, a Ctrl-C during the last wait would discard the answer
            if isinstance(message, Returned):
                return message.value
            if isinstance(message, Raised):
                raise message.error
            self._take_note(message, on_event)
            self._check_time(now - alive, deadline, is_stuck=now - awake > _STUCK)

    def _pass_on(self, interrupts: list[Callable[[], object]], cancellation: Cancellation | None) -> None:
        """Pass Ctrl-C and the cancellation on to the worker.

        Raises:
            KeyboardInterrupt: Ctrl-C without a cancellation, a second Ctrl-C, or a cancellation at once.
        """
        try:
            while interrupts:
                interrupts.pop()()
        except KeyboardInterrupt:
            if cancellation is None or cancellation.is_requested:
                self.tell(Instruction.END_AT_ONCE)
                raise
            cancellation.request()
        instruction = Instruction.GO_ON if cancellation is None else cancellation.instruction
        self.tell(instruction)
        if instruction == Instruction.END_AT_ONCE:
            raise KeyboardInterrupt

    def _next_message(self) -> Message | None:
        try:
            sent = self.receive()
        except WorkerDiedError as death:
            raise WorkerDiedError(death.reason, self.doing.what) from None
        if sent is None:
            return None
        try:
            message = unpickled(sent)
        except Exception as error:  # noqa: BLE001 - a candidate wrote into the connection
            message = error_text(error)
        if isinstance(message, Message):
            return message
        self.tell(Instruction.END_AT_ONCE)
        raise WorkerDiedError(f"the worker sent garbage ({message!r:.80})", self.doing.what)

    def _check_time(self, silent: float, deadline: Deadline, *, is_stuck: bool) -> None:
        """End the worker if it was silent for too long or exceeded its deadline.

        Raises:
            WorkerSilentError: The worker was ended.
        """
        allowed = deadline.silence(self, is_stuck=is_stuck)
        if silent > allowed:
            text = f"no sign of life for {silent:.1f} s while {self.doing.what} (allowed: {allowed:.1f} s)"
        elif deadline.left() <= 0:
            text = f"deadline exceeded while {self.doing.what}"
        else:
            return
        self.tell(Instruction.END_AT_ONCE)
        raise WorkerSilentError(text)

    def _take_note(self, message: Message | None, on_event: Callable[[Any], None] | None) -> None:
        match message:
            case Arrived():
                self.where = message.where
            case Began():
                self.doing.what, self.doing.configs = message.what, message.configs
                self.doing.allowed = message.allowed
            case Compiling():
                self.doing.compiling = message.configs
            case Warned():
                warn(message.warning)
            case Happened() if on_event is not None:
                on_event(message.event)


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[list[Callable[[], object]]]:
    """Collect Ctrl-C inside the `with` block for the caller to handle: raised anywhere, it could split a message."""
    held: list[Callable[[], object]] = []
    before: Any = None
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # another thread, or Ctrl-C is ignored
        yield held
        return
    signal.signal(signal.SIGINT, lambda number, frame: held.append(lambda: before(number, frame)))
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)
        while held:
            held.pop()()
