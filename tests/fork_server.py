# SPDX-License-Identifier: Apache-2.0
"""A process that imports JAX and this package once, and runs Python programs in forks of itself.

The import takes more than a second, so tests that start many programs use this process through `tests.forked`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import warnings

import jax  # noqa: F401 - imported for the forks

# Commands import their modules only when they run, so each fork would.
for _name in ("cli.app", "cli.elsewhere", "cli.explain", "cli.report_page", "cli.show", "cli.tune", "modules"):
    importlib.import_module(f"ejkernel.{_name}")
importlib.import_module("ejkernel.ops.autotuner.tasks.isolated")


def main():
    """Run each request of standard input in a fork; answer with its exit status."""
    gc.collect()
    gc.freeze()  # otherwise a fork's last collection copies and visits all that was imported, for a third of a second
    while line := request():
        with warnings.catch_warnings(action="ignore"):  # JAX warns of forks, because its devices have threads
            pid = os.fork()
        if pid == 0:
            return become(**json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(1, f"{status}\n".encode())
    return None


def request():
    """Return the next line, without reading further; empty at the end."""
    line = b""
    while not line.endswith(b"\n"):
        if not (read := os.read(0, 1 << 16)):
            return b""
        line += read
    return line


def become(arguments, folder, environment, outputs):
    """Run as `python *arguments`, in `folder`."""
    for number, path in enumerate([os.devnull, *outputs]):
        source = os.open(path, os.O_RDWR)
        os.dup2(source, number)
        os.close(source)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    kind, *others = arguments
    match kind:
        case "-m":
            sys.path[0], sys.argv[:] = folder, others
            runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        case "-c":
            sys.path[0], sys.argv[:] = "", ["-c", *others[1:]]
            exec(others[0], vars(sys.modules["__main__"]))
        case _:
            sys.path[0], sys.argv[:] = folder, arguments
            runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main()
