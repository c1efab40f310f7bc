# SPDX-License-Identifier: Apache-2.0
"""`ejkernel show`, and `ejkernel cache list` and `show`: the contents of a cache folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ejkernel.cli import report
from ejkernel.ops.autotuner.measure.sampling import PROCESSOR
from ejkernel.ops.autotuner.store.measurements import MeasurementStore, StoredSearch
from ejkernel.ops.autotuner.trials.challenge import CPU
from ejkernel.ops.autotuner.trials.status import SearchProgress, SearchState, stored_in_brief, stored_in_words
from ejkernel.ops.autotuner.trials.view import in_microseconds
from ejkernel.ops.config.entries import StoredEntry, time_in
from ejkernel.ops.config.persistent import PersistentCache, fault_of
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.formatting import arguments, cases, compact, stored_time, terminal_width
from ejkernel.ops.utils.messages.names import did_you_mean
from ejkernel.ops.utils.storage.serialize import to_data


def opened(cache: Path | None, *, alone: bool = False, may_be_new: bool = False) -> PersistentCache:
    """Return the cache of a folder; the default one includes its layers unless `alone`.

    A missing folder is an error if `cache` names it, unless it `may_be_new`.

    Raises:
        ConfigError: The path is not a folder, or the named folder does not exist.
    """
    store = PersistentCache(cache, layers=() if alone else None)
    if store.path is None:
        raise ConfigError("the user has no home folder for the cache; choose a folder with --cache.")
    if store.path.exists() and not store.path.is_dir():
        raise ConfigError(f"{store.path} is not a folder; choose one with --cache or EJKERNEL_CACHE_DIR.")
    # A missing --cache folder is probably a typo; the default folder is created on the first save.
    if cache is not None and not may_be_new and not store.path.exists():
        raise ConfigError(f"{fault_of(store.path)}; `ejkernel cache path` prints the default one.")
    return store


def run_show(cache: Path | None, as_json: bool, log: str | None = None, prefix: str = "") -> int:
    """Run `ejkernel show`; return 1 if the cache is empty."""
    store = opened(cache)
    if log is not None:
        _show_searches(store, [text for text in (prefix, log) if text], as_json)
        return 0
    keys: list[Any] = []
    shown: list[Any] = []  # of rows, or of data
    for _, entry in store.entries():  # one at a time: ten thousand of them take 100 MB
        keys.append(entry.key)
        if not prefix or begins(entry.key, prefix):
            shown.append(_as_data(entry) if as_json else _cells(entry))
    failed = 0
    for search in MeasurementStore(store).without_entry():
        keys.append(search.key)
        if begins(search.key, prefix):
            failed += search.progress.state == SearchState.FAILED
            shown.append(_as_data(search) if as_json else _open_cells(search))
    if prefix and not shown:
        raise none_begins(store.path, "entry", [prefix], keys)
    if as_json:
        report.echo_json(shown)
    elif shown:
        header = ("device", "operation", "call", "arguments", "configuration", "speed-up", "measured")
        click.echo(report.table(header, shown, "measured", "device", "call", "arguments"))
        if failed:
            text = "searches failed: `show --log` says why; `ejkernel cache prune --failed` removes them"
            click.echo(text if failed > 1 else text.replace("searches", "a search").replace("them", "it"), err=True)
    else:
        is_missing = not (store.path and store.path.is_dir())  # other faults are warnings
        click.echo(f"No saved configurations{f': {store.fault}' if is_missing else f' in {store.path}'}.")
    return 0 if shown else 1


def run_show_entries(cache: Path | None, prefix: str, as_json: bool) -> None:
    """Run `ejkernel cache show`."""
    store = opened(cache)
    entries = [entry for _, entry in store.entries() if begins(entry.key, prefix)]
    if not entries:
        raise none_begins(store.path, "entry", [prefix], [entry.key for _, entry in store.entries()])
    if as_json:
        report.echo_json([_as_data(entry) for entry in entries])
    else:
        click.echo("\n\n".join(map(_in_full, entries)))


def none_begins(place: object, what: str, prefixes: Sequence[str], keys: Sequence[ConfigKey]) -> ConfigError:
    """Return the error that none of `keys`, in `place`, begins with all `prefixes`; `what` they are."""
    names = {key.op.partition("@")[0] for key in keys}
    starts = " and ".join(map(repr, prefixes))
    text = f"{place} has no {what} whose key or operation starts with {starts}"
    suggestions = (did_you_mean(prefix.rpartition(":")[0] or prefix, names) for prefix in prefixes)
    return ConfigError(f"{text}{next(filter(None, suggestions), '')}")


def begins(key: ConfigKey, prefix: str) -> bool:
    """Return whether a call's key, or its operation, or `operation:key`, starts with `prefix`."""
    op, separator, call = prefix.rpartition(":")
    if separator and op in (key.op, key.op.partition("@")[0]):
        return key.call.startswith(call)
    return key.call.startswith(prefix) or key.op.startswith(prefix)


