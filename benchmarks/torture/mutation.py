# SPDX-License-Identifier: Apache-2.0
"""Content that is nearly right: bytes changed, cut and mixed, and JSON with any value in any place."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

TOKENS: Final[Sequence[bytes]] = (
    *(b"null", b"true", b"-1", b"0", b"1e999", b"-0.0", b"NaN", b"Infinity", b"9" * 5000, b"1E-400", b"0x1"),
    *(b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\n", b"\r", b"\0", b"\x1b[2J", b'{"a":' * 40, b"[" * 200),
    *(b"\\ud800", b"\\u0000", b"\xed\xa0\x80", b"\xff\xfe", b"\xf4\x90\x80\x80", b"\xe2\x80\xae", b"\xc0\x80"),
    *(b'"schema"', b'"sha256"', b'"config_type"', b"builtins.eval", b"os.system", b"json", b"../../x", b"bf16[8,"),
    *(b'{"name":"jax.numpy.tanh"}', b'{"array":["float32",[4]]}', b'{"map":[]}', b'{"partial":', b"steps", b"vjp"),
    *(b"\\22", b"\\5C", b'" = "', b"={", b"ejkernel_ops#", b"@v0:", b"ML\xefR"),
)
VALUES: Final[Sequence[Any]] = (
    *(None, True, False, -1, 0, 1, 2, 8, 2**31, 2**63, 10**30, 10**4000, 5e-324, 1e308, 0.5, -0.0),
    *("", "\x1b", "0x1p9", "a" * 999, "json", "builtins.dict", "os.system", "float32", "bfloat16", "../x", "\0", "~"),
    *([], {}, [None, 8], [[[[]]]], {"": None}, {"name": "jax.numpy.tanh"}, {"array": ["float32", [4]]}, {"list": []}),
    *({"array": [None, [None, 10**999]]}, {"dtype": "O"}, {"set": [1, 1]}, {"slice": [None, None, None]}, {"spec": []}),
    *(["vmap", 4, [0]], ["vjp", [True]], ["jvp", [True]], {"map": [["a", 1], ["a", 2]]}, {"float": "nan"}),
)


def mutated(random: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    """Return bytes with one change, or a few.

    Args:
        random: Source of randomness.
        raw: The bytes to change.
        others: Sources of foreign pieces.
    """
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        raw = random.choice(_CHANGES)(random, raw, others)
    return raw


def _flip(random: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    if not raw:
        return raw
    at = random.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ (1 << random.randrange(8))]) + raw[at + 1 :]


def _overwrite(random: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    at = random.randrange(len(raw) + 1)
    return raw[:at] + bytes([random.randrange(256)]) + raw[at + 1 :]


def _cut(random: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    at = random.randrange(len(raw) + 1)
    return raw[:at] if random.random() < 0.5 else raw[:at] + raw[at + random.randrange(40) :]


def _insert(random: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    at = random.randrange(len(raw) + 1)
    return raw[:at] + random.choice(TOKENS) + raw[at + random.choice((0, 0, 1, 8)) :]


def _repeat(random: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    at = random.randrange(len(raw) + 1)
    piece = raw[at : at + random.randrange(200)]
    return raw[:at] + piece * random.choice((2, 2, 3, 9)) + raw[at + len(piece) :]


def _splice(random: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    other = random.choice(others)
    begin, at = random.randrange(len(other) + 1), random.randrange(len(raw) + 1)
    return raw[:at] + other[begin : begin + random.randrange(200)] + raw[at + random.choice((0, 8, 64)) :]


_Change = Callable[[random.Random, bytes, Sequence[bytes]], bytes]
_CHANGES: Final[Sequence[_Change]] = (_flip, _flip, _overwrite, _cut, _insert, _insert, _repeat, _splice)


def spoilt(random: random.Random, data: Any) -> Any:
    """Put other values, or none, in some places of JSON data, and return them."""
    for _ in range(random.choice((1, 1, 2, 3))):
        holders = places(data)
        if not holders:
            return random.choice(VALUES)
        holder, name = random.choice(holders)
        change = random.randrange(4)
        if change == 0:
            del holder[name]
        elif change == 1:
            other, from_ = random.choice(holders)
            holder[name] = copy.deepcopy(other[from_])
        else:
            holder[name] = copy.deepcopy(random.choice(VALUES))
    return data


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return every list and object inside with each of its indices or names."""
    found: list[tuple[Any, Any]] = []
    waiting = [data]
    for holder in waiting:
        if isinstance(holder, dict | list):
            for name in holder if isinstance(holder, dict) else range(len(holder)):
                found.append((holder, name))
                waiting.append(holder[name])
    return found


def json_text(random: random.Random, data: Any) -> bytes:
    """Return data as JSON, sometimes in another form."""
    how: dict[str, Any] = {"separators": (",", ":")}
    if random.random() < 0.1:
        how = {"ensure_ascii": random.random() < 0.5, "indent": random.choice((None, 2))}
    return json.dumps(data, **how).encode("utf-8", "surrogatepass")
