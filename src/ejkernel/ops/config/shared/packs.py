# SPDX-License-Identifier: Apache-2.0
"""Packs: immutable files with many entries. Entries are sorted by key, so a lookup reads only a small piece.

Why not SQLite, or an index object per folder: importing `sqlite3` takes four times as long as the first lookup of a
process, and its locks fail on network file systems; a bucket cannot update an index without losing concurrent writes.

Each entry is one line, a JSON array: the digest of the entry's key, the digest of the line's content, and the entry.
The first line names the packs that were merged into this pack; the last line holds the number of entries.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from ejkernel.ops.config import entries
from ejkernel.ops.config._files import UnusableError, key_text, opened, or_unusable
from ejkernel.ops.config.entries import StoredEntry, data_of, entry_of
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.utils.storage.encode import dumps
from ejkernel.ops.utils.storage.serialize import check_schema, decoded, describe, parse_json

SCHEMA: Final = 1  # raise when the layout changes; packs of another schema are a warned miss
SUFFIX: Final = ".pack"  # differs from the suffix of search logs, which lie in the same cache folder
LARGEST: Final = 64 << 20  # maximum bytes of a fetched pack
_FULL: Final = 8 << 20  # bytes after which a new pack begins
_LONGEST: Final = entries.LARGEST + (1 << 10)
_DIGITS: Final = 32
_WINDOW: Final = 4 << 10  # bytes of one read, and between two places where a lookup looks
_AFTER_ALL: Final = b"\xff"  # sorts after all lines
_FIRST, _LAST = "", "~"  # used in place of a key's digest: they sort before and after all digests
_NAME: Final = re.compile(rf"[0-9a-f]{{{_DIGITS}}}{re.escape(SUFFIX)}")


class DamagedError(UnusableError):
    """A part of a pack was altered or is missing; fetching the pack again may help."""


def is_name(name: str) -> bool:
    """Return whether a file name has the form of a pack's name."""
    return _NAME.fullmatch(name) is not None


def checked(line: bytes) -> bytes:
    """Return the line, after checking its digest.

    Raises:
        UnusableError: The line is damaged.
    """
    _text_of(line)
    return line


def token_of(key: ConfigKey) -> str:
    """Return the digest of a key. Lines are sorted by this digest."""
    return _digest(key_text(key).encode())


def line_of(entry: StoredEntry) -> bytes:
    """Return the line of an entry; equal entries have equal lines."""
    return _line(token_of(entry.key), data_of(entry))


def token_in(line: bytes) -> str:
    """Return the key digest at the start of a line."""
    return line[2 : 2 + _DIGITS].decode("ascii", "replace")


@or_unusable()
def read_line(line: bytes) -> StoredEntry:
    """Return the entry of a line.

    Raises:
        UnusableError: The line is damaged, or holds no usable entry of the key in its digest.
    """
    data = _content(line)
    check_schema(data, entries.SCHEMA, entries.WHAT)
    entry = entry_of(data)
    if token_of(entry.key) != token_in(line):
        raise UnusableError(f"it holds another key: {describe(entry.key)}")
    return entry


