# SPDX-License-Identifier: Apache-2.0
"""A process of a benchmark that answers questions, one JSON line each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any


class AnsweringProcess:
    """A process that answers, started for the first question; another one takes its place if it ends.

    Args:
        module: The module of this package that it runs.
        option: The option with which the module answers.
        environment: Further variables of the process.
        seconds: The time limit of an answer.
        ended: The error if the process ends, with `{}` for its exit status.
    """

    def __init__(self, module: str, option: str, environment: Mapping[str, str], seconds: float, ended: str) -> None:
        self._command = [sys.executable, "-m", f"benchmarks.{module}", option]
        self._environment, self._seconds, self._ended = environment, seconds, ended
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, question: Any) -> dict[str, Any]:
        """Return the answer, or an error."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        limit = threading.Timer(self._seconds, process.kill)
        limit.start()
        answer = process.stdout.readline()
        limit.cancel()
        if not answer:
            self._process = None
            return {"error": self._ended.format(process.wait())}
        found: dict[str, Any] = json.loads(answer)
        return found

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
        """End the process; the next question starts another one."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
        self._process = None
