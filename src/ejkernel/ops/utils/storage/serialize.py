# SPDX-License-Identifier: Apache-2.0
"""Configurations, keys and calls as JSON: strict in both directions, with the same text for the same content."""

from __future__ import annotations

import collections
import json
import math
from typing import Any, Final, TypeVar, overload

from ejkernel.ops.errors import SerializationError
from ejkernel.ops.utils.printable import printable_json
from ejkernel.ops.utils.storage.decode import decode
from ejkernel.ops.utils.storage.encode import MAX_DEPTH, dumps, plain
from ejkernel.ops.utils.storage.encode import describe as describe
from ejkernel.ops.utils.storage.encode import parse_dtype as parse_dtype
from ejkernel.ops.utils.storage.encode import stable_json as stable_json
from ejkernel.ops.utils.storage.encode import to_data as to_data

_T = TypeVar("_T")


@overload
def from_data(data: object, cls: type[_T]) -> _T: ...
@overload
def from_data(data: object, cls: object) -> Any: ...
def from_data(data: object, cls: object) -> Any:
    """Return plain JSON data as a `cls`: a dataclass, a named tuple, or any annotation such as `dict[str, int]`.

    Nothing is converted but an int to the float of the same value. Bare `dict`, `list` and `tuple`, `Any` and missing
    annotations keep the data as it is.

    Raises:
        SerializationError: A field is unknown or missing, a value has another type, or `cls` rejected the values; the
            message starts with the path.
    """
    return from_plain(plain(data), cls)


def to_json(obj: object) -> str:
    """Return `obj` as readable JSON: indented, sorted keys, printable characters. Accepts the same as `to_data`."""
    return printable_json(dumps(to_data(obj), indent=2, ensure_ascii=False))


@overload
def from_json(text: str, cls: type[_T]) -> _T: ...
@overload
def from_json(text: str, cls: object) -> Any: ...
def from_json(text: str, cls: object) -> Any:
    """Decode JSON text as a `cls`, like `from_data`; also rejects repeated keys of an object."""
    return from_plain(parse_json(text), cls)


def parse_json(text: str) -> Any:
    """Return the plain data of a JSON text.

    Raises:
        SerializationError: The text is not a single JSON value, an object has a key twice, or `to_data` would reject
            a value, e.g. NaN or a lone surrogate.
    """
    if not isinstance(text, str):
        raise SerializationError(f"text must be a str of JSON, got {describe(text)}.")
    try:
        data = _STRICT.decode(text)
    except (ValueError, RecursionError):
        data = _lenient(text)
    # checking all values takes longer than parsing, so only suspicious texts are checked
    return data if _HALF not in text and text.count("[") + text.count("{") <= MAX_DEPTH else plain(data)


def _lenient(text: str) -> Any:
    """Parse text that the strict parser rejected, to raise an error with the path of the fault."""
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SerializationError(f"$: not valid JSON ({error}); text is {describe(text)}.") from error
    return plain(data)


@overload
def from_plain(data: object, cls: type[_T]) -> _T: ...
@overload
def from_plain(data: object, cls: object) -> Any: ...
def from_plain(data: object, cls: object) -> Any:
    """Decode data from `parse_json` as a `cls`, like `from_data`."""
    return decode(data, cls)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        (repeated, _), *_ = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {describe(repeated)} twice")
    return out


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


_STRICT: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite_float, parse_constant=_finite_float)
_HALF: Final = "\\u"  # the escape of surrogates and of some other characters
