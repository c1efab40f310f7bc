# SPDX-License-Identifier: Apache-2.0
"""Calls, configurations and tables as plain text for people."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ejkernel.ops.utils.printable import printable
from ejkernel.ops.utils.serialize import to_data

_LONGEST = 1000  # characters of a call or a configuration: a file may hold any number of them
_DTYPES = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"))


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows under a header, in columns two spaces apart; every cell is one line, and printable."""
    lines = [tuple(map(printable, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def compact(config: Any) -> str:
    """Return a configuration in short, such as `block_q=64 warps=4`, without the fields that are not set."""
    return _cut(_compact(to_data(config)))


def _cut(text: str) -> str:
    return printable(text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "...")


def _compact(data: Any) -> str:
    if not isinstance(data, dict):
        return str(data)
    parts = []
    for name, value in data.items():
        shown = _compact(value)
        if value is not None and shown:
            parts.append(f"{name}({shown})" if isinstance(value, dict) else f"{name}={shown}")
    return " ".join(parts)


def duration(seconds: float) -> str:
    """Return a time in microseconds, or in milliseconds from ten of them on."""
    microseconds = seconds * 1e6
    return f"{microseconds:.1f} us" if microseconds < 1e4 else f"{microseconds / 1e3:.1f} ms"


def arguments(call: Any) -> str:
    """Return the arguments of a call in short, such as `bf16[4,1024,8,64] x3, causal=True`.

    Args:
        call: An invocation's `description`, or what a file kept of it; of anything else nothing is said.
    """
    if not isinstance(call, dict):
        return ""
    positional, named = call.get("args"), call.get("kwargs")
    arrays = [*_arrays(positional), *_arrays(named)]
    parts = [text if count == 1 else f"{text} x{count}" for text, count in collections.Counter(arrays).items()]
    statics = named.items() if isinstance(named, dict) else ()
    parts += [f"{name}={value}" for name, value in statics if isinstance(value, bool | int | str)]
    steps = call.get("steps")
    steps = steps if isinstance(steps, list) else []
    batches = [s[1] for s in steps if isinstance(s, list) and len(s) > 1 and s[0] == "vmap"]
    return _cut(", ".join([*parts, *([f"vmap{batches[::-1]}"] if batches else [])]))


def _arrays(described: Any) -> Iterator[str]:
    """Yield the arrays in a description, in their order."""
    if isinstance(described, list):
        for item in described:
            yield from _arrays(item)
    elif isinstance(described, dict):
        array = described.get("array")
        if isinstance(array, list) and len(array) == 2 and isinstance(array[1], list):
            yield f"{_short(str(array[0]))}[{','.join(map(str, array[1]))}]"
        else:
            for item in described.values():
                yield from _arrays(item)


def _short(dtype: str) -> str:
    for long, short in _DTYPES:
        if dtype.startswith(long):
            return short + dtype.removeprefix(long)
    return dtype
