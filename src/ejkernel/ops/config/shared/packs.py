# SPDX-License-Identifier: Apache-2.0
"""Packs: files of many entries that are never changed, sorted by key, so that one is found without reading the rest.

A pack has a line for each entry, a JSON array: the digest of the entry's key, the digest of the line's content, and the
entry. The first line names the packs that this one was made of, the last says how many lines there are.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ejkernel.ops.config import entries
from ejkernel.ops.config._files import UnusableError, identity, opened
from ejkernel.ops.config.entries import StoredEntry, check_key, data_of, entry_of
from ejkernel.ops.errors import SerializationError
from ejkernel.ops.utils.storage.encode import dumps
from ejkernel.ops.utils.storage.sealed import check_schema, decoded
from ejkernel.ops.utils.storage.serialize import describe, parse_json

SCHEMA: Final = 1  # raise when the layout changes; packs of another schema are a warned miss
SUFFIX: Final = ".pack"  # not that of a search's log, for a copy lies in a folder that has such
LARGEST: Final = 64 << 20  # bytes of a pack that is fetched
_FULL: Final = 8 << 20  # bytes after which another pack is begun
_LONGEST: Final = entries.LARGEST + (1 << 10)
_DIGITS: Final = 32
_WINDOW: Final = 4 << 10  # bytes that are read at once
_GUESSES: Final = 6  # of where a line is, before the file is bisected
_FIRST, _LAST = "", "~"  # in place of a key's digest: they sort before and behind all of them
_NAME: Final = re.compile(rf"[0-9a-f]{{{_DIGITS}}}{re.escape(SUFFIX)}")


class DamagedError(UnusableError):
    """Some of a pack is not what was written, or is missing; so it is worth having it again from elsewhere."""


def is_name(name: str) -> bool:
    """Return whether a file of that name may be a pack."""
    return _NAME.fullmatch(name) is not None


def checked(line: bytes) -> bytes:
    """Return a line that is what was written.

    Raises:
        UnusableError: it is not.
    """
    _text_of(line)
    return line


def token_of(key: object) -> str:
    """Return the digest of a key, which lines are sorted by."""
    return _digest(identity(key).encode())


def line_of(entry: StoredEntry) -> bytes:
    """Return the line of an entry; equal entries have equal lines."""
    return _line(token_of(entry.key), data_of(entry))


def token_in(line: bytes) -> str:
    """Return the digest of a key that a line begins with."""
    return line[2 : 2 + _DIGITS].decode("ascii", "replace")


def read_line(line: bytes) -> StoredEntry:
    """Return the entry of a line.

    Raises:
        UnusableError: it is none, or is not what was written.
    """
    entry = _entry(line)
    if token_of(entry.key) != token_in(line):
        raise UnusableError(f"it holds another key: {describe(entry.key)}")
    return entry


def entry_in_line(line: bytes, key: object) -> StoredEntry:
    """Return the entry of a line that was found for a key.

    Raises:
        UnusableError: it is none of this key, or is not what was written.
    """
    entry = _entry(line)
    check_key(entry, identity(key))
    return entry


def _entry(line: bytes) -> StoredEntry:
    data = _content(line)
    try:
        check_schema(data, entries.SCHEMA, entries.WHAT)
    except SerializationError as error:
        raise UnusableError(str(error)) from error
    return entry_of(data)


def packed(lines: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield packs of so many lines, each with its name, which is the digest of what it holds."""
    part: list[bytes] = []
    size = 0
    for line in sorted(set(lines)):
        if part and size + len(line) > _FULL:
            yield _named(part)
            part, size = [], 0
        part.append(line)
        size += len(line)
    if part:
        yield _named(part)


def written(lines: Iterable[bytes], sources: Iterable[str] = ()) -> Iterator[bytes]:
    """Yield the lines of a pack.

    Args:
        lines: Those of the entries, sorted.
        sources: Names of the packs that they come from.
    """
    count = 0
    yield _line(_FIRST, {"schema": SCHEMA, "of": sorted(sources)})
    for line in lines:
        yield line
        count += 1
    yield _line(_LAST, {"lines": count})


def merged_name(sources: Iterable[str]) -> str:
    """Return the name, for this machine alone, of the pack that is made of others."""
    return _digest("\n".join(sorted(sources)).encode()) + SUFFIX


