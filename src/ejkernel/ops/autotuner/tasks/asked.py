# SPDX-License-Identifier: Apache-2.0
"""Checks the calls passed to `autotune`: arguments, weights and inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.core.callspec import array_names, is_call, take_apart
from ejkernel.ops.core.examples import GivenInputs, makes_inputs
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, prepared
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ArgumentError, TuningWarning
from ejkernel.ops.utils.error_text import value_text
from ejkernel.ops.utils.messages.warn import warn

Inputs = bool | Sequence[Any] | Callable[[np.random.Generator], Any] | None

_MOST_WEIGHT = 1e100  # keeps sums of weights finite


def asked_calls(
    kernel: Kernel[Any, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    several: tuple[Sequence[Any] | None, Sequence[float] | None],
    inputs: Inputs,
    *,
    is_measured: bool = True,
) -> list[SharedCall]:
    """Return the calls that `autotune` tunes together; at least one. Warn of generated inputs if it measures them."""
    calls, weights = several
    if calls is None:
        if weights is not None:
            raise ArgumentError(f"weights need calls, which are not given; got {weights!r}.")
        return [_asked_call(kernel, args, kwargs, inputs, is_measured)]
    if args:
        raise ArgumentError(f"calls replace the arguments of a single call; got both calls and {len(args)} arguments.")
    if not isinstance(calls, list | tuple) or not calls:
        raise ArgumentError(f"calls must be a list of tuples of arguments, one for each call, got {value_text(calls)}.")
    if inputs is not None and not isinstance(inputs, bool):
        raise ArgumentError("inputs must be True or left out if calls are given, since each call brings its arrays.")
    found = []
    for number, (call, weight) in enumerate(zip(calls, _weights(weights, len(calls)), strict=True)):
        whole = call if is_call(call) else (call, {})
        if not isinstance(whole[0], tuple | list):
            raise ArgumentError(
                f"calls[{number}] must be a tuple of arguments, or (args, kwargs), got {value_text(call)}."
            )
        one = _asked_call(kernel, tuple(whole[0]), {**kwargs, **whole[1]}, inputs, is_measured)
        found.append(dataclasses.replace(one, weight=weight))
    return merged_calls(found)


def _weights(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    if not isinstance(weights, list | tuple) or len(weights) != count:
        raise ArgumentError(f"weights must be a list of {count} numbers, one for each of calls, got {weights!r}.")
    return [checked_weight(weight, f"weights[{number}]") for number, weight in enumerate(weights)]


def checked_weight(weight: object, what: str) -> float:
    """Return the weight of a call as a float.

    Raises:
        ArgumentError: It is not a number in (0, 1e100]; the message calls it `what`.
    """
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= _MOST_WEIGHT:
        raise ArgumentError(f"{what} must be a positive number up to {_MOST_WEIGHT:g}, got {weight!r}.")
    return float(weight)


def merged_calls(calls: Iterable[SharedCall]) -> list[SharedCall]:
    """Merge calls with the same key, e.g. two shapes of one bucket, and add their weights."""
    merged: dict[ConfigKey, SharedCall] = {}
    for call in calls:
        before = merged.get(call.inv.key)
        weight = call.weight + (0.0 if before is None else before.weight)
        merged[call.inv.key] = dataclasses.replace(before or call, weight=weight)
    return list(merged.values())


def _asked_call(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: Inputs, is_measured: bool
) -> SharedCall:
    prepared_args, prepared_kwargs = prepared(kernel, args, kwargs)
    if "cfg" in prepared_kwargs:
        raise ArgumentError(
            f"{kernel.op_id}: the call fixes its whole configuration, {prepared_kwargs['cfg']!r}, so nothing is left "
            "to tune; leave out the parameters to tune."
        )
    inv: Invocation[Any, Any] = Invocation(kernel=kernel, args=prepared_args, kwargs=prepared_kwargs)
    given = _given_inputs(inputs, args, kwargs)
    if given is None and is_measured:
        _warn_of_made_inputs(inv)
    return SharedCall(inv=inv, inputs=given)


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
    """Warn if generated inputs may mislead: integer arguments become zeros and ones."""
    kernel = inv.node.spec.kernel
    spec, arrays = take_apart(kernel, inv.args, dict(inv.kwargs))
    whole = [
        f"{name} ({array.dtype})"
        for name, array in zip(array_names(spec), arrays, strict=True)
        if isinstance(array, np.ndarray | jax.Array) and jnp.issubdtype(array.dtype, np.integer)
    ]
    if whole and not makes_inputs(kernel):
        text = (
            f"{kernel.op_id} is measured on inputs made from shapes and dtypes, not on the arrays given; "
            f"{', '.join(whole)} will be zeros and ones. Pass inputs=True to measure on the arrays given, or give the "
            "kernel example_inputs."
        )
        warn(text, TuningWarning)
