# SPDX-License-Identifier: Apache-2.0
"""What the labels in a program's text carry: with `EJKERNEL_OPS_STAMP=json`, the whole abstract call.

The two forms of text write an attribute's value each in its own way: StableHLO as a string of MLIR, HLO as bare JSON.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Final

from ejkernel.ops.utils.meta import LABEL_RE, label_positions

MAX_PAYLOAD: Final = 1 << 20  # characters of one payload; real ones have hundreds

_STABLEHLO = re.compile(rf'" = "([^"]{{0,{MAX_PAYLOAD}}})"')  # a quote inside is written \22
_ESCAPE = re.compile(rb"\\(\\|[0-9A-Fa-f]{2})")


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """A label in a text.

    Attributes:
        text: The label.
        op: The operation with its version.
        key: The call's key.
        data: What it carries, if that is a JSON object.
        problem: Why what it carries cannot be read; `""` if it can, or if it carries no description.
    """

    text: str
    op: str
    key: str
    data: dict[str, Any] | None = None
    problem: str = ""


def labels_with_payloads(text: str) -> list[Label]:
    """Return the distinct labels of a text, StableHLO or HLO, in order of first appearance.

    A label that appears several times is the first that can be read.
    """
    found: dict[str, Label] = {}
    for name, end in label_positions(text):
        known = found.get(name)
        if known is None or known.data is None:
            label = _label(name, text, end)
            if known is None or label.data is not None or (label.problem and not known.problem):
                found[name] = label
    return list(found.values())


def _label(name: str, text: str, end: int) -> Label:
    match = LABEL_RE.fullmatch(name)
    assert match is not None  # it was found by the same expression
    op, key = match["op"], match["key"]
    try:
        data = _payload(text, end)
    except (ValueError, RecursionError) as error:
        return Label(name, op, key, problem=f"what it carries is not a description: {error}")
    return Label(name, op, key, data)


def _payload(text: str, start: int) -> dict[str, Any] | None:
    """Return the JSON object that follows a label, or `None` if something else does, such as its key alone."""
    string = _STABLEHLO.match(text, start)
    if string is not None:
        payload = _unescaped(string.group(1))
        return _object(payload, exact=True) if payload.startswith("{") else None
    if text.startswith("={", start):
        return _object(text[start + 1 : start + 1 + MAX_PAYLOAD], exact=False)
    return None


def _unescaped(text: str) -> str:
    """Return what a string of MLIR stands for."""
    if "\\" not in text:
        return text
    raw = text.encode("utf-8", "surrogatepass")
    return _ESCAPE.sub(lambda m: b"\\" if m[1] == b"\\" else bytes.fromhex(m[1].decode()), raw).decode("utf-8")


def _object(text: str, *, exact: bool) -> dict[str, Any]:
    data, end = _DECODER.raw_decode(text)
    if exact and end != len(text):
        raise ValueError("something follows the description")
    return data  # type: ignore[no-any-return]  # it begins with a brace


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
