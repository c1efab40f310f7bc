# SPDX-License-Identifier: Apache-2.0
"""`ejkernel tune --estimate`: candidates ordered by the simulator of a compiler, without the device."""

from __future__ import annotations

import time

import click

from ejkernel.cli import report
from ejkernel.cli.progress import bars
from ejkernel.cli.sources import Source, find_on
from ejkernel.cli.tune import TuneOptions, messages
from ejkernel.ops.autotuner.compile.estimating import estimate_calls
from ejkernel.ops.autotuner.compile.simulation import check_simulated
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.compile.threads import default_width
from ejkernel.ops.config.estimates import PRUNED_FROM, EstimatedRow, EstimateFiles, Estimates
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.errors import ConfigError, TuningError
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.formatting import arguments, compact, counted, durations
from ejkernel.ops.utils.storage.serialize import to_data

_SHOWN = 5  # configurations of a call without --verbose


def run_estimate(options: TuneOptions, device: str) -> int:
    """Estimate the candidates of a program's calls and store the estimates; return 1 if there is no estimate."""
    console, aim = messages(), Target.named(device)
    check_simulated(aim)
    store = PersistentCache(options.cache)
    reason = store.why_not_writable()
    if reason is not None or store.path is None:
        raise ConfigError(
            f"{store.path} cannot be written: {reason}; choose a folder with --cache or EJKERNEL_CACHE_DIR."
        )
    found = find_on(Source.of(options.target, options.imports, shapes=options.shapes), aim)
    console.print(report.found(found.name, found.calls, aim.fingerprint))
    if not found.calls:
        raise TuningError(found.empty)
    started = time.monotonic()
    count = options.compile_processes or default_width()
    with bars(console, [inv.op_id for inv in found.calls], "estimating", measures=False) as shown:
        estimates = estimate_calls(found.calls, aim, processes=count, progress=shown.step)
    for each in estimates:
        if each.ranked:
            EstimateFiles(store.path).put(each)
    if options.as_json:
        report.echo_json(to_data(estimates))
    else:
        click.echo("\n\n".join(_as_text(each, verbose=options.verbose) for each in estimates))
    rows = [row for each in estimates for row in each.rows]
    some = sum(row.us is not None for row in rows)
    again = options.target or f"--shapes {options.shapes}"
    console.print(
        f"{some} of {counted(len(rows), 'candidate')} estimated in {time.monotonic() - started:.1f} s, none measured; "
        f"stored in {store.path}. `ejkernel tune {again}` on the device, with this folder as its cache, "
        f"measures the fastest first, and none of {PRUNED_FROM} times the best estimate or more",
    )
    return 0 if some else 1


def _as_text(found: Estimates, *, verbose: bool) -> str:
    ranked, call = found.ranked, found.call
    refused = [row for row in found.rows if row.us is None]
    shown = ranked if verbose else [row for at, row in enumerate(ranked) if at < _SHOWN or row.is_heuristic]
    times = durations(None if row.us is None else row.us / 1e6 for row in shown)
    cells = [
        ("h" if row.is_heuristic else "", _name(row), us, f"{row.cycles:,.0f}", _of_best(row, ranked[0]))
        for row, us in zip(shown, times, strict=True)
    ]
    lines = [printable(f"{found.key['op']}  {arguments(call)}"), f"{found.key['device']}: {found.source()}"]
    lines.append(report.table(("", "configuration", "estimated", "cycles", "of best"), cells))
    if len(shown) < len(ranked):
        lines.append(f"and {len(ranked) - len(shown)} slower ones (--verbose)")
    reasons: dict[str, list[EstimatedRow]] = {}
    for row in refused:
        reasons.setdefault(row.reason, []).append(row)
    lines += [
        f"{len(rows)} x {printable(' '.join(reason.split()))}, e.g. {_name(rows[0])}"
        for reason, rows in reasons.items()
    ]
    return "\n".join(lines)


def _name(row: EstimatedRow) -> str:
    return printable(compact(row.config))


def _of_best(row: EstimatedRow, best: EstimatedRow) -> str:
    ratio, least = ((us or 0.0) / (best.us or 1.0) for us in (row.us, row.us if row.least_us is None else row.least_us))
    return f"{ratio:.2f}, pruned" if least >= PRUNED_FROM and not row.is_heuristic else f"{ratio:.2f}"
