# SPDX-License-Identifier: Apache-2.0
"""Folders of the user's modules on `sys.path`: behind Python's own library, here and in worker processes.

A folder that the user tunes in may have a `threading.py` or a `numpy.py`. Python's own library is found before it. What
a worker process imports to start, JAX and NumPy among it, is found before it too.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

_folders: list[str] = []  # that this process, or the one that started it, has added


def look_in(folder: Path) -> None:
    """Let modules of a folder be found, before installed packages of the same name, and after Python's own library."""
    name = str(folder)
    if name in sys.path:
        return
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}
    own |= {os.path.join(place, "lib-dynload") for place in own}
    sys.path.insert(max((index + 1 for index, place in enumerate(sys.path) if place in own), default=0), name)
    _folders.append(name)


def with_users_last(paths: Sequence[str]) -> list[str]:
    """Return a list such as `sys.path` with the folders that `look_in` has added behind all others."""
    return [*(name for name in paths if name not in _folders), *(name for name in paths if name in _folders)]


def state() -> tuple[list[str], list[str]]:
    """Return what `restore` in another process needs."""
    return list(sys.path), list(_folders)


def restore(state: tuple[list[str], list[str]]) -> None:
    """Look for modules where the process looks that `state` is from."""
    sys.path[:], _folders[:] = [name or os.getcwd() for name in state[0]], state[1]
