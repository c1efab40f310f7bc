# SPDX-License-Identifier: Apache-2.0
"""Find the kernel calls in a function without running it, or in the text of a lowered program."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax

from ejkernel import compat
from ejkernel.ops.config.policy import looking_only
from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.invocation import Invocation, invocation_of
from ejkernel.ops.core.primitive import Call, call_p, known_types
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ArgumentError, DescriptionError, EjkernelError
from ejkernel.ops.registry import recording
from ejkernel.ops.utils.error_text import error_text, value_text
from ejkernel.ops.utils.meta import is_scope
from ejkernel.ops.utils.values.payloads import labels_with_payloads
from ejkernel.ops.utils.values.signature import HasType, as_array, is_array

logger = logging.getLogger(__name__)

MAX_LABELS: Final = 10_000  # calls to rebuild from a text; programs have hundreds at most
_SHOWN: Final = 3


def discover(fn: Callable[..., Any], /, *args: object, **kwargs: object) -> list[Invocation[Any, Any]]:
    """Return the distinct calls of `fn(*args, **kwargs)`, forward and backward, in the order of lowering.

    The function does not run, measure or write anything, and calls without a configuration raise no error, whatever the
    policy. Arrays may be abstract (`jax.ShapeDtypeStruct`). Unless `fn` is already under `jax.jit`, arguments that are
    not arrays are static.

    Raises:
        ArgumentError: `fn` is not callable.
    """
    return discover_for(fn, args, kwargs)


def discover_for(
    fn: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object], *, platform: str | None = None
) -> list[Invocation[Any, Any]]:
    """Return the calls as `discover` does, for `fn` lowered for `platform` (`cpu`, `gpu` or `tpu`)."""
    return discover_counted(fn, args, kwargs, platform=platform)[0]


def discover_counted(
    fn: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object], *, platform: str | None = None
) -> tuple[list[Invocation[Any, Any]], dict[ConfigKey, int]]:
    """Return the calls as `discover_for` does, and their numbers.

    The numbers, by key, say how often one run makes a call, where the trace knows it; see `occurrences`.
    """
    if not callable(fn):
        raise ArgumentError(
            f"the first argument must be a kernel or a function, followed by its arguments, e.g. (step, w, x); got "
            f"{value_text(fn)}."
        )
    jitted, values, named = (fn, args, kwargs) if hasattr(fn, "trace") else of_arrays(fn, args, kwargs)
    # Recording is part of the key of JAX's caches, so functions compiled before are traced again, with their calls.
    with recording() as seen, looking_only():
        traced = jitted.trace(*values, **named)
        platforms = None if platform is None else compat.programs.lowering_names(platform)
        lowered = traced.lower() if platforms is None else traced.lower(lowering_platforms=platforms)
    # By key, because a program may contain equal calls.
    local = local_calls(lowered)
    calls = list({inv.key: inv for inv in (*seen, *local)}.values())
    return calls, numbers_of(traced, calls, is_split=bool(local))


def numbers_of(traced: object, calls: Sequence[Invocation[Any, Any]], *, is_split: bool) -> dict[ConfigKey, int]:
    """Return how often one run of a traced program makes each of these calls, by key, where known.

    Args:
        traced: The program.
        calls: Its calls.
        is_split: Whether some of them split themselves over a mesh; then calls inside gradient rules are not counted.
    """
    # Flax NNX wraps JAX's traced program, and a user's own `trace` may return something else.
    jaxpr = getattr(traced if hasattr(traced, "jaxpr") else getattr(traced, "traced", None), "jaxpr", None)
    if not calls or jaxpr is None:
        return {}
    names = {inv.key: (inv.op_id_v, inv.call_key) for inv in calls}
    found = _Counter(calls[0].platform, in_gradients=False).count(jaxpr)
    if not is_split and not found.keys() >= set(names.values()):
        found = _Counter(calls[0].platform, in_gradients=True).count(jaxpr)
    return {key: found[name] for key, name in names.items() if name in found}


def local_calls(lowered: object) -> list[Invocation[Any, Any]]:
    """Return the calls that each device makes for its shards, if calls of a lowered program split themselves.

    The lowered program does not contain these calls: XLA requests them during compilation, once it knows the
    shardings. This function runs only the first stage of XLA's partitioner, on a copy.
    """
    # A user's own `trace` may return something else than JAX's lowered program.
    if not hasattr(lowered, "compiler_ir"):
        return []
    return [
        inv
        for operation in compat.propagation.split_operations(lowered)
        for params, avals in operation.calls(call_p)
        for inv in _with_inner_calls(params["call"], avals, operation)
    ]


def _with_inner_calls(
    call: Call, avals: Sequence[HasType], operation: compat.propagation.SplitOperation
) -> Iterator[Invocation[Any, Any]]:
    """Yield a shard's call and the calls inside its kernel, for example in a gradient rule."""
    own = _invocation(call, avals, operation)
    yield own
    try:
        inner = compat.tracing.uses_of(call_p, _computation(call, avals, operation.platform))
    except NameError as error:  # it uses collectives over axes of a mesh outside its program
        logger.debug("%s: the calls inside its kernel are unknown: %s", own.op_id, error_text(error))
        return
    for params, types in inner:
        yield from _with_inner_calls(params["call"], types, operation)


