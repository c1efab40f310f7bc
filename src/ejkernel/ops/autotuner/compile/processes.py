# SPDX-License-Identifier: Apache-2.0
"""Processes that compile: Python's lock does not slow them, and what ends one costs one candidate.

Threads do where compiling is XLA's work. Some kernels, those of GPUs above all, spend their time in Python, where the
lock is held. A process needs a description of the device (`targets.py`), and no device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import queue
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

from ejkernel import compat, settings
from ejkernel.ops.autotuner.compile.ahead_of_time import compile_for
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout, GivenUpError, default_width
from ejkernel.ops.autotuner.process.outputs import flush
from ejkernel.ops.autotuner.process.serve import reports, write_to
from ejkernel.ops.autotuner.process.threads import in_callers_context
from ejkernel.ops.autotuner.process.worker import (
    Worker,
    WorkerDiedError,
    WorkerSilentError,
    WorkerStatus,
    at_session_end,
)
from ejkernel.ops.autotuner.trials.programs import Program, is_first
from ejkernel.ops.core.context import Scope, current_scope, entered
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import CandidateError, TuningError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.fingerprint import default_device
from ejkernel.ops.utils.printable import printable

logger = logging.getLogger(__name__)

_SPILLED = re.compile(r"(\d+) bytes spill stores")
# Log lines of XLA that report no error, and ptxas's remarks. One of these is harmless although it reads badly:
# "Potential out of bound access while accessing symbol '__dynamic_shmem__0'". Mosaic GPU declares dynamic shared memory
# as a symbol of one byte and passes its size at the launch, so that ptxas remarks on every constant address in it.
_CHATTER = re.compile(r"[IW]\d{4} |ptxas (\S+, line \d+; )?(info|warning)\b|\s*\d+ bytes stack frame")


class CompileProcesses:
    """Processes that compile one program at a time each; one that dies or takes too long is replaced.

    One at a time, so that it is known who ended a process, and one that hangs can be ended alone.

    Args:
        count: How many there are at most; each is started when it is needed.
    """

    def __init__(self, count: int) -> None:
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()  # one that is warm first
        for _ in range(count):
            self._idle.put(None)
        self._lock = threading.Lock()
        self._started: set[_Process] = set()
        self._is_closed = False

    def compile(
        self,
        inv: Invocation[Cfg, Out],
        choice: Choice,
        target: Target,
        *,
        only_once: bool = False,
        allowed: float | Callable[[], float] = 600.0,
        busy: set[_Process] | None = None,
    ) -> Program:
        """Return what `compile_for` returns, and how much the program spills; any number of threads may ask.

        Args:
            inv, choice, target, only_once: See `compile_for`.
            allowed: Seconds after which the process is ended; a function, if they change.
            busy: Has the process in it as long as it works.

        Raises:
            CandidateError: it ended its process, or took too long, which is a `GivenUpError`.
            TuningError: the call cannot be sent to another process, or there are no processes any more.
        """
        process = self._idle.get()
        try:
            if process is not None and process.is_lost:  # while it was idle
                self._drop(process)
                process = None
            if process is None:
                process = self._new()
            work = functools.partial(compile_for, inv, choice, target, only_once=only_once)
            with process.noted_in(set() if busy is None else busy):
                return process.compile(work, allowed)
        finally:
            if process is not None and process.is_lost:
                self._drop(process)
                process = None
            self._idle.put(process)

    def _new(self) -> _Process:
        process = _Process()
        with self._lock:
            is_closed = self._is_closed
            self._started.add(process)
        if is_closed:
            self._drop(process)
            raise TuningError("the processes that compile were closed meanwhile.")
        return process

    def _drop(self, process: _Process) -> None:
        with self._lock:
            is_mine = process in self._started  # else another thread was faster
            self._started.discard(process)
        if is_mine:
            process.close()

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._is_closed = True
            started = list(self._started)
        for process in started:
            process.end()
        for process in started:
            self._drop(process)


class _Process:
    """One process that compiles.

    What it writes goes to a file: compilers tell nowhere else of spills, and of why they end the process.
    """

    def __init__(self) -> None:
        self._worker = Worker(is_leaf=True)
        try:
            self._worker.call(os.getpid)  # it takes seconds to start, and the file is there for no longer than needed
            # To its output, and nowhere else, the GPU's compilers say how many registers a program spills (Mosaic GPU's
            # when `MOSAIC_GPU_DUMP_PTXAS` is set, XLA's as a log message), and why they end the process. In a process
            # of several programs it could not be told whose is meant. It is a file, and no pipe: a compiler that dumps
            # a module while it holds Python's lock would wait for ever for a thread that reads.
            descriptor, path = tempfile.mkstemp(prefix="ejkernel-compiler-")
            self._output = os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")
            try:
                self._worker.call(_prepare, path)
            finally:
                os.unlink(path)
        except WorkerDiedError as death:
            raise TuningError(f"a process that compiles does not start: {death}") from None
        except BaseException:
            self.end()
            raise

    @property
    def is_lost(self) -> bool:
        """Whether it can be asked no more."""
        return self._worker.is_busy or not self._worker.is_alive

    @contextlib.contextmanager
    def noted_in(self, busy: set[_Process]) -> Iterator[None]:
        """Be among those that are busy, inside the `with` block."""
        busy.add(self)
        try:
            yield
        finally:
            busy.discard(self)

    def compile(self, work: Callable[[], Program], allowed: float | Callable[[], float]) -> Program:
        """Return what `work` returns in the process, and how much the program spills."""
        try:
            doing = WorkerStatus(what="compiling", allowed=allowed)
            program: Program = self._worker.call(_carry_out, work, current_scope(), doing=doing)
        except WorkerDiedError as death:
            said = self._pass_on(self._written())
            kind = GivenUpError if isinstance(death, WorkerSilentError) else CandidateError
            raise kind(": ".join([str(death), *said[:1]])) from None
        except BaseException:
            self._pass_on(self._written())
            raise
        written = self._written()
        self._pass_on(written)
        return dataclasses.replace(program, spilled=max(map(int, _SPILLED.findall(written)), default=0))

    def _written(self) -> str:
        """Return what the process wrote since the last time."""
        self._output.seek(0)
        text = self._output.read()
        self._output.truncate(0)
        return text

    def _pass_on(self, written: str) -> list[str]:
        """Log the compilers' remarks, write all other lines to this process's standard error, and return those."""
        lines = []
        for line in filter(str.strip, written.splitlines()):
            if _CHATTER.match(line):
                logger.debug("a compiler wrote: %s", printable(line))
            else:
                lines.append(line)
        sys.stderr.writelines(f"{line}\n" for line in lines)
        return lines

    def end(self) -> None:
        """End it at once."""
        self._worker.kill(wait=False)

    def close(self) -> None:
        """End it, and let go of what it wrote."""
        self._worker.kill()
        self._output.close()


def _prepare(output: str) -> None:
    """Have this process write to `output`, and leave the devices to others."""
    write_to(output)
    settings.tell_of_spills()
    # An accelerator may be open to one process alone, or have most of its memory taken by the first.
    compat.leave_devices_alone()
    compat.forget_compilations()


def _carry_out(work: Callable[[], Program], scope: Scope) -> Program:
    mine = reports()
    assert mine is not None  # only workers are sent here
    try:
        with entered(scope):
            return in_callers_context(work, deeper=True)()  # a kernel in a kernel is not to be tuned here
    except Exception:
        raise
    except BaseException as error:  # noqa: BLE001 - as it is it would be taken for the user's Ctrl-C
        raise CandidateError(error_text(error)) from None
    finally:
        flush()
        mine.outputs.mend(is_idle=True)


_pools: dict[int, CompileProcesses] = {}
_guard = threading.Lock()


def compile_processes(count: int) -> CompileProcesses:
    """Return the session's `count` processes that compile (see `worker_session`)."""
    with _guard:
        # To start one takes seconds, so they last for a program's searches, or a worker's life.
        if count not in _pools:
            _pools[count] = CompileProcesses(count)
            at_session_end(functools.partial(_close, count))
        return _pools[count]


