# SPDX-License-Identifier: Apache-2.0
"""`ejkernel tune`: finds the calls of a program, tunes them, saves and reports the results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click
from rich.console import Console

from ejkernel.cli import report
from ejkernel.cli.files import Found
from ejkernel.cli.outcome import TuneOutcome, doubled
from ejkernel.cli.progress import bars
from ejkernel.cli.sources import Source, find, find_by, find_for_mesh, find_sendable
from ejkernel.cli.stopping import announcing_the_stop
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.store.measurements import are_alike
from ejkernel.ops.autotuner.store.saving import heuristic_since, why_not_run
from ejkernel.ops.autotuner.tasks.task import SharedCall, shares_of
from ejkernel.ops.autotuner.trials.candidates import config_id, heuristic_of
from ejkernel.ops.autotuner.trials.events import Event, SearchFinished, WorkerRestarted, on_event
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.autotuner.trials.result import AutotuningResult
from ejkernel.ops.autotuner.trials.status import SearchProgress, SearchState
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.entries import StoredEntry
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy, policy_override
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.config.staleness import Action, default_stale_policy, differences, space_digest, standing
from ejkernel.ops.core.declared_names import note_config_types
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import candidates_of, kernel_of
from ejkernel.ops.errors import ArgumentError, ConfigError, EjkernelError, TuningError
from ejkernel.ops.execution.offline import tune_together
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.formatting import arguments, counted

if TYPE_CHECKING:
    from ejkernel.ops.autotuner.fleet.ray_executor import RayExecutor
    from ejkernel.ops.autotuner.process.supervisor import WorkerStatus


_LEAST_SHARE: Final = 5.0  # seconds of a search that are worth its start
_WEIGHT_ALONE: Final = 0.1  # share of the time of a call with one candidate, relative to one with several


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """The options of `ejkernel tune`; see its help."""

    target: str = ""
    cache: Path | None = None
    budget: float | None = None
    time: float | None = None
    force: bool = False
    undecided: bool = False
    dry_run: bool = False
    as_json: bool = False
    verbose: bool = False
    imports: tuple[str, ...] = ()
    missed: bool = False
    bundle: Path | None = None
    shapes: Path | None = None
    in_process: bool = False
    devices: int = 1
    mesh_devices: int | None = None
    ray: str | None = None
    compile_processes: int | None = None


def messages(file: IO[str] | None = None) -> Console:
    """Return the console for messages: stderr, with colours on a terminal unless `NO_COLOR` is set."""
    # No markup and emoji: file names and messages of kernels may look like either.
    console = Console(file=file, stderr=file is None, emoji=False, markup=False)
    console.soft_wrap = not console.is_terminal  # a terminal would break lines within words
    return console


def run_tune(options: TuneOptions) -> int:
    """Run `ejkernel tune`; return 1 if calls were tuned, but none has a saved configuration.

    By default a worker process measures, so that a crashing candidate does not end the command.
    """
    if options.in_process:
        return _run(options)
    from ejkernel.ops.autotuner.process.worker import worker_session

    # One worker finds the calls and runs all searches, because JAX and a device take seconds to start.
    with worker_session():
        return _run(options)


def _run(options: TuneOptions) -> int:
    store = PersistentCache(options.cache)
    # Check first: a search of hours must not end without saving.
    reason = None if options.dry_run else store.why_not_writable()
    if reason is not None:
        raise ConfigError(
            f"{store.path} cannot be written: {reason}; choose a folder with --cache or EJKERNEL_CACHE_DIR."
        )
    source = _source(options, store)
    with _executor_of(options) as executor:  # after `_source`, because Ray copies the module path to local workers
        return _find_and_tune(options, source, store, executor)


def _executor_of(options: TuneOptions) -> contextlib.AbstractContextManager[RayExecutor | None]:
    if options.ray is None:
        return contextlib.nullcontext()
    from ejkernel.ops.autotuner.fleet.ray_executor import RayExecutor, check_installed

    check_installed()
    messages().print(f"connecting to Ray at {options.ray}")  # a failure takes a minute or more
    return RayExecutor(options.ray)


def _find_and_tune(options: TuneOptions, source: Source, store: PersistentCache, executor: RayExecutor | None) -> int:
    console, status = messages(), 0
    with contextlib.redirect_stdout(sys.stderr):  # keep the program's prints out of the result
        found = _find(options, source, executor)
    console.print(report.found(found.name, found.calls, found.device, found.times))
    store.refresh_if_due()  # use configurations tuned by others
    if options.dry_run:
        _list(
            options,
            found,
            ConfigSelectorChain(ConfigCache(), store, policy=AutotunePolicy(stale=default_stale_policy())),
        )
    else:
        _check_devices(options, found.device)
        _print_counts(found, console)
        status = _tune_found(options, found, store, console, executor)
    if found.empty and not found.calls:
        raise TuningError(found.empty)
    return status


def _list(options: TuneOptions, found: Found, chain: ConfigSelectorChain[Any, Any]) -> None:
    done = [call.inv.key for each in _sets(found) if _all_known(chain, each) for call in each]
    tuned = [_how_tuned(chain, inv, is_done=inv.key in done) for inv in found.calls]
    if options.as_json:
        progress = [chain.store.progress(inv.key) for inv in found.calls]
        report.echo_json(report.calls_as_data(found.calls, tuned, progress, found.times))
    else:
        click.echo(report.calls_as_text(found.calls, tuned, found.times))
    _print_doubts(chain, found.calls, messages())
    _print_counts(found, messages())


def _check_devices(options: TuneOptions, device: str) -> None:
    if options.devices > 1 and device.startswith("cpu:"):
        raise ConfigError(
            f"--devices {options.devices} requires GPUs, got {device}: on a CPU, parallel searches would distort each "
            "other's times."
        )


def _tune_found(
    options: TuneOptions, found: Found, store: PersistentCache, console: Console, executor: RayExecutor | None
) -> int:
    sets = _sets(found)
    policy = _policy(options, found, executor)
    chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(ConfigCache(), store, policy=policy)
    done = _done(options, chain, sets)
    todo = [calls for calls in sets if not any(calls is known for known in done)]
    if options.time is not None:
        todo.sort(key=_weight, reverse=True)  # stable
    if done:
        known = [call.inv for calls in done for call in calls]
        console.print(f"{counted(len(known), 'call')} already tuned; --force tunes again.")
        _print_doubts(chain, known, console)
    if chain.store is not None:
        chain.store.times = found.times
    started = time.monotonic()
    result, started_sets = _tune(options, chain, todo, found, console)
    seconds = time.monotonic() - started
    if options.as_json:
        report.echo_json(report.result_as_data(result, found.times))
    elif result.searches or not todo:
        click.echo(report.searches(result, verbose=options.verbose, times=found.times))
    failed = 0
    if todo:
        outcome = TuneOutcome(
            calls=[call.inv for calls in todo for call in calls],
            searches=result.searches,
            has_entry=lambda inv: _has_entry(chain, inv),
            place=store.path,
            seconds=seconds,
            budget=options.budget,
            not_started=[call.inv for calls in todo[started_sets:] for call in calls],
        )
        failed = outcome.failed
        for line in outcome.lines():
            console.print(line, highlight=False)
    _print_doubts(chain, [call.inv for calls in todo for call in calls], console, result.searches, options.budget)
    found.settle(lambda inv: _known(chain, inv))
    if todo and not result.searches:
        raise TuningError("no call could be tuned; the warnings above say why.")
    has_entries = bool(result.searches) and all(_all_known(chain, calls) for calls in todo)
    return 1 if failed or (todo and not len(result) and not has_entries) else 0


def _policy(options: TuneOptions, found: Found, executor: RayExecutor | None) -> AutotunePolicy:
    return AutotunePolicy(
        budget_s=options.budget,
        isolate=not options.in_process,
        devices=options.devices,
        executor=executor,
        compile_processes=_processes(options, found.device),
        stale=default_stale_policy(),
    )


def _done(
    options: TuneOptions, chain: ConfigSelectorChain[Any, Any], sets: list[Sequence[SharedCall]]
) -> list[Sequence[SharedCall]]:
    """Return the sets of calls that need no search."""
    done = [] if options.force else [calls for calls in sets if _all_known(chain, calls)]
    if options.undecided:
        done = [calls for calls in done if not any(_is_undecided(chain, call.inv) for call in calls)]
    return done


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
    from ejkernel.ops.autotuner.process.supervisor import WorkerStatus
    from ejkernel.ops.autotuner.process.worker import shared_worker

    # lowering may take any time, and Ctrl-C can end it
    finding = WorkerStatus(what="finding the calls", allowed=math.inf)
    if options.mesh_devices is not None:
        return _find_of_mesh(source, options.mesh_devices, finding)
    # Only the worker opens the device: this process could not release a device that a candidate has broken.
    with shared_worker() as worker:
        found: Found = worker.call(find_sendable, source, doing=finding)
    return found


def _find_of_mesh(source: Source, count: int, finding: WorkerStatus) -> Found:
    """Return the calls of a program for a mesh of `count` devices, as calls of this machine's device."""
    from ejkernel.ops.autotuner.process.worker import Worker, shared_worker

    with shared_worker() as worker:
        device: str = worker.call(device_fingerprint)
    # Lower for the platform of this machine's device, whose kernels are tuned.
    elsewhere = dataclasses.replace(source, platform=device.partition(":")[0])
    # In a new process: JAX fixes its number of devices at the start, and these are CPU devices.
    many = Worker()
    try:
        found: Found = many.call(find_for_mesh, elsewhere, count, doing=finding)
    finally:
        many.close()
    return found.on(device)