def _computation(call: Call, avals: Sequence[HasType], platform: str) -> Any:
    """Return the jaxpr of a call under its configuration, on one device."""
    with call.settings.entered(), compat.partitioning.on_one_device(), looking_only():
        body = call.host().body_of(call, platform, avals, None)
        return jax.make_jaxpr(body.compute)(*(jax.ShapeDtypeStruct(like.shape, like.dtype) for like in avals))


def _invocation(
    call: Call, avals: Sequence[HasType], operation: compat.propagation.SplitOperation
) -> Invocation[Any, Any]:
    override = None if call.override is None else call.override.config
    with call.settings.entered():
        inv = invocation_of(call.node, avals, platform=operation.platform, override=override)
    return dataclasses.replace(inv, span=operation.span).abstract()


def of_arrays(
    fn: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return `fn` as a jitted function of only the arrays, and these arrays.

    Its results are the arrays among those of `fn`, and the arrays that `fn` stores in its arguments, e.g. in a Flax NNX
    model: XLA would leave out operations without a result.
    """
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    positions = [index for index, leaf in enumerate(leaves) if is_array(leaf)]

    def filled_in(*arrays: jax.Array) -> Any:
        filled = list(leaves)
        for index, array in zip(positions, arrays, strict=True):
            filled[index] = array
        given = jax.tree.unflatten(tree, filled)
        result = fn(*given[0], **given[1])
        first = result[0] if type(result) is tuple and result else None
        if inspect.isfunction(first) or (callable(first) and hasattr(first, "lower")):
            name = getattr(fn, "__name__", "fn")
            raise ArgumentError(
                f"{name} returns a function and its arguments, so it makes no call itself; pass these: "
                f"`step, args = {name}()`, then step, *args."
            )
        known = set(map(id, filled))
        stored = [leaf for leaf in jax.tree.leaves(given) if is_array(leaf) and id(leaf) not in known]
        return [*_results_of(result), *stored]

    return jax.jit(filled_in), [leaves[index] for index in positions], {}


def _results_of(returned: object) -> Iterator[Any]:
    """Yield the values that a program can return: arrays and numbers, also those in objects other than pytrees.

    A step of Equinox returns its model's functions, too.
    """
    for leaf in map(as_array, jax.tree.leaves(returned)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        try:
            jax.typeof(leaf)
        except (TypeError, OverflowError):
            yield from filter(is_array, jax.tree.leaves(dict(getattr(leaf, "__dict__", {}))))
        else:
            yield leaf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCalls:
    """The calls named by the labels of a text.

    Attributes:
        calls: Recorded or rebuilt calls, in order of first appearance.
        bare: Labels without a description of their call.
        refused: Labels with an unusable description, and the reasons.
    """

    calls: tuple[Invocation[Any, Any], ...]
    bare: tuple[str, ...]
    refused: Mapping[str, str]

    @property
    def labels(self) -> int:
        """Number of labels in the text."""
        return len(self.calls) + len(self.bare) + len(self.refused)

    def why_refused(self) -> list[str]:
        """Return one line for each reason, with its labels."""
        by_reason: dict[str, list[str]] = collections.defaultdict(list)
        for label, reason in self.refused.items():
            by_reason[reason].append(label)
        return [f"{listed(labels)}: {reason}" for reason, labels in by_reason.items()]


def calls_in_text(text: str, *, recorded: Mapping[str, Mapping[str, Any]] | None = None) -> ProgramCalls:
    """Return the distinct calls that the labels of a lowered program's text name.

    Recorded calls are used directly. Other calls are rebuilt from their labels if the program was lowered with
    `EJKERNEL_OPS_STAMP=json`. A text cannot import code, and can only name registered objects: see `rebuild`.

    Args:
        text: StableHLO or HLO; it need not be trusted.
        recorded: `get_invocations(device)`.
    """
    calls, bare, refused = [], [], {}
    # Skip labels of `@label`: they name functions, not kernel calls.
    for label in [label for label in labels_with_payloads(text) if not is_scope(label.op)]:
        known = (recorded or {}).get(label.op, {}).get(label.key)
        if known is not None:
            calls.append(known.invocation)
        elif label.problem:
            refused[label.text] = label.problem
        elif label.data is None:
            bare.append(label.text)
        elif len(calls) >= MAX_LABELS:
            refused[label.text] = f"the text has more than {MAX_LABELS} calls"
        else:
            try:
                calls.append(rebuild(label.data, key=label.key, op=label.op))
            except DescriptionError as error:
                refused[label.text] = str(error)
    return ProgramCalls(calls=tuple(calls), bare=tuple(bare), refused=refused)


def listed(labels: Sequence[str]) -> str:
    """Return the first labels, with the total number if it is larger."""
    return ", ".join(labels[:_SHOWN]) + (f", ... ({len(labels)} in all)" if len(labels) > _SHOWN else "")


Name = tuple[str, str]
"""Operation with its version, and key of a call on any device."""


class _Counter:
    """Counts how often one run of a traced program makes each call: in a `scan`, once for each step.

    A `while_loop` counts as one step, and a `cond` as the branch with the most calls, so the numbers are lower bounds.
    Calls inside a kernel count, too; `in_gradients`, gradient rules are traced again for the calls inside them. Calls
    that split themselves over a mesh do not count, because their shards have other keys.
    """

    def __init__(self, platform: str, *, in_gradients: bool) -> None:
        self._platform, self._in_gradients = platform, in_gradients
        self._calls: dict[Any, collections.Counter[Name]] = {}

    def count(self, jaxpr: Any) -> collections.Counter[Name]:
        """Return the number of each call in a jaxpr, with its inner ones."""
        found: collections.Counter[Name] = collections.Counter()
        for eqn in jaxpr.eqns:
            if eqn.primitive is call_p:
                found.update(self._made_by(eqn))
                continue
            inner = [self.count(one) for one in compat.tracing.jaxprs_in(eqn.params)]
            if eqn.primitive.name == "cond":
                inner = [collections.Counter({name: max(one[name] for one in inner) for name in set().union(*inner)})]
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for one in inner:
                found.update({name: times * number for name, number in one.items()})
        return found

    def _made_by(self, eqn: Any) -> collections.Counter[Name]:
        """Return the number of each call that an equation makes: its own, and those inside its kernel."""
        call, avals = eqn.params["call"], tuple(var.aval for var in eqn.invars)
        if (call, avals) not in self._calls:
            found: collections.Counter[Name] = collections.Counter()
            with call.settings.entered():
                try:
                    inv = invocation_of(call.node, avals, platform=self._platform)
                    found[inv.op_id_v, inv.call_key] += 1
                    found.update(self._inside(call, avals, inv))
                except EjkernelError as error:  # e.g. a call without a key
                    logger.debug("a call is not counted: %s", error_text(error))
            self._calls[call, avals] = found
        return self._calls[call, avals]

    def _inside(self, call: Call, avals: Sequence[HasType], inv: Invocation[Any, Any]) -> Mapping[Name, int]:
        if inv.direction == "fwd":
            known = known_types(call, avals)  # traced with the program
            return {} if known is None else self.count(known.jaxpr)
        if not self._in_gradients:
            return {}
        try:
            jaxpr = _computation(call, avals, self._platform)
        except Exception as error:  # noqa: BLE001 - the program was lowered, in a context that the rule may need
            logger.debug("%s: the calls inside are not counted: %s", inv.op_id, error_text(error))
            return {}
        return self.count(jaxpr)
