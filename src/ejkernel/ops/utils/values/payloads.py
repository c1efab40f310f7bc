# SPDX-License-Identifier: Apache-2.0
"""Payloads of the labels in a program's text: with `EJKERNEL_OPS_STAMP=json`, the whole abstract call.

StableHLO text stores the value of an attribute as an MLIR string, HLO text as bare JSON. An exported program holds
MLIR bytecode, which contains all strings of a program unchanged.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

from ejkernel.ops.utils.meta import label_positions
from ejkernel.ops.utils.storage.serialize import STRICT
from ejkernel.ops.utils.values.signature import key_of

MAX_PAYLOAD: Final = 1 << 20  # maximum characters of a payload; real payloads have hundreds
_MAX_FAILURES: Final = 1_000  # reading a text stops after this many unreadable payloads

_STABLEHLO = re.compile(rf'" = "([^"]{{0,{MAX_PAYLOAD}}})"')  # a quote inside is written \22
_BYTECODE: Final = "ML\xefR"
_DESCRIPTION: Final = '{"args":'  # the start of every description, since its keys are sorted
_ESCAPE = re.compile(rb"\\(\\|[0-9A-Fa-f]{2})")


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """A label in a text.

    Attributes:
        text: The label.
        op: The operation with its version.
        key: The call's key.
        data: The payload, if it is a JSON object.
        problem: Why the payload cannot be read; `""` if it can, or if it is no description.
    """

    text: str
    op: str
    key: str
    data: dict[str, Any] | None = None
    problem: str = ""


def labels_with_payloads(text: str) -> list[Label]:
    """Return the distinct labels of a text, StableHLO or HLO, in order of first appearance.

    For a label that appears several times, the first readable payload is used.
    """
    found: dict[str, Label] = {}
    failures = 0
    for name, match in label_positions(text):
        known = found.get(name)
        if known is None or (known.data is None and failures < _MAX_FAILURES):
            label = _label(name, match, text if failures < _MAX_FAILURES else "")
            failures += bool(label.problem)
            if known is None or label.data is not None or (label.problem and not known.problem):
                found[name] = label
    return list(found.values())


def text_of_bytecode(data: bytes) -> str:
    """Return a text with the labels and payloads of an exported program, in the form of HLO.

    The program is not parsed: MLIR's reader hangs on some broken programs, and `jax.export` passes parts of the data
    to the functions that users registered for their pytree types.

    Raises:
        ValueError: The data holds no bytecode.
    """
    strings = data.decode("latin-1")
    if _BYTECODE not in strings:
        raise ValueError("it holds no MLIR bytecode")
    carried = _descriptions(strings)
    lines = {}
    for name, match in label_positions(strings):
        if strings.startswith("\0", match.end()):
            lines[name] = carried.get((match["op"], match["key"]), match["key"])
    return "\n".join(f"{name}={payload}" for name, payload in lines.items())


def _descriptions(strings: str) -> dict[tuple[str, str], str]:
    """Return the descriptions of calls among NUL-terminated strings, by operation and key."""
    found: dict[tuple[str, str], str] = {}
    start, failures = strings.find(_DESCRIPTION), 0
    while start >= 0 and failures < _MAX_FAILURES:
        end = strings.find("\0", start, start + MAX_PAYLOAD)
        try:
            payload = strings[start : end if end >= 0 else start]
            description = _object(payload, exact=True)
            found.setdefault((str(description.get("op")), key_of(description)), payload)
        except (ValueError, RecursionError):  # not written by ejkernel; its label then has no description
            failures, end = failures + 1, start + len(_DESCRIPTION)
        start = strings.find(_DESCRIPTION, end)
    return found


def _label(name: str, match: re.Match[str], text: str) -> Label:
    op, key = match["op"], match["key"]
    try:
        data = _payload(text, match.end())
    except (ValueError, RecursionError) as error:
        return Label(name, op, key, problem=f"its payload is not a description: {error}")
    return Label(name, op, key, data)


def _payload(text: str, start: int) -> dict[str, Any] | None:
    """Return the JSON object after a label, or `None` for any other payload, e.g. only the key."""
    string = _STABLEHLO.match(text, start)
    if string is not None:
        payload = _unescaped(string.group(1))
        return _object(payload, exact=True) if payload.startswith("{") else None
    if text.startswith("={", start):
        return _object(text[start + 1 : start + 1 + MAX_PAYLOAD], exact=False)
    return None


def _unescaped(text: str) -> str:
    """Return an MLIR string without escapes."""
    if "\\" not in text:
        return text
    raw = text.encode("utf-8", "surrogatepass")
    return _ESCAPE.sub(lambda m: b"\\" if m[1] == b"\\" else bytes.fromhex(m[1].decode()), raw).decode("utf-8")


def _object(text: str, *, exact: bool) -> dict[str, Any]:
    data, end = STRICT.raw_decode(text)
    if exact and end != len(text):
        raise ValueError("something follows the description")
    return data  # type: ignore[no-any-return]  # an object, since the text begins with a brace
