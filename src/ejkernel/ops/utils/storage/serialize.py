# SPDX-License-Identifier: Apache-2.0
"""Configurations, keys and calls as JSON: strict in both directions, with the same text for the same content.

Sealed texts end with a digest of their content, so that damaged files are rejected. The digest detects damage, not an
attack: a user who can write the file can also write the digest. Without a digest, one flipped byte in three hundred
yields a different configuration. Files of earlier versions have no digest and are misses with a warning; accepting them
would also accept damaged files. A text of lines is written once, as a whole, so it has one digest for all lines.
"""

from __future__ import annotations

import collections
import json
import math
from typing import Any, Final, TypeVar, overload

from ejkernel.ops.errors import SerializationError
from ejkernel.ops.utils.error_text import printable_json
from ejkernel.ops.utils.storage.decode import from_plain as from_plain
from ejkernel.ops.utils.storage.encode import MAX_DEPTH, dumps
from ejkernel.ops.utils.storage.encode import describe as describe
from ejkernel.ops.utils.storage.encode import parse_dtype as parse_dtype
from ejkernel.ops.utils.storage.encode import stable_json as stable_json
from ejkernel.ops.utils.storage.encode import to_data as to_data
from ejkernel.ops.utils.values.signature import digest_of as digest_of

_T = TypeVar("_T")


def to_json(obj: object) -> str:
    """Return `obj` as readable JSON: indented, sorted keys, printable characters. Accepts the same as `to_data`."""
    return printable_json(dumps(to_data(obj), indent=2, ensure_ascii=False))


@overload
def from_json(text: str, cls: type[_T]) -> _T: ...
@overload
def from_json(text: str, cls: object) -> Any: ...
def from_json(text: str, cls: object) -> Any:
    """Decode JSON text as a `cls`, like `from_plain`; also rejects repeated keys of an object."""
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
        data = STRICT.decode(text)
    except (ValueError, RecursionError):
        data = _lenient(text)
    # checking all values takes longer than parsing, so only suspicious texts are checked
    return data if _HALF not in text and text.count("[") + text.count("{") <= MAX_DEPTH else to_data(data)


def _lenient(text: str) -> Any:
    """Parse text that the strict parser rejected, to raise an error with the path of the fault."""
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SerializationError(f"$: not valid JSON ({error}); text is {describe(text)}.") from error
    return to_data(data)


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


STRICT: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite_float, parse_constant=_finite_float)
_HALF: Final = "\\u"  # the escape of surrogates and of some other characters


_DIGEST: Final = "sha256"
_OBJECT: Final = f',\n  "{_DIGEST}": "%s"\n}}\n'  # replaces the end of an object written by `to_json`
_LINE: Final = f'{{"{_DIGEST}":"%s"}}\n'
_DIGITS: Final = len(digest_of(""))
_CHANGED: Final = "its content was edited or cut off: the digest does not match"


def sealed_json(obj: object) -> str:
    """Return an object with fields as readable JSON, like `to_json`, with its digest as the last member.

    Raises:
        SerializationError: A value inside has no JSON form.
    """
    return sealed_object(to_json(obj))


def sealed_object(text: str) -> str:
    """Return an indented JSON object with its digest appended as the last member."""
    body = text.removesuffix("\n}")
    return body + _OBJECT % digest_of(body)


def sealed_lines(text: str) -> str:
    """Return complete lines with a further line that holds their digest."""
    return text + _LINE % digest_of(text)


def read_object(raw: bytes, schema: int, what: str) -> dict[str, Any]:
    """Return the JSON object of a text from `sealed_json`, without the digest.

    Args:
        raw: The text.
        schema: The expected schema version.
        what: The expected kind of content in words, e.g. "a decision".

    Raises:
        SerializationError: The text is no such object, has another schema, or was altered.
    """
    whole = _is_whole(raw, _OBJECT)
    data = _stored(decoded(raw), whole)
    check_schema(data, schema, what)
    if not whole:
        raise SerializationError(_CHANGED)
    del data[_DIGEST]
    return data  # type: ignore[no-any-return]  # it has a schema


def read_lines(raw: bytes, schema: int, what: str) -> list[str]:
    """Return the lines of a text from `sealed_lines`, without the digest; the first line holds the schema.

    Raises:
        SerializationError: See `read_object`.
    """
    lines = decoded(raw).split("\n")  # not splitlines, which also splits at other Unicode line separators
    if not _is_whole(raw, _LINE):
        check_schema(_stored(lines[0], whole=False), schema, what)
        raise SerializationError(_CHANGED)
    if len(lines) < 3 or not lines[-2].startswith(_LINE[:3]):
        raise SerializationError("it has no complete lines before its digest")
    return lines[:-2]


def _stored(text: str, whole: bool) -> Any:
    """Return the data of a stored text; without its digest, a text that is no JSON was damaged."""
    try:
        return parse_json(text)
    except SerializationError as error:
        if whole:
            raise
        raise SerializationError(_CHANGED) from error


def check_schema(data: object, schema: int, what: str) -> None:
    """Check the schema version of stored data.

    Args:
        data: The content of the file.
        schema: The expected schema version.
        what: The expected kind of content in words, e.g. "a decision".

    Raises:
        SerializationError: The data has another schema version, or none.
    """
    found = data.get("schema") if isinstance(data, dict) else None
    if type(found) is not int:
        raise SerializationError(f"it is not {what}")
    if found != schema:
        age = "a newer" if found > schema else "an older"
        raise SerializationError(f"it was written by {age} ejkernel: schema {found}, not {schema}")


def decoded(raw: bytes) -> str:
    """Return bytes as text.

    Raises:
        SerializationError: The bytes are not UTF-8.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SerializationError(f"it is not UTF-8: {error}") from error


def _is_whole(raw: bytes, form: str) -> bool:
    end = len(raw) - (len(form) - len("%s") + _DIGITS)
    return end >= 0 and raw[end:] == (form % digest_of(raw[:end])).encode()
