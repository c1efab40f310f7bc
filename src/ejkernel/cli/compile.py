# SPDX-License-Identifier: Apache-2.0
"""`ejkernel tune --compile-only`: candidates compiled here for a device that is elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ejkernel.cli import report
from ejkernel.cli.sources import Source, find
from ejkernel.cli.tune import bars, messages
from ejkernel.ops.autotuner.compile.bundles import compile_bundle
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.compile.threads import default_width
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.formatting import counted


def run_compile(target: str, imports: tuple[str, ...], device: str, output: Path, processes: int | None) -> None:
    """Compile the candidates of a program's calls for `device`, in `processes`, and write them to `output`."""
    console = messages()
    aim = Target.named(device)
    source = Source.of(target, imports, platform=aim.platform)
    with aim.entered():
        found = find(source)
    console.print(report.found(found.name, found.calls, aim.fingerprint), soft_wrap=True)
    if not found.calls:
        raise TuningError(found.empty)
    started = time.monotonic()
    processes = _processes(aim) if processes is None else processes
    with bars(console, len(found.calls), "compiling") as step:
        bundled = compile_bundle(found.calls, aim, output, processes=processes, progress=step)
    click.echo(report.bundle(bundled))
    candidates = [candidate for call in bundled for candidate in call.candidates]
    compiled = sum(candidate.program is not None for candidate in candidates)
    modules = source.imports or ((source.program.module,) if source.program is not None else ())
    measure = " ".join(["ejkernel tune --from", str(output), *(f"--import {module}" for module in modules)])
    console.print(
        f"{compiled} of {counted(len(candidates), 'candidate')} compiled in {time.monotonic() - started:.1f} s, "
        f"written to {output}; measure them where the device is: {measure}",
        soft_wrap=True,
    )


def _processes(aim: Target) -> int:
    """Return how many processes compile: one a core, so that a candidate that crashes ends none but its own.

    For a device that is here, and no CPU, threads must do: it may be open to one process alone.
    """
    return default_width() if aim.description or aim.platform == "cpu" else 0
