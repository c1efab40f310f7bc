# SPDX-License-Identifier: Apache-2.0
"""`ejkernel cache verify`, `prune` and `clear`: checks and removes the files of a cache folder."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import jax

from ejkernel import settings
from ejkernel.cli import report
from ejkernel.cli.programs import import_named
from ejkernel.cli.show import opened
from ejkernel.ops.autotuner.store.measurements import LOG, read_search
from ejkernel.ops.autotuner.store.saving import heuristic_since, why_not_run
from ejkernel.ops.autotuner.trials.status import SearchState
from ejkernel.ops.config._files import ENTRY, UnusableError, files, is_url
from ejkernel.ops.config._writing import Seen, is_being_written, remove_judged, restore_aside, seen
from ejkernel.ops.config.entries import (
    UNKNOWN,
    Difference,
    StoredEntry,
    decoded,
    differences,
    measured_with,
    read_entry,
    space_digest,
    text_of_differences,
)
from ejkernel.ops.config.estimates import FOLDER as ESTIMATES
from ejkernel.ops.config.estimates import EstimateFiles
from ejkernel.ops.config.misses.notes import FOLDER as NOTES
from ejkernel.ops.config.misses.notes import MissedNotes
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.shared.layer import FOLDER
from ejkernel.ops.config.shared.packs import SUFFIX, verify
from ejkernel.ops.core.declared_names import config_type_of
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import kernel_of
from ejkernel.ops.errors import ConfigError, DescriptionError
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.formatting import compact, counted, is_terminal

logger = logging.getLogger(__name__)

CallOf = Callable[[StoredEntry], Invocation[Any, Any] | None]
_KINDS: Final = {
    "entry": "entries",
    "search": "searches",
    "note": "notes",
    "estimate": "estimates",
    "pack": "packs",
    "folder": "folders",
}
_RARE: Final = ("estimate", "pack", "folder")  # shown only if present; a folder is counted only if it is unusable
# Names of files written by this package; other programs may keep files in the same folder.
_OURS: Final = re.compile(
    r"[a-z0-9._-]+-[0-9a-f]{8}(\.json|\.\d{8}T\d{6}Z-[0-9a-f]{12}\.jsonl)|[0-9a-f]{32}\.pack|\..+\.tmp"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A file of a cache folder.

    Attributes:
        path: Its path.
        kind: `entry`, `search`, `note`, `pack` (in the copy of a shared cache), or `folder` (a link, or unreadable).
        problem: Why it is unusable; empty if usable.
        time: The time of writing, if known.
        jax: The JAX version of the measurement; empty if unknown.
        failed: Whether it is a search in which nothing could be measured.
        fails: Why the call of a readable entry does not run with it, if its kernel is known.
        stale: Differences of an entry from the current environment.
        unknown: Names of environment properties missing in an entry.
        seen: Identifies the checked content of the file.
    """

    path: Path
    kind: str
    problem: str = ""
    time: datetime.datetime | None = None
    jax: str = ""
    failed: bool = False
    fails: str = ""
    stale: tuple[Difference, ...] = ()
    unknown: tuple[str, ...] = ()
    seen: Seen | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the file may be removed: it was readable, or its name has our format."""
        return self.kind != "folder" and (not self.problem or _OURS.fullmatch(self.path.name) is not None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The files that `prune` removes.

    Attributes:
        older_than: Only older files; `None`: any age.
        other_jax: Only files measured with another version of JAX.
        failed: Only searches in which nothing could be measured.
        unreadable: Also unusable files.
    """

    older_than: datetime.timedelta | None = None
    other_jax: bool = False
    failed: bool = False
    unreadable: bool = False

    def has(self, item: Item, now: datetime.datetime) -> bool:
        """Return whether to remove a file."""
        if item.problem:
            return self.unreadable and item.is_ours
        if self.older_than is None and not self.other_jax and not self.failed:
            return False
        is_old = self.older_than is None or (item.time is not None and now - item.time > self.older_than)
        is_of_this_jax = item.jax in ("", jax.__version__)
        return is_old and not (self.other_jax and is_of_this_jax) and (item.failed or not self.failed)


