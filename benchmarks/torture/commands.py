# SPDX-License-Identifier: Apache-2.0
"""Command lines of all kinds: the result is an answer, or a message and a status, never a traceback.

Words name only files in our folder, and no existing module, since a random command may remove files.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.torture.material import quiet, write
from benchmarks.torture.mutation import mutated
from benchmarks.torture.part import Budget, Tally
from ejkernel.cli import main

STATUSES: Final = (0, 1, 2)
_COMMANDS: Final[tuple[list[str], ...]] = (
    *(["tune"], ["explain"], ["show"], ["list"], ["cache", "path"], ["cache", "list"], ["cache", "show"]),
    *(["cache", "verify"], ["cache", "prune"], ["cache", "clear"], ["cache", "diff"], ["cache", "merge"]),
    *(["cache", "push"], ["cache", "pull"], ["cache"], [], ["tunes"]),
)
_OPTIONS: Final = (
    *("--json", "--missed", "--help", "-h", "--version", "--dry-run", "--force", "--verbose", "--yes", "--merge"),
    *("--unreadable", "--not-for-this-jax", "--in-process", "--compile-only", "--", "-", "", "--no", "-x"),
)
_VALUED: Final = (
    *("--cache", "--shapes", "--from", "--import", "--budget", "--devices", "--compile-processes", "--mesh-devices"),
    *("--target", "--output", "--log", "--older-than"),
)
_WORDS: Final = (
    *("", "tortured", "0", "1", "-1", "1e999", "nan", "inf", "30d", "999999w", "here", "nvidia_h200", "none:such", ":"),
    *("none.such", "memory://team", "nosuch://x", "file://", "MODULE:FUNCTION", "\x1b[2J", "\u202e", "a" * 5000, "é"),
    *("none", "json", "1" * 400, "0x10", "\udc80"),
)


def status_of(words: Sequence[str], *, printable: bool = True) -> int:
    """Run a command line, and return its status.

    Args:
        words: The command line.
        printable: Whether to check the output; messages about wrong usage show the user's own words.

    Raises:
        AssertionError: The status is undocumented, or the output contains control characters.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(words))
    assert status in STATUSES, f"status {status}"
    for line in (out.getvalue() + err.getvalue()).split("\n") if printable else ():
        assert line.isprintable(), f"it prints {line[:200]!r}"
    return status


def commands(budget: Budget, tally: Tally) -> None:
    """Run command lines that chance has made."""
    quiet()
    here = Path.cwd()
    os.chdir(budget.folder)
    try:
        files = write(budget.folder / "files")
        paths = [str(path.relative_to(budget.folder)) for path in (budget.folder / "files").rglob("*")]
        assert files.cache.path is not None  # it was given
        for number in budget.numbers():
            words = line_of(budget.random("commands", number), paths)
            tally.try_("command line", number, functools.partial(status_of, words, printable=False))
            tally.counts["command lines"] += 1
            if not files.entry.exists():  # it was removed, as was asked for
                files.cache.put(files.inv.key, {"rows": 2})
    finally:
        os.chdir(here)


def line_of(chance: random.Random, paths: Sequence[str]) -> list[str]:
    """Return a command line."""
    words: list[Any] = list(chance.choice(_COMMANDS))
    for _ in range(chance.randrange(6)):
        kind = chance.randrange(3)
        if kind == 0:
            words.append(chance.choice(_OPTIONS))
        elif kind == 1:
            words += [chance.choice(_VALUED), _word(chance, paths)]
        else:
            words.append(_word(chance, paths))
    if "tune" in words[:1]:
        words[1:1] = ["--dry-run", "--in-process"]
    return [word for word in words if word != "--compile-only"]


def _word(chance: random.Random, paths: Sequence[str]) -> str:
    word = chance.choice((*_WORDS, *paths)) if chance.random() < 0.5 else chance.choice(paths)
    if chance.random() < 0.2:
        word = mutated(chance, word.encode("utf-8", "replace"), [b"--json"]).decode("utf-8", "surrogateescape")
    if chance.random() < 0.02:
        return "~no-such-user/x.py:step"
    inside = word.replace("..", "").replace("~", "").replace("\0", "")
    return inside if "://" in inside else inside.lstrip("/").replace("//", "/")
