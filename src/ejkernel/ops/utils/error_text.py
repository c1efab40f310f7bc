# SPDX-License-Identifier: Apache-2.0
"""Errors and values in words, whatever their own methods do: those of a user's code may raise in their turn."""

from __future__ import annotations

import traceback
from pathlib import Path

from ejkernel.ops.utils.printable import printable, printable_lines

_MOST = 3  # errors of a group that are told
_LENGTH = 400  # characters of a value that a message shows


def error_text(error: BaseException) -> str:
    """Return an error's type and message; of a group, the first errors in it too."""
    text = f"{type(error).__name__}: {message_of(error)}"
    if isinstance(error, BaseExceptionGroup):
        text += f": {'; '.join(map(error_text, error.exceptions[:_MOST]))}"
    return printable_lines(text)


def message_of(error: BaseException) -> str:
    """Return an error's message; it is never empty."""
    try:
        return str(error).strip() or "no message"
    except BaseException as raised:  # noqa: BLE001 - it is the message that is to blame, and nobody else
        return f"no message, for its __str__ raises {type(raised).__name__}"


def traceback_text(error: BaseException) -> str:
    """Return an error's traceback, as far as it can be had."""
    try:
        return printable_lines("".join(traceback.format_exception(error)))
    except BaseException as raised:  # noqa: BLE001 - as above
        return f"{error_text(error)}\nno traceback, for to write it raises {type(raised).__name__}"


def value_text(value: object) -> str:
    """Return a value's `repr`, not too much of it."""
    try:
        text = repr(value)
    except BaseException as raised:  # noqa: BLE001 - as above
        return f"a {type(value).__name__}, whose __repr__ raises {type(raised).__name__}"
    return printable(text if len(text) <= _LENGTH else f"{text[: _LENGTH - 3]}...")


def instance_text(value: object, expected: type) -> str:
    """Return how an error message shows a value that is no instance of a class, which may have been defined again."""
    again = f", of an earlier definition of {expected.__name__}" if type(value).__name__ == expected.__name__ else ""
    return f"{value_text(value)}{again}"


def where(function: object) -> str:
    """Return a function's name, and where it is written, if that is known."""
    name = getattr(function, "__qualname__", None) or value_text(function)
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
