# SPDX-License-Identifier: Apache-2.0
"""Imports and runs the program of `MODULE:FUNCTION`, and reports errors of the user's code.

A path is converted to a module name and a folder of `sys.path`, because workers and pickled kernels refer to modules by
name. A file with the name of another module is therefore an error.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import math
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import jax

import ejkernel
from ejkernel import settings
from ejkernel.ops.autotuner.process.lifetime import look_in
from ejkernel.ops.config._files import expanded
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.transformations.nodes import call_that_raised
from ejkernel.ops.errors import ArgumentError, EjkernelError
from ejkernel.ops.utils.messages.names import nearest

_KEY: Final = re.compile("[0-9a-f]{16}")  # of a call
_SHOWN: Final = 6  # maximum number of names, and of traceback frames, in a message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The location of a program.

    Attributes:
        target: The target as typed.
        module: The import name of the module.
        function: The qualified name of the function.
        file: The file of the module, if the target has a path instead of a name.
    """

    target: str
    module: str
    function: str
    file: Path | None = None


def look_here() -> None:
    """Make modules of the working directory importable."""
    # An empty entry, as with `python -c`, already means the working directory.
    if "" not in sys.path:
        look_in(_here())


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise ArgumentError("the working directory was removed; change to another one.") from error


def located(target: str) -> Program:
    """Return the program of `MODULE:FUNCTION`, and make a module given by its path importable.

    Raises:
        ArgumentError: The target is malformed, or its file does not exist.
    """
    place, separator, function = target.rpartition(":")
    if not separator or not place or not function:
        raise ArgumentError(_what_to_type(target))
    if _KEY.fullmatch(function) and not _is_path(place):
        raise ArgumentError(
            f"{target} is a call; `ejkernel show --log {target}` prints its search. Here, pass the program that makes "
            "it, MODULE:FUNCTION."
        )
    if not _is_path(place):
        return Program(target=target, module=place, function=function)
    file = _module_file(expanded(place), function)
    names, folder = [] if file.name == "__init__.py" else [file.stem], file
    # Use the name under which the rest of the package imports it: under two names, its kernels would exist twice.
    while (folder := folder.parent).joinpath("__init__.py").is_file():
        names.insert(0, folder.name)
    if any("." in name for name in names):
        raise ArgumentError(f"{place} cannot be imported because its name contains a dot; rename it.")
    look_in(folder)
    return Program(target=target, module=".".join(names), function=function, file=file)


def module_named(place: str) -> str:
    """Return the name of a module given by name or path, and make it importable."""
    return located(f"{place}:module").module if _is_path(place) else place


def _is_path(place: str) -> bool:
    return place.endswith(".py") or place in (".", "..") or any(sep in place for sep in (os.sep, os.altsep) if sep)


def _module_file(path: Path, function: str) -> Path:
    if path.is_dir():
        package = path / "__init__.py"
        if not package.is_file():
            example = next(iter(sorted(path.glob("*.py"))), path / "FILE.py")
            raise ArgumentError(
                f"{path} is a folder without __init__.py, so it is not a module; pass one of its files, e.g. "
                f"{example}:{function}."
            )
        path = package
    if not path.exists():
        other = path.with_name(f"{path.name}.py")
        hint = f"did you mean {other}:{function}?" if other.is_file() else f"the working directory is {_here()}."
        raise ArgumentError(f"there is no file {path}; {hint}")
    if path.suffix != ".py":
        raise ArgumentError(f"{path} is not a Python file; to tune the text of a program, leave out :{function}.")
    # Do not resolve links: the module is imported under the link's name.
    return Path(os.path.abspath(path))


def _what_to_type(target: str) -> str:
    """Return the error message, with a suggestion, for a target without a function."""
    path = expanded(target.removesuffix(":"))
    if path.is_dir():
        if (path / "manifest.json").is_file():
            return f"{path} is a bundle; measure it with --from {path}."
        return f"{path} is a folder; pass MODULE:FUNCTION, e.g. {path / 'FILE.py'}:FUNCTION."
    if path.suffix == ".py" and path.is_file():
        return f"{path} is a Python file; add the function that returns the program, {path}:FUNCTION."
    if path.is_file():
        return f"{path} is a file, and only `tune` and `explain` take the text of a program; pass MODULE:FUNCTION."
    module, _, function = target.rpartition(".")
    if module and function.isidentifier() and Path(*module.split(".")).with_suffix(".py").is_file():
        return f"the target must be MODULE:FUNCTION, got {target!r}; did you mean '{module}:{function}'?"
    return f"the target must be MODULE:FUNCTION or a file that exists, got {target!r}."