def _processes(options: TuneOptions, device: str) -> int:
    if options.compile_processes is not None or options.ray is not None:  # a Ray node's number of cores is unknown
        return options.compile_processes or 0
    from ejkernel.ops.autotuner.compile.processes import usual_processes  # imports multiprocessing

    # Each worker has its own pool, and all pools share the cores.
    return -(-usual_processes(Target.of(device)) // options.devices)


def _print_counts(found: Found, console: Console) -> None:
    if found.counts:
        console.print(found.counts, highlight=False)


def _print_doubts(
    chain: ConfigSelectorChain[Any, Any],
    calls: Sequence[Invocation[Any, Any]],
    console: Console,
    searches: Sequence[AutotuneData] = (),
    budget: float | None = None,
) -> None:
    """Print calls with an undecided search, or with an entry older than a change of their kernel.

    Args:
        chain: Finds the entries.
        calls: The calls.
        console: The console.
        searches: The searches of this command. For the other calls, those behind the entries count.
        budget: The budget of the searches of this command.
    """
    states = {search.key: (search.progress.state, search.seconds) for search in searches}
    undecided, longest = [], 0.0
    for inv in calls:
        changed, name = _changed(chain, inv), f"{inv.op_id_v} {arguments(inv.description)}"
        state, seconds = states.get(inv.key) or _state_and_seconds(chain, inv)
        if changed:
            console.print(printable(f"{name}: {changed}; --force tunes it again."), highlight=False)
        elif state == SearchState.UNDECIDED:
            undecided.append(name)
            longest = max(longest, seconds)
    if undecided:
        them, seconds = "it" if len(undecided) == 1 else "them", doubled(longest, budget)
        text = (
            f"{len(undecided)} undecided ({'; '.join(undecided)}); `--undecided --budget {seconds}` measures {them} "
            f"again, for up to {seconds} s per call. A less busy machine helps more."
        )
        console.print(printable(text), highlight=False)


def _state_and_seconds(chain: ConfigSelectorChain[Any, Any], inv: Invocation[Any, Any]) -> tuple[str, float]:
    """Return the state and the duration of a call's stored search; an empty state without one."""
    progress = chain.store.progress(inv.key)
    entry = None if chain.persistent is None else chain.persistent.load(inv.key)
    seconds = dict(entry.measured or {}).get("seconds") if entry is not None else None
    return ("" if progress is None else progress.state), seconds if isinstance(seconds, int | float) else 0.0


def _is_undecided(chain: ConfigSelectorChain[Any, Any], inv: Invocation[Any, Any]) -> bool:
    return _state_and_seconds(chain, inv)[0] == SearchState.UNDECIDED


def _changed(chain: ConfigSelectorChain[Any, Any], inv: Invocation[Any, Any]) -> str:
    """Return the change of the kernel since a call was tuned; empty if no change is known."""
    store, kernel = chain.persistent, kernel_of(inv)
    if store is None:
        return ""
    note_config_types(inv, kernel)
    for config, entry in store.found(inv.key, kernel.config_type):
        if why_not_run(kernel, inv, config):  # the call is not tuned
            return ""
        of_space = [each for each in differences(entry, space_digest(kernel, inv)) if each.field == "space"]
        return "".join(map(str, of_space or heuristic_since(kernel, inv, config, entry)))
    return ""


def _how_tuned(chain: ConfigSelectorChain[Any, Any], inv: Invocation[Any, Any], *, is_done: bool) -> str:
    """Return the tuning state of a call: that of its search, `saved` (entry without a search), `stale` or `no`.

    A finished search is not enough: its entry may have been removed, or the call may share its configuration with other
    calls now, so that all of them must be tuned together.
    """
    actions = [action for _, action in _saved(chain, inv)]
    if actions and "use" not in actions:
        return "stale"
    progress = chain.store.progress(inv.key)
    if progress is None:
        return "saved" if actions else "no"
    if progress.state.is_finished and not actions:
        return "no (entry removed)"
    return "no (tuned alone)" if progress.state.is_finished and not is_done else progress.in_words


def _saved(chain: ConfigSelectorChain[Any, Any], inv: Invocation[Any, Any]) -> Iterator[tuple[StoredEntry, Action]]:
    """Yield the readable entries of a call, each with its action under the stale policy, or `refuse` if it fails.

    An entry that could not be written is none: it ends with this process.
    """
    store, kernel = chain.persistent, kernel_of(inv)
    if store is not None:
        note_config_types(inv, kernel)
        for config, entry in store.on_disk().found(inv.key, kernel.config_type):
            fails = why_not_run(kernel, inv, config)
            yield entry, "refuse" if fails else standing(chain.policy.stale, entry, kernel, inv)[0]


def _sets(found: Found) -> list[Sequence[SharedCall]]:
    """Return the calls in sets that share a configuration; by default one call per set, forward calls first."""
    if found.sets:
        return list(found.sets)
    return [[SharedCall(inv=inv)] for inv in sorted(found.calls, key=lambda inv: inv.direction != "fwd")]


def _all_known(chain: ConfigSelectorChain[Any, Any], calls: Sequence[SharedCall]) -> bool:
    """Return whether a set of calls is tuned: together, and with the same weights."""
    if not all(_known(chain, call.inv) for call in calls):
        return False
    # Entries tuned alone or with other weights may differ.
    return len(calls) == 1 or all(are_alike(_weights_of(chain, call.inv), shares_of(calls)) for call in calls)


def _weights_of(chain: ConfigSelectorChain[Any, Any], inv: Invocation[Any, Any]) -> dict[str, float]:
    """Return the weights of the calls tuned together, by call key, as stored in the entry."""
    entry = None if chain.persistent is None else chain.persistent.load(inv.key)
    weights: dict[str, float] = {}
    for case in dict(entry.measured or {}).get("cases") or () if entry is not None else ():
        key, weight = (case.get("call"), case.get("weight")) if isinstance(case, dict) else ("", 0.0)
        if isinstance(key, str) and isinstance(weight, int | float):
            weights[key] = weights.get(key, 0.0) + weight
    return weights


def _has_entry(chain: ConfigSelectorChain[Any, Any], inv: Invocation[Any, Any]) -> bool:
    """Return whether a call has a saved configuration that it uses."""
    return any(action == "use" for _, action in _saved(chain, inv))


def _known(chain: ConfigSelectorChain[Any, Any], inv: Invocation[Any, Any]) -> bool:
    """Return whether the search of a call is complete; a partial search continues."""
    entry = next((entry for entry, action in _saved(chain, inv) if action == "use"), None)
    if entry is None:
        return False
    progress = SearchProgress.stored_in(entry.measured)
    return progress is None or progress.state.is_finished


def _tune(
    options: TuneOptions,
    chain: ConfigSelectorChain[Any, Any],
    todo: Sequence[Sequence[SharedCall]],
    found: Found,
    console: Console,
) -> tuple[AutotuningResult, int]:
    """Return the results, and the number of started sets of calls."""
    # Finished searches, printed if Ctrl-C ends the others.
    done: list[AutotuneData] = []
    told: list[str] = []  # advice already given
    budget = options.time / max(len(todo), 1) if options.time is not None else chain.policy.budget_s

    def note(event: Event) -> None:
        shown.hear(event)
        if isinstance(event, WorkerRestarted):
            console.print(
                f"{event.key.op}: {event.reason}; a new worker continues{_advice(event, told)}", highlight=False
            )
        elif isinstance(event, SearchFinished):
            done.append(event.data)

    try:
        with (
            bars(console, [calls[0].inv.op_id for calls in todo], "tuning", budget=budget) as shown,
            on_event(note),
            contextlib.redirect_stdout(sys.stderr),
            announcing_the_stop(console),
        ):
            more: dict[str, Any] = {"progress": shown.step, "compiled": found.compiled, "resume": not options.force}
            if not todo:
                return AutotuningResult(found.device, ()), 0
            if options.time is not None:
                return _tune_in_time(options.time, chain, todo, more)
            return tune_together(chain, todo, **more), len(todo)
    except KeyboardInterrupt:
        if done:
            result = AutotuningResult(found.device, (), tuple(done))
            click.echo(report.searches(result, verbose=options.verbose, times=found.times), err=True)
        raise


def _tune_in_time(
    seconds: float, chain: ConfigSelectorChain[Any, Any], todo: Sequence[Sequence[SharedCall]], more: dict[str, Any]
) -> tuple[AutotuningResult, int]:
    """Tune as many sets as fit into a time for all, at least one; each gets a share of what is left, by its weight."""
    end, weights = time.monotonic() + seconds, list(map(_weight, todo))
    results: list[AutotuningResult] = []
    for number, calls in enumerate(todo):
        left = end - time.monotonic()
        if results and left < _LEAST_SHARE:
            break
        with policy_override(budget_s=max(left * weights[number] / sum(weights[number:]), _LEAST_SHARE)):
            results.append(tune_together(chain, [calls], **more))
    # Not `result or ...`: a result whose searches are not finished has no configurations, and is false.
    return functools.reduce(operator.or_, results), len(results)


def _weight(calls: Sequence[SharedCall]) -> float:
    """Return the weight of a set of calls in a time for all: less if nothing can be compared with the heuristic."""
    inv, kernel = calls[0].inv.representative, kernel_of(calls[0].inv)
    try:
        some = {*map(config_id, [*heuristic_of(inv, kernel), *itertools.islice(candidates_of(kernel, inv), 2)])}
    except EjkernelError:  # the search raises it, too
        return 1.0
    return 1.0 if len(some) > 1 else _WEIGHT_ALONE


def _advice(event: WorkerRestarted, told: list[str]) -> str:
    """Return advice for a worker that was ended after a silence; only once, since all have the same reason."""
    if told or not event.reason.startswith(("no sign of life", "deadline exceeded")):
        return ""
    told.append(event.reason)
    return ". On a busy machine a healthy worker may be this slow; a larger --budget gives it more time"
