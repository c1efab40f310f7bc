# SPDX-License-Identifier: Apache-2.0
"""Parallel compilation in processes, without contention for the interpreter lock; a crash costs one candidate.

Threads suffice if XLA does the work. Some kernels, especially for GPUs, spend their compile time in Python, which
holds the lock. A compile process needs a description of the device (`targets.py`), but no device.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import queue
import re
import sys
import tempfile
import weakref
from collections.abc import Callable

from ejkernel import compat, settings
from ejkernel.ops.autotuner.compile.targets import Target, compile_for
from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout, GivenUpError, default_width
from ejkernel.ops.autotuner.process.outputs import flush
from ejkernel.ops.autotuner.process.serve import reports
from ejkernel.ops.autotuner.process.supervisor import WorkerDiedError, WorkerSilentError, WorkerStatus
from ejkernel.ops.autotuner.process.threads import in_callers_context
from ejkernel.ops.autotuner.process.worker import Worker, WorkerSlot, of_session
from ejkernel.ops.autotuner.trials.candidates import Program, is_first
from ejkernel.ops.core.context import Scope, current_scope, entered
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import CandidateError, TuningError
from ejkernel.ops.utils.error_text import error_text, printable
from ejkernel.ops.utils.fingerprint import default_device

logger = logging.getLogger(__name__)

_SPILLED = re.compile(r"(\d+) bytes spill stores")
# Log lines of XLA without errors, and remarks of ptxas. The remark "Potential out of bound access while accessing
# symbol '__dynamic_shmem__0'" is harmless: Mosaic GPU declares dynamic shared memory as a symbol of one byte and passes
# its size at launch, so ptxas remarks on every constant address in it.
_CHATTER = re.compile(r"[IW]\d{4} |ptxas (\S+, line \d+; )?(info|warning)\b|\s*\d+ bytes stack frame")
_FAULT = re.compile(r"^F\d{4} |Check failed")  # the reason of a crash, among other lines


class CompileWorker(Worker):
    """A worker process that compiles one program at a time; a crash therefore identifies its candidate.

    Args:
        is_quiet: Whether to log its output rather than write it to standard error: a simulator often crashes, and
            prints the stacks of its threads.
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        # The GPU compilers report register spills (Mosaic GPU's if `MOSAIC_GPU_DUMP_PTXAS` is set, XLA's as a log
        # message) and the reason of a crash only in their output. One program per process at a time makes the output
        # attributable. A file and not a pipe: a compiler that dumps a module while it holds the interpreter lock would
        # wait forever for the reading thread.
        self._output, path = tempfile.mkstemp(prefix="ejkernel-compiler-")
        weakref.finalize(self, os.close, self._output)
        try:
            super().__init__(output=path)
            self.call(_prepare)
        except WorkerDiedError as death:
            raise TuningError(f"a compile process does not start: {death}") from None
        finally:
            os.unlink(path)
            if self.is_busy:
                self.kill(wait=False)

    def compile(self, work: Callable[[], Program], allowed: float | Callable[[], float]) -> Program:
        """Run `work` in the process; return its program with the register spills."""
        try:
            doing = WorkerStatus(what="compiling", allowed=allowed)
            program: Program = self.call(_carry_out, work, current_scope(), doing=doing)
        except WorkerDiedError as death:
            said = sorted(self._passed_on()[1], key=lambda line: not _FAULT.search(line))
            kind = GivenUpError if isinstance(death, WorkerSilentError) else CandidateError
            raise kind(": ".join([str(death), *said[:1]])) from None
        except BaseException:
            self._passed_on()
            raise
        spilled = map(int, _SPILLED.findall(self._passed_on()[0]))
        return dataclasses.replace(program, spilled=max(spilled, default=0))

    def _passed_on(self) -> tuple[str, list[str]]:
        """Return the output of the process since the last call, and its lines without the compilers' remarks.

        Remarks are logged, all other lines are written to this process's standard error.
        """
        written, lines = self._written(), []
        for line in filter(str.strip, written.splitlines()):
            is_remark = _CHATTER.match(line) is not None
            if not is_remark:
                lines.append(line)
            if self._is_quiet or is_remark:
                logger.debug("a compiler wrote: %s", printable(line))
            else:
                sys.stderr.write(f"{line}\n")
        return written, lines

    def _written(self) -> str:
        data = os.pread(self._output, os.fstat(self._output).st_size, 0)
        os.ftruncate(self._output, 0)
        return data.decode(errors="replace")


