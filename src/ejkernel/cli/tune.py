# SPDX-License-Identifier: Apache-2.0
"""`ejkernel tune`: find a program's calls, tune them, save what was found, say what it brought."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ejkernel.cli import programs, report
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.errors import ArgumentError, ConfigError, EjkernelError
from ejkernel.ops.execution.discovery import discover
from ejkernel.ops.execution.offline import tune_invocations
from ejkernel.ops.execution.result import AutotuningResult
from ejkernel.ops.utils.fingerprint import device_fingerprint


@dataclasses.dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of `ejkernel tune`; see its help."""

    target: str
    cache: Path | None
    budget: float | None
    force: bool
    dry_run: bool
    as_json: bool
    verbose: bool
    imports: tuple[str, ...] = ()
    missed: bool = False


def run_tune(options: TuneOptions) -> None:
    """Run `ejkernel tune`."""
    console = Console(stderr=True)
    store = PersistentCache(options.cache)
    reason = None if options.dry_run else store.why_not_writable()
    if reason is not None:
        raise ConfigError(f"{store.path} cannot be written: {reason}; choose a folder with --cache.")
    found = _find(options, store)
    calls = found.calls
    console.print(report.found(found.name, calls, device_fingerprint()), soft_wrap=True)
    if options.dry_run:
        click.echo(report.calls_as_json(calls) if options.as_json else report.calls_as_text(calls))
        _print_counts(found, console)
        return
    chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(
        ConfigCache(), store, policy=AutotunePolicy(budget_s=options.budget)
    )
    todo = list(calls) if options.force else [inv for inv in calls if not _known(chain, inv)]
    if len(todo) < len(calls):
        console.print(f"{len(calls) - len(todo)} of them were tuned before; --force tunes them again.")
    started = time.monotonic()
    result = _tune(chain, todo, console)
    seconds = time.monotonic() - started
    click.echo(report.result_as_json(result) if options.as_json else report.table(result, verbose=options.verbose))
    if todo:
        console.print(
            f"{len(result)} of {len(todo)} calls tuned in {seconds:.1f} s, saved in {store.path}", soft_wrap=True
        )
    found.settle(lambda inv: _known(chain, inv))
    _print_counts(found, console)


def _find(options: TuneOptions, store: PersistentCache) -> programs.Found:
    """Return the calls that the options ask for."""
    for name in options.imports:
        _import_users(name)
    if options.missed:
        return programs.missed_calls(store.path, options.imports)
    if Path(options.target).is_file():
        return programs.calls_in_file(Path(options.target), options.imports)
    program, args, kwargs = load_program(options.target)
    with user_code(f"lowering the program of {options.target}"):
        return programs.Found(name=options.target, calls=tuple(discover(program, *args, **kwargs)))


def _print_counts(found: programs.Found, console: Console) -> None:
    if found.counts:
        console.print(found.counts, soft_wrap=True, highlight=False)


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
    """Import a module that the user named, from where they are."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
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


def _known(chain: ConfigSelectorChain[Any, Any], inv: Invocation[Any, Any]) -> bool:
    kernel = inv.kernel
    return (
        kernel is not None
        and chain.persistent is not None
        and (chain.persistent.get(inv.key, cfg_type=kernel.config_type) is not None)
    )


def _tune(
    chain: ConfigSelectorChain[Any, Any], todo: Sequence[Invocation[Any, Any]], console: Console
) -> AutotuningResult:
    with _bars(console, len(todo)) as step:
        return tune_invocations(chain, todo, progress=step)


@contextmanager
def _bars(console: Console, count: int) -> Iterator[Callable[[Invocation[Any, Any], int, int], None]]:
    """Show one bar over all candidates of all calls; on a pipe, a line a call."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tuning", total=max(count, 1), note="")
        seen: dict[Any, int] = {}

        def step(inv: Invocation[Any, Any], done: int, total: int) -> None:
            index = seen.setdefault(inv.key, len(seen))
            if not console.is_terminal and done == 0:
                console.print(f"tuning {inv.op_id} ({index + 1} of {count}), {total} candidates", highlight=False)
            progress.update(task, completed=index + done / max(total, 1), note=f"{inv.op_id}: {done} of {total}")

        yield step