def load_program(program: Program) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the program with its arguments.

    Raises:
        ArgumentError: The function does not exist, or does not return a program and its arguments.
        ConfigError: An environment variable has an invalid value (checked here, not at the user's first call).
    """
    settings.current().check()
    module = import_users(program.module)
    if program.file is not None:
        _check_file(module, program)
    found: Any = module
    for part in program.function.split("."):
        if not hasattr(found, part):
            others = _others(module, program.function)
            raise ArgumentError(f"module {program.module!r} has no {program.function!r}{others}")
        found = getattr(found, part)
    if not callable(found):
        raise ArgumentError(f"{program.target} must be a function, got {found!r}.")
    if isinstance(found, Kernel):
        raise ArgumentError(
            f"{program.target} is a kernel; name a function without arguments that returns a program and its "
            f"arguments, e.g. `def step(): return jax.jit({program.function}), (x, w)`."
        )
    if inspect.isclass(found):
        raise ArgumentError(
            f"{program.target} is a class; name a function without arguments that returns a program and its arguments, "
            "e.g. `def training_step(): return step, (w, x)`."
        )
    needed = _needed(found)
    if needed:
        raise ArgumentError(f"{program.target} must take no arguments, but it needs {', '.join(needed)}.")
    with user_code(f"calling {program.target}"):
        returned = found()
    return _check_program(program.target, returned)


def is_abstract(leaf: object) -> bool:
    """Return whether a leaf of the arguments is an array given by type alone."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def abstract_bytes(arguments: Any) -> int:
    """Return the bytes of the arrays given by type alone."""
    leaves = [leaf for leaf in jax.tree.leaves(arguments, is_leaf=is_abstract) if is_abstract(leaf)]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def import_operations() -> None:
    """Import our modules, which register their operations; `ops` imports no such module."""
    importlib.import_module("ejkernel.modules")


def import_users(name: str) -> Any:
    """Import a module named by the user.

    Raises:
        ArgumentError: No module has this name.
        ClickException: The module raised an exception.
    """
    with user_code(f"importing {name}"):
        return _import(name)


def import_named(modules: Iterable[str]) -> None:
    """Import modules named by the user, by name or path; also modules of the working directory."""
    for module in modules:
        look_here()
        import_users(module_named(module))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If another module is missing, an import of the user's code failed, and its line is shown.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ArgumentError(f"there is no module {name!r} here ({_here()}) or on sys.path.") from error


def _check_file(module: Any, program: Program) -> None:
    there = getattr(module, "__file__", None)
    if there is None or program.file is None or not os.path.samefile(there, program.file):
        other = there or "built in"
        raise ArgumentError(f"{program.file} would be imported as {program.module!r}, but that is {other}; rename it.")


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the required arguments of a function; empty if its signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    able = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in able]


def _others(module: Any, name: str) -> str:
    """Return the end of the error about an unknown function of a module."""
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not _needed(value)
    ]
    close = nearest(name, names)
    if close is not None:
        return f"; did you mean {close!r}?"
    return f"; it has {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}." if names else "."


@contextmanager
def user_code(doing: str) -> Iterator[None]:
    """Convert exceptions of the user's code to errors of the command, and print the user's lines of the traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except EjkernelError as error:  # show the user's line; the message comes from the library
        click.echo(_users_lines(error), err=True, nl=False)
        raise
    except SystemExit as error:
        click.echo(_users_lines(error), err=True, nl=False)
        raise click.ClickException(f"{doing} called sys.exit({error.code!r})") from error
    except Exception as error:
        click.echo(_users_lines(error), err=True, nl=False)
        raise click.ClickException(f"{doing} raised {_told(error)}") from error


def _users_lines(error: BaseException) -> str:
    """Return the traceback lines outside this package, JAX and Python's own library."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    left_out = len(frames) - _SHOWN
    # Show the first and the last frames; there may be hundreds between them.
    lines = traceback.format_list(frames if left_out <= 0 else frames[:1] + frames[-_SHOWN + 1 :])
    if left_out > 0:
        lines.insert(1, f"  ... {left_out} more ...\n")
    if isinstance(error, SyntaxError):  # add its place, the line and the marker
        lines += itertools.takewhile(lambda line: line.startswith(" "), traceback.format_exception_only(error))
    return "".join(lines)


def _is_users(filename: str) -> bool:
    ours = tuple(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (ejkernel, jax))
    if filename.startswith((*ours, "<frozen")):
        return False
    return not filename.startswith(f"{Path(os.__file__).parent}{os.sep}") or "site-packages" in filename


_MORE_DEVICES: Final = (
    "for a mesh that this machine does not have, pass --mesh-devices N to `ejkernel tune` or `explain`. For other "
    "commands, JAX_NUM_CPU_DEVICES=N simulates N devices on a CPU"
)


def _told(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, ValueError) and "Number of devices" in text and "mesh_shape" in text:  # of jax.make_mesh
        return f"{text}; {_MORE_DEVICES}"
    call = call_that_raised(error)
    return f"{text}; {call}" if call else text


def _check_program(target: str, returned: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    if not (isinstance(returned, tuple) and len(returned) in (2, 3) and callable(returned[0])):
        raise ArgumentError(
            f"{target} must return (callable, args) or (callable, args, kwargs), e.g. `return step, (x,)`; got "
            f"{_shape_of(returned)}."
        )
    function, args, kwargs = (*returned, {})[:3]
    if not isinstance(args, tuple | list):
        raise ArgumentError(
            f"{target} must return the arguments as a tuple, e.g. `return step, (x,)`; got {type(args).__name__}."
        )
    if not isinstance(kwargs, dict):
        raise ArgumentError(f"{target} must return kwargs as a dictionary, got {_shape_of(kwargs)}.")
    return function, tuple(args), dict(kwargs)


def _shape_of(returned: Any) -> str:
    if isinstance(returned, tuple):
        return f"({', '.join(type(item).__name__ for item in returned)})"
    return type(returned).__name__


def with_cache(target: str, cache: Path | None) -> str:
    """Return the arguments of the next command for a program: its name, and `--cache` if the user passed it."""
    return shlex.join([target] if cache is None else [target, "--cache", str(cache)])
