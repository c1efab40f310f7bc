# SPDX-License-Identifier: Apache-2.0
"""Standard output and standard error of a process, restored if a candidate closes or replaces them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TextIO

_STDOUT, _STDERR = 1, 2
_HIGH = 100  # smallest descriptor for copies, beyond those that code closes by number


class Outputs:
    """A snapshot of standard output and standard error, to restore later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._damage = 0
        self._copies = {number: copy for number in (_STDOUT, _STDERR) if (copy := _copied(number)) is not None}
        self._streams: dict[str, TextIO | None] = {name: getattr(sys, name) for name in ("stdout", "stderr")}

    def mend(self, *, is_idle: bool = False) -> int:
        """Restore streams that were closed; return how many calls so far found a closed one.

        Args:
            is_idle: Whether to restore redirected streams, too, because no code runs that may need them.
        """
        with self._lock:
            lost = 0
            for number, copy in self._copies.items():
                lost += self._mend_descriptor(number, copy, is_idle=is_idle)
            for name, stream in self._streams.items():
                lost += self._mend_stream(name, stream, is_idle=is_idle)
            self._damage += bool(lost)
            return self._damage

    def _mend_descriptor(self, number: int, copy: int, *, is_idle: bool) -> bool:
        """Return whether the descriptor was closed."""
        is_lost = _is_closed(number)
        with contextlib.suppress(OSError):  # if the copy is lost, too, it cannot be restored
            if is_lost or (is_idle and not os.path.sameopenfile(number, copy)):
                os.dup2(copy, number)
        return is_lost

    def _mend_stream(self, name: str, stream: TextIO | None, *, is_idle: bool) -> bool:
        """Return whether the stream existed and had become unwritable."""
        is_lost = stream is not None and not _can_be_written(getattr(sys, name))
        if stream is not None and not _can_be_written(stream):
            number = _STDOUT if name == "stdout" else _STDERR
            stream = self._streams[name] = open(  # noqa: SIM115 - it lasts as long as the process
                number, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False
            )
        if is_lost or (is_idle and getattr(sys, name) is not stream):
            setattr(sys, name, stream)
        return is_lost

    def close(self) -> None:
        """Close the copies."""
        with self._lock:
            for copy in self._copies.values():
                with contextlib.suppress(OSError):
                    os.close(copy)
            self._copies.clear()


def to_standard_error() -> None:
    """Redirect standard output to standard error; if that is closed, both to the null device."""
    if _is_closed(_STDERR):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDERR)
    os.dup2(_STDERR, _STDOUT)


def send_to(path: str) -> None:
    """Append standard output and standard error to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, _STDOUT)
    os.dup2(descriptor, _STDERR)
    os.close(descriptor)


def flush() -> None:
    """Flush both streams; ignore broken ones."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _copied(number: int) -> int | None:
    """Return a copy of a descriptor; `None` if it is closed."""
    import fcntl  # POSIX only, like worker processes

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
