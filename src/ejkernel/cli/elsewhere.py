# SPDX-License-Identifier: Apache-2.0
"""`ejkernel tune --compile-only` and `--estimate`: candidates compiled or simulated for a device of another machine."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.console import Console

from ejkernel.cli import report
from ejkernel.cli.files import Found
from ejkernel.cli.progress import bars
from ejkernel.cli.sources import Source, find_on
from ejkernel.cli.tune import TuneOptions, messages
from ejkernel.ops.autotuner.compile.bundles import compile_bundle
from ejkernel.ops.autotuner.compile.estimating import estimate_calls
from ejkernel.ops.autotuner.compile.prepared import bundle_as_text, estimates_as_text
from ejkernel.ops.autotuner.compile.simulation import check_simulated
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.compile.threads import default_width
from ejkernel.ops.config.estimates import PRUNED_FROM, EstimateFiles
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.errors import ConfigError, TuningError
from ejkernel.ops.execution.targeted import shared_candidates
from ejkernel.ops.utils.formatting import counted
from ejkernel.ops.utils.storage.serialize import to_data


def run_compile(options: TuneOptions, device: str, output: Path) -> None:
    """Compile the candidates of a program's calls, or of a file of shapes, for `device` into the bundle `output`."""
    console = messages()
    aim = Target.named(device)
    source = Source.of(options.target, options.imports, shapes=options.shapes, platform=aim.platform)
    found = _found(source, aim, console)
    started = time.monotonic()
    # By default one per core, so that a crash costs only its candidate.
    processes = default_width() if options.compile_processes is None else options.compile_processes
    # Calls that share a configuration need the same candidates, because each must measure all of them.
    candidates = shared_candidates(found.sets, aim) if found.sets else None
    with bars(console, [inv.op_id for inv in found.calls], "compiling", measures=False) as shown:
        bundled = compile_bundle(
            found.calls, aim, output, candidates=candidates, processes=processes, progress=shown.step
        )
    click.echo(bundle_as_text(bundled))
    made = [candidate for call in bundled for candidate in call.candidates]
    compiled = sum(candidate.program is not None for candidate in made)
    # Measuring a bundle imports nothing by itself, so the printed command names the modules.
    modules = source.imports or ((source.program.module,) if source.program is not None else ())
    again = [] if options.shapes is None else [f"--shapes {options.shapes}"]
    measure = " ".join(["ejkernel tune --from", str(output), *again, *(f"--import {module}" for module in modules)])
    console.print(
        f"{compiled} of {counted(len(made), 'candidate')} compiled in {time.monotonic() - started:.1f} s, "
        f"written to {output}; measure them on the machine with the device: {measure}",
    )


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
    found = _found(Source.of(options.target, options.imports, shapes=options.shapes), aim, console)
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


def _found(source: Source, aim: Target, console: Console) -> Found:
    """Return the calls of a program for a device, and print them; without any, raise."""
    found = find_on(source, aim)
    console.print(report.found(found.name, found.calls, aim.fingerprint))
    if not found.calls:
        raise TuningError(found.empty)
    return found
