# SPDX-License-Identifier: Apache-2.0
"""`ejkernel tune --compile-only` and `--estimate`: candidates compiled or simulated for a device of another machine."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import click

from ejkernel.cli import report
from ejkernel.cli.files import Found
from ejkernel.cli.progress import bars
from ejkernel.cli.sources import Source, TuneOptions, find_on
from ejkernel.cli.time_left import TimeLeft
from ejkernel.cli.tune import messages, writable
from ejkernel.ops.autotuner.compile.prepared import PreparedCalls, bundle_as_text, estimates_as_text
from ejkernel.ops.autotuner.compile.simulation import check_simulated
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.config.estimates import PRUNED_FROM
from ejkernel.ops.errors import TuningError
from ejkernel.ops.execution.targeted import Preparation
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.fingerprint import name_of_device
from ejkernel.ops.utils.formatting import arguments, compact, counted
from ejkernel.ops.utils.storage.serialize import to_data


def run_compile(options: TuneOptions, device: str, output: Path) -> None:
    """Compile the candidates of a program's calls, or of a file of shapes, for `device` into the bundle `output`.

    With `--dry-run`, list them.
    """
    console = messages()
    aim = Target.named(device)
    source = Source.of(options.target, options.imports, shapes=options.shapes, platform=aim.platform)
    found = _found(options, source, aim)
    preparation = Preparation(aim=aim, folder=output)
    if options.dry_run:
        _list(options, found, preparation)
        return
    operations, started = [inv.op_id for inv in found.calls], time.monotonic()
    # By default one per core, so that a crash costs only its candidate.
    processes: dict[str, Any] = {} if options.compile_processes is None else {"processes": options.compile_processes}
    with bars(console, TimeLeft(operations, measures=False), "compiling") as shown:
        made = preparation.run(found.in_sets, None, progress=shown.step, **processes)
    click.echo(bundle_as_text(made.bundled, verbose=options.verbose))
    # Measuring a bundle imports nothing by itself, so the printed command names the modules.
    modules = source.imports or ((source.program.module,) if source.program is not None else ())
    again = [] if options.shapes is None else ["--shapes", str(options.shapes)]
    given = [word for module in modules for word in ("--import", module)]
    measure = shlex.join(["ejkernel", "tune", "--from", str(output), *again, *given])
    aimed = "this machine (--target names another)" if device == "here" else device
    console.print(
        f"{_share(made, Status.READY)} compiled for {aimed} in {time.monotonic() - started:.1f} s, "
        f"written to {output}; measure them on the machine with the device: {measure}",
    )


def run_estimate(options: TuneOptions, device: str) -> int:
    """Estimate the candidates of a program's calls and store the estimates; return 1 without any estimate.

    With `--dry-run`, list the candidates and return 0.
    """
    console, aim = messages(), Target.named(device)
    check_simulated(aim)
    preparation = Preparation(aim=aim, folder=None)
    source = Source.of(options.target, options.imports, shapes=options.shapes)
    if options.dry_run:
        _list(options, _found(options, source, aim), preparation)
        return 0
    store = writable(options.cache)
    found = _found(options, source, aim)
    operations, started = [inv.op_id for inv in found.calls], time.monotonic()
    processes: dict[str, Any] = {"processes": options.compile_processes} if options.compile_processes else {}
    with bars(console, TimeLeft(operations, measures=False), "estimating") as shown:
        made = preparation.run(found.in_sets, store, progress=shown.step, **processes)
    if options.as_json:
        report.echo_json(to_data(made.estimates))
    else:
        click.echo("\n\n".join(estimates_as_text(each, verbose=options.verbose) for each in made.estimates))
    again = shlex.join([options.target] if options.target else ["--shapes", str(options.shapes)])
    has_some = "estimated" in made.statuses
    order = f"the fastest first, and none of {PRUNED_FROM} times the best estimate or more"
    console.print(
        f"{_share(made, 'estimated')} estimated in {time.monotonic() - started:.1f} s, none measured; "
        f"stored in {store.path}. `ejkernel tune {again}` on the device, with this folder as its cache, "
        f"measures {order if has_some else 'all of them'}",
    )
    return 0 if has_some else 1


def _list(options: TuneOptions, found: Found, preparation: Preparation) -> None:
    """Print the calls and how many candidates would be prepared; with `--verbose` also these."""
    planned = preparation.planned(found.in_sets)
    if options.as_json:
        report.echo_json([{**inv.description, "candidates": list(map(to_data, configs))} for inv, configs in planned])
        return
    for inv, configs in planned:
        click.echo(printable(f"{inv.op_id}  {arguments(inv.description)}: {counted(len(configs), 'candidate')}"))
        for config in configs if options.verbose else ():
            click.echo(f"  {printable(compact(config))}")
    doing = "estimated" if preparation.folder is None else "compiled"
    count = counted(sum(len(configs) for _, configs in planned), "candidate")
    device = name_of_device(preparation.aim.fingerprint)
    messages().print(f"{count} of {counted(len(planned), 'call')} would be {doing} for {device}")


def _share(made: PreparedCalls, status: str) -> str:
    """Return the number of candidates with a status, of all, in words."""
    return f"{made.statuses.get(status, 0)} of {counted(sum(made.statuses.values()), 'candidate')}"


def _found(options: TuneOptions, source: Source, aim: Target) -> Found:
    """Return the calls of a program for a device, and print them; without any, raise."""
    found = find_on(source, aim, options.mesh_devices)
    messages().print(report.found(found.name, found.calls, aim.fingerprint))
    if not found.calls:
        raise TuningError(found.empty)
    return found
