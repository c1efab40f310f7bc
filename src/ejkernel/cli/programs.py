# SPDX-License-Identifier: Apache-2.0
"""The program that `MODULE:FUNCTION` names; this is what imports and runs the user's code, and tells of its errors.

A path counts only as far as it says which module is meant, and where it is found: workers and pickled kernels know
modules by name. So a file whose name another module has already is refused.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import jax

import ejkernel
from ejkernel import settings
from ejkernel.ops.autotuner.process.lifetime import look_in
from ejkernel.ops.config._files import expanded
from ejkernel.ops.errors import ArgumentError, EjkernelError

_SHOWN: Final = 6  # names, and frames of a traceback, that are shown


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Where a program is.

    Attributes:
        target: What the user typed.
        module: The name that the module is imported by.
        function: The function's qualified name in it.
        file: The module's file, if that was given rather than a name.
    """

    target: str
    module: str
    function: str
    file: Path | None = None


def look_here() -> None:
    """Let modules of the working directory be found."""
    # An empty entry, as of `python -c`, stands for it already.
    if "" not in sys.path:
        look_in(Path.cwd())


def located(target: str) -> Program:
    """Return where the program of `MODULE:FUNCTION` is; a module that is given by its path can be imported then.

    Raises:
        ArgumentError: it is no such target, or there is no such file.
    """
    place, separator, function = target.rpartition(":")
    if not separator or not place or not function:
        raise ArgumentError(_what_to_type(target))
    if not _is_path(place):
        return Program(target=target, module=place, function=function)
    file = _module_file(expanded(place), function)
    names, folder = [], file
    if file.name != "__init__.py":
        names.append(file.stem)
    # By the name that the rest of the package imports it by: under two names it would be there twice, and so would its
    # kernels.
    while (folder := folder.parent).joinpath("__init__.py").is_file():
        names.insert(0, folder.name)
    if any("." in name for name in names):
        raise ArgumentError(f"{place} cannot be imported, because of the dot in its name; rename it.")
    look_in(folder)
    return Program(target=target, module=".".join(names), function=function, file=file)


def module_named(place: str) -> str:
    """Return the name of a module that is given by its name or its path, and can be imported by that name then."""
    return located(f"{place}:module").module if _is_path(place) else place


def _is_path(place: str) -> bool:
    return place.endswith(".py") or place in (".", "..") or any(sep in place for sep in (os.sep, os.altsep) if sep)


def _module_file(path: Path, function: str) -> Path:
    if path.is_dir():
        package = path / "__init__.py"
        if not package.is_file():
            example = next(iter(sorted(path.glob("*.py"))), path / "FILE.py")
            raise ArgumentError(
                f"{path} is a folder without __init__.py, so that it is no module; give one of its files, such as "
                f"{example}:{function}."
            )
        path = package
    if not path.exists():
        other = path.with_name(f"{path.name}.py")
        hint = f"did you mean {other}:{function}?" if other.is_file() else f"the working directory is {Path.cwd()}."
        raise ArgumentError(f"there is no file {path}; {hint}")
    if path.suffix != ".py":
        raise ArgumentError(
            f"{path} is not a Python file, and a function belongs to one; to tune a text, leave it out."
        )
    # Not resolved: a link may have the name that the module is imported by.
    return Path(os.path.abspath(path))


def _what_to_type(target: str) -> str:
    """Return what is wrong with a target that names no function, and what to type instead."""
    path = expanded(target.removesuffix(":"))
    if path.is_dir():
        if (path / "manifest.json").is_file():
            return f"{path} is a bundle; measure what is in it with --from {path}."
        return f"{path} is a folder; give MODULE:FUNCTION, such as {path / 'FILE.py'}:FUNCTION."
    if path.suffix == ".py" and path.is_file():
        return f"{path} is a Python file; say which function of it, such as {path}:{_first_function(path)}."
    source = Path(*target.split(".")).with_suffix(".py") if target.isidentifier() else path
    example = f"; such as {target}:{_first_function(source)}" if source.suffix == ".py" and source.is_file() else ""
    return f"the target must be MODULE:FUNCTION or a file that exists, got {target!r}{example}."


def _first_function(path: Path) -> str:
    """Return a function of a module that could be meant, found without importing it."""
    try:
        # Read, since what was typed was wrong, and nothing of it is to be run.
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return "FUNCTION"
    able = [node.name for node in body if isinstance(node, ast.FunctionDef) and not _needed_by(node.args)]
    return next((name for name in able if not name.startswith("_")), "FUNCTION")


