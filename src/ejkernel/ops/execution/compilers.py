# SPDX-License-Identifier: Apache-2.0
"""Processes that compile: Python's lock does not slow them, and what ends one costs one candidate."""

from __future__ import annotations

import dataclasses
import functools
import os
import queue
import re
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from ejkernel import compat, settings
from ejkernel.ops.core.context import Scope, current_scope, entered
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.nodes import Choice
from ejkernel.ops.errors import CandidateError
from ejkernel.ops.execution.ahead import LEFT, Made, compile_for
from ejkernel.ops.execution.compiling import default_width
from ejkernel.ops.execution.targets import Target
from ejkernel.ops.execution.threads import carried
from ejkernel.ops.execution.workers import Doing, Worker, WorkerDiedError, at_end
from ejkernel.ops.utils.fingerprint import default_device

_SPILLED = re.compile(r"(\d+) bytes spill stores")
_CHATTER = re.compile(r"I\d{4} |ptxas (info|warning)\b|\s*\d+ bytes stack frame|\s*$")


class CompileProcesses:
    """Processes that compile one program at a time each; one that dies or takes too long is replaced.

    Args:
        count: How many there are at most; each is started when it is needed.
    """

    def __init__(self, count: int) -> None:
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()  # one that is warm first
        for _ in range(count):
            self._idle.put(None)
        self._started: list[_Process] = []

    def compile(
        self,
        inv: Invocation[Any, Any],
        choice: Choice,
        target: Target,
        *,
        only_once: bool = False,
        allowed: float = 600.0,
    ) -> Made:
        """Return what `compile_for` returns, and how much the program spills; any number of threads may ask.

        Args:
            inv, choice, target, only_once: See `compile_for`.
            allowed: Seconds after which the process is ended.

        Raises:
            CandidateError: it ended its process, or took too long.
            TuningError: the call cannot be sent to another process.
        """
        process = self._idle.get()
        try:
            if process is None:
                process = _Process()
                self._started.append(process)
            return process.compile(functools.partial(compile_for, inv, choice, target, only_once=only_once), allowed)
        finally:
            if process is not None and process.is_lost:
                self._started.remove(process)
                process.close()
                process = None
            self._idle.put(process)

    def close(self) -> None:
        """End the processes."""
        while self._started:
            self._started.pop().close()


class _Process:
    """One process that compiles.

    What it writes goes to a file: compilers tell nowhere else of spills, and of why they end the process.
    """

    def __init__(self) -> None:
        descriptor, path = tempfile.mkstemp(prefix="ejkernel-compiler-")
        self._output = os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")
        self._worker = Worker()
        try:
            self._worker.call(_prepare, path)
        except BaseException:
            self.close()
            raise
        finally:
            os.unlink(path)

    @property
    def is_lost(self) -> bool:
        """Whether it can be asked no more."""
        return self._worker.is_busy

    def compile(self, work: Callable[[], Made], allowed: float) -> Made:
        """Return what `work` returns in the process, and how much the program spills."""
        try:
            doing = Doing(what="compiling", allowed=allowed)
            made: Made = self._worker.call(_carry_out, work, current_scope(), doing=doing)
        except WorkerDiedError as death:
            said = self._pass_on(self._written())
            raise CandidateError(": ".join([str(death), *said[:1]])) from None
        except BaseException:
            self._pass_on(self._written())
            raise
        written = self._written()
        self._pass_on(written)
        return dataclasses.replace(made, spilled=max(map(int, _SPILLED.findall(written)), default=0))

    def _written(self) -> str:
        """Return what the process wrote since the last time."""
        self._output.seek(0)
        text = self._output.read()
        self._output.truncate(0)
        return text

    def _pass_on(self, written: str) -> list[str]:
        """Write to this process's standard error what is not mere chatter, and return its lines."""
        lines = [line for line in written.splitlines() if not _CHATTER.match(line)]
        sys.stderr.writelines(f"{line}\n" for line in lines)
        return lines

    def close(self) -> None:
        """End it."""
        if self.is_lost:
            self._worker.kill()
        else:
            self._worker.close()
        self._output.close()


def _prepare(output: str) -> None:
    """Have this process write to `output`, and leave the devices to others."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)
    settings.tell_of_spills()
    compat.leave_devices_alone()


def _carry_out(work: Callable[[], Made], scope: Scope) -> Made:
    try:
        with entered(scope):
            return carried(work, deeper=True)()  # a kernel in a kernel is not to be tuned here
    finally:
        sys.stdout.flush()


@functools.cache
def compile_processes(count: int) -> CompileProcesses:
    """Return this process's `count` processes that compile."""
    processes = CompileProcesses(count)
    at_end(processes.close)
    return processes


def usual_processes(target: Target | None) -> int:
    """Return how many processes are worth their start: one a core for GPU kernels, which take long in Python."""
    return default_width() if target is not None and target.description else 0


def compiler_for(device: str, count: int) -> Callable[[Invocation[Any, Any], Choice, float], Made | None] | None:
    """Return what compiles calls for `device` in `count` processes, as `Bench.compile_elsewhere` wants it.

    `None`, if there are no processes, or nobody has described the device to them, or it is not the first.
    """
    target = Target.of(device)
    if count < 1 or target is None or default_device().id != 0:
        return None

    def compile_elsewhere(inv: Invocation[Any, Any], choice: Choice, allowed: float) -> Made | None:
        made = compile_processes(count).compile(inv, choice, target, allowed=allowed)
        return None if made.status == LEFT else made

    return compile_elsewhere