def items(folder: Path | None, call_of: CallOf | None = None) -> Iterator[Item]:
    """Yield every file of a cache's writable folder.

    Args:
        folder: The folder; `None`: the user has none.
        call_of: Returns the call of an entry, if its kernel is known.
    """
    if folder is None:
        return
    notes, estimates = MissedNotes(folder), EstimateFiles(folder)
    found: tuple[tuple[str, Sequence[Any], Callable[[Any], Any]], ...] = (
        ("entry", list(files(folder, ENTRY)), read_entry),
        ("search", list(files(folder, LOG)), read_search),
        ("note", notes.files(), notes.read),
        ("estimate", list(estimates.files()), estimates.read),
        ("pack", _packs(folder), _verified),
    )
    for kind, paths, read in found:
        for path in paths:
            was = None
            try:
                was = seen(folder, path)  # before reading, so that a later change is detected
                content = read(path)
            except FileNotFoundError:
                continue
            except (UnusableError, OSError) as error:
                yield Item(path=path, kind=kind, problem=str(error), seen=was)
                continue
            if content is not None:
                provenance = {"time": content.last} if kind == "note" else getattr(content, "provenance", {})
                more: dict[str, Any] = _staleness(content, call_of) if kind == "entry" else {}
                more |= {"failed": content.progress.state == SearchState.FAILED} if kind == "search" else {}
                yield _item(path, kind, provenance, seen=was, **more)
    yield from _unlisted(folder)


