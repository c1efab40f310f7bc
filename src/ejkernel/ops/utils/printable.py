# SPDX-License-Identifier: Apache-2.0
"""What comes from a file, a program or an exception, as text that says nothing to a terminal but what it shows.

It is made so at the few places where it becomes output: `str()` of our errors and warnings, reasons of outcomes and
events, cells of tables, what `explain` says, and JSON.
"""

from __future__ import annotations

import re
from typing import Final

_ODD: Final = re.compile(r"[^ -~]")  # a candidate for being escaped; most text has none
_LINE: Final = re.compile(r"\r\n|\n")
_INDENT: Final = "  "
_JSON_ODD: Final = re.compile(r"[^\n -~]")


def printable(value: object) -> str:
    r"""Return the text of a value as one line of visible characters; others become what Python would write.

    Control characters, escape sequences, ends of lines, characters without a width or that turn the direction of
    writing, and lone surrogates become such as `\x1b`, `\n` or `\u202e`. What is printable already stays as it is, so
    to do it twice does no harm. Markup, such as rich's `[bold]`, is text here; whoever prints it must not read it.
    """
    text = str(value)
    return text if text.isprintable() else _ODD.sub(_visible, text)


def printable_lines(value: object) -> str:
    """Return the text of a value as `printable` does, line by line; a further line is indented.

    So the lines of a compiler's message stay lines, and none of them can pass for a line of somebody else's.
    """
    text = str(value)
    if text.isprintable():
        return text
    first, *lines = _LINE.split(text.expandtabs(4))
    return "\n".join([printable(first), *(_indented(printable(line)) for line in lines)])


def printable_json(text: str) -> str:
    """Return a JSON text with every character that is not printable written as JSON's escape of it."""
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
