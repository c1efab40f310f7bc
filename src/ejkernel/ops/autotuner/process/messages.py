# SPDX-License-Identifier: Apache-2.0
"""Messages between a process and its worker, and the pipe that carries them.

Messages are pickled. They pass only between a process and its own child, and through an executor. A worker may hang
anywhere, even in the middle of a message or before reading its request. The parent's end of the pipe therefore never
blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle  # noqa: TID251 - between a process and its own child
import select
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.error_text import error_text, traceback_text

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("!Q")
_CHUNK = 1 << 20
_LARGEST = 1 << 40  # bytes; a larger size is not the header of a message


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """Base class of a worker's messages."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived(Message):
    """The request has reached a worker, which an executor chose."""

    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class Began(Message):
    """The device starts another step; see `WorkerStatus`."""

    what: str
    configs: Sequence[Any]
    allowed: float


@dataclasses.dataclass(frozen=True, slots=True)
class Compiling(Message):
    """Exactly these candidates are being compiled."""

    configs: Sequence[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Happened(Message):
    """An event of the worker's search."""

    event: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Warned(Message):
    """A warning for the parent to issue."""

    warning: Warning

    @classmethod
    def of(cls, message: Warning | str) -> Warned:
        """Return the message for a warning; a user's warning that cannot be pickled becomes its text."""
        try:
            pickled(message)
        except TuningError:
            message = error_text(message) if isinstance(message, Warning) else message
        return cls(message if isinstance(message, Warning) else UserWarning(message))


@dataclasses.dataclass(frozen=True, slots=True)
class Returned(Message):
    """The function returned."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Raised(Message):
    """The function raised, or could not be called."""

    error: BaseException


# --- pickling ---


def pickled(value: object) -> bytes:
    """Return the pickled value.

    Raises:
        TuningError: The value cannot be pickled.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise _unsendable(error) from error


def pickled_answer(answer: Message) -> bytes:
    """Return the pickled answer to a request; if it cannot be pickled, a `Raised` with the reason."""
    try:
        return pickled(answer)
    except TuningError as error:
        return pickle.dumps(Raised(error.with_traceback(None)))


def unpickled(data: bytes) -> Any:
    """Return the value pickled by the parent, a child, or the other end of an executor's task."""
    return pickle.loads(data)  # noqa: S301 - only these processes write to the connection


def carried_out(sent: bytes) -> Returned | Raised:
    """Call a pickled partial of a function at the top level of a module; return its result or its error."""
    try:
        request: Callable[[], Any] = unpickled(sent)
    except BaseException as error:  # noqa: BLE001 - e.g. a class is missing in its module
        return Raised(_unsendable(error))
    try:
        return Returned(request())
    except BaseException as error:  # noqa: BLE001 - raised in the parent
        return Raised(sendable(error))


def _unsendable(error: BaseException) -> TuningError:
    return TuningError(
        f"this cannot be sent to a worker process or back: {error_text(error)}. Define kernels and "
        "configurations at the top level of a module, or tune in this process (isolate=False, "
        "compile_processes=0, and no executor)."
    )


def sendable(error: BaseException) -> BaseException:
    """Return the error, or a `TuningError` with its text if it cannot be pickled.

    `KeyboardInterrupt` becomes text, too: the user's Ctrl-C goes to the parent, so a worker's comes from a candidate.
    """
    if not isinstance(error, Exception | SystemExit):
        return TuningError(error_text(error))
    error.add_note(f"in the worker:\n{traceback_text(error)}")
    bare = error.with_traceback(None)
    try:
        unpickled(pickle.dumps(bare))
    except BaseException as refused:  # noqa: BLE001 - send its text instead
        logger.debug("an error is sent as its text: %s", error_text(refused))
        return TuningError(error_text(error))
    return bare


# --- framing, and the pipe ---


def framed(data: bytes) -> bytes:
    """Return a message with its length in front."""
    return _HEADER.pack(len(data)) + data


def first_message(incoming: bytearray) -> bytes | None:
    """Remove the first message from `incoming` and return it; `None` if it is not complete."""
    if len(incoming) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack_from(incoming)
    begin, end = _HEADER.size, _HEADER.size + length
    if length > _LARGEST:  # a candidate wrote into the pipe
        begin, end = 0, len(incoming)
    if len(incoming) < end:
        return None
    message = bytes(incoming[begin:end])
    del incoming[:end]
    return message


def write_message(pipe: Connection, data: bytes) -> None:
    """Write a message; block until it is written."""
    rest = memoryview(framed(data))
    while rest:
        rest = rest[os.write(pipe.fileno(), rest) :]


def read_message(pipe: Connection) -> bytes:
    """Wait for a message and return it. The other end sends one at a time.

    Raises:
        EOFError: The other end is closed.
    """
    incoming = bytearray()
    while (message := first_message(incoming)) is None:
        part = os.read(pipe.fileno(), _CHUNK)
        if not part:
            raise EOFError
        incoming += part
    return message


class Exchange:
    """The non-blocking end of a pipe.

    Args:
        pipe: A connection; `close` closes it.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._incoming = bytearray()
        self._outgoing = memoryview(b"")
        self._is_at_end = False
        os.set_blocking(pipe.fileno(), False)

    def post(self, data: bytes) -> None:
        """Start sending a message; `wait` continues."""
        self._outgoing = memoryview(bytes(self._outgoing) + framed(data))
        self._write()

    def wait(self, also: int, seconds: float) -> None:
        """Wait until the pipe or the descriptor `also` is readable, then receive and send without blocking."""
        poll = select.poll()
        poll.register(self._pipe.fileno(), select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll.register(also, select.POLLIN)
        poll.poll(seconds * 1000)
        self._read()
        self._write()

    def take(self) -> bytes | None:
        """Return the next complete message, or `None`.

        Raises:
            EOFError: The other end is closed and all messages are taken.
        """
        message = first_message(self._incoming)
        if message is None and self._is_at_end:
            raise EOFError
        return message

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while not self._is_at_end:
                try:
                    part = os.read(self._pipe.fileno(), _CHUNK)
                except ConnectionResetError:
                    part = b""
                self._is_at_end = not part
                self._incoming += part

    def _write(self) -> None:
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._pipe.fileno(), self._outgoing) :]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):  # `take` reports it, after the last message
            self._outgoing = memoryview(b"")