class CompileProcesses:
    """A pool of compile processes. A process that dies or exceeds its deadline is replaced.

    Args:
        count: Maximum number of processes; each starts on demand.
        make: Starts a process.
    """

    def __init__(self, count: int, make: Callable[[], CompileWorker] = CompileWorker) -> None:
        self._slots = [WorkerSlot(make) for _ in range(count)]
        self._idle: queue.LifoQueue[WorkerSlot[CompileWorker]] = queue.LifoQueue()  # prefers warm processes
        for slot in self._slots:
            self._idle.put(slot)
        self._is_closed = False

    def run(
        self,
        work: Callable[[], Program],
        allowed: float | Callable[[], float] = 600.0,
        busy: set[CompileWorker] | None = None,
    ) -> Program:
        """Return the program of `work`, e.g. a partial `compile_for`, with its register spills. Thread-safe.

        Args:
            work: The work, carried out in a process.
            allowed: Seconds after which the process is killed; a function if they change.
            busy: Contains the process while it works.

        Raises:
            CandidateError: The candidate crashed its process, or exceeded its deadline (`GivenUpError`).
            TuningError: The call cannot be pickled, or the pool is closed.
        """
        busy = set() if busy is None else busy
        slot = self._idle.get()
        try:
            if self._is_closed:
                raise TuningError("the compile processes were closed.")
            with slot.lent() as process:
                busy.add(process)
                try:
                    return process.compile(work, allowed)
                finally:
                    busy.discard(process)
        finally:
            self._idle.put(slot)

    def close(self) -> None:
        """Close the pool and its processes."""
        self._is_closed = True
        for slot in self._slots:
            slot.abandon()


def _prepare() -> None:
    """Log register spills, and keep this process from opening devices."""
    settings.log_register_spills()
    # Some accelerators admit one process only; on others the first process takes most of the memory.
    compat.settings.leave_devices_alone()
    compat.settings.forget_compilations()


def _carry_out(work: Callable[[], Program], scope: Scope) -> Program:
    mine = reports()
    assert mine is not None  # this runs only in workers
    try:
        with entered(scope):
            return in_callers_context(work, deeper=True)()  # deeper: kernels inside the kernel are not tuned
    except Exception:
        raise
    except BaseException as error:  # noqa: BLE001 - a plain KeyboardInterrupt would look like the user's Ctrl-C
        raise CandidateError(error_text(error)) from None
    finally:
        flush()
        mine.outputs.mend(is_idle=True)


def compile_processes(count: int, *, simulate: bool = False) -> CompileProcesses:
    """Return the session's pool of `count` compile processes, or of processes that simulate (see `worker_session`)."""
    # A process takes seconds to start, so pools last for a session.
    make = functools.partial(CompileWorker, is_quiet=simulate)
    return of_session(f"{'simulate' if simulate else 'compile'}-{count}", lambda: CompileProcesses(count, make))


def usual_processes(target: Target | None) -> int:
    """Return the default number of compile processes: one per core for GPU kernels, which spend long in Python."""
    return default_width() if target is not None and target.description and target.platform == "gpu" else 0


class Compiler:
    """Compiles the candidates of one search in processes; see `Preparation.compile_elsewhere`.

    Args:
        target: The device to compile for.
        count: Number of processes in the session's pool.
        timeout: Deadline of one compilation.
        left: Returns the remaining seconds of the search.
    """

    def __init__(self, target: Target, count: int, timeout: AdaptiveTimeout, left: Callable[[], float]) -> None:
        self._target = target
        self._processes = compile_processes(count)
        self._timeout = timeout
        self._left = left
        self._busy: set[CompileWorker] = set()

    def __call__(self, inv: Invocation[Cfg, Out], choice: Choice) -> Program | None:
        """Return the program; `None` if the measuring process must compile it."""
        try:
            work = functools.partial(compile_for, inv, choice, self._target)
            program = self._processes.run(work, lambda: self._timeout.within(self._left()), self._busy)
        except GivenUpError as error:
            error.for_budget = self._timeout.within(self._left()) < self._timeout.seconds
            raise
        return None if program.why_left else program

    def close(self) -> None:
        """Kill the processes that still work for this search."""
        for process in list(self._busy):
            process.kill(wait=False)


def compiler_for(device: str, count: int, timeout: AdaptiveTimeout, left: Callable[[], float]) -> Compiler | None:
    """Return a `Compiler` for `device` with `count` processes.

    `None` if `count` is 0, the device has no target description, or it is not the first device. Also `None` for TPUs:
    no TPU has run a program that another process compiled for its topology.
    """
    target = Target.of(device)
    if count < 1 or target is None or target.platform == "tpu" or not is_first(default_device()):
        return None
    return Compiler(target, count, timeout, left)