def packed(lines: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of packs that hold the lines. The name is the digest of the content."""
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
        lines: The lines of the entries, sorted.
        sources: Names of the packs that the lines come from.
    """
    count = 0
    yield _line(_FIRST, {"schema": SCHEMA, "of": sorted(sources)})
    for line in lines:
        yield line
        count += 1
    yield _line(_LAST, {"lines": count})


def merged_name(sources: Iterable[str]) -> str:
    """Return the name of a merged pack; such names are used only on this machine."""
    return _digest("\n".join(sorted(sources)).encode()) + SUFFIX


def check(name: str, raw: bytes) -> None:
    """Check that fetched bytes are the complete pack with this name.

    Raises:
        UnusableError: The bytes are damaged or are no such pack.
    """
    if _digest(raw) + SUFFIX != name:
        raise DamagedError("its content was altered or cut off: the digest does not match its name")
    lines = raw.splitlines(keepends=True)
    if len(lines) < 2:
        raise DamagedError("it has no entries")
    if _sources(lines[0]):
        raise UnusableError("it was merged from other packs, and only single packs are shared")
    _check_lines(lines[1:-1], _content(lines[-1]).get("lines"))


def _check_lines(lines: Iterable[bytes], wanted: object) -> None:
    """Check that the lines of entries are undamaged, sorted, and as many as the last line of the pack says."""
    count, previous = 0, b""
    for line in lines:
        if len(line) > _LONGEST:
            raise DamagedError(f"a line has more than {_LONGEST} bytes")
        _text_of(line)
        if line < previous:
            raise DamagedError("its lines are not sorted")
        previous, count = line, count + 1
    if count != wanted:
        raise DamagedError(f"it has {count} entries, but its last line says {describe(wanted)}")


class Pack:
    """A pack in a file. A lookup reads a few pieces of the file.

    Args:
        path: The file.

    Attributes:
        path: The file.
        names: Names of the store's packs whose entries this pack holds.
        size: Size of the file in bytes.
        lines: Number of entries, according to the last line.

    Raises:
        UnusableError: The file is no complete pack.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _opened(path) as (stream, size):
            first = next(_lines(stream), b"")
            sources = _sources(first)
            stream.seek(max(0, size - _WINDOW))
            tail = stream.read(_WINDOW)
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
            UnusableError: The lines cannot be parsed.
            OSError: The file cannot be read.
        """
        wanted = f'["{token}'.encode()
        found = []
        with _opened(self.path) as (stream, size):
            self._seek(stream, size, wanted)
            for line in _lines(stream):
                if line.startswith(wanted):
                    found.append(line)
                elif line > wanted:
                    break
        return found

    def _seek(self, stream: BinaryIO, size: int, wanted: bytes) -> None:
        """Move to the begin of a line shortly before the first line that starts with `wanted`."""

        def next_line(offset: int) -> bytes:
            """Return the first bytes of the first line that begins after an offset."""
            stream.seek(offset)
            stream.readline(_LONGEST)
            return stream.readline(len(wanted)) or _AFTER_ALL

        offsets = range(self._begin, size, _WINDOW)
        count = bisect.bisect_left(offsets, wanted, key=next_line)  # so many are followed by a line before `wanted`
        stream.seek(self._begin + _WINDOW * max(0, count - 1))
        if count:
            stream.readline(_LONGEST)

    def walk(self) -> Iterator[bytes]:
        """Yield the lines of all entries.

        Raises:
            UnusableError: The file was cut off, or a line is too long.
            OSError: The file cannot be read.
        """
        last = f'["{_LAST}'.encode()
        with _opened(self.path) as (stream, _):
            stream.seek(self._begin)
            for line in _lines(stream):
                if line.startswith(last):
                    return
                yield line
        raise DamagedError("it was cut off")


def salvaged(raw: bytes) -> list[bytes]:
    """Return the undamaged entry lines of a damaged pack."""
    lines = raw.splitlines(keepends=True)
    found = []
    for line in lines:
        if token_in(line).isalnum():  # unlike the first and last lines
            with contextlib.suppress(DamagedError):
                found.append(checked(line))
    return found


def verify(path: Path) -> None:
    """Read and check a whole pack.

    Raises:
        UnusableError: The pack is damaged.
        OSError: The pack cannot be read.
    """
    pack = Pack(path)
    _check_lines(pack.walk(), pack.lines)


# --- lines ---


def _line(token: str, data: object) -> bytes:
    text = dumps(data, separators=(",", ":"))
    return f'["{token}","{_digest((token + text).encode())}",{text}]\n'.encode()


def _text_of(line: bytes) -> bytes:
    """Return the JSON text in a line.

    Raises:
        UnusableError: The line does not have the form of a pack's line, or its digest does not match.
    """
    parts = line.split(b'"', 4)  # the two digests contain no quotes
    if len(parts) != 5 or parts[0] != b"[" or parts[2] != b"," or parts[4][:2] != b",{" or line[-3:] != b"}]\n":
        raise DamagedError("a line does not have the form of an entry")
    token, digest, text = parts[1], parts[3], parts[4][1:-2]
    if _digest(token + text).encode() != digest:
        raise DamagedError("a line was altered: its digest does not match")
    return text


@or_unusable()
def _content(line: bytes) -> dict[str, Any]:
    return parse_json(decoded(_text_of(line)))  # type: ignore[no-any-return]  # an object: _text_of checked the brace


@or_unusable()
def _sources(line: bytes) -> list[str]:
    """Return the pack names in the first line of a pack."""
    data = _content(line)
    check_schema(data, SCHEMA, "a pack of entries")
    names = data.get("of")
    if not isinstance(names, list) or not all(type(name) is str for name in names):
        raise UnusableError("its first line does not name the merged packs")
    return names


def _named(lines: Sequence[bytes]) -> tuple[str, bytes]:
    raw = b"".join(written(lines))
    return _digest(raw) + SUFFIX, raw


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:_DIGITS]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a pack in a `with` block, and yield its stream and size."""
    with opened(path) as (descriptor, size), open(descriptor, "rb", closefd=False) as stream:
        yield stream, size


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the complete lines from the stream's position on.

    Raises:
        UnusableError: A line is longer than `_LONGEST` bytes.
    """
    while (line := stream.readline(_LONGEST + 1)).endswith(b"\n"):
        yield line
    if len(line) > _LONGEST:
        raise DamagedError(f"a line has more than {_LONGEST} bytes")
