# SPDX-License-Identifier: Apache-2.0
"""Buckets: calls of varying lengths that share one key, and the call that represents each bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ejkernel.ops.core.callspec import CallSpec, array_names, is_call, take_apart
from ejkernel.ops.errors import ArgumentError, KernelError
from ejkernel.ops.utils.messages.names import check_argument, is_count
from ejkernel.ops.utils.values.signature import abstract, is_array

StandIn = tuple[CallSpec, list[jax.ShapeDtypeStruct]]


def bucketed(array: object, *axes: int, least: int = 1) -> Any:
    """Return the type of `array` with the sizes of `axes` rounded up to powers of two; see `Kernel.bucket`.

    >>> import jax
    >>> bucketed(jax.ShapeDtypeStruct((3, 100, 64), "float32"), 1).shape
    (3, 128, 64)

    Args:
        array: An array, concrete or abstract; `None` is returned as is.
        axes: The axes to round.
        least: The smallest rounded size, a power of two.

    Raises:
        ArgumentError: `array` is not an array or lacks an axis, `least` is not a power of two, or a size to round is
            symbolic, as in a program exported with symbolic shapes.
    """
    if array is None:
        return None
    check_argument(is_array(array), "array", "an array or None", array)
    check_argument(is_count(least, 1) and not least & (least - 1), "least", "a power of two", least)
    like = abstract(array)
    shape = list(like.shape)
    for axis in axes:
        is_axis = -len(shape) <= axis < len(shape)
        check_argument(is_axis, "axes", f"axes of an array of shape {tuple(shape)}", axis)
        shape[axis] = _rounded(like.shape[axis], axis, least)
    return jax.ShapeDtypeStruct(tuple(shape), like.dtype, weak_type=like.weak_type)


def _rounded(size: Any, axis: int, least: int) -> int:
    if not isinstance(size, int):
        raise ArgumentError(
            f"axis {axis} has the symbolic size {size}, which cannot be rounded; export the program with concrete "
            "shapes, or give the kernel a bucket that leaves symbolic sizes unchanged."
        )
    return max(least, 1 << (size - 1).bit_length()) if size else 0


def checked_stand_in(inv: Any, answer: Any) -> StandIn | None:
    """Return the arguments that represent the bucket of an `Invocation`; `None` if they are its own.

    Args:
        inv: The invocation.
        answer: The result of the kernel's `bucket`.

    Raises:
        KernelError: The kernel's `bucket` does not return `(args, kwargs)`, or the arguments differ from the call's in
            more than the sizes of arrays.
    """
    op_id = inv.op_id
    if not is_call(answer):
        raise KernelError(f"{op_id}: bucket must return (args, kwargs), got {answer!r}.")
    own = _taken_apart(inv, inv.args, inv.kwargs)
    try:
        spec, types = _taken_apart(inv, *answer)
    except (TypeError, ArgumentError) as error:
        raise KernelError(f"{op_id}: bucket must return arguments of the kernel: {error}") from error
    if (spec, types) == own:
        return None
    if spec.array_structure != own[0].array_structure:
        raise KernelError(
            f"{op_id}: bucket must return arguments with the same structure as the call's, "
            f"{_shown(own)}; got {_shown((spec, types))}."
        )
    for name, mine, like in zip(array_names(spec), types, own[1], strict=True):
        if mine.dtype != like.dtype or len(mine.shape) != len(like.shape):
            raise KernelError(
                f"{op_id}: bucket may change only the sizes of arrays, but it changed {name} from "
                f"{like.dtype}{list(like.shape)} to {mine.dtype}{list(mine.shape)}."
            )
    # Weak types are part of the key, and a hook that constructs types by hand loses them: keep the call's.
    found = [
        jax.ShapeDtypeStruct(mine.shape, like.dtype, weak_type=like.weak_type)
        for mine, like in zip(types, own[1], strict=True)
    ]
    return spec, found


def _taken_apart(inv: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StandIn:
    spec, arrays = take_apart(inv.kernel, tuple(args), dict(kwargs), inv.method)
    return spec, [abstract(array) for array in arrays]


def not_idempotent(inv: Any, found: StandIn, again: StandIn) -> KernelError:
    """Return the error of a bucket that is itself represented by other arguments: tuning would use another key."""
    return KernelError(
        f"{inv.op_id}: bucket must be idempotent, but it returned {_shown(found)} for "
        f"{_shown(_taken_apart(inv, inv.args, inv.kwargs))}, and {_shown(again)} for its own result."
    )


def _shown(stand_in: StandIn) -> str:
    spec, types = stand_in
    args, kwargs = spec.join(types)
    return ", ".join([*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())])
