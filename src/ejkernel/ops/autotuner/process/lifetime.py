# SPDX-License-Identifier: Apache-2.0
"""Processes that end together with their parent, and their module search path."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import os
import queue
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, spawn, util
from pathlib import Path
from typing import Any, TypeVar

_LOOK = 1.0  # seconds between checks for the parent
_PR_SET_PDEATHSIG = 1

T = TypeVar("T")


def end_with(parent: int) -> None:
    """End this process when its parent ends.

    On Linux the system kernel does this. Elsewhere a thread does, unless other code holds the interpreter lock.

    Args:
        parent: The pid of the parent, which may have ended already.
    """
    # The thread alone is not enough: it cannot run while a kernel holds the interpreter lock.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_look_after, args=(parent,), daemon=True).start()


def _look_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)


class SerialThread:
    """A thread that does one piece of work after the other; a daemon, because stuck work can only be abandoned.

    Args:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        self._given: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any], threading.Event]]
        self._given = queue.SimpleQueue()
        self._last_done = threading.Event()
        self._last_done.set()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int | None:
        """The thread's identifier."""
        return self._thread.ident

    def submit(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Queue `work` after earlier work."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._last_done = done = threading.Event()
        self._given.put((work, future, done))
        return future

    def wait(self, seconds: float) -> bool:
        """Wait until the queue is empty; return whether it is."""
        return self._last_done.wait(seconds)

    def _serve(self) -> None:
        while True:
            work, future, done = self._given.get()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the caller decides
                future.set_exception(error)
            del work, future  # or they would live until the next work
            done.set()


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Keep Python processes started inside the `with` block from importing user modules during their start.

    `multiprocessing` starts them with `python -c`, which searches the working directory first until the child receives
    the parent's path: a `threading.py` there would run. `-P` skips the working directory.
    """
    flags, prepared = util._args_from_interpreter_flags, spawn.get_preparation_data  # type: ignore[attr-defined]

    def with_users_last(name: str) -> dict[str, Any]:
        data = prepared(name)
        if not os.path.isfile(data.get("init_main_from_path", "")):  # e.g. `<stdin>`: there is nothing to import
            data.pop("init_main_from_path", None)
        users = [folder for folder in data["sys_path"] if folder in _folders]
        return data | {"sys_path": [*(folder for folder in data["sys_path"] if folder not in users), *users]}

    # Neither has a public setter; `multiprocessing` reads both when it starts a process.
    util._args_from_interpreter_flags = lambda: [*flags(), "-P"]  # type: ignore[attr-defined]
    spawn.get_preparation_data = with_users_last
    try:
        yield
    finally:
        util._args_from_interpreter_flags = flags  # type: ignore[attr-defined]
        spawn.get_preparation_data = prepared


_starters: dict[int, SerialThread] = {}
_guard = threading.Lock()


def _starter() -> SerialThread:
    """Return the thread that starts processes, one at a time; a fork needs a new one."""
    pid = os.getpid()
    with _guard:
        if pid not in _starters:
            _starters[pid] = SerialThread("ejkernel-starter")
        return _starters[pid]


def start_process(start: Callable[[], Any]) -> None:
    """Call `start`, which starts a process that may use `end_with`, from a thread that never ends.

    Linux ends a child with its parent *thread*. Children start with Ctrl-C blocked. A terminal sends Ctrl-C to its
    whole process group, and a child leaves the group only once it runs our code. A Ctrl-C before that is dropped.
    """
    _starter().submit(functools.partial(_started, start)).result()


def _started(start: Callable[[], Any]) -> None:
    with _safe_path():
        resource_tracker.ensure_running()  # first: some Python versions unblock Ctrl-C when they start it
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        start()


_of_parents: list[object] = []


def reset_in_forks(begin_anew: Callable[[], object]) -> None:
    """Call `begin_anew` in each fork of this process; it detaches from the parent's objects and returns them.

    The fork keeps them alive: garbage collection would close them for the parent, too.
    """
    os.register_at_fork(after_in_child=lambda: _of_parents.append(begin_anew()))


def ignore_interrupts() -> None:
    """Ignore Ctrl-C permanently; the parent handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


# --- module search path ---

# Folders of user modules added to `sys.path` by this process or its parent. They may contain a `threading.py` or a
# `numpy.py`, so they come after Python's own library; while a worker process starts, also after JAX and NumPy.
_folders: list[str] = []


def look_in(folder: Path) -> None:
    """Add a folder to `sys.path`, before installed packages and after Python's own library."""
    name = str(folder)
    if name in sys.path:
        return
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}
    own |= {os.path.join(place, "lib-dynload") for place in own}
    sys.path.insert(max((index + 1 for index, place in enumerate(sys.path) if place in own), default=0), name)
    _folders.append(name)


def module_path() -> tuple[list[str], list[str]]:
    """Return the module search path of this process, for `use_module_path` in another process."""
    return list(sys.path), list(_folders)


def use_module_path(path: tuple[list[str], list[str]]) -> None:
    """Set the module search path to that of another process, from its `module_path`."""
    sys.path[:], _folders[:] = [name or os.getcwd() for name in path[0]], path[1]