def _close(count: int) -> None:
    with _guard:
        processes = _pools.pop(count)
    processes.close()


def usual_processes(target: Target | None) -> int:
    """Return how many processes are worth their start: one a core for GPU kernels, which take long in Python."""
    return default_width() if target is not None and target.description else 0


class Compiler:
    """Compiles the candidates of one search in processes; see `Preparation.compile_elsewhere`.

    Args:
        target: What for.
        count: How many processes the session has.
        timeout: How long one may take.
        left: The seconds that are left for the search.
    """

    def __init__(self, target: Target, count: int, timeout: AdaptiveTimeout, left: Callable[[], float]) -> None:
        self._target = target
        self._processes = compile_processes(count)
        self._timeout = timeout
        self._left = left
        self._busy: set[_Process] = set()

    def __call__(self, inv: Invocation[Cfg, Out], choice: Choice) -> Program | None:
        """Return the program; `None` if it must be compiled where it runs."""
        try:
            program = self._processes.compile(
                inv, choice, self._target, allowed=lambda: self._timeout.within(self._left()), busy=self._busy
            )
        except GivenUpError as error:
            error.for_budget = self._timeout.is_short(self._left())
            raise
        return None if program.why_left else program

    def close(self) -> None:
        """End the processes that are still at work: nobody waits for them any more."""
        for process in list(self._busy):
            process.end()


def compiler_for(device: str, count: int, timeout: AdaptiveTimeout, left: Callable[[], float]) -> Compiler | None:
    """Return what compiles calls for `device` in `count` processes; for the time that each may take, see `Compiler`.

    `None`, if there are no processes, or nobody has described the device to them, or it is not the first.
    """
    target = Target.of(device)
    if count < 1 or target is None or not is_first(default_device()):
        return None
    return Compiler(target, count, timeout, left)
