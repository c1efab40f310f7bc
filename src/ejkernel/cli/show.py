# SPDX-License-Identifier: Apache-2.0
"""`ejkernel show`: what a cache folder holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from ejkernel.cli.report import render
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.execution.outcome import Outcome, programs
from ejkernel.ops.execution.store import MeasurementStore, StoredSearch
from ejkernel.ops.utils.tables import arguments, compact


def run_show(cache: Path | None, as_json: bool, log: str | None = None) -> None:
    """Run `ejkernel show`."""
    store = PersistentCache(cache)
    if log is not None:
        _show_searches(store, log, as_json)
        return
    entries = [entry for _, entry in store.entries()]
    if as_json:
        click.echo(json.dumps([_as_data(entry) for entry in entries], indent=2, sort_keys=True))
        return
    if not entries:
        click.echo(f"Nothing is saved in {store.path}.")
        return
    rows = Table("device", "operation", "call", "arguments", "configuration", "speed-up", "measured")
    for entry in entries:
        key = tuple(entry.key) if isinstance(entry.key, tuple) and len(entry.key) == 3 else ("", "", str(entry.key))
        measured = entry.measured or {}
        speedup = measured.get("speedup")
        rows.add_row(
            *key,
            arguments(entry.call),
            compact(entry.config),
            f"{speedup:.2f}x" if isinstance(speedup, float) else "-",
            str(entry.provenance.get("time", "-"))[:16].replace("T", " "),
        )
    click.echo(render(rows))


def _show_searches(cache: PersistentCache, prefix: str, as_json: bool) -> None:
    """Print the searches of calls whose key, or operation, begins with `prefix`; of each call the newest."""
    found: dict[Any, StoredSearch] = {}
    for search in MeasurementStore(cache).searches():
        if search.key.call.startswith(prefix) or search.key.op.startswith(prefix):
            found.setdefault(search.key, search)
    if not found:
        raise ConfigError(f"no search is stored in {cache.path} whose call or operation begins with {prefix!r}.")
    if as_json:
        click.echo(json.dumps([_search_as_data(search) for search in found.values()], indent=2, sort_keys=True))
    else:
        click.echo("\n\n".join(search.summary() for search in found.values()))


def _search_as_data(search: StoredSearch) -> dict[str, Any]:
    winner = search.outcomes[search.winner]
    found = programs(search.outcomes)
    return {
        "key": search.key,
        "call": search.call,
        "config_type": search.config_type,
        "winner": next((index for index, (outcome, _) in enumerate(found) if outcome is winner), None),
        "seconds": search.seconds,
        "why": search.why,
        "standing": None if search.standing is None else search.standing.data(),
        "undecided": search.undecided,
        "interrupted": search.interrupted,
        "outcomes": [_program_as_data(outcome, twins) for outcome, twins in found],
        "provenance": dict(search.provenance),
    }


def _program_as_data(outcome: Outcome, twins: Sequence[Outcome]) -> dict[str, Any]:
    measured = outcome.measurement
    return {
        "config": outcome.config,
        "same": [twin.config for twin in twins],
        "status": outcome.status,
        "reason": outcome.reason,
        "median_us": None if measured is None else round(measured.median * 1e6, 4),
        "samples": 0 if measured is None else len(measured.samples),
        "method": None if measured is None else measured.method,
    }


def _as_data(entry: Any) -> dict[str, Any]:
    return {
        "key": entry.key,
        "config_type": entry.config_type,
        "config": entry.config,
        "call": entry.call,
        "measured": entry.measured,
        "provenance": dict(entry.provenance),
    }
