# SPDX-License-Identifier: Apache-2.0
"""What a process writes to, kept in order whatever a candidate does with it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TextIO

_STDOUT, _STDERR = 1, 2
_HIGH = 100  # descriptors from here on are for copies, out of the way of whoever closes the usual ones


class Outputs:
    """Standard output and standard error as they are now, to be brought back later.

    Args:
        is_ours: Whether nobody but candidates may change them for good; else only what cannot be used any more is
            brought back, because what is other than before may be so on purpose.
    """

    def __init__(self, *, is_ours: bool) -> None:
        self._is_ours = is_ours
        self._lock = threading.Lock()
        self._damage = 0
        self._copies = {number: copy for number in (_STDOUT, _STDERR) if (copy := _copied(number)) is not None}
        self._streams: dict[str, TextIO | None] = {name: getattr(sys, name) for name in ("stdout", "stderr")}

    def mend(self, *, is_idle: bool = False) -> int:
        """Bring back what is lost, and return how often that was needed by now.

        Args:
            is_idle: Whether nobody is at work who may have put something else in its place on purpose.
        """
        with self._lock:
            lost = 0
            for number, copy in self._copies.items():
                lost += self._mend_descriptor(number, copy, is_ours=is_idle and self._is_ours)
            for name, stream in self._streams.items():
                lost += self._mend_stream(name, stream, is_ours=is_idle and self._is_ours)
            self._damage += bool(lost)
            return self._damage

    def _mend_descriptor(self, number: int, copy: int, *, is_ours: bool) -> bool:
        """Return whether it was closed."""
        is_lost = _is_closed(number)
        with contextlib.suppress(OSError):  # the copy may be lost too; then nothing can be done
            if is_lost or (is_ours and not os.path.sameopenfile(number, copy)):
                os.dup2(copy, number)
        return is_lost

    def _mend_stream(self, name: str, stream: TextIO | None, *, is_ours: bool) -> bool:
        """Return whether there was one, and it could not be written to."""
        is_lost = stream is not None and not _can_be_written(getattr(sys, name))
        if stream is not None and not _can_be_written(stream):
            number = _STDOUT if name == "stdout" else _STDERR
            stream = self._streams[name] = open(  # noqa: SIM115 - it lasts as long as the process
                number, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False
            )
        if is_lost or (is_ours and getattr(sys, name) is not stream):
            setattr(sys, name, stream)
        return is_lost

    def close(self) -> None:
        """Let go of what is kept."""
        with self._lock:
            for copy in self._copies.values():
                with contextlib.suppress(OSError):
                    os.close(copy)
            self._copies.clear()


def to_standard_error() -> None:
    """Send standard output where standard error goes; where there is none, both go nowhere."""
    if _is_closed(_STDERR):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDERR)
    os.dup2(_STDERR, _STDOUT)


def send_to(path: str) -> None:
    """Send standard output and standard error to the end of a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, _STDOUT)
    os.dup2(descriptor, _STDERR)
    os.close(descriptor)


def flush() -> None:
    """Write what is held back; a stream that does not work any more has nothing to say."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _copied(number: int) -> int | None:
    """Return a copy of a descriptor, `None` if it is closed."""
    import fcntl  # POSIX alone has it, as it has worker processes

    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:
        return None


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def _can_be_written(stream: object) -> bool:
    return hasattr(stream, "write") and not getattr(stream, "closed", False)
