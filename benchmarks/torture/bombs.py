# SPDX-License-Identifier: Apache-2.0
"""Content that is small to write and large to read: deep, long, many, or compressed."""

from __future__ import annotations

import gzip
import io
import json
import resource
import sys
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, Final

from benchmarks.torture.formats import Format, body_of, formats
from benchmarks.torture.fuzzing import Judge
from benchmarks.torture.material import quiet
from benchmarks.torture.part import Budget, Tally

_MOST_MEMORY: Final = 2 << 30  # bytes for a reader; twice the size of the largest file


def _zip(size: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("entry.json", b"\0" * size * 50)
    return made.getvalue()


def _set_of_equal_hashes(size: int) -> bytes:
    modulus = sys.hash_info.modulus
    return json.dumps({"set": [number * modulus for number in range(size // 40)]}).encode()


BOMBS: Final[dict[str, Callable[[int], bytes]]] = {
    "lists in lists": lambda size: b"[" * size,
    "closed lists in lists": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "objects in objects": lambda size: b'{"a":' * (size // 5),
    "closed objects in objects": lambda size: b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6),
    "a long integer": lambda size: b"9" * size,
    "long integers": lambda size: b"[" + b",".join([b"9" * 4300] * (size // 4301)) + b"]",
    "a long fraction": lambda size: b"0." + b"9" * size,
    "a large exponent": lambda size: b"1e" + b"9" * size,
    "many numbers": lambda size: b"[" + b"1," * (size // 2) + b"1]",
    "many names": lambda size: json.dumps({f"{n:07x}": 1 for n in range(size // 14)}).encode(),
    "one name often": lambda size: b"{" + b'"a":1,' * (size // 6) + b'"a":1}',
    "a long text": lambda size: b'"' + b"a" * size + b'"',
    "a text of escapes": lambda size: b'"' + b"\\u0000" * (size // 6) + b'"',
    "halves of characters": lambda size: b'"' + b"\\ud800" * (size // 6) + b'"',
    "an open text": lambda size: b'"' + b"\\" * size,
    "lines": lambda size: b"\n" * size,
    "empty lists in lines": lambda size: b"[]\n" * (size // 3),
    "nothing": lambda size: b"\0" * size,
    "no text": lambda size: b"\xff" * size,
    "spaces": lambda size: b" " * size,
    "labels": lambda size: b'"ejkernel_ops#tortured@v0:0123456789abcdef" = "{' * (size // 48),
    "labels without keys": lambda size: b"ejkernel_ops#tortured@v0:" * (size // 25),
    "prefixes": lambda size: b"ejkernel_ops#" * (size // 13),
    "one long name of an operation": lambda size: b"ejkernel_ops#" + b"a" * size + b"@v0:0123456789abcdef",
    "labels that carry open objects": lambda size: b'ejkernel_ops#a@v0:0123456789abcdef={"a":' * (size // 40),
    "descriptions in bytecode": lambda size: b"ML\xefR\0" + b'{"args":[' * (size // 9),
    "equal hashes": _set_of_equal_hashes,
    "large sizes": lambda size: b'{"array":["float32",[' + b"9" * 4000 + b"]]}",
    "gzip": lambda size: gzip.compress(b"\0" * size * 50),
    "zip": _zip,
}
_ABOUT: Final = 1000  # an upper bound for the contents of one kind
_SIZES: Final = {"small": 1 << 16, "large": 3 << 20}


def bombs(budget: Budget, tally: Tally) -> None:
    """Feed each content to each reader: alone, sealed, and in the place of a value."""
    quiet()
    for format in formats(budget.folder).values():
        if budget.only and format.name not in budget.only:
            continue
        judge = Judge(format, tally)
        before = _resident()
        sizes = _SIZES if budget.inputs is None or budget.first else {"small": _SIZES["small"]}
        chosen = budget.chosen(_ABOUT)
        for number, (raw, sealed) in enumerate(_contents(format, sizes)):
            if number in chosen:
                judge.judge(number, raw, sealed=sealed)
                tally.counts[format.name] += 1
        taken = _resident() - before
        if taken > _MOST_MEMORY:
            tally.found("uncaught", format.name, 0, f"it took {taken >> 20} MiB")


def _contents(format: Format, sizes: dict[str, int]) -> Iterator[tuple[bytes, bool]]:
    for size in sizes.values():
        for make in BOMBS.values():
            bomb = make(size)
            yield bomb, False
            for raw in _around(format, bomb):
                yield (raw, False) if format.seal is None else (format.seal(raw), True)


def _around(format: Format, bomb: bytes) -> Iterator[bytes]:
    """Yield whole content with the bomb before, behind and inside it."""
    body = body_of(format.originals[0])
    yield bomb + body
    yield body + bomb
    if format.is_json == "one":
        data: dict[str, Any] = json.loads(format.originals[0])
        data.pop("sha256", None)
        for name in data:
            text = json.dumps(data | {name: "BOMB"}, indent=2).encode()
            yield text.replace(b'"BOMB"', bomb).removesuffix(b"\n}")
    for value in (b"null", b"16", b"[8]", b"true", b"2.0", b'"row"'):
        if value in body:
            yield body.replace(value, bomb, 1)


def _resident() -> int:
    """Return the most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
