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
from ejkernel.ops.autotuner.compile.prepared import estimates_as_text
from ejkernel.ops.autotuner.compile.simulation import check_simulated
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.compile.threads import default_width
from ejkernel.ops.config.estimates import PRUNED_FROM, EstimateFiles
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.errors import ConfigError, TuningError
from ejkernel.ops.utils.formatting import counted
from ejkernel.ops.utils.storage.serialize import to_data


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
        click.echo("\n\n".join(estimates_as_text(each, verbose=options.verbose) for each in estimates))
    rows = [row for each in estimates for row in each.rows]
    some = sum(row.us is not None for row in rows)
    again = options.target or f"--shapes {options.shapes}"
    console.print(
        f"{some} of {counted(len(rows), 'candidate')} estimated in {time.monotonic() - started:.1f} s, none measured; "
        f"stored in {store.path}. `ejkernel tune {again}` on the device, with this folder as its cache, "
        f"measures the fastest first, and none of {PRUNED_FROM} times the best estimate or more",
    )
    return 0 if some else 1
