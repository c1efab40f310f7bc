# SPDX-License-Identifier: Apache-2.0
"""Warnings that point at the user's own line, and lines for a user who waits at a terminal."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
from pathlib import Path
from types import FrameType

import jax

import ejkernel
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.formatting import is_terminal


def warn(message: str | Warning, category: type[Warning] | None = None) -> None:
    """Warn at the user's line: the first frame outside ejkernel and JAX.

    In a thread of ejkernel, without a user's frame, the warning points at the thread's outermost frame.

    Args:
        message: The text, or a warning from another process.
        category: The warning's class; `None` if `message` is a warning.
    """
    frame = _frame_of_user(sys._getframe(1))
    names = frame.f_globals
    # `warnings.warn` has `skip_file_prefixes` only from Python 3.12 on.
    warnings.warn_explicit(
        message,  # type: ignore[arg-type] # the stubs require a text with a class, or a warning without
        category,  # type: ignore[arg-type] # None: a warning object has its class
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=names.get("__name__", "<unknown>"),
        registry=names.setdefault("__warningregistry__", {}),
    )


def warn_of_environment(message: str, category: type[Warning]) -> None:
    """Warn of something that no line of a program has caused."""
    warnings.warn_explicit(message, category, filename="<environment>", lineno=0)


def _frame_of_user(frame: FrameType) -> FrameType:
    found: FrameType | None = frame
    while found is not None:
        if not _is_inside(found.f_code.co_filename):
            return found
        frame, found = found, found.f_back
    return frame


@functools.lru_cache(maxsize=4096)
def _is_inside(file: str) -> bool:
    """Return whether a file belongs to ejkernel or JAX, or to a standard module that calls them."""
    if file.startswith("<"):  # no file; a relative path would need the working directory, which may be gone
        return file.startswith("<frozen")
    return os.path.realpath(file).startswith(_folders())


@functools.cache
def _folders() -> tuple[str, ...]:
    packages = [f"{Path(os.path.realpath(str(module.__file__))).parent}{os.sep}" for module in (ejkernel, jax)]
    through = [os.path.realpath(str(module.__file__)) for module in (contextlib, functools, threading)]
    return (*packages, *through)


def say_on_terminal(text: str) -> None:
    """Print a line on standard error if that is a terminal."""
    if is_terminal(sys.stderr):
        sys.stderr.write(f"{printable(text)}\n")
