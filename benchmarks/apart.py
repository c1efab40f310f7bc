# SPDX-License-Identifier: Apache-2.0
"""Measurements in a process of their own: a crash or a deadlock of a kernel costs only that process."""

from __future__ import annotations

import os
import subprocess
import sys


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
    reason = (done.stderr.strip().splitlines() or ["it ended"])[-1][:300] if done.returncode else ""
    return done.stdout.splitlines(), reason
