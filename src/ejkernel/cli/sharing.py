# SPDX-License-Identifier: Apache-2.0
"""`ejkernel cache push`, `pull`, `diff`, `merge`, and `prune` of a URL: exchange with shared caches."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from ejkernel import settings
from ejkernel.cli import report
from ejkernel.cli.folder import Wanted, item_of
from ejkernel.cli.show import opened
from ejkernel.ops.autotuner.store.measurements import MeasurementStore
from ejkernel.ops.config._files import is_url
from ejkernel.ops.config.shared import upkeep
from ejkernel.ops.config.shared.exchange import FolderPlace, Place, Plan, SharedPlace, Step, bring, place_of, plan
from ejkernel.ops.errors import ConfigError, EjkernelError
from ejkernel.ops.utils.formatting import arguments, compact, counted

_SHOWN: Final = 50  # rows of a table; `--json` prints all


def run_push(url: str, cache: Path | None, *, merge: bool, dry_run: bool, as_json: bool) -> None:
    """Run `ejkernel cache push`."""
    folder = _folder(cache)
    target = _shared(url or _only_layer(), folder, may_be_new=True, bounded=not merge)
    if not dry_run and (mended := upkeep.mend(target)):
        click.echo(f"{target}: {counted(mended, 'damaged pack')} repaired", err=True)
    _bring([place_of(str(folder), folder)], target, dry_run=dry_run, as_json=as_json)
    if merge and not dry_run:
        fewer = upkeep.merge(target)
        click.echo(f"{target}: {counted(fewer, 'pack')} fewer", err=True)


def run_pull(url: str, cache: Path | None, *, dry_run: bool, as_json: bool) -> None:
    """Run `ejkernel cache pull`: into the folder or, without a URL, only into the copies of the layers."""
    folder = _folder(cache, may_be_new=True)
    if url:
        _bring([_shared(url, folder)], place_of(str(folder), folder), dry_run=dry_run, as_json=as_json)
        return
    places, problems = [], []
    for layer in _layers():
        try:
            places.append(_shared(layer, folder))
        except (EjkernelError, OSError) as error:  # still update the copies of the other layers
            problems.append(str(error))
    found = [(str(place), place.fetched, sum(1 for _ in place.copy.variants())) for place in places]
    if as_json:
        report.echo_json([{"url": place, "fetched": fetched, "entries": count} for place, fetched, count in found])
    else:
        for place, fetched, count in found:
            click.echo(f"{place}: {counted(fetched, 'pack')} fetched; {_entries(count)} here")
    if problems:
        raise ConfigError("; ".join(problems))


def run_merge(sources: Sequence[str], cache: Path | None, *, dry_run: bool, as_json: bool) -> None:
    """Run `ejkernel cache merge`."""
    folder = _folder(cache, may_be_new=True)
    target = place_of(str(folder), folder)
    places = [place_of(name, folder) for name in sources]
    found = plan(places, target) if dry_run else bring(places, target)
    mine = MeasurementStore(folder)
    theirs = [MeasurementStore(place.folder) for place in places if isinstance(place, FolderPlace)]
    searches = sum(mine.copy(store, dry_run=dry_run) for store in theirs)
    _print(found, target, dry_run=dry_run, as_json=as_json, searches=searches)


def run_prune_shared(url: str, cache: Path | None, wanted: Wanted, *, dry_run: bool, as_json: bool) -> None:
    """Run `ejkernel cache prune URL`: repair a shared cache, then remove `wanted` entries and merge its packs.

    With `dry_run`, only the counts are printed.
    """
    store = opened(cache, alone=True)
    target, now = _shared(url, _folder(cache), bounded=False), store.clock()
    if not dry_run:
        upkeep.mend(target)
    found = upkeep.prune(
        target, lambda entry: wanted.has(item_of(entry), now), unreadable=wanted.unreadable, dry_run=dry_run
    )
    if as_json:
        report.echo_json({"url": str(target), "dry_run": dry_run, **dataclasses.asdict(found)})
        return
    damaged = f", {counted(found.damaged, 'pack')} damaged" if found.damaged else ""
    verb = "would be removed" if dry_run else "removed"
    click.echo(f"{target}: {_entries(found.entries)} {verb}{damaged}; {counted(found.packs, 'pack')} fewer")


def run_diff(one: str, other: str, cache: Path | None, *, as_json: bool) -> int:
    """Run `ejkernel cache diff`; return 1 if the places differ."""
    folder = _folder(cache)
    theirs, ours = place_of(one, folder), place_of(other or str(folder), folder)
    found = [step for step in plan([theirs], ours).steps if step.action != "same"]
    back = plan([ours], theirs).steps
    missing = [step for step in back if step.ours is None]
    if as_json:
        data = {
            "left": str(ours),
            "right": str(theirs),
            "only_left": [step.theirs.key for step in missing],
            "only_right": [step.theirs.key for step in found if step.ours is None],
            "differing": [_as_data(step) for step in found if step.ours is not None],
        }
        report.echo_json(data)
    else:
        rows = sorted([*(_row(step) for step in found), *(_row(step, only_left=True) for step in missing)])
        _table(("device", "operation", "arguments", "left", "right", "better", "why"), rows)
        counts = _counts(found, missing, len(back))
        click.echo(f"left is {ours}, right is {theirs}: {counted(len(rows), 'difference')}: {counts}", err=True)
    return 1 if found or missing else 0


def _counts(found: Sequence[Step], missing: Sequence[Step], left: int) -> str:
    """Return the numbers of entries, given the differences, those only left, and the number of entries left."""
    added = sum(step.ours is None for step in found)
    different = len(found) - added
    same = left - len(missing) - different
    return f"{len(missing)} only left, {added} only right, {different} in both but different, {same} identical"


def _bring(sources: Sequence[Place], target: Place, *, dry_run: bool, as_json: bool) -> None:
    found = plan(sources, target) if dry_run else bring(sources, target)
    _print(found, target, dry_run=dry_run, as_json=as_json)


def _print(found: Plan, target: Place, *, dry_run: bool, as_json: bool, searches: int | None = None) -> None:
    """Print what was copied, or would be; `searches` is the number of new searches if they are copied too."""
    counts = collections.Counter(step.action for step in found.steps)
    if as_json:
        names = ("added", "replaced", "kept", "same")
        data = {"target": str(target), "dry_run": dry_run, **{name: counts[name] for name in names}}
        data |= {} if searches is None else {"searches": searches}
        report.echo_json(data | {"conflicts": [_as_data(step) for step in found.conflicts]})
        return
    if found.conflicts:
        rows = [(*_row(step)[:5], step.verdict.why, _stays(step)) for step in found.conflicts]
        _table(("device", "operation", "arguments", "ours", "theirs", "why", "stays"), rows)
        click.echo(f"{counted(len(rows), 'conflict')}: neither configuration is known to be better", err=True)
    would = "would be " if dry_run else ""
    more = "" if searches is None else f"; {counted(searches, 'search', 'searches')} {would}added"
    click.echo(
        f"{target}: {_entries(counts['added'])} {would}added, {counts['replaced']} {would}replaced by better entries; "
        f"{counts['kept']} better entries kept, {counts['same']} identical{more}"
    )


def _row(step: Step, *, only_left: bool = False) -> tuple[str, ...]:
    entry, key = step.theirs, step.theirs.key
    device, op, call = key
    call = arguments(entry.call) if entry.call is not None else call
    left = entry if only_left else step.ours
    better = "" if step.ours is None else "unknown" if step.verdict.is_conflict else _stays(step)
    # `diff` compares two places, so call them left and right.
    better = {"ours": "left", "theirs": "right"}.get(better, better)
    configs = ("-" if left is None else compact(left.config), "-" if only_left else compact(entry.config))
    why = step.verdict.why.replace("ours", "left").replace("theirs", "right")
    return device, op, call, *configs, better, why


def _stays(step: Step) -> str:
    return "theirs" if step.verdict.takes else "ours"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    if rows:
        click.echo(report.table(header, rows[:_SHOWN], "device", "arguments"))
    if len(rows) > _SHOWN:
        click.echo(f"... and {len(rows) - _SHOWN} more (--json prints all)")


def _as_data(step: Step) -> dict[str, Any]:
    return {
        "key": step.theirs.key,
        "ours": None if step.ours is None else step.ours.config,
        "theirs": step.theirs.config,
        "stays": _stays(step),
        "why": step.verdict.why,
        "conflict": step.verdict.is_conflict,
    }


def _entries(count: int) -> str:
    return counted(count, "entry", "entries")


def _folder(cache: Path | None, *, may_be_new: bool = False) -> Path:
    """Return the writable folder of the cache; create it if it is missing."""
    folder = opened(cache, alone=True, may_be_new=may_be_new).path
    assert folder is not None  # `opened` raises without a folder
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _layers() -> list[str]:
    found = [layer for layer in settings.current().cache_layers if is_url(layer)]
    if not found:
        raise ConfigError("pass a URL, or set EJKERNEL_CACHE_LAYERS to the URLs of shared caches.")
    return found


def _only_layer() -> str:
    found = _layers()
    if len(found) > 1:
        raise ConfigError(f"EJKERNEL_CACHE_LAYERS has {len(found)} URLs; pass one of them.")
    return found[0]


def _shared(url: str, folder: Path, *, may_be_new: bool = False, bounded: bool = True) -> SharedPlace:
    if not is_url(url):
        like = Path(url).absolute().as_uri() if os.sep in url else "s3://bucket/prefix or file:///shared/ejkernel"
        raise ConfigError(f"{url!r} is not a URL; pass a URL such as {like}. `ejkernel cache merge` copies to folders.")
    return SharedPlace(url, folder, may_be_new=may_be_new, bounded=bounded)
