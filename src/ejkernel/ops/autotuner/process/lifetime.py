# SPDX-License-Identifier: Apache-2.0
"""Processes that end with the one that started them, whatever they are at, and where they look for modules."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import os
import queue
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker, spawn, util
from pathlib import Path
from typing import Any

_LOOK = 1.0  # seconds between two looks at whether the parent is there
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have this process end when its parent does.

    Linux sees to it. Elsewhere a thread does, which cannot where another one keeps the interpreter's lock.

    Args:
        parent: Who started this process, which may be gone by now.
    """
    # A thread of ours cannot run while a kernel keeps the interpreter's lock.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_look_after, args=(parent,), daemon=True).start()


def _look_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)


class _Starter:
    """A thread that starts processes, and lasts as long as this process: Linux ends them with the *thread*.

    What it starts has Ctrl-C blocked, so that none comes before the process can see to it: a terminal sends it to all
    of its group, which a process leaves only when it runs Python of ours. What came meanwhile is dropped.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="ejkernel-starter", daemon=True).start()

    def __call__(self, start: Callable[[], Any]) -> None:
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._asked.put((start, future))
        future.result()

    def _serve(self) -> None:
        while True:
            start, future = self._asked.get()
            try:
                with _safe_path():
                    resource_tracker.ensure_running()  # some versions of Python unblock Ctrl-C when they start it
                    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
                    start()
            except BaseException as error:  # noqa: BLE001 - whoever asked decides
                future.set_exception(error)
            else:
                future.set_result(None)
            del start, future  # or they would live until somebody asks again


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Start Python processes inside the `with` block so that they import nothing of the user's folders to start.

    `multiprocessing` starts them with `python -c`, which looks for modules in the working directory first, until the
    child has the path of this process: a `threading.py` there would run. With `-P` it does not look there.
    """
    flags, prepared = util._args_from_interpreter_flags, spawn.get_preparation_data  # type: ignore[attr-defined]

    def with_users_last(name: str) -> dict[str, Any]:
        data = prepared(name)
        return data | {"sys_path": _with_users_last(data["sys_path"])}

    # Neither has a public way; both are read where a process is started.
    util._args_from_interpreter_flags = lambda: [*flags(), "-P"]  # type: ignore[attr-defined]
    spawn.get_preparation_data = with_users_last
    try:
        yield
    finally:
        util._args_from_interpreter_flags = flags  # type: ignore[attr-defined]
        spawn.get_preparation_data = prepared


_starters: dict[int, _Starter] = {}
_guard = threading.Lock()


def start_process(start: Callable[[], Any]) -> None:
    """Start a process that may call `end_with`, by calling `start`, whichever thread asks."""
    with _guard:
        starter = _starters.get(os.getpid())  # after a fork it is another one
        if starter is None:
            starter = _starters[os.getpid()] = _Starter()
    starter(start)


_of_parents: list[object] = []


def begin_anew_in_forks(begin_anew: Callable[[], object]) -> None:
    """Have each fork of this process call `begin_anew`, which leaves what is the parent's, and returns it.

    It is kept: what is collected is closed, and would be closed for the parent.
    """
    os.register_at_fork(after_in_child=lambda: _of_parents.append(begin_anew()))


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent, for good."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


# --- where modules are found ---

# Folders of the user's modules that this process, or the one that started it, has added to `sys.path`. They may have
# a `threading.py` or a `numpy.py`. So Python's own library is found before them; a worker process that starts finds JAX
# and NumPy before them, too.
_folders: list[str] = []


def look_in(folder: Path) -> None:
    """Let modules of a folder be found, before installed packages of the same name, and after Python's own library."""
    name = str(folder)
    if name in sys.path:
        return
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}
    own |= {os.path.join(place, "lib-dynload") for place in own}
    sys.path.insert(max((index + 1 for index, place in enumerate(sys.path) if place in own), default=0), name)
    _folders.append(name)


def _with_users_last(paths: Sequence[str]) -> list[str]:
    """Return a list such as `sys.path` with the folders that `look_in` has added behind all others."""
    return [*(name for name in paths if name not in _folders), *(name for name in paths if name in _folders)]


def module_path() -> tuple[list[str], list[str]]:
    """Return where this process looks for modules, for `use_module_path` in another one."""
    return list(sys.path), list(_folders)


def use_module_path(path: tuple[list[str], list[str]]) -> None:
    """Look for modules where another process does, by its `module_path`."""
    sys.path[:], _folders[:] = [name or os.getcwd() for name in path[0]], path[1]
