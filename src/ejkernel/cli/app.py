# SPDX-License-Identifier: Apache-2.0
"""The command line: results to stdout, messages to stderr.

Exit status 0: success; 1: failure, or nothing usable found; 2: a malformed command line; 130: interrupted.

This module and the modules that declare the commands do not import JAX, so help, the version and the cache path appear
at once. Each command imports the module with its implementation.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

import click

from ejkernel.cli import commands
from ejkernel.cli.cache_commands import cache
from ejkernel.cli.interrupts import none_lost


class _Commands(commands.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self.commands)  # the most important first


@click.group(
    cls=_Commands,
    commands=[
        commands.tune,
        commands.bench,
        commands.explain,
        commands.show,
        commands.report_,
        commands.list_,
        commands.doctor,
        cache,
    ],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="ejkernel-ops", prog_name="ejkernel")
def cli() -> None:
    """Tune the kernels of JAX programs on this machine and show the results.

    Exit status: 0 on success, 1 on failure (also for an unknown or malformed operation, target or shape) or if nothing
    usable was found, 2 if an option or argument is missing or not an option's value, 130 if interrupted.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    with warnings.catch_warnings(), none_lost():
        warnings.showwarning = _show_warning
        try:
            status = _run(None if argv is None else list(argv))
            if sys.stdout is not None:
                sys.stdout.flush()  # inside `try`: the reader of the pipe may be gone
        except OSError as error:
            if not isinstance(error, BrokenPipeError):  # e.g. a disk is full, or a file name too long
                _echo_error(str(error))
            _drop_unwritten()
            return 1
    return status


def _run(arguments: list[str] | None) -> int:
    try:
        # Standalone mode would exit the process, also that of a test. `obj`: whether only the command runs in it.
        status = cli.main(arguments, prog_name="ejkernel", standalone_mode=False, obj=arguments is None)
    except click.UsageError as error:
        advice = _advice_on(error)
        (click.UsageError(f"{error.format_message()}{advice}", error.ctx) if advice else error).show()
        return error.exit_code
    except click.ClickException as error:
        _echo_error(error.format_message())
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo(f"ejkernel: stopped{_what_is_left(sys.argv[1:] if arguments is None else arguments)}", err=True)
        return 130
    except Exception as error:
        # A warning is raised under `PYTHONWARNINGS=error`. `main` handles errors of files, the network and stdout.
        if not any(_is_ours(type(error), root) for root in ("EjkernelError", "EjkernelWarning")):
            raise
        _echo_error(str(error))
        return 1
    return status if isinstance(status, int) else 0


def _advice_on(error: click.UsageError) -> str:
    """Return advice on an argument that a command does not take."""
    options = [] if error.ctx is None else [option.name for option in error.ctx.command.params]
    is_extra = error.message.startswith("Got unexpected extra argument")
    return "; --cache names a folder, and --help lists all options." if is_extra and "cache" in options else ""


def _echo_error(message: str) -> None:
    from ejkernel.ops.utils.error_text import printable_lines  # imports JAX, as most sources of errors do

    click.echo(f"ejkernel: error: {printable_lines(message)}", err=True)


def _what_is_left(arguments: Sequence[str]) -> str:
    """Return a note on saved results after an interrupt; empty if the command saves none."""
    # `tune` saves each search when it ends.
    if "tune" not in arguments[:1] or {"--estimate", "--dry-run"}.intersection(arguments):
        return ""
    if "--compile-only" in arguments:
        return "; compiled programs are in the folder, run the command again to continue"
    # With `--force`, another run begins anew.
    return f"; finished searches are saved{'' if '--force' in arguments else ', run the command again to continue'}"


def _drop_unwritten() -> None:
    """Drop output that cannot be written, because the reader of the pipe is gone, as of `head`, or its disk is full."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stdout may not be a file
        try:
            sys.stdout.flush()  # succeeds if the error was one of another file
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout at exit


def _is_ours(kind: type, root: str) -> bool:
    """Return whether a class derives from a class of `ejkernel.ops.errors`, without importing that module and JAX."""
    errors = sys.modules.get("ejkernel.ops.errors")
    return errors is not None and issubclass(kind, getattr(errors, root))


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    del file, line
    place = "" if _is_ours(category, "EjkernelWarning") else f" ({filename}:{lineno})"
    from ejkernel.ops.utils.error_text import printable_lines  # imports JAX, so not at the top

    print(f"ejkernel: warning: {printable_lines(message)}{place}", file=sys.stderr)
