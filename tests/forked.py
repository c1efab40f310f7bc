# SPDX-License-Identifier: Apache-2.0
"""Runs Python programs like `subprocess.run`, in forks of a process that has imported JAX and this package.

A test of a program's start, its interruption or its signals needs a real start.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_PATH = os.pathsep.join(filter(None, sys.path))  # before tests add their own folders


@functools.cache
def _server():
    """Start the server of this process."""
    command = [sys.executable, str(Path(__file__).with_name("fork_server.py"))]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL")}
    environment = clean | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": _PATH}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def stop():
    """End a running server, and wait until it has written its coverage."""
    if _server.cache_info().currsize:
        _server().communicate()
        _server.cache_clear()


def python(folder, *arguments, **environment):
    """Run `python *arguments` in a folder, with these variables of this package and no others.

    Returns:
        The status, standard output and standard error, as `subprocess.run` does.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL")}
    server = _server()
    with tempfile.TemporaryDirectory() as outputs:
        paths = [Path(outputs, name) for name in ("stdout", "stderr")]
        for path in paths:
            path.touch()
        request = {
            "arguments": arguments,
            "folder": str(folder),
            "environment": clean | {"JAX_PLATFORMS": "cpu"} | environment,
            "outputs": [str(path) for path in paths],
        }
        server.stdin.write(json.dumps(request).encode() + b"\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, *(path.read_text() for path in paths))
