# SPDX-License-Identifier: Apache-2.0
"""`ejkernel show`: what a cache folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from ejkernel.cli.report import plain_compact, render
from ejkernel.ops.config.persistent import PersistentCache


def run_show(cache: Path | None, as_json: bool) -> None:
    """Run `ejkernel show`."""
    store = PersistentCache(cache)
    entries = [entry for _, entry in store.entries()]
    if as_json:
        click.echo(json.dumps([_as_data(entry) for entry in entries], indent=2, sort_keys=True))
        return
    if not entries:
        click.echo(f"Nothing is saved in {store.path}.")
        return
    rows = Table("device", "operation", "call", "configuration", "speed-up", "measured")
    for entry in entries:
        key = tuple(entry.key) if isinstance(entry.key, tuple) and len(entry.key) == 3 else ("", "", str(entry.key))
        measured = entry.measured or {}
        speedup = measured.get("speedup")
        rows.add_row(
            *key,
            plain_compact(entry.config),
            f"{speedup:.2f}x" if isinstance(speedup, float) else "-",
            str(entry.provenance.get("time", "-"))[:16].replace("T", " "),
        )
    click.echo(render(rows))


def _as_data(entry: Any) -> dict[str, Any]:
    return {
        "key": entry.key,
        "config_type": entry.config_type,
        "config": entry.config,
        "call": entry.call,
        "measured": entry.measured,
        "provenance": dict(entry.provenance),
    }
