# SPDX-License-Identifier: Apache-2.0
"""Untrusted text from files, programs and exceptions, escaped so that it cannot control a terminal.

Text is escaped where it becomes output: in `str()` of our errors and warnings, reasons of outcomes and events, table
cells, the output of `explain`, and JSON.
"""

from __future__ import annotations

import re
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
