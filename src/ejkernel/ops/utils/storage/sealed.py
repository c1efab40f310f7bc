# SPDX-License-Identifier: Apache-2.0
"""Sealed texts: they end with a digest of their content, so that damaged files are rejected.

The digest detects damage, not an attack: a user who can write the file can also write the digest. Without a digest,
one flipped byte in three hundred yields a different configuration. Files of earlier versions have no digest and are
misses with a warning; accepting them would also accept damaged files. A text of lines is written once, as a whole, so
it has one digest for all lines.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from ejkernel.ops.errors import SerializationError
from ejkernel.ops.utils.storage.serialize import parse_json, to_json

_MEMBER: Final = "sha256"
_OBJECT: Final = f',\n  "{_MEMBER}": "%s"\n}}\n'  # replaces the end of an object written by `to_json`
_LINE: Final = f'{{"{_MEMBER}":"%s"}}\n'
_DIGITS: Final = hashlib.sha256().digest_size * 2
_CHANGED: Final = "its content was edited or cut off: the digest does not match"


def digest_of(raw: bytes) -> str:
    """Return the digest of a file's content."""
    return hashlib.sha256(raw).hexdigest()


def sealed_json(obj: object) -> str:
    """Return an object with fields as readable JSON, like `to_json`, with its digest as the last member.

    Raises:
        SerializationError: A value inside has no JSON form.
    """
    return sealed_object(to_json(obj))


def sealed_object(text: str) -> str:
    """Return an indented JSON object with its digest appended as the last member."""
    body = text.removesuffix("\n}")
    return body + _OBJECT % digest_of(body.encode())


def sealed_lines(text: str) -> str:
    """Return complete lines with a further line that holds their digest."""
    return text + _LINE % digest_of(text.encode())


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
    data = parse_json(decoded(raw))
    check_schema(data, schema, what)
    if not whole:
        raise SerializationError(_CHANGED)
    del data[_MEMBER]
    return data  # type: ignore[no-any-return]  # it has a schema


def read_lines(raw: bytes, schema: int, what: str) -> list[str]:
    """Return the lines of a text from `sealed_lines`, without the digest; the first line holds the schema.

    Raises:
        SerializationError: See `read_object`.
    """
    lines = decoded(raw).split("\n")  # not splitlines, which also splits at other Unicode line separators
    if not _is_whole(raw, _LINE):
        check_schema(parse_json(lines[0]), schema, what)
        raise SerializationError(_CHANGED)
    if len(lines) < 3 or not lines[-2].startswith(_LINE[:3]):
        raise SerializationError("it has no complete lines before its digest")
    return lines[:-2]


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
