# SPDX-License-Identifier: Apache-2.0
"""`ejkernel cache verify`, `prune` and `clear`: every file of a cache folder, one by one."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import jax

from ejkernel.cli import report
from ejkernel.cli.show import opened
from ejkernel.ops.autotuner.store.measurements import LOG, read_search
from ejkernel.ops.config._files import ENTRY, UnusableError, files
from ejkernel.ops.config.entries import read_entry
from ejkernel.ops.config.missed import MissedNotes
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.formatting import counted
from ejkernel.ops.utils.printable import printable

_KINDS: Final = {"entry": "entries", "search": "searches", "note": "notes"}
# What is written here is called so; what somebody else keeps in the same folder is not.
_OURS: Final = re.compile(r"[a-z0-9._-]+-[0-9a-f]{8}(\.json|\.\d{8}T\d{6}Z-[0-9a-f]{12}\.jsonl)|\..+\.tmp")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A file of a cache folder.

    Attributes:
        path: Where it is.
        kind: `entry`, `search` or `note`.
        problem: Why it cannot be used; `""` if it can.
        time: When it was written; `None` if that is not known.
        jax: The version of JAX that it was measured with; `""` if none is noted.
    """

    path: Path
    kind: str
    problem: str = ""
    time: datetime.datetime | None = None
    jax: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What `prune` removes.

    Attributes:
        older_than: Only what is older; `None`: of any age.
        other_jax: Only what was measured with another version of JAX.
        unreadable: What cannot be used, too.
    """

    older_than: datetime.timedelta | None = None
    other_jax: bool = False
    unreadable: bool = False

    def has(self, item: Item, now: datetime.datetime) -> bool:
        """Return whether a file is to be removed."""
        if item.problem:
            return self.unreadable and _OURS.fullmatch(item.path.name) is not None
        if self.older_than is None and not self.other_jax:
            return False
        is_old = self.older_than is None or (item.time is not None and now - item.time > self.older_than)
        return is_old and not (self.other_jax and item.jax in ("", jax.__version__))


def items(cache: PersistentCache) -> Iterator[Item]:
    """Yield every file of the folder that is written."""
    if cache.path is None:
        return
    notes = MissedNotes(cache.path)
    found: tuple[tuple[str, Sequence[Any], Callable[[Any], Any]], ...] = (
        ("entry", list(files(cache.path, ENTRY)), read_entry),
        ("search", list(files(cache.path, LOG)), read_search),
        ("note", notes.files(), notes.read),
    )
    for kind, paths, read in found:
        for path in paths:
            try:
                content = read(path)
            except UnusableError as error:
                yield Item(path=path, kind=kind, problem=str(error))
            else:
                if content is not None:
                    provenance = {"time": content.last} if kind == "note" else content.provenance
                    yield _item(path, kind, provenance)


def _item(path: Path, kind: str, provenance: Mapping[str, Any]) -> Item:
    time = None
    with contextlib.suppress(ValueError):  # of a file that another program wrote
        time = datetime.datetime.fromisoformat(str(provenance.get("time")))
        time = time.replace(tzinfo=datetime.UTC) if time.tzinfo is None else time
    return Item(path=path, kind=kind, time=time, jax=str(provenance.get("jax") or ""))


def run_verify(cache: Path | None, *, as_json: bool) -> int:
    """Run `ejkernel cache verify`; return 1 if a file cannot be used."""
    store = opened(cache)
    found = list(items(store))
    counts = collections.Counter(item.kind for item in found)
    bad = [item for item in found if item.problem]
    if as_json:
        unusable = [{"file": str(item.path), "kind": item.kind, "reason": item.problem} for item in bad]
        totals = {plural: counts[kind] for kind, plural in _KINDS.items()}
        report.echo_json({"folder": str(store.path), **totals, "unusable": unusable})
        return 1 if bad else 0
    for item in bad:
        click.echo(f"{printable(item.path)}: {printable(item.problem)}")
    click.echo(f"{store.path}: {_counts(counts)}; {_usable(len(found), len(bad))}")
    return 1 if bad else 0


def _usable(count: int, bad: int) -> str:
    if not bad:
        return "all can be used" if count else "nothing is there"
    return f"{counted(bad, 'file')} cannot be used; `ejkernel cache prune --unreadable` removes such"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(counted(counts.get(kind, 0), kind, plural) for kind, plural in _KINDS.items())


def run_prune(cache: Path | None, wanted: Wanted, *, dry_run: bool, as_json: bool) -> None:
    """Run `ejkernel cache prune`."""
    store = opened(cache)
    now = store.clock()
    _remove(store, [item for item in items(store) if wanted.has(item, now)], dry_run=dry_run, as_json=as_json)


def run_clear(cache: Path | None, *, yes: bool, dry_run: bool, as_json: bool) -> int:
    """Run `ejkernel cache clear`; return 1 if the user does not want to."""
    store = opened(cache)
    found = [item for item in items(store) if not item.problem or _OURS.fullmatch(item.path.name)]
    if found and not yes and not dry_run:
        if not sys.stdin.isatty():
            raise click.UsageError("nobody is there to be asked; pass --yes, or --dry-run to see what would go.")
        counts = _counts(collections.Counter(item.kind for item in found))
        if not click.confirm(f"Remove {counts} from {store.path}?", err=True):
            click.echo("Nothing was removed.")
            return 1
    _remove(store, found, dry_run=dry_run, as_json=as_json)
    if not dry_run and store.path is not None:
        _tidy(store.path)
    return 0


def _remove(store: PersistentCache, found: Sequence[Item], *, dry_run: bool, as_json: bool) -> None:
    removed, failures = [], []
    for item in found:
        try:
            if not dry_run:
                item.path.unlink(missing_ok=True)  # another process may have been before
        except OSError as error:
            failures.append(f"{item.path} ({error})")
        else:
            removed.append(item)
    if as_json:
        report.echo_json(
            {
                "folder": str(store.path),
                "removed": [str(item.path) for item in removed],
                "dry_run": dry_run,
            }
        )
    else:
        counts = _counts(collections.Counter(item.kind for item in removed))
        click.echo(f"{store.path}: {counts} {'would be removed' if dry_run else 'removed'}")
    if failures:
        raise ConfigError(f"{counted(len(failures), 'file')} could not be removed: {', '.join(failures[:3])}")


def _tidy(folder: Path) -> None:
    """Remove what a process that was ended left of a write, and folders that are empty now."""
    for pattern in ("*/*/.*.tmp", "missed/*/*/.*.tmp"):
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)
    for pattern in ("missed/*/*", "missed/*", "*/*", "*"):
        for inner in folder.glob(pattern):
            if inner.is_dir() and not inner.is_symlink():
                with contextlib.suppress(OSError):  # it is not empty
                    inner.rmdir()
