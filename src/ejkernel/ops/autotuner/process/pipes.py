# SPDX-License-Identifier: Apache-2.0
"""Messages between a process and its worker.

A worker may hang anywhere, even in the middle of a message or before reading its request. The parent's end therefore
never blocks.
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
    """Write a message; block until it is written."""
    rest = memoryview(_HEADER.pack(len(data)) + data)
    while rest:
        rest = rest[os.write(pipe.fileno(), rest) :]


def read_message(pipe: Connection) -> bytes:
    """Wait for a message and return it.

    Raises:
        EOFError: The other end is closed.
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
        self._outgoing = memoryview(bytes(self._outgoing) + _HEADER.pack(len(data)) + data)
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
        # Return messages received before the end first.
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
        except (BrokenPipeError, ConnectionResetError):  # `take` reports it, after the last message
            self._outgoing = memoryview(b"")
