# SPDX-License-Identifier: Apache-2.0
"""The worker's side: runs the parent's requests and reports each step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import warnings
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Any

from ejkernel import settings
from ejkernel.ops.autotuner.process import outputs
from ejkernel.ops.autotuner.process.lifetime import end_with, ignore_interrupts
from ejkernel.ops.autotuner.process.messages import (
    Began,
    Compiling,
    Message,
    Warned,
    carried_out,
    pickled,
    pickled_answer,
    read_message,
    write_message,
)
from ejkernel.ops.autotuner.process.outputs import Outputs
from ejkernel.ops.autotuner.process.supervisor import WAKE_UP
from ejkernel.ops.autotuner.process.watch import Cancellation, Instruction, Watch
from ejkernel.ops.errors import TuningError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# Memory shared by parent and worker: the index of the running candidate, a counter of signs of life, a counter that
# advances while the interpreter lock is available, and a flag to end the search. It has no lock, which a killed worker
# would keep. Messages are too slow: sending one per call would distort the measured times.
RUNNING, BEATS, WAKES, STOP = range(4)
SHARED = 4
_ORPHANED = 79  # exit status of a worker whose parent is gone


@dataclasses.dataclass(frozen=True, slots=True)
class Reports(Watch):
    """A `Watch` that reports to the parent and restores output streams closed by a candidate."""

    pipe: Connection
    pulse: MutableSequence[int]
    outputs: Outputs
    lock: Any = dataclasses.field(default_factory=threading.Lock)

    def send(self, message: Message) -> None:
        """Send a message."""
        self.write(pickled(message))

    def write(self, data: bytes) -> None:
        """Send a pickled message; if the parent is gone or no longer waits, end this process quietly."""
        with self.lock:
            try:
                write_message(self.pipe, data)
            except (BrokenPipeError, ConnectionResetError):
                os._exit(_ORPHANED)

    def compiling(self, configs: Sequence[object]) -> None:
        """See `Watch`."""
        self.outputs.mend(is_idle=not configs)
        with contextlib.suppress(TuningError):  # for a configuration that cannot be sent; `begin` raises it
            self.send(Compiling(list(configs)))

    def begin(self, doing: str, configs: Sequence[object], allowed: float) -> None:
        """See `Watch`."""
        self.outputs.mend()
        self.pulse[RUNNING] = 0  # not in the parent, which may read the message after the next candidate has started
        self.send(Began(doing, list(configs), allowed))

    def running(self, index: int) -> None:
        """See `Watch`."""
        self.pulse[RUNNING] = index
        self._beat()

    def damage(self) -> int:
        """See `Watch`."""
        return self.outputs.mend()

    def is_abandoned(self) -> bool:
        """See `Watch`; always false, because a parent that gives up kills the worker."""
        self._beat()
        return False

    def _beat(self) -> None:
        self.pulse[BEATS] += 1

    def warn(self, message: Warning | str, *_: object, **__: object) -> None:
        """Send a warning to the parent; replaces `warnings.showwarning`."""
        self.send(Warned.of(message))

    @property
    def cancellation(self) -> Cancellation:
        """The parent's request to end the search."""
        return _ByParent(self.pulse)


class _ByParent(Cancellation):
    """The parent's cancellation, read from shared memory."""

    def __init__(self, pulse: MutableSequence[int]) -> None:
        super().__init__()
        self._pulse = pulse

    @property
    def instruction(self) -> Instruction:
        """See `Cancellation`."""
        return Instruction.END if self._pulse[STOP] else Instruction.GO_ON


_reports: list[Reports] = []  # one element if this process is a worker


def reports() -> Reports | None:
    """Return the object through which this worker reports to its parent; `None` if this process is not a worker."""
    return _reports[0] if _reports else None


def begin_serving(
    pipe: Connection, pulse: MutableSequence[int], environ: dict[str, str], leads: bool, parent: int, output: str
) -> None:
    """Turn this process into a worker.

    Args:
        pipe: The connection to the parent.
        pulse: The memory shared with the parent.
        environ: Environment variables to set.
        leads: Whether to lead a new session; false if the parent is itself a worker.
        parent: The pid of the parent.
        output: A file for all output; standard error if empty.
    """
    if leads:
        os.setsid()  # the parent handles Ctrl-C, and can kill this process and its children as a group
    else:
        os.setpgid(0, 0)  # a worker of a worker can be killed with its session, or alone with its children
    end_with(parent)
    ignore_interrupts()
    if output:
        outputs.send_to(output)
    else:
        outputs.to_standard_error()  # only the parent prints to stdout
    settings.share_device(environ)
    settings.suppress_unknown_variable_warnings()
    _reports.append(Reports(pipe, pulse, Outputs()))
    warnings.showwarning = _reports[0].warn
    threading.Thread(target=_wake_up, args=(pulse,), name="ejkernel-awake", daemon=True).start()


def _wake_up(pulse: MutableSequence[int]) -> None:
    while True:
        time.sleep(WAKE_UP)
        pulse[WAKES] += 1


def serve() -> None:
    """Run the parent's requests until the parent closes the pipe."""
    mine = _reports[0]
    while True:
        try:
            request = read_message(mine.pipe)
        except (EOFError, OSError):  # closed by the parent or by a candidate, which the parent notices
            return
        mine.write(pickled_answer(carried_out(request)))
