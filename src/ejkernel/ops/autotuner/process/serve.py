# SPDX-License-Identifier: Apache-2.0
"""A worker's own side: it carries out what it is sent, and tells its parent what it is at."""

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

# What parent and worker share without a lock, which one that is killed would keep: the index of the candidate that
# runs, a number that changes with each sign of life, one that changes as long as the interpreter's lock is to be had,
# and whether to end the search. Messages would not do: one for every call would be measured too.
RUNNING, BEATS, WAKES, STOP = range(4)
SHARED = 4
_ORPHANED = 79  # status of a worker that nobody listens to
WAKE_UP = 0.5  # seconds between two changes of `WAKES`


@dataclasses.dataclass(frozen=True, slots=True)
class Reports:
    """A `Watch` that tells the parent, and sees to it that what one candidate closes is there for the next."""

    pipe: Connection
    pulse: MutableSequence[int]
    outputs: Outputs
    lock: Any = dataclasses.field(default_factory=threading.Lock)

    def send(self, message: Message) -> None:
        """Send a message; where the parent is gone, or waits no longer, this process ends quietly."""
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
        self.pulse[RUNNING] = 0  # here and not in the parent, which hears of it when another may be running
        self.send(Began(doing, list(configs), allowed))

    def running(self, index: int) -> None:
        """See `Watch`."""
        self.pulse[RUNNING] = index
        self._beat()

    def damage(self) -> int:
        """See `Watch`."""
        return self.outputs.mend()

    def is_abandoned(self) -> bool:
        """See `Watch`; a parent that waits no longer ends the worker."""
        self._beat()
        return False

    def _beat(self) -> None:
        self.pulse[BEATS] += 1

    def warn(self, message: Warning | str, *_: object, **__: object) -> None:
        """Have the parent warn, in place of `warnings.showwarning`."""
        try:
            self.send(Warned(message))
        except Exception as error:  # noqa: BLE001 - one of the user's own that cannot be pickled: its text has to do
            logger.debug("a warning is sent as its text: %s", error_text(error))
            text = error_text(message) if isinstance(message, Warning) else message
            self.send(Warned(text))

    @property
    def cancellation(self) -> Cancellation:
        """By which the parent asks for the search's end."""
        return _ByParent(self.pulse)


class _ByParent(Cancellation):
    """The parent's, as its worker sees it."""

    def __init__(self, pulse: MutableSequence[int]) -> None:
        super().__init__()
        self._pulse = pulse

    @property
    def is_requested(self) -> bool:
        """See `Cancellation`."""
        return bool(self._pulse[STOP])


_reports: list[Reports] = []  # of this process, if it is a worker


def reports() -> Reports | None:
    """Return how this process tells its parent what it is at; `None` if it is no worker."""
    return _reports[0] if _reports else None


def begin_serving(
    pipe: Connection, pulse: MutableSequence[int], environ: dict[str, str], leads: bool, parent: int
) -> None:
    """Make a worker of this process.

    Args:
        pipe: To the parent.
        pulse: What is shared with it.
        environ: Variables to set.
        leads: Whether the parent is no worker itself.
        parent: The parent's process.
    """
    if leads:
        os.setsid()  # Ctrl-C is the parent's to handle, and what it starts ends with its group
    else:
        os.setpgid(0, 0)  # a worker's own worker is ended with it, as part of its session, or alone, with its children
    end_with(parent)
    ignore_interrupts()
    outputs.to_standard_error()  # results on stdout are the parent's to print
    settings.share_device(environ)
    settings.unknown_variables_are_told()
    _reports.append(Reports(pipe, pulse, Outputs(is_ours=True)))
    warnings.showwarning = _reports[0].warn
    threading.Thread(target=_wake_up, args=(pulse,), name="ejkernel-awake", daemon=True).start()


def _wake_up(pulse: MutableSequence[int]) -> None:
    while True:
        time.sleep(WAKE_UP)
        pulse[WAKES] += 1


def write_to(path: str) -> None:
    """Have this worker write all that it prints to a file, from now on."""
    outputs.send_to(path)
    mine = _reports[0]
    mine.outputs.close()
    _reports[0] = dataclasses.replace(mine, outputs=Outputs(is_ours=True))


def serve() -> None:
    """Carry out what the parent sends, until it closes the pipe."""
    mine = _reports[0]
    while True:
        try:
            request = read_message(mine.pipe)
        except (EOFError, OSError):  # or a candidate has closed it; the parent knows by now
            return
        answer = carried_out(request)
        try:
            mine.send(answer)
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # pickle raises any of these
            mine.send(Raised(_unsendable(error)))


def carried_out(sent: bytes) -> Returned | Raised:
    """Return what comes of a pickled `Request`."""
    try:
        request: Request = unpickled(sent)
    except BaseException as error:  # noqa: BLE001 - such as of a class that is not where its name says
        return Raised(_unsendable(error))
    try:
        return Returned(request.function(*request.args))
    except BaseException as error:  # noqa: BLE001 - it is raised in the parent
        return Raised(sendable(error))


def pickled(value: object) -> bytes:
    """Return what a worker is told of `value`.

    Raises:
        TuningError: it cannot be pickled.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise _unsendable(error) from error


def unpickled(data: bytes) -> Any:
    """Return what our own parent or child has pickled, or the other end of a task that an executor has brought."""
    return pickle.loads(data)  # noqa: S301 - nobody else writes to what is between them


def _unsendable(error: BaseException) -> TuningError:
    return TuningError(
        f"this cannot be sent to a worker process, or back: {error_text(error)}. Kernels and their "
        "configurations must be defined at the top of a module; or tune in this process (isolate=False, "
        "compile_processes=0, and no executor)."
    )


def sendable(error: BaseException) -> BaseException:
    """Return the error, or its text if it cannot be pickled.

    `KeyboardInterrupt` is a text too: raised by what was carried out, it is not the user's, who is the parent's.
    """
    if not isinstance(error, Exception | SystemExit):
        return TuningError(error_text(error))
    error.add_note(f"in the worker:\n{traceback_text(error)}")
    bare = error.with_traceback(None)
    try:
        unpickled(pickle.dumps(bare))
    except BaseException as refused:  # noqa: BLE001 - then its text has to do
        logger.debug("an error is sent as its text: %s", error_text(refused))
        return TuningError(error_text(error))
    return bare
