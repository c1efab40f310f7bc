# SPDX-License-Identifier: Apache-2.0
"""The command line: results to stdout, messages to stderr; 0 done, 1 failed, 2 wrong usage, 130 stopped."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from ejkernel import compat
from ejkernel.ops.errors import EjkernelError, EjkernelWarning


@dataclasses.dataclass(frozen=True, slots=True)
class _Process:
    """The process that the command runs in; a test's is not the command's alone."""

    is_ours: bool


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ejkernel-ops", prog_name="ejkernel")
def cli() -> None:
    """Tune the kernels of JAX programs on this machine, and see what was found."""


@cli.command()
@click.argument("target", metavar="[MODULE:FUNCTION|FILE]", required=False, default="")
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="Module that makes kernels; repeatable. It is imported.",
)
@click.option(
    "--from", "bundle", type=click.Path(path_type=Path), metavar="BUNDLE", help="Measure what was compiled elsewhere."
)
@click.option("--missed", is_flag=True, help="Tune what was noted with EJKERNEL_NOTE_MISSES=1.")
@click.option("--cache", type=click.Path(path_type=Path), help="Folder to save to; EJKERNEL_CACHE_DIR by default.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), help="Seconds for each call's search.")
@click.option("--force", is_flag=True, help="Tune calls that were tuned before, too.")
@click.option(
    "--devices", type=click.IntRange(min=1), metavar="COUNT", help="How many GPUs tune side by side, 1 by default."
)
@click.option(
    "--compile-processes",
    type=click.IntRange(min=0),
    metavar="COUNT",
    help="Compile in so many processes, or in threads (0); for GPUs that are described, one a core by default.",
)
@click.option("--in-process", is_flag=True, help="Measure in this process: a crash ends the command.")
@click.option("--compile-only", is_flag=True, help="Compile for --target, measure nothing, and write --output.")
@click.option("--target", "device", default="here", metavar="DEVICE", help="What to compile for: here, or nvidia_h200.")
@click.option("--output", type=click.Path(path_type=Path), metavar="BUNDLE", help="The folder to write.")
@click.option("--dry-run", is_flag=True, help="Only list the calls.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--verbose", "-v", is_flag=True, help="Print the fate of every candidate.")
def tune(**options: Any) -> None:
    """Tune every kernel call in a JAX program, forward and backward.

    FUNCTION takes no arguments, and returns the program and its arguments: (callable, args) or (callable, args,
    kwargs). Arguments may be jax.ShapeDtypeStruct: the program is lowered, not run. The configurations are saved, and
    take effect the next time that the program starts.

    FILE is the text of a program that was lowered with EJKERNEL_OPS_STAMP=json, or such a program exported by
    jax.export. FILE and --missed are data: they import nothing, and name kernels, functions and types that were
    registered, by the modules that --import names. --from runs the machine code of a bundle: measure your own.

    Candidates run in a worker process, which one that crashes or never returns takes with it; the command goes on.
    With --compile-only they are compiled here for a device that is elsewhere, and measured there with --from.
    """
    compiles_for_itself = options["compile_only"] and options["device"] == "here"
    if click.get_current_context().obj.is_ours and not options["in_process"] and not compiles_for_itself:
        compat.leave_devices_alone()  # they are the worker's
    if sum(map(bool, (options["target"], options["missed"], options["bundle"]))) != 1:
        raise click.UsageError("give one of MODULE:FUNCTION, FILE, --missed and --from.")
    device, output = options.pop("device"), options.pop("output")
    if options.pop("compile_only"):
        from ejkernel.cli.compile import run_compile

        if output is None or not options["target"]:
            raise click.UsageError("--compile-only needs MODULE:FUNCTION and --output.")
        for name in ("cache", "budget", "force", "dry_run", "as_json", "verbose", "devices"):
            if options[name]:
                option = name.removeprefix("as_").replace("_", "-")
                raise click.UsageError(f"--{option} does not go with --compile-only, which measures and saves nothing.")
        run_compile(options["target"], options["imports"], device, output, options["compile_processes"])
        return
    if output is not None or device != "here":
        raise click.UsageError("--target and --output go with --compile-only.")
    options["devices"] = options["devices"] or 1
    if options["devices"] > 1 and options["in_process"]:
        raise click.UsageError("--devices does not go with --in-process: each device has a process of its own.")
    from ejkernel.cli.tune import TuneOptions, run_tune

    run_tune(TuneOptions(**options))


@cli.command()
@click.option("--cache", type=click.Path(path_type=Path), help="Folder to read; EJKERNEL_CACHE_DIR by default.")
@click.option("--json", "as_json", is_flag=True, help="Print the entries as JSON.")
@click.option("--log", metavar="PREFIX", help="Print the last search of each call whose key or operation begins so.")
def show(cache: Path | None, as_json: bool, log: str | None) -> None:
    """List the configurations that were saved, with what was measured."""
    from ejkernel.cli.show import run_show

    run_show(cache, as_json, log)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            arguments = None if argv is None else list(argv)
            cli.main(arguments, prog_name="ejkernel", standalone_mode=False, obj=_Process(is_ours=argv is None))
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except (click.Abort, KeyboardInterrupt):
            compiles = "--compile-only" in (arguments or sys.argv)
            saved = "" if compiles else "; what was tuned so far is saved, run it again to go on"
            click.echo(f"ejkernel: stopped{saved}", err=True)
            return 130
        except EjkernelError as error:
            click.echo(f"ejkernel: error: {error}", err=True)
            return 1
    return 0


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    del file, line
    place = "" if issubclass(category, EjkernelWarning) else f" ({filename}:{lineno})"
    print(f"ejkernel: warning: {message}{place}", file=sys.stderr)
