# SPDX-License-Identifier: Apache-2.0
"""Text for errors and values, escaped so that text from files, programs and exceptions cannot control a terminal.

Text is escaped where it becomes output: in `str()` of our errors and warnings, reasons of outcomes and events, table
cells, the output of `explain`, and JSON. The functions work even if the `__str__` or `__repr__` of user code raises.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import traceback
from pathlib import Path
from typing import Final

_ODD: Final = re.compile(r"[^ -~]")  # characters that may need an escape; most texts have none
_LINE: Final = re.compile(r"\r\n|\n")
_INDENT: Final = "  "
_JSON_ODD: Final = re.compile(r"[^\n -~]")


def printable(value: object) -> str:
    r"""Return `str(value)` as one line of visible characters, with Python escapes for all other characters.

    Escapes such as `\x1b`, `\n` or `\u202e` replace control characters, escape sequences, line breaks, zero-width
    characters, changes of writing direction, and lone surrogates. Printable text is unchanged, so a second call does
    nothing. Markup, e.g. rich's `[bold]`, is not escaped; the code that prints the text must not interpret it.
    """
    text = str(value)
    return text if text.isprintable() else _ODD.sub(_visible, text)


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters, with `...` in place of the rest."""
    return text if len(text) <= most else text[: most - 3] + "..."


def printable_lines(value: object) -> str:
    """Return `str(value)` escaped like `printable`, but line by line; lines after the first are indented.

    So the line breaks of a compiler's message remain, and the indentation shows that the lines belong together.
    """
    text = str(value)
    if text.isprintable():
        return text
    first, *lines = _LINE.split(text.expandtabs(4))
    return "\n".join([printable(first), *(_indented(printable(line)) for line in lines)])


def printable_json(text: str) -> str:
    """Return a JSON text with JSON escapes for all unprintable characters."""
    return text if text.isascii() and "\x7f" not in text else _JSON_ODD.sub(_escaped, text)


def _indented(line: str) -> str:
    return line if not line or line.startswith(" ") else _INDENT + line


def _visible(match: re.Match[str]) -> str:
    found = match.group()
    return found if found.isprintable() else found.encode("unicode_escape").decode("ascii")


def _escaped(match: re.Match[str]) -> str:
    found = match.group()
    if found.isprintable():
        return found
    units = found.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[index : index + 2].hex()}" for index in range(0, len(units), 2))


_MOST = 3  # maximum errors of a group in a message
_LENGTH = 400  # maximum characters of a value in a message


def error_text(error: BaseException, *, notes: bool = False) -> str:
    """Return an error's type and message, for a group its first errors, and with `notes` its notes of one line."""
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
    """Return the `repr` of a value, cut to `_LENGTH` characters; of arrays with axes only dtype and shape."""
    try:
        if _has_axes(value):
            return printable(f"an array {value.dtype}{list(value.shape)}")  # type: ignore[attr-defined]
        with_arrays = isinstance(value, tuple | list) and any(map(_has_axes, value))
        text = f"({', '.join(map(value_text, value))})" if with_arrays else repr(value)  # type: ignore[call-overload]
    except BaseException as raised:  # noqa: BLE001 - as above
        return f"a {type(value).__name__}, whose __repr__ raises {type(raised).__name__}"
    return printable(shortened(text, _LENGTH))


def _has_axes(value: object) -> bool:
    return bool(getattr(value, "shape", ())) and hasattr(value, "dtype")


def instance_text(value: object, expected: type) -> str:
    """Return the text of a value of a wrong type; hints at an outdated class with the same name."""
    again = f", of an earlier definition of {expected.__name__}" if type(value).__name__ == expected.__name__ else ""
    return f"{value_text(value)}{again}"


_PUBLIC: Final = ("ejkernel.modules", "ejkernel.ops")


def example_text(kind: type) -> str:
    """Return the end of a message that asks for an instance of a class: an example, and where to import the class."""
    try:
        example = _without_none(kind())
    except (TypeError, ValueError):  # it needs arguments
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        needed = [f"{f.name}=..." for f in fields if f.init and f.default is f.default_factory is dataclasses.MISSING]
        example = f"{kind.__name__}({', '.join(needed) or '...'})"
    public = (name for name in _PUBLIC if getattr(sys.modules.get(name), kind.__name__, None) is kind)
    module = next(public, kind.__module__)
    imported = "" if module == "__main__" else f", with `from {module} import {kind.__name__}`"
    return f"; pass e.g. {example}{imported}."


def _without_none(value: object) -> str:
    """Return the `repr` of a dataclass without fields that are `None`, or the names of its fields if all are."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = [field.name for field in dataclasses.fields(value)]
    shown = [f"{name}={given!r}" for name in fields if (given := getattr(value, name)) is not None]
    return f"{type(value).__name__}({', '.join(shown or [f'{name}=...' for name in fields])})"


def where(function: object) -> str:
    """Return a function's name and, if known, its source file and line."""
    name = getattr(function, "__qualname__", None) or value_text(function)
    code = None if hasattr(function, "__wrapped__") else getattr(function, "__code__", None)  # not a decorator's line
    return name if code is None else f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
