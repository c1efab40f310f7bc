# SPDX-License-Identifier: Apache-2.0
"""Processes of their own for measurements and answers: a crash or a deadlock of a kernel costs only its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any


def run_apart(module: str, *arguments: str, seconds: float, xla_flags: str = "") -> tuple[list[str], str]:
    """Run `python -m module arguments`, and end it after `seconds`.

    Args:
        module: The module, e.g. `benchmarks.grouped_matmul`.
        arguments: Its arguments.
        seconds: The time limit.
        xla_flags: Flags of XLA, in addition to those of this process.

    Returns:
        The lines that the process printed, and why it failed: its last message, or the time limit. The reason is empty
        after success.
    """
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several share the device's memory
    if xla_flags:
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}"
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environment)
    except subprocess.TimeoutExpired as expired:
        # bytes, although the pipe was opened as text
        return (expired.stdout or b"").decode().splitlines(), f"it took more than {seconds:.0f} s"
    reason = (
        (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1][:300] if done.returncode else ""
    )
    return done.stdout.splitlines(), reason


class AnsweringProcess:
    """A process that answers, started for the first question; another one takes its place if it ends.

    Args:
        module: The module of this package that it runs.
        option: The option with which the module answers.
        environment: Further variables of the process.
        seconds: The time limit of an answer.
        name: What errors call the process.
    """

    def __init__(self, module: str, option: str, environment: Mapping[str, str], seconds: float, name: str) -> None:
        self._command = [sys.executable, "-m", f"benchmarks.{module}", option]
        self._environment, self._seconds, self._name = environment, seconds, name
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, question: Any) -> dict[str, Any]:
        """Return the answer, or an error."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        is_over = threading.Event()

        def end() -> None:
            is_over.set()
            process.kill()

        limit = threading.Timer(self._seconds, end)
        limit.start()
        answer = process.stdout.readline()
        limit.cancel()
        if not answer:
            self._process = None
            return {"error": self._why_it_ended(process, is_over.is_set())}
        found: dict[str, Any] = json.loads(answer)
        return found

    def _why_it_ended(self, process: subprocess.Popen[str], took_too_long: bool) -> str:
        """Return the reason and the most memory that the process used, which tells a full memory from a crash.

        Linux counts the memory of this process, too, as it was when the other one started.
        """
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        with process:  # closes its pipes
            pass
        how = f"took more than {self._seconds:.0f} s" if took_too_long else f"ended with {process.returncode}"
        return f"{self._name} {how}, and used up to {usage.ru_maxrss / 2**20:.1f} GiB"

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                env=os.environ | self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self._process

    def end(self) -> None:
        """End the process; the next question starts a new process."""
        if self._process is not None:
            with self._process:  # closes its pipes, which ends it
                pass
        self._process = None
