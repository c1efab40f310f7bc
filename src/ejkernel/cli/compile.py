# SPDX-License-Identifier: Apache-2.0
"""`ejkernel tune --compile-only`: compiles candidates here for a device of another machine."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ejkernel.cli import report
from ejkernel.cli.progress import bars
from ejkernel.cli.sources import Source, find_on
from ejkernel.cli.tune import TuneOptions, messages
from ejkernel.ops.autotuner.compile.bundles import compile_bundle
from ejkernel.ops.autotuner.compile.prepared import bundle_as_text
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.compile.threads import default_width
from ejkernel.ops.errors import TuningError
from ejkernel.ops.execution.targeted import shared_candidates
from ejkernel.ops.utils.formatting import counted


def run_compile(options: TuneOptions, device: str, output: Path) -> None:
    """Compile the candidates of a program's calls, or of a file of shapes, for `device` into the bundle `output`."""
    console = messages()
    aim = Target.named(device)
    source = Source.of(options.target, options.imports, shapes=options.shapes, platform=aim.platform)
    found = find_on(source, aim)
    console.print(report.found(found.name, found.calls, aim.fingerprint))
    if not found.calls:
        raise TuningError(found.empty)
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
