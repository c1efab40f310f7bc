# SPDX-License-Identifier: Apache-2.0
"""The command line: results to stdout, messages to stderr; 0 done, 1 failed, 2 wrong usage, 130 stopped."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from ejkernel.ops.errors import EjkernelError, EjkernelWarning


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ejkernel-ops", prog_name="ejkernel")
def cli() -> None:
    """Tune the kernels of JAX programs on this machine, and see what was found."""


@cli.command()
@click.argument("target", metavar="[MODULE:FUNCTION|FILE]", required=False, default="")
@click.option("--import", "imports", multiple=True, metavar="MODULE", help="Import the kernels that FILE names.")
@click.option("--missed", is_flag=True, help="Tune what was noted with EJKERNEL_NOTE_MISSES=1.")
@click.option("--cache", type=click.Path(path_type=Path), help="Folder to save to; EJKERNEL_CACHE_DIR by default.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), help="Seconds for each call's search.")
@click.option("--force", is_flag=True, help="Tune calls that were tuned before, too.")
@click.option("--dry-run", is_flag=True, help="Only list the calls.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--verbose", "-v", is_flag=True, help="Print the fate of every candidate.")
def tune(**options: Any) -> None:
    """Tune every kernel call in a JAX program, forward and backward.

    FUNCTION takes no arguments, and returns the program and its arguments: (callable, args) or (callable, args,
    kwargs). Arguments may be jax.ShapeDtypeStruct: the program is lowered, not run. The configurations are saved, and
    take effect the next time that the program starts.

    FILE is the text of a program that was lowered with EJKERNEL_OPS_STAMP=json, or such a program exported by
    jax.export; --import names the modules that make its kernels. With --missed, neither is needed.
    """
    if bool(options["target"]) == options["missed"]:
        raise click.UsageError("give one of MODULE:FUNCTION, FILE and --missed.")
    from ejkernel.cli.tune import TuneOptions, run_tune

    run_tune(TuneOptions(**options))


@cli.command()
@click.option("--cache", type=click.Path(path_type=Path), help="Folder to read; EJKERNEL_CACHE_DIR by default.")
@click.option("--json", "as_json", is_flag=True, help="Print the entries as JSON.")
def show(cache: Path | None, as_json: bool) -> None:
    """List the configurations that were saved, with what was measured."""
    from ejkernel.cli.show import run_show

    run_show(cache, as_json)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            cli.main(args=None if argv is None else list(argv), prog_name="ejkernel", standalone_mode=False)
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo("ejkernel: stopped; what was tuned so far is saved, run it again to go on", err=True)
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
