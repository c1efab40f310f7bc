# SPDX-License-Identifier: Apache-2.0
"""Finding the calls that `ejkernel tune` is asked to tune; this is what imports and runs the user's code."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ejkernel.cli import files
from ejkernel.cli.files import Found
from ejkernel.ops.errors import ArgumentError, EjkernelError, OfflineWarning, TuningError
from ejkernel.ops.execution.discovery import discover_for
from ejkernel.ops.utils.fingerprint import device_fingerprint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the calls are.

    Attributes:
        target: `MODULE:FUNCTION`, the path of a program's text, or empty.
        imports: Modules that make kernels.
        missed: The cache's folder, if the calls are those that were noted as missed beside it.
        bundle: The folder of a bundle, if the calls are those of it.
        platform: The platform to lower the program for; this process's by default.
    """

    target: str = ""
    imports: tuple[str, ...] = ()
    missed: Path | None = None
    bundle: Path | None = None
    platform: str | None = None


def find(source: Source) -> Found:
    """Return the calls that are there."""
    if names_modules(source.target, source.imports):
        look_here()
    for name in source.imports:
        _import_users(name)
    if source.bundle is not None:
        found = files.calls_in_bundle(source.bundle)
    elif source.missed is not None:
        found = files.missed_calls(source.missed)
    elif Path(source.target).is_file():
        found = files.calls_in_file(Path(source.target))
    else:
        program, args, kwargs = load_program(source.target)
        with user_code(f"lowering the program of {source.target}"):
            calls = discover_for(program, args, kwargs, platform=source.platform)
        found = Found(name=source.target, calls=tuple(calls))
    return found if source.platform else dataclasses.replace(found, device=device_fingerprint())


def find_sendable(source: Source) -> Found:
    """Return the calls that other processes can be told of; of others warn."""
    from ejkernel.ops.execution.workers import pickled

    found = find(source)
    calls = []
    for inv in found.calls:
        try:
            pickled(inv)
        except TuningError as error:
            text = (
                f"{inv.op_id}: not tuned, because its kernel cannot be sent to a worker process ({error.__cause__}); "
                "define it at the top of a module, or tune with --in-process."
            )
            warnings.warn(text, OfflineWarning, stacklevel=2)
        else:
            calls.append(inv)
    return dataclasses.replace(found, calls=tuple(calls))


def names_modules(target: str, imports: Sequence[str]) -> bool:
    """Return whether the user named modules, which the working directory may have; files are read without those."""
    return bool(imports) or (":" in target and not Path(target).is_file())


def look_here() -> None:
    """Let modules of the working directory be found, as `python -m` does."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def load_program(target: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the program that `MODULE:FUNCTION` names, with its arguments.

    Raises:
        ArgumentError: there is no such function, or it does not return a program and its arguments.
    """
    module_name, separator, function_name = target.partition(":")
    if not separator or not module_name or not function_name:
        raise ArgumentError(f"the target must be MODULE:FUNCTION or a file that exists, got {target!r}.")
    found: Any = _import_users(module_name)
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"module {module_name!r} has no {function_name!r}.")
        found = getattr(found, part)
    if not callable(found):
        raise ArgumentError(f"{target} must be a function, got {found!r}.")
    needed = [
        p.name
        for p in inspect.signature(found).parameters.values()
        if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    if needed:
        raise ArgumentError(f"{target} must take no arguments, but it needs {', '.join(needed)}.")
    with user_code(f"calling {target}"):
        returned = found()
    return _check_program(target, returned)


def _import_users(name: str) -> Any:
    """Import a module that the user named."""
    with user_code(f"importing {name}"):
        return _import(name)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        hint = f"; did you mean {name.removesuffix('.py')}:...?" if name.endswith(".py") else ""
        raise ArgumentError(f"there is no module {name!r} here ({Path.cwd()}) or on sys.path{hint}.") from error


@contextmanager
def user_code(doing: str) -> Iterator[None]:
    """Report an exception of the user's code with the frames that are theirs, and end."""
    try:
        yield
    except (EjkernelError, KeyboardInterrupt):
        raise
    except Exception as error:
        own = str(Path(__file__).parents[1])
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename, own)]
        click.echo("".join(traceback.format_list(frames)), err=True, nl=False)
        raise click.ClickException(f"{doing} raised {type(error).__name__}: {error}") from error


def _is_ours(filename: str, own: str) -> bool:
    return filename.startswith((own, "<frozen")) or "/importlib/" in filename


def _check_program(target: str, returned: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    is_program = isinstance(returned, tuple) and len(returned) in (2, 3) and callable(returned[0])
    if not is_program or not isinstance(returned[1], tuple | list):
        raise ArgumentError(
            f"{target} must return (callable, args) or (callable, args, kwargs), with args a tuple; got "
            f"{_shape_of(returned)}."
        )
    return returned[0], tuple(returned[1]), dict(returned[2]) if len(returned) == 3 else {}


def _shape_of(returned: Any) -> str:
    if isinstance(returned, tuple):
        return f"({', '.join(type(item).__name__ for item in returned)})"
    return type(returned).__name__