def _needed_by(arguments: ast.arguments) -> bool:
    named = [*arguments.posonlyargs, *arguments.args]
    return len(named) > len(arguments.defaults) or None in arguments.kw_defaults


def load_program(program: Program) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the program with its arguments.

    Raises:
        ArgumentError: there is no such function, or it does not return a program and its arguments.
        ConfigError: a variable of the environment says what it may not; else the user's first call would be blamed.
    """
    settings.current().check()
    module = import_users(program.module)
    if program.file is not None:
        _check_file(module, program)
    found: Any = module
    for part in program.function.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"module {program.module!r} has no {program.function!r}{_others(module)}.")
        found = getattr(found, part)
    if not callable(found):
        raise ArgumentError(f"{program.target} must be a function, got {found!r}.")
    needed = _needed(found)
    if needed:
        raise ArgumentError(f"{program.target} must take no arguments, but it needs {', '.join(needed)}.")
    with user_code(f"calling {program.target}"):
        returned = found()
    return _check_program(program.target, returned)


def import_users(name: str) -> Any:
    """Import a module that the user named.

    Raises:
        ArgumentError: there is none of that name.
        ClickException: it raised an exception.
    """
    with user_code(f"importing {name}"):
        return _import(name)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Another module that is missing is missing to the user's own import, whose line is then shown.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ArgumentError(f"there is no module {name!r} here ({Path.cwd()}) or on sys.path.") from error


def _check_file(module: Any, program: Program) -> None:
    there = getattr(module, "__file__", None)
    if there is None or program.file is None or not os.path.samefile(there, program.file):
        other = there or "built in"
        raise ArgumentError(f"{program.file} would be imported as {program.module!r}, which is {other}; rename it.")


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the arguments without which a function cannot be called; none, where that cannot be told."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    able = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in able]


def _others(module: Any) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not _needed(value)
    ]
    return f"; it has {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}" if names else ""


@contextmanager
def user_code(doing: str) -> Iterator[None]:
    """Report an exception of the user's code with the lines that are theirs, and end."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except EjkernelError as error:  # what it says is the library's, where it comes from is the user's
        click.echo(_users_lines(error), err=True, nl=False)
        raise
    except SystemExit as error:
        click.echo(_users_lines(error), err=True, nl=False)
        raise click.ClickException(f"{doing} called sys.exit({error.code!r})") from error
    except Exception as error:
        click.echo(_users_lines(error), err=True, nl=False)
        raise click.ClickException(f"{doing} raised {_told(error)}") from error


def _users_lines(error: BaseException) -> str:
    """Return the lines of a traceback that are not of this package, of JAX or of Python's own library."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    left_out = len(frames) - _SHOWN
    # Where it began and where it ended; of what is between there may be hundreds.
    lines = traceback.format_list(frames if left_out <= 0 else frames[:1] + frames[-_SHOWN + 1 :])
    if left_out > 0:
        lines.insert(1, f"  ... {left_out} more ...\n")
    if isinstance(error, SyntaxError):  # where it is, with the line and a mark
        lines += itertools.takewhile(lambda line: line.startswith(" "), traceback.format_exception_only(error))
    return "".join(lines)


def _is_users(filename: str) -> bool:
    ours = tuple(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (ejkernel, jax))
    if filename.startswith((*ours, "<frozen")):
        return False
    return not filename.startswith(f"{Path(os.__file__).parent}{os.sep}") or "site-packages" in filename


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _check_program(target: str, returned: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    is_program = isinstance(returned, tuple) and len(returned) in (2, 3) and callable(returned[0])
    if not is_program or not isinstance(returned[1], tuple | list):
        raise ArgumentError(
            f"{target} must return (callable, args) or (callable, args, kwargs), with args a tuple; got "
            f"{_shape_of(returned)}."
        )
    kwargs: dict[str, Any] = {}
    if len(returned) == 3:
        if not isinstance(returned[2], dict):
            raise ArgumentError(f"{target} must return kwargs as a dictionary, got {_shape_of(returned[2])}.")
        kwargs = returned[2]
    return returned[0], tuple(returned[1]), dict(kwargs)


def _shape_of(returned: Any) -> str:
    if isinstance(returned, tuple):
        return f"({', '.join(type(item).__name__ for item in returned)})"
    return type(returned).__name__