def check(name: str, raw: bytes) -> None:
    """Raise unless bytes that were fetched are the pack of that name, whole.

    Raises:
        UnusableError: they are not.
    """
    if _digest(raw) + SUFFIX != name:
        raise DamagedError("it is not what was written: its digest is another's. Was it cut off?")
    lines = raw.splitlines(keepends=True)
    if len(lines) < 2:
        raise DamagedError("it has no entries")
    if _sources(lines[0]):
        raise UnusableError("it speaks for other packs")
    if _content(lines[-1]) != {"lines": len(lines) - 2}:
        raise DamagedError("its last line does not say how many there are")
    inner = lines[1:-1]
    for line in inner:
        if len(line) > _LONGEST:
            raise DamagedError(f"a line has more than {_LONGEST} bytes")
        _text_of(line)
    if any(later < earlier for earlier, later in itertools.pairwise(inner)):
        raise DamagedError("its lines are not sorted")


class Pack:
    """A pack in a file, of which a few pieces are read for each key.

    Args:
        path: The file.

    Attributes:
        path: The file.
        names: The packs of the store that it has the entries of.
        size: Its bytes.
        lines: How many entries it says that it has.

    Raises:
        UnusableError: it is no whole pack.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = str(path)  # which takes longer to make than to open
        with opened(self._name) as (descriptor, size):
            first = next(_lines(descriptor, 0, 1 << 10), b"")
            sources = _sources(first)
            tail = _read(descriptor, max(0, size - _WINDOW), _WINDOW)
        last = tail[tail.rfind(b"\n", 0, -1) + 1 :]
        if not last.startswith(f'["{_LAST}"'.encode()) or not last.endswith(b"\n"):
            raise DamagedError("it was cut off")
        self.names = frozenset(sources or [path.name])
        self.size = size
        self.lines = _content(last).get("lines")
        self._begin = len(first)

    def find(self, token: str) -> list[bytes]:
        """Return the lines of a key.

        Raises:
            UnusableError: the file has no such lines.
            OSError: it cannot be read.
        """
        wanted = f'["{token}'.encode()
        with opened(self._name) as (descriptor, size):
            return _lines_of(descriptor, self._before(descriptor, size, wanted), wanted)

    def _before(self, descriptor: int, size: int, wanted: bytes) -> int:
        """Return where a line begins that is not far before the first one that begins so."""
        # no line before `low` is one of the key's, and no line but those before the first one behind `high`
        low, high, total = self._begin, size, size - self._begin
        share = _share(wanted)
        at, share_there, share_low = low, 0.0, 0.0
        for _ in range(_GUESSES):  # digests are spread evenly, so each guess is nearer by far
            if high - low <= _WINDOW or 0 <= (share - share_low) * total <= 2 * _WINDOW:
                return low
            at = min(max(int(at + (share - share_there) * total) - _WINDOW, low), high - 1)
            start, head = _next_line(descriptor, at, len(wanted))
            share_there = _share(head)
            if head and head < wanted:
                low, share_low = start, share_there
            else:
                high = at
        return _bisected(descriptor, low, high, wanted)

    def walk(self) -> Iterator[bytes]:
        """Yield the lines of all entries.

        Raises:
            UnusableError: the file has no such lines.
            OSError: it cannot be read.
        """
        last = f'["{_LAST}'.encode()
        with opened(self._name) as (descriptor, _):
            for line in _lines(descriptor, self._begin, 1 << 20):
                if line.startswith(last):
                    return
                yield line
        raise DamagedError("it was cut off")


def salvaged(raw: bytes) -> list[bytes]:
    """Return those lines of a damaged pack's entries that are what was written."""
    lines = raw.splitlines(keepends=True)
    return [line for line in lines if token_in(line).isalnum() and _is_whole(line)]  # the first and last have none


def _is_whole(line: bytes) -> bool:
    try:
        _text_of(line)
    except DamagedError:
        return False
    return True


def verify(path: Path) -> None:
    """Read all of a pack.

    Raises:
        UnusableError: some of it is not what was written.
        OSError: it cannot be read.
    """
    pack, count, previous = Pack(path), 0, b""
    for line in pack.walk():
        _text_of(line)
        if line < previous:
            raise DamagedError("its lines are not sorted")
        previous, count = line, count + 1
    if count != pack.lines:
        raise DamagedError(f"it has {count} entries, not {describe(pack.lines)}")


