# SPDX-License-Identifier: Apache-2.0
"""`ejkernel tune`: finds the calls of a program, tunes them, saves and reports the results."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console

from ejkernel import settings
from ejkernel.cli import report
from ejkernel.cli.files import Found
from ejkernel.cli.interrupts import delivered
from ejkernel.cli.outcome import TuneOutcome
from ejkernel.cli.progress import bars
from ejkernel.cli.saved import SavedCalls
from ejkernel.cli.shares import most_first, share_of, tune_in_time
from ejkernel.cli.sources import Source, TuneOptions, find, find_by, find_in_worker
from ejkernel.cli.step_check import Checked, StepCheck, not_compared, settled
from ejkernel.cli.time_left import TimeLeft
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.tasks.task import SharedCall, calls_in
from ejkernel.ops.autotuner.trials.events import Event, SearchFinished, WorkerRestarted, on_event
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.autotuner.trials.result import AutotuningResult
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy, StalePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ArgumentError, ConfigError, TuningError
from ejkernel.ops.execution.offline import tune_together
from ejkernel.ops.utils.formatting import counted

if TYPE_CHECKING:
    from ejkernel.ops.autotuner.fleet.ray_executor import RayExecutor


_UNCHANGED: Final = "step: unchanged, because no call has a new configuration"


def messages() -> Console:
    """Return the console for messages: stderr, with colours on a terminal unless `NO_COLOR` is set."""
    # No markup and emoji: file names and messages of kernels may look like either.
    console = Console(stderr=True, emoji=False, markup=False)
    console.soft_wrap = not console.is_terminal  # a terminal would break lines within words
    return console


def run_tune(options: TuneOptions) -> int:
    """Run `ejkernel tune`; return the exit status: 1 for a failed or unsaved search, or a call left without an entry.

    By default a worker process measures, so that a crashing candidate does not end the command.
    """
    if options.in_process:
        return _run(options)
    from ejkernel.ops.autotuner.process.worker import worker_session

    # One worker finds the calls and runs all searches, because JAX and a device take seconds to start.
    with worker_session():
        return _run(options)


def _run(options: TuneOptions) -> int:
    # Check first: a search of hours must not end without saving.
    store = PersistentCache(options.cache) if options.dry_run else writable(options.cache)
    source = _source(options, store)
    with _executor_of(options) as executor:  # after `_source`, because Ray copies the module path to local workers
        return _find_and_tune(options, source, store, executor)


def writable(folder: Path | None) -> PersistentCache:
    """Return the cache in a folder.

    Raises:
        ConfigError: The folder cannot be written.
    """
    store = PersistentCache(folder)
    reason = store.why_not_writable()
    if reason is not None:
        raise ConfigError(
            f"{store.path} cannot be written: {reason}; choose a folder with --cache or EJKERNEL_CACHE_DIR."
        )
    return store


def _executor_of(options: TuneOptions) -> contextlib.AbstractContextManager[RayExecutor | None]:
    if options.ray is None:
        return contextlib.nullcontext()
    from ejkernel.ops.autotuner.fleet.ray_executor import RayExecutor, check_installed

    check_installed()
    messages().print(f"connecting to Ray at {options.ray}")  # a failure takes a minute or more
    return RayExecutor(options.ray)


def _find_and_tune(options: TuneOptions, source: Source, store: PersistentCache, executor: RayExecutor | None) -> int:
    status = 0
    with contextlib.redirect_stdout(sys.stderr):  # keep the program's prints out of the result
        found = _find(options, source, executor)
    messages().print(report.found(found.name, found.calls, found.device, found.times))
    store.refresh_if_due()  # use configurations tuned by others
    if options.dry_run:
        policy = AutotunePolicy(stale=StalePolicy(**settings.current().stale))
        _list(options, found, ConfigSelectorChain(ConfigCache(), store, policy=policy))
    else:
        _check_devices(options, found.device)
        _print(filter(None, [found.counts]))
        status = _tune_found(options, source, found, store, executor)
    if found.empty and not found.calls:
        raise TuningError(found.empty)
    return status


def _list(options: TuneOptions, found: Found, chain: ConfigSelectorChain[Any, Any]) -> None:
    saved = SavedCalls(chain)
    done = {inv.key for inv in calls_in(filter(saved.are_tuned, found.in_sets))}
    tuned = [saved.in_words(inv, is_done=inv.key in done) for inv in found.calls]
    if options.as_json:
        progress = [chain.store.progress(inv.key) for inv in found.calls]
        report.echo_json(report.calls_as_data(found.calls, tuned, progress, found.times))
    else:
        click.echo(report.calls_as_text(found.calls, tuned, found.times))
    _print(saved.doubts(found.calls))
    _print(filter(None, [found.counts]))


def _check_devices(options: TuneOptions, device: str) -> None:
    if options.devices > 1 and device.startswith("cpu:"):
        raise ConfigError(
            f"--devices {options.devices} requires GPUs, got {device}: on a CPU, parallel searches would distort each "
            "other's times."
        )


def _tune_found(
    options: TuneOptions, source: Source, found: Found, store: PersistentCache, executor: RayExecutor | None
) -> int:
    policy = _policy(options, found, executor)
    chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(ConfigCache(), store, policy=policy)
    saved = SavedCalls(chain)
    todo = _calls_to_tune(options, saved, found)
    chain.store.program = source.program.target if source.program is not None else ""
    chain.store.times = found.times
    check = _step_check(options, source, found, saved)
    started = time.monotonic()
    result, not_started = _tune(options, chain, todo, found, check=check)
    seconds = time.monotonic() - started
    checked = None if check is None else _checked(options, check, result, seconds)
    result = settled(result, checked)
    if options.as_json or result.searches or not todo:
        _print_result(options, result, checked, found)
    failed, tried = 0, calls_in(todo)
    if tried:
        tuned = {inv.key for inv in calls_in(filter(saved.are_tuned, todo))}
        outcome = TuneOutcome(
            calls=tried,
            searches=result.searches,
            has_entry=saved.has_entry,
            is_tuned=lambda inv: inv.key in tuned,
            store=store,
            seconds=seconds,
            budget=options.budget,
            time=options.time,
            not_started=calls_in(not_started),
        )
        failed = outcome.failed
        _print(outcome.lines())
    _print(saved.doubts(tried, result.searches, options.budget))
    if check is None:
        _print(not_compared(result, source.program, options))
    elif tried or checked is not None:
        lines = [_UNCHANGED] if checked is None else checked.lines()
        click.echo("\n".join(map(report.wrapped, lines)), err=options.as_json)  # JSON contains them
    found.settle(saved.is_tuned)
    if todo and not result.searches:
        raise TuningError("no call could be tuned; the warnings above say why.")
    return 1 if failed or not (len(result) or all(map(saved.are_tuned, todo))) else 0


def _print_result(options: TuneOptions, result: AutotuningResult, checked: Checked | None, found: Found) -> None:
    if options.as_json:
        step = {} if checked is None else {"step": checked.data()}
        report.echo_json(report.result_as_data(result, found.times) | step)
    else:
        click.echo(report.searches(result, verbose=options.verbose, times=found.times))


def _step_check(options: TuneOptions, source: Source, found: Found, saved: SavedCalls) -> StepCheck | None:
    """Return the comparison of the step after the searches; `None` if it is not wanted, or there is no program.

    By default only CPUs compare it: on accelerators, memory that was mapped once is kept, so that configurations which
    win by themselves slow no step, while compiling a step twice may take minutes and all of the device's memory.
    """
    is_wanted = found.device.startswith("cpu:") if options.check_step is None else options.check_step
    if source.program is None or not is_wanted:
        return None
    earlier = {inv.key: entry for inv in found.calls if (entry := saved.in_force(inv)) is not None}
    return StepCheck(options=options, program=source.program, found=found, saved=saved, earlier=earlier)


def _checked(options: TuneOptions, check: StepCheck, result: AutotuningResult, seconds: float) -> Checked | None:
    try:
        with _ended_like_ctrl_c():
            return check.run(seconds)
    except KeyboardInterrupt:
        if result.searches:
            click.echo(report.searches(result, verbose=options.verbose, times=check.found.times), err=True)
        text = "stopped: the step is not compared. The new configurations stay saved; the next run compares it."
        _print([text])
        raise


def _policy(options: TuneOptions, found: Found, executor: RayExecutor | None) -> AutotunePolicy:
    return AutotunePolicy(
        budget_s=options.budget,
        isolate=not options.in_process,
        devices=options.devices,
        executor=executor,
        compile_processes=_processes(options, found.device),
        stale=StalePolicy(**settings.current().stale),
    )


def _calls_to_tune(options: TuneOptions, saved: SavedCalls, found: Found) -> list[Sequence[SharedCall]]:
    """Return the sets of calls that need a search, and print how many need none."""
    todo: list[Sequence[SharedCall]] = []
    done: list[Sequence[SharedCall]] = []
    for calls in found.in_sets:
        is_done = not options.force and saved.are_tuned(calls)
        if is_done and options.undecided:
            is_done = not any(saved.is_undecided(call.inv) for call in calls)
        (done if is_done else todo).append(calls)
    if options.time is not None:
        todo = most_first(todo, found.times)
    if done:
        known = calls_in(done)
        messages().print(f"{counted(len(known), 'call')} already tuned; --force tunes again.")
        _print(saved.doubts(known))
    return todo


def _source(options: TuneOptions, store: PersistentCache) -> Source:
    if options.missed and store.path is None:
        raise ArgumentError("the user has no home folder with notes; choose a folder with --cache.")
    missed = store.path if options.missed else None
    return Source.of(options.target, options.imports, missed=missed, bundle=options.bundle, shapes=options.shapes)


def _find(options: TuneOptions, source: Source, executor: RayExecutor | None) -> Found:
    if options.in_process:
        return find(source)
    if executor is not None:  # its workers have the device
        return find_by(executor, source)
    return find_in_worker(source, options.mesh_devices)


def _processes(options: TuneOptions, device: str) -> int:
    if options.compile_processes is not None or options.ray is not None:  # a Ray node's number of cores is unknown
        return options.compile_processes or 0
    from ejkernel.ops.autotuner.compile.processes import usual_processes  # imports multiprocessing

    # Each worker has its own pool, and all pools share the cores.
    return -(-usual_processes(Target.of(device)) // options.devices)


def _print(lines: Iterable[str]) -> None:
    console = messages()
    for line in lines:
        console.print(line, highlight=False)


def _tune(
    options: TuneOptions,
    chain: ConfigSelectorChain[Any, Any],
    todo: Sequence[Sequence[SharedCall]],
    found: Found,
    *,
    check: StepCheck | None,
) -> tuple[AutotuningResult, list[Sequence[SharedCall]]]:
    """Return the results, and the sets of calls without a search."""
    if not todo:
        return AutotuningResult(found.device, ()), []
    # Finished searches, printed if Ctrl-C ends the others.
    console = messages()
    done: dict[ConfigKey, AutotuneData] = {}
    told: list[str] = []  # advice already given
    for_step = 0.0 if check is None else check.share
    seconds = None if options.time is None else options.time - for_step
    budget = chain.policy.budget_s if seconds is None else share_of(seconds, 1, len(todo))
    operations = [calls[0].inv.op_id for calls in todo]

    def spare() -> float:
        return 0.0 if check is None or check.has_winners else for_step

    def note(event: Event) -> None:
        shown.hear(event)
        if isinstance(event, WorkerRestarted):
            console.print(
                f"{event.key.op}: {event.reason}; a new worker continues{_advice(event, told)}", highlight=False
            )
        elif isinstance(event, SearchFinished):
            done[event.key] = event.data  # the last of several searches

    try:
        with (
            bars(console, TimeLeft(operations, budget=budget, limit=options.time), "tuning") as shown,
            on_event(note),
            contextlib.redirect_stdout(sys.stderr),
            _announcing_the_stop(console),
        ):
            more: dict[str, Any] = {"progress": shown.step, "compiled": found.compiled, "resume": not options.force}
            if seconds is not None:
                return tune_in_time(seconds, chain, todo, more, spare)
            return tune_together(chain, todo, **more), []
    except KeyboardInterrupt:
        if done:
            result = AutotuningResult(found.device, (), tuple(done.values()))
            click.echo(report.searches(result, verbose=options.verbose, times=found.times), err=True)
        raise


def _advice(event: WorkerRestarted, told: list[str]) -> str:
    """Return advice for a worker ended after a silence; only once, since all have the same reason."""
    if told or not event.reason.startswith(("no sign of life", "deadline exceeded")):
        return ""
    told.append(event.reason)
    return ". On a busy machine a healthy worker may be this slow; a larger --budget gives it more time"


# --- Ctrl-C and its relatives ---


@contextlib.contextmanager
def _announcing_the_stop(console: Console) -> Iterator[None]:
    """Print a message at Ctrl-C: the running search may take a while to end."""
    first = "stopping with the best so far, which is saved; Ctrl-C again stops at once"
    texts = itertools.chain([first], itertools.repeat("stopping at once, without the measurements of this search"))

    def stop(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # after SIGHUP the terminal is gone
            console.print(next(texts), highlight=False)
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, delivered(stop))
    try:
        with _ended_like_ctrl_c():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP count as Ctrl-C.

    A scheduler or `timeout` sends the former, a closed terminal the latter; without a handler, the measurements of the
    running search would be lost.
    """
    # Not those that `nohup` ignores.
    others = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    before = {each: signal.signal(each, lambda *_: signal.raise_signal(signal.SIGINT)) for each in others}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in jobs that a script starts in the background
        before[signal.SIGINT] = signal.signal(signal.SIGINT, delivered(signal.default_int_handler))
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
