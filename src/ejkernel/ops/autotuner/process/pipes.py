# SPDX-License-Identifier: Apache-2.0
"""Messages between a process and its worker, of which neither may keep the other waiting.

A worker may stop anywhere, also in the middle of a message, and so may one that does not read what it is sent: the
parent's end only ever takes and gives what is there at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_HEADER = struct.Struct("!Q")
_CHUNK = 1 << 20


def write_message(pipe: Connection, data: bytes) -> None:
    """Write a message, and wait until it is written."""
    rest = memoryview(_HEADER.pack(len(data)) + data)
    while rest:
        rest = rest[os.write(pipe.fileno(), rest) :]


def read_message(pipe: Connection) -> bytes:
    """Wait for a message, and return it.

    Raises:
        EOFError: the other end is closed.
    """
    (length,) = _HEADER.unpack(_read_exactly(pipe, _HEADER.size))
    return _read_exactly(pipe, length)


def _read_exactly(pipe: Connection, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        part = os.read(pipe.fileno(), min(_CHUNK, length - len(found)))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


class Exchange:
    """The end of a pipe that waits for nobody.

    Args:
        pipe: A connection; it is closed with this.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._incoming = bytearray()
        self._outgoing = memoryview(b"")
        self._is_at_end = False
        os.set_blocking(pipe.fileno(), False)

    def post(self, data: bytes) -> None:
        """Begin to send a message; `wait` goes on with it."""
        self._outgoing = memoryview(bytes(self._outgoing) + _HEADER.pack(len(data)) + data)
        self._write()

    def wait(self, also: int, seconds: float) -> None:
        """Send and receive what can be; wait until there is something to receive, or at the descriptor `also`."""
        poll = select.poll()
        poll.register(self._pipe.fileno(), select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll.register(also, select.POLLIN)
        poll.poll(seconds * 1000)
        self._read()
        self._write()

    def take(self) -> bytes | None:
        """Return the next message; `None` if it is not there yet.

        Raises:
            EOFError: none comes any more.
        """
        # What came before the end is taken before the end is told of.
        if len(self._incoming) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._incoming)
            end = _HEADER.size + length
            if len(self._incoming) >= end:
                message = bytes(self._incoming[_HEADER.size : end])
                del self._incoming[:end]
                return message
        if self._is_at_end:
            raise EOFError
        return None

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
        except (BrokenPipeError, ConnectionResetError):  # `take` says so, after what came before
            self._outgoing = memoryview(b"")
