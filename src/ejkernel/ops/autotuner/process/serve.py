# SPDX-License-Identifier: Apache-2.0
"""The worker's side: runs the parent's requests and reports each step."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle  # noqa: TID251 - between a process and its own child
import threading
import time
import warnings
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Any

from ejkernel import settings
from ejkernel.ops.autotuner.process import outputs
from ejkernel.ops.autotuner.process.cancellation import Cancellation
from ejkernel.ops.autotuner.process.lifetime import end_with, ignore_interrupts
from ejkernel.ops.autotuner.process.messages import Began, Compiling, Message, Raised, Request, Returned, Warned
from ejkernel.ops.autotuner.process.outputs import Outputs
from ejkernel.ops.autotuner.process.pipes import read_message, write_message
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.error_text import error_text, traceback_text

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

logger = logging.getLogger(__name__)

# Memory shared by parent and worker: the index of the running candidate, a counter of signs of life, a counter that
# advances while the interpreter lock is available, and a flag to end the search. It has no lock, which a killed worker
# would keep. Messages are too slow: sending one per call would distort the measured times.
RUNNING, BEATS, WAKES, STOP = range(4)
SHARED = 4
_ORPHANED = 79  # exit status of a worker whose parent is gone
WAKE_UP = 0.5  # seconds between increments of `WAKES`


@dataclasses.dataclass(frozen=True, slots=True)
class Reports:
    """A `Watch` that reports to the parent and restores output streams closed by a candidate."""

    pipe: Connection
    pulse: MutableSequence[int]
    outputs: Outputs
    lock: Any = dataclasses.field(default_factory=threading.Lock)

    def send(self, message: Message) -> None:
        """Send a message; if the parent is gone or no longer waits, end this process quietly."""
        data = pickle.dumps(message)
        with self.lock:
            try:
                write_message(self.pipe, data)
            except (BrokenPipeError, ConnectionResetError):
                os._exit(_ORPHANED)

    def compiling(self, configs: Sequence[object]) -> None:
        """See `Watch`."""
        self.outputs.mend(is_idle=not configs)
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
        try:
            self.send(Warned(message))
        except Exception as error:  # noqa: BLE001 - a user's warning that cannot be pickled is sent as text
            logger.debug("a warning is sent as its text: %s", error_text(error))
            text = error_text(message) if isinstance(message, Warning) else message
            self.send(Warned(text))

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
    def is_requested(self) -> bool:
        """See `Cancellation`."""
        return bool(self._pulse[STOP])


_reports: list[Reports] = []  # one element if this process is a worker


def reports() -> Reports | None:
    """Return the reports to the parent; `None` if this process is not a worker."""
    return _reports[0] if _reports else None


def begin_serving(
    pipe: Connection, pulse: MutableSequence[int], environ: dict[str, str], leads: bool, parent: int
) -> None:
    """Turn this process into a worker.

    Args:
        pipe: The connection to the parent.
        pulse: The memory shared with the parent.
        environ: Environment variables to set.
        leads: Whether to lead a new session; false if the parent is itself a worker.
        parent: The pid of the parent.
    """
    if leads:
        os.setsid()  # the parent handles Ctrl-C, and can kill this process and its children as a group
    else:
        os.setpgid(0, 0)  # a worker of a worker can be killed with its session, or alone with its children
    end_with(parent)
    ignore_interrupts()
    outputs.to_standard_error()  # only the parent prints to stdout
    settings.share_device(environ)
    settings.suppress_unknown_variable_warnings()
    _reports.append(Reports(pipe, pulse, Outputs(is_ours=True)))
    warnings.showwarning = _reports[0].warn
    threading.Thread(target=_wake_up, args=(pulse,), name="ejkernel-awake", daemon=True).start()


def _wake_up(pulse: MutableSequence[int]) -> None:
    while True:
        time.sleep(WAKE_UP)
        pulse[WAKES] += 1


def write_to(path: str) -> None:
    """Redirect all output of this worker to a file."""
    outputs.send_to(path)
    mine = _reports[0]
    mine.outputs.close()
    _reports[0] = dataclasses.replace(mine, outputs=Outputs(is_ours=True))


def serve() -> None:
    """Run the parent's requests until the parent closes the pipe."""
    mine = _reports[0]
    while True:
        try:
            request = read_message(mine.pipe)
        except (EOFError, OSError):  # closed by the parent or by a candidate, which the parent notices
            return
        answer = carried_out(request)
        try:
            mine.send(answer)
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # pickle raises any of these
            mine.send(Raised(_unsendable(error)))


def carried_out(sent: bytes) -> Returned | Raised:
    """Run a pickled `Request`; return its result or its error."""
    try:
        request: Request = unpickled(sent)
    except BaseException as error:  # noqa: BLE001 - e.g. a class is missing in its module
        return Raised(_unsendable(error))
    try:
        return Returned(request.function(*request.args))
    except BaseException as error:  # noqa: BLE001 - raised in the parent
        return Raised(sendable(error))


def pickled(value: object) -> bytes:
    """Return the pickled value.

    Raises:
        TuningError: The value cannot be pickled.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise _unsendable(error) from error


def unpickled(data: bytes) -> Any:
    """Return the value pickled by the parent, a child, or the other end of an executor's task."""
    return pickle.loads(data)  # noqa: S301 - only these processes write to the connection


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