def _folders(root: Path, failed: Callable[[OSError], object] = lambda error: None) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folders of a cache from the outside in, each with the names of its links to folders.

    Links are not followed, and folders deeper than a cache's layout are skipped.
    """
    for path, folders, _ in os.walk(root, onerror=failed):
        yield Path(path), sorted(name for name in folders if os.path.islink(os.path.join(path, name)))
        parts = Path(path).relative_to(root).parts
        if len(parts) >= (3 if parts[:1] in ((NOTES,), (ESTIMATES,)) else 2):
            folders.clear()


def _unlisted(root: Path) -> Iterator[Item]:
    """Yield the folders that cannot be listed or are links."""
    failed: list[OSError] = []
    for path, links in _folders(root, failed.append):
        if len(path.relative_to(root).parts) < 2:
            problem = "it is a link, and links inside a cache are not followed"
            yield from (Item(path=path / name, kind="folder", problem=problem) for name in links)
    for error in failed:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            yield Item(path=Path(error.filename), kind="folder", problem=f"it cannot be listed: {error}")


def _packs(root: Path) -> list[Path]:
    copies = (folder for folder, _ in _folders(root) if folder.parent == root / FOLDER)
    return [pack for folder in copies for pack in sorted(folder.glob(f"*{SUFFIX}"))]


def _verified(pack: Path) -> Path:
    verify(pack)
    return pack


def item_of(entry: StoredEntry) -> Item:
    """Return an entry as an item; the entry need not have a file."""
    return _item(entry.path or Path(), "entry", entry.provenance)


def _item(path: Path, kind: str, provenance: Mapping[str, Any], **known: Any) -> Item:
    time = None
    with contextlib.suppress(ValueError):  # another program may have written the file
        time = datetime.datetime.fromisoformat(str(provenance.get("time")))
        time = time.replace(tzinfo=datetime.UTC) if time.tzinfo is None else time
    return Item(path=path, kind=kind, time=time, jax=str(provenance.get("jax") or ""), **known)


def _staleness(entry: StoredEntry, call_of: CallOf | None) -> dict[str, Any]:
    inv = None if call_of is None else call_of(entry)
    unknown = tuple(name for name, value in measured_with(entry).items() if value == UNKNOWN)
    if inv is None:
        return {"stale": differences(entry), "unknown": unknown}
    kernel, fails = kernel_of(inv), ""
    changed: tuple[Difference, ...] = ()
    try:
        config = decoded(entry, config_type_of(inv, kernel))
    except UnusableError as error:
        fails = str(error)
    else:
        why = why_not_run(kernel, inv, config)
        fails = f"its configuration {compact(config)} does not run: {why}" if why else ""
        changed = heuristic_since(kernel, inv, config, entry)
    found = (*differences(entry, space_digest(kernel, inv)), *changed)
    return {"stale": found, "unknown": unknown, "fails": fails}


def run_verify(cache: Path | None, imports: tuple[str, ...], *, as_json: bool) -> int:
    """Run `ejkernel cache verify`; return 1 if a file is unusable, a layer is missing, or another folder was meant."""
    store = opened(cache, alone=True)
    layers = _layers() if cache is None else []
    import_named(imports)
    by_folder = {str(each.path): list(items(each.path, _call_of if imports else None)) for each in (store, *layers)}
    found = [item for those in by_folder.values() for item in those]
    bad = [item for item in found if item.problem or item.fails]
    missing = [str(layer.path) for layer in layers if layer.path is None or not layer.path.is_dir()]
    if as_json:
        report.echo_json(_verified_as_data(found, list(by_folder)) | {"missing": missing})
    else:
        _print_verified(by_folder, bad, {str(each.path): each.fault for each in (store, *layers)})
    is_another_meant = any(each.fault for each in (store, *layers) if each.path is not None and each.path.is_dir())
    return 1 if bad or missing or is_another_meant else 0


def _layers() -> list[PersistentCache]:
    """Return the folders of EJKERNEL_CACHE_LAYERS; the copies of its URLs are in the cache folder."""
    return [PersistentCache(place, layers=()) for place in settings.current().cache_layers if not is_url(place)]


def _verified_as_data(found: Sequence[Item], folders: Sequence[str]) -> dict[str, Any]:
    counts = collections.Counter(item.kind for item in found)
    differing = ((str(item.path), [each._asdict() for each in item.stale]) for item in found if item.stale)
    bad = (item for item in found if item.problem or item.fails)
    return {plural: counts[kind] for kind, plural in _KINDS.items()} | {
        "folder": folders[0],
        "layers": folders[1:],
        "unusable": [{"file": str(item.path), "kind": item.kind, "reason": item.problem or item.fails} for item in bad],
        "stale": [{"file": file, "differences": differences} for file, differences in differing],
        "unknown": collections.Counter(name for item in found for name in item.unknown),
    }


def _print_verified(by_folder: Mapping[str, Sequence[Item]], bad: Sequence[Item], faults: Mapping[str, str]) -> None:
    for item in bad:
        click.echo(f"{printable(item.path)}: {printable(item.problem or item.fails)}")
    stale = [(text_of_differences(item.stale), item) for found in by_folder.values() for item in found if item.stale]
    for words, count in collections.Counter(words for words, _ in stale).most_common():
        click.echo(f"{counted(count, 'entry', 'entries')}: {words}")
        for item in [item for other, item in stale if other == words]:
            if any(each.field in ("space", "heuristic") for each in item.stale):  # few, and to be tuned again
                click.echo(f"  {printable(item.path)}")
    written = next(iter(by_folder))
    for folder, found in by_folder.items():
        counts = _counts(found)
        unusable = [item for item in found if item.problem or item.fails]
        state = _usable(len(found), unusable, folder="" if folder == written else folder)
        click.echo(faults[folder] or f"{folder}: {counts}; {state}")


def _usable(count: int, bad: Sequence[Item], *, folder: str = "") -> str:
    if not bad:
        return "all files are usable" if count else "no files of ejkernel"
    ours = sum(item.is_ours for item in bad if not item.fails)
    unusable = counted(len(bad), "unusable file")
    if failing := sum(bool(item.fails) for item in bad):
        unusable += f", {failing} of calls that `ejkernel tune` tunes again"
    if not ours:  # files of other programs, and folders that cannot be listed
        return unusable
    such = "all" if ours == len(bad) else str(ours)
    of_folder = f" --cache {shlex.quote(folder)}" if folder else ""
    return f"{unusable}; `ejkernel cache prune --unreadable{of_folder}` removes {such} of them"


def _counts(found: Iterable[Item]) -> str:
    counts = collections.Counter(item.kind for item in found)
    shown = (kind for kind in _KINDS if kind not in _RARE or counts[kind])
    return ", ".join(counted(counts[kind], kind, _KINDS[kind]) for kind in shown)


def _call_of(entry: StoredEntry) -> Invocation[Any, Any] | None:
    """Return the call of an entry for this device; `None` if its kernel is not registered."""
    if entry.key.device != device_fingerprint():
        return None
    try:
        return rebuild(entry.call, key=entry.key.call, op=entry.key.op)
    except DescriptionError as error:
        logger.info("the kernel of %s is unknown: %s", entry.path, error)
        return None


def run_prune(cache: Path | None, wanted: Wanted, *, dry_run: bool, as_json: bool) -> None:
    """Run `ejkernel cache prune`."""
    store, folder = _opened(cache, dry_run=dry_run)
    now = store.clock()
    found = [item for item in items(folder) if wanted.has(item, now)]
    _remove(store, folder, found, dry_run=dry_run, as_json=as_json)


def run_clear(
    cache: Path | None, *, yes: bool, dry_run: bool, as_json: bool, older_than: datetime.timedelta | None = None
) -> int:
    """Run `ejkernel cache clear`; return 1 if the user declines."""
    store, folder = _opened(cache, dry_run=dry_run)
    wanted, now = Wanted(older_than=older_than), store.clock()
    found = [item for item in items(folder) if item.is_ours and (older_than is None or wanted.has(item, now))]
    if found and not yes and not dry_run:
        # Without a terminal a prompt would wait forever.
        if not is_terminal(sys.stdin):
            raise click.UsageError("cannot ask without a terminal; pass --yes, or --dry-run to list the files.")
        counts = _counts(found)
        if not click.confirm(f"Remove {counts} from {folder}?", err=True):
            click.echo("Nothing was removed.")
            return 1
    _remove(store, folder, found, dry_run=dry_run, as_json=as_json)
    if not dry_run:
        _tidy(folder)
    return 0


def _opened(cache: Path | None, *, dry_run: bool) -> tuple[PersistentCache, Path]:
    """Return a cache with its folder and, unless in a dry run, restore files that a killed command renamed aside."""
    store = opened(cache, alone=True)
    assert store.path is not None  # `opened` raises without a folder
    for inner, _ in [] if dry_run else _folders(store.path):
        restore_aside(store.path, inner)
    return store, store.path


def _remove(store: PersistentCache, folder: Path, found: Sequence[Item], *, dry_run: bool, as_json: bool) -> None:
    if not found and store.fault:
        click.echo(f"{store.fault}.", err=True)
    removed, failures, changed = [], [], 0
    for item in found:
        try:
            is_gone = dry_run or remove_judged(folder, item.path, item.seen)
        except OSError as error:
            failures.append(f"{item.path} ({error})")
        else:
            removed += [item] * is_gone
            changed += not is_gone
    if changed:
        click.echo(f"{counted(changed, 'file')} kept: replaced by another process during the command.", err=True)
    if as_json:
        paths = [str(item.path) for item in removed]
        report.echo_json({"folder": str(folder), "removed": paths, "dry_run": dry_run})
    else:
        counts = _counts(removed)
        click.echo(f"{folder}: {counts} {'would be removed' if dry_run else 'removed'}")
    if failures:
        raise ConfigError(f"{counted(len(failures), 'file')} could not be removed: {', '.join(failures[:3])}")


def _tidy(folder: Path) -> None:
    """Remove temporary files of killed processes, and empty folders."""
    for inner, _ in reversed(list(_folders(folder))):
        for file in inner.glob(".*.tmp"):
            if not is_being_written(file.name):
                file.unlink(missing_ok=True)
        if inner != folder:
            with contextlib.suppress(OSError):  # not empty
                inner.rmdir()
