# SPDX-License-Identifier: Apache-2.0
"""Tuning apart from running: of one call, of what was recorded, of a lowered program, of a whole function."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import jax
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.trials.events import Counter, on_event
from ejkernel.ops.autotuner.trials.naming import array_names
from ejkernel.ops.autotuner.trials.outcome import AutotuneData
from ejkernel.ops.autotuner.trials.result import AutotuningResult, Entry
from ejkernel.ops.autotuner.tuner import Autotuner, process_session
from ejkernel.ops.config.policy import AutotunePolicy, effective_policy
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.callspec import take_apart
from ejkernel.ops.core.examples import GivenInputs
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, overrides, prepared, unbound
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import ArgumentError, OfflineWarning, TuningError, TuningWarning
from ejkernel.ops.execution.discovery import discover, local_calls
from ejkernel.ops.execution.executor import Executor, default_executor
from ejkernel.ops.execution.program_text import calls_in_text
from ejkernel.ops.registry import Recorded, get_invocations
from ejkernel.ops.utils.error_text import value_text
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.meta import SPLIT
from ejkernel.ops.utils.validation import check_argument, is_count

if TYPE_CHECKING:
    from ejkernel.ops.autotuner.compile.bundles import BundledCall

Inputs = bool | Sequence[Any] | Callable[[np.random.Generator], Any] | None


def autotune_lowered(selector: ConfigSelectorChain[Any, Any] | Executor[Any, Any], lowered: object) -> AutotuningResult:
    """Tune every distinct call of a lowered program, forward and backward, on this machine.

    The program's labels name its calls, and what was recorded when it was lowered says what they are; lower it with
    `EJKERNEL_OPS_RECORD=1` or inside `with recording():`. Of a program that was lowered with
    `EJKERNEL_OPS_STAMP=json` the text is enough, in a process that has made the same kernels.

    Of a program whose calls split themselves over devices the parts are tuned, on one device. Its text does not have
    them: pass the lowered program itself.

    The configurations are put into the chain's memory and persistent cache; `with result:` applies them to functions
    that are already compiled.

    >>> lowered = jax.jit(my_model).lower(example_input)  # doctest: +SKIP
    >>> result = autotune_lowered(selector, lowered)  # doctest: +SKIP

    Args:
        selector: The chain whose tuner measures, and which remembers; an executor stands for its own.
        lowered: What `jax.jit(f).lower(...)` returns, or a program's text.
    """
    check_argument(
        isinstance(lowered, str) or hasattr(lowered, "as_text"), "lowered", "a lowered program, or its text", lowered
    )
    program = calls_in_text(compat.lowered_text(lowered), recorded=get_invocations(device_fingerprint()))
    if program.bare:
        text = (
            f"{len(program.bare)} of {program.labels} labelled calls were not recorded, and are not tuned "
            f"({', '.join(program.bare[:3])}{', ...' if len(program.bare) > 3 else ''}); lower the program with "
            "EJKERNEL_OPS_RECORD=1 or inside `with ejkernel.ops.recording():`, or with EJKERNEL_OPS_STAMP=json."
        )
        warnings.warn(text, OfflineWarning, stacklevel=2)
    for reason in program.why_refused():
        warnings.warn(f"not tuned, because it cannot be rebuilt: {reason}", OfflineWarning, stacklevel=2)
    local = local_calls(lowered)
    if isinstance(lowered, str) and SPLIT in lowered:
        text = (
            f"{lowered.count(SPLIT)} calls of the program split themselves over devices, and a text does not say how; "
            "pass the lowered program itself to have each device's part tuned."
        )
        warnings.warn(text, OfflineWarning, stacklevel=2)
    return tune_invocations(_chain(selector), {inv.key: inv for inv in (*program.calls, *local)}.values())


def autotune_recorded(
    invocations: Mapping[str, Any] | None = None,
    selector: ConfigSelectorChain[Any, Any] | Executor[Any, Any] | None = None,
) -> AutotuningResult:
    """Tune calls that were recorded on this device.

    Args:
        invocations: What `get_invocations()` returns, or its part for this device; all of it by default.
        selector: The chain whose tuner measures, and which remembers; the default executor's if left out.
    """
    given = get_invocations() if invocations is None else invocations
    check_argument(isinstance(given, Mapping), "invocations", "what get_invocations() returns", given)
    device = device_fingerprint()
    if device in given:
        operations = given[device]
    elif any(name.partition(":")[0] in ("cpu", "gpu", "tpu") and ":" in name for name in given):
        text = f"nothing was recorded on {device!r}, only on {', '.join(sorted(given))}; nothing is tuned."
        warnings.warn(text, OfflineWarning, stacklevel=2)
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
    selector: ConfigSelectorChain[Any, Any],
    invocations: Iterable[Invocation[Any, Any]],
    progress: Callable[[Invocation[Any, Any], int, int], None] | None = None,
    *,
    compiled: Mapping[ConfigKey, BundledCall] | None = None,
) -> AutotuningResult:
    """Tune each call, forwards before what is derived of them, and let the chain remember the answers.

    A call of which no candidate can be measured is a `TuningWarning`, and has no entry in the result. Ctrl-C ends the
    search under way; the best so far is remembered, and then the interrupt is raised.

    Args:
        selector: Who tunes and remembers.
        invocations: The calls.
        progress: Called with the call, how many of its candidates are compiled and checked, and how many there are.
        compiled: The candidates of some of the calls, compiled before.
    """
    entries, searches = [], []
    calls = sorted(invocations, key=lambda inv: inv.direction != "fwd")
    policy = effective_policy(selector.policy, selector)

    def search(inv: Invocation[Any, Any]) -> AutotuneData:
        return _tune_one(selector, inv, (compiled or {}).get(inv.key))

    with process_session(policy), _counted(calls, progress):
        for inv, data in zip(calls, _searches(search, calls, policy), strict=True):
            if isinstance(data, TuningError):
                warnings.warn(str(data), TuningWarning, stacklevel=3)
                continue
            if isinstance(data, BaseException):
                raise data
            entries.append(Entry(inv.op_id_v, inv.call_key, data.config))
            searches.append(data)
    device = calls[0].device_fingerprint if calls else device_fingerprint()
    return AutotuningResult(device, tuple(entries), tuple(searches))


@contextlib.contextmanager
def _counted(
    calls: Sequence[Invocation[Any, Any]], progress: Callable[[Invocation[Any, Any], int, int], None] | None
) -> Iterator[None]:
    """Tell of each call how many of its candidates are done, inside the `with` block."""
    if progress is None:
        yield
        return
    by_key = {inv.key: inv for inv in calls}

    def tell(key: ConfigKey, done: int, total: int) -> None:
        if key in by_key:  # else it is of a search that a candidate has begun
            progress(by_key[key], done, total)

    with on_event(Counter(tell)):
        yield


def _searches(
    search: Callable[[Invocation[Any, Any]], AutotuneData],
    calls: Sequence[Invocation[Any, Any]],
    policy: AutotunePolicy,
) -> Iterator[AutotuneData | BaseException]:
    """Yield what comes out for each call, in order: one after the other, or of several devices side by side."""
    if policy.isolate and policy.devices > 1 and len(calls) > 1:
        from ejkernel.ops.autotuner.process.devices import spread  # imports multiprocessing

        yield from spread(search, calls, devices=policy.devices, fingerprint=calls[0].device_fingerprint)
        return
    for inv in calls:
        try:
            yield search(inv)
        except TuningError as error:
            yield error


def _tune_one(
    selector: ConfigSelectorChain[Any, Any],
    inv: Invocation[Cfg, Out],
    compiled: BundledCall | None,
) -> AutotuneData:
    policy = effective_policy(selector.policy, selector)
    more: dict[str, Any] = {} if compiled is None else {"compiled": compiled}
    with compat.numerics(inv.numerics):  # the call's, which may not be the ones in force here
        data: AutotuneData = selector.search(inv, inv.kernel, policy=policy, **more)
    return data


@overload
def autotune(
    target: Kernel[Any, Any],
    *args: Any,
    configs: Collection[Any] | None = None,
    inputs: Inputs = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    **kwargs: Any,
) -> Any: ...
@overload
def autotune(target: Callable[..., Any], *args: Any, **kwargs: Any) -> AutotuningResult: ...
def autotune(
    target: Any,
    *args: Any,
    configs: Collection[object] | None = None,
    inputs: Inputs = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    **kwargs: Any,
) -> Any:
    """Tune one call of a kernel, or every call in a function.

    Args:
        target: A `Kernel`: its call with these arguments is tuned, and the configuration is returned. Any other
            callable: the kernels that it calls, forward and backward, and an `AutotuningResult` is returned.
        *args: Arguments of the call; for a function they may be abstract.
        configs: Candidates for a kernel, a list or a `ConfigSpace`; its `config_space` by default.
        inputs: What a kernel is measured and checked with. By default not the arrays given, but others of their shapes
            and dtypes: those that its `example_inputs` makes, or else normal numbers, zeros and ones. `True`: the
            arrays given. A sequence of positional arguments: these. A function: it is called with a
            `numpy.random.Generator` for every new set, and returns the positional arguments, or `(args, kwargs)`; a
            winner is confirmed on a second set.
        num_warmup: At least this many calls of each candidate come before its first sample.
        num_iters: Samples of each candidate that stays in the race.
        **kwargs: Keyword arguments of the call.

    The default executor remembers what is found, in memory and in its persistent cache.
    """
    if not (is_count(num_iters, 1) and is_count(num_warmup, 0)):
        raise ArgumentError(f"num_iters must be positive and num_warmup >= 0, got {num_iters!r} and {num_warmup!r}.")
    chain = _chain(None)
    target, args = unbound(target, args)
    if not isinstance(target, Kernel):
        if configs is not None:
            raise ArgumentError("configs are for a Kernel; the kernels in a function have their own candidates.")
        if inputs is not None:
            raise ArgumentError("inputs are for a Kernel; the kernels in a function need example_inputs of their own.")
        found = discover(target, *args, **kwargs)
        if not found:
            warnings.warn(f"{target!r} calls no kernel; there is nothing to tune.", OfflineWarning, stacklevel=2)
        return tune_invocations(chain, found)
    prepared_args, prepared_kwargs = prepared(target, args, kwargs)
    if "cfg" in prepared_kwargs:
        raise ArgumentError(
            f"{target.op_id}: the call says its whole configuration, {prepared_kwargs['cfg']!r}, so nothing is left to "
            "tune; leave out what is to be found."
        )
    inv = Invocation(kernel=target, args=prepared_args, kwargs=prepared_kwargs)
    given = _given_inputs(inputs, args, kwargs)
    if given is None:
        _warn_of_made_inputs(inv)
    tuner = Autotuner(rounds=num_iters, warmup=num_warmup)
    policy = effective_policy(chain.policy, chain)
    more = {} if given is None else {"inputs": given}
    tuned = chain.search(inv, target, tuner=tuner, candidates=configs, policy=policy, **more)
    return tuned.config


def _given_inputs(inputs: Inputs, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GivenInputs | None:
    if inputs is None or inputs is False:
        return None
    source = args if inputs is True else inputs
    if not (callable(source) or isinstance(source, tuple | list)):
        raise ArgumentError(
            f"inputs must be True for the arrays given, a tuple of arguments or a function, got {value_text(inputs)}."
        )
    abstract = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if inputs is True and abstract:
        raise ArgumentError(f"inputs=True needs arrays to measure with, got {abstract[0]}; pass arrays, or a function.")
    return GivenInputs(source, kwargs)


def _warn_of_made_inputs(inv: Invocation[Any, Any]) -> None:
    """Warn where what is measured is not what was given, and that may matter: of integers zeros and ones are made."""
    kernel = inv.node.spec.kernel
    spec, arrays = take_apart(kernel, inv.args, dict(inv.kwargs))
    whole = [
        f"{name} ({array.dtype})"
        for name, array in zip(array_names(spec), arrays, strict=True)
        if isinstance(array, np.ndarray | jax.Array) and np.issubdtype(array.dtype, np.integer)
    ]
    if whole and not overrides(kernel, "example_inputs"):
        text = (
            f"{kernel.op_id} is measured on inputs made from shapes and dtypes, not on the arrays given; "
            f"{', '.join(whole)} will be zeros and ones. Pass inputs=True to measure on the arrays given, or give the "
            "kernel example_inputs."
        )
        warnings.warn(text, TuningWarning, stacklevel=3)


def _chain(selector: ConfigSelectorChain[Any, Any] | Executor[Any, Any] | None) -> ConfigSelectorChain[Any, Any]:
    chooser: Any = default_executor() if selector is None else selector
    if isinstance(chooser, Executor):
        chooser = chooser.chooser
    if not isinstance(chooser, ConfigSelectorChain):
        raise ArgumentError(f"selector must be a ConfigSelectorChain, which tunes and remembers, got {chooser!r}.")
    return chooser
