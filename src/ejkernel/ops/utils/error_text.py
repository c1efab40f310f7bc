# SPDX-License-Identifier: Apache-2.0
"""Text for errors and values. Works even if the `__str__` or `__repr__` of user code raises."""

from __future__ import annotations

import traceback
from pathlib import Path

from ejkernel.ops.utils.printable import printable, printable_lines

_MOST = 3  # maximum errors of a group in a message
_LENGTH = 400  # maximum characters of a value in a message


def error_text(error: BaseException, *, notes: bool = False) -> str:
    """Return an error's type and message, for a group also its first errors; with `notes` also its notes of one line."""
    text = f"{type(error).__name__}: {message_of(error)}"
    added = [note for note in getattr(error, "__notes__", []) if "\n" not in note] if notes else []
    if added:
        text += f" ({' '.join(added)})"
    if isinstance(error, BaseExceptionGroup):
        text += f": {'; '.join(map(error_text, error.exceptions[:_MOST]))}"
    return printable_lines(text)


def message_of(error: BaseException) -> str:
    """Return an error's message, or a replacement if it is empty."""
    try:
        return str(error).strip() or "no message"
    except BaseException as raised:  # noqa: BLE001 - the user's `__str__` may raise any exception
        return f"no message, because its __str__ raises {type(raised).__name__}"


def traceback_text(error: BaseException) -> str:
    """Return an error's traceback, or the reason why it cannot be formatted."""
    try:
        return printable_lines("".join(traceback.format_exception(error)))
    except BaseException as raised:  # noqa: BLE001 - as above
        return f"{error_text(error)}\nno traceback, because formatting it raises {type(raised).__name__}"


def value_text(value: object) -> str:
    """Return the `repr` of a value, cut to `_LENGTH` characters."""
    try:
        text = repr(value)
    except BaseException as raised:  # noqa: BLE001 - as above
        return f"a {type(value).__name__}, whose __repr__ raises {type(raised).__name__}"
    return printable(text if len(text) <= _LENGTH else f"{text[: _LENGTH - 3]}...")


def instance_text(value: object, expected: type) -> str:
    """Return the text of a value of a wrong type; hints at an outdated class with the same name."""
    again = f", of an earlier definition of {expected.__name__}" if type(value).__name__ == expected.__name__ else ""
    return f"{value_text(value)}{again}"


def where(function: object) -> str:
    """Return a function's name and, if known, its source file and line."""
    name = getattr(function, "__qualname__", None) or value_text(function)
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