# --- lines ---


def _line(token: str, data: object) -> bytes:
    text = dumps(data, separators=(",", ":"))
    return f'["{token}","{_digest((token + text).encode())}",{text}]\n'.encode()


def _text_of(line: bytes) -> bytes:
    """Return the JSON text in a line.

    Raises:
        UnusableError: it is no line, or is not what was written.
    """
    parts = line.split(b'"', 4)  # what is between them has none
    if len(parts) != 5 or parts[0] != b"[" or parts[2] != b"," or parts[4][:2] != b",{" or line[-3:] != b"}]\n":
        raise DamagedError("it is no line of a pack")
    token, digest, text = parts[1], parts[3], parts[4][1:-2]
    if _digest(token + text).encode() != digest:
        raise DamagedError("it is not what was written: its digest is another's")
    return text


def _content(line: bytes) -> dict[str, Any]:
    try:
        data = parse_json(decoded(_text_of(line)))
    except SerializationError as error:
        raise UnusableError(str(error)) from error
    return data  # type: ignore[no-any-return]  # it begins as an object


def _sources(line: bytes) -> list[str]:
    """Return the names in the first line of a pack."""
    data = _content(line)
    try:
        check_schema(data, SCHEMA, "a pack of entries")
    except SerializationError as error:
        raise UnusableError(str(error)) from error
    names = data.get("of")
    if not isinstance(names, list) or not all(type(name) is str for name in names):
        raise UnusableError("it does not say of which packs it was made")
    return names


def _named(lines: Sequence[bytes]) -> tuple[str, bytes]:
    raw = b"".join(written(lines))
    return _digest(raw) + SUFFIX, raw


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:_DIGITS]


# --- reading in pieces ---


def _read(descriptor: int, offset: int, count: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)  # there, nobody else has the descriptor
    return os.read(descriptor, count)


def _next_line(descriptor: int, offset: int, count: int) -> tuple[int, bytes]:
    """Return where the first line begins that begins behind `offset`, and its first bytes; none at the end."""
    while chunk := _read(descriptor, offset, _WINDOW):
        end = chunk.find(b"\n") + 1
        if end:
            head = chunk[end : end + count]
            return offset + end, head if len(head) == count else _read(descriptor, offset + end, count)
        offset += len(chunk)
    return offset, b""


def _share(head: bytes) -> float:
    """Return how large the digest is that a line begins with, from 0 to 1."""
    try:
        return int(head[2:15], 16) / 16**13
    except ValueError:  # the last line, or what is no line
        return 1.0


def _bisected(descriptor: int, low: int, high: int, wanted: bytes) -> int:
    """Return what `Pack._before` does, however the digests are spread."""
    while high - low > _WINDOW:
        middle = (low + high) // 2
        start, head = _next_line(descriptor, middle, len(wanted))
        if head and head < wanted:
            low = start
        else:
            high = middle
    return low


def _lines_of(descriptor: int, offset: int, wanted: bytes) -> list[bytes]:
    """Return the lines that begin so; the first of them begins at `offset` or later."""
    chunk = _read(descriptor, offset, 4 * _WINDOW)
    begin = chunk.find(b"\n" + wanted) + 1
    end = chunk.find(b"\n", begin) + 1
    is_last = end + len(wanted) <= len(chunk) and not chunk.startswith(wanted, end)
    if begin and end and is_last and not chunk.startswith(wanted):
        return [chunk[begin:end]]  # the usual case, without a look at the lines before it
    found = []
    for line in _lines(descriptor, offset, 4 * _WINDOW):
        if line.startswith(wanted):
            found.append(line)
        elif line > wanted:
            break
    return found


def _lines(descriptor: int, offset: int, window: int = _WINDOW) -> Iterator[bytes]:
    """Yield the whole lines from `offset` on.

    Raises:
        UnusableError: one is longer than any is written.
    """
    rest = b""
    while chunk := _read(descriptor, offset, window):
        offset += len(chunk)
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line + b"\n" for line in whole)
        if len(rest) > _LONGEST:
            raise DamagedError(f"a line has more than {_LONGEST} bytes")
