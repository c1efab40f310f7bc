# SPDX-License-Identifier: Apache-2.0
"""Calls, configurations and tables as readable plain text."""

from __future__ import annotations

import collections
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ejkernel.ops.errors import SerializationError
from ejkernel.ops.utils.error_text import printable, shortened, value_text
from ejkernel.ops.utils.storage.serialize import to_data

_LONGEST = 1000  # maximum characters of a call or configuration; a file may hold longer texts
_DTYPES = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"))
_GAP = "  "
_QUIET = ("vocab_shares",)  # options that only operations set for each other; shown unless False
# Positional arguments whose arrays the user did not pass, each with the text to show instead. Their types follow from
# the other arguments: the weight of each token, and the arrays of a plan.
_MADE = {"linear_cross_entropy_gradients": {3: ""}, "paged_attention": {8: "plan"}}
_USUAL = ("softmax_scale",)  # options whose value nearly always follows from the shapes; not shown


def text_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, width: int | None = None, optional: Sequence[str] = ()
) -> str:
    """Return a table with a header and columns two spaces apart; all cells are made printable.

    If the table is wider than `width`, cells are wrapped between words. If it still does not fit, optional columns are
    dropped one after another, and named below the table. If that is not enough, each row becomes a paragraph with a
    line for each column. Words longer than a line, such as paths, stay whole.

    Args:
        header: The names of the columns.
        rows: The cells.
        width: Maximum characters per line; `None`: unlimited.
        optional: Names of columns that may be dropped, in this order.
    """
    columns = [list(map(printable, column)) for column in zip(header, *rows, strict=True)]
    natural = [max(map(len, column)) for column in columns]
    if width is None or _total(natural) <= width:
        return _aligned(columns, natural)
    kept = list(range(len(columns)))
    for out in (None, *optional):
        kept = [index for index in kept if header[index] != out]
        widths = _wrapped([columns[index] for index in kept], width)
        if widths is not None:
            left_out = [name for index, name in enumerate(header) if index not in kept]
            table = _aligned([columns[index] for index in kept], widths)
            if not left_out:
                return table
            return table + "\n" + wrapped(f"(too narrow for {', '.join(left_out)})", width)
    return _paragraphs(header, list(zip(*(column[1:] for column in columns), strict=True)), width)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _wrapped(columns: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Return column widths that fit, shrinking only the widest columns; `None` if the words do not fit."""
    natural = [max(map(len, column)) for column in columns]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    widths = words
    for level in range(max(natural, default=0) + 1):  # limit all columns to `level` characters
        wider = [min(most, max(least, level)) for most, least in zip(natural, words, strict=True)]
        if _total(wider) > width:
            break
        widths = wider
    return widths if _total(widths) <= width else None


def _aligned(columns: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    cells = [
        [[cell] if len(cell) <= size else textwrap.wrap(cell, size, break_on_hyphens=False) or [""] for cell in column]
        for column, size in zip(columns, widths, strict=True)
    ]
    lines = (line for row in zip(*cells, strict=True) for line in itertools.zip_longest(*row, fillvalue=""))
    padded = (_GAP.join(part.ljust(size) for part, size in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def _paragraphs(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    indent = max(map(len, header)) + len(_GAP)
    paragraphs = []
    for row in rows:
        lines = []
        for name, cell in zip(header, row, strict=True):
            available = width - indent
            if max(map(len, cell.split()), default=0) > available:  # put the cell below the label
                lines += [name, *textwrap.wrap(cell, max(width, 1), break_long_words=False, break_on_hyphens=False)]
                continue
            parts = textwrap.wrap(cell, available, break_on_hyphens=False) if cell else []
            lines += [f"{'' if index else name:<{indent}}{part}" for index, part in enumerate(parts)]
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: `1 call`, `2 calls`."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def compact(config: object) -> str:
    """Return a configuration as short text such as `block_q=64 warps=4`, without fields that are `None`.

    Plain fields come before nested fields, each sorted by name. So a saved configuration of unknown type has the same
    text as the configuration in memory.
    """
    try:
        return printable(shortened(_compact(to_data(config)), _LONGEST))
    except SerializationError:  # for the message that rejects a candidate without plain data
        return value_text(config)


def _compact(data: object) -> str:
    if not isinstance(data, dict):
        return str(data)
    parts = []
    for name, value in sorted(data.items(), key=lambda item: (isinstance(item[1], dict), str(item[0]))):
        shown = _compact(value)
        if value is not None and shown:
            parts.append(f"{name}({shown})" if isinstance(value, dict) else f"{name}={shown}")
    return " ".join(parts)


def duration(seconds: float | None) -> str:
    """Return a time in microseconds, or in milliseconds from 1 ms on; `-` if it is unknown."""
    if seconds is None:
        return "-"
    seconds = float(f"{seconds:.5g}")  # as files have it, so that both are rounded to the same digit
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.{2 if seconds < 1e-2 else 1}f} ms"


def durations(times: Iterable[float | None]) -> list[str]:
    """Return times as text, each in its own unit."""
    return list(map(duration, times))


def stored_time(microseconds: object) -> str:
    """Return a time from a file as text; `-` if it is no number."""
    if isinstance(microseconds, bool) or not isinstance(microseconds, int | float):
        return "-"
    return duration(microseconds / 1e6) if abs(microseconds) < sys.float_info.max else "-"


def is_terminal(stream: object) -> bool:
    """Return whether a standard stream is a terminal; it is `None` in a service, and users replace it by any object."""
    return bool(getattr(stream, "isatty", bool)())


def terminal_width() -> int | None:
    """Return the columns of the terminal; in a pipe those of the variable `COLUMNS`, or `None` without it."""
    if is_terminal(sys.stdout):
        return shutil.get_terminal_size().columns
    is_piped = not is_terminal(sys.__stdout__)  # else it would give the terminal's columns
    return shutil.get_terminal_size((0, 0)).columns or None if is_piped else None


def wrapped(text: str, width: int | None, indent: int = 0) -> str:
    """Return a text wrapped between words; further lines are indented.

    Args:
        text: The text.
        width: Maximum characters per line, except for longer words; `None`: unlimited.
        indent: Spaces before each line after the first.
    """
    if width is None:
        return text
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def ratio(times: float | None) -> str:
    """Return a speed-up such as `1.25x`; `-` if it is unknown."""
    return "-" if times is None else f"{times:.2f}x"


def size(count: int) -> str:
    """Return a number of bytes in KiB, MiB or GiB."""
    if 0 < count < 2**20 / 20:  # it would be 0.0 MiB
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def arguments(call: object) -> str:
    """Return the arguments of a call as short text such as `bf16[4,1024,8,64] x3, causal=True`.

    Args:
        call: An invocation's `description`, also from a file; other values give an empty string.
    """
    if not isinstance(call, dict):
        return ""
    positional, named = call.get("args"), call.get("kwargs")
    positional, made = _without_made(call.get("op"), positional)
    arrays = [*_arrays(positional), *_arrays(named)]
    parts = [text if count == 1 else f"{text} x{count}" for text, count in collections.Counter(arrays).items()]
    statics = named.items() if isinstance(named, dict) else ()
    parts += made + [f"{name}={_number(value)}" for name, value in statics if _is_shown(name, _number(value))]
    steps = call.get("steps")
    steps = steps if isinstance(steps, list) else []
    batches = [s[1] for s in steps if isinstance(s, list) and len(s) > 1 and s[0] == "vmap"]
    parts += [f"vmap{batches[::-1]}"] if batches else []
    parts += [text for step in steps if (text := _gradients(step, sum("f" in array[:2] for array in arrays)))]
    return printable(shortened(", ".join(parts), _LONGEST))


def _without_made(op: object, positional: object) -> tuple[object, list[str]]:
    """Return positional arguments without those in `_MADE`, and the texts to show instead."""
    made = _MADE.get(str(op).partition("@")[0], {})
    if not isinstance(positional, list) or not made:
        return positional, []
    texts = [text for place, text in made.items() if text and place < len(positional) and positional[place] is not None]
    return [value for place, value in enumerate(positional) if place not in made], texts


def _gradients(step: object, floats: int) -> str:
    """Return which of the floating-point arrays get a gradient in a step, counted from 1, if not all of them."""
    flags = step[1] if isinstance(step, list) and len(step) > 1 and step[0] == "vjp" else None
    if not isinstance(flags, list) or flags.count(True) >= floats:
        return ""
    which = [str(number) for number, flag in enumerate(flags, 1) if flag is True]
    arrays = "gradient of array" if len(which) == 1 else "gradients of arrays"
    return f"{arrays} {' and '.join(which)} only"


def rounded(seconds: float) -> str:
    """Return a budget in seconds without needless digits: `35`, `2.5`."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def _number(value: object) -> object:
    """Return a float or a list of numbers in a description as text, and other values unchanged."""
    if isinstance(value, list) and value and all(isinstance(_number(item), int | str) for item in value):
        return f"({', '.join(str(_number(item)) for item in value)})"
    text = value.get("float") if isinstance(value, dict) and set(value) == {"float"} else None
    try:
        return f"{float.fromhex(text):g}" if isinstance(text, str) else value
    except (ValueError, OverflowError):  # a damaged file
        return value


def _is_shown(name: object, value: object) -> bool:
    hidden = name in _USUAL or (name in _QUIET and value is False)
    return isinstance(value, bool | int | str) and value != "" and not hidden


def _arrays(described: object) -> Iterator[str]:
    """Yield the arrays in a description in order."""
    if isinstance(described, list):
        for item in described:
            yield from _arrays(item)
    elif isinstance(described, dict):
        array = described.get("array")
        if isinstance(array, list) and len(array) == 2 and isinstance(array[1], list):
            yield array_text(*array)
        else:
            for item in described.values():
                yield from _arrays(item)


def array_text(dtype: object, shape: Sequence[object]) -> str:
    """Return the type of an array as short text such as `bf16[4,1024]`."""
    name = str(dtype)
    for long, short in _DTYPES:
        if name.startswith(long):
            name = short + name.removeprefix(long)
            break
    return f"{name}[{','.join(map(str, shape))}]"


def cases(measured: Mapping[str, Any] | None) -> str:
    """Return a line with the time of each case of a shared configuration, and the mean; `""` without cases.

    A case is one of the calls tuned together, or one draw of a call's inputs. The line is e.g.
    `one for bf16[8,128]: 3.2 us; bf16[64,128]: 9.8 us; geometric mean 5.6 us`.

    Args:
        measured: The record of the search in an entry.
    """
    found, mean = (measured or {}).get("cases"), (measured or {}).get("geometric_mean")
    if not isinstance(found, list) or not found or not all(isinstance(case, dict) for case in found):
        return ""
    names = (", ".join(str(case[name]) for name in ("arguments", "draw") if case.get(name)) for case in found)
    times = [f"{name}: {stored_time(case.get('winner_us'))}" for name, case in zip(names, found, strict=True)]
    whole = stored_time(mean.get("winner_us") if isinstance(mean, dict) else None)
    return f"one for {'; '.join(times)}; geometric mean {whole}"
