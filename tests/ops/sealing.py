# SPDX-License-Identifier: Apache-2.0
"""Files with changed content and valid digests: their readers must judge the content."""

from __future__ import annotations

import json

from ejkernel.ops.utils.storage.serialize import sealed_lines, sealed_object


def with_digest(data):
    """Return a JSON object as a whole text."""
    return sealed_object(json.dumps({name: value for name, value in data.items() if name != "sha256"}, indent=2))


def change_object(file, change):
    """Have `change` change the object in a file."""
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(with_digest(data), encoding="utf-8")


def lines_with_digest(text):
    """Return the text of a log with the right digest, in place of its own if it has one."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith('{"sha256"')]
    return sealed_lines("".join(lines))
