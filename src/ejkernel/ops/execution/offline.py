# SPDX-License-Identifier: Apache-2.0
"""Offline tuning: of one call, of recorded calls, of a lowered program, or of all calls in a function."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.store.saving import saved_before
from ejkernel.ops.autotuner.tasks.asked import Inputs, asked_calls
from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.autotuner.trials.events import Counter, on_event
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.autotuner.trials.result import AutotuningResult, Entry
from ejkernel.ops.autotuner.tuner import Autotuner, process_session
from ejkernel.ops.config.policy import AutotunePolicy, effective_policy
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.context import numerics
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, kernel_of, unbound
from ejkernel.ops.core.types import Cfg, ConfigKey
from ejkernel.ops.errors import ArgumentError, OfflineWarning, TuningError, TuningWarning
from ejkernel.ops.execution.discovery import ProgramCalls, calls_in_text, discover_for, local_calls
from ejkernel.ops.execution.executor import Executor, default_executor
from ejkernel.ops.registry import Recorded, get_invocations
from ejkernel.ops.utils.error_text import where
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.formatting import arguments
from ejkernel.ops.utils.messages.names import BUDGETS, check_argument, frames_hidden, is_count, raise_if_misfit
from ejkernel.ops.utils.messages.warn import say_on_terminal, warn
from ejkernel.ops.utils.meta import SPLIT, text_of_program

if TYPE_CHECKING:
    from ejkernel.ops.autotuner.compile.bundles import BundledCall
    from ejkernel.ops.autotuner.compile.prepared import PreparedCalls
    from ejkernel.ops.execution.targeted import Preparation

_Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
_MOST_UNDER_WAY = 256  # searches that an executor has at a time; each needs a waiting thread


@frames_hidden
def autotune_lowered(selector: ConfigSelectorChain[Any, Any] | Executor[Any, Any], lowered: object) -> AutotuningResult:
    """Tune every distinct call of a lowered program, forward and backward, on this machine.

    The program's labels name its calls. Lower it with `EJKERNEL_OPS_RECORD=1` or inside `with recording():`, which
    records the calls. If it was lowered with `EJKERNEL_OPS_STAMP=json`, the text is enough, in a process that has
    created the same kernels.

    If calls split themselves over devices, their shards are tuned, on one device. The text does not contain the
    shards, so pass the lowered program itself.

    The configurations are saved in the chain's memory and persistent cache. `with result:` applies them to functions
    that are already compiled.

    >>> lowered = jax.jit(my_model).lower(example_input)  # doctest: +SKIP
    >>> result = autotune_lowered(selector, lowered)  # doctest: +SKIP

    Args:
        selector: The chain that tunes and saves, or an executor with such a chain.
        lowered: The result of `jax.jit(f).lower(...)`, or a program's text.
    """
    program = calls_in_text(text_of_program(lowered), recorded=get_invocations(device_fingerprint()))
    if program.bare:
        warn(_why_bare(program), OfflineWarning)
    for reason in program.why_refused():
        warn(f"not tuned, because it cannot be rebuilt: {reason}", OfflineWarning)
    local = local_calls(lowered)
    if isinstance(lowered, str) and SPLIT in lowered:
        text = (
            f"{lowered.count(SPLIT)} calls of the program split themselves over devices, but its text does not contain "
            "the shards; pass the lowered program itself to tune them."
        )
        warn(text, OfflineWarning)
    return tune_invocations(_chain(selector), {inv.key: inv for inv in (*program.calls, *local)}.values())


def _why_bare(program: ProgramCalls) -> str:
    """Return the warning about labels without recorded calls on this device."""
    names = {label.rpartition("#")[2] for label in program.bare}
    elsewhere = sorted(
        device
        for device, recorded in get_invocations().items()
        if any(f"{op}:{key}" in names for op, calls in recorded.items() for key in calls)
    )
    # If the program was lowered for another platform, its calls were recorded for that platform.
    where = f" for {device_fingerprint()}, only for {', '.join(elsewhere)}" if elsewhere else ""
    how = (
        "lower the program for this device, or tune it on one of the recorded devices."
        if elsewhere
        else "lower the program with EJKERNEL_OPS_RECORD=1 or inside `with ejkernel.ops.recording():`, or with "
        "EJKERNEL_OPS_STAMP=json."
    )
    return (
        f"{len(program.bare)} of {program.labels} labelled calls were not recorded{where}, so they are not tuned "
        f"({', '.join(program.bare[:3])}{', ...' if len(program.bare) > 3 else ''}); {how}"
    )


@frames_hidden
def autotune_recorded(
    invocations: Mapping[str, Any] | None = None,
    selector: ConfigSelectorChain[Any, Any] | Executor[Any, Any] | None = None,
) -> AutotuningResult:
    """Tune calls recorded on this device.

    Args:
        invocations: The result of `get_invocations()`, or its value for this device; by default all recorded calls.
        selector: The chain that tunes and saves, or an executor with such a chain; the default executor if omitted.
    """
    given = get_invocations() if invocations is None else invocations
    check_argument(isinstance(given, Mapping), "invocations", "the result of get_invocations()", given)
    device = device_fingerprint()
    if device in given:
        operations = given[device]
    elif any(name.partition(":")[0] in ("cpu", "gpu", "tpu") and ":" in name for name in given):
        text = f"no calls were recorded on {device!r}, only on {', '.join(sorted(given))}; nothing is tuned."
        warn(text, OfflineWarning)
        operations = {}
    else:
        operations = given
    found = []
    for op, calls in operations.items():
        check_argument(isinstance(calls, Mapping), f"invocations[{op!r}]", "a mapping from keys to calls", calls)
        found += [_invocation(recorded, f"invocations[{op!r}][{key!r}]") for key, recorded in calls.items()]
    return tune_invocations(_chain(selector), found)


def _invocation(recorded: Any, what: str) -> Invocation[Any, Any]:
    if isinstance(recorded, Recorded):
        return recorded.invocation
    is_call = isinstance(recorded, tuple) and len(recorded) == 3 and isinstance(recorded[0], Kernel)
    check_argument(is_call, what, "(kernel, args, kwargs)", recorded)
    kernel, args, kwargs = recorded
    return Invocation(kernel=kernel, args=args, kwargs=kwargs)


def tune_invocations(
    selector: ConfigSelectorChain[Any, Any], invocations: Iterable[Invocation[Any, Any]]
) -> AutotuningResult:
    """Tune each call, forwards first, and save the configurations in the chain.

    A call without a measurable candidate gives a `TuningWarning` and no entry in the result. If a search saves nothing,
    e.g. because it ended before the winner was confirmed, the result has the configuration saved before, if any. Ctrl-C
    ends the current search, keeps its times for the next search, and raises the interrupt.

    Args:
        selector: The chain that tunes and saves.
        invocations: The calls.
    """
    calls = sorted(invocations, key=lambda inv: inv.direction != "fwd")
    return tune_together(selector, [[SharedCall(inv=inv)] for inv in calls])


def tune_together(
    selector: ConfigSelectorChain[Any, Any],
    sets: Sequence[Sequence[SharedCall]],
    progress: Callable[[Invocation[Any, Any], int, int], None] | None = None,
    *,
    compiled: Mapping[ConfigKey, BundledCall] | None = None,
    resume: bool = True,
) -> AutotuningResult:
    """Tune sets of calls; each set gets the configuration with the smallest weighted geometric mean of times.

    A set without a measurable candidate gives a `TuningWarning` and no entries in the result. Ctrl-C works as in
    `tune_invocations`.

    Args:
        selector: The chain that tunes, and saves the configuration for each call.
        sets: The calls; each set has calls of one kernel.
        progress: Called with the first call of a set, the number of its compiled and checked candidates, and the
            number of all.
        compiled: Candidates of some calls that were compiled earlier.
        resume: Whether to continue partial searches rather than measure everything again.
    """
    searched = []
    policy = effective_policy(selector)

    def search(calls: Sequence[SharedCall]) -> AutotuneData:
        if progress is None:
            inv, number = calls[0].inv, next(n for n, each in enumerate(sets, 1) if each is calls)
            say_on_terminal(f"tuning {inv.op_id} {arguments(inv.description)} ({number} of {len(sets)})")
        return _tune_one(selector, calls, compiled or {}, resume=resume)

    with process_session(policy), _progress_reported([calls[0].inv for calls in sets], progress):
        for calls, data in zip(sets, _searches(search, sets, policy), strict=True):
            if isinstance(data, TuningError):
                warn(str(data), TuningWarning)
                continue
            if isinstance(data, BaseException):
                raise data
            searched.append((calls, data))
    return _result(selector, searched, sets[0][0].inv.device_fingerprint if sets else device_fingerprint())


@contextlib.contextmanager
def _progress_reported(
    calls: Sequence[Invocation[Any, Any]], progress: Callable[[Invocation[Any, Any], int, int], None] | None
) -> Iterator[None]:
    """Inside the `with` block, report the number of finished candidates of each call."""
    if progress is None:
        yield
        return
    by_key = {inv.key: inv for inv in calls}
    with on_event(Counter(lambda key, done, total: progress(by_key[key], done, total), by_key)):
        yield


def _searches(
    search: Callable[[Sequence[SharedCall]], AutotuneData],
    sets: Sequence[Sequence[SharedCall]],
    policy: AutotunePolicy,
) -> Iterator[AutotuneData | BaseException]:
    """Yield the result or error for each set, in order; several devices or an executor search in parallel."""
    if policy.executor is not None and len(sets) > 1:
        from ejkernel.ops.autotuner.process.devices import in_parallel  # imports multiprocessing

        yield from in_parallel(search, sets, most=_MOST_UNDER_WAY)
        return
    if policy.isolate and policy.devices > 1 and len(sets) > 1:
        from ejkernel.ops.autotuner.process.devices import spread  # imports multiprocessing

        yield from spread(search, sets, devices=policy.devices, fingerprint=sets[0][0].inv.device_fingerprint)
        return
    for calls in sets:
        try:
            yield search(calls)
        except TuningError as error:
            yield error


def _tune_one(
    selector: ConfigSelectorChain[Any, Any],
    calls: Sequence[SharedCall],
    compiled: Mapping[ConfigKey, BundledCall],
    *,
    resume: bool,
) -> AutotuneData:
    first, *others = calls
    inv, policy = first.inv, effective_policy(selector)
    more: dict[str, Any] = {} if inv.key not in compiled else {"compiled": compiled[inv.key]}
    if others:
        more |= {"weight": first.weight, "others": [_with_programs(other, compiled) for other in others]}
    with numerics(inv.numerics):  # the call's settings, which may differ from the current ones
        data: AutotuneData = selector.search(inv, kernel_of(inv), policy=policy, resume=resume, **more)
    return data


def _with_programs(call: SharedCall, compiled: Mapping[ConfigKey, BundledCall]) -> SharedCall:
    known = compiled.get(call.inv.key)
    if known is None:
        return call
    return dataclasses.replace(call, programs=known.programs, reference=known.reference)


@overload
def autotune(
    function: Kernel[Cfg, Any] | Callable[..., Any],
    /,
    *args: Any,
    target: str | Target,
    estimate: bool = False,
    output: str | PathLike[str] | None = None,
    configs: Collection[Cfg] | None = None,
    calls: Sequence[Any] | None = None,
    **kwargs: Any,
) -> PreparedCalls: ...
@overload
def autotune(
    function: Kernel[Cfg, Any],
    /,
    *args: Any,
    configs: Collection[Cfg] | None = None,
    inputs: Inputs = None,
    calls: Sequence[Any] | None = None,
    weights: Sequence[float] | None = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    **kwargs: Any,
) -> Cfg: ...
@overload
def autotune(
    function: Callable[..., Any],
    /,
    *args: Any,
    configs: None = None,
    inputs: None = None,
    calls: None = None,
    weights: None = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    **kwargs: Any,
) -> AutotuningResult: ...
@frames_hidden
def autotune(
    function: Any,
    /,
    *args: Any,
    configs: Collection[object] | None = None,
    inputs: Inputs = None,
    calls: Sequence[Any] | None = None,
    weights: Sequence[float] | None = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    **kwargs: Any,
) -> Any:
    """Tune one call of a kernel, several of its calls together, or every call in a function.

    Calls that are already tuned are measured again, unlike with `ejkernel tune`. A saved configuration stays unless the
    search measures it too and is not undecided.

    Args:
        function: A `Kernel`, to tune its call with these arguments; or any other callable, to tune all kernel calls in
            it, forward and backward.
        *args: Arguments of the call; for a function they may be abstract.
        target: The name of another device, e.g. `"tpu_v6e"`; nothing is measured. Another value is the function's.
        estimate: With `target`, a TPU: estimate the candidates by the simulator of its compiler, as
            `ejkernel tune --estimate` does, and store the estimates in the cache folder.
        output: With `target`: compile the candidates, as `ejkernel tune --compile-only` does, and write them to this
            folder, which must be new or empty. `ejkernel tune --from` measures them on a machine with the device.
        configs: Candidates for a kernel, a list or a `ConfigSpace`; by default its `config_space`. A warning names
            those of a list that fail, and why.
        inputs: Inputs for measuring and checking a kernel. By default, arrays with the given shapes and dtypes: from
            the kernel's `example_inputs`, or else normal numbers, zeros and ones. `True`: the given arrays. A sequence:
            these positional arguments. A function: called with a `numpy.random.Generator` for every new set, it returns
            the positional arguments, or `(args, kwargs)`; the winner is confirmed on a second set.
        calls: Calls of a kernel that share one configuration, instead of `args`: the configuration with the smallest
            geometric mean of times. Each call is a tuple of positional arguments, or `(args, kwargs)`; `inputs` may be
            `True`.
        weights: Weight of each of `calls` in the mean; 1 by default.
        num_warmup: Minimum number of calls of each candidate before its first sample.
        num_iters: Number of samples of each candidate that early stopping does not drop.
        **kwargs: Keyword arguments of the call, or defaults for each of `calls`.

    Returns:
        For a kernel, its best configuration, or the saved one if the search does not replace it; `autotune_kernel`
        returns the whole result. For a function, an `AutotuningResult`, which can be printed and used in `with`. The
        default executor saves the configurations in memory and in its persistent cache. With `target`, a
        `PreparedCalls`, which can be printed; no configuration changes.
    """
    function, args = unbound(function, args)
    options: dict[str, Any] = {"configs": configs, "inputs": inputs, "calls": calls, "weights": weights}
    if isinstance(kwargs.get("target"), str | Target):
        from ejkernel.ops.execution.targeted import Preparation  # few programs prepare for another device

        own = {name: kwargs.pop(name) for name in ("target", "estimate", "output") if name in kwargs}
        return _prepared(Preparation.asked(**own), function, args, kwargs, options)
    if not isinstance(function, Kernel):
        _check_counts(num_warmup, num_iters)
        return tune_invocations(_chain(None), _calls_in(function, (args, kwargs), options))
    found = autotune_kernel(function, *args, **options, num_warmup=num_warmup, num_iters=num_iters, **kwargs)
    return found.searches[0].in_force


@frames_hidden
def autotune_kernel(
    kernel: Kernel[Cfg, Any],
    /,
    *args: Any,
    configs: Collection[Cfg] | None = None,
    inputs: Inputs = None,
    calls: Sequence[Any] | None = None,
    weights: Sequence[float] | None = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    **kwargs: Any,
) -> AutotuningResult:
    """Tune one call of a kernel, or several together, like `autotune`, and return the whole result.

    `autotune` only returns the configuration. The result can be printed, and `with result:` also applies the
    configuration to compiled functions.

    Args:
        kernel: The kernel.
        *args, configs, inputs, calls, weights, num_warmup, num_iters, **kwargs: See `autotune`.
    """
    _check_counts(num_warmup, num_iters)
    chain = _chain(None)
    bound: tuple[Any, tuple[Any, ...]] = unbound(kernel, args)
    target, args = bound
    wanted = "a Kernel (for an operation of ejkernel.modules its class, e.g. FlashAttention())"
    check_argument(isinstance(target, Kernel), "kernel", wanted if callable(target) else "a Kernel", target)
    tuner = Autotuner(rounds=num_iters, warmup=num_warmup)
    first, *others = asked_calls(target, args, kwargs, (calls, weights), inputs)
    more: dict[str, Any] = {} if first.inputs is None else {"inputs": first.inputs}
    if others:
        more |= {"weight": first.weight, "others": others}
    policy = effective_policy(chain)
    say_on_terminal(f"tuning {target.op_id} {arguments(first.inv.description)}")
    data = chain.search(first.inv, target, tuner=tuner, candidates=configs, policy=policy, **more)
    return _result(chain, [([first, *others], data)], first.inv.device_fingerprint)


def _check_counts(num_warmup: int, num_iters: int) -> None:
    if not (is_count(num_iters, 1) and is_count(num_warmup, 0)):
        raise ArgumentError(f"num_iters must be positive and num_warmup >= 0, got {num_iters!r} and {num_warmup!r}.")


def _result(
    chain: ConfigSelectorChain[Any, Any], searched: Iterable[tuple[Sequence[SharedCall], AutotuneData]], device: str
) -> AutotuningResult:
    """Return the result of all searches, with an entry for each call that has a tuned configuration now."""
    entries, searches = [], []
    for calls, data in searched:
        for inv, found in [(calls[0].inv, data)] if len(calls) == 1 else ((o.inv, o) for o in data.of_each_call()):
            is_winner = not data.not_saved or data.is_only_here
            in_force = data if is_winner else saved_before(chain, kernel_of(inv), inv)
            if in_force is not None:
                entries.append(Entry(inv.op_id_v, inv.call_key, in_force.config))
            searches.append(found)
    return AutotuningResult(device, tuple(entries), tuple(searches), _place_of(chain, searches))


def _place_of(chain: ConfigSelectorChain[Any, Any], searches: Sequence[AutotuneData]) -> str:
    """Return the folder with these searches; empty if only the memory of this process has them."""
    store = chain.persistent if chain.persist_autotune else None
    is_on_disk = any(not search.is_only_here for search in searches)
    return str(store.path) if store is not None and store.path is not None and is_on_disk else ""


_FOR_KERNELS = {
    "configs": "the kernels in a function have their own candidates",
    "inputs": "the kernels in a function use their own example_inputs",
    "calls": "a function is tuned with its arguments",
    "weights": "a function is tuned with its arguments",
}


def _calls_in(
    function: Callable[..., Any], given: _Arguments, options: Mapping[str, object], platform: str | None = None
) -> list[Invocation[Any, Any]]:
    """Return the calls that a function makes; warn if there are none."""
    for name, value in options.items():
        if value is not None:
            raise ArgumentError(f"{name}= needs a Kernel; {_FOR_KERNELS[name]}.")
    wanted = "a kernel or a function, followed by its arguments: autotune(step, w, x)"
    check_argument(callable(function), "the first argument", wanted, function)
    try:
        found = discover_for(function, *given, platform=platform)
    except TypeError:
        raise_if_misfit(where(function), function, *given, BUDGETS)
        raise
    if not found:
        warn(f"{where(function)} made no call of an operation; there is nothing to tune.", OfflineWarning)
    return found


def _prepared(
    preparation: Preparation,
    function: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> PreparedCalls:
    """Estimate or compile the candidates of a kernel's calls, or of all calls in a function."""
    aim = preparation.aim
    with aim.entered():
        if isinstance(function, Kernel):
            if options["inputs"] is not None:
                raise ArgumentError("inputs= has no use with target=, since nothing is measured.")
            several = (options["calls"], options["weights"])
            sets = [asked_calls(function, args, kwargs, several, None, is_measured=False)]
        else:
            found = _calls_in(function, (args, kwargs), options, aim.platform)
            sets = [[SharedCall(inv=inv)] for inv in found]
        sets = [[dataclasses.replace(call, inv=call.inv.abstract()) for call in calls] for calls in sets]
    return preparation.run(sets, _chain(None).persistent, options["configs"])


def _chain(selector: ConfigSelectorChain[Any, Any] | Executor[Any, Any] | None) -> ConfigSelectorChain[Any, Any]:
    chooser: Any = default_executor() if selector is None else selector
    if isinstance(chooser, Executor):
        chooser = chooser.chooser
    if not isinstance(chooser, ConfigSelectorChain):
        raise ArgumentError(f"selector must be a ConfigSelectorChain or an executor with one, got {chooser!r}.")
    return chooser
