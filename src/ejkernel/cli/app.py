# SPDX-License-Identifier: Apache-2.0
"""The command line: results to stdout, messages to stderr.

Status 0: done; 1: failed, or nothing usable was found; 2: wrong usage; 130: stopped.

Nothing here, nor in the modules that declare the commands, imports JAX: help, the version and the folder's path are
answered at once. What a command does is in a module of its own, which the command imports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

import click

from ejkernel.cli.group import LazyGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """The process that the command runs in; a test's is not the command's alone."""

    is_ours: bool


_COMMANDS = "ejkernel.cli.commands"


@click.group(
    cls=LazyGroup,
    lazy={
        "tune": f"{_COMMANDS}:tune",
        "explain": f"{_COMMANDS}:explain",
        "show": f"{_COMMANDS}:show",
        "list": f"{_COMMANDS}:list_",
        "cache": "ejkernel.cli.cache_commands:cache",
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="ejkernel-ops", prog_name="ejkernel")
def cli() -> None:
    """Tune the kernels of JAX programs on this machine, and see what was found.

    Exit status: 0 if it is done, 1 if it failed or found nothing that it can use, 2 for wrong usage, 130 if stopped.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            status = _run(None if argv is None else list(argv))
            sys.stdout.flush()  # here, where a reader that is gone is no news
        except BrokenPipeError:
            return _without_reader()
    return status


def _run(arguments: list[str] | None) -> int:
    try:
        # Not standalone, where click would end the process, and a test's with it.
        status = cli.main(arguments, prog_name="ejkernel", standalone_mode=False, obj=Process(arguments is None))
    except click.UsageError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        _echo_error(error.format_message())
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo(f"ejkernel: stopped{_what_is_left(sys.argv[1:] if arguments is None else arguments)}", err=True)
        return 130
    except Exception as error:
        names_file = isinstance(error, OSError) and error.filename is not None  # such as a name that is too long
        if not names_file and not _is_ours(type(error), "EjkernelError"):
            raise
        _echo_error(str(error))
        return 1
    return status if isinstance(status, int) else 0


def _echo_error(message: str) -> None:
    from ejkernel.ops.utils.printable import printable_lines  # imports JAX, which is there where errors come from

    click.echo(f"ejkernel: error: {printable_lines(message)}", err=True)


def _what_is_left(arguments: Sequence[str]) -> str:
    """Say what an interrupt leaves behind, where that is something."""
    # Each search of `tune` is saved when it is over.
    if "tune" not in arguments[:1] or "--compile-only" in arguments or "--dry-run" in arguments:
        return ""
    return "; what was tuned so far is saved, run it again to go on"


def _without_reader() -> int:
    """End quietly where whoever read the output has gone, as `head` does."""
    with contextlib.suppress(OSError, ValueError):  # a stdout that is no file has nothing to be closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter writes what is left at exit
    return 1


def _is_ours(kind: type, root: str) -> bool:
    """Return whether a class derives from a root of `ejkernel.ops.errors`, without importing that, and so JAX."""
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
    from ejkernel.ops.utils.printable import printable_lines  # imports JAX, which most of the command does without

    print(f"ejkernel: warning: {printable_lines(message)}{place}", file=sys.stderr)
