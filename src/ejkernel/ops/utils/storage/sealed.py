# SPDX-License-Identifier: Apache-2.0
"""Texts that end with the digest of all that is before it, so that what was changed later is not read.

The digest tells damage, not an enemy: whoever may write a file may write its digest. Without it one flipped byte in
three hundred is another configuration. Files of before have none, and are a warned miss: to read them would keep the
door open that digests close. A text of lines has one digest for all of them, because it is written once and whole.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from ejkernel.ops.errors import SerializationError
from ejkernel.ops.utils.storage.serialize import parse_json, to_json

_MEMBER: Final = "sha256"
_OBJECT: Final = f',\n  "{_MEMBER}": "%s"\n}}\n'  # in place of the end of an object that `to_json` wrote
_LINE: Final = f'{{"{_MEMBER}":"%s"}}\n'
_DIGITS: Final = hashlib.sha256().digest_size * 2
_CHANGED: Final = "it is not what was written: its digest is another's. Was it edited, or cut off?"


def digest_of(raw: bytes) -> str:
    """Return the digest of a file's content."""
    return hashlib.sha256(raw).hexdigest()


def sealed_json(obj: object) -> str:
    """Return what has fields as JSON for people, as `to_json` does, with its digest as the last member.

    Raises:
        SerializationError: something inside has no JSON form.
    """
    return sealed_object(to_json(obj))


def sealed_object(text: str) -> str:
    """Return the text of an indented JSON object with its digest as the last member."""
    body = text.removesuffix("\n}")
    return body + _OBJECT % digest_of(body.encode())


def sealed_lines(text: str) -> str:
    """Return whole lines with a last one that has their digest."""
    return text + _LINE % digest_of(text.encode())


def read_object(raw: bytes, schema: int, what: str) -> dict[str, Any]:
    """Return the JSON object of a text that `sealed_json` made, without the digest.

    Args:
        raw: The text.
        schema: The layout that is read.
        what: What the text ought to be, in words.

    Raises:
        SerializationError: it is no such object, or of another layout, or is not what was written.
    """
    whole = _is_whole(raw, _OBJECT)
    data = parse_json(decoded(raw))
    check_schema(data, schema, what)
    if not whole:
        raise SerializationError(_CHANGED)
    del data[_MEMBER]
    return data  # type: ignore[no-any-return]  # it has a schema


def read_lines(raw: bytes, schema: int, what: str) -> list[str]:
    """Return the lines of a text that `sealed_lines` made, without the digest; the first is an object with a schema.

    Raises:
        SerializationError: as `read_object` does.
    """
    lines = decoded(raw).split("\n")  # not splitlines: a text may hold what Unicode calls a line's end
    if not _is_whole(raw, _LINE):
        check_schema(parse_json(lines[0]), schema, what)
        raise SerializationError(_CHANGED)
    if len(lines) < 3 or not lines[-2].startswith(_LINE[:3]):
        raise SerializationError("it has no whole lines before its digest")
    return lines[:-2]


def check_schema(data: object, schema: int, what: str) -> None:
    """Raise unless stored data are of this layout.

    Args:
        data: What the file holds.
        schema: The layout that is read.
        what: What the file ought to be, in words.

    Raises:
        SerializationError: they are of another, or no such thing.
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
        SerializationError: they are not UTF-8.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SerializationError(f"it is not UTF-8: {error}") from error


def _is_whole(raw: bytes, form: str) -> bool:
    end = len(raw) - (len(form) - len("%s") + _DIGITS)
    return end >= 0 and raw[end:] == (form % digest_of(raw[:end])).encode()