def _cells(entry: StoredEntry) -> tuple[str, ...]:
    return (
        *entry.key,
        arguments(entry.call),
        compact(entry.config),
        stored_in_brief(entry.measured, entry.speedup),
        entry.time,
    )


def _open_cells(search: StoredSearch) -> tuple[str, ...]:
    """Return the row of a call without an entry: its search is partial or failed."""
    cells = arguments(search.call), "-", search.in_a_word
    return (*search.key, *cells, time_in(search.provenance))


def _in_full(entry: StoredEntry) -> str:
    device, op, call = entry.key
    measured, versions = dict(entry.measured or {}), dict(entry.provenance)
    lines = [
        ("arguments", arguments(entry.call)),
        ("configuration", compact(entry.config)),
        ("type", entry.config_type),
        ("device", device),
        ("speed-up", stored_in_brief(entry.measured, entry.speedup)),
        ("search", stored_in_words(entry.measured)),
        *([("heuristic", _median(measured["heuristic"]))] if "heuristic" in measured else []),
        *([("winner", _winner(entry, measured["winner"]))] if "winner" in measured else []),
        *(
            (name, _words(measured[name]))
            for name in ("candidates", "seconds", "checked", "input_sets")
            if name in measured
        ),
        ("chosen as", cases(entry.measured)),
        ("measured", entry.time),
        ("with", ", ".join(f"{n} {versions[n]}" for n in ("jax", "jaxlib", "ejkernel", "driver") if versions.get(n))),
        ("file", str(entry.path or "none (entry of a shared cache or in memory)")),
    ]
    return "\n".join([printable(f"{op}  {call}"), *(f"  {name:<14}{printable(text)}" for name, text in lines if text)])


def _winner(entry: StoredEntry, times: Any) -> str:
    """Return the winner's time: the heuristic's divided by the speed-up that decided, if both are known."""
    before = entry.median_us("heuristic") if isinstance(times, dict) else None
    return _median(times if before is None or not entry.speedup else times | {"median_us": before / entry.speedup})


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _median(times: Any) -> str:
    if not isinstance(times, dict):
        return "-"
    return f"{stored_time(times.get('median_us'))}{CPU if times.get('method') == PROCESSOR else ''}"


def _show_searches(cache: PersistentCache, prefixes: Sequence[str], as_json: bool) -> None:
    """Print the search behind the configuration of each call, and a newer one that saved nothing.

    Each of `prefixes` starts the call's key or operation.
    """
    calls = MeasurementStore(cache).by_call()
    chosen = [history for key, history in calls.items() if all(begins(key, prefix) for prefix in prefixes)]
    if not chosen:
        raise none_begins(cache.path, "search", prefixes, list(calls))
    found = [search for history in chosen for search in history.shown_and_newer]
    if as_json:
        report.echo_json([_search_as_data(search) for search in found])
    else:
        click.echo("\n\n".join(search.summary(width=terminal_width()) for search in found))


def _search_as_data(search: StoredSearch) -> dict[str, Any]:
    """Return a search as its log holds it, with its state, the configuration in force, and why each candidate lost."""
    found = dict(to_data(dataclasses.replace(search, path=None)))
    del found["path"], found["is_only_here"]
    for row, outcome in zip(found["outcomes"], search.outcomes, strict=True):
        row["reason"] = outcome.reason or search.why_not_chosen(outcome)
        row["median_us"] = in_microseconds(outcome.seconds)
    return found | {"search": search.progress.data(), "in_force": search.in_force}


def _as_data(found: StoredEntry | StoredSearch) -> dict[str, Any]:
    """Return an entry, or a call without an entry (partial or failed search)."""
    progress: SearchProgress | None
    if isinstance(found, StoredEntry):
        config, measured, progress = found.config, found.measured, SearchProgress.stored_in(found.measured)
    else:
        config, measured, progress = None, None, found.progress
    return {
        "key": found.key,
        "config_type": found.config_type,
        "config": config,
        "call": found.call,
        "measured": measured,
        "search": None if progress is None else progress.data(),
        "provenance": dict(found.provenance),
    }
